// Tree attention of a few rows of one request: every row over the pairs in the cache and over its own path of the pass.

#pragma once

#include <algorithm>
#include <cmath>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "packed.h"
#include "tiles.h"
#include "vector.h"

namespace {

struct Layer {
  char *keys, *values;  // [slots][rows][dim], the rows of one head after those of another
  std::vector<int64_t> starts;  // first row of each head in a slot, and behind the last head the rows of a slot
  int64_t heads, key_dim, value_dim;
  bool half;
  // Added to scores by how many places the key lies before the row: [query heads][far], and the last one further back.
  const float* bias = nullptr;
  int64_t far = 0;
  // Of each query head: a score that takes part in its softmax and belongs to no key; what is added to a score for each position
  // of its key (ALiBi), in units, and rounded to bf16 before where it is coarse.
  const float *sinks = nullptr, *slopes = nullptr;
  float unit = 1.0f;
  bool coarse = false;

  float by_position(int64_t query, int64_t t) const {
    const float found = slopes[query] * t;
    return unit * (coarse ? widen(narrow(found)) : found);
  }
  // Pairs that a head has dropped or packed: [slots][dropped_stride], this layer's heads first. Columns of `keys` and `values` are
  // places less those.
  const int32_t* dropped = nullptr;
  int64_t dropped_stride = 0;
  // Columns before those, and how many there are of each head, as `dropped`.
  Packed packed;
  Leveled leveled;
  const int32_t* packed_count = nullptr;

