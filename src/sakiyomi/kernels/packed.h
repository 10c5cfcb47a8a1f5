// Keys and values in 8, 4 or 2 bits, as cache/packed_pairs.py packs them: number = low + code * step, 32 numbers to a step and low.
//
// 32 codes take 4 * bits bytes, in planes: byte j holds codes j, j + 4 * bits, ..., the first in its lowest bits. Of keys the 32 are
// tokens of one channel, so that 16 of them unpacked are a turned tile as it is; of values they are channels of one token.
//
// With levels (cache/leveled_pairs.py, KVQuant) number = low + level[code] * step; keys are rotated to their places when they are read.

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

// What there is beside those where codes stand for levels. A step and low are of a channel of keys for all tokens, and of a token's
// value in a head; key_scales is not there.
struct Leveled {
  const float* levels = nullptr;    // [2][16], of keys and of values; null: codes stand for themselves
  const float* channels = nullptr;  // [heads][key_dim][2]
  const uint16_t *key_aside = nullptr, *value_aside = nullptr;  // [slots][heads][room / 32][number][2]: channel * 32 + token, float16
  const float* firsts = nullptr;   // [slots][heads][key_dim + value_dim], of the text's first token
  const int32_t* pairs = nullptr;  // [count][2], channels of keys that are rotated together
  const float* near = nullptr;     // [2][2][count][16], cosines and sines of places 0 to 15, and 16 to 31
  const float* far = nullptr;      // [room / 32][count][2], the same of places 32 * g
  int64_t keys_aside = 0, values_aside = 0, count = 0;
};

typedef uint8_t b16v __attribute__((vector_size(16)));
typedef uint64_t d2v __attribute__((vector_size(16)));

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
  int32_t all[16];
  for (int i = 0; i < 16; ++i) all[i] = codes[i];
  return float_of(load<i16v>(all));
#endif
}

// Of 16 levels those of these codes.
inline f16v levels_of(b16v codes, f16v levels) {
#if defined(__AVX512F__)
  return (f16v)_mm512_permutexvar_ps(_mm512_cvtepu8_epi32((__m128i)codes), (__m512)levels);
#else
  float all[16], y[16];
  store(all, levels);
  for (int i = 0; i < 16; ++i) y[i] = all[codes[i] & 15];
  return load16(y);
#endif
}

// Codes 16 * half and on of 32.
template <int bits>
inline b16v codes16(const uint8_t* from, int64_t half) {
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
  if constexpr (bits == 3) {  // behind the lower two bits of all codes their third
    uint32_t third;
    std::memcpy(&third, from + 8, 4);
    const uint64_t of_half = third >> (4 * half), ones = 0x01010101ull;
    const d2v high{(of_half & ones) | (of_half >> 1 & ones) << 32, (of_half >> 2 & ones) | (of_half >> 3 & ones) << 32};
    codes |= (b16v)(high << 2);
  }
  return codes;
}

// Code n of `count`, a multiple of 8.
inline int code_at(const uint8_t* from, int64_t n, int64_t count, int64_t bits) {
  if (bits == 3) return code_at(from, n, count, 2) | code_at(from + count / 4, n, count, 1) << 2;
  const int64_t plane = count * bits / 8;
  return (from[n % plane] >> (n / plane * bits)) & ((1 << bits) - 1);
}

// Calls f with the bits as a constant.
template <typename F>
inline void with_bits(int64_t bits, F f) {
  if (bits == 8) f(std::integral_constant<int, 8>());
  else if (bits == 4) f(std::integral_constant<int, 4>());
  else if (bits == 3) f(std::integral_constant<int, 3>());
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
  auto rounded = [](f16v x) { return (u16v)x + 0x7fffu + (((u16v)x >> 16) & 1u); };
  u16v pairs = rounded(first) >> 16 | (rounded(second) & 0xffff0000u);
  store(to, pairs);
#endif
}

