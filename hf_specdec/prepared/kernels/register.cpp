// What torch calls.

namespace {

// `function<T>(arguments…)` for the type of the numbers in `like`.
#define FOR_TYPE_OF(like, function, ...)                                                      \
  switch ((like).scalar_type()) {                                                             \
    case ScalarType::Float: function<float>(__VA_ARGS__); break;                              \
    case ScalarType::Double: function<double>(__VA_ARGS__); break;                            \
    case ScalarType::BFloat16: function<BFloat16>(__VA_ARGS__); break;                        \
    case ScalarType::Half: function<Half>(__VA_ARGS__); break;                                \
    default: STD_TORCH_CHECK(false, "few-token products take floating-point numbers only");   \
  }

// A contiguous tensor of the type of another; `torch::stable::new_empty` takes several times as long.
Tensor empty(const Tensor& like, const std::vector<int64_t>& sizes) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t i = sizes.size() - 1; i > 0; --i) strides[i - 1] = strides[i] * sizes[i];
  int32_t type;
  AtenTensorHandle made;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(like.get(), &type));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      int64_t(sizes.size()), sizes.data(), strides.data(), type, aoti_torch_device_type_cpu(), 0, &made));
  return Tensor(made);
}

// `[..., K]`, `[N, K]` and `[N]` to `[..., N]`, for several layers of one input; all contiguous.
template <int Count>
std::array<Tensor, Count> linears(const Tensor& input, const std::array<Tensor, Count>& weights,
                                  const std::array<std::optional<Tensor>, Count>& biases) {
  std::array<Tensor, Count> outputs;
  std::vector<int64_t> sizes(input.sizes().begin(), input.sizes().end());
  for (int i = 0; i < Count; ++i) {
    sizes.back() = weights[i].size(0);
    outputs[i] = empty(input, sizes);
  }
  FOR_TYPE_OF(input, linear_of, input, Count, weights.data(), biases.data(), outputs.data())
  return outputs;
}

Tensor linear(Tensor input, Tensor weight, std::optional<Tensor> bias) {
  return linears<1>(input, {weight}, {bias})[0];
}

std::tuple<Tensor, Tensor> linear_2(Tensor input, Tensor weight_0, Tensor weight_1, std::optional<Tensor> bias_0,
                                    std::optional<Tensor> bias_1) {
  const auto [first, second] = linears<2>(input, {weight_0, weight_1}, {bias_0, bias_1});
  return {first, second};
}

std::tuple<Tensor, Tensor, Tensor> linear_3(Tensor input, Tensor weight_0, Tensor weight_1, Tensor weight_2,
                                            std::optional<Tensor> bias_0, std::optional<Tensor> bias_1,
                                            std::optional<Tensor> bias_2) {
  const auto [first, second, third] =
      linears<3>(input, {weight_0, weight_1, weight_2}, {bias_0, bias_1, bias_2});
  return {first, second, third};
}

// `[..., K]`, `[N, K]` int8 or `[N / 2, K]` of two rows of 4 bits, and scales and shifts `[N, G]`, to `[..., N]`. See
// `Rows`; shifts of int8 are in units of the scale. All are contiguous.
Tensor quantized_linear(Tensor input, Tensor weight, Tensor scale, std::optional<Tensor> shift,
                        std::optional<Tensor> bias) {
  std::vector<int64_t> sizes(input.sizes().begin(), input.sizes().end());
  sizes.back() = scale.size(0);
  Tensor output = empty(input, sizes);
  FOR_TYPE_OF(input, quantized_of, input, weight, scale, shift, bias, output)
  return output;
}

// `[B, H, Q, D]` over `[B, H_kv, S, D]`, with a mask `[B or 1, H or 1, Q or 1, S]` to be added, to `[B, Q, H, D]`. The
// last dimension of all is contiguous, and the last two of keys and values are.
Tensor attention(Tensor query, Tensor key, Tensor value, Tensor mask, double scale) {
  Tensor output = empty(query, {query.size(0), query.size(2), query.size(1), query.size(3)});
  FOR_TYPE_OF(query, attention_of, query, key, value, mask, scale, output)
  return output;
}

}  // namespace

STABLE_TORCH_LIBRARY(hf_specdec, library) {
  library.def("linear(Tensor input, Tensor weight, Tensor? bias) -> Tensor");
  library.def("linear_2(Tensor input, Tensor w0, Tensor w1, Tensor? b0, Tensor? b1) -> (Tensor, Tensor)");
  library.def(
      "linear_3(Tensor input, Tensor w0, Tensor w1, Tensor w2, Tensor? b0, Tensor? b1, Tensor? b2)"
      " -> (Tensor, Tensor, Tensor)");
  library.def("quantized_linear(Tensor input, Tensor weight, Tensor scale, Tensor? shift, Tensor? bias) -> Tensor");
  library.def("attention(Tensor query, Tensor key, Tensor value, Tensor mask, float scale) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(hf_specdec, CPU, library) {
  library.impl("linear", TORCH_BOX(&linear));
  library.impl("linear_2", TORCH_BOX(&linear_2));
  library.impl("linear_3", TORCH_BOX(&linear_3));
  library.impl("quantized_linear", TORCH_BOX(&quantized_linear));
  library.impl("attention", TORCH_BOX(&attention));
}
