// Operators for packed rows on a CPU, compiled for each kind of them (see variants.py). Rows of logits are in row.h.
//
//   sakiyomi_cpu::linear  rows x prepacked weight, for the few rows of a decoding pass
//   sakiyomi_cpu::attend  cache write and tree attention of all requests of a pass
//   sakiyomi_cpu::cross   attention over what is kept of each request's source (encoder-decoder models)
//   sakiyomi_cpu::attend_source   attention of every row of a source over all of it (encoders)
//   sakiyomi_cpu::recur   states that go on from row to row: convolutions, linear attention, state-space models
//   sakiyomi_cpu::experts rows x the weight of the expert that each of them has chosen
//   sakiyomi_cpu::look_up rows of a weight in a block format, by their numbers
//   sakiyomi_cpu::norm    root mean square norms
//   sakiyomi_cpu::gated   act(gate) * up
//   sakiyomi_cpu::rotate  rotary embedding of queries or keys
//
// All compute every row alone: the order of additions of a row depends neither on how many rows the pass has nor on where the
// row stands in it. That is what `exact=True` rests on, and it costs nothing here, because these passes are bound by reading
// weights and keys, not by arithmetic.
//
// What a pass looks like (which request, which cache slot, which tree) is set by sk_begin() before the model runs, so compiled
// graphs hold only layer and weight numbers.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "arrange.h"
#include "attention.h"
#include "elementwise.h"
#include "growth.h"
#include "linear.h"
#include "multiply.h"
#include "norms.h"
#include "program.h"
#include "prompt.h"
#include "quantize.h"
#include "recurrent.h"
#include "round.h"
#include "row.h"
#include "selftest.h"
#include "texts.h"
#include "torch.h"
#include "vector.h"
#include "verify.h"

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
  std::map<int64_t, Site> sites;  // by the numbers that the model's modules know
};

struct Pass {
  Session* session = nullptr;
  int64_t size = -1;  // rows with the ones that only fill it up; -1 where there are none but those
  std::vector<Segment> segments;
  std::vector<int32_t> path_start;  // see Paths
  std::vector<int32_t> path;
  std::vector<int32_t> parents;  // of the rows of every segment's tree
  std::vector<Text> texts;
  Tensor source;  // what siblings have been computed from together
  std::vector<std::pair<int64_t, Tensor>> waiting;  // results of theirs that nobody has asked for yet
  int64_t calls = 0;  // attention calls since sk_begin: proof that every layer came here
  std::vector<int64_t> wanted;  // the rows whose results are wanted, ascending; none: all are
  int64_t last = 0;             // attention calls before the last layer's, from which on no row sees another

  // Whether nobody sees what becomes of the other rows any more.
  bool narrowed() const { return !wanted.empty() && calls > last; }
};

// One pass per thread: a graph that is compiled in the background runs once there, with an empty pass of its own.
thread_local Pass current;

// ---------------------------------------------------------------- linear

int32_t dtype_of(bool half) { return half ? torch.aoti_torch_dtype_bfloat16 : torch.aoti_torch_dtype_float32; }

// Some of the rows, each as if alone.
template <typename T>
void multiply_some(const std::vector<const Weight*>& weights, const T* x, void* const* outs, const std::vector<int64_t>& rows) {
  const int64_t count = rows.size(), in = weights[0]->in;
  std::vector<T> picked(count * in);
  for (int64_t i = 0; i < count; ++i) std::copy_n(x + rows[i] * in, in, picked.data() + i * in);
  std::vector<std::vector<T>> made;
  std::vector<void*> to;
  for (const Weight* w : weights) to.push_back(made.emplace_back(count * w->out).data());
  multiply(weights, picked.data(), to.data(), count);
  for (size_t j = 0; j < weights.size(); ++j)
    for (int64_t i = 0, out = weights[j]->out; i < count; ++i) std::copy_n(made[j].data() + i * out, out, (T*)outs[j] + rows[i] * out);
}

// `to`: where the result goes, if that is known.
Tensor linear(const Tensor& input, int64_t index, int64_t out, void* to) {
  Pass& pass = current;
  check(pass.session && index < (int64_t)pass.session->weights->weights.size(), "sakiyomi_cpu::linear called outside a pass");
  const std::vector<Weight>& table = pass.session->weights->weights;
  const Weight& w = table[index];
  Tensor copy;
  const bool whole = input.is_contiguous();
  if (!whole) copy = input.contiguous_copy();
  const Tensor& x = whole ? input : copy;
  std::vector<int64_t> shape = x.shape();
  check(!shape.empty() && shape.back() == w.in && out == w.out, "sakiyomi_cpu::linear: shapes differ from the packed weight");
  check(x.dtype() == dtype_of(w.half), "sakiyomi_cpu::linear: wrong dtype");
  if (pass.source.defined() && pass.source.data() == x.data() && pass.source.shape() == shape)
    for (size_t i = 0; i < pass.waiting.size(); ++i)
      if (pass.waiting[i].first == index) {
        Tensor y = std::move(pass.waiting[i].second);
        pass.waiting.erase(pass.waiting.begin() + i);
        if (pass.waiting.empty()) pass.source = Tensor();
        return y;
      }
  // Rows that only fill the pass up to its size are not computed: a graph of 64 rows costs what its 40 real ones cost. Nor are those that
  // nobody wants. Where a layer does not get the pass as it came, (1, N, in), which of its rows are real is not known (experts).
  const int64_t all = x.numel() / w.in, size = x.element_size();
  const bool in_order = all == pass.size && shape.size() == 3 && shape[0] == 1, few = in_order && pass.narrowed();
  const int64_t rows = few ? pass.wanted.size() : in_order ? (int64_t)pass.path_start.size() - 1 : all;
  // A copy of an input that is not contiguous is another one for each sibling.
  bool alone = w.siblings.empty() || !whole;
  const int64_t *group = alone ? &index : w.siblings.data(), *end = group + (alone ? 1 : w.siblings.size());
  std::vector<const Weight*> weights;
  std::vector<void*> outs;
  Tensor mine;
  pass.waiting.clear();
  for (; group < end; ++group) {
    const int64_t i = *group;
    const Weight& each = table[i];
    shape.back() = each.out;
    Tensor y = to && i == index ? Tensor::around(to, shape, dtype_of(w.half)) : Tensor::empty(shape, dtype_of(w.half));
    const int64_t line = each.out * size, zeros = few ? 0 : rows;
    std::memset((char*)y.data() + zeros * line, 0, (all - zeros) * line);
    weights.push_back(&each), outs.push_back(y.data());
    if (i == index)
      mine = std::move(y);
    else
      pass.waiting.emplace_back(i, std::move(y));
  }
  // Held, so that no other tensor can come to lie where this one does.
  pass.source = pass.waiting.empty() ? Tensor() : x.another();
  auto compute = [&]<typename T>(const T* from) {
    if (few) multiply_some(weights, from, outs.data(), pass.wanted);
    else multiply(weights, from, outs.data(), rows);
  };
  if (w.half) compute((const bf16*)x.data());
  else compute((const float*)x.data());
  return mine;
}

