// Rows x weights in the block formats of GGUF files, as blocks.py lays them out: rows as they are, or rounded to 8 bits with a scale for
// each 32 neighbours.
//
// A block of 32 output channels and `length` inputs is a header, scales and minimums, and the codes of 32 inputs after 32 inputs, in
// planes of bits. Sums of a group's products are whole numbers, and are added in order: a row's result does not depend on the others.

#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "linear.h"
#include "tiles.h"
#include "torch.h"
#include "vector.h"

namespace {

constexpr int64_t most_groups = 16;  // of a block

// Whether so many rows are faster by tiles, each of which takes as long as one of 16 rows; rows with a scale for each 32 inputs take longer.
inline bool tiles_for_groups(int64_t rows, bool scaled) {
  const int64_t all = whole_tiles(rows);
  return tiles_wanted && (scaled ? rows >= 3 * tile_rows && 8 * rows > 7 * all : rows >= 2 * tile_rows && 3 * rows > 2 * all) && granted();
}

// Numbers for which codes stand, made positive by the format's offset.
constexpr uint8_t iq4_table[16] = {0, 23, 44, 62, 78, 92, 105, 117, 128, 140, 152, 165, 180, 196, 216, 240};
constexpr uint8_t fp4_table[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

// See BlockFormat in blocks.py.
struct BlockFormat {
  int64_t type;  // GGML's number
  int bits, length, group, offset;
  const uint8_t* table;
  bool low;
  int factors;

  bool scaled() const { return bits <= 8; }
  int64_t groups() const { return length / group; }
  int64_t header() const { return scaled() ? (low ? 128 : 64) + (factors ? groups() * block_width * (factors == 8 && low ? 2 : 1) : 0) : 0; }
  int64_t tile_size() const { return bits * 128; }
  int64_t size() const { return header() + length / tile_length * tile_size(); }
};

constexpr int64_t f32_type = 0, f16_type = 1, bf16_type = 30, mxfp4_type = 39;
constexpr BlockFormat block_formats[] = {
    {f32_type, 32, 32, 32, 0, nullptr, false, 0},
    {f16_type, 16, 32, 32, 0, nullptr, false, 0},
    {bf16_type, 16, 32, 32, 0, nullptr, false, 0},
    {2, 4, 32, 32, 8, nullptr, false, 0},              // Q4_0
    {3, 4, 32, 32, 0, nullptr, true, 0},               // Q4_1
    {6, 5, 32, 32, 16, nullptr, false, 0},             // Q5_0
    {7, 5, 32, 32, 0, nullptr, true, 0},               // Q5_1
    {8, 8, 32, 32, 128, nullptr, false, 0},            // Q8_0
    {10, 2, 256, 16, 0, nullptr, true, 4},             // Q2_K
    {11, 3, 256, 16, 4, nullptr, false, 8},            // Q3_K
    {12, 4, 256, 32, 0, nullptr, true, 8},             // Q4_K
    {13, 5, 256, 32, 0, nullptr, true, 8},             // Q5_K
    {14, 6, 256, 16, 32, nullptr, false, 8},           // Q6_K
    {20, 4, 32, 32, 127, iq4_table, false, 0},         // IQ4_NL
    {23, 4, 256, 32, 127, iq4_table, false, 8},        // IQ4_XS
    {mxfp4_type, 4, 32, 32, 12, fp4_table, false, 0},
};

inline const BlockFormat* block_format(int64_t type) {
  const BlockFormat* found = std::find_if(std::begin(block_formats), std::end(block_formats), [&](const BlockFormat& f) { return f.type == type; });
  return found == std::end(block_formats) ? nullptr : found;
}

constexpr int native_parts = 4 * block_width / native_bytes;  // vectors that hold a number of 32 bits of each channel
constexpr int native_lanes = native_bytes / 4;

// ---------------------------------------------------------------- scales

// 16 float16 numbers.
inline f16v load_halves(const uint16_t* from) {
#if defined(__AVX512F__)
  return (f16v)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__AVX2__)
  return {(f16v::Half)_mm256_cvtph_ps(load<__m128i>(from)), (f16v::Half)_mm256_cvtph_ps(load<__m128i>(from + 8))};
#elif defined(__aarch64__)
  float all[16];
  for (int t = 0; t < 16; t += 4) vst1q_f32(all + t, vcvt_f32_f16(load<float16x4_t>(from + t)));
  return load16(all);
#else
  float all[16];
  for (int t = 0; t < 16; ++t) {  // exact for all finite numbers
    const float y = std::bit_cast<float>(uint32_t(from[t] & 0x7fff) << 13) * 0x1p112f;
    all[t] = std::bit_cast<float>(std::bit_cast<uint32_t>(y) | uint32_t(from[t] & 0x8000) << 16);
  }
  return load16(all);
#endif
}

// 16 signed bytes as numbers.
inline f16v signed_of(b16i bytes) {
#if defined(__AVX512F__)
  return (f16v)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)bytes));
