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
#include "elementwise.h"
#include "torch.h"
#include "vector.h"

namespace {

constexpr int most_parts = 5;

enum Kind : int64_t { window_kind, linear_kind, channel_kind, unit_kind };

// What transformers' functions do around the recurrence itself, as bits of a number.
enum Around : int64_t {
  silu_after = 1,      // outputs are rounded to their type, and then SiLU of them
  unit_length = 2,     // keys and queries have length 1
  divided = 4,         // they are divided by their length, else multiplied by its inverse
  softplus_steps = 8,  // steps are softplus of what is given
  as_scan = 16,        // rows are those of Mamba-2's scan, whose outputs are float32
};

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
  int64_t heads = 0, groups = 0, key = 0, value = 0, around = 0;
  Tensor decays;  // of each channel and number of its state, in the last call
  // Of a convolution, tap by tap, and where they were read.
  std::vector<float> taps, bias;
  const void* taken = nullptr;

  bool corrected() const { return kind == linear_kind && !(around & as_scan); }  // a delta rule, which keeps what it adds to a state
};

// One row: where each of its tensors begins.
struct Row {
  const float* part[most_parts];
};

// A product added to a sum, rounded once on every processor: what is folded into a state is the same wherever that happens.
inline f16v added(f16v a, f16v b, f16v sum) {
#if defined(__AVX512F__)
  return (f16v)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif defined(__AVX2__)
  auto half = [](auto x, auto y, auto z) { return (f16v::Half)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)z); };
  return {half(a.lo, b.lo, sum.lo), half(a.hi, b.hi, sum.hi)};
#else
  float x[16], y[16], z[16];
  store16(x, a), store16(y, b), store16(z, sum);
  for (int t = 0; t < 16; ++t) z[t] = __builtin_fmaf(x[t], y[t], z[t]);
  return load16(z);
#endif
}

inline float product(const float* a, const float* b, int64_t n) {
  f16v sum = {};
  for (int64_t i = 0; i < n; i += 16) sum = added(first16(a + i, n - i), first16(b + i, n - i), sum);
  return total(sum);
}

constexpr int most_vectors = native_bytes == 64 ? 4 : 2;  // of a lane's columns, whose sums stay in registers
constexpr int64_t columns_at_once = 16 * most_vectors;
constexpr int most_folded = 4;  // rows that one sweep folds
constexpr int64_t most_behind = 4;  // rows behind a state, from which on it is written: until then a pass only reads it

// Columns [from, from + count) of one head: a state of `key` lines. One sweep over it folds rows and looks at it for the next one.
template <int vectors>
struct LinearLane {
  const Site& site;
  int64_t head, from, count;
  static constexpr int64_t width = 16 * vectors;

  // Sums over the lines of a state, times a key and times a query.
  struct Look {
    float seen[width], read[width];
  };

  int64_t group() const { return head / (site.heads / site.groups) * site.key; }
  int64_t decays() const { return site.parts[2] / site.heads; }
  const float* decay(const Row& row) const { return row.part[2] + head * decays(); }

  // `to`: null where the state is not stored; `next`: a row that goes on from it, or null.
  template <bool stored, bool whole>
  __attribute__((noinline)) void sweep(const float* state, int64_t line, const Row* folded, int64_t rows, float* to, int64_t to_line,
                                       const Row* next, Look* look) const {
    const int64_t each = decays() > 1, own = head * site.value + from;
    const float *k = next ? next->part[1] + group() : nullptr, *q = next ? next->part[site.corrected() ? 4 : 3] + group() : nullptr;
    const float* d = next ? decay(*next) : nullptr;
    f16v seen[vectors] = {}, read[vectors] = {};
    auto some = [&](const float* p, int b) { return whole ? load16(p + 16 * b) : first16(p + 16 * b, count - 16 * b); };
    for (int64_t i = 0; i < site.key; ++i) {
      f16v x[vectors];
      UNROLL for (int b = 0; b < vectors; ++b) x[b] = some(state + i * line, b);
      for (int64_t r = 0; r < rows; ++r) {
        const f16v times = f16v{} + decay(folded[r])[each * i], key = f16v{} + folded[r].part[1][group() + i];
        UNROLL for (int b = 0; b < vectors; ++b) x[b] = added(some(folded[r].part[0] + own, b), key, x[b] * times);
      }
      if constexpr (stored) {
        UNROLL for (int b = 0; b < vectors; ++b)
          if (whole || count > 16 * b) put(to + i * to_line + 16 * b, x[b], whole ? 16 : std::min<int64_t>(16, count - 16 * b));
      }
      if (!next) continue;
      const float by = each ? d[i] : 1.0f;
      const f16v query = f16v{} + q[i] * by, key = f16v{} + k[i] * by;
      UNROLL for (int b = 0; b < vectors; ++b) read[b] = added(x[b], query, read[b]);
      if (site.corrected()) {
        UNROLL for (int b = 0; b < vectors; ++b) seen[b] = added(x[b], key, seen[b]);
      }
    }
    if (!next) return;
    const float by = each ? 1.0f : d[0];
    UNROLL for (int b = 0; b < vectors; ++b) store16(look->seen + 16 * b, seen[b] * by), store16(look->read + 16 * b, read[b] * by);
  }

