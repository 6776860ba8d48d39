// Linear layers and embeddings with weights in the blocks of GGUF files.

#include "gguf_products.h"
#include "linears.h"

namespace {

template <class Stored, class T> struct ProductsOf {
#ifdef MULTIPLIES_BYTES
  using type = GgufDigits<Stored, T>;
#else
  using type = GgufFloats<Stored, T>;
#endif
};
template <class Stored> struct ProductsOf<Stored, double> {
  using type = GgufDoubles<Stored>;
};

// Linear layers of one input `[..., K]` with weights `[N, K / numbers of a block, bytes]`, all of one type of blocks, and
// biases `[N]` or none; outputs are `[..., N]`. All are contiguous.
template <class T> void gguf_linears(Given input, Tensors weights, Tensors biases, Results outputs) {
  const Given* const weight = weights.begin();
  for (size_t i = 0; i < weights.size(); ++i) *outputs.begin()[i] = empty_rows(input, weight[i].size(0)).handle;
  for_type(weight->size(2), [&](auto type) {
    using Stored = decltype(type);
    const int64_t k = weight->size(1) * Stored::kNumbers;
    for_groups(input.numel() / k, kMostTokens, [&](int64_t first, int64_t size, bool) {
      std::vector<Layer<Stored, T>> layers;
      for (size_t i = 0; i < weights.size(); ++i) {
        const int64_t rows = weight[i].size(0);
        layers.push_back({reinterpret_cast<const Stored*>(pointer<const uint8_t>(weight[i])), rows, k,
                          pointer<const T>(biases.begin()[i]), pointer<T>(Given(*outputs.begin()[i])) + first * rows, rows});
      }
      const T* tokens = pointer<const T>(input) + first * k;
      multiply_layers<Stored, T>(layers, typename ProductsOf<Stored, T>::type(tokens, size, k));
    });
  });
}

// The rows `indices` of blocks `[N, K / numbers of a block, bytes]`, widened to `[..., K]` in the type of `like`.
template <class T> Given gguf_rows(Given like, Given indices, Given blocks) {
  const auto* rows = pointer<const int64_t>(indices);
  const int64_t count = indices.numel(), per_row = blocks.size(1), bytes = blocks.size(2), dims = indices.dims();
  if (std::any_of(rows, rows + count, [&](int64_t row) { return row < 0 || row >= blocks.size(0); }))
    throw std::out_of_range("an index is out of range");
  Given output;
  for_type(bytes, [&](auto type) {
    using Stored = decltype(type);
    using A = SumOf<T>;
    int64_t sizes[kDims + 1];
    for (int64_t i = 0; i < dims; ++i) sizes[i] = indices.size(i);
    const int64_t k = sizes[dims] = per_row * Stored::kNumbers, stretches = (k + kStretch - 1) / kStretch;
    output = empty(like.type(), dims + 1, sizes);
    const auto* from = reinterpret_cast<const Stored*>(pointer<const uint8_t>(blocks));
    T* to = pointer<T>(output);
#pragma omp parallel for if (count * k > kSerial)
    for (int64_t at = 0; at < count * stretches; ++at) {
      const int64_t first = at % stretches * kStretch;
      alignas(64) A numbers[kStretch];
      const int pieces = int(std::min<int64_t>(kStretch, k - first) / kPiece);
      widen_stretch(from + rows[at / stretches] * per_row + first / Stored::kNumbers, pieces, numbers);
      for (int i = 0; i < pieces * kPiece; ++i) to[at / stretches * k + first + i] = T(numbers[i]);
    }
  });
  return output;
}

}  // namespace

LINEAR_OPERATIONS(gguf_linear, gguf_linears)

NAMED(gguf_rows)(Handle like, Handle indices, Handle blocks, Handle* output) {
  return reported([=] { *output = gguf_rows<NUMBER>(like, indices, blocks).handle; });
}

STABLE_TORCH_LIBRARY_FRAGMENT(hf_specdec, library) {
  library.def(OPERATION("gguf_rows") "(Tensor like, Tensor indices, Tensor blocks) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(hf_specdec, CPU, library) {
  library.impl(OPERATION("gguf_rows"), TORCH_BOX((&Operation<FUNCTION(gguf_rows), 1, Tensor, Tensor, Tensor>::run)));
}
