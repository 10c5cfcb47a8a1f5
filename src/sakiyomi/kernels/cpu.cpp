// Two operators for packed rows on a CPU, compiled at first use (see build.py). Rows of logits are in row.h.
//
//   sakiyomi_cpu::linear  rows x prepacked weight, for the few rows of a decoding pass
//   sakiyomi_cpu::attend  cache write and tree attention of all requests of a pass
//
// Both compute every row alone: the order of additions of a row depends neither on how many rows the pass has nor on where the
// row stands in it. That is what `exact=True` rests on, and it costs nothing here, because these passes are bound by reading
// weights and keys, not by arithmetic.
//
// What a pass looks like (which request, which cache slot, which tree) is set by sk_begin() before the model runs, so compiled
// graphs hold only layer and weight numbers.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "row.h"
#include "vector.h"

namespace {

// ---------------------------------------------------------------- state set between passes

struct Weight {
  const void* data;    // bf16: [ceil(out/16)][in/2][16][2]; float: [ceil(out/16)][in][16]; int8: [ceil(out/16)][ceil(in/4)][16][4]
  const float* bias;   // or null
  const float* scale;  // int8: of each output channel; null for the others
  const int32_t* sum;  // int8: of each output channel's weights
  int64_t in, out;
  bool half;
  std::vector<int64_t> siblings;  // weights that read the same input in every pass, itself included; empty if there are none
};

struct Layer {
  char *keys, *values;  // [slots][heads][room][dim]
  int64_t heads, room, key_dim, value_dim;
  bool half;
};

struct Segment {
  // cache slot, first row in the pass, rows, pairs in the cache before the pass, whether it is a chunk of a prompt (a chain)
  int32_t slot, row, rows, length, prompt;
};

struct Model {
  std::vector<Weight> weights;
  std::vector<Layer> layers;
};

struct Pass {
  const Model* model = nullptr;
  int64_t size = -1;  // rows with the ones that only fill it up; -1 where there are none but those
  std::vector<Segment> segments;
  std::vector<int32_t> path_start;  // per row: where its path begins in `path`
  std::vector<int32_t> path;        // rows (counted from the segment's first) from the tree's root down to the row itself
  at::Tensor source;                // what siblings have been computed from together
  std::vector<std::pair<int64_t, at::Tensor>> waiting;  // results of theirs that nobody has asked for yet
  int64_t calls = 0;                // attention calls since sk_begin: proof that every layer came here
};

// One pass per thread: a graph that is compiled in the background runs once there, with an empty pass of its own.
thread_local Pass current;

// ---------------------------------------------------------------- linear

template <int R, int C>
inline void dot_float(const float* x, int64_t x_stride, const float* w, int64_t in, int64_t w_stride, f16v acc[R][C]) {
  for (int64_t k = 0; k < in; ++k) {
    f16v col[C];
    for (int c = 0; c < C; ++c) col[c] = load16(w + c * w_stride + k * 16);
    for (int r = 0; r < R; ++r) {
      float s = x[r * x_stride + k];
      for (int c = 0; c < C; ++c) acc[r][c] += col[c] * s;
    }
  }
}

template <int R, int C>
inline void dot_half(const bf16* x, int64_t x_stride, const bf16* w, int64_t in, int64_t w_stride, f16v acc[R][C]) {
#if defined(__AVX512BF16__)
  __m512 a[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) a[r][c] = (__m512)acc[r][c];
  for (int64_t k = 0; k < in / 2; ++k) {
    __m512i col[C];
    for (int c = 0; c < C; ++c) col[c] = _mm512_loadu_si512(w + c * w_stride + k * 32);
    for (int r = 0; r < R; ++r) {
      int32_t pair;
      std::memcpy(&pair, x + r * x_stride + 2 * k, 4);
      __m512i s = _mm512_set1_epi32(pair);
      for (int c = 0; c < C; ++c) a[r][c] = _mm512_dpbf16_ps(a[r][c], (__m512bh)col[c], (__m512bh)s);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) acc[r][c] = (f16v)a[r][c];
#else
  for (int64_t k = 0; k < in / 2; ++k) {
    f16v even[C], odd[C];
    for (int c = 0; c < C; ++c) {
      u16v both;
      std::memcpy(&both, w + c * w_stride + k * 32, 64);
      even[c] = (f16v)(both << 16);
      odd[c] = (f16v)(both & 0xffff0000u);
    }
    for (int r = 0; r < R; ++r) {
      float s = widen(x[r * x_stride + 2 * k]), t = widen(x[r * x_stride + 2 * k + 1]);
      for (int c = 0; c < C; ++c) acc[r][c] += even[c] * s;
      for (int c = 0; c < C; ++c) acc[r][c] += odd[c] * t;
    }
  }
#endif
}

inline void put(float* y, f16v v, int64_t n) { std::memcpy(y, &v, 4 * n); }
inline void put(bf16* y, f16v v, int64_t n) {
  h16v h = narrow(v);
  std::memcpy(y, &h, 2 * n);
}

template <typename T, int R, int C>
void block(const Weight& w, const T* x, T* y, int64_t first) {
  f16v acc[R][C];
  for (int c = 0; c < C; ++c) {
    f16v b = {};
    int64_t n = std::min<int64_t>(16, w.out - (first + 16 * c));
    if (w.bias && n > 0) std::memcpy(&b, w.bias + first + 16 * c, 4 * n);
    for (int r = 0; r < R; ++r) acc[r][c] = b;
  }
  const T* start = (const T*)w.data + first * w.in;
  if constexpr (sizeof(T) == 2)
    dot_half<R, C>(x, w.in, start, w.in, 16 * w.in, acc);
  else
    dot_float<R, C>(x, w.in, start, w.in, 16 * w.in, acc);
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) {
      int64_t n = std::min<int64_t>(16, w.out - (first + 16 * c));
      if (n > 0) put(y + r * w.out + first + 16 * c, acc[r][c], n);
    }
}

// Rows in 8 bits: what each is to be multiplied with, and its numbers + 128, which makes them unsigned.
struct Bytes {
  std::vector<uint8_t> data;  // [rows][stride]
  std::vector<float> scale;   // [rows]
  int64_t stride;
};

// 16 numbers, rounded to the nearest whole number, of equally near ones to the even one.
inline void put_bytes(uint8_t* to, f16v x) {
#if defined(__AVX512F__)
  __m128i y = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32((__m512)x));
  y = _mm_xor_si128(y, _mm_set1_epi8(-128));
  std::memcpy(to, &y, 16);
#else
  for (int t = 0; t < 16; ++t) to[t] = uint8_t(int32_t(std::nearbyint(x[t])) + 128);
#endif
}