  void run(const float* state, int64_t line, const Row* folded, int64_t rows, float* to, int64_t to_line, const Row* next, Look* look) const {
    const bool whole = count == width;
    if (to)
      whole ? sweep<true, true>(state, line, folded, rows, to, to_line, next, look)
            : sweep<true, false>(state, line, folded, rows, to, to_line, next, look);
    else
      whole ? sweep<false, true>(state, line, folded, rows, to, to_line, next, look)
            : sweep<false, false>(state, line, folded, rows, to, to_line, next, look);
  }

  // What a row adds to the state that was looked at for it, and its output.
  __attribute__((noinline)) void finish(const Look& look, const Row& row, float* change, float* out) const {
    const float* v = row.part[0] + head * site.value + from;
    const float with = product(row.part[1] + group(), row.part[site.corrected() ? 4 : 3] + group(), site.key);
    for (int64_t c = 0; c < count; ++c) {
      const float added = site.corrected() ? (v[c] - look.seen[c]) * row.part[3][head] : v[c];
      out[c] = __builtin_fmaf(added, with, look.read[c]) + (site.corrected() ? 0.0f : out[c]);
      change[c] = added;
    }
  }
};

// Channels [from, from + count): the inputs of the last tokens, line by line.
struct WindowLane {
  const Site& site;
  int64_t from, count;

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
    std::memcpy(y, site.bias.data() + from, 4 * count);
    for (int64_t t = 0; t < site.key; ++t) {
      const float *x = s + t * count, *w = site.taps.data() + t * site.value + from;
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
    const float* decay = (const float*)site.decays.data() + from * site.key;
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
  // Of what the tree hangs from, then of every row: the last row that follows it, and the first one that is new; -1 for none.
  std::vector<int32_t> last, next;

  Text(const Segment& segment, const int32_t* parents) : segment(segment), parent(parents) {
    const int32_t tree = segment.done + segment.rows;
    last.assign(1 + tree, -1), next.assign(1 + tree, -1);
    for (int32_t row = 0; row < tree; ++row) last[1 + parent[row]] = row;
    for (int32_t row = tree - 1; row >= segment.done; --row) next[1 + parent[row]] = row;
  }

  // Whether the state that the tree hangs from is read again, when the first new row has been computed from it.
  bool hangs() const {
    bool again = false;
    for (int32_t row = 0; row < (int32_t)last.size() - 1; ++row)
      again |= parent[row] < 0 && (last[1 + row] >= 0 || (row >= segment.done && row != next[0]));
    return again;
  }
};

// Where the states of a tree's rows lie. Whoever is the last to follow a row takes its memory over.
class Places {
 public:
  explicit Places(const Text& text) : text_(text), place_(text.last.size(), -1) {
    for (int32_t i = (int32_t)text.last.size(); i > 0; --i) spare_.push_back(i);
    place_[0] = 0;
  }

  int32_t of(int32_t row) const { return place_[1 + row]; }

  // Place 0 is that of what the tree hangs from, which is given away to no row if it `stays`.
  int32_t take(int32_t row, bool stays) {
    const int32_t above = text_.parent[row];
    int32_t& mine = place_[1 + row];
    mine = of(above);
    if (text_.last[1 + above] != row || (above < 0 && stays)) {
      mine = spare_.back();
      spare_.pop_back();
    }
    return mine;
  }

