// Three operators for packed rows on a CPU, compiled at first use (see build.py). Rows of logits are in row.h.
//
//   sakiyomi_cpu::linear  rows x prepacked weight, for the few rows of a decoding pass
//   sakiyomi_cpu::attend  cache write and tree attention of all requests of a pass
//   sakiyomi_cpu::cross   attention over what is kept of each request's source (encoder-decoder models)
//
// All compute every row alone: the order of additions of a row depends neither on how many rows the pass has nor on where the
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

#include "attention.h"
#include "linear.h"
#include "row.h"
#include "vector.h"

namespace {

// ---------------------------------------------------------------- state set between passes

// The packed weights of one model.
struct Weights {
  std::vector<Weight> weights;
};

// One cache on which a model runs: several sessions may share its weights.
struct Session {
  const Weights* weights = nullptr;
  std::vector<Layer> layers;
  std::vector<Layer> sources;  // what cross-attention reads
  const int32_t* lengths = nullptr;  // of the source in every slot
  const float* bias = nullptr;  // of all layers, see Layer
  int64_t far = 0;
  const int32_t* dropped = nullptr;  // [slots][layers][dropped_heads], see Layer
  const int32_t* packed_count = nullptr;  // likewise
  int64_t dropped_heads = 0;
};

struct Pass {
  const Session* session = nullptr;
  int64_t size = -1;  // rows with the ones that only fill it up; -1 where there are none but those
  std::vector<Segment> segments;
  std::vector<int32_t> path_start;  // see Paths
  std::vector<int32_t> path;
  at::Tensor source;  // what siblings have been computed from together
  std::vector<std::pair<int64_t, at::Tensor>> waiting;  // results of theirs that nobody has asked for yet
  int64_t calls = 0;  // attention calls since sk_begin: proof that every layer came here
};

// One pass per thread: a graph that is compiled in the background runs once there, with an empty pass of its own.
thread_local Pass current;

// ---------------------------------------------------------------- linear

template <typename T>
void multiply_into(const std::vector<const Weight*>& weights, const at::Tensor& x, const std::vector<at::Tensor>& outs, int64_t rows) {
  std::vector<T*> places;
  for (const at::Tensor& out : outs) places.push_back((T*)out.mutable_data_ptr());
  multiply<T>(weights, (const T*)x.const_data_ptr(), places, rows);
}

at::Tensor linear(const at::Tensor& input, int64_t index, int64_t out) {
  Pass& pass = current;
  TORCH_CHECK(pass.session && index < (int64_t)pass.session->weights->weights.size(), "sakiyomi_cpu::linear called outside a pass");
  const std::vector<Weight>& table = pass.session->weights->weights;
  const Weight& w = table[index];
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
    const Weight& each = table[i];
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
    multiply_into<bf16>(weights, x, outs, rows);
  else
    multiply_into<float>(weights, x, outs, rows);
  return mine;
}

// ---------------------------------------------------------------- attention

// A chunk of a prompt has hundreds of rows: arithmetic bounds it, and torch's blocked kernel is the fast one. Its rows need not
// equal those of other row counts, since where the chunks of a prompt begin depends on the prompt alone.
// Heads [first, last) have rooms of one size and have dropped equally much.
void attend_prompt(const Layer& layer, const Segment& seg, int64_t first, int64_t last, const at::Tensor& q, const at::Tensor& k,
                   const at::Tensor& v, at::Tensor& out, double scaling, int64_t window) {
  auto options = q.options();
  int64_t group = q.size(1) / layer.heads, heads = last - first;
  int64_t packed = layer.before(seg.slot, first), room = layer.starts[first + 1] - layer.starts[first];
  auto store = [&](char* data, int64_t dim) {
    int64_t bytes = dim * (layer.half ? 2 : 4);
    return at::from_blob(data + layer.first_row(seg.slot, first) * bytes, {heads, room, dim}, options);
  };
  at::Tensor keys = store(layer.keys, layer.key_dim), values = store(layer.values, layer.value_dim);
  int64_t length = seg.length - layer.gone(seg.slot, first), end = length + seg.rows;
  keys.narrow(1, length, seg.rows).copy_(k[0].narrow(0, first, heads).narrow(1, seg.row, seg.rows));
  values.narrow(1, length, seg.rows).copy_(v[0].narrow(0, first, heads).narrow(1, seg.row, seg.rows));
  if (packed) {  // hundreds of rows read them: unpacked once, of one layer at a time
    at::Tensor all_keys = at::empty({heads, packed + end, layer.key_dim}, options);
    at::Tensor all_values = at::empty({heads, packed + end, layer.value_dim}, options);
    auto unpack = [&]<typename T>(T*) {
      at::parallel_for(0, heads, 1, [&](int64_t begin, int64_t stop) {
        for (int64_t head = begin; head < stop; ++head)
          unpack_head(layer.packed, layer.leveled, seg.slot * layer.heads + first + head, first + head, packed, layer.key_dim,
                      layer.value_dim, (T*)all_keys.mutable_data_ptr() + head * (packed + end) * layer.key_dim,
                      (T*)all_values.mutable_data_ptr() + head * (packed + end) * layer.value_dim);
      });
    };
    if (layer.half) unpack((bf16*)nullptr);
    else unpack((float*)nullptr);
    all_keys.narrow(1, packed, end).copy_(keys.narrow(1, 0, end));
    all_values.narrow(1, packed, end).copy_(values.narrow(1, 0, end));
    keys = all_keys, values = all_values, length += packed, end += packed;
  }
  at::Tensor rows = q.narrow(1, first * group, heads * group).narrow(2, seg.row, seg.rows);
  std::optional<at::Tensor> mask;
  bool causal = length == 0 && window <= 0;
  if (!causal) {
    at::Tensor seen = at::ones({seg.rows, end}, options.dtype(at::kBool)).tril_(length);
    if (window > 0) seen.logical_and_(at::ones({seg.rows, end}, options.dtype(at::kBool)).triu_(length - window + 1));
    mask = seen;
  }
  at::Tensor y = at::scaled_dot_product_attention(rows, keys.narrow(1, 0, end).unsqueeze(0), values.narrow(1, 0, end).unsqueeze(0), mask, 0.0,
                                                  causal, scaling, group != 1);
  out.narrow(1, seg.row, seg.rows).narrow(2, first * group, heads * group).copy_(y.transpose(1, 2));
}

void attend_prompt(const Layer& layer, const Segment& seg, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, at::Tensor& out,
                   double scaling, int64_t window) {
  auto alike = [&](int64_t a, int64_t b) {
    return layer.gone(seg.slot, a) == layer.gone(seg.slot, b) && layer.before(seg.slot, a) == layer.before(seg.slot, b) &&
           layer.starts[a + 1] - layer.starts[a] == layer.starts[b + 1] - layer.starts[b];
  };
  for (int64_t first = 0, last = 1; last <= layer.heads; ++last)
    if (last == layer.heads || !alike(first, last)) {
      attend_prompt(layer, seg, first, last, q, k, v, out, scaling, window);
      first = last;
    }
}

at::Tensor attend(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, int64_t index, double scaling,
                  double softcap, int64_t window) {
  Pass& pass = current;
  if (pass.segments.empty())  // a graph that is run once for its compilation
    return at::zeros({1, query.size(2), query.size(1), value.size(3)}, query.options());
  TORCH_CHECK(pass.session && index < (int64_t)pass.session->layers.size(), "sakiyomi_cpu::attend called outside a pass");
  Layer layer = pass.session->layers[index];
  layer.bias = pass.session->bias, layer.far = pass.session->far;
  if (pass.session->dropped) {
    layer.dropped = pass.session->dropped + index * pass.session->dropped_heads;
    layer.dropped_stride = (int64_t)pass.session->layers.size() * pass.session->dropped_heads;
    if (pass.session->packed_count) layer.packed_count = pass.session->packed_count + index * pass.session->dropped_heads;
  }
  auto fit = [](const at::Tensor& x) { return x.stride(-1) == 1 ? x : x.contiguous(); };
  at::Tensor q = fit(query), k = fit(key), v = fit(value);
  TORCH_CHECK(q.scalar_type() == (layer.half ? at::kBFloat16 : at::kFloat), "sakiyomi_cpu::attend: wrong dtype");
  TORCH_CHECK(k.size(1) == layer.heads && q.size(3) == layer.key_dim && v.size(3) == layer.value_dim,
              "sakiyomi_cpu::attend: shapes differ from the cache");
  int64_t heads = q.size(1), rows = q.size(2), group = heads / layer.heads;
  at::Tensor out = at::empty({1, rows, heads, layer.value_dim}, q.options());
  auto view = [](const at::Tensor& x) { return View{(const char*)x.const_data_ptr(), x.stride(1), x.stride(2)}; };
  View qv = view(q), kv = view(k), vv = view(v);
  Paths paths{pass.path_start.data(), pass.path.data()};
  ++pass.calls;
  int64_t work = 0, used = 0;
  std::vector<const Segment*> short_segments;
  for (const Segment& s : pass.segments) {
    if (s.prompt && softcap <= 0 && !layer.bias)
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
        attend_group<bf16>(paths, layer, seg, head, group, qv, kv, vv, (bf16*)out.mutable_data_ptr(), heads, scaling, softcap, window);
      else
        attend_group<float>(paths, layer, seg, head, group, qv, kv, vv, (float*)out.mutable_data_ptr(), heads, scaling, softcap, window);
    }
  });
  return out;
}

