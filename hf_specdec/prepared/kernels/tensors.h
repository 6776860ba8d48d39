// The tensors that kernels get, and the two ways to call a kernel.
//
// Compiled steps call the functions of `NAMED` with arguments of torch's C interface. All others call operations of torch,
// which costs microseconds.

#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <cstdint>
#include <optional>
#include <tuple>

// The number type that a library is compiled for, and the suffix of its operations' names.
#ifndef NUMBER
#define NUMBER float
#define SUFFIX float
#endif

using torch::stable::Tensor;

#define JOIN_NOW(a, b) a##b
#define JOIN(a, b) JOIN_NOW(a, b)
#define TEXT_NOW(name) #name
#define TEXT(name) TEXT_NOW(name)
#define FUNCTION(name) JOIN(aoti_torch_cpu_##name##_, SUFFIX)
#define NAMED(name) extern "C" AOTITorchError FUNCTION(name)
#define OPERATION(name) name "_" TEXT(SUFFIX)

namespace {

using Handle = AtenTensorHandle;

// A tensor that the caller owns, or none.
struct Given {
  Given() : handle(nullptr) {}
  Given(Handle handle) : handle(handle) {}
  Given(const Handle* handle) : handle(handle ? *handle : nullptr) {}
  explicit operator bool() const { return handle; }
  int64_t size(int64_t dim) const { return number(aoti_torch_get_size, dim); }
  int64_t stride(int64_t dim) const { return number(aoti_torch_get_stride, dim); }
  int64_t dims() const { return number(aoti_torch_get_dim); }
  int64_t numel() const { return number(aoti_torch_get_numel); }
  int32_t type() const {
    int32_t type;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(handle, &type));
    return type;
  }
  Handle handle;

 private:
  template <class Get, class... At> int64_t number(Get get, At... at) const {
    int64_t found;
    STABLE_TORCH_ERROR_CODE_CHECK(get(handle, at..., &found));
    return found;
  }
};

// The address of a tensor's numbers; null if there is no tensor.
template <class T> T* pointer(Given of) {
  void* at = nullptr;
  if (of) STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(of.handle, &at));
  return static_cast<T*>(at);
}

constexpr int64_t kDims = 8;  // of a tensor, at most

// A new contiguous tensor of a type.
Given empty(int32_t type, int64_t dims, const int64_t* sizes) {
  int64_t strides[kDims];
  for (int64_t i = dims - 1, stride = 1; i >= 0; stride *= sizes[i--]) strides[i] = stride;
  Handle made;
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(dims, sizes, strides, type, aoti_torch_device_type_cpu(), 0, &made));
  return made;
}

// A new tensor like `input` with rows of another length.
Given empty_rows(Given input, int64_t length) {
  int64_t sizes[kDims];
  const int64_t dims = input.dims();
  for (int64_t i = 0; i < dims - 1; ++i) sizes[i] = input.size(i);
  sizes[dims - 1] = length;
  return empty(input.type(), dims, sizes);
}

// Runs work and returns the status of a function of the C interface.
template <class Work> AOTITorchError reported(Work work) {
  try {
    work();
    return AOTI_TORCH_SUCCESS;
  } catch (...) {
    return AOTI_TORCH_FAILURE;
  }
}

// A function of the C interface as an operation of torch with the same arguments.
template <auto function, int Results, class... Args> struct Operation {
  static auto run(Args... args) {
    std::array<Handle, Results> made;
    if constexpr (Results == 1) {
      STABLE_TORCH_ERROR_CODE_CHECK(function(Passed(args)..., &made[0]));
      return Tensor(made[0]);
    } else if constexpr (Results == 2) {
      STABLE_TORCH_ERROR_CODE_CHECK(function(Passed(args)..., &made[0], &made[1]));
      return std::tuple(Tensor(made[0]), Tensor(made[1]));
    } else {
      STABLE_TORCH_ERROR_CODE_CHECK(function(Passed(args)..., &made[0], &made[1], &made[2]));
      return std::tuple(Tensor(made[0]), Tensor(made[1]), Tensor(made[2]));
    }
  }

 private:
  struct Passed {
    explicit Passed(const Tensor& from) : handle(from.get()) {}
    explicit Passed(const std::optional<Tensor>& from) : handle(from ? from->get() : nullptr) {}
    explicit Passed(double from) : number(from) {}
    operator Handle() { return handle; }
    operator Handle*() { return handle ? &handle : nullptr; }
    operator double() { return number; }
    Handle handle = nullptr;
    double number = 0;
  };
};
using Optional = std::optional<Tensor>;

}  // namespace
