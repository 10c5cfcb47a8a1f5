// Drafts from texts: what several readers of a text guess (readers.h) is merged into one tree, as drafters/merged.py does.

#pragma once

#include "readers.h"

namespace {

// See ChanceCalibration.
class Claims {
  static constexpr int64_t bins = 11;
  static constexpr double from[bins + 1] = {0, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.96, 1};
  double claimed[bins], kept[bins];

  static int64_t bin(double claim) { return std::upper_bound(from + 1, from + bins, claim) - (from + 1); }

 public:
  Claims() {
    for (int64_t i = 0; i < bins; ++i) claimed[i] = kept[i] = 6.0 * ((from[i] + from[i + 1]) / 2);
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
  bool coupled = false;                // see Situation
  uint64_t noise = 0;
  double temperature = 0;
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
    for (size_t i = 0; i < readers.size(); ++i) {
      if (!(wanted.members >> i & 1)) continue;
      Guesses found = readers[i]->guess(wanted, {ends, seen, coupled, noise, temperature});
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
// What was ranked first behind contexts of this length (0: the longest), from a file: keys and counts (n), tokens and logarithms (n, 4).
void sk_recycled_load(int64_t handle, int64_t which, int64_t n, const uint64_t* keys, const int64_t* counts, const int64_t* tokens,
                      const double* logs) {
  for (int64_t i = 0; i < n; ++i, tokens += kept_tokens, logs += kept_tokens)
    shared_of<Recycled>(handle)->graph.put(which, keys[i], ranked_of(counts[i], tokens, logs));
}
// What the row behind a text's last tokens ranks first.
void sk_recycled_put(int64_t handle, int64_t length, const int64_t* last, int64_t count, const int64_t* tokens, const double* logs) {
  shared_of<Recycled>(handle)->put(Last(last, length), ranked_of(count, tokens, logs));
}
// How many contexts of a length are not in a file yet.
int64_t sk_recycled_count(int64_t handle, int64_t which) { return shared_of<Recycled>(handle)->fresh.size(which); }
// So many of those, as sk_recycled_load takes them.
void sk_recycled_fresh(int64_t handle, int64_t which, int64_t n, uint64_t* keys, int64_t* counts, int64_t* tokens, double* logs) {
  shared_of<Recycled>(handle)->fresh.each(which, [&](uint64_t key, const Ranked& ranked) {
    if (--n < 0) return;
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

int64_t sk_ngrams(int64_t order, const int64_t* tables, int64_t tops) {
  return (int64_t) new std::shared_ptr<Ngrams>(std::make_shared<FileNgrams>(order, tables, tops));
}
void sk_free_ngrams(int64_t handle) { delete &shared_of<Ngrams>(handle); }

int64_t sk_claims(int64_t count) { return made_shared<std::vector<Claims>>(count); }
void sk_free_claims(int64_t handle) { delete &shared_of<std::vector<Claims>>(handle); }

// A text; `claims` of the merged drafter (0: there is one drafter alone).
int64_t sk_text(int64_t claims) {
  ReadText* text = new ReadText;
  if (claims) text->claims = shared_of<std::vector<Claims>>(claims);
  return (int64_t)text;
}
void sk_free_text(int64_t text) { delete (ReadText*)text; }
// Readers of the text, in the order of the drafters: prompt lookup, a suffix automaton (of earlier texts; 0: none), recycling,
// n-grams (of a file; 0: of the text).
void sk_read_lookup(int64_t text, int64_t most, const double* priors) { ((ReadText*)text)->readers.push_back(std::make_unique<LookupReader>(most, priors)); }
void sk_read_suffix(int64_t text, int64_t earlier, const double* priors) {
  ((ReadText*)text)->readers.push_back(std::make_unique<SuffixReader>(earlier ? shared_of<Automaton>(earlier) : nullptr, priors));
}
void sk_read_recycled(int64_t text, int64_t recycled, int greedy) {
  ((ReadText*)text)->recycled = shared_of<Recycled>(recycled);
  ((ReadText*)text)->readers.push_back(std::make_unique<RecycleReader>(shared_of<Recycled>(recycled), greedy != 0));
}
void sk_read_ngrams(int64_t text, int64_t tables, int64_t order, int64_t vocab, const double* priors) {
  std::shared_ptr<OnlineNgrams> own = tables ? nullptr : std::make_shared<OnlineNgrams>(order);
  std::shared_ptr<Ngrams> all = tables ? shared_of<Ngrams>(tables) : own;
  ((ReadText*)text)->readers.push_back(std::make_unique<NgramReader>(all, own.get(), vocab, priors));
}
// How the text's drafts are judged, see Situation.
void sk_text_judged(int64_t text, int coupled, uint64_t noise, double temperature) {
  ReadText& own = *(ReadText*)text;
  own.coupled = coupled, own.noise = noise, own.temperature = temperature;
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
