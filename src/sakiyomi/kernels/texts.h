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

// What the members of a merged drafter share: how right each is where it claims so much, and what asking the one that runs a model brings.
struct Shared {
  std::vector<Claims> claims;
  double expected = 0, seconds = 0;  // accepted tokens, and what its passes take
  bool told = false;                 // `expected` is known

  explicit Shared(int64_t members) : claims(members) {}

  void spent(double took) {
    if (took <= 0) return;
    seconds = !seconds || took < seconds / 2 ? took : seconds + 0.1 * (std::min(took, 2 * seconds) - seconds);  // see running_mean
  }
};

// What one member proposes: of each node the chance that is claimed, the probability that is told, and the row that it was drawn from (-1: a
// point mass).
struct Proposal {
  int64_t member;
  Guesses guesses;
  std::vector<double> probs;
  Tokens rows;
};

// A draft. Several members may have guessed the same node: each is a draw of it.
struct TextDraft {
  Tokens tokens, parents;
  Tokens draws, rows, members;  // of each draw its node, the row that it comes from, and who guessed it
  std::vector<double> probs;    // of each draw
};

// One request's text, and all who read it.
struct ReadText {
  std::shared_ptr<Shared> shared;  // by a merged drafter's members; null: there is one alone
  std::vector<std::unique_ptr<Reader>> readers;
  std::shared_ptr<Recycled> recycled;  // what rows rank first is put there; null: nowhere
  int64_t seen = 0;                    // tokens of the request's text that were read
  bool coupled = false;                // see Situation
  uint64_t noise = 0;
  double temperature = 0;
  std::vector<Proposal> said;          // in the last round
  Tokens heard;                        // since then

  void read(const int64_t* tokens, int64_t count) {
    for (auto& reader : readers) reader->read(tokens, count);
    if (!said.empty()) heard.insert(heard.end(), tokens, tokens + count);
  }

  void branch(const int64_t* head, int64_t count) {
    for (auto& reader : readers) reader->branch(head, count);
    seen = count, said.clear(), heard.clear();
  }