  int64_t first_row(int64_t slot, int64_t head) const { return slot * starts[heads] + starts[head]; }
  int64_t gone(int64_t slot, int64_t head) const { return dropped ? dropped[slot * dropped_stride + head] : 0; }
  int64_t before(int64_t slot, int64_t head) const { return packed_count ? packed_count[slot * dropped_stride + head] : 0; }
};

struct Segment {
  // cache slot, first row in the pass, rows, pairs in the cache before the pass, whether it is a chunk of a prompt (a chain);
  // how many of those pairs, the last ones, are rows of the same tree
  int32_t slot, row, rows, length, prompt, done;
};

struct Paths {
  const int32_t* start;  // per row of the pass: where its path begins in `rows`, and behind the last row where that ends
  const int32_t* rows;   // rows (counted from the tree's first) from the tree's root down to the row itself
};

struct View {  // [1, heads, rows, dim] with any strides but the last
  const char* data;
  int64_t head, row;
};

// Scores are sums over lanes of 32 bits: one number, or two of bf16 where the processor multiplies those in pairs.
template <typename T>
struct Lane {
  using type = float;
  static constexpr int64_t numbers = 1;
};
#if defined(__AVX512BF16__)
template <>
struct Lane<bf16> {
  using type = int32_t;
  static constexpr int64_t numbers = 2;
};
#endif

inline f16v add_products(f16v sum, f16v column, float q) { return sum + column * q; }
#if defined(__AVX512BF16__)
inline f16v add_products(f16v sum, f16v column, int32_t q) {
  return (f16v)_mm512_dpbf16_ps((__m512)sum, (__m512bh)column, (__m512bh)_mm512_set1_epi32(q));
}
#endif

// The lane that begins at number d; zeros behind the last number.
template <typename T, typename L = typename Lane<T>::type>
inline L lane_at(const T* from, int64_t d, int64_t dim) {
  L lane = 0;
  if constexpr (std::is_same_v<L, int32_t>)
    std::memcpy(&lane, from + d, sizeof(T) * std::min<int64_t>(2, dim - d));
  else
    lane = value_of(from[d]);
  return lane;
}

// Memory of one thread, kept between calls.
template <typename T>
struct Scratch {
  std::vector<typename Lane<T>::type> q, block;
  std::vector<float> scores, y, weight, own, steps, tile, values;
  std::vector<bf16> narrow;
};

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define SAKIYOMI_SHUFFLE
#endif
#endif

// 16 lanes of 16 keys, from number d of each on: to[i * 16 + t] is lane i of key t.
#if defined(__AVX512F__)
// Four lanes from number d on.
inline __m128i four_lanes(const float* from, float) { return _mm_loadu_si128((const __m128i*)from); }
inline __m128i four_lanes(const bf16* from, int32_t) { return _mm_loadu_si128((const __m128i*)from); }
inline __m128i four_lanes(const bf16* from, float) { return _mm_slli_epi32(_mm_cvtepu16_epi32(_mm_loadl_epi64((const __m128i*)from)), 16); }

template <typename T, typename L>
inline void turn_16(const T* const* keys, int64_t d, L* to) {
  constexpr int64_t step = std::is_same_v<L, int32_t> ? 8 : 4;
  UNROLL for (int64_t q = 0; q < 4; ++q) {
    auto four = [&](int64_t t) { return four_lanes(keys[t] + d + step * q, L()); };
    __m512i x[4];  // of the keys g, 4 + g, 8 + g and 12 + g, put together as they are loaded
    UNROLL for (int64_t g = 0; g < 4; ++g) {
      x[g] = _mm512_castsi128_si512(four(g));
      x[g] = _mm512_mask_broadcast_i32x4(x[g], 0x00f0, four(4 + g));
      x[g] = _mm512_mask_broadcast_i32x4(x[g], 0x0f00, four(8 + g));
      x[g] = _mm512_mask_broadcast_i32x4(x[g], 0xf000, four(12 + g));
    }
    const __m512i a = _mm512_unpacklo_epi32(x[0], x[1]), b = _mm512_unpackhi_epi32(x[0], x[1]);
    const __m512i c = _mm512_unpacklo_epi32(x[2], x[3]), e = _mm512_unpackhi_epi32(x[2], x[3]);
    store(to + 64 * q, _mm512_unpacklo_epi64(a, c)), store(to + 64 * q + 16, _mm512_unpackhi_epi64(a, c));
    store(to + 64 * q + 32, _mm512_unpacklo_epi64(b, e)), store(to + 64 * q + 48, _mm512_unpackhi_epi64(b, e));
  }
}
#else
#if defined(SAKIYOMI_SHUFFLE) && defined(__AVX2__)
// 8 lines of 8 lanes change places with their columns.
template <int bit, int... t>
inline void exchange(f16v::Half* m, std::integer_sequence<int, t...>) {
  UNROLL for (int r = 0; r < 8; ++r) {
    if (r & bit) continue;
    f16v::Half a = m[r], b = m[r + bit];
    m[r] = __builtin_shufflevector(a, b, (t & bit ? t - bit + 8 : t)...);
    m[r + bit] = __builtin_shufflevector(a, b, (t & bit ? t + 8 : t + bit)...);
  }
}

inline void transpose(f16v* m) {
  constexpr auto lanes = std::make_integer_sequence<int, 8>();
  for (int half = 0; half < 2; ++half)
    for (int side = 0; side < 2; ++side) {
      f16v::Half part[8];
      UNROLL for (int r = 0; r < 8; ++r) part[r] = side ? m[8 * half + r].hi : m[8 * half + r].lo;
      exchange<4>(part, lanes), exchange<2>(part, lanes), exchange<1>(part, lanes);
      UNROLL for (int r = 0; r < 8; ++r) (side ? m[8 * half + r].hi : m[8 * half + r].lo) = part[r];
    }
  for (int r = 0; r < 8; ++r) std::swap(m[r].hi, m[r + 8].lo);
}
#else
inline void transpose(f16v* m) {
  for (int r = 0; r < 16; ++r)
    for (int t = 0; t < r; ++t) std::swap(((float*)m)[16 * r + t], ((float*)m)[16 * t + r]);
}
#endif

#if defined(__AVX2__)
// Numbers of bf16 change places before they are widened, two keys to a register. Of eight registers the first halves hold the keys
// 0 to 3 and 8 to 11, so that widened halves come in order.
inline void turn_16(const bf16* const* keys, int64_t d, float* to) {
  const __m256i zero = _mm256_setzero_si256();
  for (int64_t half = 0; half < 2; ++half) {
    __m256i a[8], b[8];
    UNROLL for (int64_t i = 0; i < 8; ++i) {
      const bf16 *first = keys[i + (i & 4)] + d + 8 * half, *second = keys[4 + i + (i & 4)] + d + 8 * half;
      a[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i*)first)), _mm_loadu_si128((const __m128i*)second), 1);
    }
    UNROLL for (int64_t i = 0; i < 8; i += 2) b[i] = _mm256_unpacklo_epi16(a[i], a[i + 1]), b[i + 1] = _mm256_unpackhi_epi16(a[i], a[i + 1]);
    UNROLL for (int64_t i = 0; i < 8; i += 4) {
      UNROLL for (int64_t j = 0; j < 2; ++j) {
        a[i + 2 * j] = _mm256_unpacklo_epi32(b[i + j], b[i + j + 2]);
        a[i + 2 * j + 1] = _mm256_unpackhi_epi32(b[i + j], b[i + j + 2]);
      }
    }
    UNROLL for (int64_t i = 0; i < 4; ++i) {
      const __m256i lines[2] = {_mm256_unpacklo_epi64(a[i], a[i + 4]), _mm256_unpackhi_epi64(a[i], a[i + 4])};
      UNROLL for (int64_t j = 0; j < 2; ++j) {
        float* line = to + 16 * (8 * half + 2 * i + j);
        _mm256_storeu_si256((__m256i*)line, _mm256_unpacklo_epi16(zero, lines[j]));
        _mm256_storeu_si256((__m256i*)(line + 8), _mm256_unpackhi_epi16(zero, lines[j]));
      }
    }
  }
}
#endif