// `chosen`: (rows, count) int64, the expert of each row of the result, whose weights are `first` and the ones behind it. Of `input`
// each row is for as many rows of the result as there are more of these. Rows of an expert are multiplied together, each as if alone.
Tensor experts(const Tensor& input, const Tensor& chosen, int64_t first, int64_t count, int64_t out) {
  Pass& pass = current;
  check(pass.session && first + count <= (int64_t)pass.session->weights->weights.size(), "sakiyomi_cpu::experts called outside a pass");
  const Weight* weights = pass.session->weights->weights.data() + first;
  Tensor copies[2];
  if (!input.is_contiguous()) copies[0] = input.contiguous_copy();
  if (!chosen.is_contiguous()) copies[1] = chosen.contiguous_copy();
  const Tensor &x = copies[0].defined() ? copies[0] : input, &which = copies[1].defined() ? copies[1] : chosen;
  check(which.dtype() == torch.aoti_torch_dtype_int64, "sakiyomi_cpu::experts: experts are not given as int64");
  check(x.dtype() == dtype_of(weights->half), "sakiyomi_cpu::experts: wrong dtype");
  const int64_t all = which.numel(), in = weights->in, size = x.element_size();
  check(out == weights->out && x.size(-1) == in && x.numel() && all % (x.numel() / in) == 0, "sakiyomi_cpu::experts: shapes differ");
  const int64_t each = all / (x.numel() / in);
  Tensor y = Tensor::empty({all, out}, x.dtype());
  // Rows that only fill the pass up, or that nobody wants, are not computed, where all of its rows come in their order.
  int64_t real = all;
  const bool in_order = which.size(0) == pass.size, few = in_order && pass.narrowed();
  const int64_t of_each = in_order ? all / pass.size : 0;
  if (in_order) real = few ? 0 : of_each * ((int64_t)pass.path_start.size() - 1);
  if (real < all) std::memset((char*)y.data() + real * out * size, 0, (all - real) * out * size);
  std::vector<std::vector<int64_t>> rows(count);
  auto place = [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const int64_t expert = ((const int64_t*)which.data())[r];
      check(expert >= 0 && expert < count, "sakiyomi_cpu::experts: an expert that is none");
      rows[expert].push_back(r);
    }
  };
  place(0, real);
  if (few)
    for (int64_t row : pass.wanted) place(row * of_each, (row + 1) * of_each);
  static thread_local std::vector<char> gathered, products;
  for (int64_t e = 0; e < count; ++e) {
    const int64_t n = rows[e].size();
    if (!n) continue;
    check(weights[e].in == in && weights[e].out == out, "sakiyomi_cpu::experts: experts of several sizes");
    gathered.resize(n * in * size), products.resize(n * out * size);
    for (int64_t i = 0; i < n; ++i)
      std::memcpy(gathered.data() + i * in * size, (const char*)x.data() + rows[e][i] / each * in * size, in * size);
    void* to = products.data();
    if (weights->half)
      multiply({weights + e}, (const bf16*)gathered.data(), &to, n);
    else
      multiply({weights + e}, (const float*)gathered.data(), &to, n);
    for (int64_t i = 0; i < n; ++i)
      std::memcpy((char*)y.data() + rows[e][i] * out * size, products.data() + i * out * size, out * size);
  }
  return y;
}

// Rows of a weight in a block format by their numbers, int64 of any shape.
Tensor look_up(const Tensor& numbers, int64_t index, int64_t width) {
  Pass& pass = current;
  check(pass.session && index < (int64_t)pass.session->weights->weights.size(), "sakiyomi_cpu::look_up called outside a pass");
  const Weight& w = pass.session->weights->weights[index];
  check(w.form && width == w.in && numbers.dtype() == torch.aoti_torch_dtype_int64, "sakiyomi_cpu::look_up: shapes or types differ");
  Tensor copy;
  if (!numbers.is_contiguous()) copy = numbers.contiguous_copy();
  const Tensor& which = copy.defined() ? copy : numbers;
  const int64_t *from = (const int64_t*)which.data(), count = which.numel();
  check(std::all_of(from, from + count, [&](int64_t number) { return number >= 0 && number < w.out; }), "sakiyomi_cpu::look_up: a row that is none");
  std::vector<int64_t> shape = which.shape();
  shape.push_back(w.in);
  Tensor y = Tensor::empty(shape, dtype_of(w.half));
  if (w.half) look_up(w, from, count, (bf16*)y.data());
  else look_up(w, from, count, (float*)y.data());
  return y;
}