  void give_back(int32_t row) { spare_.push_back(of(row)); }

 private:
  const Text& text_;
  std::vector<int32_t> place_, spare_;
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
    Places places(text);
    for (int32_t i = 0; i < tree; ++i) {
      const int32_t above = places.of(text.parent[i]), mine = places.take(i, false);
      if (mine != above) std::memcpy(s + mine * size, s + above * size, 4 * size);
      const int64_t own = i - seg.done;
      const Row row = kept(seg.slot, committed + i, seg.row + own);
      lane.advance(s + mine * size, row);
      if (own >= 0) lane.read(s + mine * size, row, out + (seg.row + own) * site.parts[0]);
      if (text.last[1 + i] < 0) places.give_back(i);
    }
  }

  // Of linear attention, whose states are read and written once, and hardly ever more often than a pass needs.
  template <int vectors>
  void run(const LinearLane<vectors>& lane, const Text& text, std::vector<float>& memory) const {
    const Segment& seg = text.segment;
    const int32_t tree = seg.done + seg.rows;
    const int64_t line = site.value, width = lane.width, size = site.key * width;
    using Look = typename LinearLane<vectors>::Look;
    float* state = site.states + seg.slot * site.size + lane.head * site.key * site.value + lane.from;
    if (seg.prompt) return read_prompt(lane, seg, state, memory);
    memory.resize((1 + tree) * size);
    std::vector<Look> looks(1 + tree);
    auto own = [&](int32_t row) { return kept(seg.slot, seg.length - seg.done + row, seg.row + row - seg.done); };
    auto look_for = [&](int32_t row, Row& next) { return row < 0 ? nullptr : &(next = own(row)); };
    Row next;
    const int64_t behind = seg.length - seg.done - site.at[seg.slot];
    const Row* first = look_for(text.next[0], next);
    fold_lane(lane, state, seg.slot, seg.length - seg.done, writes(text, behind), first, &looks[text.next[0] + 1]);
    Places places(text);
    for (int32_t i = 0; i < tree; ++i) {
      const int32_t above = text.parent[i], place = places.of(above);
      const float* from = place ? memory.data() + (place - 1) * size : state;
      const int64_t from_line = place ? width : line;
      const Row row = own(i);
      if (i >= seg.done) {
        if (text.next[1 + above] != i) lane.run(from, from_line, nullptr, 0, nullptr, 0, &row, &looks[1 + i]);
        Row fresh = row;
        fresh.part[0] = this->row(seg.row + i - seg.done).part[0];
        const int64_t column = lane.head * site.value + lane.from;
        lane.finish(looks[1 + i], fresh, (float*)row.part[0] + column, out + (seg.row + i - seg.done) * site.parts[0] + column);
      }
      if (text.last[1 + i] < 0) continue;
      float* to = memory.data() + (places.take(i, true) - 1) * size;
      const Row* after = look_for(text.next[1 + i], next);
      lane.run(from, from_line, &row, 1, to, width, after, &looks[text.next[1 + i] + 1]);
    }
  }

  // Whether a pass writes the state that its tree hangs from, which is so many rows behind.
  bool writes(const Text& text, int64_t behind) const { return behind > 0 && (behind >= most_behind || text.hangs()); }

  // Fold committed rows into a state, up to `length`, and look at it for a row; it is stored, or read alone.
  template <int vectors>
  void fold_lane(const LinearLane<vectors>& lane, float* state, int64_t slot, int64_t length, bool stored, const Row* next,
                 typename LinearLane<vectors>::Look* look) const {
    Row rows[most_folded];
    int64_t token = site.at[slot];
    do {
      int64_t count = 0;
      while (count < most_folded && token < length) rows[count++] = kept(slot, token++, 0);
      const bool last = token == length;
      if (count || next)
        lane.run(state, site.value, rows, count, count && (stored || !last) ? state : nullptr, site.value, last ? next : nullptr, look);
    } while (token < length);
  }