template <typename T, typename L>
inline void turn_16(const T* const* keys, int64_t d, L* to) {
  f16v m[16];
  for (int64_t t = 0; t < 16; ++t) m[t] = load16(keys[t] + d);
  transpose(m);
  std::memcpy(to, m, sizeof(m));
}
#endif

// 16 keys, lane by lane: to[i * 16 + t] is lane i of key t. In place of missing keys stands the last one.
template <typename T, typename L = typename Lane<T>::type>
void turn(const T* keys, int64_t count, int64_t dim, L* to) {
  constexpr int64_t together = std::is_same_v<L, int32_t> ? 2 : 1, width = 16 * together;
  const T* all[16];
  for (int64_t t = 0; t < 16; ++t) all[t] = keys + std::min(t, count - 1) * dim;
  int64_t d = 0;
  for (; d + width <= dim; d += width, to += 256) turn_16(all, d, to);
  for (; d < dim; d += together, to += 16)
    for (int64_t t = 0; t < 16; ++t) to[t] = lane_at<T, L>(all[t], d, dim);
}

// Scores of R rows against 16 * C turned keys. Each is a sum over lanes in order, so it is the same number whichever keys or rows
// stand beside it: a key that was a node of a tree in one pass and lies in the cache in the next has one score.
template <int R, int C, typename L>
inline void score(const L* q, int64_t lanes, const L* turned, float* to, int64_t stride) {
  f16v sum[R][C];
  UNROLL for (int r = 0; r < R; ++r)
    UNROLL for (int c = 0; c < C; ++c) sum[r][c] = f16v{};
  for (int64_t i = 0; i < lanes; ++i) {
    f16v column[C];
    UNROLL for (int c = 0; c < C; ++c) column[c] = load<f16v>(turned + (c * lanes + i) * 16);
    UNROLL for (int r = 0; r < R; ++r)
      UNROLL for (int c = 0; c < C; ++c) sum[r][c] = add_products(sum[r][c], column[c], q[r * lanes + i]);
  }
  UNROLL for (int r = 0; r < R; ++r)
    UNROLL for (int c = 0; c < C; ++c) store16(to + r * stride + 16 * c, sum[r][c]);
}

// Keys that are turned at once: so many columns and `row_group` rows have as many sums as registers hold.
#if defined(__AVX512F__)
constexpr int64_t keys_at_once = 32;
#else
constexpr int64_t keys_at_once = 16;
#endif

