// Draft trees that a model grows, one level a pass: from rows of logits to the rows of the next pass.
//
// What is computed is what drafters/draft_tree_state.py and drafters/trees compute, which remain for models whose passes are not replayed and
// are what the tests compare with. `round.h` runs the passes.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <type_traits>
#include <vector>

#include "attention.h"
#include "edits.h"
#include "noise.h"
#include "program.h"
#include "row.h"
#include "torch.h"

extern "C" void sk_rows(int64_t session, int64_t count, const void* table, int64_t size, int64_t* inputs);
extern "C" void sk_begin(int64_t session, int64_t count, int64_t size, const int32_t* table);

namespace {

enum Rule : int64_t { greedy, coupled, drawn, listed };  // as drafters/native_trees.py numbers them
enum Shape : int64_t { of_chain, best_first, by_probs, by_level, fixed_shape };  // likewise; see Shape in drafters/trees/base.py

// How large a tree may become, as drafters/native_trees.py packs it.
struct Extent {
  int64_t depth, nodes;
  int64_t siblings;         // candidates of a place, but in a fixed shape
  int64_t weighed;          // a level and a node have to be worth their time
  int64_t shape, width;     // places that are read of a level at most
  int64_t rows;             // candidates that are read of all levels at most
  const int64_t* children;  // of a fixed shape, whose nodes are numbered level by level, 0 the last committed token: the children of node
                            // i are children[i], ..., children[i + 1] - 1; else null
  double floor, price, rate;  // see CandidateTree and TokenValue
  double followed;            // share of accepted nodes that have an accepted child
  double sharpness, coverage;  // see Confidence
  const double* slots;         // of guesses that come in one pass: sharpness and coverage of each level; else null
  int64_t breadth;             // of these a level lists so many at least
};

// Where a tree begins, and how its candidates are found; likewise.
struct Root {
  int64_t slot;      // in the model's cache; -1: there is none yet
  int64_t held;      // committed tokens whose pairs are in the slot
  int64_t lead;      // the first so many tokens of the text have no pair there
  int64_t first;     // position of the first level
  int64_t rule;
  int64_t top_k;
  double temperature, top_p, min_p;
  uint64_t noise, stream;      // states of the keyed noise and of the stream of uniforms
  float* probs;                // (rows + 1, V of the target): distributions that candidates are drawn from, by place; else null
};

struct Ask : Extent, Root {
  const Edits* edits = nullptr;  // of rows that candidates are found in; null: none
};

// Layers beside a model: each of their rows reads a row of the same place. As model_executor/row_layers.py packs them.
struct Layers {
  Program* program = nullptr;     // null: there are none
  int64_t session = 0;            // on whose weights
  char* given = nullptr;          // where they read
  int64_t rows = 0, bytes = 0;    // most rows at once, bytes of each

  // What they make of so many rows, which may have tokens and positions, too.
  Tensor run(const char* from, int64_t count, const int64_t* ids = nullptr, const int64_t* positions = nullptr) const {
    check(count <= rows, "more rows than layers read at once");
    static thread_local std::vector<int64_t> none;
    none.resize(std::max<int64_t>(none.size(), count), 0);
    check(!positions || program->reaches(positions, count), "positions behind the tables of layers");
    std::memcpy(given, from, count * bytes);
    sk_begin(session, 0, count, nullptr);
    program->run(count, ids ? ids : none.data(), positions ? positions : none.data(), -1, nullptr, nullptr);
    return program->logits();
  }
};

// How a model guesses several tokens in a pass, at masks behind the text: as model_executor/kernel_rounds.py packs it.
struct Masks {
  int64_t token = -1;             // that stands for one to be guessed; -1: a pass guesses one
  const char* feature = nullptr;  // of a mask, where rows read such
  int64_t block = 0;              // of a block drafter: a pass reads the last token and masks, and keys and values of the text are made of the
                                  // target's hidden states
  int64_t rows = 0;               // of a block; 0: as few as are wanted
  int64_t first = 0;              // row of a block's first guess
  int64_t sees_all = 0;           // rows of a block see all of it, else those before them
  Layers pairs;                   // make the text's keys and values
  Layers bias;                    // of a guess by the token before it, from the slot's hidden state; none: guesses do not depend on it
  int64_t rated = 0;              // it says, too, how likely the first guess is to be accepted
};

// Hidden states that a model's rows read beside their tokens, as those of an EAGLE head do: the target's for committed tokens, the model's own
// for its candidates. As model_executor/kernel_rounds.py packs it.
struct Fed {
  char* given = nullptr;            // where a pass reads them; null: its rows read tokens alone
  int64_t rows = 0, bytes = 0;      // most rows of a pass, bytes of each
  int64_t state = 0;                // which of a pass's captured states are the features of its rows
  const int64_t* tokens = nullptr;  // the target's token for each that the model proposes; null: they are the same
  Layers said;                      // make logits of a row's features; none: the pass gives them
};

// The candidates of one place.
struct Place {
  int64_t candidate, start = 0;  // the first of them in the tree
  int64_t offered = 0;           // so many of them are in it
  const void* row = nullptr;     // of the model, that their probability is still to be computed from; else null
  std::vector<int64_t> tokens;
  std::vector<double> scores, probs;
  std::vector<int64_t> support;  // while it is drawn from: tokens of positive probability, where they are `supported`
  int64_t supported = 0;
};

// What has grown of a tree.
struct Grown {
  std::vector<int64_t> tokens, parents, ranks, rows, unread, level;
  std::vector<int64_t> nodes;  // in a fixed shape: which of its nodes each candidate is
  std::vector<double> chances, values, probs;
  std::vector<Place> places;
  std::vector<char> features;  // of the last committed token, and of `rows`
  int64_t levels = 0;
};

struct Tree : Grown {
  Ask ask{};
  std::vector<int64_t> missing;  // committed tokens that the model has not read; the last token of all is among them
  std::vector<int64_t> stops;    // tokens that end the text
  std::vector<char> given;       // what the missing tokens read beside themselves, where they do