// ---------------------------------------------------------------- attention

// (1, heads, rows, dim) of zeros, as rows of all heads one behind the other.
Tensor nothing_attended(const Tensor& query, int64_t dim) {
  Tensor out = Tensor::empty({1, query.size(2), query.size(1), dim}, query.dtype());
  std::memset(out.data(), 0, out.numel() * out.element_size());
  return out;
}

// A tensor whose last dimension lies without gaps; `copy` holds it where that is another one.
const Tensor& dense(const Tensor& x, Tensor& copy) {
  if (x.stride(-1) == 1) return x;
  copy = x.contiguous_copy();
  return copy;
}

View view_of(const Tensor& x) { return {(const char*)x.data(), x.stride(1), x.stride(2)}; }

Tensor attend(const Tensor& query, const Tensor& key, const Tensor& value, int64_t index, double scaling, double softcap, int64_t window) {
  Pass& pass = current;
  if (pass.segments.empty()) return nothing_attended(query, value.size(3));  // a graph that is run once for its compilation
  check(pass.session && index < (int64_t)pass.session->layers.size(), "sakiyomi_cpu::attend called outside a pass");
  Layer layer = pass.session->layers[index];
  layer.bias = pass.session->bias, layer.far = pass.session->far;
  if (pass.session->dropped) {
    layer.dropped = pass.session->dropped + index * pass.session->dropped_heads;
    layer.dropped_stride = (int64_t)pass.session->layers.size() * pass.session->dropped_heads;
    if (pass.session->packed_count) layer.packed_count = pass.session->packed_count + index * pass.session->dropped_heads;
  }
  Tensor copies[3];
  const Tensor &q = dense(query, copies[0]), &k = dense(key, copies[1]), &v = dense(value, copies[2]);
  check(q.dtype() == dtype_of(layer.half), "sakiyomi_cpu::attend: wrong dtype");
  check(k.size(1) == layer.heads && q.size(3) == layer.key_dim && v.size(3) == layer.value_dim,
        "sakiyomi_cpu::attend: shapes differ from the cache");
  int64_t heads = q.size(1), rows = q.size(2), group = heads / layer.heads;
  Tensor out = Tensor::empty({1, rows, heads, layer.value_dim}, q.dtype());
  char* to = (char*)out.data();
  View qv = view_of(q), kv = view_of(k), vv = view_of(v);
  Paths paths{pass.path_start.data(), pass.path.data()};
  const bool few = !pass.wanted.empty() && pass.calls == pass.last;
  ++pass.calls;
  struct Task {
    const Segment* segment;
    int64_t head, first, count;  // rows of the segment
  };
  std::vector<Task> tasks;
  int64_t work = 0, used = 0;  // multiplications of one head; rows
  // Sinks, slopes and chunks are known to the kernel of few rows alone.
  const bool blocks = window >= 0 && !layer.sinks && !layer.slopes;
  for (const Segment& s : pass.segments) {
    const bool prompt = blocks && s.prompt;
    const int64_t parts = prompt ? (s.rows * group + prompt_rows - 1) / prompt_rows : 1, most = (s.rows + parts - 1) / parts;
    for (int64_t head = 0; head < layer.heads; ++head) {
      auto add = [&](int64_t first, int64_t count) {
        tasks.push_back({&s, head, first, count});
        if (!head) work += count * (s.length + s.rows) * layer.key_dim * group * 2;
      };
      if (prompt && few) {
        for (int64_t row : pass.wanted)
          if (row >= s.row && row < s.row + s.rows) add(row - s.row, 1);
      } else {
        // Later rows see more columns: first and last ones in turn, so that threads have as much to do.
        for (int64_t i = 0; i < parts; ++i) {
          const int64_t first = (i % 2 ? parts - 1 - i / 2 : i / 2) * most;
          if (first < s.rows) add(first, std::min<int64_t>(most, s.rows - first));
        }
      }
    }
    used += s.rows;
  }
  // Rows that only fill the pass up to its size must not carry garbage (a NaN there would be harmless but alarming).
  const int64_t line = heads * layer.value_dim * q.element_size();
  if (few) used = 0;
  if (used < rows) std::memset(to + used * line, 0, (rows - used) * line);
  auto run = [&]<typename T>(T* to) {
    for (const Segment& s : pass.segments)
      if (blocks && s.prompt)  // all of its tasks read them
        for (int64_t head = 0; head < layer.heads; ++head) write_pairs<T>(layer, s, head, kv, vv);
    const int64_t grain = std::max<int64_t>(1, 20000 / std::max<int64_t>(1, work));
    parallel_for(0, (int64_t)tasks.size(), grain, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        const auto& [segment, head, first, count] = tasks[t];
        if (fetches_texts && t + 1 < end && !tasks[t + 1].segment->prompt) fetch_pairs<T>(layer, *tasks[t + 1].segment, tasks[t + 1].head);
        if (blocks && segment->prompt) attend_prompt(layer, *segment, head, group, first, count, qv, to, heads, scaling, softcap, window);
        else attend_group(paths, layer, *segment, head, group, qv, kv, vv, to, heads, scaling, softcap, window);
      }
    });
  };
  if (layer.half) run((bf16*)to);
  else run((float*)to);
  return out;
}