#elif defined(__AVX2__)
  auto half = [](__m128i from) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(from)); };
  return {(f16v::Half)half((__m128i)bytes), (f16v::Half)half(_mm_srli_si128((__m128i)bytes, 8))};
#else
  float all[16];
  for (int t = 0; t < 16; ++t) all[t] = bytes[t];
  return load16(all);
#endif
}

// Scales and minimums of a block's groups.
struct alignas(64) Scales {
  float scale[most_groups][block_width], low[most_groups][block_width];

  // From the header of a block.
  void read(const BlockFormat& form, const uint8_t* from) {
    const int64_t groups = form.groups();
    const int8_t* factors = (const int8_t*)from + (form.low ? 128 : 64);
    for (int c = 0; c < 2; ++c) {
      const uint16_t* halves = (const uint16_t*)from + 16 * c;
      const f16v whole = form.type == mxfp4_type ? load16((const bf16*)halves) : load_halves(halves);
      const f16v least = form.low ? load_halves(halves + 32) : f16v{};
      if (!form.factors) {
        store16(scale[0] + 16 * c, whole), store16(low[0] + 16 * c, least);
        continue;
      }
      for (int64_t g = 0; g < groups; ++g) {
        const int8_t* own = factors + g * block_width + 16 * c;
        if (form.factors == 4) {  // scales and minimums share bytes
          const b16i all = load<b16i>(own);
          store16(scale[g] + 16 * c, signed_of(all & 15) * whole), store16(low[g] + 16 * c, signed_of((all >> 4) & 15) * least);
          continue;
        }
        store16(scale[g] + 16 * c, signed_of(load<b16i>(own)) * whole);
        if (form.low) store16(low[g] + 16 * c, signed_of(load<b16i>(own + groups * block_width)) * least);
      }
    }
  }
};

// ---------------------------------------------------------------- codes

inline Eights shifted(Eights x, int by) { return (Eights)((Sixteens)x >> by); }

// 16 numbers by their places.
inline Eights looked_up(const uint8_t* table, Eights codes) {
#if defined(__AVX512BW__)
  return (Eights)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(load<__m128i>(table)), (__m512i)codes);
#elif defined(__AVX2__) && !defined(__AVX512F__)
  return (Eights)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(load<__m128i>(table)), (__m256i)codes);
#elif defined(__aarch64__)
  return (Eights)vqtbl1q_u8(load<uint8x16_t>(table), (uint8x16_t)codes);
#else
  for (int t = 0; t < native_bytes; ++t) codes[t] = table[codes[t]];
  return codes;
#endif
}

// Adds a number to those of `native_bytes` codes whose bit is set.
inline Eights with_bit(Eights codes, const uint8_t* bits, uint8_t much) {
#if defined(__AVX512BW__)
  return (Eights)_mm512_mask_add_epi8((__m512i)codes, load<__mmask64>(bits), (__m512i)codes, _mm512_set1_epi8(much));
#elif defined(__AVX2__) && !defined(__AVX512F__)
  const __m256i spread = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
  const __m256i each = _mm256_set1_epi64x(0x8040201008040201ll);
  const __m256i own = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(load<int32_t>(bits)), spread), each);
  return codes | (Eights)_mm256_and_si256(_mm256_cmpeq_epi8(own, each), _mm256_set1_epi8(much));
#elif defined(__aarch64__)
  const uint8x16_t own = (uint8x16_t)vcombine_u8(vdup_n_u8(bits[0]), vdup_n_u8(bits[1]));
  return codes | ((Eights)vtstq_u8(own, (uint8x16_t)vdupq_n_u64(0x8040201008040201ull)) & much);
#else
  for (int t = 0; t < native_bytes; ++t) codes[t] += (bits[t / 8] >> (t % 8) & 1) * much;
  return codes;
#endif
}

// The codes of inputs 4 * k and on of a tile, of the channels c * native_lanes and on: four of each.
template <int bits, bool table = false>
struct Codes {
  static constexpr int most = table ? 255 : (1 << bits) - 1;
  static constexpr int64_t tile_size = bits * 128;
  const uint8_t* tile;
  const uint8_t* numbers = nullptr;  // of a table

