// Readers of texts: each guesses what follows, from what followed the same tokens before, in a request's own text, in earlier ones, or in the
// rows of earlier passes; the likeliest guesses become a tree.
//
// What is computed is what drafters/lookup.py, suffix.py, recycle.py, ngram.py and guessed_tree.py compute.

#pragma once

#include <cmath>
#include <functional>
#include <memory>
#include <numeric>
#include <tuple>

#include "noise.h"
#include "row.h"
#include "tables.h"
#include "torch.h"

namespace {

// What is wanted of a draft, as drafters/native_texts.py packs it.
struct Wanted {
  int64_t depth, nodes;
  int64_t most;           // nodes of a merged draft
  int64_t weighed;        // nodes have to be worth their rows of the pass
  int64_t members;        // bits of those that are asked
  double rate;            // see TokenValue
  const double* seconds;  // of a pass in which each request's draft has so many nodes, where they are weighed
};

// See GuessedTree.
struct Guesses {
  Tokens tokens, parents;
  std::vector<double> chances;
};

constexpr double least_chance = 0.04;  // FLOOR in text_base.py

inline std::vector<double> products(const Tokens& parents, const std::vector<double>& chances) {
  std::vector<double> values(chances);
  for (size_t i = 0; i < values.size(); ++i)
    if (parents[i] >= 0) values[i] *= values[parents[i]];
  return values;
}

// Nodes of largest value that are worth their rows, ascending: a tree, as no node is worth more than its parent.
inline Tokens best_of(const std::vector<double>& values, int64_t most, const Wanted& wanted) {
  Tokens order(values.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return values[a] > values[b]; });
  order.resize(std::min<int64_t>(order.size(), most));
  if (wanted.weighed) {
    int64_t best = 0;
    double reach = -wanted.rate * wanted.seconds[0], expected = 0;
    for (size_t count = 1; count <= order.size(); ++count) {
      expected += values[order[count - 1]];
      const double gain = expected - wanted.rate * wanted.seconds[count];
      if (gain > reach) best = count, reach = gain;
    }
    order.resize(best);
  }
  std::sort(order.begin(), order.end());
  return order;
}

// The tree of these nodes alone.
inline Tokens renumbered(const Tokens& parents, const Tokens& nodes) {
  Tokens number(parents.size(), -1), found;
  for (size_t i = 0; i < nodes.size(); ++i) {
    number[nodes[i]] = i;
    found.push_back(parents[nodes[i]] < 0 ? -1 : number[parents[nodes[i]]]);
  }
  return found;
}

template <typename Place>
struct Guess {
  int64_t token;
  double chance;
  Place behind;
};

// Adds the likeliest nodes one after the other, as `grow` in guessed_tree.py. `expand`: the guesses behind a place, the best first.
template <typename Place, typename Expand>
Guesses grow(const Place& start, const Wanted& wanted, const Tokens& ends, Expand&& expand) {
  struct Open {
    double reached;
    int64_t order, token, parent, level;
    double chance;
    Place behind;
    bool operator<(const Open& other) const { return reached != other.reached ? reached < other.reached : order > other.order; }
  };
  Guesses found;
  std::vector<Open> heap;
  const bool chain = wanted.nodes <= wanted.depth;
  int64_t order = 0;
  auto open = [&](const Place& place, int64_t parent, int64_t level, double reached) {
    for (const Guess<Place>& guess : expand(place)) {
      if (reached * guess.chance < least_chance) break;
      heap.push_back({reached * guess.chance, order++, guess.token, parent, level, guess.chance, guess.behind});
      std::push_heap(heap.begin(), heap.end());
      if (chain) break;
    }
  };
  open(start, -1, 0, 1.0);
  while (!heap.empty() && (int64_t)found.tokens.size() < wanted.nodes) {
    std::pop_heap(heap.begin(), heap.end());
    const Open next = heap.back();
    heap.pop_back();
    found.tokens.push_back(next.token), found.parents.push_back(next.parent), found.chances.push_back(next.chance);
    if (next.level + 1 < wanted.depth && std::find(ends.begin(), ends.end(), next.token) == ends.end())
      open(next.behind, found.tokens.size() - 1, next.level + 1, next.reached);
  }
  return found;
}