// Rows of filling, and those of a request without a source, are zeros.
Tensor cross(const Tensor& query, int64_t index, double scaling) {
  Pass& pass = current;
  // A graph that is run once for its compilation, or a pass before any source was read.
  if (pass.segments.empty() || (pass.session && pass.session->sources.empty())) return nothing_attended(query, query.size(3));
  check(pass.session && index < (int64_t)pass.session->sources.size(), "sakiyomi_cpu::cross called outside a pass");
  const Layer& layer = pass.session->sources[index];
  Tensor copy;
  const Tensor& q = dense(query, copy);
  int64_t heads = q.size(1), group = heads / layer.heads, work = 0;
  check(q.dtype() == dtype_of(layer.half), "sakiyomi_cpu::cross: wrong dtype");
  check(heads % layer.heads == 0 && q.size(3) == layer.key_dim, "sakiyomi_cpu::cross: shapes differ from the cache");
  Tensor out = nothing_attended(q, layer.value_dim);
  void* to = out.data();
  View qv = view_of(q);
  Paths paths{pass.path_start.data(), pass.path.data()};
  std::vector<Segment> segments;
  for (Segment s : pass.segments) {
    s.length = pass.session->lengths[s.slot], s.done = 0;
    if (s.length > 0) segments.push_back(s);
    work += s.rows * s.length * layer.key_dim * group * 2;
  }
  int64_t tasks = (int64_t)segments.size() * layer.heads;
  parallel_for(0, tasks, std::max<int64_t>(1, 20000 / std::max<int64_t>(1, work)), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const Segment& seg = segments[t / layer.heads];
      int64_t head = t % layer.heads;
      if (layer.half)
        attend_group<bf16, true>(paths, layer, seg, head, group, qv, View{}, View{}, (bf16*)to, heads, scaling, 0, 0);
      else
        attend_group<float, true>(paths, layer, seg, head, group, qv, View{}, View{}, (float*)to, heads, scaling, 0, 0);
    }
  });
  return out;
}

// Every row of a source over all of it, as encoders attend. Queries, keys and values: (1, heads, rows, dim).
Tensor attend_source(const Tensor& query, const Tensor& key, const Tensor& value, double scaling) {
  const int64_t heads = query.size(1), rows = query.size(2), length = key.size(2), of = key.size(1);
  check(query.size(0) == 1 && of > 0 && heads % of == 0 && value.size(1) == of && value.size(2) == length && query.size(3) == key.size(3),
        "sakiyomi_cpu::attend_source: shapes differ");
  check(query.dtype() == key.dtype() && key.dtype() == value.dtype(), "sakiyomi_cpu::attend_source: dtypes differ");
  const Tensor k = key.contiguous_copy(), v = value.contiguous_copy();
  Tensor copy;
  const View q = view_of(dense(query, copy));
  Layer layer{(char*)k.data(), (char*)v.data(), {}, of, key.size(3), value.size(3), query.dtype() == dtype_of(true)};
  check(layer.half || query.dtype() == dtype_of(false), "sakiyomi_cpu::attend_source: wrong dtype");
  for (int64_t head = 0; head <= of; ++head) layer.starts.push_back(head * length);
  const Segment all{0, 0, int32_t(rows), int32_t(length), 1, 0};
  Tensor out = Tensor::empty({1, rows, heads, layer.value_dim}, query.dtype());
  const int64_t group = heads / of, parts = (rows * group + prompt_rows - 1) / prompt_rows, most = (rows + parts - 1) / parts;
  auto run = [&]<typename T>(T* to) {
    parallel_for(0, of * parts, 1, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        const int64_t first = t % parts * most;
        if (first < rows) attend_prompt<T, true>(layer, all, t / parts, group, first, std::min(most, rows - first), q, to, heads, scaling, 0, 0);
      }
    });
  };
  if (layer.half) run((bf16*)out.data());
  else run((float*)out.data());
  return out;
}

// ---------------------------------------------------------------- recurrence

// As float32, one number behind the other: the tensor itself where it is that already.
Tensor wide(const Tensor& x) {
  if (x.dtype() == torch.aoti_torch_dtype_float32 && x.is_contiguous()) return x.another();
  Tensor y = Tensor::empty(x.shape(), torch.aoti_torch_dtype_float32);
  y.copy_(x);
  return y;
}

