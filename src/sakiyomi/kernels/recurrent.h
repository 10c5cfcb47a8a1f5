// States that go on from row to row: windows of convolutions, linear attention, state-space models (see cache/recurrent.py).
//
// A lane is a part of a state that needs no other: some columns of a head, some channels. Its numbers come from one function for
// every row, whether that is folded into the state, of a prompt, of a chain or of a tree: they do not depend on the pass.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "attention.h"
#include "torch.h"
#include "vector.h"

namespace {

constexpr int most_parts = 5;

enum Kind : int64_t { window_kind, linear_kind, channel_kind, unit_kind };

// One call of a state function on one cache.
struct Site {
  int64_t kind = 0;
  float *states = nullptr, *rows = nullptr;  // [slots][size], [slots][room][width]
  int64_t *at = nullptr;  // of each slot the tokens that are folded into its state
  const int64_t* first = nullptr;  // of each slot the token of its first row
  int64_t size = 0, room = 0, width = 0, kept = 0;
  int64_t parts[most_parts] = {};  // numbers of a row in each of its tensors, of which the first `kept` are kept
  // Linear attention: heads, groups of keys, width of keys, width of values. Windows: channels are values, taps keys; a state in
  // each channel: channels are values, its width keys.
  int64_t heads = 0, groups = 0, key = 0, value = 0;
  Tensor weights, bias;  // of the last call
};

// One row: where each of its tensors begins.
struct Row {
  const float* part[most_parts];
};

// Columns [from, from + count) of one head: a state of `key` lines.
template <int vectors>
struct LinearLane {
  const Site& site;
  int64_t head, from, count;
  static constexpr int64_t width = 16 * vectors;

  int64_t size() const { return site.key * width; }

  void load(float* s, const float* state) const {
    const float* own = state + head * site.key * site.value + from;
    for (int64_t i = 0; i < site.key; ++i) {
      std::memcpy(s + i * width, own + i * site.value, 4 * count);
      std::memset(s + i * width + count, 0, 4 * (width - count));
    }
  }

  void save(const float* s, float* state) const {
    float* own = state + head * site.key * site.value + from;
    for (int64_t i = 0; i < site.key; ++i) std::memcpy(own + i * site.value, s + i * width, 4 * count);
  }

  const float* key_of(const Row& row, int part) const { return row.part[part] + head / (site.heads / site.groups) * site.key; }

  __attribute__((noinline)) void advance(float* s, const Row& row) const {
    float values[width] = {};
    std::memcpy(values, row.part[0] + head * site.value + from, 4 * count);
    const float* k = key_of(row, 1);
    const int64_t decays = site.parts[2] / site.heads;
    const float* log_decay = row.part[2] + head * decays;
    const bool corrected = site.kept > 3;
    float decay[16];
    float one = std::exp(log_decay[0]);
    f16v seen[vectors] = {};
    for (int64_t i = 0; i < site.key; ++i) {
      if (decays > 1) {
        if (i % 16 == 0) {
          float some[16] = {};
          std::memcpy(some, log_decay + i, 4 * std::min<int64_t>(16, decays - i));
          store16(decay, exp16(load16(some)));
        }
        one = decay[i % 16];
      }
      UNROLL for (int b = 0; b < vectors; ++b) {
        f16v x = load16(s + i * width + 16 * b) * one;
        store16(s + i * width + 16 * b, x);
        seen[b] = seen[b] + x * k[i];
      }
    }
    f16v change[vectors];
    UNROLL for (int b = 0; b < vectors; ++b) {
      change[b] = load16(values + 16 * b);
      if (corrected) change[b] = (change[b] - seen[b]) * row.part[3][head];
    }
    for (int64_t i = 0; i < site.key; ++i)
      UNROLL for (int b = 0; b < vectors; ++b)
        store16(s + i * width + 16 * b, load16(s + i * width + 16 * b) + change[b] * k[i]);
  }

  __attribute__((noinline)) void read(const float* s, const Row& row, float* out) const {
    const float* q = key_of(row, (int)site.kept);
    f16v sum[vectors] = {};
    for (int64_t i = 0; i < site.key; ++i)
      UNROLL for (int b = 0; b < vectors; ++b) sum[b] = sum[b] + load16(s + i * width + 16 * b) * q[i];
    float all[width];
    UNROLL for (int b = 0; b < vectors; ++b) store16(all + 16 * b, sum[b]);
    std::memcpy(out + head * site.value + from, all, 4 * count);
  }
};

// Channels [from, from + count): the inputs of the last tokens, line by line.
struct WindowLane {
  const Site& site;
  int64_t from, count;
  std::vector<float> weight, bias;  // [taps][count], [count]

  WindowLane(const Site& site, int64_t from, int64_t count) : site(site), from(from), count(count) {
    if (!site.weights.defined()) return;  // nothing is read
    weight.resize(site.key * count), bias.assign(count, 0.0f);
    const float* w = (const float*)site.weights.data();
    for (int64_t c = 0; c < count; ++c)
      for (int64_t t = 0; t < site.key; ++t) weight[t * count + c] = w[(from + c) * site.key + t];
    if (site.bias.defined()) std::memcpy(bias.data(), (const float*)site.bias.data() + from, 4 * count);
  }