// Where a draft begins.
struct Situation {
  const Tokens& ends;  // tokens that end the text
  int64_t position;    // of the next token
  bool coupled;        // it is judged by the noise of each position
  uint64_t noise;
  double temperature;
};

// Guesses about one text.
struct Reader {
  virtual ~Reader() = default;
  // Learns the next tokens of the text.
  virtual void read(const int64_t* tokens, int64_t count) = 0;
  // Goes on behind `head`, the beginning of what was read.
  virtual void branch(const int64_t* head, int64_t count) = 0;
  virtual Guesses guess(const Wanted& wanted, const Situation& at) = 0;
};

// One whose guesses are of kinds, of which it counts how many were right, see GuessCalibration.
struct CountingReader : Reader {
  Chances chances;
  std::vector<std::pair<int64_t, int64_t>> path;  // kinds and tokens of the likeliest path
  size_t heard = 0;                               // of the path, with what was read since

  CountingReader(const double* priors, int64_t count) : chances(priors, count, 4.0, 0.98) {}

  void compare(const int64_t* tokens, int64_t count) {
    for (int64_t i = 0; i < count && heard < path.size(); ++i, ++heard) {
      const bool right = path[heard].second == tokens[i];
      chances.learn(path[heard].first, right);
      if (!right) path.clear();
    }
  }

  void begin() { path.clear(), heard = 0; }
};

// See LookupReader.
class LookupReader : public CountingReader {
  struct Place {
    int64_t guessed;
  };
  int64_t most, start = 0, length = 0;
  Tokens text;
  Index after;                 // place behind the newest run, by its number
  std::vector<uint64_t> runs;  // numbers of the runs that end here: of the last token, of the last two, ...

  void follow(int64_t token) {
    if ((int64_t)runs.size() < most) runs.push_back(0);
    for (size_t i = runs.size(); --i > 0;) runs[i] = runs[i - 1] * run_factor + token + 1;
    runs[0] = token + 1;
  }

 public:
  LookupReader(int64_t most, const double* priors) : CountingReader(priors, 2 * (most + 1)), most(most) {}

  void read(const int64_t* tokens, int64_t count) override {
    compare(tokens, count);
    for (int64_t i = 0; i < count; ++i) {
      for (uint64_t run : runs) after.set(run, text.size());
      follow(tokens[i]);
      text.push_back(tokens[i]);
    }
  }

  void branch(const int64_t* head, int64_t count) override {
    runs.clear(), begin();
    for (int64_t i = std::max<int64_t>(0, count - most); i < count; ++i) follow(head[i]);
  }

  Guesses guess(const Wanted& wanted, const Situation& at) override {
    begin();
    length = 0;
    for (int64_t i = runs.size(); i > 0 && !length; --i)
      if ((start = after.get(runs[i - 1])) >= 0) length = i;
    if (!length) return {};
    return grow(Place{0}, wanted, at.ends, [&](const Place& place) {
      const int64_t token = text[start + place.guessed % ((int64_t)text.size() - start)];
      const int64_t kind = std::min(length + place.guessed, most) + (place.guessed ? most + 1 : 0);
      path.push_back({kind, token});
      return std::vector<Guess<Place>>{{token, chances.chances[kind], {place.guessed + 1}}};
    });
  }
};

// See SuffixReader.
class SuffixReader : public CountingReader {
  struct Place {
    int64_t state, length, copied;
    bool first, likeliest;
  };
  static constexpr int64_t siblings = 4, widest = 48, lengths = 8, shares = 4;
  Automaton own;
  std::shared_ptr<Automaton> shared;  // of earlier texts; null: there is none
  Cursor cursor;
  CopySource source;

  static int64_t length_kind(int64_t length) {
    static constexpr int64_t from[lengths] = {0, 1, 2, 3, 4, 6, 9, 14};
    return std::upper_bound(from, from + lengths, length) - from - 1;
  }
  static int64_t share_kind(double share) {
    static constexpr double from[shares] = {0, 0.3, 0.5, 0.7};
    return std::upper_bound(from, from + shares, share) - from - 1;
  }