// `rows`: (1, N, ...) each, the first `kept` of them in the order of Site; `fixed`: what is the same for all rows. Outputs are shaped like
// the first rows.
Tensor recur(const std::vector<Tensor>& rows, const std::vector<Tensor>& fixed, int64_t number) {
  Pass& pass = current;
  check(!rows.empty() && rows.size() <= most_parts && rows[0].dim() > 2, "sakiyomi_cpu::recur: too many tensors, or none");
  Site none, *site = &none;
  const int64_t all = rows[0].size(1), real = pass.segments.empty() ? 0 : (int64_t)pass.path_start.size() - 1;
  if (pass.session) {
    auto found = pass.session->sites.find(number);
    if (found != pass.session->sites.end()) site = &found->second;
  }
  check(!real || (site != &none && real <= all), "sakiyomi_cpu::recur: a site that is not known, or outside a pass");
  const bool scan = site->around & as_scan, half = rows[0].dtype() == torch.aoti_torch_dtype_bfloat16 && !scan;
  Tensor out = Tensor::empty(rows[0].shape(), dtype_of(half));
  const int64_t line = out.numel() / std::max<int64_t>(all, 1), bytes = line * out.element_size();
  std::memset((char*)out.data() + real * bytes, 0, (all - real) * bytes);
  if (!real) return out;  // a graph that is run once for its compilation
  static thread_local std::vector<float> memory[most_parts + 1];
  Tensor copies[most_parts], known[3];
  float* parts[most_parts] = {};
  for (size_t i = 0; i < rows.size(); ++i) {
    check(rows[i].dim() > 2 && rows[i].size(0) == 1 && rows[i].size(1) == all && rows[i].numel() == all * site->parts[i],
          "sakiyomi_cpu::recur: shapes differ from the site");
    parts[i] = (float*)widened(rows[i], real, site->parts[i], copies[i], memory[i], site->kind == linear_kind && (scan ? i % 2 == 0 : i % 3 != 0));
  }
  const bool direct = !half && !(site->around & silu_after);
  if (!direct) memory[most_parts].resize(real * line);
  float* y = direct ? (float*)out.data() : memory[most_parts].data();
  if (site->kind == window_kind) take_taps(*site, fixed);
  if (site->kind == channel_kind) site->decays = wide(fixed.at(0));
  if (site->corrected()) prepare_delta(*site, real, parts);
  if (scan) {
    const float* heads[3];
    for (int i = 0; i < 3; ++i) {
      known[i] = wide(fixed.at(i));
      check(known[i].numel() == site->heads, "sakiyomi_cpu::recur: not one number for each head");
      heads[i] = (const float*)known[i].data();
    }
    prepare_scan(*site, real, rows[2].dtype() == torch.aoti_torch_dtype_bfloat16, heads[0], heads[1], heads[2], parts, y);
  }
  Work work{*site, {}, y};
  std::copy(parts, parts + most_parts, work.fresh);
  run_site(*site, pass.texts, work);
  if (half)
    hand_out(y, (bf16*)out.data(), real * line, site->around);
  else if (!direct)
    hand_out(y, (float*)out.data(), real * line, site->around);
  return out;
}

// ---------------------------------------------------------------- norms

// `rows`: (..., width), and a gate of the same shape or none.
Tensor norm(const std::vector<Tensor>& rows, const Tensor& weight, double eps, int64_t form) {
  check(rows.size() == 1 || rows.size() == 2, "sakiyomi_cpu::norm: rows, and a gate or none");
  Tensor held[2];
  const void* data[2] = {};
  const int64_t width = weight.numel();
  for (size_t i = 0; i < rows.size(); ++i) {
    check(rows[i].size(-1) == width && rows[i].numel() == rows[0].numel() && rows[i].dtype() == rows[0].dtype(),
          "sakiyomi_cpu::norm: shapes or types differ");
    if (!rows[i].is_contiguous()) held[i] = rows[i].contiguous_copy();
    data[i] = held[i].defined() ? held[i].data() : rows[i].data();
  }
  const Tensor wanted = wide(weight);
  Tensor y = Tensor::empty(rows[0].shape(), rows[0].dtype());
  const float* w = (const float*)wanted.data();
  const int64_t count = y.numel() / width;
  if (y.dtype() == torch.aoti_torch_dtype_bfloat16)
    norm_rows((const bf16*)data[0], w, (const bf16*)data[1], (bf16*)y.data(), count, width, float(eps), form);
  else
    norm_rows((const float*)data[0], w, (const float*)data[1], (float*)y.data(), count, width, float(eps), form);
  return y;
}

// ---------------------------------------------------------------- between products

// The rows of a tensor; `copy` holds them where they do not lie equally far apart.
Lines lines_of(const Tensor& x, Tensor& copy) {
  const int64_t width = x.size(-1), count = width ? x.numel() / width : 0;
  int64_t stride = width, next = -1;
  bool even = x.stride(-1) == 1;
  for (int64_t d = x.dim() - 2; d >= 0; --d) {
    if (x.size(d) == 1) continue;
    if (next < 0) next = stride = x.stride(d);
    even = even && x.stride(d) == next;
    next *= x.size(d);
  }
  if (even) return {(const char*)x.data(), stride, count, width};
  copy = x.contiguous_copy();
  return {(const char*)copy.data(), width, count, width};
}

Tensor gated(const Tensor& gate, const Tensor& up, int64_t form) {
  check(gate.shape() == up.shape() && gate.dtype() == up.dtype(), "sakiyomi_cpu::gated: shapes or types differ");
  Tensor copies[2];
  const Lines g = lines_of(gate, copies[0]), u = lines_of(up, copies[1]);
  Tensor y = Tensor::empty(gate.shape(), gate.dtype());
  if (y.dtype() == torch.aoti_torch_dtype_bfloat16) gate_rows(g, u, (bf16*)y.data(), form);
  else gate_rows(g, u, (float*)y.data(), form);
  return y;
}

