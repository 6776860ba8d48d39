// Products of few tokens and a matrix of 8 or 4 bits a number, which are widened in registers.

namespace {

constexpr int64_t kAheadBytes = 8192;  // from what is read to what is fetched from memory, where rows are neighbours
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
    if (!kFarRows && (bits == 8 || r < 2)) __builtin_prefetch(from + ahead, 0, 2);
    return bits == 8 ? load_part<kByte, A>(from) : r < 2 ? load_part<kLow, A>(from) : load_part<kHigh, A>(from);
  }
};

// The same as `quantized_tile` for columns that fill no vector. Inlined, it would take registers from the tile's sums.
template <int bits, class A>
__attribute__((noinline)) void last_columns(const Rows<A>& rows, const A* x, int tokens, int64_t k, int64_t at,
                                            int64_t end, Four<A>* sums) {
  for (int64_t i = at; i < end; ++i)
    for (int r = 0; r < 4; ++r) {
      const A weight = rows.template number<bits>(r, i) * rows.scale[r][i / rows.width] - rows.shift[r][i / rows.width];
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
    for (int r = 0; r < 4; ++r) scale[r] = rows.scale[r][group], shift[r] = rows.shift[r][group];
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
    if (i < stop) last_columns<bits, A>(rows, x, N, k, i, stop, sums);
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

// The products of four rows of weights and all tokens; see `products`.
template <int bits, bool grouped, class A>
void quantized_products(const Rows<A>& rows, const A* x, int64_t tokens, int64_t k, Four<A>* sums) {
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

template <int bits, bool grouped, class T>
void quantized_rows(const Tensor& input, const Tensor& weight, const Tensor& scale, const std::optional<Tensor>& shift,
                    const std::optional<Tensor>& bias, Tensor& output) {
  using A = typename SumOf<T>::type;
  const int64_t n = scale.size(0), groups = scale.size(1), k = weight.size(1), tokens = output.numel() / n;
  const int64_t step = bits == 8 ? 4 : 2, most = weight.size(0);
  const int8_t* w = static_cast<const int8_t*>(weight.data_ptr());
  const Widened<T, A> x(input), scales(scale);
  const T* b = bias ? static_cast<const T*>(bias->data_ptr()) : nullptr;
  T* out = static_cast<T*>(output.data_ptr());
  const bool given = shift && shift->scalar_type() != ScalarType::Char;
  const int8_t* whole = shift && !given ? static_cast<const int8_t*>(shift->data_ptr()) : nullptr;
  const Widened<T, A> numbers(given ? *shift : scale);
  const Aligned<A> multiplied(given ? 0 : n * groups);
  for (int64_t i = 0; i < (given ? 0 : n * groups); ++i) multiplied.data[i] = whole ? scales.data[i] * whole[i] : A(0);
  const A* shifts = given ? numbers.data : multiplied.data;
  Parts parts((most + step - 1) / step);
#pragma omp parallel if (n * k * tokens > kSerial)
  {
    std::vector<Four<A>> sums(tokens);
    Rows<A> rows;
    rows.width = k / groups;
    rows.ahead = std::max<int64_t>(kAheadBytes / (step * k), 1) * step * k;
    for (int64_t begin, end; parts.take(begin, end);)
      for (int64_t tile = begin; tile < end; ++tile) {
        std::fill(sums.begin(), sums.end(), Four<A>{});
        int64_t row[4];
        for (int r = 0; r < 4; ++r) {
          const int64_t at = kFarRows ? begin * step + tile - begin + r % step * (end - begin) : tile * step + r % step;
          const int64_t stored = std::min(at, most - 1);  // the last row stands for those that are missing
          row[r] = stored + (r < step ? 0 : most);
          rows.bytes[r] = w + stored * k;
          rows.scale[r] = scales.data + row[r] * groups;
          rows.shift[r] = shifts + row[r] * groups;
        }
        quantized_products<bits, grouped, A>(rows, x.data, tokens, k, sums.data());
        for (int64_t t = 0; t < tokens; ++t)
          for (int r = 0; r < 4; ++r) out[t * n + row[r]] = narrow<T>(sums[t][r] + (b ? A(widen(b[row[r]])) : A(0)));
      }
  }
}

template <class T>
void quantized_of(const Tensor& input, const Tensor& weight, const Tensor& scale, const std::optional<Tensor>& shift,
                  const std::optional<Tensor>& bias, Tensor& output) {
  const bool bytes = weight.scalar_type() == ScalarType::Char, grouped = shift || scale.size(1) > 1;
#ifdef __AVX512VNNI__
  if constexpr (!std::is_same_v<T, double>)
    if (bytes && !grouped) return whole_linear<T>(input, weight, scale, bias, output);
#endif
  auto rows = bytes ? grouped ? quantized_rows<8, true, T> : quantized_rows<8, false, T> : quantized_rows<4, true, T>;
  rows(input, weight, scale, shift, bias, output);
}

// `[..., K]`, `[N, K]` int8 or `[N / 2, K]` of two rows of 4 bits, and scales and shifts `[N, G]`, to `[..., N]`. See
// `Rows`; shifts of int8 are in units of the scale. All are contiguous.
Tensor quantized_linear(Tensor input, Tensor weight, Tensor scale, std::optional<Tensor> shift,
                        std::optional<Tensor> bias) {
  std::vector<int64_t> sizes(input.sizes().begin(), input.sizes().end());
  sizes.back() = scale.size(0);
  Tensor output = empty(input, sizes);
  quantized_of<NUMBER>(input, weight, scale, shift, bias, output);
  return output;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(NAMESPACE, library) {
  library.def("quantized_linear(Tensor input, Tensor weight, Tensor scale, Tensor? shift, Tensor? bias) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(NAMESPACE, CPU, library) {
  library.impl("quantized_linear", TORCH_BOX(&quantized_linear));
}