// 16 keys of a group, lane by lane as `turn` in attention.h; `steps` are the group's steps and lows.
template <int bits, typename L>
inline void unpack_turned(const uint8_t* codes, const float* steps, int64_t half, int64_t dim, L* to) {
  auto channel = [&](int64_t d) { return steps[2 * d + 1] + floats_of(codes16<bits>(codes + d * 4 * bits, half)) * steps[2 * d]; };
  if constexpr (std::is_same_v<L, float>) {
    for (int64_t d = 0; d < dim; ++d) store16(to + 16 * d, channel(d));
  } else {  // two numbers of bf16 to a lane
    for (int64_t d = 0; d < dim; d += 2, to += 16) store_pairs(to, channel(d), d + 1 < dim ? channel(d + 1) : f16v{});
  }
}

// f(channel, token, number) of the numbers that lie aside.
template <typename F>
inline void each_aside(const uint16_t* aside, int64_t count, F f) {
  for (int64_t i = 0; i < count; ++i) f(aside[2 * i] >> 5, aside[2 * i] & 31, from_half(aside[2 * i + 1]));
}

// The same where codes stand for levels, and rotated. `head` counts over slots, `own` those of the slot, `column` is a multiple of 16,
// `tile` has 16 floats for each channel, and is `to` where that takes floats.
template <int bits, typename L>
inline void unpack_leveled(const Packed& packed, const Leveled& leveled, int64_t head, int64_t own, int64_t column, int64_t key_dim,
                           int64_t value_dim, float* tile, L* to) {
  const int64_t half = column / 16 % 2, place = column / packed_group, group = head * (packed.room / packed_group) + place;
  const uint8_t* codes = packed.keys + group * key_dim * 4 * bits;
  const float* steps = leveled.channels + own * key_dim * 2;
  const f16v levels = load16(leveled.levels);
  for (int64_t d = 0; d < key_dim; ++d)
    store16(tile + 16 * d, steps[2 * d + 1] + levels_of(codes16<bits>(codes + d * 4 * bits, half), levels) * steps[2 * d]);
  each_aside(leveled.key_aside + group * leveled.keys_aside * 2, leveled.keys_aside, [&](int64_t d, int64_t t, float x) {
    if (t / 16 == half) tile[16 * d + t % 16] = x;
  });
  if (column == 0)
    for (int64_t d = 0; d < key_dim; ++d) tile[16 * d] = leveled.firsts[head * (key_dim + value_dim) + d];
  const float* cosines = leveled.near + half * 2 * leveled.count * 16;
  const float* sines = cosines + leveled.count * 16;
  const float* far = leveled.far + place * leveled.count * 2;
  for (int64_t i = 0; i < leveled.count; ++i) {  // the angles of both tables together
    const f16v near_cos = load16(cosines + 16 * i), near_sin = load16(sines + 16 * i);
    const f16v cos = near_cos * far[2 * i] - near_sin * far[2 * i + 1], sin = near_cos * far[2 * i + 1] + near_sin * far[2 * i];
    float *a = tile + 16 * leveled.pairs[2 * i], *b = tile + 16 * leveled.pairs[2 * i + 1];
    const f16v x = load16(a), y = load16(b);
    store16(a, x * cos - y * sin), store16(b, x * sin + y * cos);
  }
  if constexpr (!std::is_same_v<L, float>) {
    for (int64_t d = 0; d < key_dim; d += 2, to += 16)
      store_pairs(to, load16(tile + 16 * d), d + 1 < key_dim ? load16(tile + 16 * (d + 1)) : f16v{});
  }
}

// One token's value, (dim) floats; `steps` are the step and low of each group.
template <int bits>
inline void unpack_value(const uint8_t* codes, const float* steps, int64_t dim, float* to) {
  int64_t d = 0;
  for (; d + packed_group <= dim; d += packed_group, codes += 4 * bits, steps += 2) {
    store16(to + d, steps[1] + floats_of(codes16<bits>(codes, 0)) * steps[0]);
    store16(to + d + 16, steps[1] + floats_of(codes16<bits>(codes, 1)) * steps[0]);
  }
  const int64_t count = (dim - d + 7) / 8 * 8;
  for (int64_t n = 0; d < dim; ++n, ++d) to[d] = std::fma(float(code_at(codes, n, count, bits)), steps[0], steps[1]);
}

