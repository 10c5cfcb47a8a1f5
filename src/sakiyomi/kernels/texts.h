// Drafts from text: what followed the same tokens before, in a request's own text, in earlier ones, or in the rows of earlier passes. Readers
// guess, the likeliest guesses become a tree, and the trees of several readers are merged.
//
// What is computed is what drafters/lookup.py, suffix.py, recycle.py, guessed_tree.py and merged.py compute.

#pragma once

#include <cmath>
#include <functional>
#include <memory>
#include <numeric>
#include <tuple>

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

// Guesses about one text.
struct Reader {
  virtual ~Reader() = default;
  // Learns the next tokens of the text.
  virtual void read(const int64_t* tokens, int64_t count) = 0;
  // Goes on behind `head`, the beginning of what was read.
  virtual void branch(const int64_t* head, int64_t count) = 0;
  virtual Guesses guess(const Wanted& wanted, const Tokens& ends) = 0;
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
    for (size_t i = runs.size(); --i > 0;) runs[i] = runs[i - 1] * 0x5851F42D4C957F2Du + token + 1;
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

  Guesses guess(const Wanted& wanted, const Tokens& ends) override {
    begin();
    length = 0;
    for (int64_t i = runs.size(); i > 0 && !length; --i)
      if ((start = after.get(runs[i - 1])) >= 0) length = i;
    if (!length) return {};
    return grow(Place{0}, wanted, ends, [&](const Place& place) {
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

  Guesses guess(const Wanted& wanted, const Tokens& ends) override {
    begin();
    const Automaton* in = &own;
    Place place{own.match(), 0, 0, true, true};
    place.length = own.states[place.state].length, place.copied = source.next(own.text, place.length);
    if (shared) {
      cursor.refresh(*shared);
      if (cursor.length > place.length) in = shared.get(), place = {cursor.state, cursor.length, -1, true, true};
    }
    return grow(place, wanted, ends, [&](const Place& each) { return expand(*in, each); });
  }
};

// What the rows of all requests of a drafter ranked first, and how often that was right by kind of guess, greedy and not.
struct Recycled {
  Graph graph;
  Graph fresh;  // what is not in a file yet
  bool kept;    // in a file
  Chances greedy, drawn;

  Recycled(int64_t most, bool kept, const double* priors, int64_t count)
      : graph(most), fresh(most), kept(kept), greedy(priors, count, 20.0, 0.999), drawn(greedy) {}

  // Of a pass: the rows behind a text's last tokens and behind each node.
  template <typename T>
  void rank(const Last& end, const Tokens& tokens, const Tokens& parents, const T* logits, int64_t n) {
    std::vector<Last> places{end};
    for (size_t i = 0; i < tokens.size(); ++i) places.push_back(places[parents[i] + 1].then(tokens[i]));
    const int64_t count = std::min(kept_tokens, n);
    std::vector<Ranked> rows(places.size());
    parallel_for(0, rows.size(), std::max<int64_t>(1, 16384 / n), [&](int64_t begin, int64_t finish) {
      for (int64_t r = begin; r < finish; ++r) {
        float values[kept_tokens];
        const double total = leading(logits + r * n, n, count, rows[r].tokens, values);
        if (!std::isfinite(total)) continue;
        rows[r].count = count;
        for (int64_t i = 0; i < count; ++i) rows[r].logs[i] = double(values[i]) - total;
      }
    });
    for (size_t i = 0; i < rows.size(); ++i)
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

  const Told& at(const Last& place) {
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

  Guesses guess(const Wanted& wanted, const Tokens& ends) override {
    guessed.clear();
    return grow(Place{last}, wanted, ends, [&](const Place& place) {
      const Told told = at(place.last);
      std::vector<Guess<Place>> found;
      for (int64_t i = 0; i < told.count; ++i) found.push_back({told.tokens[i], known.chances[told.kinds[i]], {place.last.then(told.tokens[i])}});
      std::stable_sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.chance > b.chance; });
      return found;
    });
  }
};

// See ChanceCalibration.
class Claims {
  static constexpr int64_t edges = 10;
  double claimed[edges + 1], kept[edges + 1];

  static int64_t bin(double claim) {
    static constexpr double from[edges] = {0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.96};
    return std::upper_bound(from, from + edges, claim) - from;
  }

 public:
  Claims() {
    static constexpr double from[edges + 2] = {0, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.96, 1};
    for (int64_t i = 0; i <= edges; ++i) claimed[i] = kept[i] = 6.0 * ((from[i] + from[i + 1]) / 2);
  }

  double chance(double claim) const { return std::min(0.995, claim * kept[bin(claim)] / claimed[bin(claim)]); }

  void learn(double claim, bool right) {
    const int64_t at = bin(claim);
    claimed[at] = claimed[at] * 0.995 + claim, kept[at] = kept[at] * 0.995 + right;
  }
};

// A draft of point masses. Several readers may have guessed the same node: each is a draw of it.
struct TextDraft {
  Tokens tokens, parents;
  Tokens draws, members;  // node of each draw, and who guessed it
  std::vector<double> chances;  // of each draw
};

// One request's text, and all who read it.
struct ReadText {
  struct Said {
    int64_t member;
    Guesses guesses;
  };
  std::shared_ptr<std::vector<Claims>> claims;  // of the merged drafter's members; null: there is one alone
  std::vector<std::unique_ptr<Reader>> readers;
  std::shared_ptr<Recycled> recycled;  // what rows rank first is put there; null: nowhere
  int64_t seen = 0;                    // tokens of the request's text that were read
  std::vector<Said> said;              // in the last round
  Tokens heard;                        // since then

  void read(const int64_t* tokens, int64_t count) {
    for (auto& reader : readers) reader->read(tokens, count);
    if (!said.empty()) heard.insert(heard.end(), tokens, tokens + count);
  }

  void branch(const int64_t* head, int64_t count) {
    for (auto& reader : readers) reader->branch(head, count);
    seen = count, said.clear(), heard.clear();
  }

  // Behind all that was read.
  TextDraft propose(const Wanted& wanted, const Tokens& ends) {
    if (claims) learn();
    said.clear(), heard.clear();
    TextDraft draft;
    for (size_t i = 0; i < readers.size(); ++i) {
      if (!(wanted.members >> i & 1)) continue;
      Guesses found = readers[i]->guess(wanted, ends);
      if (wanted.weighed) {
        const Tokens kept = best_of(products(found.parents, found.chances), wanted.nodes, wanted);
        Guesses best{{}, renumbered(found.parents, kept), {}};
        for (int64_t node : kept) best.tokens.push_back(found.tokens[node]), best.chances.push_back(found.chances[node]);
        found = std::move(best);
      }
      said.push_back({int64_t(i), std::move(found)});
    }
    return merged(wanted);
  }

 private:
  // Compares what was said with what the target chose since.
  void learn() {
    for (const Said& each : said) {
      const Guesses& guesses = each.guesses;
      int64_t place = -1;
      for (int64_t token : heard) {
        int64_t found = -1;
        for (size_t node = 0; node < guesses.tokens.size(); ++node)
          if (guesses.parents[node] == place) {
            (*claims)[each.member].learn(guesses.chances[node], guesses.tokens[node] == token);
            if (guesses.tokens[node] == token) found = node;
          }
        if (found < 0) break;
        place = found;
      }
    }
  }

  TextDraft merged(const Wanted& wanted) const {
    TextDraft all;
    std::vector<double> values;
    for (const Said& each : said) {
      const Guesses& guesses = each.guesses;
      std::vector<double> worths(guesses.chances);
      if (claims)
        for (double& chance : worths) chance = (*claims)[each.member].chance(chance);
      worths = products(guesses.parents, worths);
      Tokens own;
      for (size_t i = 0; i < guesses.tokens.size(); ++i) {
        const int64_t above = guesses.parents[i] < 0 ? -1 : own[guesses.parents[i]], token = guesses.tokens[i];
        size_t node = 0;
        while (node < all.tokens.size() && !(all.tokens[node] == token && all.parents[node] == above)) ++node;
        if (node == all.tokens.size()) all.tokens.push_back(token), all.parents.push_back(above), values.push_back(worths[i]);
        values[node] = std::max(values[node], worths[i]);
        own.push_back(node);
        all.draws.push_back(node), all.members.push_back(each.member), all.chances.push_back(guesses.chances[i]);
      }
    }
    if (!claims) return all;
    const Tokens kept = best_of(values, wanted.most, wanted);
    if (kept.size() == all.tokens.size()) return all;
    TextDraft left;
    Tokens number(all.tokens.size(), -1);
    for (size_t i = 0; i < kept.size(); ++i) number[kept[i]] = i, left.tokens.push_back(all.tokens[kept[i]]);
    left.parents = renumbered(all.parents, kept);
    for (size_t i = 0; i < all.draws.size(); ++i)
      if (number[all.draws[i]] >= 0)
        left.draws.push_back(number[all.draws[i]]), left.members.push_back(all.members[i]), left.chances.push_back(all.chances[i]);
    return left;
  }
};

// What all requests of a drafter share, in handles that Python frees.
template <typename T>
std::shared_ptr<T>& shared_of(int64_t handle) {
  return *(std::shared_ptr<T>*)handle;
}

template <typename T, typename... Given>
int64_t made_shared(Given&&... given) {
  return (int64_t) new std::shared_ptr<T>(std::make_shared<T>(std::forward<Given>(given)...));
}

}  // namespace

extern "C" {

int64_t sk_automaton() { return made_shared<Automaton>(); }
void sk_free_automaton(int64_t handle) { delete &shared_of<Automaton>(handle); }
// Adds another text.
void sk_remember(int64_t handle, int64_t count, const int64_t* tokens) {
  Automaton& own = *shared_of<Automaton>(handle);
  own.branch(0), own.extend(tokens, count);
}

int64_t sk_recycled(int64_t most, int kept, int64_t count, const double* priors) { return made_shared<Recycled>(most, kept != 0, priors, count); }
void sk_free_recycled(int64_t handle) { delete &shared_of<Recycled>(handle); }
// What was ranked first behind a context of this length (0: the longest), from a file.
void sk_recycled_load(int64_t handle, int64_t which, uint64_t key, int64_t count, const int64_t* tokens, const double* logs) {
  Ranked ranked;
  ranked.count = std::min(count, kept_tokens);
  std::copy(tokens, tokens + ranked.count, ranked.tokens), std::copy(logs, logs + ranked.count, ranked.logs);
  shared_of<Recycled>(handle)->graph.put(which, key, ranked);
}
// What the row behind a text's last tokens ranks first.
void sk_recycled_put(int64_t handle, int64_t length, const int64_t* last, int64_t count, const int64_t* tokens, const double* logs) {
  Ranked ranked;
  ranked.count = std::min(count, kept_tokens);
  std::copy(tokens, tokens + ranked.count, ranked.tokens), std::copy(logs, logs + ranked.count, ranked.logs);
  shared_of<Recycled>(handle)->put(Last(last, length), ranked);
}
// How many contexts of a length are not in a file yet.
int64_t sk_recycled_count(int64_t handle, int64_t which) { return shared_of<Recycled>(handle)->fresh.size(which); }
// Those, (n) and (n, 4) each; `counts`: how many tokens each has.
void sk_recycled_fresh(int64_t handle, int64_t which, uint64_t* keys, int64_t* counts, int64_t* tokens, double* logs) {
  shared_of<Recycled>(handle)->fresh.each(which, [&](uint64_t key, const Ranked& ranked) {
    *keys++ = key, *counts++ = ranked.count;
    tokens = std::copy(ranked.tokens, ranked.tokens + kept_tokens, tokens), logs = std::copy(ranked.logs, ranked.logs + kept_tokens, logs);
  });
}
void sk_recycled_forget(int64_t handle, int only_fresh, int64_t count, const double* priors) {
  Recycled& own = *shared_of<Recycled>(handle);
  if (only_fresh) return own.fresh.clear();
  own.graph.clear();
  own.greedy = own.drawn = Chances(priors, count, 20.0, 0.999);
}

int64_t sk_claims(int64_t count) { return made_shared<std::vector<Claims>>(count); }
void sk_free_claims(int64_t handle) { delete &shared_of<std::vector<Claims>>(handle); }

// A text; `claims` of the merged drafter (0: there is one drafter alone).
int64_t sk_text(int64_t claims) {
  ReadText* text = new ReadText;
  if (claims) text->claims = shared_of<std::vector<Claims>>(claims);
  return (int64_t)text;
}
void sk_free_text(int64_t text) { delete (ReadText*)text; }
// Readers of the text, in the order of the drafters: prompt lookup, a suffix automaton (of earlier texts; 0: none), recycling.
void sk_read_lookup(int64_t text, int64_t most, const double* priors) { ((ReadText*)text)->readers.push_back(std::make_unique<LookupReader>(most, priors)); }
void sk_read_suffix(int64_t text, int64_t earlier, const double* priors) {
  ((ReadText*)text)->readers.push_back(std::make_unique<SuffixReader>(earlier ? shared_of<Automaton>(earlier) : nullptr, priors));
}
void sk_read_recycled(int64_t text, int64_t recycled, int greedy) {
  ((ReadText*)text)->recycled = shared_of<Recycled>(recycled);
  ((ReadText*)text)->readers.push_back(std::make_unique<RecycleReader>(shared_of<Recycled>(recycled), greedy != 0));
}
// Where the number of the request's tokens lies that were read.
int64_t sk_text_seen(int64_t text) { return (int64_t)&((ReadText*)text)->seen; }
void sk_text_read(int64_t text, int64_t count, const int64_t* tokens) { ((ReadText*)text)->read(tokens, count); }
void sk_text_branch(int64_t text, int64_t count, const int64_t* head) { ((ReadText*)text)->branch(head, count); }

// A draft behind all that was read: how many nodes and draws, and where tokens, parents, the draws' nodes and members lie, and their chances.
void sk_text_propose(int64_t text, const void* wanted, int64_t count, const int64_t* ends, int64_t* counts, const int64_t** ints, const double** doubles) {
  static thread_local Tokens whole;
  static thread_local TextDraft draft;
  draft = ((ReadText*)text)->propose(*(const Wanted*)wanted, {ends, ends + count});
  whole.clear();
  for (const auto* part : {&draft.tokens, &draft.parents, &draft.draws, &draft.members}) whole.insert(whole.end(), part->begin(), part->end());
  counts[0] = draft.tokens.size(), counts[1] = draft.draws.size();
  *ints = whole.data(), *doubles = draft.chances.data();
}
}
