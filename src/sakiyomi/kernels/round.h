// Rounds of requests: draft, score, verify, commit. One object for each request holds its draft, the rows of its passes and what of them
// stays in the caches; it is kept here from round to round. Drafts are trees that grow here (growth.h, slots.h), are found in texts (texts.h),
// are both, or are given by Python. Heads read hidden states of the target's passes, which stay here, too. Passes of models that have a program
// (program.h) are run here, others by Python, for which they are described. Python reads what was committed (verify.h decides that); where
// there is no target, Python reads the trees.

#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <vector>

#include "growth.h"
#include "program.h"
#include "slots.h"
#include "texts.h"
#include "verify.h"

extern "C" void sk_keep(int64_t session, int64_t slot, int64_t first, int64_t count, const int64_t* rows);
extern "C" void sk_place(int64_t session, int64_t slot, int64_t column, int64_t count, const void* pairs);

namespace {

// A draft as the target's pass reads it and as it is judged.
struct Nodes {
  std::vector<int64_t> candidates;  // of the tree that grew here; empty where the draft was given
  std::vector<int64_t> tokens, parents, draws;  // draws: node and row of `probs` of each (-1: a point mass)
  int64_t distinct = 0, depth = 0;
  const float* probs = nullptr;
  Tokens members;              // of a draft that was found: who guessed each node first
  std::vector<double> said;    // with which probability
};

// A request: the tree of its next draft, and how it is judged.
struct Request : Tree {
  bool taken = false;
  bool grows = false, asks = false;  // its draft of this round grows here, is found in its text
  bool wishes = false;    // what is found there leaves so much open that a tree would be worth its time
  bool seated = false;    // its trees may grow here
  Case judged{};          // its next verdict
  int64_t slot = -1;      // in the target's cache, which holds all of its tokens but the last
  int64_t last = 0;       // most tokens that it may have
  Nodes nodes;            // of this round
  ReadText* text = nullptr;  // in which drafts are found; it is Python's
  Wanted wanted{};        // of these
  Tokens tail;            // the text's last tokens, those that nobody has read in it among them
  std::vector<float> drawn_from;  // by place: what candidates are drawn from
  std::vector<char> heard;        // hidden states of committed tokens of which no features were made yet
  std::vector<char> known;        // features of committed tokens since it was seated

