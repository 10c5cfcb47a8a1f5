// What a request's options change in its rows of logits before a token is chosen: what Sampler.process does, one row at a time.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "torch.h"
#include "vector.h"

namespace {

// The tokens that lead to a node, from the root on.
inline std::vector<int64_t> path_to(int64_t node, const int64_t* tokens, const int64_t* parents) {
  std::vector<int64_t> path;
  for (; node >= 0; node = parents[node]) path.push_back(tokens[node]);
  std::reverse(path.begin(), path.end());
  return path;
}

// As sampling/native_edits.py packs it.
struct Edits {
  float* row;            // (V): where they are changed
  const float* bias;     // (V) that is added; null: none
  const char* in_text;   // (V): whether a token is in the text
  const int64_t* seen;   // the tokens that are, each once
  int64_t count;         // of these
  double penalty;        // of repeated tokens; 1: none
  int (*call)(int64_t count, const int64_t* path);  // Python's own changes, behind so many tokens of a draft; 0: it failed; null: none

  // Changes a row, n = V, behind the text and these tokens of a draft, into `row`; false where Python cannot.
  template <typename T>
  bool apply(const T* logits, int64_t n, const std::vector<int64_t>& path) const {
    const int64_t whole = n / 16 * 16;
    for (int64_t i = 0; i < whole; i += 16) store16(row + i, load16(logits + i) + (bias ? load16(bias + i) : f16v{}));
    for (int64_t i = whole; i < n; ++i) row[i] = value_of(logits[i]) + (bias ? bias[i] : 0);
    if (penalty != 1) {
      const float factor = penalty;
      auto repeated = [&](int64_t token) { row[token] = row[token] < 0 ? row[token] * factor : row[token] / factor; };
      for (int64_t i = 0; i < count; ++i) repeated(seen[i]);
      for (auto token = path.begin(); token != path.end(); ++token)
        if (!in_text[*token] && std::find(path.begin(), token, *token) == token) repeated(*token);
    }
    return !call || call(path.size(), path.data());
  }
};

}  // namespace
