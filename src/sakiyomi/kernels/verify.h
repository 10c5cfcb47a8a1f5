// Acceptance rules over rows of logits, for all requests of a round in one call: what sampling/verifiers does in greedy.py, coupled.py,
// ratio.py and block.py, which remain for other rows and are what the tests compare with. The uniforms are the same, and so is every token.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "edits.h"
#include "noise.h"
#include "row.h"
#include "torch.h"

namespace {

enum Judged : int64_t { by_best, by_noise, by_ratio, by_block };  // as sampling/verifiers/native.py numbers them
enum Ending : int64_t { plain, recovered, bonus };                // likewise

constexpr float least_mass = 1e-7f;  // LEAST_MASS in ratio.py

// A draft and how it is judged, as sampling/verifiers/native.py packs it.
struct Case {
  int64_t row;       // of the logits, that of the last committed token; row + i + 1 follows node i
  int64_t rule;
  int64_t position;  // of the token that the first row predicts
  int64_t nodes, draws;
  int64_t distinct;  // siblings were drawn without replacement
  int64_t numbers;   // where its own begin: tokens and parents of the nodes, node and row of the draws (-1: a point mass)
  const float* probs;  // (rows, V) that draws come from
  int64_t top_k;
  double temperature, top_p, min_p;
  uint64_t noise, stream;  // states of the keyed noise and of the stream of uniforms
  const Edits* edits;      // null: none
};

struct Verdict {
  bool decided = false;  // else a row has no number to choose by
  int64_t token = -1;
  Ending ending = plain;
  uint64_t stream = 0;
  std::vector<int64_t> path, refused;
  std::vector<double> chances;  // of the path's tokens and of the last one, in the rows that they were judged in
};

// Distributions of one thread: memory that stays, since new pages cost more than what is written to them.
struct Desk {
  std::vector<float> rows, spare[4];
  std::vector<int64_t> supports, supported;

  void make_room(int64_t count, int64_t n) {
    if ((int64_t)rows.size() < count * n) rows.resize(count * n);
    if ((int64_t)supports.size() < count * few) supports.resize(count * few);
    if ((int64_t)supported.size() < count) supported.resize(count);
  }
  float* own(int64_t which, int64_t n) {
    if ((int64_t)spare[which].size() < n) spare[which].resize(n);
    return spare[which].data();
  }
};

template <typename T>
struct Judge {
  const Case& ask;
  const T* logits;
  int64_t n;
  const int64_t *tokens, *parents, *draws;
  Desk& desk;
  Verdict found;
  uint64_t stream;

  Judge(const Case& ask, const T* logits, int64_t n, const int64_t* numbers, Desk& desk)
      : ask(ask), logits(logits + ask.row * n), n(n), tokens(numbers + ask.numbers), parents(tokens + ask.nodes), draws(parents + ask.nodes),
        desk(desk), stream(ask.stream) {}

  // What `read` gives for the logits behind a place, as the request's options change them; -2 where these fail.
  template <typename Read>
  int64_t behind(int64_t place, Read&& read) {
    const T* const row = logits + (place + 1) * n;
    if (!ask.edits) return read(row);
    return ask.edits->apply(row, n, path_to(place, tokens, parents)) ? read((const float*)ask.edits->row) : -2;
  }

  // The distribution behind a place, in the desk's row of this number; null where its logits are none.
  const float* warped(int64_t place, int64_t at = 0) {
    desk.make_room(at + 1, n);
    float* out = desk.rows.data() + at * n;
    const int64_t count = behind(place, [&](const auto* row) {
      return warp(row, n, ask.temperature, std::min(ask.top_k, n), ask.top_p, ask.min_p, out, desk.supports.data() + at * few);
    });
    desk.supported[at] = count;
    return count == -2 ? nullptr : out;
  }

  // What a draw comes from; null: a point mass.
  const float* source(int64_t draw) const { return draws[2 * draw + 1] < 0 || !ask.probs ? nullptr : ask.probs + draws[2 * draw + 1] * n; }