constexpr int64_t columns_ahead = 128;  // keys and values are fetched so long before they are needed
// Of many short texts each is over before its own columns are fetched ahead. AMD's processors with AVX-512 read the columns of few rows in order
// first (32 requests of 64, 128, 512 columns on a Zen 5: .62, .65, .75 of the time); of the others those with AVX2 alone fetch the next text.
#if defined(BF16_PAIRS)
constexpr bool reads_columns = true, fetches_texts = false;
#elif defined(__AVX2__) && !defined(__AVX512F__)
constexpr bool reads_columns = false, fetches_texts = true;
#else
constexpr bool reads_columns = false, fetches_texts = false;
#endif
constexpr int64_t value_tile = 64;  // values that stay in the first-level cache while all rows read them

// y += p[t] * values[t] over keys in order, 16 * C numbers of the head at once and R rows at once. `near`: the values are in a near cache.
template <int R, int C, bool near, typename T>
inline void add_values(float* y, int64_t y_stride, const float* p, int64_t p_stride, const T* values, int64_t count, int64_t dim) {
  f16v sum[R][C];
  UNROLL for (int r = 0; r < R; ++r) {
    UNROLL for (int c = 0; c < C; ++c) sum[r][c] = load16(y + r * y_stride + 16 * c);
  }
  for (int64_t t = 0; t < count; ++t) {
    if constexpr (!near) fetch(values + (t + value_tile) * dim);
    f16v v[C];
    UNROLL for (int c = 0; c < C; ++c) v[c] = load16(values + t * dim + 16 * c);
    UNROLL for (int r = 0; r < R; ++r) {
      UNROLL for (int c = 0; c < C; ++c) sum[r][c] += v[c] * p[r * p_stride + t];
    }
  }
  UNROLL for (int r = 0; r < R; ++r) {
    UNROLL for (int c = 0; c < C; ++c) store16(y + r * y_stride + 16 * c, sum[r][c]);
  }
}

template <int R, bool near = false, typename T>
void add_values(float* y, int64_t y_stride, const float* p, int64_t p_stride, const T* values, int64_t count, int64_t dim) {
  int64_t d = 0;
  for (; d + 32 <= dim; d += 32) add_values<R, 2, near>(y + d, y_stride, p, p_stride, values + d, count, dim);
  for (; d + 16 <= dim; d += 16) add_values<R, 1, near>(y + d, y_stride, p, p_stride, values + d, count, dim);
  for (; d < dim; ++d)
    for (int r = 0; r < R; ++r) {
      float sum = y[r * y_stride + d];
      for (int64_t t = 0; t < count; ++t) sum = std::fma(value_of(values[t * dim + d]), p[r * p_stride + t], sum);
      y[r * y_stride + d] = sum;
    }
}

// The same of all rows; each value is widened once for all of them.
template <typename T>
void add_values(int64_t rows, float* y, int64_t y_stride, const float* p, int64_t p_stride, const T* values, int64_t count, int64_t dim,
                std::vector<float>& widened) {
  auto add = [&](auto from, auto near) {
    in_groups<row_group>(rows, [&](auto some, int64_t r) {
      add_values<some(), near()>(y + r * y_stride, y_stride, p + r * p_stride, p_stride, from, count, dim);
    });
  };
  if (std::is_same_v<T, float> || rows <= row_group) return add(values, std::false_type());
  const int64_t all = count * dim, whole = all / 16 * 16;
  widened.resize(value_tile * dim);
  for (int64_t i = 0; i < whole; i += 16) {
    if (i % 32 == 0) fetch(values + value_tile * dim + i);
    store16(widened.data() + i, load16(values + i));
  }
  for (int64_t i = whole; i < all; ++i) widened[i] = value_of(values[i]);
  add((const float*)widened.data(), std::true_type());
}

// The same for values of bf16 that the processor multiplies in pairs: those of columns 2n and 2n + 1, whichever pass they were written in.
//
// Two rows of 32 numbers are interleaved in quarters of 4, and so lie the numbers of y: see `in_order`.
constexpr int64_t pair_width = 32;
#if defined(BF16_PAIRS)
constexpr bool values_in_pairs = true;

