// What text drafters know of texts: an index by 64-bit keys, a suffix automaton, the places of pairs, what rows ranked
// first, and counts of n-grams.
//
// They hold what drafters/automaton.py, copy_source.py, recycle.py and ngram_file.py hold, which remain for processes without these kernels and are what the
// tests compare with.

#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

using Tokens = std::vector<int64_t>;

constexpr uint64_t run_factor = 0x5851F42D4C957F2Du;

// See run_number in ngram_file.py.
inline uint64_t run_number(const int64_t* run, int64_t length) {
  uint64_t number = 0;
  for (int64_t i = 0; i < length; ++i) number = (number * run_factor + run[i] + 1) & ~(uint64_t(1) << 63);
  return number;
}

// Numbers from 0 on by keys.
class Index {
  struct Cell {
    uint64_t key;
    int64_t number;  // -1: it is free
  };
  std::vector<Cell> cells;
  size_t used = 0;
  int shift = 60;

  size_t home(uint64_t key) const { return (key * 0x9E3779B97F4A7C15u) >> shift; }
  size_t next(size_t at) const { return (at + 1) & (cells.size() - 1); }
  size_t find(uint64_t key) const {
    size_t at = home(key);
    while (cells[at].number >= 0 && cells[at].key != key) at = next(at);
    return at;
  }
  void grow() {
    std::vector<Cell> old(cells.size() ? 2 * cells.size() : 16, Cell{0, -1});
    old.swap(cells);
    if (!old.empty()) --shift;
    for (const Cell& cell : old)
      if (cell.number >= 0) cells[find(cell.key)] = cell;
  }

 public:
  // -1: there is none.
  int64_t get(uint64_t key) const { return cells.empty() ? -1 : cells[find(key)].number; }

  void set(uint64_t key, int64_t number) {
    if (4 * (used + 1) > 3 * cells.size()) grow();
    Cell& cell = cells[find(key)];
    used += cell.number < 0;
    cell = {key, number};
  }

  void erase(uint64_t key) {
    if (cells.empty()) return;
    size_t hole = find(key);
    if (cells[hole].number < 0) return;
    --used;
    for (size_t at = next(hole); cells[at].number >= 0; at = next(at)) {
      const size_t mask = cells.size() - 1;  // those behind it that are not at home move up
      if (((at - home(cells[at].key)) & mask) < ((at - hole) & mask)) continue;
      cells[hole] = cells[at], hole = at;
    }
    cells[hole].number = -1;
  }

  void clear() { cells.clear(), used = 0, shift = 60; }
};

// See SuffixAutomaton.
struct Automaton {
  static constexpr int64_t counted = 16;
  static constexpr int32_t few_edges = 8;  // of more an index is made

  struct State {
    int32_t link = 0, length = 0, count = 0, latest = -1, earlier = -1, first = -1, edges = 0;
  };
  struct Edge {
    int32_t token, state, next;
  };
  std::vector<State> states{{-1}};
  std::vector<Edge> edges;
  std::vector<int32_t> text;
  int32_t last = 0;

  // The state that one more token leads to; -1: none.
  int32_t following(int32_t state, int32_t token) const {
    const int32_t edge = edge_of(state, token);
    return edge < 0 ? -1 : edges[edge].state;
  }