// The same where codes stand for levels, with one step and low.
template <int bits>
inline void unpack_leveled_value(const uint8_t* codes, const float* table, float step, float low, int64_t dim, float* to) {
  const f16v levels = load16(table);
  int64_t d = 0;
  for (; d + packed_group <= dim; d += packed_group, codes += 4 * bits) {
    store16(to + d, low + levels_of(codes16<bits>(codes, 0), levels) * step);
    store16(to + d + 16, low + levels_of(codes16<bits>(codes, 1), levels) * step);
  }
  const int64_t count = (dim - d + 7) / 8 * 8;
  for (int64_t n = 0; d < dim; ++n, ++d) to[d] = std::fma(table[code_at(codes, n, count, bits)], step, low);
}

// The packed columns of one head, read in order.
template <int bits>
class PackedHead {
 public:
  // `slot_head` counts heads over slots, `own` those of the slot; `steps` and `tile` are memory of the thread.
  PackedHead(const Packed& packed, const Leveled& leveled, int64_t slot_head, int64_t own, int64_t key_dim, int64_t value_dim,
             std::vector<float>& steps, std::vector<float>& tile)
      : packed_(packed), leveled_(leveled), head_(slot_head), own_(own), first_(slot_head * packed.room), key_dim_(key_dim),
        value_dim_(value_dim), numbers_(leveled.levels ? 2 : 2 * value_groups(value_dim)), steps_(steps), tile_(tile) {
    steps_.resize(std::max(2 * key_dim, packed_group * numbers_));
    if (leveled.levels) tile_.resize(16 * key_dim);
  }

  // 16 keys from column j, a multiple of 16, lane by lane as `turn` in attention.h.
  template <typename L>
  void keys(int64_t j, L* to) {
    if (leveled_.levels) {
      float* tile = tile_.data();
      if constexpr (std::is_same_v<L, float>) tile = to;
      return unpack_leveled<bits>(packed_, leveled_, head_, own_, j, key_dim_, value_dim_, tile, to);
    }
    const int64_t group = (first_ + j) / packed_group * key_dim_;
    if (j % packed_group == 0) from_halves(packed_.key_scales + 2 * group, 2 * key_dim_, steps_.data());
    unpack_turned<bits>(packed_.keys + group * 4 * bits, steps_.data(), j / 16 % 2, key_dim_, to);
  }

  // 32 values from column j, a multiple of 32, as rows; there is memory for 16 numbers more.
  void values(int64_t j, float* to) {
    const uint8_t* codes = packed_.values + (first_ + j) * value_bytes(value_dim_, bits);
    from_halves(packed_.value_scales + (first_ + j) * numbers_, packed_group * numbers_, steps_.data());
    for (int64_t t = 0; t < packed_group; ++t, codes += value_bytes(value_dim_, bits)) {
      const float* steps = steps_.data() + t * numbers_;
      if (leveled_.levels) unpack_leveled_value<bits>(codes, leveled_.levels + 16, steps[0], steps[1], value_dim_, to + t * value_dim_);
      else unpack_value<bits>(codes, steps, value_dim_, to + t * value_dim_);
    }
    if (!leveled_.levels) return;
    const int64_t group = (first_ + j) / packed_group;
    each_aside(leveled_.value_aside + group * leveled_.values_aside * 2, leveled_.values_aside,
               [&](int64_t d, int64_t t, float x) { to[t * value_dim_ + d] = x; });
    if (j == 0) std::memcpy(to, leveled_.firsts + head_ * (key_dim_ + value_dim_) + key_dim_, value_dim_ * sizeof(float));
  }

 private:
  const Packed& packed_;
  const Leveled& leveled_;
  int64_t head_, own_, first_, key_dim_, value_dim_, numbers_;  // of the scales of one value
  std::vector<float>&steps_, &tile_;
};

}  // namespace
