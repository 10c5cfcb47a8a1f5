// Whole rounds of requests that draft chains or trees: draft, score, verify, commit. A request is kept here from round to round; passes of
// models that have a program (program.h) are run here, others by Python, for which they are described. Python reads what was committed.
//
// Trees grow as in growth.h and are verified as in verify.h.

#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <vector>

#include "growth.h"
#include "program.h"
#include "verify.h"

extern "C" void sk_keep(int64_t session, int64_t slot, int64_t first, int64_t count, const int64_t* rows);

namespace {

// A request between two rounds.
struct Kept {
  bool taken = false;
  Ask ask;      // of its next tree
  Case judged;  // its next verdict
  int64_t slot;  // in the target's cache, which holds all of its tokens but the last
  int64_t last;  // most tokens that it may have
  std::vector<int64_t> stops;
  std::vector<int64_t> behind;  // committed tokens that the draft model has not read; the last token of all is among them
  std::vector<float> probs;     // what the tokens of a draft were drawn from, by place

  int64_t length() const { return ask.first; }
};

// What is asked of a request in a round, as engine/native_rounds.py packs it.
struct Asked {
  int64_t number;
  Extent extent;  // depth 0: nothing is drafted
};

// The nodes of a draft.
struct Nodes {
  std::vector<int64_t> candidates, tokens, parents;
  int64_t depth = 0;
};

// A model whose passes are described: `sizes` and `buffers` as in Forest.
struct Described {
  int64_t session, vocab, half;
  std::vector<int64_t> sizes;
  std::vector<int64_t*> buffers;
  std::vector<Program*> programs;  // by size; null: Python runs these passes
};

using Clock = std::chrono::steady_clock;

inline double seconds_since(Clock::time_point began) { return std::chrono::duration<double>(Clock::now() - began).count(); }

// What sk_pass leaves of each request, as engine/native_rounds.py reads it, before its tokens.
enum Ended : int64_t { goes_on, by_stop, by_length };
constexpr int64_t most_passes = 256;
constexpr int64_t none_left = -1;  // in the place of a pass: a row has no number to choose by

// Of a pass's rows behind `first` pairs of a slot keep these, which ascend.
inline void keep(const Described& model, int64_t slot, int64_t first, const std::vector<int64_t>& rows) {
  if (!rows.empty() && rows.back() + 1 > (int64_t)rows.size()) sk_keep(model.session, slot, first, rows.size(), rows.data());
}

struct Rounds {
  Described target, draft;
  int64_t* ints;
  double* doubles;
  double* times;  // how many passes were run, seconds up to the last one's beginning; of each which it was, and its seconds
  Forest forest;
  std::vector<Kept> requests;
  struct Turn {
    int64_t number, depth;
    Tree* tree;  // null: nothing is drafted
    Nodes nodes;
  };
  std::vector<Turn> turns;
  const double* scored = nullptr;  // seconds of the target's pass by the nodes of all drafts, where these are weighed
  bool drafting = false;
  std::vector<int64_t> table, numbers;
  std::vector<const void*> passes;  // logits of the draft model's, which are held until the round is over
  std::vector<Tensor> held;         // those of passes that were run here
  Clock::time_point began;

  // The next pass, as Python reads it.
  static int64_t of_draft(int64_t size) { return 2 * size; }
  static int64_t of_target(int64_t size) { return 2 * size + 1; }

  int64_t begin(int64_t count, const Asked* asked, const double* level) {
    std::vector<Ask> asks;
    std::vector<int64_t> given;
    turns.clear(), held.clear();
    times[0] = times[1] = 0, began = Clock::now();
    for (int64_t i = 0; i < count; ++i) {
      const Extent& extent = asked[i].extent;
      turns.push_back({asked[i].number, extent.depth, nullptr, {}});
      Kept& kept = requests[turns[i].number];
      if (!extent.depth) continue;
      Ask& ask = kept.ask;
      (Extent&)ask = extent;
      ask.missing = kept.behind.size(), ask.stops = kept.stops.size(), ask.tokens = given.size();
      if (ask.rule == drawn) {
        const size_t most = (ask.rows + 1) * target.vocab;
        if (kept.probs.size() < most) kept.probs.resize(most);
        ask.probs = kept.probs.data();
      }
      given.insert(given.end(), kept.behind.begin(), kept.behind.end());
      given.insert(given.end(), kept.stops.begin(), kept.stops.end());
      asks.push_back(ask);
    }
    drafting = !asks.empty(), passes.clear();
    if (!drafting) return score();
    const int64_t size = sk_plant((int64_t)&forest, asks.size(), asks.data(), given.size(), given.data(), level);
    size_t next = 0;
    for (Turn& turn : turns)
      if (turn.depth) turn.tree = &forest.trees[next++];
    return size < 0 ? none_left : of_draft(size);
  }

