// Products of bytes, summed in 32 bits, by the instructions of each kind of processor: whole numbers, exact in any order.
//
//   AVX-512 VNNI, AVX-VNNI  unsigned times signed bytes, four to a sum
//   AVX2                    the same, two to a sum of 16 bits, which must not overflow
//   NEON                    signed times signed bytes, four to a sum; with I8MM unsigned times signed, too
//
// A row has numbers from -127 to 127.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "vector.h"

#if defined(__AVX512VNNI__)
#define BYTES_VNNI512 1
#elif defined(__AVX512F__)
#elif defined(__AVXVNNI__)
#define BYTES_VNNI256 1
#elif defined(__AVX2__)
#define BYTES_AVX2 1
#elif defined(__ARM_FEATURE_DOTPROD)
#define BYTES_NEON 1
#endif

namespace {

using Whole = typename Native<int32_t>::type;
using Real = typename Native<float>::type;
typedef uint8_t Eights __attribute__((vector_size(native_bytes)));
typedef uint16_t Sixteens __attribute__((vector_size(native_bytes)));

// A number of a row that meets signed weights. `row_offset` is added where the instruction wants it unsigned.
#if defined(BYTES_VNNI512) || defined(BYTES_VNNI256)
using RowByte = uint8_t;
constexpr int row_offset = 128;
#else
using RowByte = int8_t;
constexpr int row_offset = 0;
#endif

// Four numbers of a row, again and again.
inline Whole four_of(const void* x) {
  int32_t four;
  std::memcpy(&four, x, 4);
#if defined(__AVX512F__)
  return (Whole)_mm512_set1_epi32(four);
#elif defined(__AVX2__)
  return (Whole)_mm256_set1_epi32(four);
#else
  return Whole{} + four;
#endif
}

// Four numbers of a row as signed bytes.
inline Whole signed_four(const int8_t* x) { return four_of(x); }
inline Whole signed_four(const uint8_t* x) { return four_of(x) ^ int32_t(0x80808080); }

// Adds the products of each channel's four weights, which are signed, and four numbers of a row.
inline Whole add_weights(Whole sum, Eights weights, const RowByte* x) {
#if defined(BYTES_VNNI512)
  return (Whole)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)four_of(x), (__m512i)weights);
#elif defined(BYTES_VNNI256)
  return (Whole)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)four_of(x), (__m256i)weights);
#elif defined(BYTES_AVX2)
  // The weight's sign goes to the row's number: two products are at most 2 * 128 * 127 < 2^15.
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8((__m256i)weights), _mm256_sign_epi8((__m256i)four_of(x), (__m256i)weights));
  return sum + (Whole)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#elif defined(BYTES_NEON)
  return (Whole)vdotq_s32((int32x4_t)sum, (int8x16_t)weights, (int8x16_t)four_of(x));
#else
  for (int j = 0; j < 4; ++j) sum += (((Whole)weights << (24 - 8 * j)) >> 24) * (int32_t(x[j]));
  return sum;
#endif
}

// Codes are unsigned, `most` at most. Where no instruction takes so large ones, they become signed, less by `code_offset<most>`.
#if defined(BYTES_AVX2)
template <int most>
constexpr int code_offset = most > 63 ? 128 : 0;
// So many steps of four inputs fit into sums of 16 bits.
template <int most>
constexpr int steps_of_pairs = most <= 15 ? 8 : most <= 31 ? 4 : 2;
static_assert(8 * 254 * 15 < 1 << 15 && 4 * 254 * 31 < 1 << 15 && 2 * 254 * 63 < 1 << 15);
#elif defined(BYTES_NEON) && !defined(__ARM_FEATURE_MATMUL_INT8)
template <int most>
constexpr int code_offset = most > 127 ? 128 : 0;
#else
template <int most>
constexpr int code_offset = 0;
#endif

// Codes as they are multiplied.
template <int most>
inline Eights ready_of(Eights codes) {
  return code_offset<most> ? codes ^ 128 : codes;
}

// Adds the products of each channel's four codes, made ready, and four numbers of a row.
template <int most, typename X>
inline Whole add_codes(Whole sum, Eights codes, const X* x) {
  if constexpr (code_offset<most> != 0) return add_weights(sum, codes, x);
#if defined(BYTES_VNNI512)
  return (Whole)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, (__m512i)signed_four(x));
#elif defined(BYTES_VNNI256)
  return (Whole)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)codes, (__m256i)signed_four(x));
#elif defined(BYTES_NEON) && defined(__ARM_FEATURE_MATMUL_INT8)
  return (Whole)vusdotq_s32((int32x4_t)sum, (uint8x16_t)codes, (int8x16_t)signed_four(x));
#elif defined(BYTES_NEON)
  return (Whole)vdotq_s32((int32x4_t)sum, (int8x16_t)codes, (int8x16_t)signed_four(x));
#else
  for (int j = 0; j < 4; ++j) sum += (((Whole)codes >> (8 * j)) & 255) * int32_t(x[j]);
  return sum;
#endif
}

// Adds the products of R rows, `stride` apart, and the codes of `steps` times four inputs, 4 or 8: codes(k, c) are those of step k, made
// ready, of the native vector c of a block's channels. In pairs of steps, which some formats take apart together.
template <int R, int parts, int most, int steps, typename C, typename X>
inline __attribute__((always_inline)) void add_steps(Whole sum[R][parts], C codes, int64_t first, const X* x, int64_t stride) {
#if defined(BYTES_AVX2)
  if constexpr (code_offset<most> == 0) {
    const __m256i ones = _mm256_set1_epi16(1);
    constexpr int together = std::min(steps, steps_of_pairs<most>);
    for (int64_t start = first; start < first + steps; start += together) {
      __m256i pairs[R][parts];
      UNROLL for (int r = 0; r < R; ++r)
        UNROLL for (int c = 0; c < parts; ++c) pairs[r][c] = _mm256_setzero_si256();
      for (int64_t k = start; k < start + together; k += 2)
        UNROLL for (int odd = 0; odd < 2; ++odd)
          UNROLL for (int c = 0; c < parts; ++c) {
            const __m256i ready = (__m256i)codes(k + odd, c);
            UNROLL for (int r = 0; r < R; ++r)
              pairs[r][c] = _mm256_add_epi16(pairs[r][c], _mm256_maddubs_epi16(ready, (__m256i)four_of(x + r * stride + 4 * (k + odd))));
          }
      UNROLL for (int r = 0; r < R; ++r)
        UNROLL for (int c = 0; c < parts; ++c) sum[r][c] += (Whole)_mm256_madd_epi16(pairs[r][c], ones);
    }
    return;
  }
#endif
  for (int64_t k = first; k < first + steps; k += 2)
    UNROLL for (int odd = 0; odd < 2; ++odd)
      UNROLL for (int c = 0; c < parts; ++c) {
        const Eights ready = codes(k + odd, c);
        UNROLL for (int r = 0; r < R; ++r) sum[r][c] = add_codes<most>(sum[r][c], ready, x + r * stride + 4 * (k + odd));
      }
}

}  // namespace
