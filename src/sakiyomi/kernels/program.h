// A model's pass as a list of steps, run here without a call of torch or Python between them. model_executor/program.py makes it of a
// traced pass; its steps are the operators of this library, the few of torch that stand between them in most models, with torch's own
// results to the last bit, and all others by a call of torch from here.
//
// Values are numbered: each is a tensor or a whole number. A tensor's memory goes to the next one when nobody reads it any more.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "torch.h"
#include "vector.h"

namespace {

Tensor linear(const Tensor& input, int64_t index, int64_t out, void* to);
Tensor experts(const Tensor& input, const Tensor& chosen, int64_t first, int64_t count, int64_t out);
Tensor look_up(const Tensor& numbers, int64_t index, int64_t width);
Tensor attend(const Tensor& query, const Tensor& key, const Tensor& value, int64_t index, double scaling, double softcap, int64_t window);
Tensor cross(const Tensor& query, int64_t index, double scaling);
Tensor recur(const std::vector<Tensor>& rows, const std::vector<Tensor>& fixed, int64_t number);
Tensor norm(const std::vector<Tensor>& rows, const Tensor& weight, double eps, int64_t form);
Tensor gated(const Tensor& gate, const Tensor& up, int64_t form);
Tensor rotate(const Tensor& x, const Tensor& cos, const Tensor& sin);

// In the order of OPERATORS in model_executor/step_list.py.
enum class Op : int64_t {
  linear,      // x, layer, outputs
  experts,     // x, chosen, first, count, outputs
  attend,      // queries, keys, values, layer, scaling, soft cap, window
  cross,       // queries, layer, scaling
  recur,       // site, how many tensors of rows, these, then what is the same for all
  norm,        // weight, eps, form, rows and perhaps a gate
  gated,       // gate, up, form
  rotate,      // x, cosines, sines
  look_up,     // numbers of rows, layer, width
  rows,        // table, numbers of its rows
  kept,        // x, dimension: those of its rows that the pass is asked for
  size,        // x, dimension
  view,        // x, sizes: one of them may be -1
  transpose,   // x, dimension, dimension
  unsqueeze,   // x, dimension
  slice,       // x, dimension, first, behind the last
  part,        // x, dimension, how many equal parts, which of them
  contiguous,  // x
  add,         // x, y: tensors
  sub,         // the same
  mul,         // x, y: the same, or a number
  div,         // the same
  clamp_min,   // x, a number: the larger of the two; what is no number stays
  clamp_max,   // the same, the smaller
  whole,       // which of `Arithmetic`, two whole numbers
  torch,       // an operator's name, its overload's, how many tensors it gives, then its arguments
};

enum class Arithmetic : int64_t { add, sub, mul, floor_divide };

// What a step reads: the number of a value, or a constant. Arguments of torch's operators may be missing; one that need not be there has
// `some` before it, and a list its length.
struct Operand {
  enum Kind : int64_t { tensor, number, whole, real, none, some, list, text };
  int64_t kind, value;
};

struct Step {
  Op op;
  int64_t to;
  std::vector<Operand> given;
  std::vector<int64_t> last_read;  // tensors that no later step reads
};

// What a pass gives.
struct Output {
  int64_t value, width, dtype;  // width: numbers in a row
};

class Program {
 public:
  // `values`: how many there are. `code`: of each step the operator, the value that it makes, how many it reads, and kind and value of each.
  // The first values are ids, positions, and the numbers of the rows that the pass is asked for.
  Program(int64_t values, int64_t length, const int64_t* code, std::vector<Output> outputs, std::vector<int64_t> tables,
          std::vector<std::string> texts)
      : tensors_(values), numbers_(values), outputs_(std::move(outputs)), tables_(std::move(tables)), texts_(std::move(texts)) {
    for (const int64_t* end = code + length; code < end;) {
      Step step{Op(code[0]), code[1], {}, {}};
      const int64_t count = code[2];
      code += 3;
      for (int64_t i = 0; i < count; ++i, code += 2) step.given.push_back({code[0], code[1]});
      steps_.push_back(std::move(step));
    }
    std::vector<char> read(values);
    for (const Output& output : outputs_) read[output.value] = 1;
    made_.resize(values);
    for (const Step& step : steps_)
      for (int64_t i = 0; i < given_by(step); ++i) made_[step.to + i] = 1;
    for (auto step = steps_.rbegin(); step != steps_.rend(); ++step)
      for (const Operand& operand : step->given)
        if (operand.kind == Operand::tensor && !std::exchange(read[operand.value], 1) && made_[operand.value])
          step->last_read.push_back(operand.value);
  }