  std::vector<Guess<Place>> expand(const Automaton& in, Place place) {
    int64_t state = place.state, length = place.length, copied = place.copied;
    while (!in.states[state].edges && state) state = in.states[state].link, length = std::min<int64_t>(length, in.states[state].length);
    if (!state) return {};
    struct Ranked {
      double weight;
      int64_t token, behind;
      bool operator>(const Ranked& o) const { return std::tie(weight, token, behind) > std::tie(o.weight, o.token, o.behind); }
    };
    std::vector<Ranked> ranked;
    const int64_t count = in.states[state].edges, newest = in.newest(state);
    double total = 0;
    auto weighed = [&](int64_t token, int64_t behind) { return Ranked{double(in.states[behind].count), token, behind}; };
    if (count <= widest) {
      for (int32_t edge = in.states[state].first; edge >= 0; edge = in.edges[edge].next) {
        ranked.push_back(weighed(in.edges[edge].token, in.edges[edge].state));
        total += ranked.back().weight;
        ranked.back().weight += ranked.back().token == newest || count == 1;
      }
      total += 1;
      std::sort(ranked.begin(), ranked.end(), std::greater<>());
      ranked.resize(std::min<size_t>(ranked.size(), siblings));
    } else {
      const int64_t behind = newest < 0 ? -1 : in.following(state, newest);
      if (behind < 0) return {};
      ranked.push_back(weighed(newest, behind)), ranked[0].weight += 1;
      total = in.states[state].count;
    }
    const int64_t onward = 0 <= copied && copied < (int64_t)in.text.size() ? in.text[copied] : -1;
    const int64_t copy = onward < 0 ? -1 : in.following(state, onward);
    int64_t kind;
    if (copy >= 0) {
      auto found = std::find_if(ranked.begin(), ranked.end(), [&](const Ranked& each) { return each.token == onward; });
      if (found == ranked.end()) found = ranked.insert(found, weighed(onward, copy));
      std::rotate(ranked.begin(), found, found + 1);
      ranked.resize(std::min<size_t>(ranked.size(), siblings));
      kind = (2 * shares + place.first) * lengths + length_kind(length);
    } else {
      kind = (length_kind(length) + place.first * lengths) * shares + share_kind(ranked[0].weight / (total + count)), copied = -2;
    }
    const double chance = chances.chances[kind], left = (1.0 - chance) / (total - ranked[0].weight + count);
    if (place.likeliest) path.push_back({kind, ranked[0].token});
    std::vector<Guess<Place>> found{{ranked[0].token, chance, {ranked[0].behind, length + 1, copied + 1, false, place.likeliest}}};
    for (size_t i = 1; i < ranked.size(); ++i) found.push_back({ranked[i].token, ranked[i].weight * left, {ranked[i].behind, length + 1, -1, false, false}});
    return found;
  }

 public:
  SuffixReader(std::shared_ptr<Automaton> shared, const double* priors)
      : CountingReader(priors, 2 * lengths * (shares + 1)), shared(std::move(shared)) {}

  void read(const int64_t* tokens, int64_t count) override {
    compare(tokens, count);
    own.extend(tokens, count);
    source.read(own.text, tokens, count);
    if (shared) cursor.read(*shared, tokens, count);
  }

  void branch(const int64_t* head, int64_t count) override {
    begin();
    own.branch(count);
    source.branch(head, count, own.place());
    if (!shared) return;
    cursor = {};
    const int64_t from = std::max<int64_t>(0, count - 64);
    cursor.read(*shared, head + from, count - from);
  }

  Guesses guess(const Wanted& wanted, const Situation& at) override {
    begin();
    const Automaton* in = &own;
    Place place{own.match(), 0, 0, true, true};
    place.length = own.states[place.state].length, place.copied = source.next(own.text, place.length);
    if (shared) {
      cursor.refresh(*shared);
      if (cursor.length > place.length) in = shared.get(), place = {cursor.state, cursor.length, -1, true, true};
    }
    return grow(place, wanted, at.ends, [&](const Place& each) { return expand(*in, each); });
  }
};

// The likeliest tokens of each of these rows; none of one that holds no numbers.
template <typename T>
std::vector<Ranked> ranked_rows(const T* logits, int64_t count, int64_t n) {
  std::vector<Ranked> rows(count);
  parallel_for(0, count, std::max<int64_t>(1, 16384 / n), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      float values[kept_tokens];
      Ranked& own = rows[r];
      const double total = leading(logits + r * n, n, std::min(kept_tokens, n), own.tokens, values);
      if (!std::isfinite(total)) continue;
      own.count = std::min(kept_tokens, n);
      for (int64_t i = 0; i < own.count; ++i) own.logs[i] = double(values[i]) - total;
    }
  });
  return rows;
}