template <typename T>
void to_bytes(const T* x, int64_t rows, int64_t in, Bytes& to) {
  const int64_t whole = in / 16 * 16;
  to.stride = (in + 3) / 4 * 4;
  to.data.assign(rows * to.stride, 128);
  to.scale.resize(rows);
  at::parallel_for(0, rows, 8, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const T* row = x + r * in;
      f16v tops = {};
      for (int64_t i = 0; i < whole; i += 16) {
        f16v y = load16(row + i);
        y = y < 0.0f ? -y : y;
        tops = y > tops ? y : tops;
      }
      float most = 0;
      for (int t = 0; t < 16; ++t) most = std::max(most, tops[t]);
      for (int64_t i = whole; i < in; ++i) most = std::max(most, std::fabs(value_of(row[i])));
      float inverse = most > 0 ? 127.0f / most : 0.0f;
      uint8_t* bytes = to.data.data() + r * to.stride;
      for (int64_t i = 0; i < whole; i += 16) put_bytes(bytes + i, load16(row + i) * inverse);
      for (int64_t i = whole; i < in; ++i) bytes[i] = uint8_t(int32_t(std::nearbyint(value_of(row[i]) * inverse)) + 128);
      to.scale[r] = most / 127.0f;
    }
  });
}

// Sums of products of bytes are whole numbers: exact, in any order.
template <int R, int C>
inline void dot_bytes(const uint8_t* x, int64_t x_stride, const int8_t* w, int64_t w_stride, i16v acc[R][C]) {
  for (int64_t k = 0; k < x_stride; k += 4) {
#if defined(__AVX512VNNI__)
    __m512i col[C];
    for (int c = 0; c < C; ++c) col[c] = _mm512_loadu_si512(w + c * w_stride + k * 16);
    for (int r = 0; r < R; ++r) {
      int32_t four;
      std::memcpy(&four, x + r * x_stride + k, 4);
      __m512i s = _mm512_set1_epi32(four);
      for (int c = 0; c < C; ++c) acc[r][c] = (i16v)_mm512_dpbusd_epi32((__m512i)acc[r][c], s, col[c]);
    }
#else
    for (int c = 0; c < C; ++c)
      for (int j = 0; j < 4; ++j) {
        i16v col;
        for (int t = 0; t < 16; ++t) col[t] = w[c * w_stride + k * 16 + t * 4 + j];
        for (int r = 0; r < R; ++r) acc[r][c] += col * int32_t(x[r * x_stride + k + j]);
      }
#endif
  }
}