  int64_t length() const { return ask.first; }
};

// What is asked of a request in a round, as drafters/native_trees.py packs it.
struct Asked {
  int64_t number;
  Extent extent;  // of the tree that grows; depth 0: none
  Wanted wanted;  // of what is found in its text; depth 0: nothing
};

// What a round took, in seconds: all of it; up to the target's pass; inside drafts' passes; inside the target's. How many passes drafts took.
struct Span {
  double whole, before, drafting, scoring, passes;
};

// How many rounds like the first one may follow it in a call. None begins where a text has ended, a request has more tokens than its `until`,
// or the call has taken `seconds`; their passes are run here.
struct Further {
  int64_t rounds;
  double seconds;
  const int64_t* until;
};

// What a head reads of the target's passes, as model_executor/kernel_rounds.py packs it: these of the hidden states that are captured, so many
// bytes of a row each.
struct Heard {
  std::vector<int64_t> which, bytes;
  int64_t row = 0;        // bytes of a row of all of them; 0: there is no head
  bool last = false;      // of the last committed token alone
  Layers features;        // make what rows of the head's passes read; none: the states are read as they are
  Layers slots;           // the head is one pass, and makes logits of so many slots
  int64_t count = 0;      // of slots
  Vocabulary words{};     // of their tokens
};

using Clock = std::chrono::steady_clock;

inline double seconds_since(Clock::time_point began) { return std::chrono::duration<double>(Clock::now() - began).count(); }

constexpr size_t longest_tail = 256, kept_tail = 64;  // LONG in native_texts.py
constexpr int64_t together = 64;  // so many tokens' hidden states wait at most, for features of all requests in one product
enum Ended : int64_t { goes_on, by_stop, by_length };
constexpr int64_t most_passes = 256;
constexpr int64_t most_rounds = 8;     // of a call: MOST_ROUNDS in kernel_rounds.py
constexpr int64_t first_rest = 4, longest_rest = 64;  // calls of one round behind one in which a further one failed; the next time twice as many
constexpr int64_t span_size = sizeof(Span) / sizeof(double);
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
  int64_t most_rows;  // of a call's passes of the target: there is room for what so many commit
  double* times;  // how many passes were run, and rounds; of each round its `Span`; of each pass which it was, and its seconds
  Heard hears{};
  std::vector<Request> requests;
  std::vector<Request*> round;
  const double* scored = nullptr;  // seconds of the target's pass by the nodes of all drafts, where these are weighed
  bool drafting = false, asking = false;  // of a draft model, of texts
  int64_t* next_int = nullptr;            // where what is committed next is left
  double* next_double = nullptr;
  int64_t resting = 0, next_rest = first_rest;  // calls that still have one round, and of the next rest
  bool any_ended = false;                 // of the texts, in this call
  Span span{};                            // of this round
  const void* const* states = nullptr;    // of the target's pass, if Python ran it
  std::vector<int64_t> table, numbers;
  std::vector<const void*> passes;  // logits of the draft model's, which are held until the round is over
  std::vector<Tensor> held;         // those of passes that were run here
  const Program* scorer = nullptr;  // ran the target's pass, if that was run here
  Clock::time_point began;

  // The next pass, as Python reads it. Further ones: of a head that is no model, and of layers around passes.
  static constexpr int64_t of_head = 0, of_layers = -1;
  static int64_t of_draft(int64_t size) { return 2 * size; }
  static int64_t of_target(int64_t size) { return 2 * size + 1; }

  // A round, and those that follow it. One of these that fails commits nothing, and draws its candidates again in the next call.
  int64_t run_rounds(int64_t count, const Asked* asked, const double* level, const Further& further) {
    times[0] = times[1] = 0, next_int = ints + 2, next_double = doubles, any_ended = false;
    int64_t code = finished(run(begin(count, asked, level)));
    if (!further.rounds || code) return code;
    if (resting) return --resting, code;
    int64_t rows = count;  // of such a round, at most
    for (int64_t i = 0; i < count; ++i) rows += std::max({asked[i].extent.depth ? asked[i].extent.nodes : 0, asked[i].wanted.nodes, asked[i].wanted.most});
    const auto fits = [&] {
      for (int64_t i = 0; i < count; ++i)
        if (round[i]->length() > further.until[i]) return false;
      return true;
    };
    int64_t left = most_rows - rows;
    double spent = span.whole;
    std::vector<uint64_t> streams(count);
    for (int64_t done = 0; done < further.rounds && !any_ended && left >= rows && 2 * times[0] < most_passes && spent < further.seconds && fits(); ++done) {
      const double passes_before = times[0];
      for (int64_t i = 0; i < count; ++i) streams[i] = round[i]->ask.stream;
      try {
        code = finished(run(begin(count, asked, level)));
      } catch (const std::exception&) {
        code = none_left;
      }
      if (code) {
        for (int64_t i = 0; i < count; ++i) round[i]->ask.stream = streams[i], round[i]->nodes = {};
        times[0] = passes_before, resting = next_rest, next_rest = std::min(2 * next_rest, longest_rest);
        return 0;
      }
      next_rest = first_rest;
      left -= rows, spent += span.whole;
    }
    return 0;
  }

  // The same code. 0: the round is over, and what it took is left.
  int64_t finished(int64_t code) {
    if (code) return code;
    span.whole = seconds_since(began);
    std::memcpy(times + 2 + span_size * int64_t(times[1]++), &span, sizeof span);
    return code;
  }

