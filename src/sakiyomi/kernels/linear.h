// Rows x packed weights, for the few rows of a decoding pass: fp32, bf16, or rows rounded to 8 bits and weights to 8 or 4.
//
// A weight lies in blocks of 32 output channels side by side, so that a task reads one stream of memory and has two vectors of sums
// for each of up to 8 rows (`rows_at_once`). Not more: with more than 16 sums at once a Zen 4 core does half of its products (6 rows x 4 vectors 118 G
// products of bytes a second, 8 x 2 228). More rows than a group has go through a block in strips, and through its inputs in pieces, which
// stay in a near cache; sums wait in memory between two pieces, so that they are added in the order of few rows.

#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <type_traits>
#include <vector>

#if defined(BF16_PAIRS)
#include <cpuid.h>
#endif

#include "bytes.h"
#include "tiles.h"
#include "torch.h"
#include "vector.h"

namespace {

constexpr int64_t block_width = 32;   // output channels of a block

constexpr int64_t group_length = 32;  // weights of an output channel that share a scale in 4 bits
constexpr int64_t tile_length = 32;   // inputs whose codes lie together
constexpr int64_t pieces_of_work = 32;  // of a pass of many rows over a layer's weights, which threads share
constexpr int64_t strip_rows = 48;     // rows of a strip
// Of many rows so many bytes go through all blocks before the next ones do: they stay in the second-level cache meanwhile. It pays where
// all of them take some megabytes (900 rows of a prompt gain 4 to 9 %, 300 of 768 numbers lose 2 %).
constexpr int64_t bytes_in_panels = 2 << 20;
#if defined(__AVX512F__)
constexpr int64_t panel_bytes = 512 << 10;
#else
constexpr int64_t panel_bytes = 256 << 10;
#endif
#if defined(BF16_PAIRS)
constexpr int64_t piece_length = 256;  // inputs of a piece
#else
constexpr int64_t piece_length = 128;  // less where pieces are widened first
#endif

// Rows whose sums, a column of weights and the rows' own numbers fit into registers. With 16 registers of 32 bytes three rows have all
// but the weights there, and two are faster; but one row alone takes as long as two.
#if defined(__AVX512F__)
constexpr int rows_at_once = 8, rows_of_halves = 4, rows_of_bytes = 8;
#else
constexpr int rows_at_once = 2, rows_of_halves = 2, rows_of_bytes = 3;
#endif

// Calls f(number of rows as a constant, first row), leaving no row alone if possible.
template <int most, typename F>
inline void in_lines(int64_t rows, F f) {
  if constexpr (most > 2) return in_groups<most>(rows, f);
  int64_t row = 0;
  for (; rows - row == 2 || rows - row > 3; row += 2) f(std::integral_constant<int, 2>(), row);
  if (rows - row == 3) f(std::integral_constant<int, 3>(), row);
  if (rows - row == 1) f(std::integral_constant<int, 1>(), row);
}

// Rows that `in_lines` takes at once at most.
template <int most>
constexpr int line_rows = most > 2 ? most : 3;

// Weights are fetched so many bytes ahead, from so many rows on; with codes (4 bits, GGUF's formats) fewer rows suffice. What a processor
// fetches by itself ends with a page of 4096 bytes: Intel's are fastest one page ahead (.66 to .9 of the time with 1 and 2 rows), a Zen 3 with
// 1536 bytes (512, 1024 and 4096 gain less). A Zen 4 is only disturbed where rows have too little to compute meanwhile; a Zen 5 is not (4 rows
// take .96 of the time, one row .99).
#if defined(BF16_PAIRS) || !defined(__AVX2__)
constexpr int64_t bytes_ahead = 8192;
constexpr int least_rows = 6, least_rows_of_codes = 2;
#else
#if defined(__AVX512F__)
constexpr int64_t bytes_ahead = 4096;
#else
const int64_t bytes_ahead = (__builtin_cpu_init(), __builtin_cpu_is("intel")) ? 4096 : 1536;
#endif
constexpr int least_rows = 1, least_rows_of_codes = 1;
#endif
#if defined(BF16_PAIRS)
inline int processor_family() {
  unsigned a = 0, b, c, d;
  __get_cpuid(1, &a, &b, &c, &d);
  return (a >> 8 & 15) + (a >> 20 & 255);
}
const bool fewer_rows = processor_family() > 0x19;  // fetch, too
#else
constexpr bool fewer_rows = false;
#endif
// Where more than so many rows go through a piece, those after the first ones read nothing from memory: they fetch the next piece meanwhile,
// by a step of bytes at a time.
#if defined(BF16_PAIRS)
constexpr bool pieces_ahead = true;
constexpr int most_rows = rows_at_once;
#elif defined(__AVX2__) && !defined(__AVX512F__)
constexpr bool pieces_ahead = true;
constexpr int most_rows = 2;  // the others are those that fetch pieces
#else
constexpr bool pieces_ahead = false;
constexpr int most_rows = rows_at_once;
#endif

// Fetches what lies as far behind `from` as the next so many bytes.
ALWAYS_INLINE void fetch_ahead(const void* from, int64_t bytes) {
  for (int64_t line = 0; line < bytes; line += 64) fetch((const char*)from + bytes_ahead + line);
}

// The same for R rows, if so few fetch.
template <int R, int least>
ALWAYS_INLINE void fetch_for(const void* from, int64_t bytes) {
  if (R >= least || fewer_rows) fetch_ahead(from, bytes);
}

// What rows fetch at each step through weights: what lies behind these, what comes after them, or nothing.
template <int R>
struct Nearby {
  ALWAYS_INLINE void operator()(const void* weights) {
    if constexpr (R <= most_rows) fetch_for<R, least_rows>(weights, 128);
  }
};
struct Ahead {
  const char* next;
  int64_t step;
  ALWAYS_INLINE void operator()(const void*) { fetch(next), next += step; }
};
struct NothingAhead {
  void operator()(const void*) {}
};

struct BlockFormat;

struct Weight {
  // fp32: [ceil(out/32)][in][32]; bf16: [ceil(out/32)][in/2][32][2]; 8 bits: [ceil(out/32)][ceil(in/4)][32][4]; 4 bits:
  // [ceil(out/32)][in/4][16][4], each byte a weight of channel i in its lower half and one of channel 16 + i in the upper
  const void* data;
  const float* bias;    // or null
  const float* scale;   // 8 bits: of each output channel; null for the others
  const int32_t* sum;   // 8 bits: of each output channel's weights
  const bf16* scales;   // 4 bits: [ceil(out/32)][in/32][32]; null for the others
  int64_t in, out;
  bool half;            // rows are bf16
  std::vector<int64_t> siblings;  // weights that read the same input in every pass, itself included; empty if there are none
  const BlockFormat* form = nullptr;  // of a GGUF file's blocks, see blocks.h; null: none of them
  bool grouped = false;               // blocks: rows are rounded to bytes, in groups