// y += p[t] * first[t] + p[t + 1] * second[t] over `count` pairs, which lie so far apart; what comes so far behind is read later (0: nothing
// is). p: two weights each.
template <int R>
inline void add_pairs(float* y, int64_t y_stride, const int32_t* p, int64_t p_stride, const bf16* first, const bf16* second, int64_t apart, int64_t count,
                      int64_t dim, int64_t ahead) {
  for (int64_t d = 0; d < dim; d += pair_width, y += pair_width) {
    __m512 low[R], high[R];
    UNROLL for (int r = 0; r < R; ++r) low[r] = _mm512_loadu_ps(y + r * y_stride), high[r] = _mm512_loadu_ps(y + r * y_stride + 16);
    for (int64_t i = 0; i < count; ++i) {
      const __m512i a = _mm512_loadu_si512(first + i * apart + d), b = _mm512_loadu_si512(second + i * apart + d);
      if (ahead) fetch(first + i * apart + d + ahead), fetch(second + i * apart + d + ahead);
      const __m512bh left = (__m512bh)_mm512_unpacklo_epi16(a, b), right = (__m512bh)_mm512_unpackhi_epi16(a, b);
      UNROLL for (int r = 0; r < R; ++r) {
        const __m512bh both = (__m512bh)_mm512_set1_epi32(p[r * p_stride + i]);
        low[r] = _mm512_dpbf16_ps(low[r], left, both), high[r] = _mm512_dpbf16_ps(high[r], right, both);
      }
    }
    UNROLL for (int r = 0; r < R; ++r) _mm512_storeu_ps(y + r * y_stride, low[r]), _mm512_storeu_ps(y + r * y_stride + 16, high[r]);
  }
}

// 32 numbers of y as the values have them.
inline void in_order(float* y) {
  const __m512 low = _mm512_loadu_ps(y), high = _mm512_loadu_ps(y + 16);
  const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  _mm512_storeu_ps(y, _mm512_permutex2var_ps(low, first, high));
  _mm512_storeu_ps(y + 16, _mm512_permutex2var_ps(low, _mm512_add_epi32(first, _mm512_set1_epi32(8)), high));
}

// All rows' sums over a group of packed columns: `values` are theirs as numbers, (packed_group, dim), and `weights` the first row's weights of them.
inline void add_packed_in_pairs(int64_t rows, float* y, int64_t y_stride, const float* weights, int64_t stride, const float* values, bf16* room,
                                int64_t dim) {
  for (int64_t i = 0; i < packed_group * dim; i += 16) put(room + i, load16(values + i), 16);
  in_groups<row_group>(rows, [&](auto some, int64_t r) {
    add_pairs<some()>(y + r * y_stride, y_stride, (const int32_t*)(weights + r * stride), stride, room, room + dim, 2 * dim, packed_group / 2, dim, 0);
  });
}

// The same over the columns from `begin` on, up to `length` those in the cache, then each row's own path.
inline void add_values_in_pairs(const Paths& paths, const Segment& seg, int64_t group, float* y, int64_t y_stride, const float* weights,
                                int64_t stride, const bf16* values, int64_t begin, int64_t length, int64_t dim, bool alone) {
  const int64_t rows = seg.rows * group, whole = length / 2 * 2;
  for (int64_t j = begin; j < whole; j += value_tile) {
    const int64_t count = std::min(whole, j + value_tile) - j;
    const bool few = rows <= row_group;
    if (few) read_through(values + j * dim, values + (j + count) * dim);
    in_groups<row_group>(rows, [&](auto some, int64_t r) {
      add_pairs<some()>(y + r * y_stride, y_stride, (const int32_t*)(weights + r * stride) + j / 2, stride, values + j * dim, values + (j + 1) * dim,
                        2 * dim, count / 2, dim, !few && !r && j + columns_ahead < whole ? columns_ahead * dim : 0);
    });
  }
  for (int64_t r = 0; r < rows; ++r) {
    const int32_t* start = paths.start + seg.row + r / group;
    const int32_t* own = paths.rows + start[0];
    const int64_t end = length + (alone ? 0 : start[1] - start[0]);
    auto at = [&](int64_t t) { return values + (t < length ? t : length + own[t - length]) * dim; };
    for (int64_t t = whole; t < end; t += 2)  // one that is left over has a weight of 0 beside it
      add_pairs<1>(y + r * y_stride, y_stride, (const int32_t*)(weights + r * stride) + t / 2, 0, at(t), at(std::min(t + 1, end - 1)), 0, 1, dim, 0);
    for (int64_t d = 0; d < dim; d += pair_width) in_order(y + r * y_stride + d);
  }
}
#else
constexpr bool values_in_pairs = false;
inline void add_packed_in_pairs(int64_t, float*, int64_t, const float*, int64_t, const float*, bf16*, int64_t) {}
inline void add_values_in_pairs(const Paths&, const Segment&, int64_t, float*, int64_t, const float*, int64_t, const bf16*, int64_t, int64_t, int64_t,
                                bool) {}