  int64_t begin(int64_t count, const Asked* asked, const double* level) {
    round.clear(), held.clear(), scorer = nullptr, passes.clear(), forest.trees.clear();
    span = {}, began = Clock::now(), asking = forest.sure = false;
    for (int64_t i = 0; i < count; ++i) {
      Request& own = requests[asked[i].number];
      round.push_back(&own);
      own.wanted = asked[i].wanted, own.asks = own.wanted.depth;
      asking |= own.asks;
      if (own.asks) look_up(own);
    }
    for (int64_t i = 0; i < count; ++i) {
      Request& own = *round[i];
      own.wishes = !own.asks || own.text->wishes(own.wanted);
      own.grows = asked[i].extent.depth && own.wishes;
      if (!own.grows) continue;
      forest.sure |= own.asks;
      (Grown&)own = {}, own.nodes = {}, (Extent&)own.ask = asked[i].extent;
      if (target.session && own.ask.rule == drawn) {
        const size_t most = (own.ask.rows + 1) * target.vocab;
        if (own.drawn_from.size() < most) own.drawn_from.resize(most);
        own.ask.probs = own.drawn_from.data();
      }
      forest.trees.push_back(&own);
    }
    forest.seconds = level;
    if (hears.features.program || forest.masks.block) make_features();
    if (hears.count && !forest.trees.empty()) return guess();
    drafting = !forest.trees.empty();
    return drafting ? after(forest.begin()) : score();
  }

  // What its text says about what follows.
  void look_up(Request& own) {
    ReadText& text = *own.text;
    const int64_t missing = own.length() - text.seen;
    check(missing >= 0 && missing <= (int64_t)own.tail.size(), "a text that nobody has read");
    text.read(own.tail.data() + own.tail.size() - missing, missing);
    text.seen += missing;
    text.guess(own.wanted, own.stops);
  }

  // Its draft of all that was found and has grown.
  void merge(Request& own) {
    const bool drawn_here = own.grows && own.nodes.probs;
    if (own.grows) {
      const Nodes& grown = own.nodes;
      // Siblings that were drawn without replacement are not independent draws of one row: as chosen nodes they are lossless in any tree.
      bool chain = true;
      for (size_t i = 0; i < grown.parents.size(); ++i) chain = chain && grown.parents[i] == int64_t(i) - 1;
      Proposal said{int64_t(own.text->readers.size()), {grown.tokens, grown.parents, {}}, {}, {}};
      for (size_t i = 0; i < grown.candidates.size(); ++i) {
        said.guesses.chances.push_back(own.chances[grown.candidates[i]]), said.probs.push_back(own.probs[grown.candidates[i]]);
        said.rows.push_back(chain ? grown.draws[2 * i + 1] : -1);
      }
      own.text->add(std::move(said));
    }
    TextDraft draft = own.text->merged(own.wanted);
    const float* const probs = own.nodes.probs;
    Nodes& to = own.nodes = {};
    if (std::any_of(draft.tokens.begin(), draft.tokens.end(), [&](int64_t token) { return token < 0 || token >= target.vocab; })) return;
    to.members.assign(draft.tokens.size(), -1), to.said.resize(draft.tokens.size());
    for (size_t i = 0; i < draft.draws.size(); ++i) {
      const int64_t node = draft.draws[i];
      to.draws.insert(to.draws.end(), {node, draft.rows[i]});
      if (to.members[node] < 0) to.members[node] = draft.members[i], to.said[node] = draft.probs[i];
    }
    to.tokens = std::move(draft.tokens), to.parents = std::move(draft.parents), to.depth = depth_of(to.parents);
    to.probs = drawn_here ? probs : nullptr;
  }

  // ---------------------------------------------------------------- hidden states

