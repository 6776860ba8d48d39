// Products of few tokens and a matrix of 8 or 4 bits a number, which are widened in registers.

namespace {

constexpr int64_t kAheadBytes = 8192;  // from what is read to what is fetched from memory, where rows are neighbours
constexpr bool kFarBytes = kVectorBytes == 32;  // whether rows of a tile are far apart, see `kFarRows`
constexpr int64_t kColumns = 1024;     // read for all tokens before the next ones; they stay in the first-level cache
constexpr int64_t kWidened = 256;      // columns of a row that are widened for all tokens, where these are many

// 8 bits are signed; 4 bits, the low or the high half of a byte, are not.
enum Part { kByte, kLow, kHigh };

template <Part part> inline __m128i part_of(__m128i bytes) {
  const __m128i low = _mm_set1_epi8(15);
  if constexpr (part == kLow) return _mm_and_si128(bytes, low);
  if constexpr (part == kHigh) return _mm_and_si128(_mm_srli_epi16(bytes, 4), low);
  return bytes;
}

template <Part part> inline int part_of(int8_t byte) {
  return part == kByte ? byte : part == kLow ? byte & 15 : byte >> 4 & 15;
}

template <Part part, class A> inline Vector<A> load_part(const int8_t* from) {
  __m128i bytes{};
  std::memcpy(&bytes, from, kLanes<A>);
  bytes = part_of<part>(bytes);
#ifdef __AVX512F__
  if constexpr (sizeof(A) == 4) return (Vector<A>)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
  else return (Vector<A>)_mm512_cvtepi32_pd(_mm256_cvtepi8_epi32(bytes));
#else
  if constexpr (sizeof(A) == 4) return (Vector<A>)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
  else return (Vector<A>)_mm256_cvtepi32_pd(_mm_cvtepi8_epi32(bytes));
#endif
}

// A number q stands for scale · q − shift. Each group of a row's columns has a scale and a shift.
template <class A> struct Rows {
  const int8_t* bytes[4];
  const A* scale[4];
  const A* shift[4];
  int64_t width;  // of a group
  int64_t ahead;  // bytes from what is read to what is fetched from memory, where rows are neighbours: whole tiles

  template <int bits> int number(int r, int64_t column) const {
    const int8_t byte = bytes[r][column];
    return bits == 8 ? part_of<kByte>(byte) : r < 2 ? part_of<kLow>(byte) : part_of<kHigh>(byte);
  }

  // A vector of numbers, while what comes later is fetched.
  template <int bits> Vector<A> numbers(int r, int64_t column) const {
    const int8_t* from = bytes[r] + column;
    if (!kFarBytes && (bits == 8 || r < 2)) __builtin_prefetch(from + ahead, 0, 2);
    return bits == 8 ? load_part<kByte, A>(from) : r < 2 ? load_part<kLow, A>(from) : load_part<kHigh, A>(from);
  }
};

// The same as `quantized_tile` for columns that fill no vector. Inlined, it would take registers from the tile's sums.
template <int bits, bool grouped, class A>
__attribute__((noinline)) void last_columns(const Rows<A>& rows, const A* x, int tokens, int64_t k, int64_t at,
                                            int64_t end, Four<A>* sums) {
  for (int64_t i = at; i < end; ++i)
    for (int r = 0; r < 4; ++r) {
      const int64_t group = i / rows.width;
      const A shift = grouped ? rows.shift[r][group] : A(0);
      const A weight = rows.template number<bits>(r, i) * rows.scale[r][group] - shift;
      for (int t = 0; t < tokens; ++t) sums[t][r] += weight * x[t * k + i];
    }
}

// Adds the products of four rows and N rows of `x`, over the columns from `at` to `end`, to sums[t][r]. Of 4 bits the
// first two rows are low halves and the others high ones. If not `grouped`, a row has one scale and no shift.
template <int bits, bool grouped, class A, int N>
void quantized_tile(const Rows<A>& given, const A* x, int64_t k, int64_t at, int64_t end, Four<A>* sums) {
  const Rows<A> rows = given;  // in registers, whatever is written meanwhile
  Vector<A> acc[4][N];
#pragma GCC unroll 4
  for (int r = 0; r < 4; ++r)
#pragma GCC unroll 8
    for (int t = 0; t < N; ++t) acc[r][t] = Vector<A>{};
  for (int64_t i = at, stop; i < end; i = stop) {
    const int64_t group = i / rows.width;
    stop = std::min(end, (group + 1) * rows.width);
    A scale[4], shift[4];
    for (int r = 0; grouped && r < 4; ++r) scale[r] = rows.scale[r][group], shift[r] = rows.shift[r][group];
    for (; i + kLanes<A> <= stop; i += kLanes<A>) {
      Vector<A> token[N];
#pragma GCC unroll 8
      for (int t = 0; t < N; ++t) {
        token[t] = load<A, A>(x + t * k + i);
        // Stays in a register, where there is one left: loads are what bounds this loop.
        if (!grouped || kVectorBytes == 64) asm("" : "+v"(token[t]));
      }
#pragma GCC unroll 4
      for (int r = 0; r < 4; ++r) {
        Vector<A> weights = rows.template numbers<bits>(r, i);
        if constexpr (grouped) weights = weights * scale[r] - shift[r];
        asm("" : "+v"(weights));
#pragma GCC unroll 8
        for (int t = 0; t < N; ++t) acc[r][t] += weights * token[t];
      }
    }
    if (i < stop) last_columns<bits, grouped, A>(rows, x, N, k, i, stop, sums);
  }
  Four<A> scales;
  for (int r = 0; r < 4; ++r) scales[r] = grouped ? A(1) : *rows.scale[r];
#pragma GCC unroll 8
  for (int t = 0; t < N; ++t)
    sums[t] += scales * sums_of<A>(acc[0][t], acc[1][t], acc[2][t], acc[3][t]);
}

// The weights of four rows in the columns from `at` to `end`, `kWidened` to a row.
template <int bits, class A> void widen_columns(const Rows<A>& rows, int64_t at, int64_t end, A* to) {
  to -= at;
  for (int64_t i = at, stop; i < end; i = stop) {
    const int64_t group = i / rows.width;
    stop = std::min(end, (group + 1) * rows.width);
    A scale[4], shift[4];
    for (int r = 0; r < 4; ++r) scale[r] = rows.scale[r][group], shift[r] = rows.shift[r][group];
    for (; i + kLanes<A> <= stop; i += kLanes<A>)
#pragma GCC unroll 4
      for (int r = 0; r < 4; ++r) {
        const Vector<A> weights = rows.template numbers<bits>(r, i) * scale[r] - shift[r];
        std::memcpy(to + r * kWidened + i, &weights, sizeof weights);
      }
    for (; i < stop; ++i)
      for (int r = 0; r < 4; ++r)
        to[r * kWidened + i] = rows.template number<bits>(r, i) * scale[r] - shift[r];
  }
}

// The products of four rows of weights and more tokens than a tile takes, where widening a weight takes as long as
// multiplying it with several of them.
template <int bits, class A>
void widened_products(const Rows<A>& rows, const A* x, int64_t tokens, int64_t k, Four<A>* sums) {
  alignas(64) A weights[4 * kWidened];
  for (int64_t at = 0; at < k; at += kWidened) {
    const int64_t width = std::min(kWidened, k - at);
    widen_columns<bits, A>(rows, at, at + width, weights);
    for_token_groups(tokens, 1, [&](int64_t t, int64_t size, bool) {
      tile_of<A, A, A>(size, weights, kWidened, x + t * k + at, k, width, nullptr, sums + t);
    });
  }
}

// The tokens `[tokens, k]` as they are.
template <class A> struct Numbers {
  static constexpr int kRows = 4;  // of weights, multiplied together
  using Sums = std::vector<Four<A>>;

  Numbers(const A* x, int64_t tokens, int64_t k) : x(x), tokens(tokens), k(k) {}
  const A* x;
  const int64_t tokens, k;
};

// The products of four rows of weights and all tokens; see `products`.
template <int bits, bool grouped, class A>
void quantized_products(const Rows<A>& rows, const Numbers<A>& given, Four<A>* sums) {
  const auto [x, tokens, k] = given;
  if (grouped && tokens > kTokens) return widened_products<bits, A>(rows, x, tokens, k, sums);
  for (int64_t at = 0; at < k; at += kColumns) {
    const int64_t end = std::min(at + kColumns, k);
    for_token_groups(tokens, 1, [&](int64_t t, int64_t size, bool) {
      const A* from = x + t * k;
      switch (size) {
        case 1: return quantized_tile<bits, grouped, A, 1>(rows, from, k, at, end, sums + t);
        case 2: return quantized_tile<bits, grouped, A, 2>(rows, from, k, at, end, sums + t);
        case 3: return quantized_tile<bits, grouped, A, 3>(rows, from, k, at, end, sums + t);
#ifdef __AVX512F__
        case 4: return quantized_tile<bits, grouped, A, 4>(rows, from, k, at, end, sums + t);
        case 5: return quantized_tile<bits, grouped, A, 5>(rows, from, k, at, end, sums + t);
        case 6: return quantized_tile<bits, grouped, A, 6>(rows, from, k, at, end, sums + t);
#endif
      }
    });
  }
}

#if defined(__AVX512F__) && !defined(__AVX512VNNI__)
template <class A> using Whole = Numbers<A>;
#else
#ifdef __AVX512VNNI__
using Integers = Digits;
#else
using Integers = Words;
#endif
template <class A> using Whole = std::conditional_t<std::is_same_v<A, float>, Integers, Numbers<A>>;

template <int bits, bool grouped, class A>
void quantized_products(const Rows<float>& rows, const Integers& x, Four<float>* sums) {
  whole_products(rows.bytes, x, sums);
  const Four<float> scales = {*rows.scale[0], *rows.scale[1], *rows.scale[2], *rows.scale[3]};
  for (int64_t t = 0; t < x.tokens; ++t) sums[t] *= scales;
}
#endif

// What a layer is given. Of several layers of one input, weights are of one type, with as many groups, and all or none
// have shifts.
struct QuantizedLayer {
  Given weight, scale, shift, bias, output;
};

// `X` is how the tokens are multiplied.
template <int bits, bool grouped, class T, class X> class QuantizedRows {
 public:
  using A = typename SumOf<T>::type;

  // The output is written from its token `first` on.
  QuantizedRows(const QuantizedLayer& layer, int64_t first)
      : bias(pointer<const T>(layer.bias)), n(layer.scale.size(0)), k(layer.weight.size(1)),
        groups(layer.scale.size(1)), output(pointer<T>(layer.output) + first * n),
        bytes(pointer<const int8_t>(layer.weight)), stored(layer.weight.size(0)), scales(layer.scale),
        parts((stored + kStep - 1) / kStep) {
    if (!grouped) return;
    if (layer.shift && layer.shift.type() != aoti_torch_dtype_int8()) {
      shifts = numbers.emplace(layer.shift).data;
      return;
    }
    const int8_t* whole = pointer<const int8_t>(layer.shift);
    shifts = multiplied.emplace(n * groups).data;
    for (int64_t i = 0; i < n * groups; ++i) multiplied->data[i] = whole ? scales.data[i] * whole[i] : A(0);
  }

  // The outputs of all rows, together with the other threads.
  void work(const X& x, typename X::Sums& sums) {
    for (int64_t begin, end; parts.take(begin, end);)
      for (int64_t tile = begin; tile < end; ++tile) some_rows(begin, end, tile, x, sums);
  }

 private:
  static constexpr int64_t kStep = bits == 8 ? X::kRows : 2;  // stored rows of a tile

#ifdef AMX
  void some_rows(int64_t, int64_t, int64_t tile, const Int8Tiles& x, Int8Tiles::Sums& sums) const {
    const int64_t first = tile * kStep, rows = std::min(kStep, n - first);
    const __m512 scale = load_some(scales.data + first, rows);
    const __m512 added = bias ? load_some(bias + first, rows) : _mm512_setzero_ps();
    x.multiply(bytes + first * k, rows, sums, [&](int64_t token, __m512 found) {
      __m512 scaled = found * scale;
      asm("" : "+v"(scaled));  // rounded before the bias is added, as with vectors
      store_some(output + token * n + first, rows, scaled + added);
    });
  }
#endif

  template <class Other>
  void some_rows(int64_t begin, int64_t end, int64_t tile, const Other& x, typename Other::Sums& sums) const {
    Rows<A> rows;
    rows.width = k / groups;
    rows.ahead = std::max<int64_t>(kAheadBytes / (kStep * k), 1) * kStep * k;
    int64_t row[4];
    for (int r = 0; r < 4; ++r) {
      const int64_t far = begin * kStep + tile - begin + r % kStep * (end - begin);
      // The last row stands for those that are missing.
      const int64_t at = std::min(kFarBytes ? far : tile * kStep + r % kStep, stored - 1);
      row[r] = at + (r < kStep ? 0 : stored);
      rows.bytes[r] = bytes + at * k;
      rows.scale[r] = scales.data + row[r] * groups;
      rows.shift[r] = grouped ? shifts + row[r] * groups : nullptr;
    }
    const int64_t tokens = sums.size();
    std::fill(sums.begin(), sums.end(), Four<A>{});
    quantized_products<bits, grouped, A>(rows, x, sums.data());
    for (int r = 0; r < 4; ++r) {
      const A added = bias ? A(widen(bias[row[r]])) : A(0);
      for (int64_t t = 0; t < tokens; ++t) output[t * n + row[r]] = narrow<T>(sums[t][r] + added);
    }
  }

  const T* bias;
  const int64_t n, k, groups;
  T* const output;
  const int8_t* bytes;
  const int64_t stored;  // rows of bytes, each of which holds a row or two
  const Widened<T, A> scales;
  std::optional<Widened<T, A>> numbers;  // shifts that are given as numbers
  std::optional<Aligned<A>> multiplied;  // those that are in units of the scale, or zeros
  const A* shifts = nullptr;
  Parts parts;
};

// The outputs of layers for some tokens of the input.
template <int bits, bool grouped, class T, class X, size_t Count>
void quantized_rows(Given input, const QuantizedLayer (&given)[Count], int64_t first, int64_t tokens) {
  using A = typename SumOf<T>::type;
  const int64_t k = given[0].weight.size(1);
  const Widened<T, A> numbers(pointer<const T>(input) + first * k, tokens * k);
  const X x(numbers.data, tokens, k);
  std::deque<QuantizedRows<bits, grouped, T, X>> layers;
  int64_t rows = 0;
  for (const QuantizedLayer& layer : given) layers.emplace_back(layer, first), rows += layer.scale.size(0);
#pragma omp parallel if (rows * k * tokens > kSerial)
  {
    typename X::Sums sums(tokens);
    for (auto& layer : layers) layer.work(x, sums);
  }
}

// The same, by what suits the weights and the number of tokens.
template <class T, size_t Count>
void quantized_rows(Given input, const QuantizedLayer (&layers)[Count], int64_t first, int64_t tokens) {
  using A = typename SumOf<T>::type;
  const bool grouped = layers[0].shift || layers[0].scale.size(1) > 1;
  if (layers[0].weight.type() != aoti_torch_dtype_int8())
    return quantized_rows<4, true, T, Numbers<A>>(input, layers, first, tokens);
  if (grouped) return quantized_rows<8, true, T, Numbers<A>>(input, layers, first, tokens);
#ifdef AMX
  if constexpr (std::is_same_v<A, float>)
    if (tokens >= Int8Tiles::kFewest && tiles_granted())
      return quantized_rows<8, false, T, Int8Tiles>(input, layers, first, tokens);
#endif
  quantized_rows<8, false, T, Whole<A>>(input, layers, first, tokens);
}

// `[..., K]`, `[N, K]` int8 or `[N / 2, K]` of two rows of 4 bits, and scales and shifts `[N, G]`, to `[..., N]`, for
// several layers of one input. See `Rows`; shifts of int8 are in units of the scale. All are contiguous.
template <class T, size_t Count>
void quantized_linears(Given input, QuantizedLayer (&&layers)[Count], Handle* const (&outputs)[Count]) {
  for (size_t i = 0; i < Count; ++i) *outputs[i] = (layers[i].output = empty_rows(input, layers[i].scale.size(0))).handle;
  for_groups(input.numel() / layers[0].weight.size(1), kMostTokens, 1, [&](int64_t first, int64_t tokens, bool) {
    quantized_rows<T>(input, layers, first, tokens);
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