#endif

// Scores [0, end) to exp(scaling * (score - highest)), the ones before `begin` to 0; their sum. Memory up to the next multiple of 16
// is used. `sink`: a score more, of no column, as it is after scaling by 1. Weights are written as To, from where the scores begin.
template <typename To>
inline float soften(float* score, int64_t begin, int64_t end, float scaling, float softcap, float sink = -INFINITY) {
  const int64_t first = begin / 16 * 16;
  if (softcap > 0) {
    for (int64_t t = begin; t < end; ++t) score[t] = softcap * std::tanh(score[t] * scaling / softcap);
    scaling = 1.0f;
  }
  std::fill(score + first, score + begin, -INFINITY);
  std::fill(score + end, score + (end + 15) / 16 * 16, -INFINITY);
  f16v top = f16v{} - INFINITY;
  for (int64_t t = first; t < end; t += 16) top = larger(load16(score + t), top);
  const float highest = std::max(highest_of(top), sink);
  To* weights = (To*)score;  // each lies before the scores that are not read yet
  std::fill(weights, weights + first, To{});
  f16v sum = {};
  for (int64_t t = first; t < end; t += 16) {
    f16v e = power16((load16(score + t) - highest) * (scaling * log2_e));
    sum += e;
    put_weights(weights + t, e);
  }
  return sink > -INFINITY ? total(sum) + std::exp(sink - highest) : total(sum);
}

// A segment's keys and values of one head into the cache.
template <typename T>
void write_pairs(const Layer& layer, const Segment& seg, int64_t head, View k, View v) {
  const int64_t kd = layer.key_dim, vd = layer.value_dim, first = layer.first_row(seg.slot, head) + seg.length - layer.gone(seg.slot, head);
  for (int64_t i = 0; i < seg.rows; ++i) {
    std::memcpy((T*)layer.keys + (first + i) * kd, (const T*)k.data + head * k.head + (seg.row + i) * k.row, kd * sizeof(T));
    std::memcpy((T*)layer.values + (first + i) * vd, (const T*)v.data + head * v.head + (seg.row + i) * v.row, vd * sizeof(T));
  }
}

// Have the second-level cache read what attend_group reads first.
template <typename T>
void fetch_pairs(const Layer& layer, const Segment& seg, int64_t head) {
  if (layer.before(seg.slot, head)) return;  // packed columns come first
  const int64_t count = std::min(columns_ahead, seg.length - layer.gone(seg.slot, head)), first = layer.first_row(seg.slot, head);
  auto all = [&](const void* numbers, int64_t dim) {
    const char* from = (const char*)((const T*)numbers + first * dim);
    for (const char* end = from + count * dim * sizeof(T); from < end; from += 64) fetch(from);
  };
  all(layer.keys, layer.key_dim), all(layer.values, layer.value_dim);
}

