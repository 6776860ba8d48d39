// Calls the kernels with small tensors, whose memory ends where their numbers do, and compares with plain loops.

#include <cstdio>
#include <cstdlib>
#include <random>

#include "attention.cpp"
#include "gguf.cpp"
#include "linear.cpp"
#include "quantized.cpp"

namespace {

std::mt19937 generator(0);

template <class S> struct Filled {
  Filled(std::vector<int64_t> sizes, int32_t type, double low, double high) : sizes(sizes) {
    std::vector<int64_t> strides(sizes.size(), 1);
    for (size_t dim = sizes.size() - 1; dim > 0; --dim) strides[dim - 1] = strides[dim] * sizes[dim];
    numbers.resize(strides[0] * sizes[0]);
    std::uniform_real_distribution<double> draw(low, high);
    for (S& number : numbers) number = S(draw(generator));
    aoti_torch_create_tensor_from_blob(numbers.data(), int64_t(sizes.size()), sizes.data(), strides.data(), 0, type,
                                       aoti_torch_device_type_cpu(), 0, &handle);
  }
  Filled(const Filled&) = delete;
  ~Filled() { aoti_torch_delete_tensor_object(handle); }
  double operator[](int64_t at) const { return double(numbers[at]); }

  std::vector<int64_t> sizes;
  std::vector<S> numbers;
  Handle handle;
};

using Floats = Filled<float>;
Floats floats(std::vector<int64_t> sizes) { return {sizes, aoti_torch_dtype_float32(), -1, 1}; }

// Compares an output with `expected(at)`, and lets go of it.
template <class Expected> void check(const char* what, Handle output, AOTITorchError error, const Expected& expected) {
  const float* found = error == AOTI_TORCH_SUCCESS ? pointer<const float>(output) : nullptr;
  for (int64_t at = 0; found == nullptr || at < Given(output).numel(); ++at)
    if (found == nullptr || !(std::abs(found[at] - expected(at)) < 1e-3)) {
      std::printf("%s: number %ld is %f instead of %f\n", what, long(at), found ? found[at] : 0., expected(at));
      std::exit(1);
    }
  aoti_torch_delete_tensor_object(output);
}

void check_layers(int64_t tokens, int64_t k, int64_t rows) {
  const Floats x = floats({tokens, k}), w = floats({rows, k}), bias = floats({rows});
  Handle output = nullptr, b = bias.handle;
  AOTITorchError error = aoti_torch_cpu_linear_float(x.handle, w.handle, &b, &output);
  check("linear", output, error, [&](int64_t at) {
    double sum = bias[at % rows];
    for (int64_t i = 0; i < k; ++i) sum += x[at / rows * k + i] * w[at % rows * k + i];
    return sum;
  });
  for (const int64_t groups : {1, 4})
    for (const int64_t halves : {1, 2}) {
      const Filled<int8_t> bytes({rows, k}, halves == 1 ? aoti_torch_dtype_int8() : aoti_torch_dtype_uint8(), -127, 127);
      const Floats scale({rows * halves, groups}, aoti_torch_dtype_float32(), 0.001, 0.01);
      const Floats shift = floats({rows * halves, groups});
      Handle z = shift.handle;
      const bool shifts = groups > 1 || halves > 1;
      error = aoti_torch_cpu_quantized_linear_float(x.handle, bytes.handle, scale.handle, shifts ? &z : nullptr, nullptr,
                                                    &output);
      check("quantized_linear", output, error, [&](int64_t at) {
        const int64_t row = at % (rows * halves), token = at / (rows * halves);
        double sum = 0;
        for (int64_t i = 0; i < k; ++i) {
          const int8_t byte = bytes.numbers[row % rows * k + i];
          const int q = halves == 1 ? byte : row < rows ? byte & 15 : byte >> 4 & 15;
          const int64_t group = row * groups + i / (k / groups);
          sum += (q * scale[group] - (shifts ? shift[group] : 0)) * x[token * k + i];
        }
        return sum;
      });
    }
}

// Blocks of `bytes`, with floats of 16 bits at `halves`.
void check_gguf(int64_t tokens, int64_t rows, int64_t bytes, const std::vector<int64_t>& halves) {
  const int64_t k = bytes > 64 ? 512 : 352, blocks = k / (bytes > 64 ? 256 : 32);
  const Floats x = floats({tokens, k}), bias = floats({rows}), like = floats({1, k});
  Filled<uint8_t> stored({rows, blocks, bytes}, aoti_torch_dtype_uint8(), 0, 255);
  Filled<int64_t> indices({rows}, aoti_torch_dtype_int64(), 0, 1);
  for (int64_t row = 0; row < rows; ++row) indices.numbers[row] = row;
  for (int64_t block = 0; block < rows * blocks; ++block)
    for (const int64_t at : halves) stored.numbers[block * bytes + at + 1] = 0x10;
  Handle output = nullptr, numbers = nullptr, b = bias.handle;
  if (aoti_torch_cpu_gguf_rows_float(like.handle, indices.handle, stored.handle, &numbers) != AOTI_TORCH_SUCCESS) std::exit(2);
  const float* w = pointer<const float>(numbers);
  const AOTITorchError error = aoti_torch_cpu_gguf_linear_float(x.handle, stored.handle, &b, &output);
  check("gguf_linear", output, error, [&](int64_t at) {
    double sum = bias[at % rows];
    for (int64_t i = 0; i < k; ++i) sum += x[at / rows * k + i] * w[at % rows * k + i];
    return sum;
  });
  aoti_torch_delete_tensor_object(numbers);
}

void check_attention(int64_t queries, int64_t slots, int64_t width) {
  const int64_t heads = 4, shared = 2;
  const Floats q = floats({1, heads, queries, width}), keys = floats({1, shared, slots, width});
  const Floats values = floats({1, shared, slots, width}), mask = floats({1, 1, queries, slots});
  Handle output = nullptr;
  const AOTITorchError error =
      aoti_torch_cpu_attention_float(q.handle, keys.handle, values.handle, mask.handle, 0.5, &output);
  check("attention", output, error, [&](int64_t at) {
    const int64_t d = at % width, head = at / width % heads, query = at / width / heads;
    double total = 0, mixed = 0;
    for (int64_t slot = 0; slot < slots; ++slot) {
      const int64_t read = (head / (heads / shared) * slots + slot) * width;
      double score = mask[query * slots + slot];
      for (int64_t i = 0; i < width; ++i) score += 0.5 * q[(head * queries + query) * width + i] * keys[read + i];
      total += std::exp(score);
      mixed += std::exp(score) * values[read + d];
    }
    return mixed / total;
  });
}

}  // namespace

int main() {
  for (const int64_t tokens : {1, 2, 5, 7, 17, 40, 64})
    for (const int64_t k : {64, 100})
      for (const int64_t rows : {1, 5, 35}) check_layers(tokens, k, rows);
  for (const int64_t tokens : {1, 3, 5, 40})
    for (const int64_t rows : {1, 5}) {
      for (const int64_t bytes : {18, 22, 34}) check_gguf(tokens, rows, bytes, {0});
      for (const int64_t bytes : {20, 24, 144, 176}) check_gguf(tokens, rows, bytes, {0, 2});
      check_gguf(tokens, rows, 210, {208});
    }
  for (const int64_t queries : {1, 5})
    for (const int64_t slots : {3, 200})
      for (const int64_t width : {20, 64}) check_attention(queries, slots, width);
  std::puts("as plain loops have it");
}