// x: (1, heads, rows, dim); cosines and sines of all rows: (1, rows, width).
Tensor rotate(const Tensor& x, const Tensor& cos, const Tensor& sin) {
  check(x.dim() == 4 && x.size(0) == 1 && cos.dim() == 3 && cos.size(0) == 1 && cos.size(1) == x.size(2) && cos.shape() == sin.shape() &&
            cos.size(2) <= x.size(3) && cos.size(2) % 2 == 0,
        "sakiyomi_cpu::rotate: shapes differ");
  check(x.dtype() == cos.dtype() && x.dtype() == sin.dtype(), "sakiyomi_cpu::rotate: types differ");
  Tensor copies[3];
  const Tensor& from = dense(x, copies[0]);
  const Tensor &c = cos.is_contiguous() ? cos : (copies[1] = cos.contiguous_copy()), &s = sin.is_contiguous() ? sin : (copies[2] = sin.contiguous_copy());
  Tensor y = Tensor::empty(x.shape(), x.dtype());
  auto run = [&]<typename T>(T* to) {
    rotate_rows((const T*)from.data(), from.stride(1), from.stride(2), (const T*)c.data(), (const T*)s.data(), to, x.size(1), x.size(2),
                x.size(3), cos.size(2));
  };
  if (y.dtype() == torch.aoti_torch_dtype_bfloat16) run((bf16*)y.data());
  else run((float*)y.data());
  return y;
}

// ---------------------------------------------------------------- as torch calls them

void call_linear(Value* stack, uint64_t, uint64_t) { stack[0] = linear(Tensor(stack[0]), stack[1], stack[2], nullptr).release(); }

void call_attend(Value* stack, uint64_t, uint64_t) {
  Tensor q(stack[0]), k(stack[1]), v(stack[2]);
  stack[0] = attend(q, k, v, stack[3], number_of(stack[4]), number_of(stack[5]), stack[6]).release();
}

void call_cross(Value* stack, uint64_t, uint64_t) { stack[0] = cross(Tensor(stack[0]), stack[1], number_of(stack[2])).release(); }

void call_attend_source(Value* stack, uint64_t, uint64_t) {
  const Tensor q(stack[0]), k(stack[1]), v(stack[2]);
  stack[0] = attend_source(q, k, v, number_of(stack[3])).release();
}

void call_recur(Value* stack, uint64_t, uint64_t) {
  const std::vector<Tensor> rows = tensors_of(stack[0]), fixed = tensors_of(stack[1]);
  stack[0] = recur(rows, fixed, stack[2]).release();
}

void call_experts(Value* stack, uint64_t, uint64_t) {
  const Tensor x(stack[0]), chosen(stack[1]);
  stack[0] = experts(x, chosen, stack[2], stack[3], stack[4]).release();
}

void call_look_up(Value* stack, uint64_t, uint64_t) { stack[0] = look_up(Tensor(stack[0]), stack[1], stack[2]).release(); }

void call_norm(Value* stack, uint64_t, uint64_t) {
  const std::vector<Tensor> rows = tensors_of(stack[0]);
  const Tensor weight(stack[1]);
  stack[0] = norm(rows, weight, number_of(stack[2]), stack[3]).release();
}

void call_gated(Value* stack, uint64_t, uint64_t) {
  const Tensor gate(stack[0]), up(stack[1]);
  stack[0] = gated(gate, up, stack[2]).release();
}

void call_rotate(Value* stack, uint64_t, uint64_t) {
  const Tensor x(stack[0]), cos(stack[1]), sin(stack[2]);
  stack[0] = rotate(x, cos, sin).release();
}
}  // namespace