template <typename T, int R, int C>
void block_of_bytes(const Weight& w, const Bytes& x, int64_t row, T* y, int64_t first) {
  i16v acc[R][C] = {};
  dot_bytes<R, C>(x.data.data() + row * x.stride, x.stride, (const int8_t*)w.data + first * x.stride, 16 * x.stride, acc);
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) {
      int64_t at = first + 16 * c, n = std::min<int64_t>(16, w.out - at);
      if (n <= 0) continue;
      f16v scale = {}, shift = {}, sum;
      i16v sums = {};
      std::memcpy(&scale, w.scale + at, 4 * n);
      std::memcpy(&sums, w.sum + at, 4 * n);
      if (w.bias) std::memcpy(&shift, w.bias + at, 4 * n);
      sum = __builtin_convertvector(acc[r][c] - 128 * sums, f16v);
      put(y + (row + r) * w.out + at, sum * (scale * x.scale[row + r]) + shift, n);
    }
}

template <typename T, int C>
void rows_of_bytes(const Weight& w, const Bytes& x, T* y, int64_t rows, int64_t first) {
  int64_t r = 0;
  for (; r + 6 <= rows; r += 6) block_of_bytes<T, 6, C>(w, x, r, y, first);
  switch (rows - r) {
    case 5: return block_of_bytes<T, 5, C>(w, x, r, y, first);
    case 4: return block_of_bytes<T, 4, C>(w, x, r, y, first);
    case 3: return block_of_bytes<T, 3, C>(w, x, r, y, first);
    case 2: return block_of_bytes<T, 2, C>(w, x, r, y, first);
    case 1: return block_of_bytes<T, 1, C>(w, x, r, y, first);
  }
}

template <typename T, int C>
void rows_of_block(const Weight& w, const T* x, T* y, int64_t rows, int64_t first) {
  int64_t r = 0;
  for (; r + 6 <= rows; r += 6) block<T, 6, C>(w, x + r * w.in, y + r * w.out, first);
  const T* xr = x + r * w.in;
  T* yr = y + r * w.out;
  switch (rows - r) {
    case 5: block<T, 5, C>(w, xr, yr, first); break;
    case 4: block<T, 4, C>(w, xr, yr, first); break;
    case 3: block<T, 3, C>(w, xr, yr, first); break;
    case 2: block<T, 2, C>(w, xr, yr, first); break;
    case 1: block<T, 1, C>(w, xr, yr, first); break;
  }
}

// Several layers on the same rows: their output channels are shared out among the threads as if they were one layer's.
template <typename T>
void multiply(const std::vector<const Weight*>& weights, const T* x, const std::vector<at::Tensor>& outs, int64_t rows) {
  constexpr int64_t wide = 64;  // output channels of one task: four streams of weights
  std::vector<int64_t> ends;
  for (const Weight* w : weights) ends.push_back((ends.empty() ? 0 : ends.back()) + (w->out + wide - 1) / wide);
  static thread_local Bytes bytes;
  const Bytes* quantized = nullptr;
  for (const Weight* w : weights)
    if (w->scale && !quantized) to_bytes(x, rows, w->in, bytes), quantized = &bytes;
  // Below about 100k multiplications a second thread costs more than it brings.
  int64_t grain = std::max<int64_t>(1, 100000 / std::max<int64_t>(1, wide * weights[0]->in * rows));
  at::parallel_for(0, ends.back(), grain, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin, i = 0; t < end; ++t) {
      while (t >= ends[i]) ++i;
      const Weight& w = *weights[i];
      T* y = (T*)outs[i].mutable_data_ptr();
      int64_t first = (t - (i ? ends[i - 1] : 0)) * wide, columns = (w.out - first + 15) / 16;
      if (w.scale && columns >= 4)
        rows_of_bytes<T, 4>(w, *quantized, y, rows, first);
      else if (w.scale)
        for (int64_t c = 0; c < columns; ++c) rows_of_bytes<T, 1>(w, *quantized, y, rows, first + 16 * c);
      else if (columns >= 4)
        rows_of_block<T, 4>(w, x, y, rows, first);
      else
        for (int64_t c = 0; c < columns; ++c) rows_of_block<T, 1>(w, x, y, rows, first + 16 * c);
    }
  });
}

