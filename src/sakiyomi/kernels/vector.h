// Sixteen numbers at a time: loads, stores, sums and exp for fp32 and bf16; rows in groups.

#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "wide.h"

namespace {

using bf16 = uint16_t;
typedef uint16_t h16v __attribute__((vector_size(32)));

// Sums in an array stay in registers only if gcc unrolls early; later it also stores each of them to memory at every step.
#define UNROLL _Pragma("GCC unroll 8")
// For work that runs between instructions of a loop: what it counts has to stay in registers.
#define ALWAYS_INLINE inline __attribute__((always_inline))

inline float widen(bf16 x) {
  uint32_t bits = uint32_t(x) << 16;
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}

inline float value_of(float x) { return x; }
inline float value_of(bf16 x) { return widen(x); }

inline bf16 narrow(float x) {  // round to nearest even, as torch does
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
  return bf16((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

inline float from_half(uint16_t x) {  // float16 to float; exact for all finite numbers
  const float y = std::bit_cast<float>(uint32_t(x & 0x7fff) << 13) * 0x1p112f;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(y) | uint32_t(x & 0x8000) << 16);
}

// Rounded to nearest even, as torch does. The processor's own instruction takes numbers below 1.2e-38 for 0.
#if defined(__AVX512BF16__)
inline h16v narrow(f16v x) { return (h16v)_mm512_cvtneps_pbh((__m512)x); }
inline u16v rounded_bits(f16v x) { return (u16v)_mm512_cvtepu16_epi32((__m256i)narrow(x)); }
#else
inline u16v rounded_bits(f16v x) {
  u16v bits = (u16v)x;
  u16v rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  u16v nan = (u16v)((bits & 0x7fffffffu) > 0x7f800000u);
  return (nan & 0x7fc0u) | (~nan & rounded);
}

inline h16v narrow(f16v x) {
  const u16v found = rounded_bits(x);
#if defined(__AVX512F__)
  return __builtin_convertvector(found, h16v);
#elif defined(__AVX2__)
  return (h16v)_mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)found.lo, (__m256i)found.hi), 0xd8);
#else
  uint32_t all[16];
  store(all, found);
  h16v y;
  for (int t = 0; t < 16; ++t) y[t] = uint16_t(all[t]);
  return y;
#endif
}
#endif

// Numbers as they are where rows of this type hold them.
inline f16v as_rounded(f16v x, const float*) { return x; }
inline f16v as_rounded(f16v x, const bf16*) { return (f16v)(rounded_bits(x) << 16); }

// Have the second-level cache read what is needed soon: the first one waits for too few lines at once, and what the processor fetches by
// itself ends with a memory page. Functions that do nothing else are inlined: gcc may leave out calls of them, as they have no result.
ALWAYS_INLINE void fetch(const void* from) { __builtin_prefetch(from, 0, 2); }

// Reads lines of memory in order, for what needs them next: the processor then fetches more lines by itself than it does of `fetch`.
inline void read_through(const void* from, const void* end) {
  for (const char* line = (const char*)from; line < end; line += 64) asm volatile("" : : "r"(*line));
}

inline f16v load16(const float* p) { return load<f16v>(p); }

inline f16v load16(const bf16* p) {
#if defined(__AVX512F__)
  return (f16v)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#elif defined(__AVX2__)
  auto half = [](const bf16* from) { return _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from)), 16); };
  return {(f16v::Half)half(p), (f16v::Half)half(p + 8)};
#else
  float all[16];
  for (int t = 0; t < 16; ++t) all[t] = widen(p[t]);
  return load16(all);
#endif
}

// The first `count` numbers of 16, zeros behind them.
template <typename T>
inline f16v first16(const T* from, int64_t count) {
  if (count >= 16) return load16(from);
  T all[16] = {};
  std::memcpy(all, from, count * sizeof(T));
  return load16(all);
}

inline void store16(float* p, f16v x) { store(p, x); }

// A copy of a length known only at run time is a call, which costs as much as the products of 64 weights: whole vectors go their own way.
inline void put(float* y, f16v v, int64_t n) {
  if (n == 16) return store(y, v);
  std::memcpy(y, &v, 4 * n);
}
inline void put(bf16* y, f16v v, int64_t n) {
  h16v h = narrow(v);
  n == 16 ? std::memcpy(y, &h, 32) : std::memcpy(y, &h, 2 * n);
}

