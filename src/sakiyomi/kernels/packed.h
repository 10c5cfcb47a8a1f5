// Keys and values in 8, 4 or 2 bits, as cache/packed_pairs.py packs them: number = low + code * step, 32 numbers to a step and low.
//
// 32 codes take 4 * bits bytes, in planes: byte j holds codes j, j + 4 * bits, ..., the first in its lowest bits. Of keys the 32 are
// tokens of one channel, so that 16 of them unpacked are a turned tile as it is; of values they are channels of one token.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "vector.h"

namespace {

constexpr int64_t packed_group = 32;

struct Packed {
  const uint8_t* keys = nullptr;  // [slots][heads][room / 32][key_dim][4 * bits]
  const uint16_t* key_scales = nullptr;  // float16 [slots][heads][room / 32][key_dim][2]: step, low
  const uint8_t* values = nullptr;  // [slots][heads][room][value_bytes]
  const uint16_t* value_scales = nullptr;  // float16 [slots][heads][room][value_groups][2]
  int64_t room = 0, bits = 0;
};

typedef uint8_t b16v __attribute__((vector_size(16)));
typedef uint64_t d2v __attribute__((vector_size(16)));

// float16 to float; exact for all finite numbers.
inline float from_half(uint16_t h) {
  uint32_t bits = uint32_t(h & 0x7fff) << 13;
  float y;
  std::memcpy(&y, &bits, 4);
  y *= 0x1p112f;
  std::memcpy(&bits, &y, 4);
  bits |= uint32_t(h & 0x8000) << 16;
  std::memcpy(&y, &bits, 4);
  return y;
}

inline void from_halves(const uint16_t* from, int64_t count, float* to) {
  int64_t i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= count; i += 16) store16(to + i, (f16v)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(from + i))));
#endif
  for (; i < count; ++i) to[i] = from_half(from[i]);
}

inline f16v floats_of(b16v codes) {
#if defined(__AVX512F__)
  return (f16v)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32((__m128i)codes));
#else
  return __builtin_convertvector(__builtin_convertvector(codes, i16v), f16v);
#endif
}

// Codes 16 * half and on of 32.
template <int bits>
inline f16v codes16(const uint8_t* from, int64_t half) {
  b16v codes;
  if constexpr (bits == 8) {
    std::memcpy(&codes, from + 16 * half, 16);
  } else if constexpr (bits == 4) {
    d2v both;
    std::memcpy(&both, from, 16);
    codes = (b16v)((both >> (4 * half)) & 0x0f0f0f0f0f0f0f0full);
  } else {
    uint64_t all;
    std::memcpy(&all, from, 8);
    all >>= 4 * half;
    codes = (b16v)(d2v{all & 0x0303030303030303ull, (all >> 2) & 0x0303030303030303ull});
  }
  return floats_of(codes);
}

// Code n of `count`, a multiple of 8.
inline float code_at(const uint8_t* from, int64_t n, int64_t count, int64_t bits) {
  const int64_t plane = count * bits / 8;
  return float((from[n % plane] >> (n / plane * bits)) & ((1 << bits) - 1));
}

// Calls f with the bits as a constant.
template <typename F>
inline void with_bits(int64_t bits, F f) {
  if (bits == 8) f(std::integral_constant<int, 8>());
  else if (bits == 4) f(std::integral_constant<int, 4>());
  else f(std::integral_constant<int, 2>());
}

inline int64_t value_bytes(int64_t dim, int64_t bits) { return (dim + 7) / 8 * bits; }
inline int64_t value_groups(int64_t dim) { return (dim + packed_group - 1) / packed_group; }

// Numbers of two channels as bf16, side by side.
inline void store_pairs(void* to, f16v first, f16v second) {
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
  const i16v sides = i16v{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} * 0x10001 + 0x100000;
  _mm512_storeu_si512(to, _mm512_permutexvar_epi16((__m512i)sides, (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first)));
#else
  auto rounded = [](f16v x) { return (u16v)x + 0x7fffu + (((u16v)x >> 16) & 1); };
  u16v pairs = rounded(first) >> 16 | (rounded(second) & 0xffff0000u);
  std::memcpy(to, &pairs, 64);
#endif
}

// 16 keys of a group, lane by lane as `turn` in attention.h; `steps` are the group's steps and lows.
template <int bits, typename L>
inline void unpack_turned(const uint8_t* codes, const float* steps, int64_t half, int64_t dim, L* to) {
  auto channel = [&](int64_t d) { return steps[2 * d + 1] + codes16<bits>(codes + d * 4 * bits, half) * steps[2 * d]; };
  if constexpr (std::is_same_v<L, float>) {
    for (int64_t d = 0; d < dim; ++d) store16(to + 16 * d, channel(d));
  } else {  // two numbers of bf16 to a lane
    for (int64_t d = 0; d < dim; d += 2, to += 16) store_pairs(to, channel(d), d + 1 < dim ? channel(d + 1) : f16v{});
  }
}

// One token's value, (dim) floats; `steps` are the step and low of each group.
template <int bits>
inline void unpack_value(const uint8_t* codes, const float* steps, int64_t dim, float* to) {
  int64_t d = 0;
  for (; d + packed_group <= dim; d += packed_group, codes += 4 * bits, steps += 2) {
    store16(to + d, steps[1] + codes16<bits>(codes, 0) * steps[0]);
    store16(to + d + 16, steps[1] + codes16<bits>(codes, 1) * steps[0]);
  }
  const int64_t count = (dim - d + 7) / 8 * 8;
  for (int64_t n = 0; d < dim; ++n, ++d) to[d] = std::fma(code_at(codes, n, count, bits), steps[0], steps[1]);
}

// All packed keys and values of one head as rows of T, for what reads them often.
template <typename T>
void unpack_head(const Packed& packed, int64_t head, int64_t count, int64_t key_dim, int64_t value_dim, T* keys, T* values) {
  const int64_t first = head * packed.room;
  std::vector<float> steps(2 * std::max(key_dim, value_groups(value_dim))), block(16 * key_dim), value(value_dim + 16);
  auto write = [](T* to, float x) {
    if constexpr (std::is_same_v<T, float>) *to = x;
    else *to = narrow(x);
  };
  with_bits(packed.bits, [&](auto bits) {
    for (int64_t t = 0; t < count; t += 16) {
      const int64_t group = (first + t) / packed_group * key_dim;
      from_halves(packed.key_scales + group * 2, 2 * key_dim, steps.data());
      unpack_turned<bits(), float>(packed.keys + group * 4 * bits(), steps.data(), t / 16 % 2, key_dim, block.data());
      for (int64_t i = 0; i < 16; ++i)
        for (int64_t d = 0; d < key_dim; ++d) write(keys + (t + i) * key_dim + d, block[16 * d + i]);
    }
    for (int64_t t = 0; t < count; ++t) {
      from_halves(packed.value_scales + (first + t) * value_groups(value_dim) * 2, 2 * value_groups(value_dim), steps.data());
      unpack_value<bits()>(packed.values + (first + t) * value_bytes(value_dim, bits()), steps.data(), value_dim, value.data());
      for (int64_t d = 0; d < value_dim; ++d) write(values + t * value_dim + d, value[d]);
    }
  });
}

}  // namespace