  // Keeps the hidden states of committed tokens, by their rows in the target's pass.
  void hear(Request& own, int64_t first, const std::vector<int64_t>& rows) {
    if (hears.last) own.heard.clear();
    for (size_t r = hears.last ? rows.size() - 1 : 0; r < rows.size(); ++r)
      for (size_t i = 0; i < hears.which.size(); ++i) {
        const char* from = (const char*)(scorer ? scorer->state(hears.which[i]) : states[hears.which[i]]) + (first + rows[r]) * hears.bytes[i];
        own.heard.insert(own.heard.end(), from, from + hears.bytes[i]);
      }
  }

  // Makes features of what these requests have heard, or keys and values, in as few products as they fit in.
  void make_features(const std::vector<Request*>& those) {
    const Layers& layers = forest.masks.block ? forest.masks.pairs : hears.features;
    std::vector<char> heard, made;
    std::vector<int64_t> columns;
    for (const Request* own : those) {
      heard.insert(heard.end(), own->heard.begin(), own->heard.end());
      const int64_t rows = own->heard.size() / hears.row;
      for (int64_t i = 0; i < rows; ++i) columns.push_back(own->length() - 1 - own->ask.lead - rows + i);
    }
    int64_t bytes = 0;  // of a row that they make
    for (size_t at = 0; at < columns.size();) {
      const int64_t rows = std::min<int64_t>(columns.size() - at, layers.rows);
      const Tensor found = layers.run(heard.data() + at * hears.row, rows, nullptr, forest.masks.block ? columns.data() + at : nullptr);
      bytes = found.numel() / rows * found.element_size();
      made.insert(made.end(), (const char*)found.data(), (const char*)found.data() + rows * bytes);
      at += rows;
    }
    const char* from = made.data();
    const int64_t* column = columns.data();
    for (Request* own : those) {
      const int64_t rows = own->heard.size() / hears.row;
      if (forest.masks.block) sk_place(forest.model.session, own->ask.slot, rows ? *column : 0, rows, from);
      else own->given.insert(own->given.end(), from, from + rows * bytes), own->known.insert(own->known.end(), from, from + rows * bytes);
      own->heard.clear(), from += rows * bytes, column += rows;
    }
  }

  // Of requests whose trees grow, and of those that have heard much.
  void make_features() {
    std::vector<Request*> those;
    for (Request* own : round)
      if (own->seated && !own->heard.empty() && (own->grows || (int64_t)own->heard.size() >= together * hears.row)) those.push_back(own);
    const auto start = Clock::now();
    make_features(those);
    if (!those.empty()) took(of_layers, seconds_since(start));
  }

