// Rows x the weights of one or several layers, shared out among threads.

#pragma once

#include <algorithm>
#include <atomic>
#include <optional>
#include <type_traits>
#include <vector>

#include "blocks.h"
#include "linear.h"
#include "tiles.h"
#include "torch.h"

namespace {

// Several layers on the same rows: their blocks are shared out among the threads as if they were one layer's.
template <typename T>
void multiply(const std::vector<const Weight*>& weights, const T* x, void* const* outs, int64_t rows) {
  std::vector<int64_t> ends;
  for (const Weight* w : weights) ends.push_back((ends.empty() ? 0 : ends.back()) + (w->out + block_width - 1) / block_width);
  static thread_local Bytes bytes;
  const Bytes* rounded = &bytes;  // this thread's, for all threads
  auto any = [&](auto which) { return std::any_of(weights.begin(), weights.end(), which); };
  const bool in_bytes = any([](const Weight* w) { return w->rounded(); });
  static thread_local GroupedBytes groups;
  const GroupedBytes* grouped = &groups;
  const bool in_groups = any([](const Weight* w) { return w->grouped; }), in_halves = any([](const Weight* w) { return w->scales; });
  const bool groups_tiled = (in_groups || in_halves) && tiles_for_groups(rows, in_groups);
  if (in_groups) to_grouped(x, rows, weights[0]->in, groups_tiled, groups);
  if (in_bytes) to_bytes(x, rows, weights[0]->in, any([](const Weight* w) { return w->scale; }), in_halves, in_halves && groups_tiled, bytes);
  const bool tiled = tiles_fit(weights[0]->in);
#if defined(BF16_PAIRS)
  constexpr bool bf16_pairs = true;
#else
  constexpr bool bf16_pairs = false;
#endif
  static thread_local std::vector<float> widened;
  const float* numbers = (const float*)x;
  if constexpr (std::is_same_v<T, bf16>) {
    const bool needed = any([&](const Weight* w) { return w->form ? !w->grouped : !(w->rounded() || tiled || bf16_pairs); });
    widened.resize(needed ? rows * weights[0]->in : 0);
    float* to = widened.data();
    numbers = to;  // this thread's, for all threads
    parallel_for(0, widened.size(), 1 << 15, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) to[i] = widen(x[i]);
    });
  }
#if defined(BF16_PAIRS)
  const T* wide = x;
#else
  const float* wide = numbers;
#endif
  const int64_t row_bytes = in_bytes ? bytes.in : in_groups ? weights[0]->in : weights[0]->in * sizeof(*wide);
  const bool in_panels = !tiled && !groups_tiled && rows * row_bytes > bytes_in_panels;
  const int64_t together = in_panels ? std::max<int64_t>(1, panel_bytes / row_bytes / strip_rows) * strip_rows : std::max<int64_t>(1, rows);
  // Below about 100k multiplications a second thread costs more than it brings.
  const int64_t grain = std::max<int64_t>(1, 100000 / std::max<int64_t>(1, block_width * weights[0]->in * std::min(rows, together)));
  const int64_t blocks = ends.back(), all = blocks * ((rows + together - 1) / together);
  std::atomic<int64_t> next = 0;
  auto layer_of = [&](int64_t place) { return std::upper_bound(ends.begin(), ends.end(), place) - ends.begin(); };
  auto channel_of = [&](int64_t place, int64_t i) { return (place - (i ? ends[i - 1] : 0)) * block_width; };
  auto weights_at = [&](int64_t place) -> const char* {  // as tiles read them
    if (place >= blocks) return nullptr;
    const int64_t i = layer_of(place);
    const Weight& w = *weights[i];
    return w.form || w.scales ? nullptr : (const char*)w.data + channel_of(place, i) * (w.scale ? rounded->in : w.in * sizeof(T));
  };
  // Threads take some blocks at a time, so that none waits for one that other work holds up. With few rows these are neighbours, whose weights
  // are fetched ahead: at most `most`, a third (tiles, 4 bits) or a sixth of a thread's own. With many rows weights hardly count.
  const bool by_tiles = tiled && !in_groups && !in_halves;
  const int64_t few = by_tiles ? 128 : 16, most = by_tiles || in_halves ? 8 : 4;
  parallel_for(0, all, grain, [&](int64_t first_of_own, int64_t end_of_own) {
    const int64_t some = rows <= few ? std::min(most, (end_of_own - first_of_own) * most / 24) : blocks / pieces_of_work;
    const int64_t share = std::max(grain, some);
    int64_t t = 0, end = 0;
    std::optional<Tiles> tiles;  // those of groups are others
    if (by_tiles) tiles.emplace(std::min(rows, tile_rows));
    auto through = [&](const Weight& w, const auto& given, auto* y, int64_t first) {
      std::optional<Tiles> own;
      if (!by_tiles) own.emplace(std::min(rows, tile_rows));
      block_of_tiles(w, given, rows, y, first, t + 1 < end ? weights_at(t + 1) : nullptr);
    };
    for (;; ++t) {
      if (t == end) t = next.fetch_add(share), end = std::min(all, t + share);
      if (t >= all) break;
      const int64_t place = t % blocks, row = t / blocks * together;
      const Panel panel{row, std::min(rows, row + together)};
      const int64_t i = layer_of(place);
      const Weight& w = *weights[i];
      T* y = (T*)outs[i];
      const int64_t first = channel_of(place, i);
      if (w.grouped)
        block_of_bytes(w, *grouped, panel, y, first, groups_tiled);
      else if (w.form)
        block_of_numbers(w, numbers, panel, y, first);
      else if (w.scales)
        block_of_halves(w, *rounded, panel, y, first, groups_tiled);
      else if (w.scale && tiled)
        through(w, *rounded, y, first);
      else if (w.scale)
        block(w, *rounded, panel, y, first);
      else if (std::is_same_v<T, bf16> && tiled)
        through(w, (const bf16*)x, (bf16*)y, first);
      else
        block(w, wide, panel, y, first);
    }
  });
}

}  // namespace