  bool begun() const { return levels > 0; }

  // The children of a place in a fixed shape; a place is the last committed token (-1) or a candidate.
  const int64_t* children(int64_t place) const { return ask.children + (place < 0 ? 0 : nodes[place]); }

  int64_t siblings(int64_t place) const { return ask.shape == fixed_shape ? children(place)[1] - children(place)[0] : ask.siblings; }
};

// One row of logits as candidates, of a level that wants the `first` one of each alone or more; false where it holds no number to choose by.
template <typename T>
bool candidates(const Ask& ask, const T* row, int64_t n, int64_t siblings, bool first, int64_t level, float* table, bool later, Place& to) {
  if (ask.rule == greedy && first) {
    later = later && ask.shape == of_chain && !ask.weighed;  // nothing is decided by its probability
    const int64_t found = later ? best<false>(row, n) : best(row, n);
    if (found < 0) return false;
    if (later) to.row = row;
    const uint32_t bits = uint32_t(found);
    float prob;
    std::memcpy(&prob, &bits, 4);
    to.tokens = {found >> 32}, to.probs = {prob}, to.scores = {0.0};
    return true;
  }
  const int64_t count = std::min(siblings, n);
  if (ask.rule == greedy) {
    std::vector<float> logits(count);
    to.tokens.resize(count);
    const double total = leading(row, n, count, to.tokens.data(), logits.data());
    if (!std::isfinite(total)) return false;
    for (float x : logits) to.scores.push_back(x - total), to.probs.push_back(std::exp(to.scores.back()));
    return true;
  }
  static thread_local std::vector<float> scratch;
  static thread_local std::vector<int64_t> support(few);
  scratch.resize(n);
  float* probs = table ? table : scratch.data();
  const int64_t supported = warp(row, n, ask.temperature, std::min(ask.top_k, n), ask.top_p, ask.min_p, probs, support.data());
  if (supported == -2) return false;
  if (ask.rule == coupled) {
    const NoiseKey key(ask.noise, ask.first + level);
    for (const Scored& s : ranked(probs, n, count, key, supported < 0 ? nullptr : support.data(), supported))
      to.tokens.push_back(s.token), to.scores.push_back(std::log(s.score));
  } else if (ask.rule == drawn) {  // one place after another, see `draw_all`
    to.supported = supported;
    if (supported >= 0) to.support.assign(support.begin(), support.begin() + supported);
    return true;
  } else {
    std::vector<float> found(count);
    to.tokens.resize(count);
    leading(probs, n, count, to.tokens.data(), found.data());
    while (!to.tokens.empty() && !(probs[to.tokens.back()] > 0)) to.tokens.pop_back();
  }
  for (int64_t token : to.tokens) to.probs.push_back(probs[token]);
  if (ask.rule != coupled)
    for (double prob : to.probs) to.scores.push_back(std::log(prob));
  return true;
}

// Tokens that a model proposes, of the target's.
struct Vocabulary {
  int64_t own, width;                // how many it proposes, and V of the target
  const int64_t* tokens = nullptr;   // the target's token for each; null: they are the same

