// Rounds of requests: draft, score, verify, commit. One object for each request holds its draft, the rows of its passes and what of them
// stays in the caches; it is kept here from round to round. Drafts are trees that grow here (growth.h), are found in texts (texts.h), or are
// given by Python. Passes of models that have a program (program.h) are run here, others by Python, for which they are described. Python
// reads what was committed (verify.h decides that); where there is no target, Python reads the trees.

#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <vector>

#include "growth.h"
#include "program.h"
#include "texts.h"
#include "verify.h"

extern "C" void sk_keep(int64_t session, int64_t slot, int64_t first, int64_t count, const int64_t* rows);

namespace {

// A draft as the target's pass reads it and as it is judged.
struct Nodes {
  std::vector<int64_t> candidates;  // of the tree that grew here; empty where the draft was given
  std::vector<int64_t> tokens, parents, draws;  // draws: node and row of `probs` of each (-1: a point mass)
  int64_t distinct = 0, depth = 0;
  const float* probs = nullptr;
};

// A request: the tree of its next draft, and how it is judged.
struct Request : Tree {
  bool taken = false;
  bool grows = false;     // its draft of this round grows here
  Case judged{};          // its next verdict
  int64_t slot = -1;      // in the target's cache, which holds all of its tokens but the last
  int64_t last = 0;       // most tokens that it may have
  Nodes nodes;            // of this round
  ReadText* text = nullptr;  // in which drafts are found; it is Python's
  bool asks = false;      // its draft of this round was found there
  Tokens said_by;         // who guessed each of its nodes first
  std::vector<double> said_chances;  // with which chance
  Tokens tail;            // the text's last tokens, those that nobody has read in it among them
  std::vector<float> drawn_from;  // by place: what candidates are drawn from

  int64_t length() const { return ask.first; }
};

// What is asked of a request in a round, as drafters/native_trees.py packs it.
struct Asked {
  int64_t number;
  Extent extent;  // depth 0: nothing grows
};

using Clock = std::chrono::steady_clock;

inline double seconds_since(Clock::time_point began) { return std::chrono::duration<double>(Clock::now() - began).count(); }

constexpr size_t longest_tail = 256, kept_tail = 64;  // LONG in native_texts.py
enum Ended : int64_t { goes_on, by_stop, by_length };
constexpr int64_t most_passes = 256;
constexpr int64_t none_left = -1;  // in the place of a pass: a row has no number to choose by

// Of a pass's rows behind `first` pairs of a slot keep these, which ascend.
inline void keep(const Described& model, int64_t slot, int64_t first, const std::vector<int64_t>& rows) {
  if (!rows.empty() && rows.back() + 1 > (int64_t)rows.size()) sk_keep(model.session, slot, first, rows.size(), rows.data());
}

struct Rounds {
  Described target;  // session 0: there is none, and a round ends with the trees
  Forest forest;     // of the draft model
  int64_t* ints;
  double* doubles;
  double* times;  // how many passes were run, seconds up to the last one's beginning; of each which it was, and its seconds
  std::vector<Request> requests;
  std::vector<Request*> round;
  const double* scored = nullptr;  // seconds of the target's pass by the nodes of all drafts, where these are weighed
  bool drafting = false, asking = false;  // of a draft model, of texts
  std::vector<int64_t> table, numbers;
  std::vector<const void*> passes;  // logits of the draft model's, which are held until the round is over
  std::vector<Tensor> held;         // those of passes that were run here
  const Program* scorer = nullptr;  // ran the target's pass, if that was run here
  Clock::time_point began;

  // The next pass, as Python reads it.
  static int64_t of_draft(int64_t size) { return 2 * size; }
  static int64_t of_target(int64_t size) { return 2 * size + 1; }

  int64_t begin(int64_t count, const Asked* asked, const double* level) {
    round.clear(), held.clear(), scorer = nullptr, passes.clear(), forest.trees.clear();
    times[0] = times[1] = 0, began = Clock::now(), asking = false;
    for (int64_t i = 0; i < count; ++i) {
      Request& own = requests[asked[i].number];
      round.push_back(&own);
      own.asks = asked[i].extent.depth && asked[i].extent.shape == of_text;
      own.grows = asked[i].extent.depth && !own.asks;
      asking |= own.asks;
      if (own.asks) look_up(own, asked[i].extent, level);
      if (!own.grows) continue;
      (Grown&)own = {}, own.nodes = {}, (Extent&)own.ask = asked[i].extent;
      if (target.session && own.ask.rule == drawn) {
        const size_t most = (own.ask.rows + 1) * target.vocab;
        if (own.drawn_from.size() < most) own.drawn_from.resize(most);
        own.ask.probs = own.drawn_from.data();
      }
      forest.trees.push_back(&own);
    }
    forest.seconds = level, drafting = !forest.trees.empty();
    return drafting ? after(forest.begin()) : score();
  }