  inline Eights operator()(int64_t k, int c) const {
    constexpr int per = 64 / native_bytes;
    const int z = c / per, at = c % per * native_bytes, pair = 2 * (2 * (k % 2) + z);
    if constexpr (bits == 8) return load<Eights>(tile + 128 * k + c * native_bytes);
    Eights codes;
    if constexpr (bits >= 4) codes = shifted(load<Eights>(tile + 64 * k + at), 4 * z) & 15;
    else codes = shifted(load<Eights>(tile + 64 * (k / 2) + at), pair) & 3;
    if constexpr (bits == 6) {
      const Eights high = load<Eights>(tile + 512 + 64 * (k / 2) + at);
      codes |= (pair > 4 ? shifted(high, pair - 4) : (Eights)((Sixteens)high << (4 - pair))) & 48;
    }
    if constexpr (bits == 5) codes = with_bit(codes, tile + 512 + 16 * k + c * native_bytes / 8, 16);
    if constexpr (bits == 3) codes = with_bit(codes, tile + 256 + 16 * k + c * native_bytes / 8, 4);
    if constexpr (table) codes = looked_up(numbers, codes);
    return codes;
  }
};

// Calls f with the codes of a tile, of a type of their own for each format.
template <typename F>
inline void with_codes(const BlockFormat& form, F f) {
  switch (form.bits) {
    case 2: return f(Codes<2>{});
    case 3: return f(Codes<3>{});
    case 4: return form.table ? f(Codes<4, true>{}) : f(Codes<4>{});
    case 5: return f(Codes<5>{});
    case 6: return f(Codes<6>{});
    default: return f(Codes<8>{});
  }
}

// ---------------------------------------------------------------- rows as they are

// The numbers of a tile: [32 inputs][32 channels].
inline void floats_of_tile(const BlockFormat& form, const uint8_t* tile, float* to) {
  for (int64_t i = 0; i < tile_length * 2; ++i)
    store16(to + 16 * i, form.bits == 32              ? load16((const float*)tile + 16 * i)
                         : form.type == bf16_type ? load16((const bf16*)tile + 16 * i)
                                                  : load_halves((const uint16_t*)tile + 16 * i));
}

template <typename C>
inline void numbers_of_tile(const BlockFormat& form, C codes, const Scales& scales, int64_t first, float* to) {
  const int steps = form.group / 4;
  for (int64_t k = 0; k < tile_length / 4; ++k)
    UNROLL for (int c = 0; c < native_parts; ++c) {
      const int64_t g = first + k / steps;
      const Real scale = load<Real>(scales.scale[g] + c * native_lanes), low = load<Real>(scales.low[g] + c * native_lanes);
      const Whole all = (Whole)codes(k, c);
      UNROLL for (int j = 0; j < 4; ++j) {
        const Whole code = ((all >> (8 * j)) & 255) - form.offset;
        const Real number = __builtin_convertvector(code, Real) * scale;
        store(to + (4 * k + j) * block_width + c * native_lanes, form.low ? number + low : number);
      }
    }
}

#if defined(TILES)
// Codes as signed numbers, as tiles multiply them: [8][32 channels][4 inputs].
template <typename C>
inline void numbers_of(C codes, int offset, int8_t* to) {
  for (int64_t k = 0; k < tile_length / 4; k += 2)
    UNROLL for (int c = 0; c < 2 * native_parts; ++c)
      store(to + 4 * k * block_width + c * native_bytes, codes(k + c / native_parts, c % native_parts) - uint8_t(offset));
}
#endif

// Reads the blocks of 32 output channels, tile after tile.
struct BlockReader {
  const BlockFormat& form;
  Scales scales;
  int64_t group = 0;  // the tile's first one in `scales`

  BlockReader(const BlockFormat& form, const void* data, int64_t in, int64_t first)
      : form(form), at_((const uint8_t*)data + first / block_width * ((in + form.length - 1) / form.length) * form.size()) {}

  const uint8_t* next() {
    if (left_ == 0) {
      if (form.scaled()) scales.read(form, at_);
      at_ += form.header(), left_ = form.length / tile_length;
    }
    group = (form.length / tile_length - left_--) * tile_length / form.group;
    return std::exchange(at_, at_ + form.tile_size());
  }

  // The next tile as numbers: [32 inputs][32 channels].
  void next(float* to) {
    const uint8_t* tile = next();
    if (!form.scaled()) return floats_of_tile(form, tile, to);
    with_codes(form, [&](auto codes) {
      codes.tile = tile, codes.numbers = form.table;
      numbers_of_tile(form, codes, scales, group, to);
    });
  }