  void extend(const int64_t* tokens, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      const int32_t token = tokens[i], known = following(last, token), place = text.size();
      if (known < 0) last = append(token);
      else last = states[known].length == states[last].length + 1 ? known : split(last, token, known);
      path.push_back(last), places.push_back(place);
      int32_t state = last;
      for (int64_t k = 0; k < counted && state > 0; ++k) {
        State& own = states[state];
        ++own.count, own.earlier = own.latest, own.latest = place, state = own.link;
      }
      text.push_back(token);
    }
  }

  void branch(size_t length) {
    path.resize(std::min(path.size(), length + 1)), places.resize(std::min(places.size(), length));
    last = path.back();
    if (!text.empty()) text.push_back(-1);
    if (!places.empty()) onward[places.back()] = text.size();
  }

  int64_t place() const { return places.empty() ? -1 : places.back(); }

  // The longest suffix of the text that occurs before its end.
  int32_t match() const { return states[last].count < 2 && last ? states[last].link : last; }

  int32_t newest(int32_t state) const {
    for (int32_t place : {states[state].latest, states[state].earlier}) {
      const auto found = onward.find(place);
      const int32_t after = found == onward.end() ? place + 1 : found->second;
      if (0 < after && after < (int32_t)text.size()) return text[after];
    }
    return -1;
  }

 private:
  Index index;  // edges by state and token, of states with many
  std::vector<int32_t> path{0}, places;
  std::unordered_map<int32_t, int32_t> onward;

  static uint64_t key(int32_t state, int32_t token) { return uint64_t(state) << 32 | uint32_t(token); }

  int32_t edge_of(int32_t state, int32_t token) const {
    if (states[state].edges > few_edges) return index.get(key(state, token));
    int32_t edge = states[state].first;
    while (edge >= 0 && edges[edge].token != token) edge = edges[edge].next;
    return edge;
  }

  void lead(int32_t state, int32_t token, int32_t to) {
    State& own = states[state];
    const int32_t edge = edges.size();
    edges.push_back({token, to, own.first});
    own.first = edge;
    if (++own.edges == few_edges + 1)
      for (int32_t each = edge; each >= 0; each = edges[each].next) index.set(key(state, edges[each].token), each);
    else if (own.edges > few_edges) index.set(key(state, token), edge);
  }

  int32_t append(int32_t token) {
    const int32_t fresh = states.size();
    int32_t state = last;
    states.push_back({0, states[last].length + 1});
    for (; state >= 0 && following(state, token) < 0; state = states[state].link) lead(state, token, fresh);
    if (state >= 0) {
      const int32_t known = following(state, token);
      const int32_t link = states[known].length == states[state].length + 1 ? known : split(state, token, known);
      states[fresh].link = link;
    }
    return fresh;
  }

  int32_t split(int32_t state, int32_t token, int32_t known) {
    const int32_t fresh = states.size();
    State copy = states[known];
    copy.length = states[state].length + 1, copy.first = -1, copy.edges = 0;
    states.push_back(copy);
    for (int32_t edge = states[known].first; edge >= 0; edge = edges[edge].next) {
      const Edge one = edges[edge];
      lead(fresh, one.token, one.state);
    }
    states[known].link = fresh;
    for (; state >= 0; state = states[state].link) {
      const int32_t edge = edge_of(state, token);
      if (edge < 0 || edges[edge].state != known) break;
      edges[edge].state = fresh;
    }
    return fresh;
  }
};

// See Cursor.
struct Cursor {
  int32_t state = 0, length = 0;

  void read(const Automaton& in, const int64_t* tokens, int64_t count) {
    refresh(in);
    for (int64_t i = 0; i < count; ++i) {
      int32_t after = in.following(state, tokens[i]);
      while (after < 0 && state) {
        state = in.states[state].link, length = in.states[state].length;
        after = in.following(state, tokens[i]);
      }
      if (after >= 0) state = after, ++length;
    }
  }

  void refresh(const Automaton& in) {
    while (state && length <= in.states[in.states[state].link].length) state = in.states[state].link;
  }
};

// See CopySource; its text is the automaton's.
class CopySource {
  static constexpr int64_t scanned = 48, longest = 12, turn = 64;
  Index index;
  std::vector<std::vector<int32_t>> after;  // by two tokens the places behind them
  int64_t last = -1, copied = -1;
  bool sure = false;