  int64_t size() const { return site.key * count; }

  void load(float* s, const float* state) const {
    for (int64_t t = 0; t < site.key; ++t) std::memcpy(s + t * count, state + t * site.value + from, 4 * count);
  }

  void save(const float* s, float* state) const {
    for (int64_t t = 0; t < site.key; ++t) std::memcpy(state + t * site.value + from, s + t * count, 4 * count);
  }

  void advance(float* s, const Row& row) const {
    std::memmove(s, s + count, 4 * (site.key - 1) * count);
    std::memcpy(s + (site.key - 1) * count, row.part[0] + from, 4 * count);
  }

  __attribute__((noinline)) void read(const float* s, const Row& row, float* out) const {
    float* y = out + from;
    for (int64_t c = 0; c < count; ++c) y[c] = bias[c];
    for (int64_t t = 0; t < site.key; ++t) {
      const float *x = s + t * count, *w = weight.data() + t * count;
      for (int64_t c = 0; c < count; ++c) y[c] += x[c] * w[c];
    }
  }
};

// One channel with a state of several numbers, each with a decay of its own.
struct ChannelLane {
  const Site& site;
  int64_t from;

  int64_t size() const { return (site.key + 15) / 16 * 16; }
  void load(float* s, const float* state) const {
    std::memset(s, 0, 4 * size());
    std::memcpy(s, state + from * site.key, 4 * site.key);
  }
  void save(const float* s, float* state) const { std::memcpy(state + from * site.key, s, 4 * site.key); }

  f16v some(const float* numbers, int64_t i) const {
    if (i + 16 <= site.key) return load16(numbers + i);
    float all[16] = {};
    std::memcpy(all, numbers + i, 4 * (site.key - i));
    return load16(all);
  }

  __attribute__((noinline)) void advance(float* s, const Row& row) const {
    const float step = row.part[1][from], gain = step * row.part[0][from];
    const float* decay = (const float*)site.weights.data() + from * site.key;
    for (int64_t i = 0; i < site.key; i += 16)
      store16(s + i, load16(s + i) * exp16(some(decay, i) * step) + some(row.part[2], i) * gain);
  }

  __attribute__((noinline)) void read(const float* s, const Row& row, float* out) const {
    f16v sum = {};
    for (int64_t i = 0; i < site.key; i += 16) sum = sum + load16(s + i) * some(row.part[3], i);
    out[from] = total(sum);
  }
};

// Channels [from, from + count) of one number each.
struct UnitLane {
  const Site& site;
  int64_t from, count;

  int64_t size() const { return count; }
  void load(float* s, const float* state) const { std::memcpy(s, state + from, 4 * count); }
  void save(const float* s, float* state) const { std::memcpy(state + from, s, 4 * count); }
  __attribute__((noinline)) void advance(float* s, const Row& row) const {
    const float *x = row.part[0] + from, *a = row.part[1] + from;
    for (int64_t c = 0; c < count; ++c) s[c] = a[c] * s[c] + x[c];
  }
  void read(const float* s, const Row& row, float* out) const { std::memcpy(out + from, s, 4 * count); }
};

// The rows of one segment of a pass, and of its tree those of passes before.
struct Text {
  Segment segment;
  const int32_t* parent = nullptr;  // of every row of the tree
  std::vector<int32_t> last;  // of what the tree hangs from, then of every row: the last row that follows it; -1 for none

  Text(const Segment& segment, const int32_t* parents) : segment(segment), parent(parents) {
    last.assign(1 + segment.done + segment.rows, -1);
    for (int32_t row = 0; row < segment.done + segment.rows; ++row) last[1 + parent[row]] = row;
  }
};

struct Work {
  const Site& site;
  const float* fresh[most_parts];  // the tensors of the pass, row by row
  float* out;

  Row row(int64_t at) const {
    Row found;
    for (int i = 0; i < most_parts; ++i) found.part[i] = fresh[i] ? fresh[i] + at * site.parts[i] : nullptr;
    return found;
  }

  // A row that is kept, and with it what is not kept of the pass's own row.
  Row kept(int64_t slot, int64_t token, int64_t own) const {
    Row found = row(std::max<int64_t>(own, 0));
    const float* from = site.rows + (slot * site.room + token - site.first[slot]) * site.width;
    for (int i = 0; i < site.kept; from += site.parts[i++]) found.part[i] = from;
    return found;
  }

  template <typename Lane>
  void fold(const Lane& lane, float* s, int64_t slot, int64_t length) const {
    for (int64_t token = site.at[slot]; token < length; ++token) lane.advance(s, kept(slot, token, 0));
  }

