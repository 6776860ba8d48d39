// Linear layers of floating point over few tokens.

#include "amx_float.h"
#include "floats.h"
#include "tensors.h"
#include "transposed.h"

namespace {

template <class T, size_t Count>
void multiply_layers(const std::array<Layer<T, T>, Count>& layers, const T* x, int64_t tokens, int64_t k) {
#ifdef TILES
  using Tiles = std::conditional_t<std::is_same_v<T, float>, FloatTiles, BFloat16Tiles>;
  if constexpr (std::is_same_v<T, float> || std::is_same_v<T, BFloat16>)
    if (tokens >= Tiles::kFewest && tiles_granted()) return multiply_layers(layers, Tiles(x, tokens, k));
#endif
  if constexpr (std::is_same_v<T, SumOf<T>>)
    if (tokens >= TransposedTokens<T>::kFewest) return multiply_layers(layers, TransposedTokens<T>(x, tokens, k));
  multiply_layers(layers, FloatTokens<T>(x, tokens, k));
}

// Linear layers of one input, `[..., K]`, by `[N, K]` and `[N]` or nothing: `[..., N]` of each. All are contiguous.
template <class T, size_t Count>
void linears(Given input, const Given (&weights)[Count], const Given (&biases)[Count], Handle* const (&outputs)[Count]) {
  const int64_t k = weights[0].size(1), tokens = input.numel() / k;
  std::array<Layer<T, T>, Count> layers;
  for (size_t i = 0; i < Count; ++i) {
    const int64_t rows = weights[i].size(0);
    const Given output = empty_rows(input, rows);
    *outputs[i] = output.handle;
    layers[i] = {pointer<const T>(weights[i]), rows, k, pointer<const T>(biases[i]), pointer<T>(output), rows};
  }
  for_groups(tokens, kMostTokens, [&](int64_t first, int64_t size, bool) {
    multiply_layers(layers, pointer<const T>(input) + first * k, size, k);
    for (Layer<T, T>& layer : layers) layer.output += size * layer.outputs;
  });
}

}  // namespace

NAMED(linear)(Handle input, Handle weight, Handle* bias, Handle* output) {
  return reported([=] { linears<NUMBER, 1>(input, {weight}, {bias}, {output}); });
}

NAMED(linear_2)(Handle input, Handle weight_0, Handle weight_1, Handle* bias_0, Handle* bias_1, Handle* output_0,
                Handle* output_1) {
  return reported([=] { linears<NUMBER, 2>(input, {weight_0, weight_1}, {bias_0, bias_1}, {output_0, output_1}); });
}

NAMED(linear_3)(Handle input, Handle weight_0, Handle weight_1, Handle weight_2, Handle* bias_0, Handle* bias_1,
                Handle* bias_2, Handle* output_0, Handle* output_1, Handle* output_2) {
  return reported([=] {
    linears<NUMBER, 3>(input, {weight_0, weight_1, weight_2}, {bias_0, bias_1, bias_2},
                       {output_0, output_1, output_2});
  });
}

namespace {

using Linear = Operation<FUNCTION(linear), 1, Tensor, Tensor, Optional>;
using Linear2 = Operation<FUNCTION(linear_2), 2, Tensor, Tensor, Tensor, Optional, Optional>;
using Linear3 = Operation<FUNCTION(linear_3), 3, Tensor, Tensor, Tensor, Tensor, Optional, Optional, Optional>;

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(hf_specdec, library) {
  library.def(OPERATION("linear") "(Tensor input, Tensor weight, Tensor? bias) -> Tensor");
  library.def(OPERATION("linear_2") "(Tensor input, Tensor w0, Tensor w1, Tensor? b0, Tensor? b1) -> (Tensor, Tensor)");
  library.def(OPERATION("linear_3") "(Tensor input, Tensor w0, Tensor w1, Tensor w2, Tensor? b0, Tensor? b1, Tensor? b2)"
              " -> (Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(hf_specdec, CPU, library) {
  library.impl(OPERATION("linear"), TORCH_BOX(&Linear::run));
  library.impl(OPERATION("linear_2"), TORCH_BOX(&Linear2::run));
  library.impl(OPERATION("linear_3"), TORCH_BOX(&Linear3::run));
}
