// Rows x packed weights, for the few rows of a decoding pass: fp32, bf16, or rows rounded to 8 bits and weights to 8 or 4.
//
// A weight lies in blocks of 32 output channels side by side, so that a task reads one stream of memory and has two vectors of sums
// for each of up to 8 rows (`row_group`). Not more: with more than 16 sums at once a Zen 4 core does half of its products (6 rows x 4 vectors 118 G
// products of bytes a second, 8 x 2 228).

#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <optional>
#include <type_traits>
#include <vector>

#include "tiles.h"
#include "vector.h"

namespace {

constexpr int64_t block_width = 32;   // output channels of a block

constexpr int64_t group_length = 32;  // weights of an output channel that share a scale in 4 bits

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

  bool rounded() const { return scale || scales; }
};

template <int R>
inline void dot(const float* x, int64_t stride, const float* w, int64_t in, f16v sums[R][2]) {
  f16v sum[R][2];  // of this function alone, so that they stay in registers
  UNROLL for (int r = 0; r < R; ++r) sum[r][0] = sums[r][0], sum[r][1] = sums[r][1];
  for (int64_t k = 0; k < in; ++k, w += block_width) {
    f16v a = load16(w), b = load16(w + 16);
    UNROLL for (int r = 0; r < R; ++r) {
      float s = x[r * stride + k];
      sum[r][0] += a * s;
      sum[r][1] += b * s;
    }
  }
  UNROLL for (int r = 0; r < R; ++r) sums[r][0] = sum[r][0], sums[r][1] = sum[r][1];
}