  bool rounded() const { return scale || scales; }
};

// Sums of R rows and a block's channels, in registers: arrays of the processor's own vectors stay there.
template <int R, typename T>
struct Sums {
  using Own = typename Native<T>::type;
  static constexpr int count = 4 * block_width / native_bytes;
  Own of[R][count];

  template <typename V>
  explicit Sums(const V from[R][2]) {
    UNROLL for (int r = 0; r < R; ++r)
      UNROLL for (int c = 0; c < count; ++c) of[r][c] = load<Own>((const char*)from[r] + c * native_bytes);
  }
  template <typename V>
  void put(V to[R][2]) const {
    UNROLL for (int r = 0; r < R; ++r)
      UNROLL for (int c = 0; c < count; ++c) store((char*)to[r] + c * native_bytes, of[r][c]);
  }
};

// A function of its own: gcc keeps all of its sums in registers, which inside of another one it does not.
#define APART __attribute__((noinline))

// In a register: gcc would read it from memory again for every row.
template <typename V>
inline V held(V x) {
#if defined(__AVX2__)
  asm("" : "+x"(x));
#endif
  return x;
}

template <int R, typename A = Nearby<R>>
APART void dot(const float* x, int64_t stride, const float* w, int64_t in, f16v sums[R][2], A ahead = {}) {
  using Own = typename Sums<R, float>::Own;
  Sums<R, float> sum(sums);
  for (int64_t k = 0; k < in; ++k, w += block_width) {
    ahead(w);
    Own columns[sum.count];
    UNROLL for (int c = 0; c < sum.count; ++c) {
      columns[c] = load<Own>(w + c * native_bytes / 4);
      if constexpr (R < 3) columns[c] = held(columns[c]);
    }
    UNROLL for (int r = 0; r < R; ++r)
      UNROLL for (int c = 0; c < sum.count; ++c) sum.of[r][c] += columns[c] * x[r * stride + k];
  }
  sum.put(sums);
}

// Products of pairs of bf16 where they are faster than those of fp32 (BF16_PAIRS, see variants.py): on a Zen 4 core `vdpbf16ps` takes as
// long as `vfmadd231ps`, on an Intel one four times as long (.72 and .18 ns at 2.8 GHz), and rows and weights are widened instead.
template <int R, typename A = Nearby<R>>
APART void dot(const bf16* x, int64_t stride, const bf16* w, int64_t in, f16v sum[R][2], A ahead = {}) {
#if defined(BF16_PAIRS)
  __m512 left[R], right[R];
  UNROLL for (int r = 0; r < R; ++r) left[r] = (__m512)sum[r][0], right[r] = (__m512)sum[r][1];
  for (int64_t k = 0; k < in; k += 2, w += 2 * block_width) {
    ahead(w);
    __m512bh a = (__m512bh)_mm512_loadu_si512(w), b = (__m512bh)_mm512_loadu_si512(w + 32);
    UNROLL for (int r = 0; r < R; ++r) {
      int32_t pair;
      std::memcpy(&pair, x + r * stride + k, 4);
      __m512bh s = (__m512bh)_mm512_set1_epi32(pair);
      left[r] = _mm512_dpbf16_ps(left[r], a, s);
      right[r] = _mm512_dpbf16_ps(right[r], b, s);
    }
  }
  UNROLL for (int r = 0; r < R; ++r) sum[r][0] = (f16v)left[r], sum[r][1] = (f16v)right[r];
#else
  static_assert(R < 0, "rows are widened before, see multiply");
#endif
}

// Rows of bf16 that were widened, where the processor does not multiply bf16 itself.
template <int R>
APART void dot(const float* x, int64_t stride, const bf16* w, int64_t in, f16v sums[R][2]) {
  Nearby<R> ahead;
  using Own = typename Sums<R, float>::Own;
  using Bits = typename Native<uint32_t>::type;
  Sums<R, float> sum(sums);
  for (int64_t k = 0; k < in; k += 2, w += 2 * block_width) {
    ahead(w);
    UNROLL for (int c = 0; c < sum.count; ++c) {
      const Bits both = load<Bits>(w + c * native_bytes / 2);
      const Own even = (Own)(both << 16), odd = (Own)(both & 0xffff0000u);
      UNROLL for (int r = 0; r < R; ++r) sum.of[r][c] += even * x[r * stride + k];
      UNROLL for (int r = 0; r < R; ++r) sum.of[r][c] += odd * x[r * stride + k + 1];
    }
  }
  sum.put(sums);
}

// A piece of a block in bf16 as numbers, for rows that were widened.
inline void widen_piece(const bf16* w, int64_t length, float* to) {
  for (int64_t k = 0; k < length; k += 2, w += 2 * block_width, to += 2 * block_width)
    UNROLL for (int c = 0; c < 2; ++c) {
      u16v both = load<u16v>(w + c * 32);
      store16(to + 16 * c, (f16v)(both << 16)), store16(to + block_width + 16 * c, (f16v)(both & 0xffff0000u));
    }
}

// Sums of products of bytes are whole numbers: exact, in any order. `in` is a multiple of 4.
template <int R, typename A = Nearby<R>>
APART void dot(const RowByte* x, int64_t stride, const int8_t* w, int64_t in, i16v sums[R][2], A ahead = {}) {
  Sums<R, int32_t> sum(sums);
  for (int64_t k = 0; k < in; k += 4, w += 4 * block_width) {
    ahead(w);
    Eights columns[sum.count];
    UNROLL for (int c = 0; c < sum.count; ++c) columns[c] = load<Eights>(w + c * native_bytes);
    UNROLL for (int r = 0; r < R; ++r)
      UNROLL for (int c = 0; c < sum.count; ++c) sum.of[r][c] = add_weights(sum.of[r][c], columns[c], x + r * stride + k);
  }
  sum.put(sums);
}

// Rows that go through all blocks together.
struct Panel {
  int64_t first, end;
};

// Calls f(first row, rows, whether they are so many that pieces pay) for strips of rows.
template <int group, typename F>
inline void in_strips(Panel panel, F f) {
  for (int64_t row = panel.first; row < panel.end; row += strip_rows) {
    const int64_t count = std::min(strip_rows, panel.end - row);
    f(row, count, count > (!pieces_ahead ? 2 * group : group > 3 ? group + 4 : group + 1));
  }
}

// Rows of a strip through a piece of weights: calls f(number of rows as a constant, first row, what to fetch meanwhile). `next` are the
// `bytes` to fetch, or null; `steps`: how often each group of rows can.
template <int group, typename F>
inline void through_piece(int64_t count, const void* next, int64_t bytes, int64_t steps, F f) {
  const int64_t calls = steps * (count / group);
  Ahead ahead{(const char*)next, std::min<int64_t>(64, (bytes + calls - 1) / calls)};
  const char* end = next ? ahead.next + bytes : nullptr;
  in_lines<group>(count, [&](auto R, int64_t r) {
    if (ahead.next >= end) return f(R, r, NothingAhead());
    f(R, r, ahead);
    ahead.next += ahead.step * steps;
  });
}

// The first n of 16 numbers, zeros behind them.
template <typename V, typename T>
inline V some(const T* from, int64_t n) {
  V v = {};
  if (from && n == 16) return load<V>(from);
  if (from) std::memcpy(&v, from, 4 * n);
  return v;
}

// One block of output channels. X: rows as they are multiplied; T: weights and results as they are stored.
template <typename X, typename T>
void block(const Weight& w, const X* x, Panel panel, T* y, int64_t first) {
  f16v bias[2], sum[strip_rows][2];
  int64_t n[2];
  for (int c = 0; c < 2; ++c) {
    n[c] = std::clamp<int64_t>(w.out - (first + 16 * c), 0, 16);
    bias[c] = some<f16v>(w.bias ? w.bias + first + 16 * c : nullptr, n[c]);
  }
  const T* data = (const T*)w.data + first * w.in;
  in_strips<rows_at_once>(panel, [&](int64_t row, int64_t count, bool many) {
    for (int64_t r = 0; r < count; ++r) sum[r][0] = bias[0], sum[r][1] = bias[1];
    const int64_t step = many ? piece_length : w.in;
    for (int64_t k = 0; k < w.in; k += step) {
      const int64_t length = std::min(step, w.in - k);
      const T* piece = data + k * block_width;
      auto add = [&](const auto* numbers) {
        auto some = [&](auto R, int64_t r, auto... ahead) { dot<R()>(x + (row + r) * w.in + k, w.in, numbers, length, sum + r, ahead...); };
        if constexpr (pieces_ahead && sizeof(X) == sizeof(*numbers))
          if (many) return through_piece<rows_at_once>(count, row == panel.first ? piece + length * block_width : nullptr,
                                                       length * block_width * sizeof(T), length * sizeof(X) / 4, some);
        in_lines<rows_at_once>(count, some);
      };
      if constexpr (std::is_same_v<X, float> && std::is_same_v<T, bf16>) {
        if (many) {
          float wide[piece_length * block_width];
          widen_piece(piece, length, wide);
          add(wide);
          continue;
        }
      }
      add(piece);
    }
    for (int c = 0; c < 2; ++c)
      for (int64_t r = 0; r < count; ++r) put(y + (row + r) * w.out + first + 16 * c, sum[r][c], n[c]);
  });
}

// Where 32 inputs of a row lie, of `all` times 32, so that those of 16 rows are one behind the other.
inline int64_t tiled_place(int64_t row, int64_t place, int64_t all) {
  return ((row / tile_rows * all + place) * tile_rows + row % tile_rows) * tile_length;
}

// Rows in 8 bits: what each is to be multiplied with, and its numbers.
struct Bytes {
  std::vector<float> scale;      // [rows]
  std::vector<RowByte> data;     // [rows][in], `row_offset` added; filled where weights have 8 bits
  std::vector<int8_t> numbers;   // [rows][in], or as tiles of groups read them; filled where weights have 4 bits
  std::vector<int32_t> sums;     // [rows][in / 32]: of the numbers that meet weights of one scale; filled where these are no tiles
  int64_t in;                    // a multiple of 4, zeros behind the row's own numbers

