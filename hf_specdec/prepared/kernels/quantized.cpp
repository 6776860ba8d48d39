// Linear layers of int8 and int4 over few tokens.

#include <deque>

#include "amx.h"
#include "groups.h"
#include "int8_avx2.h"
#include "int8_vnni.h"
#include "tensors.h"

namespace {

// The arguments of a layer. Several layers of one input have weights of the same type and number of groups, and all or none
// have shifts.
struct QuantizedLayer {
  Given weight, scale, shift, bias, output;
};

// Scales and shifts `[N, G]` in the type of the sums. Shifts are numbers, for int8 in units of the scale, or missing.
template <class T> struct Scales {
  using A = SumOf<T>;
  explicit Scales(const QuantizedLayer& layer, bool grouped) : scales(pointer<const T>(layer.scale), 1, count(layer)) {
    if (!grouped) return;
    if (layer.shift && layer.shift.type() != aoti_torch_dtype_int8()) {
      shifts = numbers.emplace(pointer<const T>(layer.shift), 1, count(layer)).data;
      return;
    }
    const int8_t* units = pointer<const int8_t>(layer.shift);
    shifts = product.emplace(count(layer)).data;
    for (int64_t i = 0; i < count(layer); ++i) product->data[i] = units ? scales.data[i] * units[i] : A(0);
  }
  static int64_t count(const QuantizedLayer& layer) { return layer.scale.numel(); }

  const Padded<T, A> scales;
  std::optional<Padded<T, A>> numbers;
  std::optional<Aligned<A>> product;
  const A* shifts = nullptr;
};

// The outputs of layers for some tokens of the input, from token `first` on, multiplied by the class `X`.
template <class X, class T, size_t Count>
void multiply_quantized(Given input, const QuantizedLayer (&given)[Count], bool grouped, int64_t first, int64_t tokens) {
  const int64_t k = given[0].weight.size(1);
  const Padded<T, SumOf<T>> numbers(pointer<const T>(input) + first * k, tokens, k);
  std::deque<Scales<T>> scales;
  std::array<Layer<int8_t, T>, Count> layers;
  for (size_t i = 0; i < Count; ++i) {
    const QuantizedLayer& layer = given[i];
    const int64_t outputs = layer.scale.size(0);
    scales.emplace_back(layer, grouped);
    layers[i] = {pointer<const int8_t>(layer.weight), layer.weight.size(0), k, pointer<const T>(layer.bias),
                 pointer<T>(layer.output) + first * outputs, outputs, scales.back().scales.data,
                 scales.back().shifts, layer.scale.size(1)};
  }
  multiply_layers<int8_t, T>(layers, X(numbers.data, tokens, k));
}

// The same, by the class that suits the weights and the number of tokens.
template <class T, size_t Count>
void multiply_quantized(Given input, const QuantizedLayer (&layers)[Count], int64_t first, int64_t tokens) {
  if (layers[0].weight.type() != aoti_torch_dtype_int8())
    return multiply_quantized<GroupedTokens<4, T>, T>(input, layers, true, first, tokens);
#if defined(__AVX512VNNI__) || !defined(CPU_CAPABILITY_AVX512)
#ifdef __AVX512VNNI__
  using Int8Tokens = Int8VnniTokens;
#else
  using Int8Tokens = Int8Avx2Tokens;
#endif
  if constexpr (std::is_same_v<SumOf<T>, float>)
    if (!layers[0].shift && layers[0].scale.size(1) == 1) {
#ifdef TILES
      if (tokens >= Int8Tiles::kFewest && tiles_granted())
        return multiply_quantized<Int8Tiles, T>(input, layers, false, first, tokens);
#endif
      return multiply_quantized<Int8Tokens, T>(input, layers, false, first, tokens);
    }
#endif
  multiply_quantized<GroupedTokens<8, T>, T>(input, layers, true, first, tokens);
}

// Several layers of one input `[..., K]`, with weights `[N, K]` in int8 or `[N / 2, K]` in bytes of two rows' 4 bits, and
// scales and shifts `[N, G]` (see `Layer`; shifts of int8 in units of the scale). Outputs are `[..., N]`, all contiguous.
template <class T, size_t Count>
void quantized_linears(Given input, QuantizedLayer (&&layers)[Count], Handle* const (&outputs)[Count]) {
  for (size_t i = 0; i < Count; ++i) *outputs[i] = (layers[i].output = empty_rows(input, layers[i].scale.size(0))).handle;
  for_groups(input.numel() / layers[0].weight.size(1), kMostTokens, [&](int64_t first, int64_t tokens, bool) {
    multiply_quantized<T>(input, layers, first, tokens);
  });
}

}  // namespace

