// Attention of a chunk of a prompt: hundreds of rows of one request, each over all columns before it, block by block with running
// maxima and sums (FlashAttention, Dao et al. 2022, arXiv 2205.14135, algorithm 1).
//
// A task is a key head and some of its rows. Keys and values of a block of columns are laid out once for all of them, the way linear.h
// has weights: 32 keys, or 32 numbers of values, side by side, so that scores and outputs are sums of the very products of a linear layer.
// Blocks begin at fixed columns: each row is computed alone, whichever rows are read with it.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <type_traits>
#include <vector>

#include "attention.h"
#include "elementwise.h"
#include "linear.h"

namespace {

constexpr int64_t prompt_columns = 256;  // of a block
constexpr int64_t prompt_rows = 512;     // query rows of a task, at about

// Memory of one thread, kept between calls. X: numbers as they are multiplied, bf16 in pairs.
template <typename X>
struct PromptScratch {
  using L = std::conditional_t<std::is_same_v<X, bf16>, int32_t, float>;
  std::vector<X> q, keys, values;  // [rows][inner]; [columns / 32][inner / pair][32][pair]; [dim / 32][columns / pair][32][pair]
  std::vector<L> block;
  std::vector<f16v> y;  // [dim / 32][rows][2]
  std::vector<float> top, sum, unpacked, steps, tile;
};

// `count` values as rows, from column `at` of the block on. An odd last one has a zero beside it.
template <typename X, typename T>
void lay_values(const T* rows, int64_t count, int64_t at, int64_t dim, X* to) {
  constexpr int64_t pair = sizeof(X) == 2 ? 2 : 1;
  for (int64_t t = 0; t < count; t += pair)
    for (int64_t d = 0; d < dim; d += 16) {
      X* place = to + ((d / block_width) * prompt_columns + at + t) * block_width + d % block_width * pair;
      const T* from = rows + t * dim + d;
      if constexpr (pair == 1) store(place, first16(from, dim - d));
      else store_pairs(place, first16(from, dim - d), t + 1 < count ? first16(from + dim, dim - d) : f16v{});
    }
}

// Scores of up to `most` rows and a block's columns, as products leave them: 32 columns of all rows behind the 32 before.
template <int most>
struct Scores {
  f16v sums[prompt_columns / block_width][most][2];

  // Columns t to t + 15 of a row; t is a multiple of 16.
  f16v& at(int64_t row, int64_t t) { return sums[t / block_width][row][t % block_width / 16]; }

  // Nothing but columns [begin, end) of a row is seen, up to the `padded` one.
  void hide(int64_t row, int64_t begin, int64_t end, int64_t padded) {
    const f16v none = f16v{} - INFINITY, counts = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int64_t t = 0; t < begin; t += 16) at(row, t) = chosen(counts < float(begin - t), none, at(row, t));
    for (int64_t t = end / 16 * 16; t < padded; t += 16) at(row, t) = chosen(counts >= float(end - t), none, at(row, t));
  }
};

// Whether products of X are those of the matrix unit.
#if defined(BF16_PAIRS)
template <typename X>
constexpr bool by_tiles = false;
#else
template <typename X>
constexpr bool by_tiles = std::is_same_v<X, bf16>;
#endif

// sums += x * w for `some` of up to R rows, (some, stride), and a block of 32 columns, see linear.h.
template <int R, typename X>
inline void multiply_rows(int64_t some, const X* x, int64_t stride, const X* w, int64_t in, f16v sums[R][2]) {
  if constexpr (by_tiles<X>) {  // rows without gaps
    f16v fresh[tile_rows][2];
    products(some == tile_rows, x, in * sizeof(X), w, fresh);
    for (int64_t r = 0; r < some; ++r) sums[r][0] += fresh[r][0], sums[r][1] += fresh[r][1];
  } else {
    dot<R>(x, stride, w, in, sums, NothingAhead());  // they lie in a near cache
  }
}