extern "C" {

// Registers the operators in torch, once in a process. `library`: what dlopen gave of torch, or of something that needs it. Answers
// what does not work; null: all does.
const char* sk_bind(void* library) try {
  bind_torch(library);
  LibraryHandle names, kernels;  // they stay registered as long as the process lives
  TORCH_CALL(aoti_torch_library_init_def, "sakiyomi_cpu", __FILE__, __LINE__, &names);
  TORCH_CALL(aoti_torch_library_init_impl, "sakiyomi_cpu", "CPU", __FILE__, __LINE__, &kernels);
  auto add = [&](const char* name, const char* schema, void (*kernel)(Value*, uint64_t, uint64_t)) {
    TORCH_CALL(aoti_torch_library_def, names, schema);
    TORCH_CALL(torch_library_impl, kernels, name, kernel, built_for);
  };
  add("linear", "linear(Tensor x, int index, int out) -> Tensor", &call_linear);
  add("attend", "attend(Tensor q, Tensor k, Tensor v, int layer, float scaling, float softcap, int window) -> Tensor", &call_attend);
  add("cross", "cross(Tensor q, int layer, float scaling) -> Tensor", &call_cross);
  add("attend_source", "attend_source(Tensor q, Tensor k, Tensor v, float scaling) -> Tensor", &call_attend_source);
  add("recur", "recur(Tensor[] rows, Tensor[] fixed, int number) -> Tensor", &call_recur);
  add("experts", "experts(Tensor x, Tensor chosen, int first, int count, int out) -> Tensor", &call_experts);
  add("look_up", "look_up(Tensor numbers, int index, int width) -> Tensor", &call_look_up);
  add("norm", "norm(Tensor[] rows, Tensor weight, float eps, int form) -> Tensor", &call_norm);
  add("gated", "gated(Tensor gate, Tensor up, int form) -> Tensor", &call_gated);
  add("rotate", "rotate(Tensor x, Tensor cos, Tensor sin) -> Tensor", &call_rotate);
  return nullptr;
} catch (const std::exception& error) {
  static const std::string why = error.what();
  return why.c_str();
}

int sk_self_test() { return self_test(); }

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
  parallel_for(0, rows, std::max<int64_t>(1, 16384 / n), [&](int64_t begin, int64_t end) {
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

int64_t sk_draw(const float* weights, int64_t n, double uniform, const int64_t* support, int64_t supported) {
  return draw(weights, n, uniform, support, supported);
}

float sk_without(const float* row, int64_t n, int64_t token, float* out) { return without(row, n, token, out); }

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

// `half`: whether rows are bf16; `scale`, `sum` and `scales`: see Weight, null where they do not belong. `type`: GGML's number of a block
// format; -1: the weight is in none. `grouped`: see Weight. Answers the weight's number; -1: the type is not known.
int64_t sk_weight(int64_t w, const void* data, const float* bias, const float* scale, const int32_t* sum, const void* scales, int64_t in,
                  int64_t out, int half, int64_t type, int grouped) {
  auto& weights = ((Weights*)w)->weights;
  const BlockFormat* form = block_format(type);
  if (type >= 0 && !form) return -1;
  weights.push_back({data, bias, scale, sum, (const bf16*)scales, in, out, half != 0, {}, form, grouped && form->scaled()});
  return (int64_t)weights.size() - 1;
}

// Rows of a GGUF file in a block format, in the order in which sk_weight takes them.
void sk_arrange(int64_t type, const void* rows, int64_t count, int64_t in, void* to) {
  arrange(*block_format(type), (const uint8_t*)rows, count, in, (uint8_t*)to);
}

// Blocks of 256 numbers rounded to Q4_K, Q5_K or Q6_K, by their bits.
void sk_quantize(int bits, const float* numbers, int64_t blocks, void* to) { quantize(bits, numbers, blocks, (uint8_t*)to); }

// Rows of a weight in a block format by their numbers, outside of a pass. 0: one of them is none.
int sk_look_up(int64_t w, int64_t index, const int64_t* numbers, int64_t count, void* to) {
  const Weight& weight = ((Weights*)w)->weights[index];
  if (!std::all_of(numbers, numbers + count, [&](int64_t number) { return number >= 0 && number < weight.out; })) return 0;
  if (weight.half) look_up(weight, numbers, count, (bf16*)to);
  else look_up(weight, numbers, count, (float*)to);
  return 1;
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

// What a layer adds to its scores, see Layer, after sk_layer; null where it does not.
void sk_layer_scores(int64_t m, int64_t index, const float* sinks, const float* slopes, double unit, int coarse) {
  Layer& layer = ((Session*)m)->layers[index];
  layer.sinks = sinks, layer.slopes = slopes, layer.unit = (float)unit, layer.coarse = coarse != 0;
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
    const auto own = model.layers.begin() + index;  // layers may share keys and values: those move once
    if (std::any_of(model.layers.begin(), own, [&](const Layer& other) { return other.keys == layer.keys; })) continue;
    for (int64_t head = 0; head < layer.heads; ++head) {
      const int64_t gone = model.dropped ? model.dropped[(slot * model.layers.size() + index) * model.dropped_heads + head] : 0;
      auto move = [&](char* store, int64_t dim) {
        const int64_t bytes = dim * (layer.half ? 2 : 4);
        char* at = store + (layer.first_row(slot, head) + first - gone) * bytes;
        for (int64_t i = 0; i < count; ++i)
          if (rows[i] != i) std::memcpy(at + i * bytes, at + rows[i] * bytes, bytes);
      };
      move(layer.keys, layer.key_dim);
      if (layer.values != layer.keys) move(layer.values, layer.value_dim);
    }
  }
}

// Writes the pairs of so many tokens from this column of a slot on: of each token those of all layers, of each layer the keys of all heads,
// then the values.
void sk_place(int64_t m, int64_t slot, int64_t column, int64_t count, const void* pairs) {
  const Session& model = *(const Session*)m;
  const char* from = (const char*)pairs;
  for (int64_t i = 0; i < count; ++i)
    for (const Layer& layer : model.layers) {
      auto write = [&](char* store, int64_t dim) {
        const int64_t bytes = dim * (layer.half ? 2 : 4);
        for (int64_t head = 0; head < layer.heads; ++head, from += bytes)
          std::memcpy(store + (layer.first_row(slot, head) + column + i) * bytes, from, bytes);
      };
      write(layer.keys, layer.key_dim), write(layer.values, layer.value_dim);
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

// `sizes`: see Site, from its size to what is around it, in that order.
void sk_site(int64_t m, int64_t number, int64_t kind, float* states, float* rows, int64_t* at, const int64_t* first, const int64_t* sizes) {
  Site& site = ((Session*)m)->sites[number];
  site.kind = kind, site.states = states, site.rows = rows, site.at = at, site.first = first;
  site.size = sizes[0], site.room = sizes[1], site.width = sizes[2], site.kept = sizes[3];
  std::copy(sizes + 4, sizes + 4 + most_parts, site.parts);
  const int64_t* shape = sizes + 4 + most_parts;
  site.heads = shape[0], site.groups = shape[1], site.key = shape[2], site.value = shape[3], site.around = shape[4];
}

// Fold the rows of a slot's committed tokens into its states.
void sk_fold(int64_t m, int64_t slot, int64_t length) {
  for (auto& [number, site] : ((Session*)m)->sites) fold_site(site, slot, length);
}

// Of a slot's rows from token `first` on keep these, in this order; they are counted from there and ascend.
void sk_keep_rows(int64_t m, int64_t slot, int64_t first, int64_t count, const int64_t* rows) {
  for (auto& [number, site] : ((Session*)m)->sites) {
    float* at = site.rows + (slot * site.room + first - site.first[slot]) * site.width;
    for (int64_t i = 0; i < count; ++i)
      if (rows[i] != i) std::memcpy(at + i * site.width, at + rows[i] * site.width, 4 * site.width);
  }
}

// `bias`: see Layer; null where there is none.
void sk_distances(int64_t m, const float* bias, int64_t far) { ((Session*)m)->bias = bias, ((Session*)m)->far = far; }

// `table`: the segments, then for each the parent of every row of its tree: -1 for none, -2 for a row that sees all rows of its segment.
void sk_begin(int64_t m, int64_t count, int64_t size, const int32_t* table) {
  Pass& pass = current;
  pass.size = count ? size : -1;
  pass.session = (Session*)m;
  pass.segments.assign((const Segment*)table, (const Segment*)table + count);
  pass.path_start.assign(1, 0);
  pass.path.clear();
  const int32_t* parent = table + count * sizeof(Segment) / sizeof(int32_t);
  for (const Segment& s : pass.segments) {
    for (int32_t i = s.done; i < s.done + s.rows; ++i) {
      size_t first = pass.path.size();
      const bool block = parent[i] == -2;
      for (int32_t row = block ? s.rows - 1 : i; row >= 0; row = block ? row - 1 : parent[row]) pass.path.push_back(row);
      std::reverse(pass.path.begin() + first, pass.path.end());
      pass.path_start.push_back((int32_t)pass.path.size());
    }
    parent += s.done + s.rows;
  }
  pass.texts.clear();
  if (!pass.session->sites.empty()) {
    const int32_t* first = table + count * sizeof(Segment) / sizeof(int32_t);
    pass.parents.assign(first, parent);
    const int32_t* own = pass.parents.data();
    for (const Segment& s : pass.segments) {
      pass.texts.emplace_back(s, own);
      own += s.done + s.rows;
    }
  }
  pass.source = Tensor();
  pass.waiting.clear();
  pass.calls = 0;
  pass.wanted.clear();
}

// As sk_begin, and the inputs of the pass, ids and positions of `size` rows. `table`: of each segment slot, rows, length and done, then the
// tokens of all their rows, then parents as of sk_begin.
void sk_rows(int64_t m, int64_t count, const void* table, int64_t size, int64_t* inputs) {
  static thread_local std::vector<int32_t> packed, depths;
  const int64_t *segment = (const int64_t*)table, *tokens = segment + 4 * count;
  int64_t rows = 0, nodes = 0;
  packed.clear();
  for (const int64_t* s = segment; s < tokens; s += 4) {
    for (int64_t x : {s[0], rows, s[1], s[2], int64_t(0), s[3]}) packed.push_back(int32_t(x));
    rows += s[1], nodes += s[3] + s[1];
  }
  const int64_t *parents = tokens + rows, *parent = parents;
  packed.insert(packed.end(), parents, parents + nodes);
  std::fill(std::copy(tokens, tokens + rows, inputs), inputs + 2 * size, 0);
  int64_t* position = inputs + size;
  for (const int64_t* s = segment; s < tokens; s += 4) {
    const int64_t done = s[3], all = done + s[1];
    depths.clear();
    for (int64_t i = 0; i < all; ++i) {
      depths.push_back(parent[i] == -2 ? int32_t(i) : parent[i] < 0 ? 0 : depths[parent[i]] + 1);
      if (i >= done) *position++ = s[2] - done + depths[i];
    }
    parent += all;
  }
  sk_begin(m, count, size, packed.data());
}

// Of the pass that was begun these rows' results are wanted alone; so many attention calls come before the last layer's.
void sk_want(int64_t count, const int64_t* rows, int64_t last) { current.wanted.assign(rows, rows + count), current.last = last; }

int64_t sk_calls() { return current.calls; }

// The pass that was begun, for attention on another device: `room` numbers at `to`, as triton_kernels.py reads them. Of `size` rows those
// behind the real ones are filling. The columns of the longest segment; -1 where there is not so much room.
int64_t sk_device_plan(int64_t size, int64_t tile, int64_t room, int32_t* to) {
  const Pass& pass = current;
  constexpr int64_t fields = 8;
  int32_t *tiles = to, *row = to + 2 * size;
  std::fill(to, to + 2 * size, 0);
  int64_t free = (2 + fields) * size, longest = 1, used = 0;
  for (const Segment& s : pass.segments) {
    const int64_t nodes = s.done + s.rows, words = (nodes + 31) / 32, depths = free, before = s.length - s.done;
    free += nodes + s.rows * words;
    if (free > room) return -1;
    std::fill(to + depths, to + free, 0);
    for (int64_t first = 0; first < s.rows; first += tile, tiles += 2)
      tiles[0] = int32_t(s.row + first), tiles[1] = int32_t(std::min(tile, s.rows - first));
    for (int64_t i = 0; i < s.rows; ++i, row += fields) {
      const int32_t *path = pass.path.data() + pass.path_start[s.row + i], *end = pass.path.data() + pass.path_start[s.row + i + 1];
      const bool block = end[-1] != s.done + i;  // it sees rows behind it, and all before them
      const int64_t mask = depths + nodes + i * words;
      for (const int32_t* node = path; node < end; ++node) {
        to[depths + *node] = int32_t(node - path);
        to[mask + *node / 32] |= int32_t(1u << (*node % 32));
      }
      const int64_t position = block ? -1 : before + (end - path) - 1;
      const int64_t known[fields] = {s.slot, s.length, before, position, mask, depths, s.row, s.rows};
      std::copy(known, known + fields, row);
    }
    longest = std::max<int64_t>(longest, s.length + s.rows), used += s.rows;
  }
  if (used < size) tiles[0] = int32_t(used), tiles[1] = int32_t(used - size);
  return longest;
}
}
