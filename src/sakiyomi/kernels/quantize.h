// Numbers rounded to the K formats of GGUF files; quantize.py of model_executor/gguf says how, and computes the same without the kernels.
//
// 16 groups are fitted at a time, each in a lane of the vectors: sums need no additions across lanes.

#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "torch.h"
#include "vector.h"

namespace {

constexpr int64_t k_block = 256, fitted_together = 16;
constexpr int guesses = 7;

inline float guess_at(int i) { return 0.88f + 0.03f * float(i); }

inline f16v smaller(f16v a, f16v b) { return chosen(a < b, a, b); }
inline f16v absolute(f16v x) { return (f16v)((u16v)x & 0x7fffffffu); }
inline f16v nearest(f16v x) { return (x + 0x1.8p23f) - 0x1.8p23f; }  // to even; of numbers below 2 ** 22
inline f16v clamped(f16v x, float least, float most) { return smaller(larger(x, f16v{} + least), f16v{} + most); }

// The quotient; 0 where the divisor is.
inline f16v quotient(f16v a, f16v b) { return chosen(b != 0.0f, a / chosen(b != 0.0f, b, f16v{} + 1.0f), f16v{}); }

inline f16v root(f16v x) {
  alignas(64) float all[fitted_together];
  store16(all, x);
  for (float& each : all) each = std::sqrt(each);
  return load16(all);
}

inline uint16_t half_of(float x) {  // rounded to nearest even; beyond the largest number infinity
  const uint32_t bits = std::bit_cast<uint32_t>(x), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
  if (rest > 0x7f800000) return 0x7e00;
  if (rest < 0x38800000) return uint16_t(sign | (std::bit_cast<uint32_t>(std::bit_cast<float>(rest) + 0.5f) - 0x3f000000));
  return uint16_t(sign | std::min<uint32_t>((rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13, 0x7c00));
}

// 16 groups of n numbers: [n][group].
template <int n>
struct Groups {
  f16v x[n];

  explicit Groups(const float* from) {
    alignas(64) float turned[n][fitted_together];
    for (int g = 0; g < fitted_together; ++g)
      for (int k = 0; k < n; ++k) turned[k][g] = from[g * n + k];
    for (int k = 0; k < n; ++k) x[k] = load16(turned[k]);
  }
};

// Scales and depths below zero with the least weighted error, of codes up to `most`.
inline void fit_with_minimum(const Groups<32>& groups, float most, f16v& scales, f16v& lows) {
  const f16v* x = groups.x;
  f16v low{}, high = x[0], squares{};
  for (int k = 0; k < 32; ++k) low = smaller(low, x[k]), high = larger(high, x[k]), squares += x[k] * x[k];
  const f16v spread = root(squares * (1.0f / 32));
  f16v weights[32], total{}, sum_x{};
  for (int k = 0; k < 32; ++k) weights[k] = absolute(x[k]) + spread, total += weights[k], sum_x += weights[k] * x[k];
  f16v best = f16v{} + INFINITY;
  scales = lows = f16v{};
  for (int i = 0; i < guesses; ++i) {
    const f16v inverse = quotient(f16v{} + 1.0f, (high - low) * (guess_at(i) / most));
    f16v codes[32], sum_q{}, sum_qq{}, sum_qx{}, error{};
    for (int k = 0; k < 32; ++k) {
      codes[k] = clamped(nearest((x[k] - low) * inverse), 0, most);
      const f16v weighted = weights[k] * codes[k];
      sum_q += weighted, sum_qq += weighted * codes[k], sum_qx += weighted * x[k];
    }
    f16v scale = quotient(total * sum_qx - sum_q * sum_x, total * sum_qq - sum_q * sum_q);
    f16v depth = quotient(scale * sum_q - sum_x, total);
    scale = larger(chosen(depth < 0.0f, quotient(sum_qx, sum_qq), scale), f16v{});  // where the minimum would be above zero
    depth = larger(depth, f16v{});
    for (int k = 0; k < 32; ++k) {
      const f16v off = scale * codes[k] - depth - x[k];
      error += weights[k] * off * off;
    }
    scales = chosen(error < best, scale, scales), lows = chosen(error < best, depth, lows), best = smaller(error, best);
  }
}

// The same without minimums, of codes from -32 to 31: first guesses make the largest number, of either sign, about -32.
inline f16v fit_signed(const Groups<16>& groups) {
  const f16v* x = groups.x;
  f16v largest = x[0];
  for (int k = 1; k < 16; ++k) largest = chosen(absolute(x[k]) > absolute(largest), x[k], largest);
  f16v best = f16v{} + INFINITY, scales{};
  for (int i = 0; i < guesses; ++i) {
    const f16v inverse = quotient(f16v{} + 1.0f, largest * (-1.0f / (32.0f * guess_at(i))));
    f16v codes[16], sum_qq{}, sum_qx{}, error{};
    for (int k = 0; k < 16; ++k) {
      codes[k] = clamped(nearest(x[k] * inverse), -32, 31);
      const f16v weighted = x[k] * x[k] * codes[k];
      sum_qq += weighted * codes[k], sum_qx += weighted * x[k];
    }
    const f16v scale = quotient(sum_qx, sum_qq);
    for (int k = 0; k < 16; ++k) {
      const f16v off = (scale * codes[k] - x[k]) * x[k];
      error += off * off;
    }
    scales = chosen(error < best, scale, scales), best = smaller(error, best);
  }
  return scales;
}

// Codes of `bits` in planes: of each `chunk` bytes the lowest bits are the first codes.
inline uint8_t* put_planes(const uint8_t* codes, int bits, int shift, int64_t chunk, uint8_t* to) {
  const int mask = (1 << bits) - 1;
  for (int64_t from = 0; from < k_block; to += chunk)
    for (int by = 0; by < 8; by += bits, from += chunk)
      for (int64_t i = 0; i < chunk; ++i) to[i] = uint8_t((by ? to[i] : 0) | (codes[from + i] >> shift & mask) << by);
  return to;
}

// The part of a scale that one of its groups has, a whole number.
inline float part_of(float scale, float whole, float least, float most) {
  return whole == 0 ? 0.0f : std::clamp(std::nearbyint(scale / whole), least, most);
}

// Codes of n numbers, to which `below` is added, from `least` to `most`; their offset is -least.
template <int n>
inline void put_codes(const float* x, float below, float step, float least, float most, uint8_t* codes) {
  const float inverse = step == 0 ? 0.0f : 1.0f / step;
  for (int k = 0; k < n; k += 16) {
    const i16v found = whole_of(clamped(nearest((load16(x + k) + below) * inverse), least, most) - least);
    int32_t all[16];
    store(all, found);
    for (int t = 0; t < 16; ++t) codes[k + t] = uint8_t(all[t]);
  }
}

// Q4_K, Q5_K: 8 groups of a block.
inline void put_with_minimum(const float* x, const float* scales, const float* lows, int bits, uint8_t* to) {
  const uint16_t halves[2] = {half_of(*std::max_element(scales, scales + 8) / 63), half_of(*std::max_element(lows, lows + 8) / 63)};
  const float whole = from_half(halves[0]), whole_low = from_half(halves[1]), most = float((1 << bits) - 1);
  uint8_t parts[8], low_parts[8], codes[k_block];
  for (int g = 0; g < 8; ++g) {
    parts[g] = uint8_t(part_of(scales[g], whole, 0, 63)), low_parts[g] = uint8_t(part_of(lows[g], whole_low, 0, 63));
    put_codes<32>(x + 32 * g, whole_low * low_parts[g], whole * parts[g], 0, most, codes + 32 * g);
  }
  std::memcpy(to, halves, 4), to += 4;
  for (int g = 0; g < 4; ++g) {
    to[g] = uint8_t(parts[g] | parts[4 + g] >> 4 << 6), to[4 + g] = uint8_t(low_parts[g] | low_parts[4 + g] >> 4 << 6);
    to[8 + g] = uint8_t((parts[4 + g] & 15) | low_parts[4 + g] << 4);
  }
  to += 12;
  if (bits == 5) to = put_planes(codes, 1, 4, 32, to);
  put_planes(codes, 4, 0, 32, to);
}

// Q6_K: 16 groups of a block.
inline void put_signed(const float* x, const float* scales, uint8_t* to) {
  float largest = 0;
  for (int g = 0; g < 16; ++g) largest = std::max(largest, std::fabs(scales[g]));
  const uint16_t half = half_of(largest / 127);
  const float whole = from_half(half);
  int8_t parts[16];
  uint8_t codes[k_block];
  for (int g = 0; g < 16; ++g) {
    parts[g] = int8_t(part_of(scales[g], whole, -128, 127));
    put_codes<16>(x + 16 * g, 0, whole * parts[g], -32, 31, codes + 16 * g);
  }
  to = put_planes(codes, 4, 0, 64, to), to = put_planes(codes, 2, 4, 32, to);
  std::memcpy(to, parts, 16), std::memcpy(to + 16, &half, 2);
}

// Blocks of 256 numbers in a K format of so many bits.
inline void quantize(int bits, const float* x, int64_t blocks, uint8_t* to) {
  const int64_t size = bits == 4 ? 144 : bits == 5 ? 176 : 210, together = bits == 6 ? 1 : 2;
  parallel_for(0, (blocks + together - 1) / together, 64, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin * together; b < std::min(blocks, end * together); b += together) {
      const float* from = x + b * k_block;
      alignas(64) float scales[fitted_together], lows[fitted_together], padded[2 * k_block];
      if (together == 2 && b + 1 == blocks) {
        std::memcpy(padded, from, k_block * sizeof(float)), std::memset(padded + k_block, 0, k_block * sizeof(float));
        from = padded;
      }
      if (bits == 6) {
        store16(scales, fit_signed(Groups<16>(from)));
        put_signed(from, scales, to + b * size);
        continue;
      }
      f16v found, below;
      fit_with_minimum(Groups<32>(from), float((1 << bits) - 1), found, below);
      store16(scales, found), store16(lows, below);
      for (int64_t i = 0; i < std::min(together, blocks - b); ++i)
        put_with_minimum(from + i * k_block, scales + 8 * i, lows + 8 * i, bits, to + (b + i) * size);
    }
  });
}

}  // namespace