  template <int vectors>
  void read_prompt(const LinearLane<vectors>& lane, const Segment& seg, float* state, std::vector<float>& memory) const {
    memory.resize(site.key * lane.width);
    const int64_t column = lane.head * site.value + lane.from;
    typename LinearLane<vectors>::Look look;
    std::vector<float> change(site.parts[0]);
    Row now = row(seg.row), next;
    fold_lane(lane, state, seg.slot, seg.length, true, &now, &look);
    const float* from = state;
    for (int64_t i = 0; i < seg.rows; ++i, now = next) {
      const bool last = i + 1 == seg.rows;
      lane.finish(look, now, change.data() + column, out + (seg.row + i) * site.parts[0] + column);
      now.part[0] = change.data();
      next = row(seg.row + (last ? i : i + 1));
      float* to = last ? state : memory.data();
      lane.run(from, from == state ? site.value : lane.width, &now, 1, to, last ? site.value : lane.width, last ? nullptr : &next, &look);
      from = memory.data();
    }
  }
};

// Calls f(lane) for one lane of a site after the other, those with a number in [begin, end).
constexpr int64_t channels_at_once = 256;

inline int64_t lanes(const Site& site) {
  if (site.kind == linear_kind) return site.heads * ((site.value + columns_at_once - 1) / columns_at_once);
  if (site.kind == channel_kind) return site.value;
  return (site.value + channels_at_once - 1) / channels_at_once;
}

template <typename F>
inline void in_lane(const Site& site, int64_t number, F f) {
  if (site.kind == linear_kind) {
    const int64_t blocks = (site.value + columns_at_once - 1) / columns_at_once, head = number / blocks;
    const int64_t from = number % blocks * columns_at_once, count = std::min(columns_at_once, site.value - from);
    if constexpr (most_vectors > 2) {
      if (count > 48) return f(LinearLane<4>{site, head, from, count});
      if (count > 32) return f(LinearLane<3>{site, head, from, count});
    }
    if (count > 16) return f(LinearLane<2>{site, head, from, count});
    return f(LinearLane<1>{site, head, from, count});
  }
  if (site.kind == channel_kind) return f(ChannelLane{site, number});
  const int64_t from = number * channels_at_once, count = std::min(channels_at_once, site.value - from);
  if (site.kind == window_kind) return f(WindowLane{site, from, count});
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
    const int64_t committed = seg.length - seg.done, behind = committed - site.at[seg.slot];
    if (seg.prompt)
      site.at[seg.slot] = seg.length + seg.rows;
    else if (site.kind != linear_kind || work.writes(text, behind))
      site.at[seg.slot] = committed;
  }
}

inline void fold_site(Site& site, int64_t slot, int64_t length) {
  if (site.at[slot] >= length) return;
  const Work work{site, {}, nullptr};
  std::vector<float> memory;
  for (int64_t i = 0; i < lanes(site); ++i)
    in_lane(site, i, [&](const auto& lane) {
      float* state = site.states + slot * site.size;
      if constexpr (requires { typename std::decay_t<decltype(lane)>::Look; }) {
        work.fold_lane(lane, state + lane.head * site.key * site.value + lane.from, slot, length, true, nullptr, nullptr);
      } else {
        memory.resize(lane.size());
        lane.load(memory.data(), state);
        work.fold(lane, memory.data(), slot, length);
        lane.save(memory.data(), state);
      }
    });
  site.at[slot] = length;
}

// ---------------------------------------------------------------- what comes before and behind it

// Rows (1, N, ...) as float32, one behind the other: the tensor itself where it is that already and is not written to.
inline const float* widened(const Tensor& x, int64_t rows, int64_t width, Tensor& copy, std::vector<float>& memory, bool written) {
  int64_t expected = 1;
  for (int64_t d = x.dim(); d-- > 2; expected *= x.size(d))
    if (x.size(d) != 1 && x.stride(d) != expected) expected = 0;
  if (!expected) copy = x.contiguous_copy();
  const Tensor& from = expected ? x : copy;
  const int64_t step = from.stride(1);
  const bool half = from.dtype() == torch.aoti_torch_dtype_bfloat16;
  if (!half && !written && (step == width || rows == 1)) return (const float*)from.data();
  memory.resize(rows * width);
  for (int64_t r = 0; r < rows; ++r) {
    float* to = memory.data() + r * width;
    if (!half)
      std::memcpy(to, (const float*)from.data() + r * step, 4 * width);
    else
      for (int64_t i = 0; i < width; i += 16) put(to + i, first16((const bf16*)from.data() + r * step + i, width - i), std::min<int64_t>(16, width - i));
  }
  return memory.data();
}

