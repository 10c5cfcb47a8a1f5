// Draft trees whose levels all come in one pass: each is a slot, a row of logits that does not depend on the path to it.
//
// What is computed is what drafters/slot_tree.py computes.

#pragma once

#include "growth.h"

namespace {

// The slots of one tree: rows of logits, one behind the other.
template <typename T>
struct Slots {
  const T* rows;
  Vocabulary words;
  std::vector<Place> known;  // by slot: its candidates, of which places take the first ones

  // So many candidates behind a place; false where the row has no number to choose by.
  bool take(const Tree& tree, int64_t slot, int64_t count, int64_t breadth, Place& to) {
    if ((int64_t)known.size() <= slot) known.resize(slot + 1, {-1});
    Place& found = known[slot];
    if ((int64_t)found.tokens.size() < count || found.tokens.empty()) {
      found = {-1};
      const int64_t wanted = std::max(count, breadth);
      if (!words.list(tree.ask, rows + slot * words.own, wanted, wanted == 1, slot, nullptr, false, found)) return false;
    }
    const auto part = [&](const auto& from, auto& into) { into.assign(from.begin(), from.begin() + std::min<size_t>(count, from.size())); };
    part(found.tokens, to.tokens), part(found.scores, to.scores), part(found.probs, to.probs);
    return true;
  }

  // Level by level, as builders decide. `corrected`, if any: from a slot and the places that are read there to a row of logits for each, and
  // how likely their first candidates are to be accepted, where that is known.
  template <typename Corrected = std::nullptr_t>
  bool grow(Tree& tree, const Corrected& corrected = nullptr) {
    constexpr bool corrects = !std::is_same_v<Corrected, std::nullptr_t>;
    std::vector<int64_t> places{-1};
    std::vector<T> own;
    std::vector<double> sure;
    while (!places.empty() && tree.levels < tree.ask.depth) {
      const int64_t slot = tree.levels++;
      tree.level.clear();
      if (slot) tree.rows.insert(tree.rows.end(), places.begin(), places.end());
      if constexpr (corrects) corrected(slot, places, rows + slot * words.own, own, sure);
      const bool first = std::all_of(places.begin(), places.end(), [&](int64_t candidate) { return tree.siblings(candidate) == 1; });
      for (size_t i = 0; i < places.size(); ++i) {
        const int64_t count = tree.siblings(places[i]);
        if (!count) continue;
        Place place{places[i]};
        const T* const row = corrects ? own.data() + i * words.own : rows + slot * words.own;
        if (tree.ask.rule == drawn) {
          float* const table = tree.ask.probs + int64_t(tree.places.size()) * words.width;
          if (!words.list(tree.ask, row, count, count == 1, slot, table, false, place)) return false;
          if (!draw_all(tree.ask, table, words.reach(), count, place)) return false;
        } else if (corrects ? !words.list(tree.ask, row, count, first, slot, nullptr, false, place)
                            : !take(tree, slot, count, tree.ask.breadth, place)) {
          return false;
        }
        std::vector<double> chances = chances_of(tree, place);
        if (!sure.empty()) {  // the first one has the chance that is claimed
          const double all = std::accumulate(chances.begin(), chances.end(), 0.0);
          const double scale = std::min(sure[i] / std::max(chances[0], 1e-9), 1 / all);
          for (double& chance : chances) chance *= scale;
        }
        const size_t most = place.tokens.size();
        offer(tree, std::move(place), chances, most);
      }
      places = expanded(tree, nullptr);
    }
    return true;
  }

  // The nodes of largest product, by a heap; they become candidates level by level, siblings in their order.
  bool pick(Tree& tree) {
    using Path = std::vector<int64_t>;  // ranks
    struct Open {
      double value;
      Path path;
      double above;
      bool operator<(const Open& other) const {  // the next one is the largest
        if (value != other.value) return value < other.value;
        return path.size() != other.path.size() ? path.size() > other.path.size() : path > other.path;
      }
    };
    const int64_t count = tree.siblings(-1);
    std::vector<Place> slots;
    std::vector<std::vector<double>> chances;
    std::vector<Open> heap;
    std::vector<std::pair<Path, size_t>> children;  // of each path that has some, in the order in which they came
    auto push = [&](Path path, double above) {
      const size_t level = path.size() - 1;
      if (level == slots.size()) {
        Place place{-1};
        if (!words.list(tree.ask, rows + level * words.own, count, count == 1, level, nullptr, false, place)) return false;
        tree.levels = level + 1;  // whose confidence it is
        chances.push_back(chances_of(tree, place)), slots.push_back(std::move(place));
      }
      const auto& own = chances[level];
      if (path.back() < (int64_t)own.size() && above * own[path.back()] >= tree.ask.floor) {
        heap.push_back({above * own[path.back()], std::move(path), above});
        std::push_heap(heap.begin(), heap.end());
      }
      return true;
    };
    const auto ends = [&](int64_t token) { return std::find(tree.stops.begin(), tree.stops.end(), token) != tree.stops.end(); };
    if (!push({0}, 1.0)) return false;
    for (int64_t node = 0; node < tree.ask.nodes && !heap.empty(); ++node) {
      std::pop_heap(heap.begin(), heap.end());
      Open next = std::move(heap.back());
      heap.pop_back();
      const size_t level = next.path.size() - 1;
      const int64_t rank = next.path.back();
      const Path above(next.path.begin(), next.path.end() - 1);
      auto own = std::find_if(children.begin(), children.end(), [&](const auto& each) { return each.first == above; });
      if (own == children.end()) children.push_back({above, rank + 1});
      else own->second = rank + 1;
      Path sibling = next.path, child = next.path;
      ++sibling.back(), child.push_back(0);
      if (!push(std::move(sibling), next.above)) return false;
      if ((int64_t)level + 1 < tree.ask.depth && !ends(slots[level].tokens[rank]) && !push(std::move(child), next.value)) return false;
    }
    std::stable_sort(children.begin(), children.end(), [](const auto& a, const auto& b) { return a.first.size() < b.first.size(); });
    std::vector<std::pair<Path, int64_t>> places{{{}, -1}};
    tree.levels = 0;
    for (const auto& [path, kept] : children) {
      const size_t level = path.size();
      if ((int64_t)level == tree.levels) ++tree.levels, tree.level.clear();
      Place place = slots[level];
      place.candidate = std::find_if(places.begin(), places.end(), [&](const auto& each) { return each.first == path; })->second;
      for (size_t rank = 0; rank < kept; ++rank) {
        Path own = path;
        own.push_back(rank);
        places.emplace_back(std::move(own), tree.tokens.size() + rank);
      }
      offer(tree, std::move(place), chances[level], kept);
    }
    return true;
  }
};

// Adds all levels of a tree from the logits of its slots; false where one has no number to choose by.
template <typename T>
bool grow_slots(Tree& tree, const T* rows, const Vocabulary& words) {
  Slots<T> slots{rows, words, {}};
  return tree.ask.shape == best_first || tree.ask.shape == by_probs ? slots.pick(tree) : slots.grow(tree);
}

}  // namespace
