// Products of few tokens and a matrix.

namespace {

// Adds the products of R rows of `w` and T rows of `x`, over `width` columns, to sums[t][r]. Rows have `k`
// columns, `left` of them from `w` on.
template <class T, class X, class A, int R, int N>
void tile(const T* w, const X* x, int64_t k, int64_t left, int64_t width, Four<A>* sums) {
  using Multiply = Product<T, X>;
  Vector<A> acc[R][N];
  for (int r = 0; r < R; ++r)
    for (int t = 0; t < N; ++t) acc[r][t] = Vector<A>{};
  // The processor does not foresee the jumps between rows: what is read next is the rest of the row, then the next
  // tile's. Where it has little else to do, one token without widening, asking for it costs more than it brings.
  constexpr bool foresee = N > 1 || sizeof(T) < sizeof(X);
  int64_t i = 0;
  for (; i + Multiply::kWidth <= width; i += Multiply::kWidth) {
    typename Multiply::Weights weights[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      if (foresee) __builtin_prefetch(w + r * k + i + kAhead + (i + kAhead < left ? 0 : 3 * k), 0, 2);
      weights[r] = Multiply::weights(w + r * k + i);
    }
#pragma GCC unroll 8
    for (int t = 0; t < N; ++t) {
      typename Multiply::Token token = Multiply::token(x + t * k + i);
      asm("" : "+v"(token));  // stays in a register: gcc would read it again for every row
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) acc[r][t] = Multiply::add(acc[r][t], weights[r], token);
    }
  }
#pragma GCC unroll 8
  for (int t = 0; t < N; ++t) {
    Four<A> rows[4] = {};
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) rows[r] = fold<A>(acc[r][t]);
    sums[t] += sums_of<A>(rows[0], rows[1], rows[2], rows[3]);
  }
  for (; i < width; ++i)
    for (int t = 0; t < N; ++t)
      for (int r = 0; r < R; ++r) sums[t][r] += A(widen(w[r * k + i])) * A(widen(x[t * k + i]));
}

template <class T, class X, class A, int N>
void tile_of(int rows, const T* w, const X* x, int64_t k, int64_t left, int64_t width, Four<A>* sums) {
  if (rows == 4) return tile<T, X, A, 4, N>(w, x, k, left, width, sums);
  // The last rows of a matrix, if their number is no multiple of four: one after another.
  for (int r = 0; r < rows; ++r)
    for (int t = 0; t < N; ++t) {
      Four<A> one = {};
      tile<T, X, A, 1, 1>(w + r * k, x + t * k, k, left, width, &one);
      sums[t][r] += one[0];
    }
}

// The products of up to four rows of weights and all tokens. Tokens come in groups of about equal size, which read the
// same columns of the weights one after another, from the cache.
template <class T, class X, class A>
void products(int rows, const T* w, const X* x, int64_t tokens, int64_t k, Four<A>* sums) {
  const int64_t groups = (tokens + kTokens - 1) / kTokens;
  for (int64_t at = 0; at < k; at += kColumns) {
    const int64_t width = std::min(kColumns, k - at);
    for (int64_t group = 0, t = 0; group < groups; ++group) {
      const int64_t size = (tokens - t + groups - group - 1) / (groups - group);
      const X* tokens_from = x + t * k + at;
      switch (size) {
        case 1: tile_of<T, X, A, 1>(rows, w + at, tokens_from, k, k - at, width, sums + t); break;
        case 2: tile_of<T, X, A, 2>(rows, w + at, tokens_from, k, k - at, width, sums + t); break;
        case 3: tile_of<T, X, A, 3>(rows, w + at, tokens_from, k, k - at, width, sums + t); break;
        case 4: tile_of<T, X, A, 4>(rows, w + at, tokens_from, k, k - at, width, sums + t); break;
        case 5: tile_of<T, X, A, 5>(rows, w + at, tokens_from, k, k - at, width, sums + t); break;
        case 6: tile_of<T, X, A, 6>(rows, w + at, tokens_from, k, k - at, width, sums + t); break;
      }
      t += size;
    }
  }
}

template <class T> struct Layer {
  const T* weight;
  const T* bias;
  T* output;
  int64_t rows;
};

// Several linear layers of one input `[tokens, k]`.
template <class T>
void linear_of(const Tensor& input, int count, const Tensor* weights, const std::optional<Tensor>* biases,
               Tensor* outputs) {
  using A = typename SumOf<T>::type;
  const int64_t k = weights[0].size(1), tokens = input.numel() / k;
  std::vector<Layer<T>> layers;
  int64_t tiles = 0;
  for (int i = 0; i < count; ++i) {
    const T* bias = biases[i] ? static_cast<const T*>(biases[i]->data_ptr()) : nullptr;
    layers.push_back({static_cast<const T*>(weights[i].data_ptr()), bias, static_cast<T*>(outputs[i].data_ptr()),
                      weights[i].size(0)});
    tiles += (layers[i].rows + 3) / 4;
  }
  const Widened<T, TokenOf<T>> x(input);
  const int64_t part = part_of_tiles(tiles, tokens);
#pragma omp parallel if (4 * tiles * k * tokens > kSerial)
  {
    std::vector<Four<A>> sums(tokens);
#pragma omp for schedule(dynamic, part)
    for (int64_t tile = 0; tile < tiles; ++tile) {
      int64_t row = 4 * tile;
      const Layer<T>* layer = layers.data();
      for (; row >= layer->rows; ++layer) row -= (layer->rows + 3) / 4 * 4;
      const int rows = int(std::min<int64_t>(4, layer->rows - row));
      std::fill(sums.begin(), sums.end(), Four<A>{});
      products<T, TokenOf<T>, A>(rows, layer->weight + row * k, x.data, tokens, k, sums.data());
      for (int64_t t = 0; t < tokens; ++t)
        for (int r = 0; r < rows; ++r)
          layer->output[t * layer->rows + row + r] =
              narrow<T>(sums[t][r] + (layer->bias ? A(widen(layer->bias[row + r])) : A(0)));
    }
  }
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
  linear_of<NUMBER>(input, Count, weights.data(), biases.data(), outputs.data());
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

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(NAMESPACE, library) {
  library.def("linear(Tensor input, Tensor weight, Tensor? bias) -> Tensor");
  library.def("linear_2(Tensor input, Tensor w0, Tensor w1, Tensor? b0, Tensor? b1) -> (Tensor, Tensor)");
  library.def(
      "linear_3(Tensor input, Tensor w0, Tensor w1, Tensor w2, Tensor? b0, Tensor? b1, Tensor? b2)"
      " -> (Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(NAMESPACE, CPU, library) {
  library.impl("linear", TORCH_BOX(&linear));
  library.impl("linear_2", TORCH_BOX(&linear_2));
  library.impl("linear_3", TORCH_BOX(&linear_3));
}