  // A tensor that is the same in all passes, and is held elsewhere.
  void set(int64_t value, Tensor tensor) { tensors_[value] = std::move(tensor); }

  // Whether the tables reach that far.
  bool reaches(const int64_t* positions, int64_t count) const {
    int64_t rows = INT64_MAX;
    for (int64_t value : tables_) rows = std::min(rows, tensors_[value].size(0));
    return std::all_of(positions, positions + count, [&](int64_t position) { return position >= 0 && position < rows; });
  }

  // The pass that was begun, of `size` rows. `kept`: of logits and what the head reads so many are asked for, by their numbers in `keep`; -1: all. `to`: where
  // the outputs go; where null they stay here until the next pass.
  void run(int64_t size, const int64_t* ids, const int64_t* positions, int64_t kept, const int64_t* keep, void* const* to) {
    const int32_t whole = torch.aoti_torch_dtype_int64;
    tensors_[0] = Tensor::around((void*)ids, {1, size}, whole);
    tensors_[1] = Tensor::around((void*)positions, {1, size}, whole);
    tensors_[2] = kept < 0 ? Tensor() : Tensor::around((void*)keep, {kept}, whole);
    const int64_t rows = kept < 0 ? size : kept;
    const OwnMemory ours;
    for (const Step& step : steps_) {
      const auto output = std::find_if(outputs_.begin(), outputs_.end(), [&](const Output& each) { return each.value == step.to; });
      make(step, to && output != outputs_.end() ? to[output - outputs_.begin()] : nullptr);
      for (int64_t value : step.last_read) tensors_[value] = Tensor();
    }
    for (size_t i = 0; i < outputs_.size(); ++i) {
      const Output& output = outputs_[i];
      Tensor& found = tensors_[output.value];
      const int64_t count = i < 2 ? rows : size;  // layers give all rows
      check(found.defined() && found.dtype() == output.dtype && found.numel() == count * output.width, "an output of another size or type");
      if (!to) {
        if (!found.is_contiguous()) found = found.contiguous_copy();
        continue;
      }
      if (found.data() != to[i]) Tensor::around(to[i], found.shape(), found.dtype()).copy_(found);
    }
    if (!to) return;
    for (const Output& output : outputs_)  // at the end: two may be one value, as a head's logits may be what it reads
      if (made_[output.value]) tensors_[output.value] = Tensor();
  }

  // The first output of the last pass, which is the caller's from now on.
  Tensor logits() { return std::exchange(tensors_[outputs_[0].value], Tensor()); }

  // One of the others, see `states`, by its number.
  const void* state(int64_t number) const {
    check(number >= 0 && number + 1 < (int64_t)outputs_.size(), "a hidden state that is not captured");
    return tensors_[outputs_[number + 1].value].data();
  }

  // Copies the others, hidden states of the layers that are captured: they are here until the next pass.
  void states(void* const* to) const {
    for (size_t i = 1; i < outputs_.size(); ++i) {
      const Tensor& state = tensors_[outputs_[i].value];
      std::memcpy(to[i - 1], state.data(), state.numel() * state.element_size());
    }
  }

 private:
  // How many values a step makes.
  static int64_t given_by(const Step& step) { return step.op == Op::torch ? step.given[2].value : 1; }

  const Tensor& tensor(const Operand& operand) const {
    check(operand.kind == Operand::tensor && tensors_[operand.value].defined(), "a step reads what is no tensor");
    return tensors_[operand.value];
  }

  int64_t number(const Operand& operand) const {
    check(operand.kind == Operand::whole || operand.kind == Operand::number, "a step reads what is no whole number");
    return operand.kind == Operand::whole ? operand.value : numbers_[operand.value];
  }

  double real(const Operand& operand) const { return operand.kind == Operand::real ? number_of(operand.value) : double(number(operand)); }

  std::vector<Tensor> tensors(const std::vector<Operand>& given, int64_t first, int64_t end) const {
    std::vector<Tensor> found;
    for (int64_t i = first; i < end; ++i) found.push_back(tensor(given[i]).another());
    return found;
  }

  // A dimension of x, counted from the end where it is negative.
  static int64_t along(const Tensor& x, int64_t d, int64_t more = 0) {
    const int64_t found = d < 0 ? d + x.dim() + more : d;
    check(found >= 0 && found < x.dim() + more, "a dimension that is none");
    return found;
  }