 private:
  const uint8_t* at_;
  int64_t left_ = 0;  // tiles of the block
};

// One block of output channels; rows of numbers.
template <typename T>
void block_of_numbers(const Weight& w, const float* x, Panel panel, T* y, int64_t first) {
  constexpr int64_t length = 4 * tile_length;
  in_strips<rows_at_once>(panel, [&](int64_t row, int64_t count, bool) {
    f16v sum[strip_rows][2];
    for (int c = 0; c < 2; ++c) {
      const f16v bias = some<f16v>(w.bias ? w.bias + first + 16 * c : nullptr, std::clamp<int64_t>(w.out - (first + 16 * c), 0, 16));
      for (int64_t r = 0; r < count; ++r) sum[r][c] = bias;
    }
    BlockReader reader(*w.form, w.data, w.in, first);
    alignas(64) float wide[length * block_width];
    for (int64_t k = 0; k < w.in; k += length) {
      const int64_t some = std::min(length, w.in - k);
      for (int64_t i = 0; i < some; i += tile_length) reader.next(wide + i * block_width);
      in_lines<rows_at_once>(count, [&](auto R, int64_t r) { dot<R()>(x + (row + r) * w.in + k, w.in, (const float*)wide, some, sum + r); });
    }
    for (int c = 0; c < 2; ++c)
      for (int64_t r = 0; r < count; ++r)
        put(y + (row + r) * w.out + first + 16 * c, sum[r][c], std::clamp<int64_t>(w.out - (first + 16 * c), 0, 16));
  });
}

// Rows of a weight by their numbers, as an embedding gives them: [count][in].
template <typename T>
void look_up(const Weight& w, const int64_t* numbers, int64_t count, T* to) {
  parallel_for(0, count, 4, [&](int64_t begin, int64_t end) {
    float wide[tile_length * block_width];
    for (int64_t i = begin; i < end; ++i) {
      BlockReader reader(*w.form, w.data, w.in, numbers[i] / block_width * block_width);
      for (int64_t k = 0; k < w.in; k += tile_length) {
        reader.next(wide);
        float row[tile_length];
        for (int64_t j = 0; j < tile_length; ++j) row[j] = wide[j * block_width + numbers[i] % block_width];
        for (int64_t j = 0; j < std::min(tile_length, w.in - k); j += 16)
          put(to + i * w.in + k + j, load16(row + j), std::min<int64_t>(16, w.in - k - j));
      }
    }
  });
}

// ---------------------------------------------------------------- rows in bytes

// Rows in 8 bits, each 32 neighbours with a scale.
struct GroupedBytes {
  std::vector<int8_t> data;      // [rows, up to a multiple of 16][in]
  std::vector<float> scale;      // [rows][in / 32]
  std::vector<int32_t> sums[2];  // [rows][in / 16], [rows][in / 32]: of the numbers
  std::vector<float> wholes[2];  // these, times their scale
  int64_t in;

  const int8_t* at(int64_t row, int64_t k) const { return data.data() + row * in + k; }
};

// The largest of numbers without their signs, which then have the order of their bits; a NaN is above all: it becomes the scale, and is seen.
inline float largest_of(f16v a, f16v b) {
  const i16v left = (i16v)a & 0x7fffffff, right = (i16v)b & 0x7fffffff, tops = chosen(left > right, left, right);
#if defined(__AVX512F__)
  return std::bit_cast<float>(_mm512_reduce_max_epi32((__m512i)tops));
#else
  int32_t all[16], top = 0;
  store(all, tops);
  for (int t = 0; t < 16; ++t) top = std::max(top, all[t]);
  return std::bit_cast<float>(top);
#endif
}

// Sums of 16 bytes, and of 16 others.
inline void sum_bytes(b16i first, b16i second, int32_t sums[2]) {
#if defined(__AVX2__)
  const __m256i all = _mm256_set_m128i((__m128i)second, (__m128i)first), pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), all);
  const __m256i fours = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)), eights = _mm256_hadd_epi32(fours, fours);
  const __m256i both = _mm256_hadd_epi32(eights, eights);
  sums[0] = _mm256_extract_epi32(both, 0), sums[1] = _mm256_extract_epi32(both, 4);
#else
  sums[0] = sums[1] = 0;
  for (int t = 0; t < 16; ++t) sums[0] += first[t], sums[1] += second[t];
#endif
}