  std::vector<int32_t>* behind(int64_t first, int64_t second, bool made) {
    const uint64_t key = uint64_t(first) << 32 | uint32_t(second);
    int64_t found = index.get(key);
    if (found < 0 && made) index.set(key, found = after.size()), after.emplace_back();
    return found < 0 ? nullptr : &after[found];
  }

  int64_t find(const std::vector<int32_t>& text, int64_t length) {
    const int64_t end = text.size();
    if (end < 2 || text[end - 2] < 0) return -1;
    const std::vector<int32_t>* found = behind(text[end - 2], text[end - 1], false);
    if (!found) return -1;
    const int64_t count = found->size(), first = std::lower_bound(found->begin(), found->end(), copied + 1) - found->begin();
    const auto matches = [&](int64_t place) {
      return place < end && place >= length && std::equal(text.end() - length, text.end(), text.begin() + place - length);
    };
    for (int64_t i = first; i < std::min(count, first + scanned); ++i)
      if (matches((*found)[i])) return (*found)[i];
    for (int64_t i = 0; i < std::min(first, scanned); ++i)
      if (matches((*found)[i])) return (*found)[i];
    return -1;
  }

 public:
  void read(const std::vector<int32_t>& text, const int64_t* tokens, int64_t count) {
    int64_t place = text.size() - count;
    for (int64_t i = 0; i < count; ++i) {
      ++place;
      if (last >= 0) behind(last, tokens[i], true)->push_back(place);
      last = tokens[i];
    }
    sure = sure && count <= turn;
    for (int64_t i = 0; i < count && sure; ++i) {
      sure = text[copied + 1] == tokens[i];
      copied += sure;
    }
  }

  void branch(const int64_t* head, int64_t count, int64_t place) {
    last = count ? head[count - 1] : -1, sure = false;
    if (count < 2) return;
    if (std::vector<int32_t>* places = behind(head[count - 2], head[count - 1], false)) {
      const auto found = std::find(places->begin(), places->end(), place + 1);
      if (found != places->end()) places->erase(found);
    }
  }

  int64_t next(const std::vector<int32_t>& text, int64_t length) {
    if (!sure && length > 1) {
      const int64_t place = find(text, std::min(length, longest));
      if (place >= 0) copied = place - 1, sure = true;
    }
    return sure && copied + 1 < (int64_t)text.size() ? copied + 1 : -1;
  }
};

// Rounded before anything is added to it, as Python does: chances that are equal there are equal here.
[[gnu::noinline]] inline double times(double a, double b) { return a * b; }

// How often guesses of each kind were right; older ones fade.
struct Chances {
  double memory;
  std::vector<double> chances, hits, tries;

  Chances(const double* priors, int64_t count, double weight, double memory)
      : memory(memory), chances(priors, priors + count), hits(chances), tries(count, weight) {
    for (double& each : hits) each *= weight;
  }

  void learn(int64_t kind, bool right) {
    hits[kind] = times(hits[kind], memory) + right;
    tries[kind] = times(tries[kind], memory) + 1.0;
    chances[kind] = hits[kind] / tries[kind];
  }
};

constexpr int64_t contexts = 3;  // LENGTHS in graph_file.py
constexpr int64_t kept_tokens = 4;  // KEPT in native_texts.py

// The last tokens of a text, as many as the longest context has.
struct Last {
  int64_t count = 0, tokens[contexts] = {};

  Last() = default;
  Last(const int64_t* text, int64_t length) : count(std::min(length, contexts)) { std::copy(text + length - count, text + length, tokens); }

  Last then(int64_t token) const {
    Last next = *this;
    if (count == contexts) std::copy(tokens + 1, tokens + contexts, next.tokens), --next.count;
    next.tokens[next.count++] = token;
    return next;
  }

  // run_number of the last so many.
  uint64_t number(int64_t length) const { return run_number(tokens + count - length, length); }

  bool operator==(const Last& other) const { return count == other.count && std::equal(tokens, tokens + count, other.tokens); }
};