at::Tensor linear(const at::Tensor& input, int64_t index, int64_t out) {
  Pass& pass = current;
  const Model* model = pass.model;
  TORCH_CHECK(model && index < (int64_t)model->weights.size(), "sakiyomi_cpu::linear called outside a pass");
  const Weight& w = model->weights[index];
  at::Tensor x = input.contiguous();
  TORCH_CHECK(x.size(-1) == w.in && out == w.out, "sakiyomi_cpu::linear: shapes differ from the packed weight");
  TORCH_CHECK(x.scalar_type() == (w.half ? at::kBFloat16 : at::kFloat), "sakiyomi_cpu::linear: wrong dtype");
  if (pass.source.defined() && pass.source.const_data_ptr() == x.const_data_ptr() && pass.source.sizes() == x.sizes())
    for (size_t i = 0; i < pass.waiting.size(); ++i)
      if (pass.waiting[i].first == index) {
        at::Tensor y = std::move(pass.waiting[i].second);
        pass.waiting.erase(pass.waiting.begin() + i);
        if (pass.waiting.empty()) pass.source = at::Tensor();
        return y;
      }
  // Rows that only fill the pass up to its size are not computed: a graph of 64 rows costs what its 40 real ones cost.
  // Where a layer does not get the pass as it came, (1, N, in), which of its rows are real is not known (experts).
  int64_t all = x.numel() / w.in, rows = all;
  if (all == pass.size && x.dim() == 3 && x.size(0) == 1) rows = (int64_t)pass.path_start.size() - 1;
  // A copy of an input that is not contiguous is another one for each sibling.
  bool alone = w.siblings.empty() || !input.is_contiguous();
  std::vector<int64_t> group = alone ? std::vector<int64_t>{index} : w.siblings;
  std::vector<const Weight*> weights;
  std::vector<at::Tensor> outs;
  at::Tensor mine;
  pass.waiting.clear();
  for (int64_t i : group) {
    const Weight& each = model->weights[i];
    auto shape = x.sizes().vec();
    shape.back() = each.out;
    at::Tensor y = at::empty(shape, x.options());
    int64_t line = each.out * y.element_size();
    if (rows < all) std::memset((char*)y.mutable_data_ptr() + rows * line, 0, (all - rows) * line);
    weights.push_back(&each), outs.push_back(y);
    if (i == index)
      mine = y;
    else
      pass.waiting.emplace_back(i, y);
  }
  // Held, so that no other tensor can come to lie where this one does.
  pass.source = pass.waiting.empty() ? at::Tensor() : x;
  if (w.half)
    multiply<bf16>(weights, (const bf16*)x.const_data_ptr(), outs, rows);
  else
    multiply<float>(weights, (const float*)x.const_data_ptr(), outs, rows);
  return mine;
}

// ---------------------------------------------------------------- attention

struct View {  // [1, heads, rows, dim] with any strides but the last
  const char* data;
  int64_t head, row;
};

// Numbers of one thread, kept between calls.
struct Scratch {
  std::vector<float> q, scores, y, weight, own, block;
  std::vector<int64_t> begin;
};

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define SAKIYOMI_SHUFFLE
#endif
#endif

// 16 lines of 16 numbers change places with their columns.
#if defined(SAKIYOMI_SHUFFLE)
// What stands in lines without and in columns with this bit is exchanged with its mirror image.
template <int bit, int... t>
inline void exchange(f16v* m, std::integer_sequence<int, t...>) {
  for (int r = 0; r < 16; ++r) {
    if (r & bit) continue;
    f16v a = m[r], b = m[r + bit];
    m[r] = __builtin_shufflevector(a, b, (t & bit ? t - bit + 16 : t)...);
    m[r + bit] = __builtin_shufflevector(a, b, (t & bit ? t + 16 : t + bit)...);
  }
}

inline void transpose(f16v* m) {
  constexpr auto lanes = std::make_integer_sequence<int, 16>();
  exchange<8>(m, lanes), exchange<4>(m, lanes), exchange<2>(m, lanes), exchange<1>(m, lanes);
}
#else
inline void transpose(f16v* m) {
  for (int r = 0; r < 16; ++r)
    for (int t = 0; t < r; ++t) std::swap(((float*)m)[16 * r + t], ((float*)m)[16 * t + r]);
}
#endif