// The first n of 32 numbers.
template <typename T>
inline void put_block(T* y, f16v low, f16v high, int64_t n) {
#if defined(__AVX512BF16__)
  if (std::is_same_v<T, bf16> && n == 32) return (void)_mm512_storeu_si512(y, (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
#endif
  put(y, low, std::min<int64_t>(n, 16));
  if (n > 16) put(y + 16, high, n - 16);
}

inline float total(f16v x) {  // a fixed tree of additions
#if defined(__AVX512F__)
  // No copies of parts of x: gcc would keep a sum whose address is taken in memory, and wait for it at every step of a loop.
  const __m256 a = _mm256_add_ps(_mm512_castps512_ps256((__m512)x), _mm256_castpd_ps(_mm512_extractf64x4_pd((__m512d)x, 1)));
  const __m128 c = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  return (c[0] + c[2]) + (c[1] + c[3]);
#else
#if defined(__AVX2__)
  typedef float f8v __attribute__((vector_size(32)));
#else
  using f8v = f16v::Half;
#endif
  typedef float f4v __attribute__((vector_size(16)));
  f8v a = x.lo + x.hi;
  f4v c, d;
  std::memcpy(&c, &a, 16);
  std::memcpy(&d, (const char*)&a + 16, 16);
  c += d;
  return (c[0] + c[2]) + (c[1] + c[3]);
#endif
}

// Rows that a group has at most, where each has two vectors of sums: beyond that sums no longer stay in registers, of which there are
// 32 of 64 bytes, or 16 of 32.
#if defined(__AVX512F__)
constexpr int row_group = 8;
#else
constexpr int row_group = 3;
#endif

// Calls f(number of rows as a constant, first row) for groups of so many rows, and for what remains.
template <int most, typename F>
inline void in_groups(int64_t rows, F f, int64_t first = 0) {
  for (; rows >= most; rows -= most, first += most) f(std::integral_constant<int, most>(), first);
  if constexpr (most > 1)
    if (rows) in_groups<most - 1>(rows, f, first);
}

// The larger of two numbers; of a number and something else the second one.
inline f16v larger(f16v a, f16v b) {
#if defined(__AVX512F__)
  return (f16v)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return {(f16v::Half)_mm256_max_ps((__m256)a.lo, (__m256)b.lo), (f16v::Half)_mm256_max_ps((__m256)a.hi, (__m256)b.hi)};
#else
  return chosen(a > b, a, b);
#endif
}

inline float highest_of(f16v x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)x);
#else
  float highest = x[0];
  for (int i = 1; i < 16; ++i) highest = std::max(highest, x[i]);
  return highest;
#endif
}

// Whether there was something among numbers that is none.
struct Strange {
#if defined(__AVX512F__)
  __mmask16 any = 0;
  void see(f16v x) { any |= _mm512_cmp_ps_mask((__m512)x, (__m512)x, _CMP_UNORD_Q); }
  bool found() const { return any; }
#else
  i16v any = {};
  void see(f16v x) { any |= (i16v)(x != x); }
  bool found() const {
    int32_t all = 0;
    for (int t = 0; t < 16; ++t) all |= any[t];
    return all;
  }
#endif
};

constexpr float log2_e = 1.44269504088896341f;

// exp of numbers up to 0 by Cody-Waite reduction and a polynomial of degree 6: relative error about 2e-7 on [-86, 0]; at most
// 1e-37 below that, and 0 at -inf.
inline f16v exp16(f16v x) {
#if defined(__AVX512F__)
  const f16v low = f16v{} - 200.0f;
  x = larger(x, low);
  f16v n = (f16v)_mm512_roundscale_ps((__m512)(x * log2_e), 0);
#else
  const f16v low = f16v{} - 87.0f;
  f16v small = x;
  x = chosen(x < low, low, x);
  i16v k = whole_of(x * log2_e - 0.5f);  // truncation rounds to nearest
  f16v n = float_of(k);
#endif
  f16v r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  f16v y = f16v{} + 1.9875691500e-4f;
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
#if defined(__AVX512F__)
  return (f16v)_mm512_scalef_ps((__m512)y, (__m512)n);
#else
  i16v bits = (k + 127) << 23;
  y *= (f16v)bits;
  return chosen(small < -86.0f, f16v{}, y);
#endif
}

// 2^x of numbers up to 0 by a polynomial of degree 5: relative error about 2e-7 on [-124, 0], and 0 below -126. Two
// thirds of the work of exp16, where a factor is at hand into which log2_e goes.
inline f16v power16(f16v x) {
#if defined(__AVX512F__)
  const __mmask16 normal = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_GE_OQ);  // others are 0: to make them costs hundreds of cycles
  const f16v n = (f16v)_mm512_roundscale_ps((__m512)x, 0);
#else
  const f16v small = x;
  x = larger(x, f16v{} - 125.0f);
  const f16v shifted = x + 0x1.8p23f, n = shifted - 0x1.8p23f;  // the nearest whole number, which is in the lowest bits of `shifted`
#endif
  const f16v r = x - n;
  f16v y = f16v{} + 1.3264727123569017e-3f;
  y = y * r + 9.67151264483068e-3f;
  y = y * r + 5.550733743497011e-2f;
  y = y * r + 2.402224208526215e-1f;
  y = y * r + 6.931469775989927e-1f;
  y = y * r + 1.0f;
#if defined(__AVX512F__)
  return (f16v)_mm512_maskz_scalef_ps(normal, (__m512)y, (__m512)n);
#else
  return chosen(small < -124.0f, f16v{}, (f16v)((i16v)y + ((i16v)shifted << 23)));
#endif
}

// Weights of a softmax, as they are multiplied.
inline void put_weights(float* to, f16v x) { store(to, x); }
inline void put_weights(bf16* to, f16v x) { put(to, x, 16); }

}  // namespace