// Rows [first, first + count) of a segment, all query heads of one key head. A `source` has no order: all rows see all of its pairs.
template <typename T, typename X, bool source = false>
void attend_chunk(const Layer& layer, const Segment& seg, int64_t head, int64_t group, int64_t first, int64_t count, View q, T* out,
                  int64_t heads, float scaling, float softcap, int64_t window) {
  constexpr int64_t pair = sizeof(X) == 2 ? 2 : 1;
  using L = typename PromptScratch<X>::L;
  static thread_local PromptScratch<X> scratch;
  PromptScratch<X>& s = scratch;
  const int64_t kd = layer.key_dim, vd = layer.value_dim, rows = count * group;
  const int64_t inner = (kd + pair - 1) / pair * pair, lanes = inner / pair, blocks = (vd + block_width - 1) / block_width;
  const int64_t packed = layer.before(seg.slot, head);  // the first of them
  // Columns before these rows, and with them.
  const int64_t length = source ? seg.length : seg.length + packed - layer.gone(seg.slot, head) + first, all = source ? length : length + count;
  const T* keys = (const T*)layer.keys + (layer.first_row(seg.slot, head) - packed) * kd;
  const T* values = (const T*)layer.values + (layer.first_row(seg.slot, head) - packed) * vd;
  std::optional<Tiles> tiles;
  if constexpr (by_tiles<X>) tiles.emplace(rows);
  s.q.assign(rows * inner, X{});
  s.keys.assign(prompt_columns * inner, X{}), s.values.assign(blocks * prompt_columns * block_width, X{}), s.block.resize(lanes * 16);
  s.y.assign(blocks * rows * 2, f16v{}), s.top.assign(rows, -INFINITY), s.sum.assign(rows, 0.0f);
  for (int64_t r = 0; r < rows; ++r) {
    const T* from = (const T*)q.data + (head * group + r % group) * q.head + (seg.row + first + r / group) * q.row;
    for (int64_t d = 0; d < kd; ++d)
      if constexpr (std::is_same_v<T, X>) s.q[r * inner + d] = from[d];
      else s.q[r * inner + d] = value_of(from[d]);
  }

  // Columns [j, stop) into keys and values of the block.
  auto lay_16_keys = [&](int64_t at) {
    for (int64_t i = 0; i < lanes; ++i)
      std::memcpy((L*)s.keys.data() + at / block_width * lanes * block_width + i * block_width + at % block_width, s.block.data() + 16 * i, 64);
  };
  auto lay_out = [&](int64_t j, int64_t stop) {
    const int64_t border = std::clamp(packed, j, stop);
    if (j < border) with_bits(layer.packed.bits, [&](auto bits) {
      PackedHead<bits()> columns(layer.packed, layer.leveled, seg.slot * layer.heads + head, head, kd, vd, s.steps, s.tile);
      s.unpacked.resize(packed_group * vd + 16);
      for (int64_t t = j; t < border; t += packed_group) {
        columns.keys(t, s.block.data()), lay_16_keys(t - j);
        columns.keys(t + 16, s.block.data()), lay_16_keys(t + 16 - j);
        columns.values(t, s.unpacked.data());
        lay_values<X>(s.unpacked.data(), packed_group, t - j, vd, s.values.data());
      }
    });
    for (int64_t t = border; t < stop; t += 16) turn<T, L>(keys + t * kd, std::min<int64_t>(16, stop - t), kd, s.block.data()), lay_16_keys(t - j);
    lay_values<X>(values + border * vd, stop - border, border - j, vd, s.values.data());
  };

  // Up to `most` rows from r on, times columns [j, j + columns) of the block.
  auto add = [&](auto most, int64_t r, int64_t some, int64_t j, int64_t columns) {
    Scores<most()> scores;
    alignas(64) X weights[most() * prompt_columns];
    auto line = [&](int64_t i) { return source ? all : length + (r + i) / group + 1; };  // columns up to the row itself
    auto begin_of = [&](int64_t i) { return window > 0 ? std::max<int64_t>(0, line(i) - window) : 0; };
    const int64_t seen = std::min(columns, line(some - 1) - j), padded = (seen + 31) / 32 * 32;
    if (seen <= 0 || j + seen <= begin_of(0)) return;
    std::memset(&scores, 0, padded / block_width * sizeof(scores.sums[0]));
    for (int64_t t = 0; t < seen; t += block_width)
      multiply_rows<most()>(some, s.q.data() + r * inner, inner, s.keys.data() + t * inner, inner, scores.sums[t / block_width]);
    for (int64_t i = 0; i < some; ++i) {
      X* weight = weights + i * padded;
      const int64_t begin = std::max<int64_t>(0, begin_of(i) - j), end = std::min(seen, line(i) - j);
      if (end <= begin) {
        std::fill(weight, weight + padded, X{});
        continue;
      }
      float left = scaling;
      if (layer.bias) {
        const float* bias = layer.bias + (head * group + (r + i) % group) * layer.far;
        for (int64_t t = begin; t < end; ++t) {
          float& score = ((float*)&scores.at(i, t / 16 * 16))[t % 16];
          score = score * scaling + bias[std::min(line(i) - 1 - j - t, layer.far - 1)];
        }
        left = 1.0f;
      }
      if (softcap > 0) {
        for (int64_t t = 0; t < padded; t += 16) scores.at(i, t) = tanh16(scores.at(i, t) * (left / softcap)) * softcap;
        left = 1.0f;
      }
      scores.hide(i, begin, end, padded);
      f16v top = scores.at(i, 0);
      for (int64_t t = 16; t < padded; t += 16) top = larger(scores.at(i, t), top);
      float& highest = s.top[r + i];
      const float before = highest;
      highest = std::max(before, highest_of(top));
      left *= log2_e;
      f16v sum = {};
      for (int64_t t = 0; t < padded; t += 16) {
        const f16v e = power16((scores.at(i, t) - highest) * left);
        sum += e;
        put_weights(weight + t, e);
      }
      const float kept = power16(f16v{} + (before - highest) * left)[0];
      s.sum[r + i] = s.sum[r + i] * kept + total(sum);
      if (kept != 1.0f)
        for (int64_t b = 0; b < blocks; ++b)
          for (int c = 0; c < 2; ++c) s.y[(b * rows + r + i) * 2 + c] *= kept;
    }
    for (int64_t b = 0; b < blocks; ++b)
      multiply_rows<most()>(some, weights, padded, s.values.data() + b * prompt_columns * block_width, padded, (f16v(*)[2])(s.y.data() + (b * rows + r) * 2));
  };
  const int64_t lowest = window > 0 ? std::max<int64_t>(0, length + 1 - window) : 0;  // the first column that any row sees
  for (int64_t j = lowest / prompt_columns * prompt_columns; j < all; j += prompt_columns) {
    const int64_t columns = std::min(prompt_columns, all - j);
    lay_out(j, j + columns);
    if constexpr (by_tiles<X>)
      for (int64_t r = 0; r < rows; r += tile_rows) add(std::integral_constant<int, tile_rows>(), r, std::min(tile_rows, rows - r), j, columns);
    else in_lines<rows_at_once>(rows, [&](auto R, int64_t r) { add(R, r, R(), j, columns); });
  }
  for (int64_t r = 0; r < rows; ++r) {
    T* to = out + ((seg.row + first + r / group) * heads + head * group + r % group) * vd;
    for (int64_t d = 0; d < vd; d += 16)
      put(to + d, s.y[(d / block_width * rows + r) * 2 + d % block_width / 16] * (1.0f / s.sum[r]), std::min<int64_t>(16, vd - d));
  }
}

// The same with the fastest products that this processor has.
template <typename T, bool source = false>
void attend_prompt(const Layer& layer, const Segment& seg, int64_t head, int64_t group, int64_t first, int64_t count, View q, T* out,
                   int64_t heads, float scaling, float softcap, int64_t window) {
  auto attend = [&](auto kind) {
    attend_chunk<T, decltype(kind), source>(layer, seg, head, group, first, count, q, out, heads, scaling, softcap, window);
  };
  if constexpr (std::is_same_v<T, bf16>)
    if (!by_tiles<bf16> || tiles_fit(layer.key_dim)) return attend(bf16());
  attend(0.0f);
}

}  // namespace