template <typename T>
void to_grouped(const T* x, int64_t rows, int64_t in, bool tiled, GroupedBytes& to) {
  const int64_t groups = in / group_length;
  to.in = in;
  const int64_t places = whole_tiles(rows) * groups;
  to.data.resize(places * group_length), to.scale.resize(places);
  for (int i = 0; i < 2; ++i) to.sums[i].resize(places * (2 - i)), to.wholes[i].resize(places * (2 - i));
  parallel_for(0, rows, 8, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * groups; i < end * groups; ++i) {
      const f16v a = load16(x + i * group_length), b = load16(x + i * group_length + 16);
      const float most = largest_of(a, b), inverse = most > 0 ? 127.0f / most : 0.0f, scale = most / 127.0f;
      const b16i bytes[2] = {bytes_of(a * inverse), bytes_of(b * inverse)};
      int32_t sums[2];
      sum_bytes(bytes[0], bytes[1], sums);
      to.scale[i] = scale;
      for (int h = 0; h < 2; ++h) to.sums[0][2 * i + h] = sums[h], to.wholes[0][2 * i + h] = float(sums[h]) * scale;
      to.sums[1][i] = sums[0] + sums[1], to.wholes[1][i] = float(sums[0] + sums[1]) * scale;
      std::memcpy(to.data.data() + (tiled ? tiled_place(i / groups, i % groups, groups) : i * group_length), bytes, group_length);
    }
  });
}

// A tile whose codes are made ready already, for many rows.
template <int largest>
struct ReadyCodes {
  static constexpr int most = largest;
  const Eights* ready;
  inline Eights operator()(int64_t k, int c) const { return held(ready[k * native_parts + c]); }
};
template <typename C>
struct FreshCodes {
  static constexpr int most = C::most;
  C codes;
  inline Eights operator()(int64_t k, int c) const { return ready_of<most>(codes(k, c)); }
};

// Calls f(codes made ready, number of rows as a constant, first row) for many rows.
template <typename C, typename F>
inline void with_ready(C codes, int64_t count, F f) {
  Eights ready[tile_length / 4 * native_parts];
  for (int64_t k = 0; k < tile_length / 4; k += 2)
    UNROLL for (int i = 0; i < 2 * native_parts; ++i) ready[k * native_parts + i] = ready_of<C::most>(codes(k + i / native_parts, i % native_parts));
  in_lines<rows_of_bytes>(count, [&](auto R, int64_t r) { f(ReadyCodes<C::most>{ready}, R, r); });
}

// What a tile adds to the sums of R rows. `scales`: of the tile's groups; `lows` likewise, or null. `place`: of the tile in the rows.
template <int R, int group, typename C>
ALWAYS_INLINE void add_tile(C codes, const GroupedBytes& x, int64_t row, int64_t place, int offset, const float* scales, const float* lows,
                            Sums<R, float>& sum) {
  constexpr int groups = tile_length / group, steps = group / 4;
  const int64_t all = x.in / group, first = place * groups;
  const int32_t* starts = x.sums[2 - groups].data() + row * all + first;
  const float* wholes = x.wholes[2 - groups].data() + row * all + first;
  const float* by = x.scale.data() + row * (x.in / group_length) + place;
  for (int h = 0; h < groups; ++h) {
    Whole part[R][native_parts];
    UNROLL for (int r = 0; r < R; ++r)
      UNROLL for (int c = 0; c < native_parts; ++c) part[r][c] = Whole{} - (offset - code_offset<C::most>) * starts[r * all + h];
    add_steps<R, native_parts, C::most, steps>(part, codes, h * steps, x.at(row, place * tile_length), x.in);
    UNROLL for (int c = 0; c < native_parts; ++c) {
      const Real scale = load<Real>(scales + h * block_width + c * native_lanes);
      UNROLL for (int r = 0; r < R; ++r) {
        sum.of[r][c] += __builtin_convertvector(part[r][c], Real) * (scale * by[r * (x.in / group_length)]);
        if (lows) sum.of[r][c] += load<Real>(lows + h * block_width + c * native_lanes) * wholes[r * all + h];
      }
    }
  }
}

// The same, of a tile whose codes are ready for many rows.
template <int R, int group, typename C>
APART void add_ready(C codes, const GroupedBytes& x, int64_t row, int64_t place, int offset, const float* scales, const float* lows, f16v sums[][2]) {
  Sums<R, float> sum(sums);
  add_tile<R, group>(codes, x, row, place, offset, scales, lows, sum);
  sum.put(sums);
}

