// Rows of a GGUF file, put in the order that blocks.h reads. No number changes.
//
// A channel's block is taken apart into codes of a byte each, scales and factors; of 32 channels these are laid out side by side.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "blocks.h"
#include "torch.h"

namespace {

// A block of one channel, its parts apart; see Parts in blocks.py.
struct Apart {
  alignas(64) uint8_t codes[256];
  uint16_t scale, low;
  uint8_t factors[most_groups], low_factors[most_groups];
};

// Adds codes of a field: of each `chunk` bytes the lowest bits first, then the next ones.
template <int bits>
inline void add_planes(const uint8_t* field, int64_t bytes, int64_t chunk, int up, uint8_t* codes) {
  for (int64_t from = 0; from < bytes; from += chunk)
    for (int by = 0; by < 8; by += bits, codes += chunk)
      for (int64_t i = 0; i < chunk; ++i) codes[i] |= uint8_t((field[from + i] >> by & ((1 << bits) - 1)) << up);
}

inline uint16_t half_at(const uint8_t* from) { return load<uint16_t>(from); }

// Q4_0, Q4_1, Q5_0, Q5_1, IQ4_NL: scale, minimum, fifth bits, 4 bits of each code.
inline void take_simple(const BlockFormat& form, const uint8_t* from, Apart& to) {
  to.scale = half_at(from), from += 2;
  if (form.low) to.low = half_at(from), from += 2;
  if (form.bits == 5) {
    const uint32_t high = load<uint32_t>(from);
    for (int i = 0; i < 32; ++i) to.codes[i] = uint8_t((high >> i & 1) << 4);
    from += 4;
  }
  add_planes<4>(from, 16, 16, 0, to.codes);
}

// A scale is 2 ** (exponent - 127), here halved, since the numbers of the table are doubled; as bf16, whose fraction has 7 bits.
inline void take_mxfp4(const uint8_t* from, Apart& to) {
  to.scale = from[0] < 2 ? uint16_t(0x20 << from[0]) : uint16_t((from[0] - 1) << 7);
  add_planes<4>(from + 1, 16, 16, 0, to.codes);
}

inline void take_q2_k(const uint8_t* from, Apart& to) {
  for (int g = 0; g < 16; ++g) to.factors[g] = from[g];  // both share a byte, in the kernels' order, too
  add_planes<2>(from + 16, 64, 32, 0, to.codes);
  to.scale = half_at(from + 80), to.low = half_at(from + 82) ^ 0x8000;
}

// The third bits lie apart; factors have 6 bits, 4 and 2 of which lie apart, and 32 is added to them.
inline void take_q3_k(const uint8_t* from, Apart& to) {
  add_planes<2>(from + 32, 64, 32, 0, to.codes), add_planes<1>(from, 32, 32, 2, to.codes);
  add_planes<4>(from + 96, 8, 8, 0, to.factors), add_planes<2>(from + 104, 4, 4, 4, to.factors);
  for (uint8_t& factor : to.factors) factor -= 32;
  to.scale = half_at(from + 108);
}

// Q4_K, Q5_K: factors of scales and of minimums have 6 bits, of the last four of each 4 and 2 lie apart.
inline void take_q4_k(const BlockFormat& form, const uint8_t* from, Apart& to) {
  to.scale = half_at(from), to.low = half_at(from + 2) ^ 0x8000;
  const uint8_t *first = from + 4, *second = from + 8, *rest = from + 12;
  for (int g = 0; g < 4; ++g) {
    to.factors[g] = first[g] & 63, to.factors[4 + g] = uint8_t((rest[g] & 15) | (first[g] >> 2 & 48));
    to.low_factors[g] = second[g] & 63, to.low_factors[4 + g] = uint8_t(rest[g] >> 4 | (second[g] >> 2 & 48));
  }
  from += 16;
  if (form.bits == 5) add_planes<1>(from, 32, 32, 4, to.codes), from += 32;
  add_planes<4>(from, 128, 32, 0, to.codes);
}

inline void take_q6_k(const uint8_t* from, Apart& to) {
  add_planes<4>(from, 128, 64, 0, to.codes), add_planes<2>(from + 128, 64, 32, 4, to.codes);
  std::memcpy(to.factors, from + 192, 16);
  to.scale = half_at(from + 208);
}

// Factors have 6 bits, 4 and 2 of which lie apart, and 32 is added to them.
inline void take_iq4_xs(const uint8_t* from, Apart& to) {
  to.scale = half_at(from);
  for (int g = 0; g < 8; ++g) to.factors[g] = uint8_t(((from[4 + g / 2] >> 4 * (g % 2) & 15) | (load<uint16_t>(from + 2) >> 2 * g & 3) << 4) - 32);
  add_planes<4>(from + 8, 128, 16, 0, to.codes);
}

// Bytes of a block in the file, of 32 or 256 numbers.
inline int64_t stored_size(const BlockFormat& form) {
  switch (form.type) {
    case 11: return 110;  // Q3_K has 12 bytes of factors,
    case 12: return 144;
    case 13: return 176;  // Q4_K and Q5_K 12 for both,
    case 23: return 136;  // IQ4_XS 6,
    case mxfp4_type: return 17;  // and MXFP4 a scale of one byte
    default: return form.size() / block_width;
  }
}

inline void take_apart(const BlockFormat& form, const uint8_t* from, Apart& to) {
  std::memset(to.codes, 0, form.length), std::memset(to.factors, 0, sizeof to.factors);
  switch (form.type) {
    case 8:
      to.scale = half_at(from);
      for (int i = 0; i < 32; ++i) to.codes[i] = from[2 + i] ^ 128;
      return;
    case 10: return take_q2_k(from, to);
    case 11: return take_q3_k(from, to);
    case 12: case 13: return take_q4_k(form, from, to);
    case 14: return take_q6_k(from, to);
    case 23: return take_iq4_xs(from, to);
    case mxfp4_type: return take_mxfp4(from, to);
    default: return take_simple(form, from, to);
  }
}

// 8 lowest bits of bytes as one byte, the first one's lowest.
inline uint8_t bits_of(const uint8_t* from) { return uint8_t((load<uint64_t>(from) & 0x0101010101010101) * 0x0102040810204080 >> 56); }

// The codes of 32 channels and 32 inputs in planes of bits: of four inputs they are two vectors of 64 bytes. A plane of 4 bits has them in
// the halves of 64 bytes, one of 2 bits those of eight inputs in the quarters, and one of 1 bit in 16 bytes.
inline void lay_tile(int bits, const Apart* channels, int64_t first, uint8_t* to) {
  alignas(64) uint8_t steps[8][2][64];
  for (int64_t c = 0; c < block_width; ++c)
    for (int k = 0; k < 8; ++k) std::memcpy(steps[k][c / 16] + 4 * (c % 16), channels[c].codes + first + 4 * k, 4);
  if (bits == 8) return void(std::memcpy(to, steps, sizeof steps));
  const int whole = bits >= 4 ? 4 : 2;
  if (whole == 4)
    for (int k = 0; k < 8; ++k, to += 64)
      for (int i = 0; i < 64; ++i) to[i] = uint8_t((steps[k][0][i] & 15) | steps[k][1][i] << 4);
  auto quarters = [&](int by) {
    for (int k = 0; k < 8; k += 2, to += 64)
      for (int i = 0; i < 64; ++i)
        to[i] = uint8_t((steps[k][0][i] >> by & 3) | (steps[k][1][i] >> by & 3) << 2 | (steps[k + 1][0][i] >> by & 3) << 4 | (steps[k + 1][1][i] >> by & 3) << 6);
  };
  if (whole == 2) quarters(0);
  if (bits == 6) quarters(4);
  if (bits == 3 || bits == 5)
    for (int k = 0; k < 8; ++k)
      for (int z = 0; z < 2; ++z) {
        alignas(64) uint8_t high[64];
        for (int i = 0; i < 64; ++i) high[i] = steps[k][z][i] >> whole;
        for (int i = 0; i < 64; i += 8) *to++ = bits_of(high + i);
      }
}

// 32 channels of which `count` are there; the others are zeros.
inline void arrange_scaled(const BlockFormat& form, const uint8_t* rows, int64_t stride, int64_t count, int64_t in, uint8_t* to) {
  const int64_t stored = stored_size(form), groups = form.groups();
  static thread_local Apart channels[block_width];
  std::memset((void*)channels, 0, sizeof channels);
  for (int64_t b = 0; b < in / form.length; ++b) {
    for (int64_t c = 0; c < count; ++c) take_apart(form, rows + c * stride + b * stored, channels[c]);
    for (int64_t c = 0; c < block_width; ++c) {
      std::memcpy(to + 2 * c, &channels[c].scale, 2);
      if (form.low) std::memcpy(to + 64 + 2 * c, &channels[c].low, 2);
      uint8_t* factors = to + (form.low ? 128 : 64) + c;
      for (int64_t g = 0; form.factors && g < groups; ++g) {
        factors[g * block_width] = channels[c].factors[g];
        if (form.low && form.factors == 8) factors[(groups + g) * block_width] = channels[c].low_factors[g];
      }
    }
    to += form.header();
    for (int64_t t = 0; t < form.length; t += tile_length, to += form.tile_size()) lay_tile(form.bits, channels, t, to);
  }
}

// Numbers: [tiles][32 inputs][32 channels].
template <typename N>
inline void arrange_numbers(const uint8_t* rows, int64_t count, int64_t in, N* to) {
  alignas(64) N tile[block_width][tile_length];
  for (int64_t first = 0; first < in; first += tile_length) {
    const int64_t some = std::min(tile_length, in - first);
    std::memset(tile, 0, sizeof tile);
    for (int64_t c = 0; c < count; ++c) std::memcpy(tile[c], rows + (c * in + first) * sizeof(N), some * sizeof(N));
    for (int64_t k = 0; k < tile_length; ++k)
      for (int64_t c = 0; c < block_width; ++c) *to++ = tile[c][k];
  }
}

inline void arrange(const BlockFormat& form, const uint8_t* rows, int64_t count, int64_t in, uint8_t* to) {
  const int64_t tiles = (in + tile_length - 1) / tile_length;
  const int64_t stride = form.scaled() ? in / form.length * stored_size(form) : in * form.bits / 8;
  const int64_t size = form.scaled() ? in / form.length * form.size() : tiles * form.tile_size();
  parallel_for(0, (count + block_width - 1) / block_width, 4, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const uint8_t* from = rows + i * block_width * stride;
      const int64_t some = std::min(block_width, count - i * block_width);
      if (form.scaled()) arrange_scaled(form, from, stride, some, in, to + i * size);
      else if (form.bits == 16) arrange_numbers(from, some, in, (uint16_t*)(to + i * size));
      else arrange_numbers(from, some, in, (uint32_t*)(to + i * size));
    }
  });
}

}  // namespace