// What the rows of all requests of a drafter ranked first, and how often that was right by kind of guess, greedy and not.
struct Recycled {
  Graph graph;
  Graph fresh;  // what is not in a file yet
  bool kept;    // in a file
  Chances greedy, drawn;

  Recycled(int64_t most, bool kept, const double* priors, int64_t count)
      : graph(most), fresh(most), kept(kept), greedy(priors, count, 20.0, 0.999), drawn(greedy) {}

  // Of a pass: what the rows behind a text's last tokens and behind each node have ranked.
  void put(const Last& end, const Tokens& tokens, const Tokens& parents, const Ranked* rows) {
    std::vector<Last> places{end};
    for (size_t i = 0; i < tokens.size(); ++i) places.push_back(places[parents[i] + 1].then(tokens[i]));
    for (size_t i = 0; i < places.size(); ++i)
      if (rows[i].count) put(places[i], rows[i]);
  }

  void put(const Last& place, const Ranked& ranked) {
    graph.put(place, ranked);
    if (kept) fresh.put(place, ranked);
  }
};

// See RecycleReader.
class RecycleReader : public Reader {
  struct Place {
    Last last;
  };
  struct Told {
    Last place;
    int64_t count;
    int64_t tokens[kept_tokens], kinds[kept_tokens];
  };
  static constexpr int64_t bins = 11;
  std::shared_ptr<Recycled> from;
  Chances& known;
  Last last;
  std::vector<Told> guessed;  // by the last draft

  const Told& recall(const Last& place) {
    for (const Told& each : guessed)
      if (each.place == place) return each;
    static const double edges[bins - 1] = {std::log(0.01), std::log(0.02), std::log(0.04), std::log(0.08), std::log(0.15),
                                           std::log(0.25), std::log(0.4),  std::log(0.6),  std::log(0.8),  std::log(0.92)};
    int64_t which;
    const Ranked* ranked = from->graph.get(place, which);
    Told told{place, ranked ? ranked->count : 0};
    for (int64_t i = 0; i < told.count; ++i) {
      const int64_t bin = std::upper_bound(edges, edges + bins - 1, ranked->logs[i]) - edges;
      told.tokens[i] = ranked->tokens[i], told.kinds[i] = (2 * which + (i > 0)) * bins + bin;
    }
    guessed.push_back(told);
    return guessed.back();
  }

 public:
  RecycleReader(std::shared_ptr<Recycled> from, bool greedy) : from(from), known(greedy ? from->greedy : from->drawn) {}

  void read(const int64_t* tokens, int64_t count) override {
    bool follows = !guessed.empty();
    for (int64_t i = 0; i < count; ++i) {
      if (follows) {
        const auto told = std::find_if(guessed.begin(), guessed.end(), [&](const Told& each) { return each.place == last; });
        follows = told != guessed.end();
        for (int64_t k = 0; follows && k < told->count; ++k) known.learn(told->kinds[k], told->tokens[k] == tokens[i]);
      }
      last = last.then(tokens[i]);
    }
    guessed.clear();
  }

  void branch(const int64_t* head, int64_t count) override { last = Last(head, count), guessed.clear(); }

  Guesses guess(const Wanted& wanted, const Situation& at) override {
    guessed.clear();
    return grow(Place{last}, wanted, at.ends, [&](const Place& place) {
      const Told told = recall(place.last);
      std::vector<Guess<Place>> found;
      for (int64_t i = 0; i < told.count; ++i) found.push_back({told.tokens[i], known.chances[told.kinds[i]], {place.last.then(told.tokens[i])}});
      std::stable_sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.chance > b.chance; });
      return found;
    });
  }
};

// See NgramReader.
class NgramReader : public CountingReader {
  struct Place {
    Tokens last;
    int64_t guessed;
    bool likeliest;
  };
  static constexpr int64_t siblings = 4, edges = 11;
  std::shared_ptr<Ngrams> tables;  // of a file, or this text's own
  OnlineNgrams* own;
  int64_t vocab;
  Tokens last;