  const RowByte* at(int64_t row, int64_t k) const { return data.data() + row * in + k; }
};

// Sums of products of bytes as numbers, of a block's channels.
template <typename T>
struct Finish {
  T* y;  // of the first channel
  const float* scales;  // of rows
  int64_t out, n;
  f16v scale[2], bias[2];
  i16v much[2];

  Finish(const Weight& w, const Bytes& x, T* y, int64_t first)
      : y(y + first), scales(x.scale.data()), out(w.out), n(std::min(block_width, w.out - first)) {
    for (int c = 0; c < 2; ++c) {
      const int64_t at = first + 16 * c, n = std::clamp<int64_t>(w.out - at, 0, 16);
      scale[c] = some<f16v>(w.scale + at, n), bias[c] = some<f16v>(w.bias ? w.bias + at : nullptr, n);
      much[c] = row_offset * some<i16v>(w.sum + at, n);
    }
  }

  void operator()(int64_t row, const i16v sum[2]) const {
    auto number = [&](int c) { return float_of(sum[c] - much[c]) * (scale[c] * scales[row]) + bias[c]; };
    put_block(y + row * out, number(0), number(1), n);
  }
};

template <typename T>
void block(const Weight& w, const Bytes& x, Panel panel, T* y, int64_t first) {
  const int8_t* data = (const int8_t*)w.data + first * x.in;
  const Finish<T> finish(w, x, y, first);
  in_strips<rows_at_once>(panel, [&](int64_t row, int64_t count, bool many) {
    i16v sum[strip_rows][2];
    std::memset(sum, 0, count * sizeof(sum[0]));
    const int64_t step = many ? piece_length : x.in;
    for (int64_t k = 0; k < x.in; k += step) {
      const int64_t length = std::min(step, x.in - k);
      const int8_t* piece = data + k * block_width;
      auto some = [&](auto R, int64_t r, auto... ahead) { dot<R()>(x.at(row + r, k), x.in, piece, length, sum + r, ahead...); };
      if constexpr (pieces_ahead) {
        if (!many) in_lines<rows_at_once>(count, some);
        else through_piece<rows_of_bytes>(count, row == panel.first ? piece + length * block_width : nullptr, length * block_width, length / 4, some);
      } else {
        in_lines<rows_of_bytes>(count, some);
      }
    }
    for (int64_t r = 0; r < count; ++r) finish(row + r, sum[r]);
  });
}

// What is done while tiles are multiplied: sums of rows before are written, by write(row, sums of it), and weights that come next are fetched.
template <typename S, typename F>
struct Meanwhile {
  F write;
  const char* next;  // weights
  int64_t lines, count;  // of weights and rows, for each product's inputs
  const S (*sum)[2] = nullptr;
  int64_t row = 0, left = 0;