  // A draft from what followed the same tokens before.
  void look_up(Request& own, const Extent& extent, const double* seconds) {
    ReadText& text = *own.text;
    const int64_t missing = own.length() - text.seen;
    check(missing >= 0 && missing <= (int64_t)own.tail.size(), "a text that nobody has read");
    text.read(own.tail.data() + own.tail.size() - missing, missing);
    text.seen += missing;
    TextDraft draft = text.propose({extent.depth, extent.nodes, extent.width, extent.weighed, extent.siblings, extent.rate, seconds}, own.stops);
    Nodes& to = own.nodes = {};
    own.said_by.assign(draft.tokens.size(), -1), own.said_chances.resize(draft.tokens.size());
    if (std::any_of(draft.tokens.begin(), draft.tokens.end(), [&](int64_t token) { return token < 0 || token >= target.vocab; })) return;
    for (size_t i = 0; i < draft.draws.size(); ++i) {
      const int64_t node = draft.draws[i];
      to.draws.insert(to.draws.end(), {node, -1});
      if (own.said_by[node] < 0) own.said_by[node] = draft.members[i], own.said_chances[node] = draft.chances[i];
    }
    to.tokens = std::move(draft.tokens), to.parents = std::move(draft.parents), to.depth = depth_of(to.parents);
  }

  static int64_t depth_of(const Tokens& parents) {
    Tokens depths;
    for (int64_t parent : parents) depths.push_back(parent < 0 ? 1 : depths[parent] + 1);
    return depths.empty() ? 0 : *std::max_element(depths.begin(), depths.end());
  }

  // What follows when a level of all trees was begun, in a pass of so many rows.
  int64_t after(int64_t size) { return size < 0 ? none_left : size ? of_draft(size) : target.session ? score() : 0; }

  // Goes on from a pass that was described, as far as passes are run here: the next one for Python, or what ends the round.
  int64_t run(int64_t code) {
    while (code > 0) {
      const bool scoring = code % 2;
      const Described& model = scoring ? target : forest.model;
      if (scoring) times[1] = seconds_since(began);
      const int64_t size = code / 2, which = std::lower_bound(model.sizes.begin(), model.sizes.end(), size) - model.sizes.begin();
      const int64_t* ids = model.buffers[which];
      Program* program = model.programs[which];
      if (!program || !program->reaches(ids + size, size)) return code;
      const auto start = Clock::now();
      program->run(size, ids, ids + size, -1, nullptr, nullptr);
      held.push_back(program->logits());
      if (scoring) scorer = program;
      took(code, seconds_since(start));
      code = take(held.back().data(), !scoring && forest.fed.given ? program->state(forest.fed.state) : nullptr);
    }
    return code;
  }

  void took(int64_t code, double seconds) {
    const int64_t count = int64_t(times[0]++);
    check(count < most_passes, "a round of too many passes");
    times[2 + 2 * count] = double(code), times[3 + 2 * count] = seconds;
  }

  int64_t take(const void* logits, const void* features) {
    if (!drafting) return target.half ? commit((const bf16*)logits) : commit((const float*)logits);
    if (forest.kept && std::find(passes.begin(), passes.end(), logits) != passes.end()) {
      forest.kept = false;  // passes write into the same place: this round is Python's
      return none_left;
    }
    passes.push_back(logits);
    const char* const own = (const char*)features;
    check(own || !forest.fed.given, "a pass that gives no features");
    return after(forest.model.half ? forest.grow((const bf16*)logits, own) : forest.grow((const float*)logits, own));
  }

  // Nodes of the complete trees.
  void choose() {
    std::vector<const Tree*> trees{forest.trees.begin(), forest.trees.end()};
    auto orders = chosen(trees, round.size(), scored);
    size_t next = 0;
    for (Request* own : round)
      if (own->grows) name(*own, std::move(orders[next++]));
  }