struct Ranked {
  int64_t count = 0, tokens[kept_tokens];
  double logs[kept_tokens];
};

inline Ranked ranked_of(int64_t count, const int64_t* tokens, const double* logs) {
  Ranked ranked;
  ranked.count = std::min(count, kept_tokens);
  std::copy(tokens, tokens + ranked.count, ranked.tokens), std::copy(logs, logs + ranked.count, ranked.logs);
  return ranked;
}

// See TokenGraph.
class Graph {
  struct Entry {
    uint64_t key;
    int64_t older, newer;
    Ranked ranked;
  };
  struct Length {
    Index index;
    std::vector<Entry> entries;
    int64_t oldest = -1, newest = -1;
  };
  int64_t most;
  Length lengths[contexts];  // the longest first

  static void unlink(Length& own, Entry& entry) {
    (entry.older < 0 ? own.oldest : own.entries[entry.older].newer) = entry.newer;
    (entry.newer < 0 ? own.newest : own.entries[entry.newer].older) = entry.older;
  }

 public:
  explicit Graph(int64_t most) : most(most) {}

  void put(int64_t which, uint64_t key, const Ranked& ranked) {
    Length& own = lengths[which];
    int64_t at = own.index.get(key);
    if (at < 0 && (int64_t)own.entries.size() == most) own.index.erase(own.entries[at = own.oldest].key), own.index.set(key, at);
    if (at >= 0) unlink(own, own.entries[at]);
    else own.index.set(key, at = own.entries.size()), own.entries.emplace_back();
    own.entries[at] = {key, own.newest, -1, ranked};
    (own.newest < 0 ? own.oldest : own.entries[own.newest].newer) = at;
    own.newest = at;
  }

  void put(const Last& place, const Ranked& ranked) {
    for (int64_t i = 0; i < contexts; ++i)
      if (contexts - i <= place.count) put(i, place.number(contexts - i), ranked);
  }

  // What followed the longest known context, and which length that has: 0 the longest; null: nothing.
  const Ranked* get(const Last& place, int64_t& which) const {
    for (which = 0; which < contexts; ++which) {
      if (contexts - which > place.count) continue;
      const int64_t at = lengths[which].index.get(place.number(contexts - which));
      if (at >= 0) return &lengths[which].entries[at].ranked;
    }
    return nullptr;
  }

  int64_t size(int64_t which) const { return lengths[which].entries.size(); }

  // Entries of a length, those seen last at the end.
  template <typename See>
  void each(int64_t which, See&& see) const {
    for (int64_t at = lengths[which].oldest; at >= 0; at = lengths[which].entries[at].newer) see(lengths[which].entries[at].key, lengths[which].entries[at].ranked);
  }

  void clear() {
    for (Length& own : lengths) own = {};
  }
};

// How often a run of tokens was continued, by how many different ones, and the most frequent of these, see Seen in ngram_file.py.
struct Followed {
  int64_t total = 0, kinds = 0, place = -1, count = 0;
  const int32_t* top = nullptr;
};

// See Tables in ngram_file.py.
struct Ngrams {
  int64_t order;

  explicit Ngrams(int64_t order) : order(order) {}
  virtual ~Ngrams() = default;
  // What followed a run; false: it was never seen, or nothing followed.
  virtual bool after(const int64_t* run, int64_t length, Followed& to) const = 0;
  // How often a token did.
  virtual int64_t count(const Followed& run, int64_t token) const = 0;
};

constexpr int64_t widest_run = 16;  // WIDEST in ngram_file.py

// Of a growing text, see OnlineTables.
class OnlineNgrams : public Ngrams {
  struct Run {
    int32_t total = 0, kinds = 0, tops = 0;
    int32_t top[widest_run];
  };
  Index index, counts;  // of runs; of a run's tokens
  std::vector<Run> runs;