// Rows of filling, and those of a request without a source, are zeros.
at::Tensor cross(const at::Tensor& query, int64_t index, double scaling) {
  Pass& pass = current;
  int64_t heads = query.size(1), rows = query.size(2);
  // A graph that is run once for its compilation, or a pass before any source was read.
  if (pass.segments.empty() || (pass.session && pass.session->sources.empty()))
    return at::zeros({1, rows, heads, query.size(3)}, query.options());
  TORCH_CHECK(pass.session && index < (int64_t)pass.session->sources.size(), "sakiyomi_cpu::cross called outside a pass");
  const Layer& layer = pass.session->sources[index];
  at::Tensor q = query.stride(-1) == 1 ? query : query.contiguous();
  TORCH_CHECK(q.scalar_type() == (layer.half ? at::kBFloat16 : at::kFloat), "sakiyomi_cpu::cross: wrong dtype");
  TORCH_CHECK(heads % layer.heads == 0 && q.size(3) == layer.key_dim, "sakiyomi_cpu::cross: shapes differ from the cache");
  int64_t group = heads / layer.heads, work = 0;
  at::Tensor out = at::zeros({1, rows, heads, layer.value_dim}, q.options());
  View qv{(const char*)q.const_data_ptr(), q.stride(1), q.stride(2)};
  Paths paths{pass.path_start.data(), pass.path.data()};
  std::vector<Segment> segments;
  for (Segment s : pass.segments) {
    s.length = pass.session->lengths[s.slot], s.done = 0;
    if (s.length > 0) segments.push_back(s);
    work += s.rows * s.length * layer.key_dim * group * 2;
  }
  int64_t tasks = (int64_t)segments.size() * layer.heads;
  at::parallel_for(0, tasks, std::max<int64_t>(1, 20000 / std::max<int64_t>(1, work)), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const Segment& seg = segments[t / layer.heads];
      int64_t head = t % layer.heads;
      if (layer.half)
        attend_group<bf16, true>(paths, layer, seg, head, group, qv, View{}, View{}, (bf16*)out.mutable_data_ptr(), heads, scaling, 0, 0);
      else
        attend_group<float, true>(paths, layer, seg, head, group, qv, View{}, View{}, (float*)out.mutable_data_ptr(), heads, scaling, 0, 0);
    }
  });
  return out;
}

}  // namespace