  void refuse(int64_t node) {
    if (std::find(found.refused.begin(), found.refused.end(), node) == found.refused.end()) found.refused.push_back(node);
  }

  void end(int64_t token, double chance) {
    const int64_t last = found.path.empty() ? -1 : found.path.back();
    found.token = token, found.stream = stream, found.decided = token >= 0;
    found.chances.push_back(chance);
    if (ask.nodes) found.ending = std::find(parents, parents + ask.nodes, last) == parents + ask.nodes ? bonus : recovered;
  }

  // Draws what follows from what is left of the row behind the path, `target`.
  void end_by(const float* left, const float* target, int64_t at = 0) {
    const int64_t token = draw(left, n, uniform(stream), desk.supported[at] < 0 ? nullptr : desk.supports.data() + at * few, desk.supported[at]);
    if (token >= 0) end(token, target[token]);
  }

  // The target's own choice at every place, as long as a child has it.
  void follow() {
    for (int64_t place = -1, depth = 0;; ++depth) {
      int64_t token;
      double chance;
      if (ask.rule == by_best) {
        const int64_t both = behind(place, [&](const auto* row) { return best(row, n); });
        if (both < 0) return;
        const uint32_t bits = uint32_t(both);
        float x;
        std::memcpy(&x, &bits, 4);
        token = both >> 32, chance = x;
      } else {
        const float* probs = warped(place);
        if (!probs) return;
        const int64_t count = desk.supported[0];
        const auto first = ranked(probs, n, 1, NoiseKey(ask.noise, ask.position + depth), count < 0 ? nullptr : desk.supports.data(), count);
        if (first.empty()) return;
        token = first[0].token, chance = probs[token];
      }
      int64_t child = -1;
      for (int64_t node = place + 1; node < ask.nodes && child < 0; ++node)
        if (parents[node] == place) {
          if (tokens[node] == token) child = node;
          else found.refused.push_back(node);
        }
      if (child < 0) return end(token, chance);
      found.path.push_back(child), found.chances.push_back(chance);
      place = child;
    }
  }

  // Of two spare rows one that is not this one.
  float* other(const float* row, int64_t first) { return desk.own(first, n) == row ? desk.own(first + 1, n) : desk.own(first, n); }

  // max(p - q, 0), or p without the token, normalised.
  const float* after(const float* p, const float* q, int64_t token, float* out) {
    if (q && !(residual(p, q, n, least_mass, out) < least_mass)) return out;
    return without(p, n, token, out) > 0 ? out : p;
  }

  void try_draws() {
    for (int64_t place = -1;;) {
      const float *target = warped(place), *left = target, *untried = nullptr;
      if (!target) return;
      int64_t child = -1;
      for (int64_t draw = 0; draw < ask.draws && child < 0; ++draw) {
        const int64_t node = draws[2 * draw];
        if (parents[node] != place) continue;
        const int64_t token = tokens[node];
        const float* q = source(draw);
        if (q && untried) q = untried;
        double chance = q ? q[token] : 1.0;
        if (chance <= 0) q = nullptr, chance = 1;  // it cannot have been drawn there
        if (uniform(stream) * chance < left[token]) {
          child = node;
          continue;
        }
        refuse(node);
        left = after(left, q, token, other(left, 0));
        if (ask.distinct && q) {
          float* rest = other(q, 2);
          untried = without(q, n, token, rest) > 0 ? rest : q;
        }
      }
      if (child < 0) return end_by(left, target);
      found.path.push_back(child), found.chances.push_back(target[tokens[child]]);
      place = child;
    }
  }

  // The first draw of a node; in a chain there is no other.
  int64_t draw_of(int64_t node) const {
    int64_t draw = 0;
    while (draws[2 * draw] != node) ++draw;
    return draw;
  }

