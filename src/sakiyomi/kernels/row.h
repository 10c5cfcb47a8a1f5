// One row of V logits: its largest, a token's probability, temperature with top-k, top-p and min-p, and draws from what they
// leave. A row costs microseconds, and none is ever sorted.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <vector>

#include "torch.h"
#include "vector.h"

namespace {

// A row is taken in stretches, each with a largest number and exponentials of its own: a stretch stays in the first-level
// cache, threads share the row as they shared its computation, and the result does not depend on how many they are.
constexpr int64_t stretch = 4096;
constexpr float nothing = -INFINITY;

struct Stretch {
  float top;  // the largest number; not a number where one of them was none
  float sum;  // of exp((x - top) * sharpness)
};

// One stretch; the exponentials of x * sharpness, against the largest one's, go to `out` if there is one.
template <bool summed, typename T>
Stretch look(const T* row, int64_t n, float sharpness, float* out) {
  // Four by four side by side: no maximum or sum waits for the one before. The rest is copied, and filled up with -inf.
  const int64_t full = n / 64 * 64;
  float rest[64], *end = rest;
  std::fill(rest, rest + 64, nothing);
  for (int64_t i = full; i < n; ++i) *end++ = value_of(row[i]);
  f16v tops[4];
  Strange strange[4];
  for (int u = 0; u < 4; ++u) tops[u] = load16(rest + 16 * u), strange[u].see(tops[u]);
  for (int64_t i = 0; i < full; i += 64)
    UNROLL for (int u = 0; u < 4; ++u) {
      f16v x = load16(row + i + 16 * u);
      strange[u].see(x);
      tops[u] = larger(x, tops[u]);
    }
  float all[16];
  store16(all, larger(larger(tops[0], tops[1]), larger(tops[2], tops[3])));
  const float highest = *std::max_element(all, all + 16);
  const bool bad = strange[0].found() || strange[1].found() || strange[2].found() || strange[3].found();
  if (bad || highest == INFINITY) return {NAN, 0};
  if (highest == nothing) {
    if (out) std::memset(out, 0, 4 * n);
    return {nothing, 0};
  }
  if (!summed) return {highest, 0};
  f16v sums[4] = {};
  const float factor = sharpness * log2_e;
  auto add = [&](const auto* from, float* to) {
    UNROLL for (int u = 0; u < 4; ++u) {
      f16v e = power16((load16(from + 16 * u) - highest) * factor);
      sums[u] += e;
      if (to) store16(to + 16 * u, e);
    }
  };
  for (int64_t i = 0; i < full; i += 64) add(row + i, out ? out + i : nullptr);
  add(rest, rest);
  if (out) std::copy(rest, end, out + full);
  return {highest, total((sums[0] + sums[1]) + (sums[2] + sums[3]))};
}

// All stretches of a row, and as the last one what they are together. Its top is not a number where a row has none.
template <bool summed = true, typename T>
std::vector<Stretch> look_all(const T* row, int64_t n, float sharpness, float* out) {
  int64_t count = (n + stretch - 1) / stretch;
  std::vector<Stretch> all(count + 1);
  parallel_for(0, count, summed ? 4 : 16, [&](int64_t begin, int64_t end) {
    for (int64_t s = begin; s < end; ++s)
      all[s] = look<summed>(row + s * stretch, std::min(stretch, n - s * stretch), sharpness, out ? out + s * stretch : nullptr);
  });
  Stretch& whole = all[count] = {nothing, 0};
  for (int64_t s = 0; s < count; ++s) {
    if (std::isnan(all[s].top)) return whole.top = NAN, all;
    whole.top = std::max(whole.top, all[s].top);
  }
  if (whole.top == nothing) whole.top = NAN;
  for (int64_t s = 0; s < count; ++s)
    if (all[s].sum > 0) whole.sum += all[s].sum * std::exp((all[s].top - whole.top) * sharpness);
  return all;
}

// softmax(logits * sharpness) of one row; what look_all finds in it.
template <typename T>
Stretch softmax(const T* logits, int64_t n, float sharpness, float* out) {
  auto all = look_all(logits, n, sharpness, out);
  Stretch whole = all.back();
  if (std::isnan(whole.top)) return whole;
  parallel_for(0, (int64_t)all.size() - 1, 4, [&](int64_t begin, int64_t end) {
    for (int64_t s = begin; s < end; ++s) {
      float scale = std::exp((all[s].top - whole.top) * sharpness) / whole.sum;
      float *at = out + s * stretch, *stop = out + std::min(n, (s + 1) * stretch);
      for (; at < stop; ++at) *at *= scale;
    }
  });
  return whole;
}

// The `count` largest of a row, largest first and of equal ones the first one first; log of the sum of all exponentials, not a
// number where the row has none.
template <typename T>
double leading(const T* row, int64_t n, int64_t count, int64_t* tokens, float* logits) {
  Stretch whole = look_all(row, n, 1, nullptr).back();
  if (std::isnan(whole.top)) return NAN;
  int64_t found = 0;
  auto insert = [&](int64_t token, float x) {
    int64_t at = found < count ? found++ : count - 1;
    for (; at > 0 && logits[at - 1] < x; --at) logits[at] = logits[at - 1], tokens[at] = tokens[at - 1];
    logits[at] = x, tokens[at] = token;
  };
  int64_t i = 0;
  for (; i < count; ++i) insert(i, value_of(row[i]));
  for (; i + 16 <= n; i += 16) {
    f16v x = load16(row + i);
    i16v larger = (i16v)(x > f16v{} + logits[count - 1]);
    int64_t any[8];
    store(any, larger);
    if ((any[0] | any[1] | any[2] | any[3]) | (any[4] | any[5] | any[6] | any[7]))
      for (int t = 0; t < 16; ++t)
        if (x[t] > logits[count - 1]) insert(i + t, x[t]);
  }
  for (; i < n; ++i)
    if (value_of(row[i]) > logits[count - 1]) insert(i, value_of(row[i]));
  return whole.top + std::log(double(whole.sum));
}

// softmax(row)[token]; 1 or 0 where a number of the row is infinite.
template <typename T>
double chance(const T* row, int64_t n, int64_t token) {
  Stretch whole = look_all(row, n, 1, nullptr).back();
  if (std::isnan(whole.top)) return value_of(row[token]) == INFINITY;
  return std::exp(double(value_of(row[token])) - whole.top) / whole.sum;
}

// The first largest number of a row and its softmax probability, which is 1 / sum(exp(x - largest)): the token in the upper
// half, the bits of the probability in the lower one, where it is `summed`; -1 where the row has no such number.
template <bool summed = true, typename T>
int64_t best(const T* row, int64_t n) {
  auto all = look_all<summed>(row, n, 1, nullptr);
  Stretch whole = all.back();
  if (std::isnan(whole.top)) return -1;
  int64_t token = 0;
  while (all[token / stretch].top != whole.top) token += stretch;
  while (value_of(row[token]) != whole.top) ++token;
  float chance = 1.0f / whole.sum;
  uint32_t bits;
  std::memcpy(&bits, &chance, 4);
  return (token << 32) | bits;
}

// ---------------------------------------------------------------- what is left of a row

struct Candidate {
  int64_t token;
  float weight;
};

// The numbers that are not below `least`, in order of token.
template <typename T>
std::vector<Candidate> not_below(const T* row, int64_t n, float least) {
  std::vector<Candidate> found;
  for (int64_t i = 0; i < n; i += 16) {
    int64_t count = std::min<int64_t>(16, n - i);
    if (count == 16) {
      f16v x = load16(row + i);
      i16v hit = x >= least;
      int64_t any[8];
      store(any, hit);
      if (!((any[0] | any[1]) | (any[2] | any[3]) | (any[4] | any[5]) | (any[6] | any[7]))) continue;
    }
    for (int64_t t = i; t < i + count; ++t)
      if (float x = value_of(row[t]); x >= least) found.push_back({t, x});
  }
  return found;
}

// A number that at least `count` of the row reach, and few more than that: the count-th largest maximum of its columns.
template <typename T>
float bound_of(const T* row, int64_t n, int64_t count) {
  constexpr int64_t columns = 1024;
  std::vector<float> peaks;
  if (count > columns / 2 || n < 4 * columns) {
    peaks.resize(n);
    for (int64_t i = 0; i < n; ++i) peaks[i] = value_of(row[i]);
  } else {
    peaks.assign(columns, nothing);
    int64_t whole = n / columns * columns;
    for (int64_t i = 0; i < whole; i += columns)
      for (int64_t c = 0; c < columns; c += 16) {
        f16v x = load16(row + i + c), top = load16(peaks.data() + c);
        store16(peaks.data() + c, chosen(x > top, x, top));
      }
    for (int64_t i = whole; i < n; ++i) peaks[i - whole] = std::max(peaks[i - whole], value_of(row[i]));
  }
  std::nth_element(peaks.begin(), peaks.begin() + (count - 1), peaks.end(), std::greater<float>());
  return peaks[count - 1];
}

// Where the fewest largest weights that sum to `mass` end: those above `least` belong to them, and of those that equal it all
// but the first `spare`.
struct Border {
  float least = 0;
  int64_t spare = 0;
};

Border border_of(const std::vector<Candidate>& all, double mass) {
  // Bits of positive numbers are in their order. By the upper ones the weights fall into bins, and only one bin is sorted.
  constexpr int shift = 19;
  auto bin = [](float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits >> shift;
  };
  static thread_local std::vector<double> sums(1 << (32 - shift), 0.0);
  uint32_t low = UINT32_MAX, high = 0;
  for (const Candidate& c : all) {
    uint32_t b = bin(c.weight);
    sums[b] += c.weight;
    low = std::min(low, b), high = std::max(high, b);
  }
  uint32_t at = high;
  double above = 0;
  while (at > low && above + sums[at] < mass) above += sums[at--];
  std::fill(sums.begin() + low, sums.begin() + high + 1, 0.0);
  std::vector<float> mixed;
  for (const Candidate& c : all)
    if (bin(c.weight) == at) mixed.push_back(c.weight);
  std::sort(mixed.begin(), mixed.end(), std::greater<float>());
  size_t last = 0;
  while (last + 1 < mixed.size() && above + mixed[last] < mass) above += mixed[last++];
  Border border{mixed[last], 0};
  while (++last < mixed.size() && mixed[last] == border.least) ++border.spare;
  return border;
}

constexpr int64_t few = 1024;  // so many tokens are worth a list

// Into `out` the distribution of one row after temperature (> 0), top-k, top-p and min-p, in this order; 0 and 1 switch them off.
// Back comes how many tokens have a positive probability, which then stand in `support`, ascending; -1 where they may be too
// many for a list; -2 where the row has no number to choose.
template <typename T>
int64_t warp(const T* row, int64_t n, double temperature, int64_t top_k, double top_p, double min_p, float* out, int64_t* support) {
  // The largest number counts 1 however cold it is, and -inf counts 0 however hot.
  const float sharpness = std::clamp(1 / temperature, 1e-37, 1e30);
  std::vector<Candidate> left;
  Stretch whole;
  double total = 0;
  if (top_k > 0 && top_k < n) {
    whole = look_all<false>(row, n, sharpness, nullptr).back();
    if (std::isnan(whole.top)) return -2;
    left = not_below(row, n, bound_of(row, n, top_k));
    if ((int64_t)left.size() > top_k) {  // all that equal the k-th stay
      std::vector<float> values;
      for (const Candidate& c : left) values.push_back(c.weight);
      std::nth_element(values.begin(), values.begin() + (top_k - 1), values.end(), std::greater<float>());
      std::erase_if(left, [&](const Candidate& c) { return c.weight < values[top_k - 1]; });
    }
    for (Candidate& c : left) total += c.weight = std::exp((c.weight - whole.top) * sharpness);
  } else {
    whole = softmax(row, n, sharpness, out);
    if (std::isnan(whole.top)) return -2;
    if (top_p >= 1 && min_p <= 0) return -1;
    total = whole.sum;
    // Numbers below (1 - top_p) / n sum to less than 1 - top_p: top-p never reaches them (half of it, for rounding). Mostly it does not
    // reach much larger ones either: those are tried first.
    for (double spare = top_p < 1 ? 32 : 0.5;; spare = std::max(spare / 8, 0.5)) {
      left = not_below((const float*)out, n, spare * (top_p < 1 ? (1 - top_p) / n : min_p / whole.sum));
      double mass = 0;
      // Equal logits get equal weights, in whatever stretch they stand.
      for (size_t i = 0; i < left.size(); i += 16) {
        const size_t count = std::min<size_t>(16, left.size() - i);
        float some[16];
        std::fill(some, some + 16, nothing);
        for (size_t t = 0; t < count; ++t) some[t] = (value_of(row[left[i + t].token]) - whole.top) * (sharpness * log2_e);
        const f16v weights = power16(load16(some));
        mass += ::total(weights);
        store16(some, weights);
        for (size_t t = 0; t < count; ++t) left[i + t].weight = some[t];
      }
      if (spare == 0.5 || mass > (top_p + 1e-5) * total) break;
    }
  }
  Border border = top_p < 1 ? border_of(left, top_p * total) : Border{};
  float largest = 0;
  for (const Candidate& c : left) largest = std::max(largest, c.weight);
  const float least = std::max<float>(border.least, min_p * largest);
  std::erase_if(left, [&](const Candidate& c) { return c.weight < least || c.weight <= 0 || (c.weight == border.least && border.spare-- > 0); });
  total = 0;
  for (const Candidate& c : left) total += c.weight;
  std::memset(out, 0, 4 * n);
  for (const Candidate& c : left) out[c.token] = c.weight / total;
  if ((int64_t)left.size() > few) return -1;
  int64_t count = 0;
  for (const Candidate& c : left)
    if (out[c.token] > 0) support[count++] = c.token;
  return count;
}

constexpr int64_t short_row = 1024;  // so few weights are gone through one by one

// A token drawn in proportion to its weight, by a uniform number in [0, 1); never one of weight 0; -1 where all are. `support`: tokens
// outside of which all weights are 0; null: none is known.
inline int64_t draw(const float* weights, int64_t n, double uniform, const int64_t* support = nullptr, int64_t supported = 0) {
  if (support || n <= short_row) {
    const int64_t count = support ? supported : n;
    auto token_of = [&](int64_t i) { return support ? support[i] : i; };
    double all = 0, reached = 0;
    for (int64_t i = 0; i < count; ++i) all += weights[token_of(i)];
    if (!(all > 0)) return -1;
    int64_t last = -1;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t token = token_of(i);
      if (weights[token] <= 0) continue;
      last = token;
      if ((reached += weights[token]) > uniform * all) break;
    }
    return last;
  }
  constexpr int64_t block = 256;
  std::vector<double> sums((n + block - 1) / block);
  double all = 0;
  for (int64_t b = 0; b < (int64_t)sums.size(); ++b) {
    const float *at = weights + b * block, *end = weights + std::min(n, (b + 1) * block);
    f16v sum = {};
    for (; at + 16 <= end; at += 16) sum += load16(at);
    double rest = total(sum);
    for (; at < end; ++at) rest += *at;
    all += sums[b] = rest;
  }
  int64_t token = -1;
  if (!(all > 0)) return token;
  double goal = uniform * all;
  for (int64_t b = 0; b < (int64_t)sums.size(); ++b) {
    if (goal >= sums[b] && b + 1 < (int64_t)sums.size()) {
      goal -= sums[b];
      continue;
    }
    for (int64_t i = b * block; i < n; ++i) {
      if (weights[i] <= 0) continue;
      token = i;
      if ((goal -= weights[i]) < 0) return token;
    }
  }
  // Rounding put the goal behind all of them.
  for (int64_t i = n; token < 0 && i-- > 0;)
    if (weights[i] > 0) token = i;
  return token;
}