extern "C" {

// Whether layers may use the matrix unit from now on. Answers whether there is one.
int sk_tiles(int wanted) {
  tiles_wanted = wanted;
  return granted();
}

int64_t sk_best(const void* row, int half, int64_t n) {
  return half ? best((const bf16*)row, n) : best((const float*)row, n);
}

double sk_chance(const void* row, int half, int64_t n, int64_t token) {
  return half ? chance((const bf16*)row, n, token) : chance((const float*)row, n, token);
}

// Rows one behind the other; `totals` of each row.
void sk_leading(const void* logits, int half, int64_t n, int64_t rows, int64_t count, int64_t* tokens, float* found, double* totals) {
  at::parallel_for(0, rows, std::max<int64_t>(1, 16384 / n), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      int64_t at = r * count;
      totals[r] = half ? leading((const bf16*)logits + r * n, n, count, tokens + at, found + at)
                       : leading((const float*)logits + r * n, n, count, tokens + at, found + at);
    }
  });
}

int64_t sk_warp(const void* row, int half, int64_t n, double temperature, int64_t top_k, double top_p, double min_p, float* out,
                int64_t* support) {
  return half ? warp((const bf16*)row, n, temperature, top_k, top_p, min_p, out, support)
              : warp((const float*)row, n, temperature, top_k, top_p, min_p, out, support);
}

