// Whole rounds of requests that draft chains: draft, score, verify, commit. A request is kept here from round to round; Python runs the
// passes that are described for it, and reads what was committed.
//
// Chains grow as in growth.h and are verified as in verify.h.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "growth.h"
#include "verify.h"

namespace {

// A request between two rounds.
struct Kept {
  bool taken = false;
  Ask ask;      // of its next chain
  Case judged;  // its next verdict
  int64_t slot;  // in the target's cache, which holds all of its tokens but the last
  int64_t last;  // most tokens that it may have
  std::vector<int64_t> stops;
  std::vector<int64_t> behind;  // committed tokens that the draft model has not read; the last token of all is among them
  std::vector<float> probs;     // what the tokens of a drawn chain were drawn from

  int64_t length() const { return ask.first; }
};

// A model whose passes are described: `sizes` and `buffers` as in Forest.
struct Described {
  int64_t session, vocab, half;
  std::vector<int64_t> sizes;
  std::vector<int64_t*> buffers;
};

// What sk_pass leaves of each request, as engine/native_rounds.py reads it, before its tokens.
enum Ended : int64_t { goes_on, by_stop, by_length };
constexpr int64_t none_left = -1;  // in the place of a pass: a row has no number to choose by

struct Rounds {
  Described target, draft;
  int64_t* ints;
  double* doubles;
  Forest forest;
  std::vector<Kept> requests;
  struct Turn {
    int64_t number, depth;
    Tree* tree;  // null: nothing is drafted
  };
  std::vector<Turn> turns;
  bool drafting = false;
  std::vector<int64_t> table, numbers;

  // The next pass, as Python reads it.
  static int64_t of_draft(int64_t size) { return 2 * size; }
  static int64_t of_target(int64_t size) { return 2 * size + 1; }

  int64_t begin(int64_t count, const int64_t* asked) {
    std::vector<Ask> asks;
    std::vector<int64_t> given;
    turns.clear();
    for (int64_t i = 0; i < count; ++i) {
      turns.push_back({asked[2 * i], asked[2 * i + 1], nullptr});
      Kept& kept = requests[turns[i].number];
      if (!turns[i].depth) continue;
      Ask& ask = kept.ask;
      ask.depth = ask.nodes = turns[i].depth;
      ask.room = ask.first + ask.depth;
      ask.missing = kept.behind.size(), ask.stops = kept.stops.size(), ask.tokens = given.size();
      if (ask.rule == drawn) {
        if ((int64_t)kept.probs.size() < ask.depth * target.vocab) kept.probs.resize(ask.depth * target.vocab);
        ask.probs = kept.probs.data();
      }
      given.insert(given.end(), kept.behind.begin(), kept.behind.end());
      given.insert(given.end(), kept.stops.begin(), kept.stops.end());
      asks.push_back(ask);
    }
    drafting = !asks.empty();
    if (!drafting) return score();
    const int64_t size = sk_plant((int64_t)&forest, asks.size(), asks.data(), given.size(), given.data(), nullptr);
    size_t next = 0;
    for (Turn& turn : turns)
      if (turn.depth) turn.tree = &forest.trees[next++];
    return size < 0 ? none_left : of_draft(size);
  }

  int64_t take(const void* logits) {
    if (!drafting) return target.half ? commit((const bf16*)logits) : commit((const float*)logits);
    const int64_t size = sk_grow((int64_t)&forest, draft.half, logits);
    return size < 0 ? none_left : size ? of_draft(size) : score();
  }

  // Describes the target's pass: of each request its last token and its chain.
  int64_t score() {
    drafting = false;
    table.clear();
    int64_t rows = 0;
    for (const Turn& turn : turns) {
      const Kept& kept = requests[turn.number];
      const int64_t nodes = turn.tree ? turn.tree->tokens.size() : 0;
      table.insert(table.end(), {kept.slot, nodes + 1, kept.length() - 1, 0});
      rows += nodes + 1;
    }
    for (const Turn& turn : turns) {
      table.push_back(requests[turn.number].behind.back());
      if (turn.tree) table.insert(table.end(), turn.tree->tokens.begin(), turn.tree->tokens.end());
    }
    for (const Turn& turn : turns)
      for (int64_t i = 0, nodes = turn.tree ? turn.tree->tokens.size() : 0; i <= nodes; ++i) table.push_back(i - 1);
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
      Case judged = requests[turn.number].judged;
      const int64_t nodes = turn.tree ? turn.tree->tokens.size() : 0;
      judged.row = row, judged.position = requests[turn.number].length(), judged.numbers = numbers.size();
      judged.nodes = nodes, judged.draws = 0, judged.distinct = 0, judged.probs = nullptr;
      if (turn.tree) {
        numbers.insert(numbers.end(), turn.tree->tokens.begin(), turn.tree->tokens.end());
        for (int64_t i = 0; i < nodes; ++i) numbers.push_back(i - 1);
        if (judged.rule == by_ratio || judged.rule == by_block) {
          judged.draws = nodes, judged.probs = requests[turn.number].probs.data();
          for (int64_t i = 0; i < nodes; ++i) numbers.insert(numbers.end(), {i, i});
        }
      }
      cases.push_back(judged);
      row += nodes + 1;
    }
    const auto verdicts = judge(cases.size(), cases.data(), numbers.data(), logits, target.vocab);
    for (const Verdict& verdict : verdicts)
      if (!verdict.decided) return none_left;
    int64_t* to = ints;
    double* real = doubles;
    for (size_t i = 0; i < turns.size(); ++i) write(turns[i], verdicts[i], to, real);
    return 0;
  }