  template <typename Lane>
  void run(const Lane& lane, const Text& text, std::vector<float>& memory) const {
    const Segment& seg = text.segment;
    const int64_t size = lane.size(), tree = seg.done + seg.rows, committed = seg.length - seg.done;
    memory.resize((2 + tree) * size);
    float* state = site.states + seg.slot * site.size;
    float* s = memory.data();
    lane.load(s, state);
    fold(lane, s, seg.slot, committed);
    if (seg.prompt) {
      for (int64_t i = 0; i < seg.rows; ++i) {
        lane.advance(s, row(seg.row + i));
        lane.read(s, row(seg.row + i), out + (seg.row + i) * site.parts[0]);
      }
      return lane.save(s, state);
    }
    if (site.at[seg.slot] < committed) lane.save(s, state);
    // Whoever is the last to follow a row takes its memory over; the others copy it.
    std::vector<int32_t> place(1 + tree, -1), spare;
    for (int32_t i = (int32_t)tree + 1; i > 0; --i) spare.push_back(i);
    place[0] = 0;
    for (int32_t i = 0; i < tree; ++i) {
      const int32_t above = 1 + text.parent[i];
      int32_t mine = place[above];
      if (text.last[above] != i) {
        mine = spare.back();
        spare.pop_back();
        std::memcpy(s + mine * size, s + place[above] * size, 4 * size);
      }
      place[1 + i] = mine;
      const int64_t own = i - seg.done;
      const Row row = kept(seg.slot, committed + i, seg.row + own);
      lane.advance(s + mine * size, row);
      if (own >= 0) lane.read(s + mine * size, row, out + (seg.row + own) * site.parts[0]);
      if (text.last[1 + i] < 0) spare.push_back(mine);
    }
  }
};

// Calls f(lane) for one lane of a site after the other, those with a number in [begin, end).
constexpr int64_t channels_at_once = 256;

inline int64_t lanes(const Site& site) {
  if (site.kind == linear_kind) return site.heads * ((site.value + 63) / 64);
  if (site.kind == channel_kind) return site.value;
  return (site.value + channels_at_once - 1) / channels_at_once;
}

template <typename F>
inline void in_lane(const Site& site, int64_t number, F f) {
  if (site.kind == linear_kind) {
    const int64_t blocks = (site.value + 63) / 64, head = number / blocks, from = number % blocks * 64;
    const int64_t count = std::min<int64_t>(64, site.value - from);
    if (count > 48) return f(LinearLane<4>{site, head, from, count});
    if (count > 32) return f(LinearLane<3>{site, head, from, count});
    if (count > 16) return f(LinearLane<2>{site, head, from, count});
    return f(LinearLane<1>{site, head, from, count});
  }
  if (site.kind == channel_kind) return f(ChannelLane{site, number});
  const int64_t from = number * channels_at_once, count = std::min(channels_at_once, site.value - from);
  if (site.kind == window_kind) return f(WindowLane(site, from, count));
  f(UnitLane{site, from, count});
}

// Multiply-adds of one row, about.
inline int64_t cost(const Site& site) { return 3 * std::max<int64_t>(site.size, 1); }

inline void run_site(Site& site, const std::vector<Text>& texts, const Work& work) {
  int64_t rows = 0;
  for (const Text& text : texts) {
    const Segment& seg = text.segment;
    rows += seg.done + seg.rows + 1;
    if (seg.prompt) continue;
    for (int64_t i = 0; i < seg.rows; ++i) {
      float* to = site.rows + (seg.slot * site.room + seg.length + i - site.first[seg.slot]) * site.width;
      for (int part = 0; part < site.kept; to += site.parts[part++])
        std::memcpy(to, work.fresh[part] + (seg.row + i) * site.parts[part], 4 * site.parts[part]);
    }
  }
  const int64_t all = lanes(site), each = std::max<int64_t>(1, cost(site) * rows / (all * (int64_t)texts.size()));
  parallel_for(0, all * (int64_t)texts.size(), std::max<int64_t>(1, 60000 / each), [&](int64_t begin, int64_t end) {
    thread_local std::vector<float> memory;
    for (int64_t t = begin; t < end; ++t)
      in_lane(site, t % all, [&](const auto& lane) { work.run(lane, texts[t / all], memory); });
  });
  for (const Text& text : texts) {
    const Segment& seg = text.segment;
    site.at[seg.slot] = seg.prompt ? seg.length + seg.rows : seg.length - seg.done;
  }
}

inline void fold_site(Site& site, int64_t slot, int64_t length) {
  if (site.at[slot] >= length) return;
  const Work work{site, {}, nullptr};
  std::vector<float> memory;
  for (int64_t i = 0; i < lanes(site); ++i)
    in_lane(site, i, [&](const auto& lane) {
      memory.resize(lane.size());
      float* state = site.states + slot * site.size;
      lane.load(memory.data(), state);
      work.fold(lane, memory.data(), slot, length);
      lane.save(memory.data(), state);
    });
  site.at[slot] = length;
}

}  // namespace