// 16 keys, column by column: to[d * 16 + t] = from[t][d]. Missing keys are zero.
template <typename T>
void turn(const T* const* from, int64_t count, int64_t dim, float* to) {
  int64_t d = 0;
  for (; d + 16 <= dim; d += 16) {
    f16v m[16];
    for (int64_t t = 0; t < 16; ++t) m[t] = t < count ? load16(from[t] + d) : f16v{};
    transpose(m);
    for (int i = 0; i < 16; ++i) store16(to + (d + i) * 16, m[i]);
  }
  for (; d < dim; ++d)
    for (int64_t t = 0; t < 16; ++t) to[d * 16 + t] = t < count ? value_of(from[t][d]) : 0.0f;
}

// Scores of R rows against 16 turned keys. Each is a sum over d in order, so it is the same number whichever keys or rows
// stand beside it: a key that was a node of a tree in one pass and lies in the cache in the next has one score.
template <int R>
void score(const float* q, int64_t dim, const float* turned, float* to, int64_t stride) {
  f16v sum[R];
  for (int r = 0; r < R; ++r) sum[r] = f16v{};
  for (int64_t d = 0; d < dim; ++d) {
    f16v k = load16(turned + d * 16);
    for (int r = 0; r < R; ++r) sum[r] += k * q[r * dim + d];
  }
  for (int r = 0; r < R; ++r) store16(to + r * stride, sum[r]);
}

void score_rows(const float* q, int64_t rows, int64_t dim, const float* turned, float* to, int64_t stride) {
  int64_t r = 0;
  for (; r + 8 <= rows; r += 8) score<8>(q + r * dim, dim, turned, to + r * stride, stride);
  q += r * dim, to += r * stride;
  switch (rows - r) {
    case 7: return score<7>(q, dim, turned, to, stride);
    case 6: return score<6>(q, dim, turned, to, stride);
    case 5: return score<5>(q, dim, turned, to, stride);
    case 4: return score<4>(q, dim, turned, to, stride);
    case 3: return score<3>(q, dim, turned, to, stride);
    case 2: return score<2>(q, dim, turned, to, stride);
    case 1: return score<1>(q, dim, turned, to, stride);
  }
}

// y += p[t] * values[t] over keys in order, 16 * C numbers of the head at once and R rows at once. Keys before a row's
// window have p = 0 and add nothing.
template <typename T, int R, int C>
void add_values(float* y, int64_t y_stride, const float* p, int64_t p_stride, const T* values, int64_t count, int64_t dim) {
  f16v sum[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) sum[r][c] = load16(y + r * y_stride + 16 * c);
  for (int64_t t = 0; t < count; ++t) {
    f16v v[C];
    for (int c = 0; c < C; ++c) v[c] = load16(values + t * dim + 16 * c);
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < C; ++c) sum[r][c] += v[c] * p[r * p_stride + t];
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) store16(y + r * y_stride + 16 * c, sum[r][c]);
}

template <typename T, int R>
void add_values_rows(float* y, const float* p, int64_t p_stride, const T* values, int64_t count, int64_t dim, int64_t padded) {
  int64_t d = 0;
  for (; d + 64 <= dim; d += 64) add_values<T, R, 4>(y + d, padded, p, p_stride, values + d, count, dim);
  for (; d + 16 <= dim; d += 16) add_values<T, R, 1>(y + d, padded, p, p_stride, values + d, count, dim);
  for (; d < dim; ++d)
    for (int r = 0; r < R; ++r) {
      float sum = y[r * padded + d];
      for (int64_t t = 0; t < count; ++t) sum = std::fma(value_of(values[t * dim + d]), p[r * p_stride + t], sum);
      y[r * padded + d] = sum;
    }
}