// What all tiles of a block of output channels add to the sums of R rows.
template <int R, int group, typename C>
APART void add_tiles(C codes, const BlockFormat& form, const uint8_t* at, const GroupedBytes& x, int64_t row, f16v sums[][2]) {
  const int64_t blocks = x.in / form.length, tiles = form.length / tile_length, groups = tile_length / group, header = form.header();
  const bool low = form.low;
  const int offset = form.offset;
  Sums<R, float> sum(sums);
  for (int64_t b = 0; b < blocks; ++b) {
    Scales scales;
    scales.read(form, at);
    fetch_for<R, least_rows_of_codes>(at, header);
    at += header;
    for (int64_t t = 0; t < tiles; ++t, at += C::tile_size) {
      codes.tile = at;
      fetch_for<R, least_rows_of_codes>(at, C::tile_size);
      add_tile<R, group>(FreshCodes<C>{codes}, x, row, b * tiles + t, offset, scales.scale[t * groups], low ? scales.low[t * groups] : nullptr, sum);
    }
  }
  sum.put(sums);
}

// Sums of rows and a block's channels, times the rows' scales, if they are given, with the bias, as results.
template <typename T>
inline void finish_rows(const Weight& w, const f16v sum[][2], int64_t row, int64_t count, T* y, int64_t first, const float* scales = nullptr) {
  const int64_t n = std::min(block_width, w.out - first);
  f16v bias[2];
  for (int c = 0; c < 2; ++c) bias[c] = some<f16v>(w.bias ? w.bias + first + 16 * c : nullptr, std::clamp<int64_t>(n - 16 * c, 0, 16));
  for (int64_t r = 0; r < count; ++r) {
    auto number = [&](int c) { return (scales ? sum[r][c] * scales[row + r] : sum[r][c]) + bias[c]; };
    put_block(y + (row + r) * w.out + first, number(0), number(1), n);
  }
}

// One block of output channels; rows in bytes. C: codes of a format.
template <int group, typename C, typename T>
void block_of_codes(C codes, const Weight& w, const GroupedBytes& x, Panel panel, T* y, int64_t first) {
  const BlockFormat& form = *w.form;
  const int64_t blocks = w.in / form.length, tiles = form.length / tile_length, groups = tile_length / group;
  codes.numbers = form.table;
  in_strips<rows_of_halves>(panel, [&](int64_t row, int64_t count, bool) {
    f16v sum[strip_rows][2] = {};
    const bool many = count > line_rows<rows_of_halves>;
    const uint8_t* at = (const uint8_t*)w.data + first / block_width * blocks * form.size();
    if (!many) {
      in_lines<rows_of_halves>(count, [&](auto R, int64_t r) { add_tiles<R(), group>(codes, form, at, x, row + r, sum + r); });
      return finish_rows(w, sum, row, count, y, first);
    }
    for (int64_t b = 0; b < blocks; ++b) {
      Scales scales;
      scales.read(form, at);
      fetch_ahead(at, form.header());
      at += form.header();
      for (int64_t t = 0; t < tiles; ++t, at += C::tile_size) {
        codes.tile = at;
        fetch_ahead(at, C::tile_size);
        const float *by = scales.scale[t * groups], *lows = form.low ? scales.low[t * groups] : nullptr;
        with_ready(codes, count, [&](auto ready, auto R, int64_t r) {
          add_ready<R(), group>(ready, x, row + r, b * tiles + t, form.offset, by, lows, sum + r);
        });
      }
    }
    finish_rows(w, sum, row, count, y, first);
  });
}

// What a group of 32 inputs in 4 bits adds to the sums of R rows: calls add(row, vector of the block, products, scale). A weight is
// (number - 8) * scale; `scales`: [32].
template <int R, typename C, typename F>
ALWAYS_INLINE void with_group(C codes, const Bytes& x, int64_t row, int64_t group, const f16v scales[2], F add) {
  Whole part[R][native_parts];
  UNROLL for (int r = 0; r < R; ++r)
    UNROLL for (int c = 0; c < native_parts; ++c) part[r][c] = Whole{} - 8 * x.sums[(row + r) * (x.in / group_length) + group];
  add_steps<R, native_parts, C::most, group_length / 4>(part, codes, 0, x.numbers.data() + row * x.in + group * group_length, x.in);
  UNROLL for (int c = 0; c < native_parts; ++c) {
    const Real scale = load<Real>((const char*)scales + c * native_bytes);
    UNROLL for (int r = 0; r < R; ++r) add(r, c, __builtin_convertvector(part[r][c], Real), scale);
  }
}