  static int64_t bin(double chance) {
    static constexpr double from[edges] = {0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9};
    return std::upper_bound(from, from + edges, chance) - from;
  }

  Tokens end_of(Tokens tokens) const {
    const int64_t more = tokens.size() - (tables->order - 1);
    if (more > 0) tokens.erase(tokens.begin(), tokens.begin() + more);
    return tokens;
  }

  struct Chance {
    int64_t token;
    double chance;
  };

  std::vector<Chance> interpolated(const Tokens& run, int64_t width) const {
    std::vector<Followed> found;
    for (size_t start = 0; start <= run.size(); ++start) {
      Followed one;
      if (tables->after(run.data() + start, run.size() - start, one)) found.push_back(one);
    }
    if (found.size() < 2 && tables->order >= 2) return {};
    std::vector<Chance> chances;
    for (const Followed& one : found) {
      for (int64_t i = 0; i < std::min(one.count, width); ++i) {
        const auto same = [&](const Chance& each) { return each.token == one.top[i]; };
        if (std::none_of(chances.begin(), chances.end(), same)) chances.push_back({one.top[i], 1.0 / vocab});
      }
      if ((int64_t)chances.size() >= width) break;
    }
    for (Chance& each : chances)
      for (size_t i = found.size(); i-- > 0;) {
        const double all = double(found[i].total + found[i].kinds), scale = 1.0 / all, back = double(found[i].kinds) / all;
        each.chance = times(each.chance, back) + times(tables->count(found[i], each.token), scale);
      }
    return chances;
  }

  // The tokens with the largest log chance + noise of the position first, as the target will choose among its own.
  static void by_noise(std::vector<Chance>& chances, const Situation& at, int64_t position) {
    std::sort(chances.begin(), chances.end(), [](const Chance& a, const Chance& b) { return a.token < b.token; });
    const NoiseKey key(at.noise, position);
    const float power = 1.0 / std::max(at.temperature, 0.05);
    std::vector<std::pair<double, Chance>> ranked;
    for (const Chance& each : chances) {
      const double score = scored(std::pow(float(each.chance), power), noise_of(uint32_t(each.token), key), each.token).score;
      if (score > 0) ranked.push_back({score, each});
    }
    std::stable_sort(ranked.begin(), ranked.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
    chances.clear();
    for (const auto& each : ranked) chances.push_back(each.second);
  }

  std::vector<Guess<Place>> expand(const Place& place, const Situation& at) {
    std::vector<Chance> ranked = interpolated(place.last, at.coupled ? widest_run : siblings);
    if (at.coupled) by_noise(ranked, at, at.position + place.guessed);
    else std::stable_sort(ranked.begin(), ranked.end(), [](const Chance& a, const Chance& b) { return a.chance > b.chance; });
    if (ranked.size() > siblings) ranked.resize(siblings);
    const int64_t later = place.guessed ? edges + 1 : 0;
    std::vector<Guess<Place>> found;
    for (const Chance& each : ranked) {
      Tokens next = place.last;
      next.push_back(each.token);
      const bool likeliest = place.likeliest && found.empty();
      if (likeliest) path.push_back({bin(each.chance) + later, each.token});
      found.push_back({each.token, chances.chances[bin(each.chance) + later], {end_of(std::move(next)), place.guessed + 1, likeliest}});
    }
    return found;
  }

 public:
  NgramReader(std::shared_ptr<Ngrams> tables, OnlineNgrams* own, int64_t vocab, const double* priors)
      : CountingReader(priors, 2 * (edges + 1)), tables(std::move(tables)), own(own), vocab(vocab) {}

  void read(const int64_t* tokens, int64_t count) override {
    compare(tokens, count);
    if (own) own->read(last, tokens, count);
    const int64_t from = std::max<int64_t>(0, count - tables->order);
    last.insert(last.end(), tokens + from, tokens + count);
    last = end_of(std::move(last));
  }

  void branch(const int64_t* head, int64_t count) override {
    begin();
    const int64_t from = std::max<int64_t>(0, count - tables->order);
    last = end_of(Tokens(head + from, head + count));
  }

  Guesses guess(const Wanted& wanted, const Situation& at) override {
    begin();
    return grow(Place{last, 0, true}, wanted, at.ends, [&](const Place& place) { return expand(place, at); });
  }
};

}  // namespace