// One request, one key head: all its rows and the query heads of its group.
template <typename T>
void attend_group(const Pass& pass, const Layer& layer, const Segment& seg, int64_t head, int64_t group, View q, View k, View v, T* out,
                  int64_t heads, float scaling, float softcap, int64_t window) {
  static thread_local Scratch s;
  const int64_t kd = layer.key_dim, vd = layer.value_dim, rows = seg.rows * group, length = seg.length;
  const int64_t padded = (vd + 15) / 16 * 16;
  const int64_t stride = (length + seg.rows + 47) / 16 * 16, own_stride = (seg.rows + 15) / 16 * 16;
  T* keys = (T*)layer.keys + (seg.slot * layer.heads + head) * layer.room * kd;
  T* values = (T*)layer.values + (seg.slot * layer.heads + head) * layer.room * vd;
  for (int64_t i = 0; i < seg.rows; ++i) {
    std::memcpy(keys + (length + i) * kd, (const T*)k.data + head * k.head + (seg.row + i) * k.row, kd * sizeof(T));
    std::memcpy(values + (length + i) * vd, (const T*)v.data + head * v.head + (seg.row + i) * v.row, vd * sizeof(T));
  }
  s.q.resize(rows * kd);
  s.scores.resize(rows * stride);
  s.own.resize(rows * own_stride);
  s.y.assign(rows * padded, 0.0f);
  s.block.resize(kd * 16);
  s.weight.resize(rows);
  s.begin.resize(rows);
  for (int64_t r = 0; r < rows; ++r) {
    const T* from = (const T*)q.data + (head * group + r % group) * q.head + (seg.row + r / group) * q.row;
    for (int64_t d = 0; d < kd; ++d) s.q[r * kd + d] = scaling * value_of(from[d]);
  }
  auto score_columns = [&](int64_t first, int64_t last, float* to, int64_t to_stride) {
    const T* sixteen[16];
    for (int64_t j = first; j < last; j += 16) {
      int64_t count = std::min<int64_t>(16, last - j);
      for (int64_t t = 0; t < count; ++t) sixteen[t] = keys + (j + t) * kd;
      turn(sixteen, count, kd, s.block.data());
      score_rows(s.q.data(), rows, kd, s.block.data(), to + (j - first), to_stride);
    }
  };
  score_columns(0, length, s.scores.data(), stride);
  score_columns(length, length + seg.rows, s.own.data(), own_stride);
  for (int64_t r = 0; r < rows; ++r) {
    const int32_t* start = pass.path_start.data() + seg.row + r / group;
    const int32_t* own = pass.path.data() + start[0];
    int64_t depth = start[1] - start[0], end = length + depth;
    float* score = s.scores.data() + r * stride;
    for (int64_t t = 0; t < depth; ++t) score[length + t] = s.own[r * own_stride + own[t]];
    int64_t begin = window > 0 ? std::max<int64_t>(0, end - window) : 0;  // the window counts positions, not columns
    if (softcap > 0)
      for (int64_t t = begin; t < end; ++t) score[t] = softcap * std::tanh(score[t] / softcap);
    for (int64_t t = begin / 16 * 16; t < begin; ++t) score[t] = -INFINITY;
    for (int64_t t = end; t < (end + 15) / 16 * 16; ++t) score[t] = -INFINITY;
    f16v top = f16v{} - INFINITY;
    for (int64_t t = begin / 16 * 16; t < end; t += 16) {
      f16v x = load16(score + t);
      top = x > top ? x : top;
    }
    float highest = top[0];
    for (int i = 1; i < 16; ++i) highest = std::max(highest, top[i]);
    f16v sum = {};
    for (int64_t t = begin / 16 * 16; t < end; t += 16) {
      f16v e = exp16(load16(score + t) - highest);
      sum += e;
      store16(score + t, e);
    }
    s.weight[r] = 1.0f / total(sum);
    s.begin[r] = begin;
  }
  constexpr int64_t tile = 64;  // values that stay in the first-level cache while all rows read them
  for (int64_t j = 0; j < length; j += tile) {
    int64_t stop = std::min(length, j + tile), r = 0;
    auto full = [&](int64_t row, int64_t n) {  // no row of these has a window that begins in or behind the tile
      for (int64_t i = row; i < row + n; ++i)
        if (s.begin[i] > j) return false;
      return true;
    };
    while (r < rows) {
      float* y = s.y.data() + r * padded;
      const float* p = s.scores.data() + r * stride + j;
      if (r + 4 <= rows && full(r, 4)) {
        add_values_rows<T, 4>(y, p, stride, values + j * vd, stop - j, vd, padded);
        r += 4;
      } else if (r + 3 == rows && full(r, 3)) {
        add_values_rows<T, 3>(y, p, stride, values + j * vd, stop - j, vd, padded);
        r += 3;
      } else if (r + 2 == rows && full(r, 2)) {
        add_values_rows<T, 2>(y, p, stride, values + j * vd, stop - j, vd, padded);
        r += 2;
      } else {
        int64_t from = std::max(j, s.begin[r]);
        if (from < stop) add_values_rows<T, 1>(y, p + (from - j), stride, values + from * vd, stop - from, vd, padded);
        r += 1;
      }
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    int64_t row = seg.row + r / group;
    const int32_t* own = pass.path.data() + pass.path_start[row];
    int64_t depth = pass.path_start[row + 1] - pass.path_start[row];
    float* y = s.y.data() + r * padded;
    for (int64_t t = std::max<int64_t>(0, s.begin[r] - length); t < depth; ++t)
      add_values_rows<T, 1>(y, s.scores.data() + r * stride + length + t, stride, values + (length + own[t]) * vd, 1, vd, padded);
    T* to = out + (row * heads + head * group + r % group) * vd;
    for (int64_t d = 0; d < vd; d += 16) put(to + d, load16(y + d) * s.weight[r], std::min<int64_t>(16, vd - d));
  }
}

// A chunk of a prompt has hundreds of rows: arithmetic bounds it, and torch's blocked kernel is the fast one. Its rows need not
// equal those of other row counts, since where the chunks of a prompt begin depends on the prompt alone.
void attend_prompt(const Layer& layer, const Segment& seg, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, at::Tensor& out,
                   double scaling, int64_t window) {
  auto options = q.options();
  int64_t heads = q.size(1), end = seg.length + seg.rows;
  auto store = [&](char* data, int64_t dim) {
    int64_t bytes = layer.room * dim * (layer.half ? 2 : 4);
    return at::from_blob(data + seg.slot * layer.heads * bytes, {layer.heads, layer.room, dim}, options);
  };
  at::Tensor keys = store(layer.keys, layer.key_dim), values = store(layer.values, layer.value_dim);
  keys.narrow(1, seg.length, seg.rows).copy_(k[0].narrow(1, seg.row, seg.rows));
  values.narrow(1, seg.length, seg.rows).copy_(v[0].narrow(1, seg.row, seg.rows));
  at::Tensor rows = q.narrow(2, seg.row, seg.rows);
  std::optional<at::Tensor> mask;
  bool causal = seg.length == 0 && window <= 0;
  if (!causal) {
    at::Tensor seen = at::ones({seg.rows, end}, options.dtype(at::kBool)).tril_(seg.length);
    if (window > 0) seen.logical_and_(at::ones({seg.rows, end}, options.dtype(at::kBool)).triu_(seg.length - window + 1));
    mask = seen;
  }
  at::Tensor y = at::scaled_dot_product_attention(rows, keys.narrow(1, 0, end).unsqueeze(0), values.narrow(1, 0, end).unsqueeze(0), mask, 0.0,
                                                  causal, scaling, heads != layer.heads);
  out.narrow(1, seg.row, seg.rows).copy_(y.transpose(1, 2));
}

at::Tensor attend(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, int64_t index, double scaling,
                  double softcap, int64_t window) {
  Pass& pass = current;
  if (pass.segments.empty())  // a graph that is run once for its compilation
    return at::zeros({1, query.size(2), query.size(1), value.size(3)}, query.options());
  TORCH_CHECK(pass.model && index < (int64_t)pass.model->layers.size(), "sakiyomi_cpu::attend called outside a pass");
  const Layer& layer = pass.model->layers[index];
  auto fit = [](const at::Tensor& x) { return x.stride(-1) == 1 ? x : x.contiguous(); };
  at::Tensor q = fit(query), k = fit(key), v = fit(value);
  TORCH_CHECK(q.scalar_type() == (layer.half ? at::kBFloat16 : at::kFloat), "sakiyomi_cpu::attend: wrong dtype");
  TORCH_CHECK(k.size(1) == layer.heads && q.size(3) == layer.key_dim && v.size(3) == layer.value_dim,
              "sakiyomi_cpu::attend: shapes differ from the cache");
  int64_t heads = q.size(1), rows = q.size(2), group = heads / layer.heads;
  at::Tensor out = at::empty({1, rows, heads, layer.value_dim}, q.options());
  auto view = [](const at::Tensor& x) { return View{(const char*)x.const_data_ptr(), x.stride(1), x.stride(2)}; };
  View qv = view(q), kv = view(k), vv = view(v);
  ++pass.calls;
  int64_t work = 0, used = 0;
  std::vector<const Segment*> short_segments;
  for (const Segment& s : pass.segments) {
    if (s.prompt && softcap <= 0)
      attend_prompt(layer, s, q, k, v, out, scaling, window);
    else
      short_segments.push_back(&s);
    work += s.rows * (s.length + s.rows) * layer.key_dim * group * 2;
    used += s.rows;
  }
  // Rows that only fill the pass up to its size must not carry garbage (a NaN there would be harmless but alarming).
  if (used < rows)
    std::memset((char*)out.mutable_data_ptr() + used * heads * layer.value_dim * q.element_size(), 0,
                (rows - used) * heads * layer.value_dim * q.element_size());
  int64_t tasks = (int64_t)short_segments.size() * layer.heads;
  int64_t grain = std::max<int64_t>(1, 20000 / std::max<int64_t>(1, work));
  at::parallel_for(0, tasks, grain, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const Segment& seg = *short_segments[t / layer.heads];
      int64_t head = t % layer.heads;
      if (layer.half)
        attend_group<bf16>(pass, layer, seg, head, group, qv, kv, vv, (bf16*)out.mutable_data_ptr(), heads, scaling, softcap, window);
      else
        attend_group<float>(pass, layer, seg, head, group, qv, kv, vv, (float*)out.mutable_data_ptr(), heads, scaling, softcap, window);
    }
  });
  return out;
}

}  // namespace