// Adds what a group gives whose codes are ready for many rows. Sums stay in memory: the group's own have all registers (.89 of the time with
// AVX-512, .93 with AVX2; formats with a scale for each row, too, lose 2 to 7 % by it).
template <int R, typename C>
APART void add_ready(C codes, const Bytes& x, int64_t row, int64_t group, const f16v scales[2], f16v sums[][2]) {
  with_group<R>(codes, x, row, group, scales, [&](int r, int c, Real part, Real scale) {
    char* at = (char*)sums[r] + c * native_bytes;
    store(at, load<Real>(at) + part * scale);
  });
}

// What all groups of a block of output channels add to the sums of R rows.
template <int R>
APART void add_groups(const uint8_t* data, const bf16* scales, const Bytes& x, int64_t row, f16v sums[][2]) {
  using C = Codes<4>;
  Sums<R, float> sum(sums);
  for (int64_t g = 0; g < x.in / group_length; ++g, data += C::tile_size, scales += block_width) {
    fetch_for<R, least_rows_of_codes>(data, C::tile_size);
    const f16v by[2] = {load16(scales), load16(scales + 16)};
    with_group<R>(FreshCodes<C>{{data}}, x, row, g, by, [&](int r, int c, Real part, Real scale) { sum.of[r][c] += part * scale; });
  }
  sum.put(sums);
}

#if defined(TILES)
constexpr int64_t groups_at_once = 8;  // whose products wait to be added

// Weights of some groups of inputs, as tiles multiply them, and their scales.
struct alignas(64) ReadyGroups {
  int8_t numbers[groups_at_once * tile_length * block_width];
  f16v scale[groups_at_once][2], low[groups_at_once][2];
};

// Makes the tiles of a format ready.
template <int group, typename C>
struct GroupReader {
  BlockReader blocks;

  // The next tile, number t of these groups.
  void next(int64_t t, ReadyGroups& to) {
    constexpr int each = tile_length / group;
    const uint8_t* tile = blocks.next();
    fetch_ahead(tile, C::tile_size);
    UNROLL for (int g = 0; g < each; ++g)
      UNROLL for (int c = 0; c < 2; ++c) {
        to.scale[t * each + g][c] = load16(blocks.scales.scale[blocks.group + g] + 16 * c);
        if (blocks.form.low) to.low[t * each + g][c] = load16(blocks.scales.low[blocks.group + g] + 16 * c);
      }
    numbers_of(C{tile, blocks.form.table}, blocks.form.offset, to.numbers + t * tile_length * block_width);
  }
};

// The same for weights in 4 bits with a scale for each 32.
struct HalvesReader {
  const uint8_t* data;
  const bf16* scales;

  void next(int64_t t, ReadyGroups& to) {
    UNROLL for (int c = 0; c < 2; ++c) to.scale[t][c] = load16(scales + 16 * c);
    numbers_of(Codes<4>{data}, 8, to.numbers + t * tile_length * block_width);
    data += Codes<4>::tile_size, scales += block_width;
  }
};

// What the groups of 16 rows are multiplied with, beside their weights' scales; null: nothing.
struct RowScales {
  const float *scale, *wholes;  // [rows][inputs / 32], [rows][groups]
};

// Adds what products of R rows and all groups give to the rows' sums, in the order of add_tile. `per_tile`: groups that share a row's scale;
// 0: it has none here.
template <int R, int per_tile>
APART void add_parts(const i16v part[][tile_rows][2], const ReadyGroups& groups, int64_t count, const float* by, const float* wholes, int64_t stride,
                     bool low, f16v sums[][2]) {
  f16v sum[R][2];
  UNROLL for (int r = 0; r < R; ++r) sum[r][0] = sums[r][0], sum[r][1] = sums[r][1];
  for (int64_t g = 0; g < count; ++g)
    UNROLL for (int c = 0; c < 2; ++c) {
      const f16v scale = groups.scale[g][c];
      if constexpr (per_tile == 0) {
        UNROLL for (int r = 0; r < R; ++r) sum[r][c] += float_of(part[g][r][c]) * scale;
      } else {
        UNROLL for (int r = 0; r < R; ++r) sum[r][c] += float_of(part[g][r][c]) * (scale * by[r * stride + g / per_tile]);
        if (!low) continue;
        const f16v least = groups.low[g][c];
        UNROLL for (int r = 0; r < R; ++r) sum[r][c] += least * wholes[r * stride * per_tile + g];
      }
    }
  UNROLL for (int r = 0; r < R; ++r) sums[r][0] = sum[r][0], sums[r][1] = sum[r][1];
}