  // What readers guess behind all that was read.
  void guess(const Wanted& wanted, const Tokens& ends) {
    if (shared) learn();
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
      const size_t count = found.tokens.size();
      said.push_back({int64_t(i), std::move(found), {}, Tokens(count, -1)});
      said.back().probs = said.back().guesses.chances;
    }
  }

  // Whether the member that runs a model should be asked, if it is wanted: its tokens help only where the others' first one is rejected.
  bool wishes(const Wanted& wanted) const {
    if (!(wanted.members >> readers.size() & 1)) return false;
    if (!wanted.weighed || !shared->seconds) return true;
    double sure = 0;
    for (const Proposal& each : said) {
      const std::vector<double> values = worths(each);
      double first = 0;
      for (size_t i = 0; i < values.size(); ++i)
        if (each.guesses.parents[i] < 0) first += values[i];
      sure = std::max(sure, std::min(1.0, first));
    }
    return (1.0 - sure) * (shared->told ? shared->expected : 1.0) > wanted.rate * shared->seconds;
  }

  // What that member proposes.
  void add(Proposal&& given) {
    said.push_back(std::move(given));
    const std::vector<double> values = worths(said.back());
    if (values.empty()) return;
    const double sum = std::accumulate(values.begin(), values.end(), 0.0);
    if (!shared->told) shared->expected = sum, shared->told = true;
    shared->expected += 0.1 * (sum - shared->expected);
  }

  // All that was said as one tree: see MergedDrafter.
  TextDraft merged(const Wanted& wanted) const {
    TextDraft all;
    std::vector<double> values;
    for (const Proposal& each : said) {
      const Guesses& guesses = each.guesses;
      const std::vector<double> own_values = worths(each);
      Tokens own;
      for (size_t i = 0; i < guesses.tokens.size(); ++i) {
        const int64_t above = guesses.parents[i] < 0 ? -1 : own[guesses.parents[i]], token = guesses.tokens[i];
        size_t node = 0;
        while (node < all.tokens.size() && !(all.tokens[node] == token && all.parents[node] == above)) ++node;
        if (node == all.tokens.size()) all.tokens.push_back(token), all.parents.push_back(above), values.push_back(own_values[i]);
        values[node] = std::max(values[node], own_values[i]);
        own.push_back(node);
        all.draws.push_back(node), all.rows.push_back(each.rows[i]), all.members.push_back(each.member), all.probs.push_back(each.probs[i]);
      }
    }
    if (!shared) return all;
    const Tokens kept = kept_of(all, values, wanted);
    if (kept.size() == all.tokens.size()) return all;
    TextDraft left;
    Tokens number(all.tokens.size(), -1);
    for (size_t i = 0; i < kept.size(); ++i) number[kept[i]] = i, left.tokens.push_back(all.tokens[kept[i]]);
    left.parents = renumbered(all.parents, kept);
    for (size_t i = 0; i < all.draws.size(); ++i) {
      if (number[all.draws[i]] < 0) continue;
      left.draws.push_back(number[all.draws[i]]), left.rows.push_back(all.rows[i]);
      left.members.push_back(all.members[i]), left.probs.push_back(all.probs[i]);
    }
    return left;
  }

 private:
  // Of each node the chance that it is accepted with all above it.
  std::vector<double> worths(const Proposal& of) const {
    std::vector<double> chances(of.guesses.chances);
    if (shared)
      for (double& chance : chances) chance = shared->claims[of.member].chance(chance);
    return products(of.guesses.parents, chances);
  }

  // Nodes that stay: all that were drawn, as the distribution would change without them, and the most valuable of the others.
  static Tokens kept_of(const TextDraft& all, const std::vector<double>& values, const Wanted& wanted) {
    std::vector<char> drawn(all.tokens.size());
    for (size_t i = 0; i < all.draws.size(); ++i)
      if (all.rows[i] >= 0) drawn[all.draws[i]] = 1;
    for (int64_t node = int64_t(drawn.size()) - 1; node >= 0; --node)
      if (drawn[node] && all.parents[node] >= 0) drawn[all.parents[node]] = 1;
    const int64_t count = std::count(drawn.begin(), drawn.end(), 1);
    if (!count) return best_of(values, wanted.most, wanted);
    Tokens order(values.size()), kept;
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return values[a] > values[b]; });
    int64_t others = std::max<int64_t>(0, wanted.most - count);
    for (int64_t node : order)
      if (drawn[node] || others-- > 0) kept.push_back(node);
    std::sort(kept.begin(), kept.end());
    return kept;
  }

  // Compares what was said with what the target chose since.
  void learn() {
    for (const Proposal& each : said) {
      const Guesses& guesses = each.guesses;
      int64_t place = -1;
      for (int64_t token : heard) {
        int64_t found = -1;
        for (size_t node = 0; node < guesses.tokens.size(); ++node)
          if (guesses.parents[node] == place) {
            shared->claims[each.member].learn(guesses.chances[node], guesses.tokens[node] == token);
            if (guesses.tokens[node] == token) found = node;
          }
        if (found < 0) break;
        place = found;
      }
    }
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

int64_t sk_shared(int64_t members) { return made_shared<Shared>(members); }
void sk_free_shared(int64_t handle) { delete &shared_of<Shared>(handle); }

// A text; `shared` of the merged drafter (0: there is one drafter alone).
int64_t sk_text(int64_t shared) {
  ReadText* text = new ReadText;
  if (shared) text->shared = shared_of<Shared>(shared);
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

// Guesses behind all that was read.
void sk_text_guess(int64_t text, const void* wanted, int64_t count, const int64_t* ends) {
  ((ReadText*)text)->guess(*(const Wanted*)wanted, {ends, ends + count});
}

// The draft of these: how many nodes and draws, and where tokens, parents, the draws' nodes and members lie, and their probabilities.
void sk_text_draft(int64_t text, const void* wanted, int64_t* counts, const int64_t** ints, const double** doubles) {
  static thread_local Tokens whole;
  static thread_local TextDraft draft;
  draft = ((ReadText*)text)->merged(*(const Wanted*)wanted);
  whole.clear();
  for (const auto* part : {&draft.tokens, &draft.parents, &draft.draws, &draft.members}) whole.insert(whole.end(), part->begin(), part->end());
  counts[0] = draft.tokens.size(), counts[1] = draft.draws.size();
  *ints = whole.data(), *doubles = draft.probs.data();
}
}