extern "C" {

int64_t sk_best(const void* row, int half, int64_t n) {
  return half ? best((const bf16*)row, n) : best((const float*)row, n);
}

double sk_chance(const void* row, int half, int64_t n, int64_t token) {
  return half ? chance((const bf16*)row, n, token) : chance((const float*)row, n, token);
}

int64_t sk_warp(const void* row, int half, int64_t n, double temperature, int64_t top_k, double top_p, double min_p, float* out,
                int64_t* support) {
  return half ? warp((const bf16*)row, n, temperature, top_k, top_p, min_p, out, support)
              : warp((const float*)row, n, temperature, top_k, top_p, min_p, out, support);
}

int64_t sk_draw(const float* weights, int64_t n, double uniform) { return draw(weights, n, uniform); }

float sk_residual(const float* p, const float* q, int64_t n, float least, float* out) { return residual(p, q, n, least, out); }

int64_t sk_model() { return (int64_t) new Model(); }

void sk_free(int64_t m) {
  if (current.model == (const Model*)m) current = Pass();
  delete (Model*)m;
}

// `half`: whether rows are bf16; `scale` and `sum` (see Weight) for weights of 8 bits, else null.
int64_t sk_weight(int64_t m, const void* data, const float* bias, const float* scale, const int32_t* sum, int64_t in, int64_t out,
                  int half) {
  auto& weights = ((Model*)m)->weights;
  weights.push_back({data, bias, scale, sum, in, out, half != 0, {}});
  return (int64_t)weights.size() - 1;
}

// Weights of one model that read the same input in every pass: whichever comes first has all computed.
void sk_siblings(int64_t m, int64_t count, const int64_t* indices) {
  auto& weights = ((Model*)m)->weights;
  for (int64_t i = 0; i < count; ++i) weights[indices[i]].siblings.assign(indices, indices + count);
}

void sk_layer(int64_t m, int64_t index, void* keys, void* values, int64_t heads, int64_t room, int64_t key_dim, int64_t value_dim,
              int half) {
  auto& layers = ((Model*)m)->layers;
  if ((int64_t)layers.size() <= index) layers.resize(index + 1);
  layers[index] = {(char*)keys, (char*)values, heads, room, key_dim, value_dim, half != 0};
}

// `table`: the segments, then the parent of every row within its segment, -1 for none.
void sk_begin(int64_t m, int64_t count, int64_t size, const int32_t* table) {
  Pass& pass = current;
  pass.size = count ? size : -1;
  pass.model = (const Model*)m;
  pass.segments.assign((const Segment*)table, (const Segment*)table + count);
  pass.path_start.assign(1, 0);
  pass.path.clear();
  const int32_t* parent = table + count * sizeof(Segment) / sizeof(int32_t);
  for (const Segment& s : pass.segments)
    for (int32_t i = 0; i < s.rows; ++i, ++parent) {
      if (*parent >= 0) {
        int32_t from = pass.path_start[s.row + *parent], to = pass.path_start[s.row + *parent + 1];
        for (int32_t at = from; at < to; ++at) pass.path.push_back(int32_t(pass.path[at]));
      }
      pass.path.push_back(i);
      pass.path_start.push_back((int32_t)pass.path.size());
    }
  pass.source = at::Tensor();
  pass.waiting.clear();
  pass.calls = 0;
}

int64_t sk_calls() { return current.calls; }
}

TORCH_LIBRARY(sakiyomi_cpu, m) {
  m.def("linear(Tensor x, int index, int out) -> Tensor");
  m.def("attend(Tensor q, Tensor k, Tensor v, int layer, float scaling, float softcap, int window) -> Tensor");
}

TORCH_LIBRARY_IMPL(sakiyomi_cpu, CPU, m) {
  m.impl("linear", &linear);
  m.impl("attend", &attend);
}
