// Linear layers of floating point over few tokens.

#include "amx.h"
#include "floats.h"
#include "linears.h"
#include "transposed.h"

namespace {

template <class T>
void multiply_layers(std::span<const Layer<T, T>> layers, const T* x, int64_t tokens, int64_t k) {
#ifdef TILES
  if constexpr (std::is_same_v<T, BFloat16>)
    if (tokens >= BFloat16Tiles::kFewest && tiles_granted()) return multiply_layers(layers, BFloat16Tiles(x, tokens, k));
#endif
  if constexpr (std::is_same_v<T, SumOf<T>>)
    if (tokens >= TransposedTokens<T>::kFewest) return multiply_layers(layers, TransposedTokens<T>(x, tokens, k));
  multiply_layers(layers, FloatTokens<T>(x, tokens, k));
}

// Linear layers of one input `[..., K]` with weights `[N, K]` and biases `[N]` or none; outputs are `[..., N]`. All are
// contiguous.
template <class T> void linears(Given input, Tensors weights, Tensors biases, Results outputs) {
  const int64_t k = weights.begin()->size(1), tokens = input.numel() / k;
  std::vector<Layer<T, T>> layers;
  for (size_t i = 0; i < weights.size(); ++i) {
    const Given weight = weights.begin()[i];
    const int64_t rows = weight.size(0);
    const Given output = empty_rows(input, rows);
    *outputs.begin()[i] = output.handle;
    layers.push_back({pointer<const T>(weight), rows, k, pointer<const T>(biases.begin()[i]), pointer<T>(output), rows});
  }
  for_groups(tokens, kMostTokens, [&](int64_t first, int64_t size, bool) {
    multiply_layers<T>(layers, pointer<const T>(input) + first * k, size, k);
    for (Layer<T, T>& layer : layers) layer.output += size * layer.outputs;
  });
}

}  // namespace

LINEAR_OPERATIONS(linear, linears)