  // The trees of a head that is one pass.
  int64_t guess() {
    std::vector<char> heard;
    for (const Tree* tree : forest.trees) {
      const Request& own = *(const Request*)tree;
      check((int64_t)own.heard.size() == hears.row, "a request that has no hidden state");
      heard.insert(heard.end(), own.heard.begin(), own.heard.end());
    }
    const int64_t each = hears.count * hears.words.own, all = forest.trees.size(), most = hears.slots.rows;
    std::vector<char> right(all);
    for (int64_t first = 0; first < all; first += most) {
      const int64_t rows = std::min(most, all - first);
      const auto start = Clock::now();
      held.push_back(hears.slots.run(heard.data() + first * hears.row, rows));
      took(of_head, seconds_since(start));
      const Tensor& logits = held.back();
      parallel_for(0, rows, 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          Tree& tree = *forest.trees[first + i];
          right[first + i] = target.half ? grow_slots(tree, (const bf16*)logits.data() + i * each, hears.words)
                                         : grow_slots(tree, (const float*)logits.data() + i * each, hears.words);
        }
      });
    }
    return std::find(right.begin(), right.end(), 0) == right.end() ? score() : none_left;
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
      if (scoring) span.before = seconds_since(began);
      const int64_t size = code / 2, which = std::lower_bound(model.sizes.begin(), model.sizes.end(), size) - model.sizes.begin();
      const int64_t* ids = model.buffers[which];
      Program* program = model.programs[which];
      if (!program || !program->reaches(ids + size, size)) return code;
      const auto start = Clock::now();
      const void* logits = nullptr;
      program->run(size, ids, ids + size, -1, nullptr, nullptr);
      const void* const features = !scoring && reads_features() ? program->state(forest.fed.state) : nullptr;
      held.push_back(program->logits());  // they may be the features themselves
      if (scoring) scorer = program;
      else if (const void* said = say(features, size)) logits = said;
      took(code, seconds_since(start));
      code = take(logits ? logits : held.back().data(), features);
    }
    return code;
  }

  bool reads_features() const { return forest.fed.given || forest.fed.said.program || forest.masks.bias.program; }

  // Logits of the rows of a draft model's pass whose features others make them of; null: the pass gives them.
  const void* say(const void* features, int64_t size) {
    if (!forest.fed.said.program) return nullptr;
    held.push_back(forest.fed.said.run((const char*)features, size));
    return held.back().data();
  }

  // Goes on from a pass that Python ran: its logits, and its hidden states in the order in which they are captured, where they are wanted.
  int64_t given(int64_t code, const void* logits, const void* const* all, double seconds) {
    const auto start = Clock::now();
    states = code % 2 ? all : nullptr;
    const void* const features = code % 2 || !reads_features() ? nullptr : all[forest.fed.state];
    if (!(code % 2))
      if (const void* said = say(features, code / 2)) logits = said;
    took(code, seconds + seconds_since(start));
    return finished(run(take(logits, features)));
  }

  void took(int64_t code, double seconds) {
    const int64_t count = int64_t(times[0]);
    check(count < most_passes, "rounds of too many passes");
    ++times[0];
    double* const own = times + 2 + span_size * most_rounds + 2 * count;
    own[0] = double(code), own[1] = seconds;
    (code > 0 && code % 2 ? span.scoring : span.drafting) += seconds;
    span.passes += !(code % 2);
  }

  int64_t take(const void* logits, const void* features) {
    if (!drafting) return target.half ? commit((const bf16*)logits) : commit((const float*)logits);
    if (forest.kept && std::find(passes.begin(), passes.end(), logits) != passes.end()) {
      forest.kept = false;  // passes write into the same place: this round is Python's
      return none_left;
    }
    passes.push_back(logits);
    const char* const own = (const char*)features;
    check(own || !reads_features(), "a pass that gives no features");
    if (forest.masks.token >= 0) return forest.model.half ? fill((const bf16*)logits, own) : fill((const float*)logits, own);
    return after(forest.model.half ? forest.grow((const bf16*)logits, own) : forest.grow((const float*)logits, own));
  }

  // All levels of the trees of a model that guesses at masks. `features`: of the pass's rows, where guesses are corrected by them.
  template <typename T>
  int64_t fill(const T* logits, const char* features) {
    const Masks& masks = forest.masks;
    const Vocabulary words = forest.vocabulary();
    double correcting = 0;
    for (Tree* tree : forest.trees) {
      const int64_t rows = forest.rows_of(*tree), first = masks.block ? masks.first : rows - tree->ask.depth;
      const T* const own = logits + first * words.own;
      bool right;
      if (!masks.bias.program) {
        right = grow_slots(*tree, own, words);
      } else {
        const int64_t width = masks.bias.bytes;
        const char* const hidden = features + first * width;
        right = Slots<T>{own, words, {}}.grow(*tree, [&](int64_t slot, const Tokens& places, const T* row, std::vector<T>& to, std::vector<double>& sure) {
          const auto start = Clock::now();
          correct(*tree, hidden + slot * width, places, row, to, sure);
          correcting += seconds_since(start);
        });
      }
      if (!right) return none_left;
      logits += rows * words.own;
      if (features) features += rows * masks.bias.bytes;
    }
    if (masks.bias.program) took(of_layers, correcting);
    return target.session ? score() : 0;
  }

  // The logits of a slot behind these places, by the tokens there.
  template <typename T>
  void correct(const Tree& tree, const char* hidden, const Tokens& places, const T* row, std::vector<T>& to, std::vector<double>& sure) {
    const Masks& masks = forest.masks;
    const int64_t count = places.size(), own = forest.model.vocab;
    std::vector<char> given;
    Tokens before;
    for (int64_t place : places) {
      given.insert(given.end(), hidden, hidden + masks.bias.bytes);
      before.push_back(place < 0 ? tree.missing.back() : tree.tokens[place]);
    }
    const Tensor found = masks.bias.run(given.data(), count, before.data());
    const T* from = (const T*)found.data();
    to.resize(count * own), sure.clear();
    for (int64_t i = 0; i < count; ++i)
      for (int64_t j = 0; j < own; j += 16) {
        const int64_t n = std::min<int64_t>(16, own - j);
        put(to.data() + i * own + j, first16(row + j, n) + first16(from + i * own + j, n), n);
      }
    if (masks.rated) sure.assign((const float*)masks.bias.program->state(0), (const float*)masks.bias.program->state(0) + count);
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
    Shared* shared = nullptr;
    for (Request* own : round)
      if (own->asks && own->grows) shared = own->text->shared.get();
    if (shared) shared->spent(span.drafting);
    for (Request* own : round)
      if (own->asks) merge(*own);
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
    if (hears.row && !scorer && !states && std::any_of(round.begin(), round.end(), [](const Request* own) { return own->seated; })) return none_left;
    const auto recycles = [](const Request* own) { return own->text && own->text->recycled; };
    if (asking && std::any_of(round.begin(), round.end(), recycles)) {
      const auto rows = ranked_rows(logits, row, target.vocab);
      for (size_t i = 0; i < round.size(); ++i)
        if (const Request& own = *round[i]; recycles(&own))
          own.text->recycled->put(Last(own.tail.data(), own.tail.size()), own.nodes.tokens, own.nodes.parents, rows.data() + cases[i].row);
    }
    for (size_t i = 0; i < round.size(); ++i) write(*round[i], cases[i].row, verdicts[i]);
    ints[0] = next_int - ints, ints[1] = next_double - doubles;
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

  // The draft model's rows of the accepted tokens, as far as it has read them. Those of a head are read again, with the target's features.
  std::vector<int64_t> read_of(const Request& own, const std::vector<int64_t>& tokens) const {
    std::vector<int64_t> read;
    int64_t candidate = -1;
    for (size_t i = 0; i + 1 < tokens.size() && !forest.fed.given && forest.masks.token < 0; ++i) {
      const auto place = std::find_if(own.places.begin(), own.places.end(), [&](const Place& p) { return p.candidate == candidate; });
      if (place == own.places.end()) break;
      const int64_t rank = std::find(place->tokens.begin(), place->tokens.end(), tokens[i]) - place->tokens.begin();
      if (rank >= place->offered) break;
      candidate = place->start + rank;
      const auto found = std::find(own.rows.begin(), own.rows.end(), candidate);
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
  // streams, for how many accepted nodes it is said who guessed them, whether a tree would have been worth its time; the tokens, the accepted and the refused nodes, these guessers, what
  // `tell` writes. As others: the tokens' chances, the draft's of the path, and what `tell` writes.
  void write(Request& own, int64_t row, const Verdict& found) {
    const Nodes& nodes = own.nodes;
    const int64_t accepted = found.path.size();
    std::vector<int64_t> tokens, rows{0};
    for (int64_t node : found.path) tokens.push_back(nodes.tokens[node]), rows.push_back(node + 1);
    tokens.push_back(found.token);
    const int64_t room = own.last - own.length(), most = std::min<int64_t>(room, tokens.size());
    int64_t used = 0;
    bool stopped = false;
    while (used < most && !stopped) stopped = std::find(own.stops.begin(), own.stops.end(), tokens[used++]) != own.stops.end();
    const Ended why = stopped ? by_stop : (int64_t)tokens.size() >= room ? by_length : goes_on;
    any_ended |= why != goes_on;
    own.judged.stream = found.stream;
    keep(target, own.slot, own.length() - 1, rows);
    if (forest.masks.block || !forest.model.session) {
      own.missing.assign(1, tokens.back());
      if (own.seated) own.ask.held = own.length() + tokens.size();
    } else if (own.grows) {
      // All missing tokens were read, and nodes of the path but its end.
      const std::vector<int64_t> read = read_of(own, tokens);
      keep(forest.model, own.ask.slot, own.ask.first - own.ask.lead, read);
      own.ask.held = own.ask.first + read.size();
      own.missing.assign(tokens.begin() + read.size(), tokens.end()), own.given.clear();
    } else if (own.seated) {
      own.missing.insert(own.missing.end(), tokens.begin(), tokens.end());
    } else {
      own.missing.assign(1, tokens.back());
    }
    if (own.seated && hears.row) hear(own, row, rows);
    own.ask.first += tokens.size();
    if (own.text) {
      own.tail.insert(own.tail.end(), tokens.begin(), tokens.end());
      if (own.tail.size() > longest_tail) own.tail.erase(own.tail.begin(), own.tail.end() - kept_tail);
    }
    const bool found_there = own.asks && accepted;
    for (int64_t x : {used, int64_t(why), int64_t(nodes.tokens.size()), nodes.depth, accepted, int64_t(found.refused.size()), int64_t(found.ending),
                      own.ask.held, int64_t(own.judged.stream), int64_t(own.ask.stream), found_there ? accepted : 0, int64_t(own.wishes)})
      *next_int++ = x;
    next_int = std::copy(tokens.begin(), tokens.end(), next_int);
    for (const auto* part : {&found.path, &found.refused}) next_int = std::copy(part->begin(), part->end(), next_int);
    for (int64_t i = 0; found_there && i < accepted; ++i) *next_int++ = nodes.members[found.path[i]];
    next_double = std::copy(found.chances.begin(), found.chances.end(), next_double);
    for (int64_t node : found.path) *next_double++ = own.asks ? nodes.said[node] : own.grows ? prob_of(own, nodes.candidates[node]) : 0;
    if (own.grows) tell(own, tokens, next_int, next_double);
    else *next_int++ = 0;
    own.nodes = {};
  }
};

}  // namespace

extern "C" {

// Rounds of a target and a draft model. Of each: session (0: none), V, whether logits are bf16, number of sizes, sizes, buffers,
// programs (0: none). Without a target its V is the width of what candidates are drawn from. `ints` and `doubles`: where sk_pass leaves what
// was committed, of passes of up to `most_rows` rows; `times`: see Rounds.
int64_t sk_rounds(const int64_t* of_target, const int64_t* of_draft, int64_t* ints, double* doubles, int64_t most_rows,
                  double* times) {
  auto model = [](const int64_t* from) {
    const int64_t count = from[3], *sizes = from + 4, *buffers = sizes + count, *programs = buffers + count;
    return Described{from[0], from[1], from[2], {sizes, buffers}, {(int64_t**)buffers, (int64_t**)programs},
                     {(Program**)programs, (Program**)programs + count}};
  };
  const Described target = model(of_target);
  return (int64_t) new Rounds{target, {model(of_draft), target.vocab, target.session != 0, nullptr, {}, {}}, ints, doubles, most_rows, times};
}

// What a head reads of the target's passes: numbers of captured states and bytes of a row of each, whether the last one's alone, what makes
// features of them, and how many slots it has where it is no model, what makes their logits, how many tokens it knows, and the target's for each.
void sk_hears(int64_t rounds, int64_t count, const int64_t* which, int last, const void* features, int64_t slots, const void* layers, int64_t own,
              const int64_t* tokens) {
  Rounds& to = *(Rounds*)rounds;
  to.hears = {{which, which + count}, {which + count, which + 2 * count}, 0,     last != 0, *(const Layers*)features,
              *(const Layers*)layers, slots,                             {own, to.target.vocab, tokens}};
  for (int64_t bytes : to.hears.bytes) to.hears.row += bytes;
}

// The rows of the draft model's passes read hidden states.
void sk_fed(int64_t rounds, const void* fed) { ((Rounds*)rounds)->forest.fed = *(const Fed*)fed; }

// Its passes guess several tokens.
void sk_masks(int64_t rounds, const void* masks) { ((Rounds*)rounds)->forest.masks = *(const Masks*)masks; }

void sk_free_rounds(int64_t rounds) { delete (Rounds*)rounds; }

// A request of `length` tokens that drafts nothing yet, and its number; `judged` as in sk_verify, of which rounds change what differs between
// them, `slot` and `last` as in Request; its last token and its stops.
int64_t sk_enter(int64_t rounds, const void* judged, int64_t slot, int64_t length, int64_t last, int64_t token, int64_t count, const void* stops) {
  auto& all = ((Rounds*)rounds)->requests;
  size_t number = 0;
  while (number < all.size() && all[number].taken) ++number;
  if (number == all.size()) all.emplace_back();
  Request& own = all[number];
  own.taken = true, own.seated = false, own.text = nullptr, own.nodes = {}, own.ask = {}, own.ask.slot = -1, own.ask.first = length;
  own.judged = *(const Case*)judged, own.slot = slot, own.last = last, own.ask.edits = own.judged.edits;
  own.stops.assign((const int64_t*)stops, (const int64_t*)stops + count);
  own.missing.assign(1, token);
  own.heard.clear(), own.known.clear(), own.given.clear();
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
  own.seated = true, own.heard.clear(), own.known.clear(), own.given.clear();
  if (given) own.given.assign((const char*)given, (const char*)given + missing * ((Rounds*)rounds)->forest.fed.bytes);
}

// As sk_seat, for a head that is one pass: the hidden state of the last token that the target has read.
void sk_hear(int64_t rounds, int64_t number, const void* state) {
  Rounds& all = *(Rounds*)rounds;
  all.requests[number].heard.assign((const char*)state, (const char*)state + all.hears.row);
}

// What a request has heard since it was seated, which Python copies: bytes, where they lie, and tokens of the request. Features, where some
// are made of it.
int64_t sk_heard(int64_t rounds, int64_t number, const void** data, int64_t* length) try {
  Rounds& all = *(Rounds*)rounds;
  Request& own = all.requests[number];
  if (all.hears.features.program) all.make_features({&own});
  const auto& found = all.hears.features.program ? own.known : own.heard;
  *data = found.data(), *length = own.length();
  return found.size();
} catch (const std::exception&) {
  return -1;
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
  own.taken = own.seated = false, own.text = nullptr;
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
// rows, and of the target's by the nodes of all drafts: held until the round ends. Of further rounds see Further.
int64_t sk_round(int64_t rounds, int64_t count, const void* asked, const double* level, const double* scored, int64_t further, double seconds,
                 const int64_t* until) try {
  Rounds& own = *(Rounds*)rounds;
  own.scored = scored;
  return own.run_rounds(count, (const Asked*)asked, level, {further, seconds, until});
} catch (const std::exception&) {
  return none_left;
}

// Goes on from a pass's logits, and from its hidden states where something reads them; it took so long. As sk_round.
int64_t sk_pass(int64_t rounds, int64_t code, const void* logits, const void* const* states, double seconds) try {
  return ((Rounds*)rounds)->given(code, logits, states, seconds);
} catch (const std::exception&) {
  return none_left;
}
}
