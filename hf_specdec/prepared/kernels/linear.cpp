// Products of few tokens and a matrix.

namespace {

constexpr int64_t kAheadBytes = 4096;  // from what is read to what is fetched from memory
constexpr int64_t kManyTokens = 24;    // from here on, products take longer than memory
constexpr int64_t kStripBytes = 1024;  // of a row, read for all tokens before the next strip
constexpr int64_t kNarrowStripBytes = kFarRows ? kStripBytes : 512;  // where memory takes longer
constexpr int64_t kLeastGroups = kFarRows ? 1 : 3;
constexpr int64_t kFewestToTurn = kVectorBytes == 32 ? 32 : kAmd ? 16 : 24;  // tokens
constexpr int64_t kFewestToAsk = kVectorBytes == 32 ? kTokens + 1 : 1;  // tokens; for fewer, what is foreseen is enough

// The products of some rows of `w` and one token, which waits for memory only: rows are read as they lie there.
template <class T, class X, class A>
void rows_of(int rows, const T* w, const X* x, int64_t k, Four<A>* sums) {
  using Multiply = Product<T, X>;
  constexpr int kWidth = Multiply::kWidth;
  Vector<A> folded[4] = {};
  Four<A> last{};
  for (int r = 0; r < rows; ++r, w += k) {
    Vector<A> even{}, odd{};
    int64_t i = 0;
    for (; i + 2 * kWidth <= k; i += 2 * kWidth) {
      for (int line = 0; line < 2 * kWidth * int(sizeof(T)); line += 64)
        __builtin_prefetch(reinterpret_cast<const char*>(w + i) + line + kAheadBytes, 0, kReadOnce);
      even = Multiply::add(even, Multiply::weights(w + i), Multiply::token(x + i));
      odd = Multiply::add(odd, Multiply::weights(w + i + kWidth), Multiply::token(x + i + kWidth));
    }
    for (; i + kWidth <= k; i += kWidth) even = Multiply::add(even, Multiply::weights(w + i), Multiply::token(x + i));
    folded[r] = even + odd;
    for (; i < k; ++i) last[r] += A(widen(w[i])) * A(widen(x[i]));
  }
  *sums += last + sums_of<A>(folded[0], folded[1], folded[2], folded[3]);
}

// The products of up to four rows of weights, `apart` numbers from one to the next, and all tokens; fewer than four are
// neighbours. Tokens come in groups of about equal size, which read the same strip of the weights one after another, from
// the first-level cache. Of neighbouring rows, each group asks for the memory that comes next. On AMD processors, three
// groups are faster than one that would do, and narrow strips keep these requests evenly spaced. Of rows far apart, the
// last group asks for the next strip, while no other request is under way.
template <class T, class X, class A>
void products(int rows, const T* w, int64_t apart, const X* x, int64_t tokens, int64_t k, Four<A>* sums) {
  const bool asks = tokens >= kFewestToAsk;
  if (kFarRows && tokens == 1 && rows == 4)
    return tile<T, X, A, 1>(w, apart, x, k, k, asks ? w + kStripBytes / sizeof(T) : nullptr, sums);
  if (tokens == 1 || rows < 4) {
    for (int64_t t = 0; t < tokens; ++t) rows_of<T, X, A>(rows, w, x + t * k, k, sums + t);
    return;
  }
  const int64_t strip = (tokens > kManyTokens ? kStripBytes : kNarrowStripBytes) / int64_t(sizeof(T));
  for (int64_t at = 0; at < k; at += strip, w += strip, x += strip) {
    const int64_t width = std::min(strip, k - at);
    for_token_groups(tokens, std::min(tokens, kLeastGroups), [&](int64_t t, int64_t size, bool last) {
      const T* next = kFarRows ? w + strip : w + 4 * k + 3 * at + kAheadBytes / sizeof(T);
      tile_of<T, X, A>(size, w, apart, x + t * k, k, width, asks && (last || !kFarRows) ? next : nullptr, sums + t);
    });
  }
}

template <class T> struct Layer {
  const T* weight;
  const T* bias;
  T* output;
  int64_t rows;

  template <class A> T result(A sum, int64_t row) const { return narrow<T>(sum + (bias ? A(widen(bias[row])) : A(0))); }
};

// The tokens `[tokens, k]` as vectors read them.
template <class T> struct WideTokens {
  static constexpr int kRows = 4;  // of weights, multiplied together
  using Sums = std::vector<Four<typename SumOf<T>::type>>;

  WideTokens(const T* x, int64_t tokens, int64_t k) : numbers(x, tokens * k), tokens(tokens), k(k) {}

  const Widened<T, TokenOf<T>> numbers;
  const int64_t tokens, k;
};

// The outputs of the rows of a layer from `begin` to `end`, tile by tile; rows that fill no tile come last.
template <class T>
void some_rows(const Layer<T>& layer, int64_t begin, int64_t end, const WideTokens<T>& x,
               typename WideTokens<T>::Sums& sums) {
  using A = typename SumOf<T>::type;
  const int64_t tiles = (end - begin) / 4, apart = kFarRows ? tiles : 1, k = x.k;
  const auto some = [&](int rows, int64_t first, int64_t apart) {
    std::fill(sums.begin(), sums.end(), Four<A>{});
    products<T, TokenOf<T>, A>(rows, layer.weight + first * k, apart * k, x.numbers.data, x.tokens, k, sums.data());
    for (int64_t t = 0; t < x.tokens; ++t)
      for (int64_t r = 0, row = first; r < rows; ++r, row += apart)
        layer.output[t * layer.rows + row] = layer.result(sums[t][r], row);
  };
  for (int64_t tile = 0; tile < tiles; ++tile) some(4, begin + (kFarRows ? 1 : 4) * tile, apart);
  if (const int rest = int(end - begin - 4 * tiles)) some(rest, end - rest, 1);
}

template <class T>
void some_rows(const Layer<T>& layer, int64_t begin, int64_t end, const TurnedTokens<T>& x,
               typename TurnedTokens<T>::Sums& sums) {
  for (int64_t first = begin; first < end; first += x.kRows)
    x.multiply(layer.weight + first * x.k, std::min<int64_t>(x.kRows, end - first), sums,
               [&](int64_t token, int64_t row, T sum) {
                 layer.output[token * layer.rows + first + row] = layer.result(sum, first + row);
               });
}

#ifdef AMX
// By tiles: `X` is `FloatTiles` or `BFloat16Tiles`.
template <class T, class X>
void rows_by_tiles(const Layer<T>& layer, int64_t begin, int64_t end, const X& x, typename X::Sums& sums) {
  for (int64_t first = begin; first < end; first += kTile) {
    const int64_t rows = std::min<int64_t>(kTile, end - first);
    const __m512 bias = layer.bias ? load_some(layer.bias + first, rows) : _mm512_setzero_ps();
    x.multiply(layer.weight + first * x.k, rows, sums, [&](int64_t token, __m512 found) {
      store_some(layer.output + token * layer.rows + first, rows, found + bias);
    });
  }
}

inline void some_rows(const Layer<BFloat16>& layer, int64_t begin, int64_t end, const BFloat16Tiles& x,
                      BFloat16Tiles::Sums& sums) {
  rows_by_tiles(layer, begin, end, x, sums);
}

inline void some_rows(const Layer<float>& layer, int64_t begin, int64_t end, const FloatTiles& x,
                      FloatTiles::Sums& sums) {
  rows_by_tiles(layer, begin, end, x, sums);
}
#endif

// The outputs of layers of one input. `X` is how its tokens are multiplied.
template <class T, class X, size_t Count> void all_rows(const std::array<Layer<T>, Count>& layers, const X& x) {
  constexpr int64_t step = X::kRows;
  const auto tiles_of = [](const Layer<T>& layer) { return (layer.rows + step - 1) / step; };
  int64_t tiles = 0;
  for (const Layer<T>& layer : layers) tiles += tiles_of(layer);
  Parts parts(tiles);
#pragma omp parallel if (step * tiles * x.k * x.tokens > kSerial)
  {
    typename X::Sums sums(x.tokens);
    for (int64_t begin, end; parts.take(begin, end);) {
      int64_t before = 0;  // tiles of earlier layers
      for (const Layer<T>& layer : layers) {
        const int64_t from = std::max<int64_t>(step * (begin - before), 0);
        const int64_t to = std::min(step * (end - before), layer.rows);
        if (from < to) some_rows(layer, from, to, x, sums);
        before += tiles_of(layer);
      }
    }
  }
}

// The outputs of layers for the tokens `[tokens, k]`.
template <class T, size_t Count>
void all_rows(const std::array<Layer<T>, Count>& layers, const T* x, int64_t tokens, int64_t k) {
#ifdef AMX
  if constexpr (std::is_same_v<T, BFloat16>)
    if (tokens >= BFloat16Tiles::kFewest && tiles_granted()) return all_rows(layers, BFloat16Tiles(x, tokens, k));
  if constexpr (std::is_same_v<T, float>)
    if (tokens >= FloatTiles::kFewest && tiles_granted()) return all_rows(layers, FloatTiles(x, tokens, k));
#endif
  if constexpr (std::is_same_v<T, typename SumOf<T>::type>)
    if (tokens >= kFewestToTurn) return all_rows(layers, TurnedTokens<T>(x, tokens, k));
  all_rows(layers, WideTokens<T>(x, tokens, k));
}

// Linear layers of one input, `[..., K]`, by `[N, K]` and `[N]` or nothing: `[..., N]` of each. All are contiguous.
template <class T, size_t Count>
void linears(Given input, const Given (&weights)[Count], const Given (&biases)[Count], Handle* const (&outputs)[Count]) {
  const int64_t k = weights[0].size(1), tokens = input.numel() / k;
  std::array<Layer<T>, Count> layers;
  for (size_t i = 0; i < Count; ++i) {
    const int64_t rows = weights[i].size(0);
    const Given output = empty_rows(input, rows);
    *outputs[i] = output.handle;
    layers[i] = {pointer<const T>(weights[i]), pointer<const T>(biases[i]), pointer<T>(output), rows};
  }
  for_groups(tokens, kMostTokens, 1, [&](int64_t first, int64_t size, bool) {
    all_rows(layers, pointer<const T>(input) + first * k, size, k);
    for (Layer<T>& layer : layers) layer.output += size * layer.rows;
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