  ALWAYS_INLINE void operator()() {
    for (int64_t i = 0; i < lines; ++i, next += tile_bytes) fetch(next);
    write_rows(count);
  }

  ALWAYS_INLINE void write_rows(int64_t most) {
    for (; most && left; --most, --left, ++row, ++sum) write(row, *sum);
  }

  void begin(const S (*from)[2], int64_t first, int64_t rows) { sum = from, row = first, left = rows; }

  void all(const S (*from)[2], int64_t first, int64_t rows) {
    begin(from, first, rows);
    write_rows(rows);
  }
};

// Sums of all rows, (rows, in) of `in` bytes each, and a block's channels by tiles. The last group of 16 rows reaches back into the one
// before. `ahead`: the block that this thread reads next, so that it need not wait for memory; or null.
template <typename S, typename X, typename W, typename F>
inline void through_tiles(const X* x, int64_t rows, int64_t in, const W* w, const char* ahead, F write) {
  constexpr int64_t pair = 2 * tile_rows;
  const int64_t stride = in / sizeof(X), pairs = (rows + pair - 1) / pair;
  Meanwhile<S, F> meanwhile{write, ahead, ahead ? (block_width + pairs - 1) / pairs : 0, (pair * tile_bytes + in - 1) / in};
  S sums[2][3][tile_rows][2];  // the third of each is not used: places 4096 bytes apart would hold up one another
  int64_t row = 0;
  for (int64_t turn = 0; row + pair <= rows; row += pair, turn = !turn) {
    const X* from = x + row * stride;
    meanwhile = pair_products(from, from + tile_rows * stride, in, w, sums[turn], meanwhile);
    meanwhile.begin(sums[turn][0], row, pair);
  }
  meanwhile.write_rows(pair);
  const int64_t last = std::max<int64_t>(0, rows - tile_rows);
  if (rows - row > tile_rows) {
    pair_products(x + row * stride, x + last * stride, in, w, sums[0], meanwhile);
    meanwhile.all(sums[0][0], row, tile_rows), meanwhile.all(sums[0][1], last, tile_rows);
  } else if (rows > row) {
    products(rows >= tile_rows, x + last * stride, in, w, sums[0][0], meanwhile);
    meanwhile.all(sums[0][0], last, rows - last);
  }
}

template <typename T>
void block_of_tiles(const Weight& w, const Bytes& x, int64_t rows, T* y, int64_t first, const char* ahead) {
  through_tiles<i16v>(x.at(0, 0), rows, x.in, (const int8_t*)w.data + first * x.in, ahead, Finish<T>(w, x, y, first));
}

// Sums of numbers of bf16, of a block's channels.
struct FinishPairs {
  bf16* y;  // of the first channel
  int64_t out, n;
  f16v bias[2];