  static void name(Request& own, std::vector<int64_t>&& candidates) {
    Nodes& to = own.nodes;
    const bool of_rows = own.ask.rule == drawn;  // else they are point masses
    to.candidates = std::move(candidates);
    to.distinct = of_rows && own.ask.shape == fixed_shape, to.probs = of_rows ? own.ask.probs : nullptr;
    std::vector<int64_t> node_of(own.tokens.size(), -1);
    for (int64_t candidate : to.candidates) {
      const int64_t above = own.parents[candidate], parent = above < 0 ? -1 : node_of[above], node = to.tokens.size();
      node_of[candidate] = node;
      to.tokens.push_back(own.tokens[candidate]), to.parents.push_back(parent);
      to.draws.insert(to.draws.end(), {node, of_rows ? place_of(own, candidate) : -1});
    }
    to.depth = depth_of(to.parents);
  }

  // Describes the target's pass: of each request its last token and its draft.
  int64_t score() {
    drafting = false;
    choose();
    table.clear();
    int64_t rows = 0;
    for (const Request* own : round) {
      const int64_t count = own->nodes.tokens.size() + 1;
      table.insert(table.end(), {own->slot, count, own->length() - 1, 0});
      rows += count;
    }
    for (const Request* own : round) {
      table.push_back(own->missing.back());
      table.insert(table.end(), own->nodes.tokens.begin(), own->nodes.tokens.end());
    }
    for (const Request* own : round) {
      table.push_back(-1);
      for (int64_t parent : own->nodes.parents) table.push_back(parent + 1);
    }
    const int64_t size = target.describe(table, round.size(), rows);
    return size < 0 ? none_left : of_target(size);
  }

