// Linear layers and embeddings with weights in the blocks of GGUF files.

#include "gguf_products.h"
#include "gguf_vnni.h"
#include "linears.h"

namespace {

#ifdef MULTIPLIES_BYTES
template <class Stored, class T>
using GgufProduct = std::conditional_t<std::is_same_v<T, double>, GgufTokens<Stored, T>, GgufDigits<Stored, T>>;
#else
template <class Stored, class T> using GgufProduct = GgufTokens<Stored, T>;
#endif

// Linear layers of one input `[..., K]` with weights `[N, K / numbers of a block, bytes]`, all of one type of blocks, and
// biases `[N]` or none; outputs are `[..., N]`. All are contiguous.
template <class T, size_t Count>
void gguf_linears(Given input, const Given (&weights)[Count], const Given (&biases)[Count],
                  Handle* const (&outputs)[Count]) {
  for (size_t i = 0; i < Count; ++i) *outputs[i] = empty_rows(input, weights[i].size(0)).handle;
  for_type(weights[0].size(2), [&](auto type) {
    using Stored = decltype(type);
    const int64_t k = weights[0].size(1) * Stored::kNumbers;
    for_groups(input.numel() / k, kMostTokens, [&](int64_t first, int64_t size, bool) {
      std::array<Layer<Stored, T>, Count> layers;
      for (size_t i = 0; i < Count; ++i) {
        const int64_t rows = weights[i].size(0);
        layers[i] = {reinterpret_cast<const Stored*>(pointer<const uint8_t>(weights[i])), rows, k,
                     pointer<const T>(biases[i]), pointer<T>(Given(*outputs[i])) + first * rows, rows};
      }
      const T* tokens = pointer<const T>(input) + first * k;
      multiply_layers(layers, GgufProduct<Stored, T>(tokens, size, k));
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
