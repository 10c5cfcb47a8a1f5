// What stands between two products of a layer: gated activations and rotary embeddings, each one pass over its rows.
//
// Numbers are rounded where torch's own operators would write them to memory.

#pragma once

#include <algorithm>
#include <cstdint>

#include "torch.h"
#include "vector.h"

namespace {

inline f16v silu16(f16v x) {
  const f16v e = exp16((f16v)((u16v)x | 0x80000000u));  // of -|x|
  const f16v one = f16v{} + 1.0f;
  return x * chosen(x < f16v{}, e, one) / (one + e);
}

// tanh by exp; absolute error about 2e-7.
inline f16v tanh16(f16v x) {
  const f16v small = exp16(chosen(x > 0.0f, x, f16v{} - x) * -2.0f), y = (f16v{} + 1.0f - small) / (small + 1.0f);
  return chosen(x > 0.0f, y, f16v{} - y);
}

// x as Gaussian error linear unit, by tanh.
inline f16v gelu16(f16v x) { return x * 0.5f * (tanh16((x + x * x * x * 0.044715f) * 0.79788456080286536f) + 1.0f); }

// Rows of a tensor, the dimensions before the last one taken together.
struct Lines {
  const char* data;
  int64_t stride, count, width;  // numbers from one row to the next

  template <typename T>
  const T* at(int64_t row) const {
    return (const T*)data + row * stride;
  }
};

// y = act(gate) * up. `form`: 0 SiLU, 1 GELU by tanh.
template <typename T>
void gate_rows(Lines gate, Lines up, T* y, int64_t form) {
  const int64_t width = gate.width;
  parallel_for(0, gate.count, std::max<int64_t>(1, 16384 / std::max<int64_t>(1, width)), [&](int64_t begin, int64_t end) {
    auto rows = [&](auto act) {
      for (int64_t r = begin; r < end; ++r) {
        const T *g = gate.at<T>(r), *u = up.at<T>(r);
        for (int64_t i = 0; i < width; i += 16) {
          const int64_t n = std::min<int64_t>(16, width - i);
          put(y + r * width + i, as_rounded(act(first16(g + i, n)), g) * first16(u + i, n), n);
        }
      }
    };
    if (form == 1) rows([](f16v x) { return gelu16(x); });
    else rows([](f16v x) { return silu16(x); });
  });
}

// In a register of its own, so that no compiler makes one operation of a product and a sum.
inline f16v apart(f16v x) {
#if defined(__AVX512F__)
  asm("" : "+v"(x));
#elif defined(__AVX2__)
  asm("" : "+x"(x.lo), "+x"(x.hi));
#endif
  return x;
}

// Queries or keys turned by their positions: x * cos + (the halves of x exchanged, the second one negated) * sin.
//
// x: (heads, rows, dim) with these strides; cos and sin: (rows, width); numbers behind the width stay as they are. y: as x, without gaps.
template <typename T>
void rotate_rows(const T* x, int64_t head_stride, int64_t row_stride, const T* cos, const T* sin, T* y, int64_t heads, int64_t rows, int64_t dim,
                 int64_t width) {
  const int64_t half = width / 2;
  auto turned = [](f16v a, f16v by, f16v b, f16v across) {
    const T* type = nullptr;
    return apart(as_rounded(a * by, type)) + apart(as_rounded(b * across, type));
  };
  parallel_for(0, rows, std::max<int64_t>(1, 16384 / std::max<int64_t>(1, heads * dim)), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      for (int64_t h = 0; h < heads; ++h) {
        const T* from = x + h * head_stride + r * row_stride;
        T* to = y + (h * rows + r) * dim;
        const T *c = cos + r * width, *s = sin + r * width;
        for (int64_t d = 0; d < half; d += 16) {
          const int64_t n = std::min<int64_t>(16, half - d);
          const f16v low = first16(from + d, n), high = first16(from + half + d, n);
          put(to + d, turned(low, first16(c + d, n), f16v{} - high, first16(s + d, n)), n);
          put(to + half + d, turned(high, first16(c + half + d, n), low, first16(s + half + d, n)), n);
        }
        std::copy(from + width, from + dim, to + width);
      }
  });
}

}  // namespace