  // Goes on from a pass that was described, as far as passes are run here: the next one for Python, or what ends the round.
  int64_t run(int64_t code) {
    while (code > 0) {
      const bool scoring = code % 2;
      const Described& model = scoring ? target : draft;
      if (scoring) times[1] = seconds_since(began);
      const int64_t size = code / 2, which = std::lower_bound(model.sizes.begin(), model.sizes.end(), size) - model.sizes.begin();
      const int64_t* ids = model.buffers[which];
      Program* program = model.programs[which];
      if (!program || !program->reaches(ids + size, size)) return code;
      const auto start = Clock::now();
      program->run(size, ids, ids + size, -1, nullptr, nullptr);
      held.push_back(program->logits());
      took(code, seconds_since(start));
      code = take(held.back().data());
    }
    return code;
  }

  void took(int64_t code, double seconds) {
    const int64_t count = int64_t(times[0]++);
    check(count < most_passes, "a round of too many passes");
    times[2 + 2 * count] = double(code), times[3 + 2 * count] = seconds;
  }

  int64_t take(const void* logits) {
    if (!drafting) return target.half ? commit((const bf16*)logits) : commit((const float*)logits);
    if (forest.kept && std::find(passes.begin(), passes.end(), logits) != passes.end()) {
      forest.kept = false;  // passes write into the same place: this round is Python's
      return none_left;
    }
    passes.push_back(logits);
    const int64_t size = sk_grow((int64_t)&forest, draft.half, logits);
    return size < 0 ? none_left : size ? of_draft(size) : score();
  }

  // Nodes of the complete trees.
  void choose() {
    std::vector<const Tree*> trees;
    for (const Turn& turn : turns)
      if (turn.tree) trees.push_back(turn.tree);
    auto orders = chosen(trees, turns.size(), scored);
    size_t next = 0;
    for (Turn& turn : turns)
      if (turn.tree) name(*turn.tree, std::move(orders[next++]), turn.nodes);
  }

  static void name(const Tree& tree, std::vector<int64_t>&& candidates, Nodes& to) {
    to.candidates = std::move(candidates);
    std::vector<int64_t> node_of(tree.tokens.size(), -1), depths;
    for (int64_t candidate : to.candidates) {
      const int64_t above = tree.parents[candidate], parent = above < 0 ? -1 : node_of[above];
      node_of[candidate] = to.tokens.size();
      to.tokens.push_back(tree.tokens[candidate]), to.parents.push_back(parent);
      depths.push_back(parent < 0 ? 1 : depths[parent] + 1);
      to.depth = std::max(to.depth, depths.back());
    }
  }

  // Describes the target's pass: of each request its last token and its draft.
  int64_t score() {
    drafting = false;
    choose();
    table.clear();
    int64_t rows = 0;
    for (const Turn& turn : turns) {
      const Kept& kept = requests[turn.number];
      const int64_t own = turn.nodes.tokens.size() + 1;
      table.insert(table.end(), {kept.slot, own, kept.length() - 1, 0});
      rows += own;
    }
    for (const Turn& turn : turns) {
      table.push_back(requests[turn.number].behind.back());
      table.insert(table.end(), turn.nodes.tokens.begin(), turn.nodes.tokens.end());
    }
    for (const Turn& turn : turns) {
      table.push_back(-1);
      for (int64_t parent : turn.nodes.parents) table.push_back(parent + 1);
    }
    const size_t size = std::lower_bound(target.sizes.begin(), target.sizes.end(), rows) - target.sizes.begin();
    sk_rows(target.session, turns.size(), table.data(), target.sizes[size], target.buffers[size]);
    return of_target(target.sizes[size]);
  }

