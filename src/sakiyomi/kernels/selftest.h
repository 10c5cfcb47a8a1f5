// Products, an attention and a row whose results are known to the last bit, in every format: a build that faults, or keeps sums of
// bytes in too few bits, is found before anything rests on it.

#pragma once

#include <cstdint>
#include <vector>

#include "attention.h"
#include "linear.h"
#include "multiply.h"
#include "row.h"

namespace {

template <typename T>
T as(float x) {
  if constexpr (std::is_same_v<T, float>) return x;
  else return narrow(x);
}

// Rows times weights of `bits`, both whole numbers: true where all sums are right.
template <typename T>
bool multiplies(int64_t rows, int64_t bits) {
  constexpr int64_t in = 128, out = 40, blocks = 64;
  const int64_t together = bits == 16 ? 4 / sizeof(T) : 4;
  std::vector<float> x(rows * in), w(out * in);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t k = 0; k < in; ++k) x[r * in + k] = bits == 16 ? (r + 3 * k) % 7 - 3 : k == r % in || k % 2 ? 127 : -127;
  for (int64_t c = 0; c < out; ++c)
    for (int64_t k = 0; k < in; ++k) w[c * in + k] = bits == 16 ? (c * k) % 5 - 2 : bits == 8 ? ((c + k) % 3 ? 127 : -127) : ((c + k) % 3 ? 7 : -8);
  std::vector<T> numbers(in * blocks), rows_of(rows * in), y(rows * out);
  std::vector<uint8_t> bytes(in * blocks);
  std::vector<float> scale(out, 1.0f);
  std::vector<int32_t> sum(out);
  std::vector<bf16> scales(in / group_length * blocks, narrow(1.0f));
  for (int64_t c = 0; c < out; ++c)
    for (int64_t k = 0; k < in; ++k) {
      const int64_t block = c / block_width, lane = c % block_width, group = k / together;
      const int number = w[c * in + k];
      if (bits == 4)
        bytes[((block * in / 4 + group) * 16 + lane % 16) * 4 + k % 4] |= (number + 8) << (lane / 16 * 4);
      else if (bits == 8)
        bytes[((block * in / 4 + group) * block_width + lane) * 4 + k % 4] = uint8_t(number), sum[c] += number;
      else
        numbers[((block * in / together + group) * block_width + lane) * together + k % together] = as<T>(number);
    }
  for (int64_t i = 0; i < rows * in; ++i) rows_of[i] = as<T>(x[i]);
  const Weight weight{bits == 16 ? (const void*)numbers.data() : bytes.data(), nullptr, bits == 8 ? scale.data() : nullptr,
                      bits == 8 ? sum.data() : nullptr, bits == 4 ? scales.data() : nullptr, in, out, sizeof(T) == 2, {}};
  void* to = y.data();
  multiply<T>({&weight}, rows_of.data(), &to, rows);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < out; ++c) {
      float expected = 0;
      for (int64_t k = 0; k < in; ++k) expected += x[r * in + k] * w[c * in + k];
      if (y[r * out + c] != as<T>(expected)) return false;
    }
  return true;
}

// The code of an input of a channel, 0 to 31 both, as blocks.py lays out a tile.
inline int code_of(const BlockFormat& form, const uint8_t* tile, int64_t channel, int64_t input) {
  const int64_t step = input / 4, vector = channel / 16, byte = channel % 16 * 4 + input % 4, quarter = 2 * (2 * (step % 2) + vector);
  if (form.bits == 8) return tile[128 * step + 4 * channel + input % 4] - form.offset;
  int code = form.bits > 3 ? tile[64 * step + byte] >> 4 * vector & 15 : tile[64 * (step / 2) + byte] >> quarter & 3;
  if (form.bits == 6) code |= (tile[512 + 64 * (step / 2) + byte] >> quarter & 3) << 4;
  const int64_t bit = 4 * channel + input % 4;
  if (form.bits == 5) code |= (tile[512 + 16 * step + bit / 8] >> bit % 8 & 1) << 4;
  if (form.bits == 3) code |= (tile[256 + 16 * step + bit / 8] >> bit % 8 & 1) << 2;
  return (form.table ? form.table[code] : code) - form.offset;
}

