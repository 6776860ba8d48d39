// Linear layers of floating point over few tokens.

#include "amx.h"
#include "floats.h"
#include "linears.h"
#include "transposed.h"

namespace {

template <class T, size_t Count>
void multiply_layers(const std::array<Layer<T, T>, Count>& layers, const T* x, int64_t tokens, int64_t k) {
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

LINEAR_OPERATIONS(linear, linears)