template <int R>
inline void dot(const bf16* x, int64_t stride, const bf16* w, int64_t in, f16v sum[R][2]) {
#if defined(__AVX512BF16__)
  __m512 left[R], right[R];
  UNROLL for (int r = 0; r < R; ++r) left[r] = (__m512)sum[r][0], right[r] = (__m512)sum[r][1];
  for (int64_t k = 0; k < in; k += 2, w += 2 * block_width) {
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
inline void dot(const float* x, int64_t stride, const bf16* w, int64_t in, f16v sums[R][2]) {
  f16v sum[R][2];
  UNROLL for (int r = 0; r < R; ++r) sum[r][0] = sums[r][0], sum[r][1] = sums[r][1];
  for (int64_t k = 0; k < in; k += 2, w += 2 * block_width) {
    UNROLL for (int c = 0; c < 2; ++c) {
      u16v both = load<u16v>(w + c * 32);
      f16v even = (f16v)(both << 16), odd = (f16v)(both & 0xffff0000u);
      UNROLL for (int r = 0; r < R; ++r) sum[r][c] += even * x[r * stride + k];
      UNROLL for (int r = 0; r < R; ++r) sum[r][c] += odd * x[r * stride + k + 1];
    }
  }
  UNROLL for (int r = 0; r < R; ++r) sums[r][0] = sum[r][0], sums[r][1] = sum[r][1];
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// Four numbers of each lane as two pairs of 16 bits, the first with the third: their products are summed by one instruction, exactly.
struct Pairs {
  __m256i even, odd;

  i16v::Half times(int32_t first, int32_t second) const {
    return (i16v::Half)_mm256_add_epi32(_mm256_madd_epi16(even, _mm256_set1_epi32(first)), _mm256_madd_epi16(odd, _mm256_set1_epi32(second)));
  }
};

inline Pairs pairs_of(i16v::Half bytes) {
  __m256i all = (__m256i)bytes;
  return {_mm256_srai_epi16(_mm256_slli_epi16(all, 8), 8), _mm256_srai_epi16(all, 8)};
}

// Numbers of 4 bits, from this bit of each byte on.
inline Pairs pairs_of(i16v::Half bytes, int bit) {
  const __m256i all = (__m256i)bytes, mask = _mm256_set1_epi16(15);
  return {_mm256_and_si256(_mm256_srli_epi16(all, bit), mask), _mm256_and_si256(_mm256_srli_epi16(all, bit + 8), mask)};
}

// Of a row, less an offset.
inline void pairs_of(const uint8_t* row, int32_t offset, int32_t& even, int32_t& odd) {
  auto pair = [&](int i) { return int32_t(uint32_t(uint16_t(row[i] - offset)) | uint32_t(row[i + 2] - offset) << 16); };
  even = pair(0), odd = pair(1);
}
#endif

// Sums of products of bytes are whole numbers: exact, in any order. `in` is a multiple of 4, rows have 128 added.
template <int R>
inline void dot(const uint8_t* x, int64_t stride, const int8_t* w, int64_t in, i16v sum[R][2]) {
  for (int64_t k = 0; k < in; k += 4, w += 4 * block_width) {
#if defined(__AVX512VNNI__)
    __m512i a = _mm512_loadu_si512(w), b = _mm512_loadu_si512(w + 64);
    UNROLL for (int r = 0; r < R; ++r) {
      int32_t four;
      std::memcpy(&four, x + r * stride + k, 4);
      __m512i s = _mm512_set1_epi32(four);
      sum[r][0] = (i16v)_mm512_dpbusd_epi32((__m512i)sum[r][0], s, a);
      sum[r][1] = (i16v)_mm512_dpbusd_epi32((__m512i)sum[r][1], s, b);
    }
#elif defined(__AVX2__) && !defined(__AVX512F__)
    int32_t even[R], odd[R];
    UNROLL for (int r = 0; r < R; ++r) pairs_of(x + r * stride + k, 0, even[r], odd[r]);
    UNROLL for (int c = 0; c < 2; ++c) {
      i16v four = load<i16v>(w + 64 * c);
      Pairs lo = pairs_of(four.lo), hi = pairs_of(four.hi);
      UNROLL for (int r = 0; r < R; ++r) {
        sum[r][c].lo += lo.times(even[r], odd[r]);
        sum[r][c].hi += hi.times(even[r], odd[r]);
      }
    }
#else
    for (int c = 0; c < 2; ++c) {
      i16v four = load<i16v>(w + 64 * c);
      for (int j = 0; j < 4; ++j) {
        i16v column = (four << (24 - 8 * j)) >> 24;
        UNROLL for (int r = 0; r < R; ++r) sum[r][c] += column * int32_t(x[r * stride + k + j]);
      }
    }
#endif
  }
}

// The first n of 16 numbers, zeros behind them.
template <typename V, typename T>
inline V some(const T* from, int64_t n) {
  V v = {};
  if (from && n == 16) return load<V>(from);
  if (from) std::memcpy(&v, from, 4 * n);
  return v;
}

// One block of output channels, R rows.
template <int R, typename X, typename T>
void block(const Weight& w, const X* x, T* y, int64_t first) {
  f16v sum[R][2];
  int64_t n[2];
  for (int c = 0; c < 2; ++c) {
    n[c] = std::clamp<int64_t>(w.out - (first + 16 * c), 0, 16);
    f16v bias = some<f16v>(w.bias ? w.bias + first + 16 * c : nullptr, n[c]);
    UNROLL for (int r = 0; r < R; ++r) sum[r][c] = bias;
  }
  dot<R>(x, w.in, (const T*)w.data + first * w.in, w.in, sum);  // T: as the weights are stored
  UNROLL for (int r = 0; r < R; ++r)
    for (int c = 0; c < 2; ++c) put(y + r * w.out + first + 16 * c, sum[r][c], n[c]);
}

// Rows in 8 bits: what each is to be multiplied with, and its numbers + 128, which makes them unsigned.
struct Bytes {
  std::vector<uint8_t> data;  // [rows][stride]
  std::vector<float> scale;   // [rows]
  std::vector<int32_t> sums;  // [rows][in / 32]: of the numbers that meet weights of one scale; filled where weights have 4 bits
  int64_t stride;
};

// Sums of products of bytes as numbers.
template <int R, typename T>
inline void finish(const Weight& w, const Bytes& x, int64_t row, const i16v sum[R][2], T* y, int64_t first) {
  for (int c = 0; c < 2; ++c) {
    int64_t at = first + 16 * c, n = std::clamp<int64_t>(w.out - at, 0, 16);
    f16v scale = some<f16v>(w.scale + at, n), bias = some<f16v>(w.bias ? w.bias + at : nullptr, n);
    i16v offset = 128 * some<i16v>(w.sum + at, n);
    UNROLL for (int r = 0; r < R; ++r) {
      f16v product = float_of(sum[r][c] - offset);
      put(y + (row + r) * w.out + at, product * (scale * x.scale[row + r]) + bias, n);
    }
  }
}

template <int R, typename T>
void block(const Weight& w, const Bytes& x, int64_t row, T* y, int64_t first) {
  i16v sum[R][2] = {};
  dot<R>(x.data.data() + row * x.stride, x.stride, (const int8_t*)w.data + first * x.stride, x.stride, sum);
  finish<R>(w, x, row, sum, y, first);
}

// The same for all rows, by tiles.
template <typename T>
void block_of_tiles(const Weight& w, const Bytes& x, int64_t rows, T* y, int64_t first) {
  i16v sum[tile_rows][2];
  for (int64_t row = 0; row < rows; row += tile_rows) {
    int64_t count = std::min(rows - row, tile_rows);
    products(count == tile_rows, x.data.data() + row * x.stride, x.stride, (const int8_t*)w.data + first * x.stride, sum);
    for (int64_t r = 0; r < count; ++r) finish<1>(w, x, row + r, sum + r, y, first);
  }
}

inline void block_of_tiles(const Weight& w, const bf16* x, int64_t rows, bf16* y, int64_t first) {
  f16v sum[tile_rows][2];
  for (int64_t row = 0; row < rows; row += tile_rows) {
    int64_t count = std::min(rows - row, tile_rows);
    products(count == tile_rows, x + row * w.in, 2 * w.in, (const bf16*)w.data + first * w.in, sum);
    for (int c = 0; c < 2; ++c) {
      int64_t at = first + 16 * c, n = std::clamp<int64_t>(w.out - at, 0, 16);
      f16v bias = some<f16v>(w.bias ? w.bias + at : nullptr, n);
      for (int64_t r = 0; r < count; ++r) put(y + (row + r) * w.out + at, sum[r][c] + bias, n);
    }
  }
}

// The same for 4 bits. A weight is (number - 8) * scale; sums of 32 products are whole numbers, and those are added in order.
template <int R, typename T>
void block_of_halves(const Weight& w, const Bytes& x, int64_t row, T* y, int64_t first) {
  const int64_t groups = w.in / group_length;
  const uint8_t* data = (const uint8_t*)w.data + first * w.in / 2;
  const bf16* scales = w.scales + first * groups;
  const uint8_t* rows = x.data.data() + row * x.stride;
  f16v sum[R][2] = {};
  for (int64_t g = 0; g < groups; ++g, scales += block_width) {
    i16v part[R][2] = {};
    for (int64_t k = g * group_length; k < (g + 1) * group_length; k += 4, data += 64) {
#if defined(__AVX512VNNI__)
      __m512i both = _mm512_loadu_si512(data), mask = _mm512_set1_epi8(15);
      __m512i a = _mm512_and_si512(both, mask), b = _mm512_and_si512(_mm512_srli_epi16(both, 4), mask);
      UNROLL for (int r = 0; r < R; ++r) {
        int32_t four;
        std::memcpy(&four, rows + r * x.stride + k, 4);
        __m512i s = _mm512_set1_epi32(four ^ 0x80808080);
        part[r][0] = (i16v)_mm512_dpbusd_epi32((__m512i)part[r][0], a, s);
        part[r][1] = (i16v)_mm512_dpbusd_epi32((__m512i)part[r][1], b, s);
      }
#elif defined(__AVX2__) && !defined(__AVX512F__)
      const i16v all = load<i16v>(data);
      const Pairs a_lo = pairs_of(all.lo, 0), a_hi = pairs_of(all.hi, 0), b_lo = pairs_of(all.lo, 4), b_hi = pairs_of(all.hi, 4);
      UNROLL for (int r = 0; r < R; ++r) {
        int32_t even, odd;
        pairs_of(rows + r * x.stride + k, 128, even, odd);
        part[r][0].lo += a_lo.times(even, odd), part[r][0].hi += a_hi.times(even, odd);
        part[r][1].lo += b_lo.times(even, odd), part[r][1].hi += b_hi.times(even, odd);
      }
#else
      const i16v all = load<i16v>(data);
      for (int j = 0; j < 4; ++j) {
        i16v a = (all >> (8 * j)) & 15, b = (all >> (8 * j + 4)) & 15;
        UNROLL for (int r = 0; r < R; ++r) {
          int32_t s = int32_t(rows[r * x.stride + k + j]) - 128;
          part[r][0] += a * s, part[r][1] += b * s;
        }
      }
#endif
    }
    f16v left = load16(scales), right = load16(scales + 16);
    UNROLL for (int r = 0; r < R; ++r) {
      int32_t offset = 8 * x.sums[(row + r) * groups + g];
      sum[r][0] += float_of(part[r][0] - offset) * left;
      sum[r][1] += float_of(part[r][1] - offset) * right;
    }
  }
  for (int c = 0; c < 2; ++c) {
    int64_t at = first + 16 * c, n = std::clamp<int64_t>(w.out - at, 0, 16);
    f16v bias = some<f16v>(w.bias ? w.bias + at : nullptr, n);
    UNROLL for (int r = 0; r < R; ++r) put(y + (row + r) * w.out + at, sum[r][c] * x.scale[row + r] + bias, n);
  }
}

// 16 numbers, rounded to the nearest whole number, of equally near ones to the even one.
inline void put_bytes(uint8_t* to, f16v x) {
#if defined(__AVX512F__)
  __m128i y = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32((__m512)x));
  y = _mm_xor_si128(y, _mm_set1_epi8(-128));
  std::memcpy(to, &y, 16);
#else
  float all[16];
  store(all, x);
  for (int t = 0; t < 16; ++t) to[t] = uint8_t(int32_t(std::nearbyint(all[t])) + 128);
#endif
}

template <typename T>
void to_bytes(const T* x, int64_t rows, int64_t in, bool summed, Bytes& to) {
  const int64_t whole = in / 16 * 16;
  to.stride = (in + 3) / 4 * 4;
  to.data.assign(rows * to.stride, 128);
  to.scale.resize(rows);
  const int64_t groups = summed ? in / group_length : 0;
  to.sums.resize(rows * groups);
  at::parallel_for(0, rows, 8, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const T* row = x + r * in;
      // Without their signs numbers have the order of their bits, and a NaN is above all: it becomes the row's scale, and is seen.
      i16v tops = {};
      for (int64_t i = 0; i < whole; i += 16) {
        i16v y = (i16v)load16(row + i) & 0x7fffffff;
        tops = chosen(y > tops, y, tops);
      }
      int32_t top = 0;
      for (int t = 0; t < 16; ++t) top = std::max(top, tops[t]);
      for (int64_t i = whole; i < in; ++i) top = std::max(top, std::bit_cast<int32_t>(std::fabs(value_of(row[i]))));
      float most = std::bit_cast<float>(top);
      float inverse = most > 0 ? 127.0f / most : 0.0f;
      uint8_t* bytes = to.data.data() + r * to.stride;
      for (int64_t i = 0; i < whole; i += 16) put_bytes(bytes + i, load16(row + i) * inverse);
      for (int64_t i = whole; i < in; ++i) bytes[i] = uint8_t(int32_t(std::nearbyint(value_of(row[i]) * inverse)) + 128);
      to.scale[r] = most / 127.0f;
      for (int64_t g = 0; g < groups; ++g) {
        int32_t sum = 0;
        for (int64_t i = g * group_length; i < (g + 1) * group_length; ++i) sum += bytes[i];
        to.sums[r * groups + g] = sum - 128 * int32_t(group_length);
      }
    }
  });
}