  void judge_block() {
    std::vector<double> levels{1.0};
    desk.make_room(ask.nodes + 1, n);
    for (int64_t place = 0; place < ask.nodes && levels.back() > 0; ++place) {
      const float *target = warped(place - 1, place), *q = source(draw_of(place));
      if (!target) return;
      const int64_t token = tokens[place];
      const double chance = q && q[token] > 0 ? q[token] : 1.0;
      levels.push_back(std::min(1.0, levels.back() * target[token] / chance));
    }
    int64_t kept = levels.size() - 1;
    const float *target = desk.rows.data() + kept * n, *left = target;
    bool stays = kept == ask.nodes && levels[kept] > 0 && (!kept || uniform(stream) < levels[kept]);
    if (stays && !warped(kept - 1, kept)) return;
    while (!stays) {
      --kept;
      target = desk.rows.data() + kept * n;
      const int64_t token = tokens[kept];
      const float* q = source(draw_of(kept));
      double level = levels[kept], mass;
      float* out = desk.own(0, n);
      if (!q || q[token] <= 0) {
        left = without(target, n, token, out) > 0 ? out : target;
        mass = level * (1.0 - target[token]);
      } else {
        const float* scaled = target;
        if (level != 1.0) {
          float *to = desk.own(1, n), factor = level;
          for (int64_t i = 0; i < n; ++i) to[i] = target[i] * factor;
          scaled = to;
        }
        left = out;
        mass = residual(scaled, q, n, least_mass, out);
        if (mass < least_mass) left = without(target, n, token, out) > 0 ? out : target;
      }
      stays = !kept || uniform(stream) < (level < 1.0 ? mass / (mass + 1.0 - level) : 1.0);
      if (stays) found.refused = {kept};
    }
    for (int64_t node = 0; node < kept; ++node) {
      found.path.push_back(node);
      found.chances.push_back((desk.rows.data() + node * n)[tokens[node]]);
    }
    end_by(left, target, kept);
  }

  void decide() {
    if (ask.rule == by_ratio) try_draws();
    else if (ask.rule == by_block) judge_block();
    else follow();
  }
};

template <typename T>
std::vector<Verdict> judge(int64_t count, const Case* cases, const int64_t* numbers, const T* logits, int64_t n) {
  std::vector<Verdict> all(count);
  auto decide = [&](int64_t i) {
    static thread_local Desk desk;
    Desk own = std::move(desk);  // what Python runs for a row may judge others in this thread
    Judge<T> judge(cases[i], logits, n, numbers, own);
    judge.decide();
    desk = std::move(own);
    if (!judge.found.decided) judge.found = {};
    all[i] = std::move(judge.found);
  };
  parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      if (!cases[i].edits) decide(i);
  });
  for (int64_t i = 0; i < count; ++i)  // Python is called in its own thread
    if (cases[i].edits) decide(i);
  return all;
}

template <typename T>
void verify(int64_t count, const Case* cases, const int64_t* numbers, const T* logits, int64_t n, int64_t* ints, double* doubles) {
  for (const Verdict& v : judge(count, cases, numbers, logits, n)) {
    for (int64_t x : {int64_t(v.decided), v.token, int64_t(v.ending), int64_t(v.stream), int64_t(v.path.size()), int64_t(v.refused.size())}) *ints++ = x;
    ints = std::copy(v.refused.begin(), v.refused.end(), std::copy(v.path.begin(), v.path.end(), ints));
    doubles = std::copy(v.chances.begin(), v.chances.end(), doubles);
  }
}

}  // namespace

extern "C" {

// The verdicts on these drafts from their rows of logits, (rows, V), as sampling/verifiers/native.py reads them; a draft of n nodes takes up
// to 6 + 2 n of `ints` and n + 1 of `doubles`.
void sk_verify(int64_t count, const void* cases, const void* numbers, const void* logits, int half, int64_t n, int64_t* ints, double* doubles) {
  if (half) verify(count, (const Case*)cases, (const int64_t*)numbers, (const bf16*)logits, n, ints, doubles);
  else verify(count, (const Case*)cases, (const int64_t*)numbers, (const float*)logits, n, ints, doubles);
}
}
