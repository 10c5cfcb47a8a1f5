// The keyed noise of a position, and the tokens that it prefers: what sampling/rng.py does, for one row of V weights.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "row.h"
#include "torch.h"
#include "vector.h"

namespace {

constexpr double noise_scale = 0x1p-32 * (1 - 0x1p-24);
constexpr double noise_slack = 1 - 1e-6;

// The finaliser of splitmix64 (Steele et al. 2014).
inline uint64_t mixed(uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

// The next uniform of a stream, in [0, 1).
inline double uniform(uint64_t& stream) {
  const uint64_t x = mixed(stream);
  stream += 0x9E3779B97F4A7C15u;
  return double(x >> 11) * 0x1p-53;
}

struct NoiseKey {
  uint32_t first, second;

  NoiseKey(uint64_t state, int64_t position) {
    const uint64_t key = mixed(state ^ uint64_t(position));
    first = uint32_t(key), second = uint32_t(key >> 32);
  }
};

// A bijection of 32 bits: two rounds of multiply and shift, with two keys.
template <typename V>
inline V stirred(V x, uint32_t first, uint32_t second) {
  x = (x ^ first) * 0x7FEB352Du;
  x = (x ^ (x >> 15)) + second;
  x = x * 0x31848BABu;
  return x ^ (x >> 16);
}

inline float noise_of(uint32_t token, NoiseKey key) { return float(stirred(stirred(token, 0, 0), key.first, key.second) | 1u); }

// Of 16 tokens from this one on; a number of 32 bits as two halves, so that it is rounded once.
inline f16v noise_of16(uint32_t token, NoiseKey key) {
  static constexpr uint32_t count[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const u16v x = stirred(stirred(load<u16v>(count) + token, 0, 0), key.first, key.second) | 1u;
  return float_of((i16v)(x >> 16)) * 65536.0f + float_of((i16v)(x & 0xffffu));
}

struct Scored {
  double score;  // weight / exponential variate
  int64_t token;
};

inline Scored scored(float weight, float noise, int64_t token) { return {weight / -std::log1p(double(noise) * -noise_scale), token}; }

// The tokens with the largest log weight + Gumbel noise, best first and of equal ones the lower first; `count` at most, none of
// weight 0. As an exponential variate is larger than its uniform, only tokens whose weight / uniform reaches the best known score
// can win: logarithms are taken of a handful. `support`: tokens outside of which all weights are 0; null: none is known.
inline std::vector<Scored> ranked(const float* weights, int64_t n, int64_t count, NoiseKey key, const int64_t* support, int64_t supported) {
  std::vector<Scored> found;
  auto add = [&](int64_t token) { found.push_back(scored(weights[token], noise_of(uint32_t(token), key), token)); };
  if (support) {
    for (int64_t i = 0; i < supported; ++i) add(support[i]);
  } else {
    static thread_local std::vector<float> bounds;
    bounds.resize(n);
    float* const all = bounds.data();  // this thread's, for all threads
    parallel_for(0, (n + stretch - 1) / stretch, 2, [&](int64_t begin, int64_t end) {
      int64_t i = begin * stretch;
      const int64_t last = std::min(n, end * stretch);
      for (; i + 16 <= last; i += 16) {
        const f16v noise = noise_of16(uint32_t(i), key);
        store16(all + i, load16(weights + i) / noise);
      }
      for (; i < last; ++i) all[i] = weights[i] / noise_of(uint32_t(i), key);
    });
    float floor = 0;
    if (count < n) {
      const float bound = count == 1 ? look_all<false>(all, n, 1, nullptr).back().top : bound_of(all, n, count);
      for (const Candidate& c : not_below(all, n, bound)) add(c.token);
      std::nth_element(found.begin(), found.begin() + (count - 1), found.end(), [](auto& a, auto& b) { return a.score > b.score; });
      floor = float(found[count - 1].score * noise_scale * noise_slack);
      found.clear();
    }
    for (const Candidate& c : not_below(all, n, floor)) add(c.token);
  }
  std::erase_if(found, [](const Scored& s) { return !(s.score > 0); });
  std::stable_sort(found.begin(), found.end(), [](auto& a, auto& b) { return a.score > b.score; });
  if ((int64_t)found.size() > count) found.resize(count);
  return found;
}

}  // namespace