int64_t sk_draw(const float* weights, int64_t n, double uniform) { return draw(weights, n, uniform); }

float sk_residual(const float* p, const float* q, int64_t n, float least, float* out) { return residual(p, q, n, least, out); }

int64_t sk_weights() { return (int64_t) new Weights(); }

void sk_free_weights(int64_t w) { delete (Weights*)w; }

int64_t sk_session(int64_t w) {
  auto* session = new Session();
  session->weights = (const Weights*)w;
  return (int64_t)session;
}

void sk_free_session(int64_t m) {
  if (current.session == (const Session*)m) current = Pass();
  delete (Session*)m;
}

// `half`: whether rows are bf16; `scale`, `sum` and `scales`: see Weight, null where they do not belong.
int64_t sk_weight(int64_t w, const void* data, const float* bias, const float* scale, const int32_t* sum, const void* scales, int64_t in,
                  int64_t out, int half) {
  auto& weights = ((Weights*)w)->weights;
  weights.push_back({data, bias, scale, sum, (const bf16*)scales, in, out, half != 0, {}});
  return (int64_t)weights.size() - 1;
}

// Weights of one model that read the same input in every pass: whichever comes first has all computed.
void sk_siblings(int64_t w, int64_t count, const int64_t* indices) {
  auto& weights = ((Weights*)w)->weights;
  for (int64_t i = 0; i < count; ++i) weights[indices[i]].siblings.assign(indices, indices + count);
}

// `starts`: see Layer, heads + 1 of them.
void sk_layer(int64_t m, int64_t index, void* keys, void* values, int64_t heads, const int64_t* starts, int64_t key_dim, int64_t value_dim,
              int half) {
  auto& layers = ((Session*)m)->layers;
  if ((int64_t)layers.size() <= index) layers.resize(index + 1);
  layers[index] = {(char*)keys, (char*)values, {starts, starts + heads + 1}, heads, key_dim, value_dim, half != 0};
}

// Pairs that heads have dropped: [slots][layers][heads], `heads` those of the largest layer.
void sk_dropped(int64_t m, const int32_t* dropped, int64_t heads) { ((Session*)m)->dropped = dropped, ((Session*)m)->dropped_heads = heads; }

// What a layer has packed, see Packed; null where there is no room yet.
void sk_packed(int64_t m, int64_t index, const void* keys, const void* key_scales, const void* values, const void* value_scales, int64_t room,
               int64_t bits) {
  ((Session*)m)->layers[index].packed = {(const uint8_t*)keys,  (const uint16_t*)key_scales, (const uint8_t*)values, (const uint16_t*)value_scales,
                                       room, bits};
}