  FinishPairs(const Weight& w, bf16* y, int64_t first) : y(y + first), out(w.out), n(std::min(block_width, w.out - first)) {
    for (int c = 0; c < 2; ++c) {
      const int64_t at = first + 16 * c;
      bias[c] = some<f16v>(w.bias ? w.bias + at : nullptr, std::clamp<int64_t>(out - at, 0, 16));
    }
  }

  void operator()(int64_t row, const f16v sum[2]) const { put_block(y + row * out, sum[0] + bias[0], sum[1] + bias[1], n); }
};

inline void block_of_tiles(const Weight& w, const bf16* x, int64_t rows, bf16* y, int64_t first, const char* ahead) {
  through_tiles<f16v>(x, rows, 2 * w.in, (const bf16*)w.data + first * w.in, ahead, FinishPairs(w, y, first));
}

// 16 numbers, rounded to the nearest whole number, of equally near ones to the even one.
typedef int8_t b16i __attribute__((vector_size(16)));
inline b16i bytes_of(f16v x) {
#if defined(__AVX512F__)
  return (b16i)_mm512_cvtepi32_epi8(_mm512_cvtps_epi32((__m512)x));
#elif defined(__AVX2__)
  const __m256i halves = _mm256_packs_epi32(_mm256_cvtps_epi32((__m256)x.lo), _mm256_cvtps_epi32((__m256)x.hi));
  const __m256i y = _mm256_permute4x64_epi64(halves, 0xd8);
  return (b16i)_mm_packs_epi16(_mm256_castsi256_si128(y), _mm256_extracti128_si256(y, 1));
#else
  float all[16];
  store(all, x);
  b16i y;
  for (int t = 0; t < 16; ++t) y[t] = int8_t(std::nearbyint(all[t]));
  return y;
#endif
}
inline void put_bytes(int8_t* to, f16v x) {
  const b16i y = bytes_of(x);
  std::memcpy(to, &y, 16);
}

// `whole`: weights have 8 bits; `halves`: 4 bits; `tiled`: those go through tiles.
template <typename T>
void to_bytes(const T* x, int64_t rows, int64_t in, bool whole, bool halves, bool tiled, Bytes& to) {
  const int64_t sixteens = in / 16 * 16, groups = halves ? in / group_length : 0;
  to.in = (in + 3) / 4 * 4;
  to.scale.resize(rows);
  if (whole) to.data.resize(rows * to.in);
  if (halves) to.numbers.resize((tiled ? whole_tiles(rows) : rows) * in);
  if (!tiled) to.sums.resize(rows * groups);
  parallel_for(0, rows, 8, [&](int64_t begin, int64_t end) {
    std::vector<int8_t> bytes(to.in);
    for (int64_t r = begin; r < end; ++r) {
      const T* row = x + r * in;
      // Without their signs numbers have the order of their bits, and a NaN is above all: it becomes the row's scale, and is seen.
      i16v tops = {};
      for (int64_t i = 0; i < sixteens; i += 16) {
        i16v y = (i16v)load16(row + i) & 0x7fffffff;
        tops = chosen(y > tops, y, tops);
      }
      int32_t top = 0;
      for (int t = 0; t < 16; ++t) top = std::max(top, tops[t]);
      for (int64_t i = sixteens; i < in; ++i) top = std::max(top, std::bit_cast<int32_t>(std::fabs(value_of(row[i]))));
      float most = std::bit_cast<float>(top);
      float inverse = most > 0 ? 127.0f / most : 0.0f;
      for (int64_t i = 0; i < sixteens; i += 16) put_bytes(bytes.data() + i, load16(row + i) * inverse);
      for (int64_t i = sixteens; i < in; ++i) bytes[i] = int8_t(std::nearbyint(value_of(row[i]) * inverse));
      to.scale[r] = most / 127.0f;
      RowByte* own = to.data.data() + r * to.in;
      for (int64_t i = 0, count = whole ? bytes.size() : 0; i < count; ++i) own[i] = RowByte(bytes[i] + row_offset);
      for (int64_t g = 0; g < groups; ++g) {
        const int8_t* from = bytes.data() + g * group_length;
        std::memcpy(to.numbers.data() + (tiled ? tiled_place(r, g, groups) : r * in + g * group_length), from, group_length);
        if (tiled) continue;
        int32_t sum = 0;
        for (int64_t i = 0; i < group_length; ++i) sum += from[i];
        to.sums[r * groups + g] = sum;
      }
    }
  });
}

}  // namespace