// Several layers on the same rows: their blocks are shared out among the threads as if they were one layer's.
template <typename T>
void multiply(const std::vector<const Weight*>& weights, const T* x, const std::vector<T*>& outs, int64_t rows) {
  std::vector<int64_t> ends;
  for (const Weight* w : weights) ends.push_back((ends.empty() ? 0 : ends.back()) + (w->out + block_width - 1) / block_width);
  static thread_local Bytes bytes;
  const Bytes* rounded = &bytes;  // this thread's, for all threads
  auto any = [&](auto which) { return std::any_of(weights.begin(), weights.end(), which); };
  if (any([](const Weight* w) { return w->rounded(); }))
    to_bytes(x, rows, weights[0]->in, any([](const Weight* w) { return w->scales != nullptr; }), bytes);
  // Below about 100k multiplications a second thread costs more than it brings.
  int64_t grain = std::max<int64_t>(1, 100000 / std::max<int64_t>(1, block_width * weights[0]->in * rows));
  const bool tiled = tiles_fit(weights[0]->in);
#if defined(__AVX512BF16__)
  const T* wide = x;
#else
  static thread_local std::vector<float> widened;
  const float* wide = (const float*)x;
  if constexpr (std::is_same_v<T, bf16>) {
    widened.resize(rows * weights[0]->in);
    for (int64_t i = 0; i < rows * weights[0]->in; ++i) widened[i] = widen(x[i]);
    wide = widened.data();  // this thread's, for all threads
  }
#endif
  at::parallel_for(0, ends.back(), grain, [&](int64_t begin, int64_t end) {
    std::optional<Tiles> tiles;
    if (tiled) tiles.emplace(rows);
    for (int64_t t = begin, i = 0; t < end; ++t) {
      while (t >= ends[i]) ++i;
      const Weight& w = *weights[i];
      T* y = outs[i];
      int64_t first = (t - (i ? ends[i - 1] : 0)) * block_width;
      if (w.scales)  // two sums for each row and vector
        in_groups<(row_group + 1) / 2>(rows, [&](auto count, int64_t row) { block_of_halves<count()>(w, *rounded, row, y, first); });
      else if (w.scale && tiled)
        block_of_tiles(w, *rounded, rows, y, first);
      else if (w.scale)
        in_groups<row_group>(rows, [&](auto count, int64_t row) { block<count()>(w, *rounded, row, y, first); });
      else if (std::is_same_v<T, bf16> && tiled)
        block_of_tiles(w, (const bf16*)x, rows, (bf16*)y, first);
      else
        in_groups<row_group>(rows, [&](auto count, int64_t row) { block<count()>(w, wide + row * w.in, y + row * w.out, first); });
    }
  });
}

}  // namespace
