// What the kernels use of torch: a few functions of its stable C interface (torch/csrc/inductor/aoti_torch/c/shim.h and
// torch/csrc/stable/c/shim.h), looked up by name in the torch that the process has loaded.
//
// So one build serves torch 2.11 and later, and is made without torch's headers and libraries. Where no torch is bound the library
// still runs, in one thread.

#pragma once

#include <dlfcn.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace {

using TensorHandle = struct TensorOpaque*;
using LibraryHandle = struct LibraryOpaque*;
using ListHandle = struct ListOpaque*;
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
  F(torch_parallel_for, (int64_t, int64_t, int64_t, void (*)(int64_t, int64_t, void*), void*))                                          \
  F(aoti_torch_library_init_def, (const char*, const char*, uint32_t, LibraryHandle*))                                                  \
  F(aoti_torch_library_init_impl, (const char*, const char*, const char*, uint32_t, LibraryHandle*))                                    \
  F(aoti_torch_library_def, (LibraryHandle, const char*))                                                                               \
  F(torch_library_impl, (LibraryHandle, const char*, void (*)(Value*, uint64_t, uint64_t), uint64_t))

#define TORCH_NUMBERS(F)         \
  F(aoti_torch_dtype_float32)    \
  F(aoti_torch_dtype_bfloat16)   \
  F(aoti_torch_dtype_int64)      \
  F(aoti_torch_device_type_cpu)

struct {
#define MEMBER(name, arguments) int32_t(*name) arguments = nullptr;
  TORCH_CALLS(MEMBER)
#undef MEMBER
#define MEMBER(name) int32_t name = -1;
  TORCH_NUMBERS(MEMBER)
#undef MEMBER
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

// One reference to a tensor on the CPU.
class Tensor {
 public:
  Tensor() = default;
  explicit Tensor(TensorHandle handle) : handle_(handle) {}
  explicit Tensor(Value value) : handle_((TensorHandle)value) {}
  Tensor(Tensor&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Tensor& operator=(Tensor&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Tensor() {
    if (handle_) torch.aoti_torch_delete_tensor_object(handle_);
  }

  // A new one, whose numbers are not set.
  static Tensor empty(const std::vector<int64_t>& sizes, int32_t dtype) {
    int64_t strides[16], step = 1;
    check(sizes.size() <= 16, "a tensor with more than 16 dimensions");
    for (size_t i = sizes.size(); i-- > 0; step *= sizes[i]) strides[i] = step;
    TensorHandle handle;
    TORCH_CALL(aoti_torch_empty_strided, (int64_t)sizes.size(), sizes.data(), strides, dtype, torch.aoti_torch_device_type_cpu, 0,
               &handle);
    return Tensor(handle);
  }

  Tensor another() const {
    TensorHandle handle;
    TORCH_CALL(aoti_torch_new_tensor_handle, handle_, &handle);
    return Tensor(handle);
  }

  Value release() { return (Value)std::exchange(handle_, nullptr); }

  bool defined() const { return handle_; }
  int64_t dim() const { return got<int64_t>(torch.aoti_torch_get_dim); }
  const int64_t* sizes() const { return got<int64_t*>(torch.aoti_torch_get_sizes); }
  const int64_t* strides() const { return got<int64_t*>(torch.aoti_torch_get_strides); }
  int64_t size(int64_t d) const { return sizes()[d < 0 ? d + dim() : d]; }
  int64_t stride(int64_t d) const { return strides()[d < 0 ? d + dim() : d]; }
  int32_t dtype() const { return got<int32_t>(torch.aoti_torch_get_dtype); }
  void* data() const { return got<void*>(torch.aoti_torch_get_data_ptr); }
  int64_t element_size() const { return dtype() == torch.aoti_torch_dtype_bfloat16 ? 2 : 4; }
  std::vector<int64_t> shape() const { return {sizes(), sizes() + dim()}; }
  int64_t numel() const {
    int64_t all = 1;
    for (int64_t d = 0; d < dim(); ++d) all *= size(d);
    return all;
  }

  bool is_contiguous() const {
    int64_t expected = 1;
    for (int64_t d = dim(); d-- > 0; expected *= size(d))
      if (size(d) != 1 && stride(d) != expected) return numel() == 0;
    return true;
  }

  Tensor contiguous_copy() const {
    Tensor y = empty(shape(), dtype());
    y.copy_(*this);
    return y;
  }

  void copy_(const Tensor& other) const { TORCH_CALL(aoti_torch_copy_, handle_, other.handle_, 0); }

 private:
  template <typename T>
  T got(int32_t (*get)(TensorHandle, T*)) const {
    T y;
    check(get(handle_, &y) == 0, "torch tells nothing of a tensor");
    return y;
  }

  TensorHandle handle_ = nullptr;
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