NAMED(quantized_linear)(Handle input, Handle weight, Handle scale, Handle* shift, Handle* bias, Handle* output) {
  return reported([=] { quantized_linears<NUMBER, 1>(input, {{weight, scale, shift, bias}}, {output}); });
}

NAMED(quantized_linear_2)(Handle input, Handle weight_0, Handle weight_1, Handle scale_0, Handle scale_1,
                          Handle* shift_0, Handle* shift_1, Handle* bias_0, Handle* bias_1, Handle* output_0,
                          Handle* output_1) {
  return reported([=] {
    quantized_linears<NUMBER, 2>(input, {{weight_0, scale_0, shift_0, bias_0}, {weight_1, scale_1, shift_1, bias_1}},
                                 {output_0, output_1});
  });
}

NAMED(quantized_linear_3)(Handle input, Handle weight_0, Handle weight_1, Handle weight_2, Handle scale_0,
                          Handle scale_1, Handle scale_2, Handle* shift_0, Handle* shift_1, Handle* shift_2,
                          Handle* bias_0, Handle* bias_1, Handle* bias_2, Handle* output_0, Handle* output_1,
                          Handle* output_2) {
  return reported([=] {
    quantized_linears<NUMBER, 3>(input,
                                 {{weight_0, scale_0, shift_0, bias_0},
                                  {weight_1, scale_1, shift_1, bias_1},
                                  {weight_2, scale_2, shift_2, bias_2}},
                                 {output_0, output_1, output_2});
  });
}

namespace {

using Quantized = Operation<FUNCTION(quantized_linear), 1, Tensor, Tensor, Tensor, Optional, Optional>;
using Quantized2 = Operation<FUNCTION(quantized_linear_2), 2, Tensor, Tensor, Tensor, Tensor, Tensor, Optional, Optional,
                             Optional, Optional>;
using Quantized3 = Operation<FUNCTION(quantized_linear_3), 3, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor,
                             Optional, Optional, Optional, Optional, Optional, Optional>;

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(hf_specdec, library) {
  library.def(OPERATION("quantized_linear") "(Tensor input, Tensor weight, Tensor scale, Tensor? shift, Tensor? bias)"
              " -> Tensor");
  library.def(OPERATION("quantized_linear_2") "(Tensor input, Tensor w0, Tensor w1, Tensor s0, Tensor s1, Tensor? z0,"
              " Tensor? z1, Tensor? b0, Tensor? b1) -> (Tensor, Tensor)");
  library.def(OPERATION("quantized_linear_3") "(Tensor input, Tensor w0, Tensor w1, Tensor w2, Tensor s0, Tensor s1,"
              " Tensor s2, Tensor? z0, Tensor? z1, Tensor? z2, Tensor? b0, Tensor? b1, Tensor? b2)"
              " -> (Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(hf_specdec, CPU, library) {
  library.impl(OPERATION("quantized_linear"), TORCH_BOX(&Quantized::run));
  library.impl(OPERATION("quantized_linear_2"), TORCH_BOX(&Quantized2::run));
  library.impl(OPERATION("quantized_linear_3"), TORCH_BOX(&Quantized3::run));
}