// One request, one key head: all its rows and the query heads of its group. A `source` is not the request's text: all rows see all
// of its pairs, and have none of their own.
template <typename T, bool source = false>
void attend_group(const Paths& paths, const Layer& layer, const Segment& seg, int64_t head, int64_t group, View q, View k, View v, T* out,
                  int64_t heads, float scaling, float softcap, int64_t window) {
  using L = typename Lane<T>::type;
  static thread_local Scratch<T> s;
  const int64_t kd = layer.key_dim, vd = layer.value_dim, rows = seg.rows * group;
  const int64_t packed = source ? 0 : layer.before(seg.slot, head);  // the first of them
  const int64_t held = seg.length + packed - (source ? 0 : layer.gone(seg.slot, head));  // columns before the pass
  const int64_t length = held - seg.done, tree = source ? 0 : seg.done + seg.rows;  // pairs that all rows see, rows of the tree
  const int64_t lanes = (kd + Lane<T>::numbers - 1) / Lane<T>::numbers, padded = (vd + 15) / 16 * 16;
  const int64_t stride = (length + tree + 47) / 16 * 16, own_stride = (tree + 15) / 16 * 16;
  // As if the packed columns lay before the others.
  T* keys = (T*)layer.keys + (layer.first_row(seg.slot, head) - packed) * kd;
  T* values = (T*)layer.values + (layer.first_row(seg.slot, head) - packed) * vd;
  if constexpr (!source) write_pairs<T>(layer, seg, head, k, v);
  s.q.resize(rows * lanes);
  s.scores.resize(rows * stride);
  s.own.resize(rows * own_stride);
  s.y.assign(rows * padded, 0.0f);
  s.block.resize(lanes * keys_at_once);
  s.weight.resize(rows);
  for (int64_t r = 0; r < rows; ++r) {
    const T* from = (const T*)q.data + (head * group + r % group) * q.head + (seg.row + r / group) * q.row;
    L* to = s.q.data() + r * lanes;
    int64_t i = 0;
    if constexpr (std::is_same_v<L, int32_t>) i = kd / 2, std::memcpy(to, from, i * sizeof(L));
    for (; i < lanes; ++i) to[i] = lane_at(from, i * Lane<T>::numbers, kd);
  }
  const bool tiled = std::is_same_v<L, int32_t> && tiles_fit(kd);
  std::optional<Tiles> tiles;
  if (tiled) tiles.emplace(rows);
  auto score_block = [&](auto keys, float* to, int64_t to_stride) {
    if (tiled)
      for (int64_t k = 0; k < keys; k += 16)
        for (int64_t r = 0; r < rows; r += tile_rows)
          scores(rows - r >= tile_rows, (const int32_t*)s.q.data() + r * lanes, lanes, (const int32_t*)s.block.data() + k * lanes,
                 to + r * to_stride + k, to_stride);
    else in_groups<2 * row_group <= 8 ? 2 * row_group : 8>(rows, [&](auto count, int64_t r) {
      score<count(), decltype(keys)::value / 16, L>(s.q.data() + r * lanes, lanes, s.block.data(), to + r * to_stride, to_stride);
    });
  };
  constexpr std::integral_constant<int64_t, 16> few{};
  constexpr std::integral_constant<int64_t, keys_at_once> many{};
  auto with_packed = [&](auto read) {  // the packed columns in order, by their number of bits
    with_bits(layer.packed.bits, [&](auto bits) {
      read(PackedHead<bits()>(layer.packed, layer.leveled, seg.slot * layer.heads + head, head, kd, vd, s.steps, s.tile));
    });
  };
  auto score_packed = [&](auto columns) {
    for (int64_t j = 0; j < packed; j += 16) {
      columns.keys(j, s.block.data());
      score_block(few, s.scores.data() + j, stride);
    }
  };
  auto score_columns = [&](int64_t first, int64_t last, float* to, int64_t to_stride) {
    for (int64_t j = first; j < last; j += keys_at_once) {
      const int64_t ahead = j + columns_ahead, end = std::min(ahead + keys_at_once, last);
      if (reads_columns && rows <= row_group) read_through(keys + j * kd, keys + std::min(j + keys_at_once, last) * kd);
      else for (const T* from = keys + ahead * kd; from < keys + end * kd; from += 64 / sizeof(T)) fetch(from);
      auto turn_some = [&](int64_t k) { turn(keys + (j + k) * kd, std::min<int64_t>(16, last - j - k), kd, s.block.data() + k * lanes); };
      turn_some(0);
      if (keys_at_once == 16 || last - j <= 16) {
        score_block(few, to + (j - first), to_stride);
      } else {
        turn_some(16);
        score_block(many, to + (j - first), to_stride);
      }
    }
  };
  if (packed) with_packed(score_packed);
  score_columns(packed, length, s.scores.data() + packed, stride);
  score_columns(length, length + tree, s.own.data(), own_stride);
  const bool in_pairs = std::is_same_v<T, bf16> && values_in_pairs && vd % pair_width == 0;
  int64_t lowest = length;  // the first key that any row sees
  for (int64_t r = 0; r < rows; ++r) {
    const int32_t* start = paths.start + seg.row + r / group;
    const int32_t* own = paths.rows + start[0];
    int64_t depth = source ? 0 : start[1] - start[0], end = length + depth;
    float* score = s.scores.data() + r * stride;
    for (int64_t t = 0; t < depth; ++t) score[length + t] = s.own[r * own_stride + own[t]];
    // Windows and chunks count positions, not columns.
    int64_t begin = window > 0 ? std::max<int64_t>(0, end - window) : window < 0 ? (end - 1) / -window * -window : 0;
    float left = scaling, sink = -INFINITY;
    if (layer.sinks || layer.slopes) {
      const int64_t query = head * group + r % group;
      for (int64_t t = begin; t < end; ++t) score[t] = score[t] * scaling + (layer.slopes ? layer.by_position(query, t) : 0.0f);
      if (layer.sinks) sink = layer.sinks[query];
      left = 1.0f;
    }
    if (layer.bias) {
      const float* bias = layer.bias + (head * group + r % group) * layer.far;
      for (int64_t t = begin; t < end; ++t) score[t] = score[t] * scaling + bias[std::min(end - 1 - t, layer.far - 1)];
      left = 1.0f;
    }
    s.weight[r] = 1.0f / (in_pairs ? soften<bf16> : soften<float>)(score, begin, end, left, softcap, sink);
    lowest = std::min(lowest, begin);
  }
  if (packed) with_packed([&](auto columns) {
    s.values.resize(packed_group * vd + 16), s.narrow.resize(packed_group * vd);
    for (int64_t j = lowest / packed_group * packed_group; j < packed; j += packed_group) {
      columns.values(j, s.values.data());
      if (in_pairs) {  // weights are bf16 then, half as far from the row's first
        add_packed_in_pairs(rows, s.y.data(), padded, s.scores.data() + j / 2, stride, s.values.data(), s.narrow.data(), vd);
        continue;
      }
      add_values(rows, s.y.data(), padded, s.scores.data() + j, stride, (const float*)s.values.data(), packed_group, vd, s.values);
    }
  });
  const int64_t first = std::max(packed, lowest / value_tile * value_tile);
  if (in_pairs)
    add_values_in_pairs(paths, seg, group, s.y.data(), padded, s.scores.data(), stride, (const bf16*)values, first, length, vd, source);
  else for (int64_t j = first; j < length; j += value_tile) {
    const int64_t count = std::min(length, j + value_tile) - j;
    add_values(rows, s.y.data(), padded, s.scores.data() + j, stride, values + j * vd, count, vd, s.values);
  }
  for (int64_t r = 0; r < rows; ++r) {
    int64_t row = seg.row + r / group;
    const int32_t* own = paths.rows + paths.start[row];
    int64_t depth = source ? 0 : paths.start[row + 1] - paths.start[row];
    float* y = s.y.data() + r * padded;
    for (int64_t t = 0; t < depth && !in_pairs; ++t)
      add_values<1>(y, padded, s.scores.data() + r * stride + length + t, stride, values + (length + own[t]) * vd, 1, vd);
    T* to = out + (row * heads + head * group + r % group) * vd;
    for (int64_t d = 0; d < vd; d += 16) put(to + d, load16(y + d) * s.weight[r], std::min<int64_t>(16, vd - d));
  }
}

}  // namespace