  void make(const Step& step, void* to) {
    const auto& given = step.given;
    Tensor& y = tensors_[step.to];
    switch (step.op) {
      case Op::linear: y = linear(tensor(given[0]), number(given[1]), number(given[2]), to); break;
      case Op::experts: y = experts(tensor(given[0]), tensor(given[1]), number(given[2]), number(given[3]), number(given[4])); break;
      case Op::attend:
        y = attend(tensor(given[0]), tensor(given[1]), tensor(given[2]), number(given[3]), real(given[4]), real(given[5]), number(given[6]));
        break;
      case Op::cross: y = cross(tensor(given[0]), number(given[1]), real(given[2])); break;
      case Op::recur: {
        const int64_t rows = 2 + number(given[1]);
        y = recur(tensors(given, 2, rows), tensors(given, rows, given.size()), number(given[0]));
        break;
      }
      case Op::norm: y = norm(tensors(given, 3, given.size()), tensor(given[0]), real(given[1]), number(given[2])); break;
      case Op::gated: y = gated(tensor(given[0]), tensor(given[1]), number(given[2])); break;
      case Op::rotate: y = rotate(tensor(given[0]), tensor(given[1]), tensor(given[2])); break;
      case Op::look_up: y = look_up(tensor(given[0]), number(given[1]), number(given[2])); break;
      case Op::rows: y = rows(tensor(given[0]), tensor(given[1])); break;
      case Op::kept: {
        const Tensor& x = tensor(given[0]);
        y = x.another();
        if (tensors_[2].defined()) {
          std::vector<Value> stack{(Value)x.for_torch(), (Value)along(x, number(given[1])), (Value)tensors_[2].for_torch()};
          call("aten::index_select", "", stack, 1);
          y = Tensor(stack[0]);
        }
        break;
      }
      case Op::size: numbers_[step.to] = tensor(given[0]).size(along(tensor(given[0]), number(given[1]))); break;
      case Op::view: y = viewed(tensor(given[0]), given); break;
      case Op::transpose: {
        const Tensor& x = tensor(given[0]);
        y = x.transposed(along(x, number(given[1])), along(x, number(given[2])));
        break;
      }
      case Op::unsqueeze: y = tensor(given[0]).unsqueezed(along(tensor(given[0]), number(given[1]), 1)); break;
      case Op::slice: {
        const Tensor& x = tensor(given[0]);
        const int64_t d = along(x, number(given[1])), all = x.size(d);
        auto within = [&](int64_t at) { return std::clamp<int64_t>(at < 0 ? at + all : at, 0, all); };
        const int64_t first = within(number(given[2])), end = within(number(given[3]));
        y = x.narrowed(d, first, std::max<int64_t>(0, end - first));
        break;
      }
      case Op::part: {
        const Tensor& x = tensor(given[0]);
        const int64_t d = along(x, number(given[1])), parts = number(given[2]), each = x.size(d) / parts;
        check(each * parts == x.size(d), "parts of several sizes");
        y = x.narrowed(d, number(given[3]) * each, each);
        break;
      }
      case Op::contiguous: y = tensor(given[0]).contiguous(); break;
      case Op::add: y = ours(given) ? combined(given, [](f16v a, f16v b) { return a + b; }) : added(given, 1); break;
      case Op::sub: y = ours(given) ? combined(given, [](f16v a, f16v b) { return a - b; }) : added(given, -1); break;
      case Op::mul: y = ours(given) ? combined(given, [](f16v a, f16v b) { return a * b; }) : called("aten::mul", given); break;
      case Op::div: y = ours(given) ? combined(given, [](f16v a, f16v b) { return a / b; }) : called("aten::div", given); break;
      case Op::clamp_min:
        y = ours(given) ? combined(given, [](f16v a, f16v b) { return chosen(a < b, b, a); }) : called("aten::clamp_min", given);
        break;
      case Op::clamp_max:
        y = ours(given) ? combined(given, [](f16v a, f16v b) { return chosen(a > b, b, a); }) : called("aten::clamp_max", given);
        break;
      case Op::whole: numbers_[step.to] = counted(Arithmetic(number(given[0])), number(given[1]), number(given[2])); break;
      case Op::torch: {
        std::vector<Value> stack;
        for (size_t at = 3; at < given.size();) stack.push_back(argument(given, at));
        const int64_t count = given_by(step);
        call(texts_[given[0].value].c_str(), texts_[given[1].value].c_str(), stack, count);
        for (int64_t i = 0; i < count; ++i) tensors_[step.to + i] = Tensor(stack[i]);
        break;
      }
      default: check(false, "a step of an operator that is not known");
    }
  }

