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

// `[..., K]`, `[N, K]` and `[N]` to `[..., N]`; all contiguous.
Tensor linear(Tensor input, Tensor weight, std::optional<Tensor> bias) {
  std::vector<int64_t> sizes(input.sizes().begin(), input.sizes().end());
  sizes.back() = weight.size(0);
  Tensor output = torch::stable::new_empty(input, sizes);
  FOR_TYPE_OF(input, linear_of, input, weight, bias, output)
  return output;
}

// `[B, H, Q, D]` over `[B, H_kv, S, D]`, with a mask `[B or 1, H or 1, Q or 1, S]` to be added, to `[B, Q, H, D]`. The
// last dimension of all is contiguous, and the last two of keys and values are.
Tensor attention(Tensor query, Tensor key, Tensor value, Tensor mask, double scale) {
  Tensor output = torch::stable::new_empty(query, {query.size(0), query.size(2), query.size(1), query.size(3)});
  FOR_TYPE_OF(query, attention_of, query, key, value, mask, scale, output)
  return output;
}

}  // namespace

STABLE_TORCH_LIBRARY(hf_specdec, library) {
  library.def("linear(Tensor input, Tensor weight, Tensor? bias) -> Tensor");
  library.def("attention(Tensor query, Tensor key, Tensor value, Tensor mask, float scale) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(hf_specdec, CPU, library) {
  library.impl("linear", TORCH_BOX(&linear));
  library.impl("attention", TORCH_BOX(&attention));
}