// max(p - q, 0), normalised, into `out`; its sum before that. Below `least` nothing is normalised.
inline float residual(const float* p, const float* q, int64_t n, float least, float* out) {
  const int64_t count = (n + stretch - 1) / stretch;
  std::vector<float> masses(count);
  parallel_for(0, count, 4, [&](int64_t begin, int64_t end) {
    for (int64_t s = begin; s < end; ++s) {
      const int64_t first = s * stretch, last = std::min(n, first + stretch), whole = first + (last - first) / 64 * 64;
      f16v sums[4] = {};
      for (int64_t i = first; i < whole; i += 64)
        UNROLL for (int u = 0; u < 4; ++u) {
          const f16v left = larger(load16(p + i + 16 * u) - load16(q + i + 16 * u), f16v{});
          sums[u] += left;
          store16(out + i + 16 * u, left);
        }
      masses[s] = total((sums[0] + sums[1]) + (sums[2] + sums[3]));
      for (int64_t i = whole; i < last; ++i) masses[s] += out[i] = std::max(p[i] - q[i], 0.0f);
    }
  });
  float mass = 0;
  for (float each : masses) mass += each;
  if (mass < least) return mass;
  const float scale = 1 / mass;
  parallel_for(0, count, 4, [=](int64_t begin, int64_t end) {
    float *at = out + begin * stretch, *const stop = out + std::min(n, end * stretch);
    for (; at < stop; ++at) *at *= scale;
  });
  return mass;
}

// A row without one token, normalised, into `out`; its sum before that. Where nothing is left nothing is normalised.
inline float without(const float* row, int64_t n, int64_t token, float* out) {
  std::memcpy(out, row, 4 * n);
  out[token] = 0;
  const int64_t whole = n / 64 * 64;
  f16v sums[4] = {};
  for (int64_t i = 0; i < whole; i += 64)
    UNROLL for (int u = 0; u < 4; ++u) sums[u] += load16(out + i + 16 * u);
  float mass = total((sums[0] + sums[1]) + (sums[2] + sums[3]));
  for (int64_t i = whole; i < n; ++i) mass += out[i];
  if (!(mass > 0)) return mass;
  const float scale = 1 / mass;
  for (int64_t i = 0; i < n; ++i) out[i] *= scale;
  return mass;
}

}  // namespace