  // 0, or that a row has no number to choose by: then nothing is committed.
  template <typename T>
  int64_t commit(const T* logits) {
    std::vector<Case> cases;
    numbers.clear();
    int64_t row = 0;
    for (const Request* own : round) {
      const Nodes& nodes = own->nodes;
      Case judged = own->judged;
      judged.row = row, judged.position = own->length(), judged.numbers = numbers.size();
      judged.nodes = nodes.tokens.size(), judged.draws = nodes.draws.size() / 2, judged.distinct = nodes.distinct, judged.probs = nodes.probs;
      for (const auto* part : {&nodes.tokens, &nodes.parents, &nodes.draws}) numbers.insert(numbers.end(), part->begin(), part->end());
      cases.push_back(judged);
      row += judged.nodes + 1;
    }
    const auto verdicts = judge(cases.size(), cases.data(), numbers.data(), logits, target.vocab);
    for (const Verdict& verdict : verdicts)
      if (!verdict.decided) return none_left;
    const auto recycles = [](const Request* own) { return own->text && own->text->recycled; };
    if (asking && std::any_of(round.begin(), round.end(), recycles)) {
      const auto rows = ranked_rows(logits, row, target.vocab);
      for (size_t i = 0; i < round.size(); ++i)
        if (const Request& own = *round[i]; recycles(&own))
          own.text->recycled->put(Last(own.tail.data(), own.tail.size()), own.nodes.tokens, own.nodes.parents, rows.data() + cases[i].row);
    }
    int64_t* to = ints + 2;
    double* real = doubles;
    for (size_t i = 0; i < round.size(); ++i) write(*round[i], verdicts[i], to, real);
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
    const Described& draft = forest.model;
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
  static std::vector<int64_t> read_of(const Request& own, const std::vector<int64_t>& path) {
    std::vector<int64_t> read;
    for (int64_t node : path) {
      const auto found = std::find(own.rows.begin(), own.rows.end(), own.nodes.candidates[node]);
      if (found == own.rows.end()) break;
      read.push_back(found - own.rows.begin());
    }
    return read;
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

  // Commits one verdict, and writes for Python (see `Committed` in kernel_rounds.py), as whole numbers: how many tokens count, why the text
  // ends there, number of nodes, their depth, numbers of accepted and of refused nodes, the ending, tokens that the draft model has read, both
  // streams; the tokens, the accepted and the refused nodes; what `tell` writes. As others: the tokens' chances, the draft's of the path, and
  // what `tell` writes. Of a draft that was found in texts, who guessed each node of the path, as the rank of a place.
  void write(Request& own, const Verdict& found, int64_t*& to, double*& real) {
    const Nodes& nodes = own.nodes;
    const int64_t accepted = found.path.size();
    std::vector<int64_t> tokens, rows{0};
    for (int64_t node : found.path) tokens.push_back(nodes.tokens[node]), rows.push_back(node + 1);
    tokens.push_back(found.token);
    const int64_t room = own.last - own.length(), most = std::min<int64_t>(room, tokens.size());
    int64_t used = 0;
    bool stopped = false;
    while (used < most && !stopped) stopped = std::find(own.stops.begin(), own.stops.end(), tokens[used++]) != own.stops.end();
    const Ended ended = stopped ? by_stop : (int64_t)tokens.size() >= room ? by_length : goes_on;
    own.judged.stream = found.stream;
    keep(target, own.slot, own.length() - 1, rows);
    if (own.grows) {
      // All missing tokens were read, and nodes of the path but its end.
      const std::vector<int64_t> read = read_of(own, found.path);
      keep(forest.model, own.ask.slot, own.ask.first, read);
      own.ask.held = own.ask.first + read.size();
      own.missing.assign(tokens.begin() + read.size(), tokens.end());
    } else if (own.ask.slot >= 0) {
      own.missing.insert(own.missing.end(), tokens.begin(), tokens.end());
    } else {
      own.missing.assign(1, tokens.back());
    }
    own.ask.first += tokens.size();
    if (own.text) {
      own.tail.insert(own.tail.end(), tokens.begin(), tokens.end());
      if (own.tail.size() > longest_tail) own.tail.erase(own.tail.begin(), own.tail.end() - kept_tail);
    }
    for (int64_t x : {used, int64_t(ended), int64_t(nodes.tokens.size()), nodes.depth, accepted, int64_t(found.refused.size()), int64_t(found.ending),
                      own.ask.held, int64_t(own.judged.stream), int64_t(own.ask.stream)})
      *to++ = x;
    to = std::copy(tokens.begin(), tokens.end(), to);
    for (const auto* part : {&found.path, &found.refused}) to = std::copy(part->begin(), part->end(), to);
    real = std::copy(found.chances.begin(), found.chances.end(), real);
    for (int64_t node : found.path) *real++ = own.grows ? prob_of(own, nodes.candidates[node]) : own.asks ? own.said_chances[node] : 0;
    if (own.grows) tell(own, tokens, to, real);
    else *to++ = own.asks ? accepted : 0;
    for (int64_t i = 0; own.asks && i < accepted; ++i) *to++ = own.said_by[found.path[i]], *to++ = 1;
    own.nodes = {};
  }
};

}  // namespace

extern "C" {

// Rounds of a target and a draft model. Of each: session (0: none), V, whether logits are bf16, number of sizes, sizes, buffers,
// programs (0: none). Without a target its V is the width of what candidates are drawn from. `ints` and `doubles`: where sk_pass leaves what
// was committed; `times`: see Rounds, of up to 256 passes.
int64_t sk_rounds(const int64_t* of_target, const int64_t* of_draft, int64_t* ints, double* doubles, double* times) {
  auto model = [](const int64_t* from) {
    const int64_t count = from[3], *sizes = from + 4, *buffers = sizes + count, *programs = buffers + count;
    return Described{from[0], from[1], from[2], {sizes, buffers}, {(int64_t**)buffers, (int64_t**)programs},
                     {(Program**)programs, (Program**)programs + count}};
  };
  const Described target = model(of_target);
  return (int64_t) new Rounds{target, {model(of_draft), target.vocab, target.session != 0, nullptr, {}, {}}, ints, doubles, times};
}

// The rows of the draft model's passes read hidden states.
void sk_fed(int64_t rounds, const void* fed) { ((Rounds*)rounds)->forest.fed = *(const Fed*)fed; }

void sk_free_rounds(int64_t rounds) { delete (Rounds*)rounds; }

// A request of `length` tokens that drafts nothing yet, and its number; `judged` as in sk_verify, of which rounds change what differs between
// them, `slot` and `last` as in Request; its last token and its stops.
int64_t sk_enter(int64_t rounds, const void* judged, int64_t slot, int64_t length, int64_t last, int64_t token, int64_t count, const void* stops) {
  auto& all = ((Rounds*)rounds)->requests;
  size_t number = 0;
  while (number < all.size() && all[number].taken) ++number;
  if (number == all.size()) all.emplace_back();
  Request& own = all[number];
  own.taken = true, own.text = nullptr, own.nodes = {}, own.ask = {}, own.ask.slot = -1, own.ask.first = length;
  own.judged = *(const Case*)judged, own.slot = slot, own.last = last;
  own.stops.assign((const int64_t*)stops, (const int64_t*)stops + count);
  own.missing.assign(1, token);
  return number;
}

// Its trees grow from here on, behind `missing` tokens that the draft model has not read, which end in `tokens`; then come its stops. Without
// a target requests are numbered by the caller. `given`: what the missing tokens read beside themselves, where they do.
void sk_seat(int64_t rounds, int64_t number, const void* root, int64_t missing, int64_t stops, const void* tokens, const void* given) {
  auto& all = ((Rounds*)rounds)->requests;
  if (number >= (int64_t)all.size()) all.resize(number + 1);
  Request& own = all[number];
  const int64_t *from = (const int64_t*)tokens, *ends = from + missing;
  (Root&)own.ask = *(const Root*)root;
  own.missing.assign(from, ends), own.stops.assign(ends, ends + stops);
  if (given) own.given.assign((const char*)given, (const char*)given + missing * ((Rounds*)rounds)->forest.fed.bytes);
}

// The draft of its next round, which did not grow here, as `sk_verify` takes it.
void sk_draft(int64_t rounds, int64_t number, const void* judged, const int64_t* numbers) {
  const Case& given = *(const Case*)judged;
  const int64_t *parents = numbers + given.nodes, *draws = parents + given.nodes;
  Nodes& to = ((Rounds*)rounds)->requests[number].nodes;
  to = {{}, {numbers, parents}, {parents, draws}, {draws, draws + 2 * given.draws}, given.distinct, 0, given.probs};
  to.depth = Rounds::depth_of(to.parents);
}

// Its drafts are found in this text from here on, which Python frees after the request has left; the last tokens of the request.
void sk_look_up_in(int64_t rounds, int64_t number, int64_t text, int64_t count, const int64_t* tail) {
  Request& own = ((Rounds*)rounds)->requests[number];
  own.text = (ReadText*)text, own.tail.assign(tail, tail + count);
}

// The address of the logits of the target's pass, which was run here in the last round: they stay until the next one.
int64_t sk_logits(int64_t rounds) { return (int64_t)((Rounds*)rounds)->held.back().data(); }

// Copies the hidden states of the target's pass, which was run here in the last round.
void sk_states(int64_t rounds, void* const* to) { ((Rounds*)rounds)->scorer->states(to); }

void sk_leave(int64_t rounds, int64_t number) {
  Request& own = ((Rounds*)rounds)->requests[number];
  own.taken = false, own.text = nullptr;
}

// One tree, as drafters/native_trees.py reads it: how many whole numbers, and how many others, which lie at `ints` and `doubles`.
void sk_grown(int64_t rounds, int64_t number, int64_t* counts, const int64_t** ints, const double** doubles) {
  static thread_local std::vector<int64_t> whole;
  static thread_local std::vector<double> real;
  const Tree& tree = ((Rounds*)rounds)->requests[number];
  whole = {tree.levels, (int64_t)tree.tokens.size(), (int64_t)tree.rows.size(), (int64_t)tree.places.size(), (int64_t)tree.ask.stream};
  real = {tree.ask.floor};
  for (const auto* part : {&tree.tokens, &tree.parents, &tree.ranks, &tree.rows}) whole.insert(whole.end(), part->begin(), part->end());
  for (const auto* part : {&tree.chances, &tree.values, &tree.probs}) real.insert(real.end(), part->begin(), part->end());
  for (const Place& place : tree.places) {
    whole.insert(whole.end(), {place.candidate, place.start, (int64_t)place.tokens.size()});
    whole.insert(whole.end(), place.tokens.begin(), place.tokens.end());
    real.insert(real.end(), place.scores.begin(), place.scores.end());
  }
  counts[0] = whole.size(), counts[1] = real.size();
  *ints = whole.data(), *doubles = real.data();
}

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

// Goes on from a pass's logits, and its rows' features where the next ones read them; it took so long. As sk_round.
int64_t sk_pass(int64_t rounds, int64_t code, const void* logits, const void* features, double seconds) try {
  Rounds& own = *(Rounds*)rounds;
  own.took(code, seconds);
  return own.run(own.take(logits, features));
} catch (const std::exception&) {
  return none_left;
}
}
