// Root mean square norms of rows, with a gate or none: one call for what takes torch a dozen.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "elementwise.h"
#include "torch.h"
#include "vector.h"

namespace {

// What models do differently, as bits of a number.
enum Form : int64_t {
  plus_one = 1,      // numbers are multiplied by 1 + weight
  rounded_early = 2,  // they are rounded to the rows' type before they are multiplied by the weight, and after that
  gate_first = 4,    // the gate, as SiLU, comes before the norm; else behind it
};

template <typename T>
void norm_row(const T* x, const float* weight, const T* gate, T* y, int64_t width, float eps, int64_t form) {
  auto number = [&](int64_t i, int64_t n) {
    const f16v v = first16(x + i, n);
    return gate && form & gate_first ? v * silu16(first16(gate + i, n)) : v;
  };
  f16v squares[2] = {};
  for (int64_t i = 0, n; i < width; i += 16) {
    n = std::min<int64_t>(16, width - i);
    const f16v v = number(i, n);
    squares[i / 16 % 2] += v * v;
  }
  const float scale = 1.0f / std::sqrt(total(squares[0] + squares[1]) / float(width) + eps);
  for (int64_t i = 0, n; i < width; i += 16) {
    n = std::min<int64_t>(16, width - i);
    f16v v = number(i, n) * scale, w = first16(weight + i, n);
    if (form & plus_one) w = w + 1.0f;
    v = form & rounded_early ? as_rounded(as_rounded(v, x) * w, x) : v * w;
    if (gate && !(form & gate_first)) v = v * silu16(first16(gate + i, n));
    put(y + i, v, n);
  }
}

template <typename T>
void norm_rows(const T* x, const float* weight, const T* gate, T* y, int64_t rows, int64_t width, float eps, int64_t form) {
  parallel_for(0, rows, std::max<int64_t>(1, 32768 / std::max<int64_t>(1, width)), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      norm_row(x + r * width, weight, gate ? gate + r * width : nullptr, y + r * width, width, eps, form);
  });
}

}  // namespace