  static uint64_t pair(int64_t place, int64_t token) { return uint64_t(place) << 32 | uint32_t(token); }

  void learn(const int64_t* run, int64_t length, int64_t token) {
    const uint64_t key = run_number(run, length);
    int64_t place = index.get(key);
    if (place < 0) index.set(key, place = runs.size()), runs.emplace_back();
    Run& own = runs[place];
    const int64_t count = std::max<int64_t>(0, counts.get(pair(place, token))) + 1;
    counts.set(pair(place, token), count);
    ++own.total, own.kinds += count == 1;
    const auto count_at = [&](int64_t i) { return counts.get(pair(place, own.top[i])); };
    int64_t at = std::find(own.top, own.top + own.tops, token) - own.top;
    if (at == own.tops) {
      if (own.tops < widest_run) ++own.tops;
      else if (count_at(--at) >= count) return;
      own.top[at] = token;
    }
    for (; at && count_at(at - 1) <= count; --at) std::swap(own.top[at], own.top[at - 1]);  // of equals the newest comes first
  }

 public:
  using Ngrams::Ngrams;

  void read(Tokens last, const int64_t* tokens, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      for (size_t start = 0; start <= last.size(); ++start) learn(last.data() + start, last.size() - start, tokens[i]);
      last.push_back(tokens[i]);
      if ((int64_t)last.size() >= order) last.erase(last.begin());
    }
  }

  bool after(const int64_t* run, int64_t length, Followed& to) const override {
    const int64_t place = index.get(run_number(run, length));
    if (place >= 0) to = {runs[place].total, runs[place].kinds, place, runs[place].tops, runs[place].top};
    return place >= 0;
  }

  int64_t count(const Followed& run, int64_t token) const override { return std::max<int64_t>(0, counts.get(pair(run.place, token))); }
};

// Of a file, see FileTables; Python holds them.
class FileNgrams : public Ngrams {
  struct Order {
    int64_t count;
    const int64_t *runs, *starts;
    const int32_t *totals, *kinds, *tokens, *counts;
  };
  std::vector<Order> orders;
  const int64_t* unigrams;
  int64_t known;  // tokens that have a count there
  Followed all;
  std::vector<int32_t> top;

 public:
  // `tables`: of each order from 2 on how many runs, and where its parts lie; then of the single tokens their sum, how many different
  // ones, how many have a count and where these lie, and the most frequent of them.
  FileNgrams(int64_t order, const int64_t* tables, int64_t tops) : Ngrams(order) {
    for (int64_t n = 2; n <= order; ++n, tables += 7)
      orders.push_back({tables[0], (int64_t*)tables[1], (int64_t*)tables[2], (int32_t*)tables[3], (int32_t*)tables[4], (int32_t*)tables[5], (int32_t*)tables[6]});
    known = tables[2], unigrams = (int64_t*)tables[3];
    top.assign(tables + 4, tables + 4 + tops);
    all = {tables[0], tables[1], -1, tops, top.data()};
  }

  bool after(const int64_t* run, int64_t length, Followed& to) const override {
    if (!length) return to = all, true;
    const Order& own = orders[length - 1];
    const int64_t key = run_number(run, length), place = std::lower_bound(own.runs, own.runs + own.count, key) - own.runs;
    if (place == own.count || own.runs[place] != key) return false;
    const int64_t start = own.starts[place];
    to = {own.totals[place], own.kinds[place], start, own.starts[place + 1] - start, own.tokens + start};
    to.place = (length - 1) << 48 | start;
    return true;
  }

  int64_t count(const Followed& run, int64_t token) const override {
    if (run.place < 0) return token < known ? unigrams[token] : 0;
    const Order& own = orders[run.place >> 48];
    const int64_t at = std::find(run.top, run.top + run.count, token) - run.top;
    return at == run.count ? 0 : own.counts[(run.place & ((int64_t(1) << 48) - 1)) + at];
  }
};

}  // namespace