  // Numbers of a row that candidates are drawn from.
  int64_t reach() const { return tokens ? width : std::min(own, width); }

  // `candidates` of a row of the model's. The likeliest tokens are found there; whatever depends on the numbers of others is found over the target's,
  // where those that the model does not propose are impossible.
  template <typename T>
  bool list(const Ask& ask, const T* row, int64_t siblings, bool first, int64_t level, float* table, bool later, Place& to) const {
    if (tokens && ask.rule != greedy) {
      static thread_local std::vector<T> wide;
      wide.assign(width, std::is_same_v<T, bf16> ? T(narrow(-INFINITY)) : T(-INFINITY));
      for (int64_t i = 0; i < own; ++i) wide[tokens[i]] = row[i];
      return candidates(ask, wide.data(), width, siblings, first, level, table, false, to);
    }
    const int64_t n = std::min(own, width);
    if (!candidates(ask, row, n, siblings, first, level, table, later, to)) return false;
    if (tokens)
      for (int64_t& token : to.tokens) token = tokens[token];
    if (table) std::fill(table + n, table + width, 0.0f);
    return true;
  }
};

// Draws the candidates of a place, each from what the ones before it leave, as draw_distinct of sampling/rows.py; false where there are none.
inline bool draw_all(Ask& ask, float* probs, int64_t n, int64_t siblings, Place& to) {
  const int64_t* support = to.supported < 0 ? nullptr : to.support.data();
  auto some = [&] {
    return support ? std::any_of(support, support + to.supported, [&](int64_t token) { return probs[token] > 0; })
                   : std::any_of(probs, probs + n, [](float prob) { return prob > 0; });
  };
  while ((int64_t)to.tokens.size() < siblings && (to.tokens.empty() || some())) {
    const int64_t token = draw(probs, n, uniform(ask.stream), support, to.supported);
    if (token < 0) return false;
    to.tokens.push_back(token), to.probs.push_back(probs[token]), to.scores.push_back(std::log(to.probs.back()));
    probs[token] = 0;
  }
  for (size_t i = 0; i < to.tokens.size(); ++i) probs[to.tokens[i]] = float(to.probs[i]);
  return true;
}

// Chances of a place's candidates.
inline std::vector<double> chances_of(const Tree& tree, const Place& place) {
  if (place.tokens.size() == 1) return {std::min(1.0, place.probs[0])};
  double total = 0;
  const bool own = tree.ask.shape == by_probs;  // chances are the model's own probabilities, else what these were found to be worth
  const double* slot = tree.ask.slots ? tree.ask.slots + 2 * (tree.levels - 1) : nullptr;
  const double sharpness = own ? 1.0 : slot ? slot[0] : tree.ask.sharpness;
  std::vector<double> chances;
  for (double score : place.scores) total += chances.emplace_back(std::exp(sharpness * (score - place.scores[0])));
  const double share = own ? std::min(1.0, std::accumulate(place.probs.begin(), place.probs.end(), 0.0) / total) : 0;  // rounded, it may be more
  total /= slot ? slot[1] : tree.ask.coverage;
  for (double& chance : chances) chance = own ? chance * share : chance / total;
  return chances;
}

// Adds the first candidates of a place to a tree, so many at most; those that are worth too little are left out.
inline void offer(Tree& tree, Place&& place, const std::vector<double>& chances, size_t most) {
  const double above = place.candidate < 0 ? 1.0 : tree.values[place.candidate];
  place.start = tree.tokens.size(), place.offered = 0;
  for (size_t rank = 0; rank < std::min(most, place.tokens.size()); ++rank) {
    const double value = above * chances[rank];
    if (value < tree.ask.floor) break;
    ++place.offered;
    tree.level.push_back(tree.tokens.size());
    tree.tokens.push_back(place.tokens[rank]), tree.parents.push_back(place.candidate), tree.ranks.push_back(rank);
    tree.chances.push_back(chances[rank]), tree.values.push_back(value), tree.probs.push_back(place.probs[rank]);
    if (tree.ask.shape == fixed_shape) tree.nodes.push_back(tree.children(place.candidate)[0] + rank);
  }
  tree.places.push_back(std::move(place));
}

inline void offer(Tree& tree, Place&& place) {
  const std::vector<double> chances = chances_of(tree, place);
  offer(tree, std::move(place), chances, place.tokens.size());
}

// The candidates of largest value, best first, of equal ones the earlier first; as many as may become nodes at most.
inline std::vector<int64_t> best_of(const Tree& tree) {
  std::vector<int64_t> order(tree.values.size());
  std::iota(order.begin(), order.end(), 0);
  const size_t count = std::min<size_t>(tree.ask.nodes, order.size());
  auto better = [&](int64_t a, int64_t b) { return tree.values[a] != tree.values[b] ? tree.values[a] > tree.values[b] : a < b; };
  std::partial_sort(order.begin(), order.begin() + count, order.end(), better);
  order.resize(count);
  return order;
}

// Which candidates of the last level the model reads next; `seconds` of a level by its rows, null: it costs nothing.
inline std::vector<int64_t> expanded(Tree& tree, const double* seconds) {
  Ask& ask = tree.ask;
  std::vector<int64_t> next;
  if (tree.levels >= ask.depth) return next;
  if (ask.shape == of_chain) {
    next.assign(tree.level.begin(), tree.level.begin() + std::min<size_t>(1, tree.level.size()));
  } else if (ask.shape == fixed_shape) {
    std::copy_if(tree.level.begin(), tree.level.end(), std::back_inserter(next), [&](int64_t candidate) { return tree.siblings(candidate) > 0; });
  } else if (ask.shape == by_level) {
    next = tree.level;
    std::stable_sort(next.begin(), next.end(), [&](int64_t a, int64_t b) { return tree.values[a] > tree.values[b]; });
    next.resize(std::min<size_t>(next.size(), ask.width));
    std::sort(next.begin(), next.end());
  } else {
    std::vector<int64_t> order = best_of(tree);
    if ((int64_t)order.size() == ask.nodes) ask.floor = std::max(ask.floor, tree.values[order.back()]);
    std::sort(order.begin(), order.end());
    std::set_intersection(tree.level.begin(), tree.level.end(), order.begin(), order.end(), std::back_inserter(next));
  }
  const auto ends = [&](int64_t token) { return std::find(tree.stops.begin(), tree.stops.end(), token) != tree.stops.end(); };
  std::erase_if(next, [&](int64_t candidate) { return ends(tree.tokens[candidate]); });
  if (ask.weighed && !next.empty() && seconds) {
    double gain = 0;
    for (int64_t candidate : next) gain += std::max(0.0, ask.followed * tree.values[candidate] - ask.price);
    if (!(gain > ask.rate * seconds[next.size()])) next.clear();
  }
  if (int64_t(tree.rows.size() + next.size()) > ask.rows) next.clear();
  return next;
}

// Candidates of a complete tree that may become nodes, in the order in which they do.
inline std::vector<int64_t> ordered(const Tree& tree) {
  if (tree.ask.shape != of_chain && tree.ask.shape != fixed_shape) return best_of(tree);
  std::vector<int64_t> order(std::min<size_t>(tree.ask.nodes, tree.tokens.size()));
  std::iota(order.begin(), order.end(), 0);
  return order;
}

// Candidates of complete trees that become nodes, ascending, as `drafts_of` and `shares` in Python find them: of those that are weighed no
// more than are worth their rows of the pass that all share. `requests`: that wait for it; `scored`: its seconds by nodes.
inline std::vector<std::vector<int64_t>> chosen(const std::vector<const Tree*>& trees, int64_t requests, const double* scored) {
  std::vector<std::vector<int64_t>> orders;
  std::vector<size_t> weighed;
  int64_t nodes = 0;
  double rate = 0;
  for (const Tree* tree : trees) {
    if (tree->ask.weighed) weighed.push_back(orders.size()), rate += tree->ask.rate;
    orders.push_back(ordered(*tree));
    if (!tree->ask.weighed) nodes += orders.back().size();
  }
  if (!weighed.empty()) {
    rate = rate / double(weighed.size()) * double(requests);
    std::vector<size_t> counts(trees.size()), best = counts;
    auto value = [&](size_t i) { return trees[i]->values[orders[i][counts[i]]]; };
    for (double expected = 0, most = -rate * scored[nodes];;) {
      const size_t* next = nullptr;
      for (const size_t& i : weighed)
        if (counts[i] < orders[i].size() && (!next || value(i) > value(*next))) next = &i;
      if (!next) break;
      expected += value(*next), ++counts[*next], ++nodes;
      const double gain = expected - rate * scored[nodes];
      if (gain > most) most = gain, best = counts;
    }
    for (size_t i : weighed) orders[i].resize(best[i]);
  }
  for (auto& order : orders) std::sort(order.begin(), order.end());
  return orders;
}

// A model whose passes are described.
struct Described {
  int64_t session, vocab, half;
  std::vector<int64_t> sizes;       // row counts of passes, ascending
  std::vector<int64_t*> buffers;    // for each: ids, then positions
  std::vector<Program*> programs;   // for each; null: Python runs these passes