  Tensor viewed(const Tensor& x, const std::vector<Operand>& given) const {
    std::vector<int64_t> sizes;
    int64_t known = 1, open = -1;
    for (size_t i = 1; i < given.size(); ++i) {
      sizes.push_back(number(given[i]));
      if (sizes.back() < 0) open = i - 1;
      else known *= sizes.back();
    }
    if (open >= 0) sizes[open] = known ? x.numel() / known : 0, known *= sizes[open];
    check(known == x.numel(), "a view of another size");
    return x.viewed(sizes);
  }

  // The rows of a table by their numbers.
  static Tensor rows(const Tensor& table, const Tensor& which) {
    check(which.dtype() == torch.aoti_torch_dtype_int64 && which.is_contiguous() && table.is_contiguous(), "rows by numbers of another type");
    std::vector<int64_t> sizes = which.shape(), row = table.shape();
    sizes.insert(sizes.end(), row.begin() + 1, row.end());
    Tensor y = Tensor::empty(sizes, table.dtype());
    const int64_t all = table.size(0), bytes = all ? table.numel() / all * table.element_size() : 0;
    const int64_t* numbers = (const int64_t*)which.data();
    for (int64_t i = 0; i < which.numel(); ++i) {
      check(numbers[i] >= 0 && numbers[i] < all, "a row that is none");
      std::memcpy((char*)y.data() + i * bytes, (const char*)table.data() + numbers[i] * bytes, bytes);
    }
    return y;
  }

  static int64_t counted(Arithmetic which, int64_t a, int64_t b) {
    switch (which) {
      case Arithmetic::add: return a + b;
      case Arithmetic::sub: return a - b;
      case Arithmetic::mul: return a * b;
      case Arithmetic::floor_divide: check(b > 0 && a >= 0, "a quotient of negative numbers"); return a / b;
    }
    check(false, "arithmetic that is not known");
    return 0;
  }

  // ------------------------------------------------------------ torch's own operators

  // An argument as torch takes it, which then owns it; `at` goes on behind it.
  Value argument(const std::vector<Operand>& given, size_t& at) const {
    check(at < given.size(), "an argument that is missing");
    const Operand& operand = given[at++];
    switch (operand.kind) {
      case Operand::tensor: return (Value)tensor(operand).for_torch();
      case Operand::none: return 0;
      case Operand::some: return (Value) new Value(argument(given, at));
      case Operand::list: {
        ListHandle list;
        TORCH_CALL(torch_new_list_reserve_size, operand.value, &list);
        for (int64_t i = 0; i < operand.value; ++i) TORCH_CALL(torch_list_push_back, list, argument(given, at));
        return (Value)list;
      }
      case Operand::text: {
        StringHandle text;
        TORCH_CALL(torch_new_string_handle, texts_[operand.value].data(), texts_[operand.value].size(), &text);
        return (Value)text;
      }
      case Operand::real: return operand.value;
      default: return number(operand);
    }
  }

  // An operator that gives so many tensors, which are in the place of its arguments then.
  static void call(const char* name, const char* overload, std::vector<Value>& stack, int64_t count) {
    stack.resize(std::max<size_t>(stack.size(), count));
    const OwnMemory theirs(false);
    TORCH_CALL(torch_call_dispatcher, name, overload, stack.data(), built_for);
  }

  // Of whole numbers and a number torch makes another type than of whole numbers and a tensor without dimensions.
  void check_number(const std::vector<Operand>& given) const {
    const int32_t dtype = tensor(given[0]).dtype();
    const auto real = {torch.aoti_torch_dtype_float16, torch.aoti_torch_dtype_bfloat16, torch.aoti_torch_dtype_float32, torch.aoti_torch_dtype_float64};
    const bool whole = std::find(real.begin(), real.end(), dtype) == real.end();
    check(given[1].kind != Operand::real || !whole, "whole numbers and another one");
  }

