// What the kernels use of torch: a few functions of its stable C interface (torch/csrc/inductor/aoti_torch/c/shim.h and
// torch/csrc/stable/c/shim.h), looked up by name in the torch that the process has loaded.
//
// So one build serves torch 2.11 and later, and is made without torch's headers and libraries. Where no torch is bound the library
// still runs, in one thread.

#pragma once

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace {

using TensorHandle = struct TensorOpaque*;
using LibraryHandle = struct LibraryOpaque*;
using ListHandle = struct ListOpaque*;
using StringHandle = struct StringOpaque*;
using Value = uint64_t;  // of any type of a schema: the bits of a number, a tensor's handle, or where the value of an optional lies

constexpr uint64_t built_for = 2ull << 56 | 11ull << 48;  // torch 2.11: what a Value means

#define TORCH_CALLS(F)                                                                                                                  \
  F(aoti_torch_get_dim, (TensorHandle, int64_t*))                                                                                       \
  F(aoti_torch_get_sizes, (TensorHandle, int64_t**))                                                                                    \
  F(aoti_torch_get_strides, (TensorHandle, int64_t**))                                                                                  \
  F(aoti_torch_get_dtype, (TensorHandle, int32_t*))                                                                                     \
  F(aoti_torch_get_data_ptr, (TensorHandle, void**))                                                                                    \
  F(aoti_torch_new_tensor_handle, (TensorHandle, TensorHandle*))                                                                        \
  F(aoti_torch_delete_tensor_object, (TensorHandle))                                                                                    \
  F(aoti_torch_empty_strided, (int64_t, const int64_t*, const int64_t*, int32_t, int32_t, int32_t, TensorHandle*))                      \
  F(aoti_torch_copy_, (TensorHandle, TensorHandle, int32_t))                                                                            \
  F(torch_list_size, (ListHandle, size_t*))                                                                                             \
  F(torch_list_get_item, (ListHandle, size_t, Value*))                                                                                  \
  F(torch_delete_list, (ListHandle))                                                                                                    \
  F(torch_new_list_reserve_size, (size_t, ListHandle*))                                                                                 \
  F(torch_list_push_back, (ListHandle, Value))                                                                                          \
  F(torch_new_string_handle, (const char*, size_t, StringHandle*))                                                                      \
  F(torch_call_dispatcher, (const char*, const char*, Value*, uint64_t))                                                                \
  F(torch_from_blob, (void*, int64_t, const int64_t*, const int64_t*, int64_t, int32_t, int32_t, int32_t, TensorHandle*, int32_t,       \
                      const uint8_t*, int64_t, void (*)(void*, void*), void*))                                                          \
  F(aoti_torch_cpu_add_Tensor, (TensorHandle, TensorHandle, double, TensorHandle*))                                                     \
  F(torch_parallel_for, (int64_t, int64_t, int64_t, void (*)(int64_t, int64_t, void*), void*))                                          \
  F(aoti_torch_library_init_def, (const char*, const char*, uint32_t, LibraryHandle*))                                                  \
  F(aoti_torch_library_init_impl, (const char*, const char*, const char*, uint32_t, LibraryHandle*))                                    \
  F(aoti_torch_library_def, (LibraryHandle, const char*))                                                                               \
  F(torch_library_impl, (LibraryHandle, const char*, void (*)(Value*, uint64_t, uint64_t), uint64_t))

#define TORCH_NUMBERS(F)         \
  F(aoti_torch_dtype_float32)    \
  F(aoti_torch_dtype_bfloat16)   \
  F(aoti_torch_dtype_float16)    \
  F(aoti_torch_dtype_int64)      \
  F(aoti_torch_dtype_float64)    \
  F(aoti_torch_device_type_cpu)  \
  F(aoti_torch_layout_strided)

struct {
#define MEMBER(name, arguments) int32_t(*name) arguments = nullptr;
  TORCH_CALLS(MEMBER)
#undef MEMBER
#define MEMBER(name) int32_t name = -1;
  TORCH_NUMBERS(MEMBER)
#undef MEMBER
  size_t (*aoti_torch_dtype_element_size)(int32_t) = nullptr;
} torch;

// An error of the caller: RuntimeError in Python.
inline void check(bool fine, const char* what) {
  if (!fine) throw std::runtime_error(what);
}

// Looks all of them up in a library that dlopen gave.
inline void bind_torch(void* library) {
  auto find = [&](const char* name) {
    void* found = dlsym(library, name);
    if (!found) throw std::runtime_error(std::string("this torch has no ") + name);
    return found;
  };
#define BIND(name, arguments) torch.name = (decltype(torch.name))find(#name);
  TORCH_CALLS(BIND)
#undef BIND
#define BIND(name) torch.name = ((int32_t(*)())find(#name))();
  TORCH_NUMBERS(BIND)
#undef BIND
  torch.aoti_torch_dtype_element_size = (size_t(*)(int32_t))find("aoti_torch_dtype_element_size");
}

// Calls a function of torch, which says by a number other than 0 that it has failed.
#define TORCH_CALL(name, ...) check(torch.name(__VA_ARGS__) == 0, "torch: " #name " has failed")

// Calls f(begin, end) for parts of a range that torch's threads share.
template <typename F>
inline void parallel_for(int64_t begin, int64_t end, int64_t grain, const F& f) {
  if (end - begin <= std::max<int64_t>(grain, 1) || !torch.torch_parallel_for) {
    if (begin < end) f(begin, end);
    return;
  }
  auto call = [](int64_t first, int64_t last, void* context) { (*(const F*)context)(first, last); };
  TORCH_CALL(torch_parallel_for, begin, end, grain, call, (void*)&f);
}

constexpr int64_t most_dims = 8;

// Memory of tensors that torch does not know. Blocks that are given back are kept for the next of their size, but for large ones.
class Block {
 public:
  static Block* take(int64_t bytes) {
    const int level = std::bit_width(uint64_t(std::max<int64_t>(bytes, 64)) - 1);
    if (level < levels) {
      std::lock_guard held(lock_);
      if (Block* found = free_[level]) {
        free_[level] = found->next_;
        return found->again();
      }
    }
    void* room = std::aligned_alloc(64, sizeof(Block) + (level < levels ? int64_t(1) << level : (bytes + 63) / 64 * 64));
    check(room, "out of memory");
    Block* made = new (room) Block();
    made->level_ = level;
    return made->again();
  }

  Block* share() {
    ++users_;
    return this;
  }

  void drop() {
    if (--users_) return;
    if (level_ >= levels) return std::free(this);
    std::lock_guard held(lock_);
    next_ = free_[level_], free_[level_] = this;
  }

  void* data() { return this + 1; }

 private:
  Block* again() {
    users_ = 1;
    return this;
  }

  static constexpr int levels = 25;  // of up to 16 MB
  static inline Block* free_[levels] = {};
  static inline std::mutex lock_;
  alignas(64) std::atomic<int64_t> users_;
  int level_;
  Block* next_;
};

// As long as it lives, new tensors of its thread are of our own memory, as those of a program (program.h), or of torch's: an operator of torch
// that a program calls may call one of ours.
class OwnMemory {
 public:
  explicit OwnMemory(bool ours = true) : before_(std::exchange(wanted, ours)) {}
  ~OwnMemory() { wanted = before_; }
  static inline thread_local bool wanted = false;

 private:
  bool before_;
};

// One reference to a tensor on the CPU: of torch, of our own memory, or of memory that somebody else holds.
class Tensor {
 public:
  Tensor() = default;
  explicit Tensor(TensorHandle handle) : handle_(handle) {
    int64_t *sizes, *strides;
    check(torch.aoti_torch_get_dim(handle, &dim_) == 0 && torch.aoti_torch_get_sizes(handle, &sizes) == 0 &&
              torch.aoti_torch_get_strides(handle, &strides) == 0 && torch.aoti_torch_get_dtype(handle, &dtype_) == 0 &&
              torch.aoti_torch_get_data_ptr(handle, &data_) == 0,
          "torch tells nothing of a tensor");
    check(dim_ <= most_dims, "a tensor with more than 8 dimensions");
    std::copy_n(sizes, dim_, sizes_), std::copy_n(strides, dim_, strides_);
  }
  explicit Tensor(Value value) : Tensor((TensorHandle)value) {}
  Tensor(Tensor&& other) noexcept { *this = std::move(other); }
  Tensor& operator=(Tensor&& other) noexcept {
    std::swap(handle_, other.handle_), std::swap(block_, other.block_);
    data_ = other.data_, dtype_ = other.dtype_, dim_ = std::exchange(other.dim_, -1);
    std::copy_n(other.sizes_, most_dims, sizes_), std::copy_n(other.strides_, most_dims, strides_);
    return *this;
  }
  ~Tensor() { drop(); }

  // Around memory that stays as long as it is used; without gaps where no strides are given.
  static Tensor around(void* data, const std::vector<int64_t>& sizes, int32_t dtype, const int64_t* strides = nullptr) {
    Tensor y;
    y.shape_as(sizes), y.data_ = data, y.dtype_ = dtype;
    if (strides) std::copy_n(strides, y.dim_, y.strides_);
    return y;
  }

  // A new one, whose numbers are not set.
  static Tensor empty(const std::vector<int64_t>& sizes, int32_t dtype) {
    Tensor y;
    y.shape_as(sizes), y.dtype_ = dtype;
    if (OwnMemory::wanted) {
      y.block_ = Block::take(y.numel() * y.element_size()), y.data_ = y.block_->data();
      return y;
    }
    TensorHandle handle;
    TORCH_CALL(aoti_torch_empty_strided, y.dim_, y.sizes_, y.strides_, dtype, torch.aoti_torch_device_type_cpu, 0, &handle);
    return Tensor(handle);
  }

  Tensor another() const {
    Tensor y;
    if (handle_) TORCH_CALL(aoti_torch_new_tensor_handle, handle_, &y.handle_);
    if (block_) y.block_ = block_->share();
    y.data_ = data_, y.dtype_ = dtype_, y.dim_ = dim_;
    std::copy_n(sizes_, most_dims, y.sizes_), std::copy_n(strides_, most_dims, y.strides_);
    return y;
  }

  // The same numbers, seen otherwise; they are copied where they do not lie as that takes it. Strides are those that torch gives.
  Tensor viewed(const std::vector<int64_t>& sizes) const {
    int64_t strides[most_dims];
    const bool fits = strides_of(sizes, strides);
    Tensor y = fits ? another() : contiguous_copy();
    y.shape_as(sizes);
    if (fits) std::copy_n(strides, y.dim_, y.strides_);
    return y;
  }

  Tensor unsqueezed(int64_t d) const {
    Tensor y = another();
    const int64_t stride = d < dim_ ? sizes_[d] * strides_[d] : 1;
    check(dim_ < most_dims, "a tensor with more than 8 dimensions");
    std::copy_backward(sizes_ + d, sizes_ + dim_, y.sizes_ + dim_ + 1), std::copy_backward(strides_ + d, strides_ + dim_, y.strides_ + dim_ + 1);
    y.sizes_[d] = 1, y.strides_[d] = stride, ++y.dim_;
    return y;
  }

  Tensor transposed(int64_t a, int64_t b) const {
    Tensor y = another();
    std::swap(y.sizes_[a], y.sizes_[b]), std::swap(y.strides_[a], y.strides_[b]);
    return y;
  }

  // Its numbers from `first` on, as many along a dimension.
  Tensor narrowed(int64_t d, int64_t first, int64_t count) const {
    Tensor y = another();
    y.data_ = (char*)data_ + first * strides_[d] * element_size(), y.sizes_[d] = count;
    return y;
  }

  Value release() {
    check(handle_, "a tensor that torch does not know");
    dim_ = -1;
    return (Value)std::exchange(handle_, nullptr);
  }

  // A tensor of torch with this one's numbers, which live as long as it does; the caller's.
  TensorHandle for_torch() const {
    TensorHandle made;
    auto drop = [](void*, void* held) { delete (Tensor*)held; };
    TORCH_CALL(torch_from_blob, data_, dim_, sizes_, strides_, 0, dtype_, torch.aoti_torch_device_type_cpu, -1, &made,
               torch.aoti_torch_layout_strided, nullptr, 0, drop, new Tensor(another()));
    return made;
  }

  TensorHandle handle() const { return handle_; }
  bool defined() const { return dim_ >= 0; }
  int64_t dim() const { return dim_; }
  int64_t size(int64_t d) const { return sizes_[d < 0 ? d + dim_ : d]; }
  int64_t stride(int64_t d) const { return strides_[d < 0 ? d + dim_ : d]; }
  int32_t dtype() const { return dtype_; }
  void* data() const { return data_; }
  int64_t element_size() const {
    if (dtype_ == torch.aoti_torch_dtype_float32) return 4;
    return dtype_ == torch.aoti_torch_dtype_bfloat16 ? 2 : torch.aoti_torch_dtype_element_size(dtype_);
  }
  std::vector<int64_t> shape() const { return {sizes_, sizes_ + std::max<int64_t>(dim_, 0)}; }
  int64_t numel() const {
    int64_t all = 1;
    for (int64_t d = 0; d < dim_; ++d) all *= sizes_[d];
    return all;
  }

  bool is_contiguous() const {
    int64_t expected = 1;
    for (int64_t d = dim_; d-- > 0; expected *= sizes_[d])
      if (sizes_[d] != 1 && strides_[d] != expected) return numel() == 0;
    return true;
  }

  Tensor contiguous() const { return is_contiguous() ? another() : contiguous_copy(); }

  Tensor contiguous_copy() const {
    Tensor y = empty(shape(), dtype_);
    y.copy_(*this);
    return y;
  }

  // Its numbers become those of another one of its shape.
  void copy_(const Tensor& other) const {
    if (handle_ && other.handle_) {
      TORCH_CALL(aoti_torch_copy_, handle_, other.handle_, 0);
      return;
    }
    check(dtype_ == other.dtype_ && is_contiguous(), "a copy that only torch can make");
    char* to = (char*)data_;
    copy_lines(other, 0, (const char*)other.data_, to);
  }

 private:
  void drop() {
    if (handle_) torch.aoti_torch_delete_tensor_object(handle_);
    if (block_) block_->drop();
  }

  // Strides of a view of these sizes, which has as many numbers; false: there is none. Dimensions that lie behind one another are one chunk,
  // and those of the view have to end where chunks end.
  bool strides_of(const std::vector<int64_t>& sizes, int64_t* strides) const {
    check(sizes.size() <= most_dims, "a tensor with more than 8 dimensions");
    int64_t to = (int64_t)sizes.size() - 1, step = 1;
    if (is_contiguous() || !dim_) {
      for (; to >= 0; step *= std::max<int64_t>(sizes[to], 1), --to) strides[to] = step;
      return true;
    }
    int64_t chunk = 1, seen = 1, base = strides_[dim_ - 1];
    for (int64_t d = dim_; d-- > 0;) {
      chunk *= sizes_[d];
      if (d && (sizes_[d - 1] == 1 || strides_[d - 1] == chunk * base)) continue;
      for (; to >= 0 && (seen < chunk || sizes[to] == 1); --to) strides[to] = seen * base, seen *= sizes[to];
      if (seen != chunk) return false;
      if (d) base = strides_[d - 1], chunk = seen = 1;
    }
    return to < 0;
  }

  void shape_as(const std::vector<int64_t>& sizes) {
    check(sizes.size() <= most_dims, "a tensor with more than 8 dimensions");
    dim_ = sizes.size();
    int64_t step = 1;
    for (int64_t d = dim_; d-- > 0; step *= sizes[d]) sizes_[d] = sizes[d], strides_[d] = step;
  }

  static void copy_lines(const Tensor& from, int64_t d, const char* at, char*& to) {
    const int64_t size = from.element_size();
    if (d == from.dim_ || (d + 1 == from.dim_ && from.strides_[d] == 1)) {
      const int64_t bytes = (d == from.dim_ ? 1 : from.sizes_[d]) * size;
      std::memcpy(to, at, bytes);
      to += bytes;
      return;
    }
    for (int64_t i = 0; i < from.sizes_[d]; ++i) copy_lines(from, d + 1, at + i * from.strides_[d] * size, to);
  }

  TensorHandle handle_ = nullptr;  // of torch's
  Block* block_ = nullptr;         // of our own memory
  void* data_ = nullptr;
  int32_t dtype_ = -1;
  int64_t dim_ = -1, sizes_[most_dims], strides_[most_dims];
};

// The tensors of a list, which is used up.
inline std::vector<Tensor> tensors_of(Value list) {
  const ListHandle handle = (ListHandle)list;
  size_t count;
  TORCH_CALL(torch_list_size, handle, &count);
  std::vector<Tensor> found;
  for (size_t i = 0; i < count; ++i) {
    Value each;
    TORCH_CALL(torch_list_get_item, handle, i, &each);
    found.emplace_back(each);
  }
  TORCH_CALL(torch_delete_list, handle);
  return found;
}

inline double number_of(Value x) {
  double y;
  std::memcpy(&y, &x, 8);
  return y;
}

}  // namespace