// Where a layer's codes stand for levels, see Leveled, after sk_packed.
void sk_leveled(int64_t m, int64_t index, const float* levels, const float* channels, const void* key_aside, const void* value_aside,
                const float* firsts, const int32_t* pairs, const float* near, const float* far, int64_t keys_aside, int64_t values_aside,
                int64_t count) {
  ((Session*)m)->layers[index].leveled = {levels, channels, (const uint16_t*)key_aside, (const uint16_t*)value_aside, firsts, pairs,
                                        near, far, keys_aside, values_aside, count};
}

// How many columns heads have packed, as sk_dropped, after it.
void sk_packed_count(int64_t m, const int32_t* count) { ((Session*)m)->packed_count = count; }

// Of the pairs of one slot from `first` on keep these, in this order; rows are counted from there and ascend.
void sk_keep(int64_t m, int64_t slot, int64_t first, int64_t count, const int64_t* rows) {
  const Session& model = *(const Session*)m;
  for (size_t index = 0; index < model.layers.size(); ++index) {
    const Layer& layer = model.layers[index];
    for (int64_t head = 0; head < layer.heads; ++head) {
      const int64_t gone = model.dropped ? model.dropped[(slot * model.layers.size() + index) * model.dropped_heads + head] : 0;
      auto move = [&](char* store, int64_t dim) {
        const int64_t bytes = dim * (layer.half ? 2 : 4);
        char* at = store + (layer.first_row(slot, head) + first - gone) * bytes;
        for (int64_t i = 0; i < count; ++i)
          if (rows[i] != i) std::memcpy(at + i * bytes, at + rows[i] * bytes, bytes);
      };
      move(layer.keys, layer.key_dim), move(layer.values, layer.value_dim);
    }
  }
}

// What cross-attention of one layer reads; `lengths` are those of the source in every slot.
void sk_source(int64_t m, int64_t index, void* keys, void* values, int64_t heads, const int64_t* starts, int64_t key_dim, int64_t value_dim,
               int half, const int32_t* lengths) {
  auto& sources = ((Session*)m)->sources;
  if ((int64_t)sources.size() <= index) sources.resize(index + 1);
  sources[index] = {(char*)keys, (char*)values, {starts, starts + heads + 1}, heads, key_dim, value_dim, half != 0};
  ((Session*)m)->lengths = lengths;
}

// `bias`: see Layer; null where there is none.
void sk_distances(int64_t m, const float* bias, int64_t far) { ((Session*)m)->bias = bias, ((Session*)m)->far = far; }

// `table`: the segments, then for each the parent of every row of its tree, -1 for none.
void sk_begin(int64_t m, int64_t count, int64_t size, const int32_t* table) {
  Pass& pass = current;
  pass.size = count ? size : -1;
  pass.session = (const Session*)m;
  pass.segments.assign((const Segment*)table, (const Segment*)table + count);
  pass.path_start.assign(1, 0);
  pass.path.clear();
  const int32_t* parent = table + count * sizeof(Segment) / sizeof(int32_t);
  for (const Segment& s : pass.segments) {
    for (int32_t i = s.done; i < s.done + s.rows; ++i) {
      size_t first = pass.path.size();
      for (int32_t row = i; row >= 0; row = parent[row]) pass.path.push_back(row);
      std::reverse(pass.path.begin() + first, pass.path.end());
      pass.path_start.push_back((int32_t)pass.path.size());
    }
    parent += s.done + s.rows;
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
  m.def("cross(Tensor q, int layer, float scaling) -> Tensor");
}

TORCH_LIBRARY_IMPL(sakiyomi_cpu, CPU, m) {
  m.impl("linear", &linear);
  m.impl("attend", &attend);
  m.impl("cross", &cross);
}