  // Commits one verdict, and leaves for Python: how many tokens count, why the text ends there, nodes, accepted and
  // refused ones, the ending, tokens that the draft has read, both streams, then the tokens; their chances, then the draft's of the path.
  void write(const Turn& turn, const Verdict& found, int64_t*& to, double*& real) {
    Kept& kept = requests[turn.number];
    const int64_t accepted = found.path.size(), nodes = turn.tree ? turn.tree->tokens.size() : 0;
    std::vector<int64_t> tokens;
    for (int64_t node : found.path) tokens.push_back(turn.tree->tokens[node]);
    tokens.push_back(found.token);
    const int64_t room = kept.last - kept.length(), most = std::min<int64_t>(room, tokens.size());
    int64_t used = 0;
    bool stopped = false;
    while (used < most && !stopped) stopped = std::find(kept.stops.begin(), kept.stops.end(), tokens[used++]) != kept.stops.end();
    const Ended ended = stopped ? by_stop : (int64_t)tokens.size() >= room ? by_length : goes_on;
    kept.judged.stream = found.stream;
    if (turn.tree) {
      // All missing tokens were read, and of the chain all but its end.
      const int64_t read = std::min<int64_t>(accepted, turn.tree->rows.size());
      kept.ask.held = kept.ask.first + read, kept.ask.stream = turn.tree->ask.stream;
      kept.behind.assign(tokens.begin() + read, tokens.end());
    } else if (kept.ask.slot >= 0) {
      kept.behind.insert(kept.behind.end(), tokens.begin(), tokens.end());
    } else {
      kept.behind.assign(1, tokens.back());
    }
    kept.ask.first += tokens.size();
    for (int64_t x : {used, int64_t(ended), nodes, accepted, int64_t(found.refused.size()), int64_t(found.ending), kept.ask.held,
                      int64_t(kept.judged.stream), int64_t(kept.ask.stream)})
      *to++ = x;
    to = std::copy(tokens.begin(), tokens.end(), to);
    real = std::copy(found.chances.begin(), found.chances.end(), real);
    for (int64_t node : found.path) *real++ = turn.tree->probs[node];
  }
};

}  // namespace

extern "C" {

// Rounds of a target and a draft model. Of each: session (0: none), V, whether logits are bf16, number of sizes, sizes, buffers. `ints` and
// `doubles`: where sk_pass leaves what was committed.
int64_t sk_rounds(const int64_t* of_target, const int64_t* of_draft, int64_t* ints, double* doubles) {
  auto model = [](const int64_t* from) {
    const int64_t count = from[3], *sizes = from + 4;
    return Described{from[0], from[1], from[2], {sizes, sizes + count}, {(int64_t**)sizes + count, (int64_t**)sizes + 2 * count}};
  };
  const Described target = model(of_target), draft = model(of_draft);
  return (int64_t) new Rounds{target, draft, ints, doubles, {draft.session, draft.vocab, target.vocab, nullptr, draft.sizes, draft.buffers, {}, {}, {}, {}}};
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

// It drafts from now on: its chain as in sk_plant, with the tokens that it names.
void sk_seat(int64_t rounds, int64_t number, const void* ask, const int64_t* tokens) {
  Kept& kept = ((Rounds*)rounds)->requests[number];
  kept.ask = *(const Ask*)ask;
  kept.behind.assign(tokens, tokens + kept.ask.missing);
}

void sk_leave(int64_t rounds, int64_t number) { ((Rounds*)rounds)->requests[number].taken = false; }

// Begins a round of requests: `asked` has the number of each and the depth of its chain. The first pass, which is described: twice its rows,
// and one more where it is the target's; -1: none.
int64_t sk_round(int64_t rounds, int64_t count, const int64_t* asked) { return ((Rounds*)rounds)->begin(count, asked); }

// Goes on from a pass's logits; the next pass as of sk_round, 0 where the round is over.
int64_t sk_pass(int64_t rounds, const void* logits) { return ((Rounds*)rounds)->take(logits); }
}