// Rows times codes of a format, whose scales are 1 and minimums 2: true where all sums are right. Rows are whole numbers, 127 among each
// 32 of them, so that their scales are 1, too; of some rows all numbers are the largest.
template <typename T>
bool multiplies_blocks(const BlockFormat& form, int64_t rows, bool grouped) {
  constexpr int64_t in = 256, out = 40, blocks = 2;
  const int64_t header = form.header(), each = form.size(), tiles = form.length / tile_length;
  std::vector<uint8_t> data(blocks * in / form.length * each);
  for (size_t i = 0; i < data.size(); ++i) data[i] = uint8_t((i * 2654435761u) >> 13);
  for (int64_t b = 0; b < blocks * in / form.length; ++b) {
    uint8_t* at = data.data() + b * each;
    for (int64_t t = 0; t < block_width; ++t) {
      const uint16_t one = form.type == mxfp4_type ? 0x3f80 : 0x3c00, two = 0x4000;
      std::memcpy(at + 2 * t, &one, 2);
      if (form.low) std::memcpy(at + 64 + 2 * t, &two, 2);
    }
    std::memset(at + (form.low ? 128 : 64), form.factors == 4 ? 0x11 : 1, header - (form.low ? 128 : 64));
  }
  std::vector<T> x(rows * in), y(rows * out);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t k = 0; k < in; ++k) x[r * in + k] = as<T>(r % 3 == 0 || k % 32 == r % 32 ? 127 : r % 3 == 1 ? (r + k) % 5 - 2 : k % 2 * 254 - 127);
  const Weight weight{data.data(), nullptr, nullptr, nullptr, nullptr, in, out, sizeof(T) == 2, {}, &form, grouped};
  void* to = y.data();
  multiply<T>({&weight}, x.data(), &to, rows);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < out; ++c) {
      float expected = 0;
      for (int64_t k = 0; k < in; ++k) {
        const uint8_t* at = data.data() + (c / block_width * in / form.length + k / form.length) * each;
        const int code = code_of(form, at + header + k % form.length / tile_length % tiles * form.tile_size(), c % block_width, k % tile_length);
        expected += value_of(x[r * in + k]) * (code + (form.low ? 2 : 0));
      }
      if (y[r * out + c] != as<T>(expected)) return false;
    }
  return true;
}

// Rows of a chain of which each looks for one key.
template <typename T>
bool attends(int64_t rows) {
  constexpr int64_t dim = 64, room = 96, held = 70;
  std::vector<T> keys(room * dim), values(room * dim), q(rows * dim), own(rows * dim), out(rows * dim);
  for (int64_t t = 0; t < held; ++t) keys[t * dim + t % dim] = as<T>(t < dim ? 200.0f : 0.0f);
  for (int64_t i = 0; i < held * dim; ++i) values[i] = as<T>(i % 251);
  for (int64_t r = 0; r < rows; ++r) q[r * dim + 3 * r % dim] = as<T>(2.0f);
  std::vector<int32_t> start{0}, path;
  for (int32_t r = 0; r < rows; ++r) {
    for (int32_t i = 0; i <= r; ++i) path.push_back(i);
    start.push_back((int32_t)path.size());
  }
  Layer layer{(char*)keys.data(), (char*)values.data(), {0, room}, 1, dim, dim, sizeof(T) == 2};
  const Segment segment{0, 0, int32_t(rows), held, 0, 0};
  const View query{(const char*)q.data(), 0, dim}, fresh{(const char*)own.data(), 0, dim};
  attend_group<T>({start.data(), path.data()}, layer, segment, 0, 1, query, fresh, fresh, out.data(), 1, 1.0f, 0.0f, 0);
  for (int64_t i = 0; i < rows * dim; ++i)
    if (out[i] != values[3 * (i / dim) % dim * dim + i % dim]) return false;
  return true;
}

// 0, or the number of the first check that fails.
inline int self_test() {
  int check = 0;
  auto fails = [&](bool fine) { return ++check, !fine; };
  for (int64_t rows : {1, 3, 50})
    for (int64_t bits : {16, 8, 4})
      if (fails(multiplies<float>(rows, bits)) || fails(multiplies<bf16>(rows, bits))) return check;
  for (const BlockFormat& form : block_formats)
    for (int64_t rows : {1, 3, 60})
      for (bool grouped : {false, true})
        if (form.scaled() && (fails(multiplies_blocks<float>(form, rows, grouped)) || fails(multiplies_blocks<bf16>(form, rows, grouped)))) return check;
  for (int64_t rows : {1, 20})
    if (fails(attends<float>(rows)) || fails(attends<bf16>(rows))) return check;
  std::vector<float> row(5000, -1.0f);
  row[4321] = 50.0f;
  return fails(best(row.data(), 5000) >> 32 == 4321) ? check : 0;
}

}  // namespace