  // 0, or that a row has no number to choose by: then nothing is committed.
  template <typename T>
  int64_t commit(const T* logits) {
    std::vector<Case> cases;
    numbers.clear();
    int64_t row = 0;
    for (const Turn& turn : turns) {
      const Kept& kept = requests[turn.number];
      const Nodes& own = turn.nodes;
      const int64_t nodes = own.tokens.size();
      Case judged = kept.judged;
      judged.row = row, judged.position = kept.length(), judged.numbers = numbers.size();
      judged.nodes = nodes, judged.draws = 0, judged.distinct = 0, judged.probs = nullptr;
      numbers.insert(numbers.end(), own.tokens.begin(), own.tokens.end());
      numbers.insert(numbers.end(), own.parents.begin(), own.parents.end());
      if (nodes && (judged.rule == by_ratio || judged.rule == by_block)) {
        const bool of_rows = kept.ask.rule == drawn;  // else they are point masses
        judged.draws = nodes, judged.distinct = of_rows && kept.ask.shape == fixed_shape, judged.probs = of_rows ? kept.probs.data() : nullptr;
        for (int64_t i = 0; i < nodes; ++i) numbers.insert(numbers.end(), {i, of_rows ? place_of(*turn.tree, own.candidates[i]) : -1});
      }
      cases.push_back(judged);
      row += nodes + 1;
    }
    const auto verdicts = judge(cases.size(), cases.data(), numbers.data(), logits, target.vocab);
    for (const Verdict& verdict : verdicts)
      if (!verdict.decided) return none_left;
    int64_t* to = ints + 2;
    double* real = doubles;
    for (size_t i = 0; i < turns.size(); ++i) write(turns[i], verdicts[i], to, real);
    ints[0] = to - ints, ints[1] = real - doubles;
    return 0;
  }

  // The place that a candidate stands at: the last one that begins with it or before.
  static int64_t place_of(const Tree& tree, int64_t candidate) {
    const auto behind = [](int64_t candidate, const Place& place) { return candidate < place.start; };
    return std::upper_bound(tree.places.begin(), tree.places.end(), candidate, behind) - tree.places.begin() - 1;
  }

  // The draft model's probability of a candidate.
  double prob_of(const Tree& tree, int64_t candidate) const {
    const int64_t n = std::min(draft.vocab, target.vocab);
    for (const Place& place : tree.places)
      if (place.row && place.start == candidate) {
        const uint32_t bits = uint32_t(draft.half ? best((const bf16*)place.row, n) : best((const float*)place.row, n));
        float prob;
        std::memcpy(&prob, &bits, 4);
        return prob;
      }
    return tree.probs[candidate];
  }

  // The draft model's rows of the accepted path, as far as it was read.
  static std::vector<int64_t> read_of(const Turn& turn, const std::vector<int64_t>& path) {
    std::vector<int64_t> rows;
    for (int64_t node : path) {
      const auto& all = turn.tree->rows;
      const auto found = std::find(all.begin(), all.end(), turn.nodes.candidates[node]);
      if (found == all.end()) break;
      rows.push_back(found - all.begin());
    }
    return rows;
  }

  // What the draft model listed at every place that the target came to, and which of it was the target's choice, as DraftTreeState.learn
  // finds it: how many places, of each the rank (-1: none of them) and how many are listed; scores of those that are several.
  static void tell(const Tree& tree, const std::vector<int64_t>& tokens, int64_t*& to, double*& real) {
    int64_t candidate = -1, &count = *to++;
    count = 0;
    for (int64_t token : tokens) {
      const auto place = std::find_if(tree.places.begin(), tree.places.end(), [&](const Place& p) { return p.candidate == candidate; });
      if (place == tree.places.end()) return;
      const int64_t listed = place->tokens.size();
      const int64_t rank = std::find(place->tokens.begin(), place->tokens.end(), token) - place->tokens.begin();
      ++count, *to++ = rank < listed ? rank : -1, *to++ = listed;
      if (listed > 1) real = std::copy(place->scores.begin(), place->scores.end(), real);
      if (rank == listed || rank >= place->offered) return;
      candidate = place->start + rank;
    }
  }

  // Commits one verdict, and leaves for Python: how many tokens count, why the text ends there, nodes, their depth, accepted and
  // refused ones, the ending, tokens that the draft has read, both streams, then the tokens, and what `tell` says; their chances, the draft's
  // of the path, and what `tell` says.
  void write(const Turn& turn, const Verdict& found, int64_t*& to, double*& real) {
    Kept& kept = requests[turn.number];
    const Nodes& own = turn.nodes;
    const int64_t accepted = found.path.size();
    std::vector<int64_t> tokens, rows{0};
    for (int64_t node : found.path) tokens.push_back(own.tokens[node]), rows.push_back(node + 1);
    tokens.push_back(found.token);
    const int64_t room = kept.last - kept.length(), most = std::min<int64_t>(room, tokens.size());
    int64_t used = 0;
    bool stopped = false;
    while (used < most && !stopped) stopped = std::find(kept.stops.begin(), kept.stops.end(), tokens[used++]) != kept.stops.end();
    const Ended ended = stopped ? by_stop : (int64_t)tokens.size() >= room ? by_length : goes_on;
    kept.judged.stream = found.stream;
    keep(target, kept.slot, kept.length() - 1, rows);
    if (turn.tree) {
      // All missing tokens were read, and nodes of the path but its end.
      const std::vector<int64_t> read = read_of(turn, found.path);
      keep(draft, kept.ask.slot, kept.ask.first, read);
      kept.ask.held = kept.ask.first + read.size(), kept.ask.stream = turn.tree->ask.stream;
      kept.behind.assign(tokens.begin() + read.size(), tokens.end());
    } else if (kept.ask.slot >= 0) {
      kept.behind.insert(kept.behind.end(), tokens.begin(), tokens.end());
    } else {
      kept.behind.assign(1, tokens.back());
    }
    kept.ask.first += tokens.size();
    for (int64_t x : {used, int64_t(ended), int64_t(own.tokens.size()), own.depth, accepted, int64_t(found.refused.size()), int64_t(found.ending),
                      kept.ask.held, int64_t(kept.judged.stream), int64_t(kept.ask.stream)})
      *to++ = x;
    to = std::copy(tokens.begin(), tokens.end(), to);
    real = std::copy(found.chances.begin(), found.chances.end(), real);
    for (int64_t node : found.path) *real++ = prob_of(*turn.tree, own.candidates[node]);
    if (turn.tree) tell(*turn.tree, tokens, to, real);
    else *to++ = 0;
  }
};

}  // namespace