  // For torch; a number as a tensor without dimensions.
  TensorHandle of_torch(const Operand& operand) const {
    if (operand.kind == Operand::tensor) return tensor(operand).for_torch();
    const bool real = operand.kind == Operand::real;
    const OwnMemory ours;
    const Tensor y = Tensor::empty({}, real ? torch.aoti_torch_dtype_float64 : torch.aoti_torch_dtype_int64);
    *(int64_t*)y.data() = real ? operand.value : number(operand);
    return y.for_torch();
  }

  Tensor called(const char* name, const std::vector<Operand>& given) const {
    check_number(given);
    std::vector<Value> stack{(Value)of_torch(given[0]), (Value)of_torch(given[1])};
    call(name, "Tensor", stack, 1);
    return Tensor(stack[0]);
  }

  // x + y * factor
  Tensor added(const std::vector<Operand>& given, double factor) const {
    check_number(given);
    const Tensor x(of_torch(given[0])), y(of_torch(given[1]));
    TensorHandle sum;
    TORCH_CALL(aoti_torch_cpu_add_Tensor, x.handle(), y.handle(), factor, &sum);
    return Tensor(sum);
  }

  // ------------------------------------------------------------ number by number

  // Whether numbers are of a type that is ours, lie one behind the other, and those of two tensors belong to each other: of others torch
  // gives what lies otherwise.
  bool ours(const std::vector<Operand>& given) const {
    const Tensor& x = tensor(given[0]);
    if ((x.dtype() != torch.aoti_torch_dtype_bfloat16 && x.dtype() != torch.aoti_torch_dtype_float32) || !x.is_contiguous()) return false;
    if (given[1].kind != Operand::tensor) return true;
    const Tensor& y = tensor(given[1]);
    return y.shape() == x.shape() && y.dtype() == x.dtype() && y.is_contiguous();
  }

  // The second may be one for all.
  template <typename F>
  Tensor combined(const std::vector<Operand>& given, const F& f) const {
    const bool same = given[1].kind == Operand::tensor;
    const Tensor &x = tensor(given[0]), &other = same ? tensor(given[1]) : x;
    Tensor y = Tensor::empty(x.shape(), x.dtype());
    const float by = same ? 0 : float(real(given[1]));
    const int64_t count = x.numel();
    auto run = [&]<typename T>(const T* a, const T* b, T* to) {
      parallel_for(0, count, 1 << 15, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i += 16) {
          const int64_t n = std::min<int64_t>(16, end - i);
          put(to + i, f(first16(a + i, n), same ? first16(b + i, n) : f16v{} + by), n);
        }
      });
    };
    if (x.dtype() == torch.aoti_torch_dtype_bfloat16) run((const bf16*)x.data(), (const bf16*)other.data(), (bf16*)y.data());
    else run((const float*)x.data(), (const float*)other.data(), (float*)y.data());
    return y;
  }

  std::vector<Tensor> tensors_;
  std::vector<int64_t> numbers_;
  std::vector<char> made_;  // by steps
  std::vector<Step> steps_;
  std::vector<Output> outputs_;
  std::vector<int64_t> tables_;
  std::vector<std::string> texts_;
};

}  // namespace

extern "C" {

// See Program.
int64_t sk_program(int64_t values, int64_t length, const int64_t* code, int64_t outputs, const void* output, int64_t tables,
                   const int64_t* table, int64_t texts, const char* const* text) {
  const Output* given = (const Output*)output;
  return (int64_t) new Program(values, length, code, {given, given + outputs}, {table, table + tables}, {text, text + texts});
}

void sk_free_program(int64_t program) { delete (Program*)program; }

// Gives a program a tensor that lies at `data`; `dtype` as torch numbers them.
void sk_constant(int64_t program, int64_t value, void* data, int64_t dtype, int64_t dim, const int64_t* sizes, const int64_t* strides) {
  ((Program*)program)->set(value, Tensor::around(data, {sizes, sizes + dim}, dtype, strides));
}

// Runs the pass that was begun, see Program::run. 0: it is done; 1: a position lies behind the tables, nothing was done; 2: it fails, and
// `why` says why.
int sk_run(int64_t program, int64_t size, const int64_t* ids, const int64_t* positions, int64_t kept, const int64_t* keep, void* const* to,
           const char** why) try {
  auto& own = *(Program*)program;
  if (!own.reaches(positions, size)) return 1;
  own.run(size, ids, positions, kept, keep, to);
  return 0;
} catch (const std::exception& error) {
  static thread_local std::string said;
  said = error.what(), *why = said.c_str();
  return 2;
}
}