// As a number of this type would be stored.
inline float stored_as(float x, bool half) { return half ? widen(narrow(x)) : x; }

// Vectors of `width` numbers: of length 1 where that is asked for, times a number.
inline void scale_rows(float* x, int64_t count, int64_t width, int64_t around, float times) {
  for (int64_t c = 0; c < count; ++c, x += width) {
    float by = 1.0f;
    if (around & unit_length) by = std::sqrt(product(x, x, width) + 1e-6f);
    for (int64_t i = 0; i < width; i += 16) {
      f16v v = first16(x + i, width - i);
      if (around & unit_length) v = around & divided ? v / by : v * (1.0f / by);
      put(x + i, v * times, std::min<int64_t>(16, width - i));
    }
  }
}

// A delta rule's rows: log decays become decays, keys and queries get their length.
inline void prepare_delta(const Site& site, int64_t rows, float* parts[most_parts]) {
  for (int64_t i = 0; i < rows * site.parts[2]; i += 16) {
    const int64_t n = std::min<int64_t>(16, rows * site.parts[2] - i);
    put(parts[2] + i, exp16(first16(parts[2] + i, n)), n);
  }
  scale_rows(parts[1], rows * site.groups, site.key, site.around, 1.0f);
  scale_rows(parts[4], rows * site.groups, site.key, site.around, 1.0f / std::sqrt(float(site.key)));
}

// Mamba-2's rows: inputs are multiplied with their steps, which become decays. Of each head: rates of decay, what is added to steps
// (and rounded, where these are `half`), and what of inputs goes straight into outputs.
inline void prepare_scan(const Site& site, int64_t rows, bool half, const float* rates, const float* bias, const float* straight,
                         float* parts[most_parts], float* out) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t head = 0; head < site.heads; ++head) {
      float& decay = parts[2][r * site.heads + head];
      float step = decay, *x = parts[0] + r * site.parts[0] + head * site.value;
      step = stored_as(step + bias[head], half);
      if (site.around & softplus_steps) step = stored_as(step > 20.0f ? step : std::log1p(std::exp(step)), half);
      decay = std::exp(rates[head] * step);
      float* y = out + r * site.parts[0] + head * site.value;
      for (int64_t i = 0; i < site.value; ++i) y[i] = straight[head] * x[i], x[i] *= step;
    }
}

// A convolution's weights (channels, taps), tap by tap, and its bias.
inline void take_taps(Site& site, const std::vector<Tensor>& fixed) {
  if (site.taken == fixed[0].data()) return;
  auto number = [](const Tensor& x, int64_t i) {
    return x.dtype() == torch.aoti_torch_dtype_bfloat16 ? widen(((const bf16*)x.data())[i]) : ((const float*)x.data())[i];
  };
  Tensor copy;
  if (!fixed[0].is_contiguous()) copy = fixed[0].contiguous_copy();
  const Tensor& weight = copy.defined() ? copy : fixed[0];
  check(weight.numel() == site.size && (fixed.size() < 2 || fixed[1].numel() == site.value), "sakiyomi_cpu::recur: weights of other sizes");
  site.taps.resize(site.size), site.bias.assign(site.value, 0.0f);
  for (int64_t c = 0; c < site.value; ++c) {
    for (int64_t t = 0; t < site.key; ++t) site.taps[t * site.value + c] = number(weight, c * site.key + t);
    if (fixed.size() > 1) site.bias[c] = number(fixed[1], c);
  }
  site.taken = fixed[0].data();
}

// Numbers of the type of `to` out of float32, and what comes behind the recurrence.
template <typename T>
inline void hand_out(const float* from, T* to, int64_t count, int64_t around) {
  for (int64_t i = 0; i < count; i += 16) {
    const int64_t n = std::min<int64_t>(16, count - i);
    f16v x = first16(from + i, n);
    if (around & silu_after) x = silu16(as_rounded(x, to));
    put(to + i, x, n);
  }
}

}  // namespace