  // Describes a pass, and fills its buffer; its size, -1 where none is so large.
  int64_t describe(const std::vector<int64_t>& table, int64_t segments, int64_t rows) const {
    const size_t size = std::lower_bound(sizes.begin(), sizes.end(), rows) - sizes.begin();
    if (size == sizes.size()) return -1;
    sk_rows(session, segments, table.data(), sizes[size], buffers[size]);
    return sizes[size];
  }
};

// Trees that share their passes.
struct Forest {
  Described model;
  int64_t width;                  // V of the target
  bool kept;                      // rows of all passes stay until the trees are given up
  const double* seconds;          // of a level by its rows
  std::vector<Tree*> trees;
  Fed fed;
  Masks masks;
  bool sure = false;              // chances of all candidates are wanted while trees grow

  Vocabulary vocabulary() const { return {model.vocab, width, fed.tokens}; }

  // Rows of a tree in the next pass.
  int64_t rows_of(const Tree& tree) const {
    if (tree.begun()) return tree.unread.size();
    if (!masks.block) return tree.missing.size() + (masks.token < 0 ? 0 : tree.ask.depth - 1);
    return masks.rows ? masks.rows : masks.first + tree.ask.depth;
  }

  // Describes the next pass, and fills its buffer; its size, 0 where all trees are complete.
  int64_t begin() {
    std::vector<int64_t> table, ids, parents;
    std::vector<char> given;
    for (const Tree* each : trees) {
      const Tree& tree = *each;
      const Ask& ask = tree.ask;
      const int64_t rows = rows_of(tree), done = tree.begun() ? tree.rows.size() : 0;
      if (!rows) continue;
      const int64_t length = (tree.begun() ? ask.first + done : masks.block ? ask.first - 1 : ask.held) - ask.lead;
      table.insert(table.end(), {ask.slot, rows, length, done});
      if (fed.given) feed(tree, given);
      if (!tree.begun()) {
        ids.insert(ids.end(), tree.missing.begin(), tree.missing.end());
        ids.insert(ids.end(), rows - tree.missing.size(), masks.token);
        for (int64_t i = 0; i < rows; ++i) parents.push_back(masks.sees_all ? -2 : i - 1);
        continue;
      }
      std::vector<int64_t> row_of(tree.tokens.size(), -1);
      int64_t row = 0;
      for (const auto* candidates : {&tree.rows, &tree.unread})
        for (int64_t candidate : *candidates) {
          row_of[candidate] = row++;
          parents.push_back(tree.parents[candidate] < 0 ? -1 : row_of[tree.parents[candidate]]);
        }
      for (int64_t candidate : tree.unread) ids.push_back(tree.tokens[candidate]);
    }
    if (ids.empty()) return 0;
    const int64_t segments = table.size() / 4;
    for (const auto* part : {&ids, &parents}) table.insert(table.end(), part->begin(), part->end());
    if (fed.given) {
      if ((int64_t)ids.size() > fed.rows) return -1;
      check(given.size() == ids.size() * fed.bytes, "rows without their hidden states");
      std::memcpy(fed.given, given.data(), given.size());
    }
    return model.describe(table, segments, ids.size());
  }