extern "C" {

// Rounds of a target and a draft model. Of each: session (0: none), V, whether logits are bf16, number of sizes, sizes, buffers,
// programs (0: none). `ints` and `doubles`: where sk_pass leaves what was committed; `times`: see Rounds, of up to 256 passes.
int64_t sk_rounds(const int64_t* of_target, const int64_t* of_draft, int64_t* ints, double* doubles, double* times) {
  auto model = [](const int64_t* from) {
    const int64_t count = from[3], *sizes = from + 4, *buffers = sizes + count, *programs = buffers + count;
    return Described{from[0], from[1], from[2], {sizes, buffers}, {(int64_t**)buffers, (int64_t**)programs},
                     {(Program**)programs, (Program**)programs + count}};
  };
  const Described target = model(of_target), draft = model(of_draft);
  const Forest forest{draft.session, draft.vocab, target.vocab, nullptr, draft.sizes, draft.buffers, {}, {}, {}, {}, true};
  return (int64_t) new Rounds{target, draft, ints, doubles, times, forest};
}

void sk_free_rounds(int64_t rounds) { delete (Rounds*)rounds; }

// A request of `length` tokens that drafts nothing yet, and its number; `judged` as in sk_verify, of which rounds change what differs between
// them, `slot` and `last` as in Kept; its last token and its stops.
int64_t sk_enter(int64_t rounds, const void* judged, int64_t slot, int64_t length, int64_t last, int64_t token, int64_t count, const void* stops) {
  auto& all = ((Rounds*)rounds)->requests;
  size_t number = 0;
  while (number < all.size() && all[number].taken) ++number;
  if (number == all.size()) all.emplace_back();
  Kept& kept = all[number];
  kept.taken = true, kept.ask = {}, kept.ask.slot = -1, kept.ask.first = length;
  kept.judged = *(const Case*)judged, kept.slot = slot, kept.last = last;
  kept.stops.assign((const int64_t*)stops, (const int64_t*)stops + count);
  kept.behind.assign(1, token);
  return number;
}

// It drafts from now on: its tree as in sk_plant, with the tokens that it names.
void sk_seat(int64_t rounds, int64_t number, const void* ask, const int64_t* tokens) {
  Kept& kept = ((Rounds*)rounds)->requests[number];
  kept.ask = *(const Ask*)ask;
  kept.behind.assign(tokens, tokens + kept.ask.missing);
}

void sk_leave(int64_t rounds, int64_t number) { ((Rounds*)rounds)->requests[number].taken = false; }

// Begins a round of requests, and runs it as far as passes are run here. The pass that Python has to run, which is described: twice its rows,
// and one more where it is the target's; 0: the round is over; -1: none. Where anything is weighed, seconds of the draft model's passes by
// rows, and of the target's by the nodes of all drafts: held until the round ends.
int64_t sk_round(int64_t rounds, int64_t count, const void* asked, const double* level, const double* scored) try {
  Rounds& own = *(Rounds*)rounds;
  own.scored = scored;
  return own.run(own.begin(count, (const Asked*)asked, level));
} catch (const std::exception&) {
  return none_left;
}

// Goes on from a pass's logits, which took so long; as sk_round.
int64_t sk_pass(int64_t rounds, int64_t code, const void* logits, double seconds) try {
  Rounds& own = *(Rounds*)rounds;
  own.took(code, seconds);
  return own.run(own.take(logits));
} catch (const std::exception&) {
  return none_left;
}
}