// One block of output channels and many rows by tiles: of some groups all products of 16 rows, which are then added up. `rows_at(row,
// place)`: 16 rows from `row` on, 32 inputs of each. `finish(sums, first row, count)`.
template <int group, int per_tile, typename M, typename X, typename F>
void block_of_tiles(M make_reader, X rows_at, const RowScales& scales, bool low, int64_t in, int64_t rows, F finish) {
  constexpr int64_t strip = 96, tiles = groups_at_once * group / tile_length;
  ReadyGroups groups;
  i16v part[groups_at_once][tile_rows][2];
  f16v sum[strip][2];
  const GroupTiles shape(group);
  const int64_t all = in / tile_length;
  for (int64_t row = 0; row < rows; row += strip) {
    const int64_t count = std::min(strip, rows - row);
    std::memset(sum, 0, sizeof sum);
    auto reader = make_reader();
    for (int64_t k = 0; k < all; k += tiles) {
      const int64_t some = std::min(tiles, all - k), number = some * tile_length / group;
      for (int64_t t = 0; t < some; ++t) reader.next(t, groups);
      for (int64_t r = 0; r < count; r += tile_rows) {
        const int8_t* x = rows_at(row + r, k);
        for (int64_t g = 0; g < number; ++g)
          group_products(g % 2, x + g * group / tile_length * tile_rows * tile_length + g * group % tile_length, tile_length,
                         groups.numbers + g * group * block_width, part[g]);
        for (int64_t i = 0; i < tile_rows; i += 4) {
          const float* by = per_tile ? scales.scale + (row + r + i) * all + k : nullptr;
          const float* wholes = per_tile ? scales.wholes + ((row + r + i) * all + k) * per_tile : nullptr;
          add_parts<4, per_tile>((const i16v(*)[tile_rows][2])part[0][i], groups, number, by, wholes, all, low, sum + r + i);
        }
      }
    }
    finish(sum, row, count);
  }
}
#endif

// One block of output channels in 4 bits. Sums of 32 products are whole numbers, and those are added in order.
template <typename T>
void block_of_halves(const Weight& w, const Bytes& x, Panel panel, T* y, int64_t first, [[maybe_unused]] bool tiled) {
  const int64_t groups = w.in / group_length;
  const uint8_t* data = (const uint8_t*)w.data + first * w.in / 2;
  const bf16* scales = w.scales + first * groups;
#if defined(TILES)
  if (tiled) {
    auto reader = [&] { return HalvesReader{data, scales}; };
    auto rows_at = [&](int64_t row, int64_t place) { return x.numbers.data() + tiled_place(row, place, groups); };
    return block_of_tiles<group_length, 0>(reader, rows_at, {}, false, w.in, panel.end, [&](const f16v sum[][2], int64_t row, int64_t count) {
      finish_rows(w, sum, row, count, y, first, x.scale.data());
    });
  }
#endif
  in_strips<rows_of_halves>(panel, [&](int64_t row, int64_t count, bool many) {
    f16v sum[strip_rows][2] = {};
    if (!many) {
      in_lines<rows_of_halves>(count, [&](auto R, int64_t r) { add_groups<R()>(data, scales, x, row + r, sum + r); });
    } else {
      for (int64_t g = 0; g < groups; ++g) {
        const Codes<4> codes{data + g * Codes<4>::tile_size};
        fetch_ahead(codes.tile, codes.tile_size);
        const f16v by[2] = {load16(scales + g * block_width), load16(scales + g * block_width + 16)};
        with_ready(codes, count, [&](auto ready, auto R, int64_t r) { add_ready<R()>(ready, x, row + r, g, by, sum + r); });
      }
    }
    finish_rows(w, sum, row, count, y, first, x.scale.data());
  });
}

template <typename T>
void block_of_bytes(const Weight& w, const GroupedBytes& x, Panel panel, T* y, int64_t first, [[maybe_unused]] bool tiled) {
  with_codes(*w.form, [&]<int bits, bool table>(Codes<bits, table> codes) {
    constexpr int group = bits == 2 || bits == 3 || bits == 6 ? 16 : 32;
#if defined(TILES)
    if (tiled) {
      const int64_t all = w.in / tile_length;
      auto reader = [&] { return GroupReader<group, Codes<bits, table>>{{*w.form, w.data, w.in, first}}; };
      auto rows_at = [&](int64_t row, int64_t place) { return x.data.data() + tiled_place(row, place, all); };
      const RowScales scales{x.scale.data(), x.wholes[group == 32].data()};
      return block_of_tiles<group, tile_length / group>(reader, rows_at, scales, w.form->low, w.in, panel.end, [&](const f16v sum[][2], int64_t row, int64_t count) {
        finish_rows(w, sum, row, count, y, first);
      });
    }
#endif
    block_of_codes<group>(codes, w, x, panel, y, first);
  });
}

}  // namespace