  // Adds the features that a tree's rows of the next pass read.
  void feed(const Tree& tree, std::vector<char>& given) const {
    if (!tree.begun()) {
      given.insert(given.end(), tree.given.begin(), tree.given.end());
      for (int64_t i = tree.missing.size(); i < rows_of(tree); ++i) given.insert(given.end(), masks.feature, masks.feature + fed.bytes);
      return;
    }
    for (int64_t candidate : tree.unread) {
      const int64_t above = tree.parents[candidate];
      const int64_t row = above < 0 ? 0 : 1 + (std::find(tree.rows.begin(), tree.rows.end(), above) - tree.rows.begin());
      const char* const from = tree.features.data() + row * fed.bytes;
      given.insert(given.end(), from, from + fed.bytes);
    }
  }

  // Keeps the features of a tree's rows of a pass, of which the first lies at `features`.
  void keep(Tree& tree, const char* features) const {
    const int64_t rows = rows_of(tree), first = tree.begun() ? 0 : rows - 1;
    tree.features.insert(tree.features.end(), features + first * fed.bytes, features + rows * fed.bytes);
  }

  // A level more for every tree from the rows of the pass; as `begin`, or -1 where a row has no number to choose by. `features`: of these
  // rows, where they are read by the next ones.
  template <typename T>
  int64_t grow(const T* logits, const char* features) {
    struct Job {
      Tree* tree;
      const T* row;
      Place place;
      float* table;  // what its candidates are drawn from; null: they are not drawn
      bool first;    // no place of this tree's level has more than one candidate
      bool right = false;
    };
    std::vector<Job> jobs;
    const int64_t vocab = model.vocab;
    for (Tree* each : trees) {
      Tree& tree = *each;
      const int64_t rows = rows_of(tree);
      if (!rows) continue;
      if (fed.given) keep(tree, features), features += rows * fed.bytes;
      auto table = [&](int64_t place) { return tree.ask.probs ? tree.ask.probs + place * width : nullptr; };
      if (!tree.begun()) {
        jobs.push_back({&tree, logits + (rows - 1) * vocab, {-1}, table(0), tree.siblings(-1) == 1});
      } else {
        const bool first = std::all_of(tree.unread.begin(), tree.unread.end(), [&](int64_t candidate) { return tree.siblings(candidate) == 1; });
        for (int64_t i = 0; i < rows; ++i) jobs.push_back({&tree, logits + i * vocab, {tree.unread[i]}, table(1 + tree.rows.size() + i), first});
        tree.rows.insert(tree.rows.end(), tree.unread.begin(), tree.unread.end());
      }
      logits += rows * vocab;
      tree.level.clear(), tree.unread.clear(), ++tree.levels;
    }
    const Vocabulary words = vocabulary();
    const int64_t n = words.reach();
    const bool later = kept && !sure;
    auto list = [&](Job& job, const auto* row, bool later) {
      const Tree& tree = *job.tree;
      job.right = words.list(tree.ask, row, tree.siblings(job.place.candidate), job.first, tree.levels - 1, job.table, later, job.place);
    };
    parallel_for(0, jobs.size(), std::max<int64_t>(1, 16384 / n), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i)
        if (!jobs[i].tree->ask.edits) list(jobs[i], jobs[i].row, later);
    });
    for (Job& job : jobs)  // Python is called in its own thread
      if (const Edits* edits = job.tree->ask.edits) {
        check(!words.tokens && words.own >= width, "rows of another vocabulary");
        if (edits->apply(job.row, width, path_to(job.place.candidate, job.tree->tokens.data(), job.tree->parents.data()))) list(job, edits->row, false);
      }
    std::vector<size_t> begins;  // of the jobs of each tree that is drawn
    for (size_t i = 0; i < jobs.size(); ++i) {
      if (!jobs[i].right) return -1;
      if (jobs[i].table && (!i || jobs[i].tree != jobs[i - 1].tree)) begins.push_back(i);
    }
    parallel_for(0, begins.size(), 1, [&](int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; ++b) {
        Tree* const tree = jobs[begins[b]].tree;
        for (size_t i = begins[b]; i < jobs.size() && jobs[i].tree == tree; ++i)
          jobs[i].right = draw_all(tree->ask, jobs[i].table, n, tree->siblings(jobs[i].place.candidate), jobs[i].place);
      }
    });
    for (const Job& job : jobs)
      if (!job.right) return -1;
    for (size_t i = 0; i < jobs.size(); ++i) {
      Tree& tree = *jobs[i].tree;
      offer(tree, std::move(jobs[i].place));
      if (i + 1 == jobs.size() || jobs[i + 1].tree != &tree) tree.unread = expanded(tree, seconds);
    }
    return begin();
  }
};

}  // namespace

extern "C" {

// See `ranked`; how many were found.
int64_t sk_ranked(const float* weights, int64_t n, int64_t count, uint64_t state, int64_t position, const int64_t* support, int64_t supported,
                  int64_t* tokens, double* scores) {
  const auto found = ranked(weights, n, count, NoiseKey(state, position), support, supported);
  for (size_t i = 0; i < found.size(); ++i) tokens[i] = found[i].token, scores[i] = std::log(found[i].score);
  return found.size();
}
}
