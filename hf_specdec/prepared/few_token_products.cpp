// Linear layers and attention of passes over few tokens.
//
// Matrix libraries are tuned for many rows. Here every weight is read from memory once per pass and multiplied with all
// tokens while it is in a register, so that a pass over five tokens takes little more than a pass over one.
// Numbers narrower than float are widened as they are read, sums are kept in float (in double for double), and results
// are rounded to the type of the input.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <immintrin.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <optional>
#include <type_traits>
#include <vector>

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

namespace {

#ifdef __AVX512F__
constexpr int kVectorBytes = 64;
constexpr int64_t kTokens = 6;  // of a tile; with four rows their sums fill the registers
#else
constexpr int kVectorBytes = 32;
constexpr int64_t kTokens = 3;
#endif
constexpr int64_t kColumns = 1024;   // of a tile; what it reads of the input stays in the first-level cache
constexpr int64_t kAhead = 1024;     // columns from what is read to what is fetched from memory
constexpr int64_t kSerial = 1 << 15;  // multiplications that take less time than waking the other threads

struct BFloat16 { uint16_t bits; };
struct Half { uint16_t bits; };

template <class T> struct SumOf { using type = float; };
template <> struct SumOf<double> { using type = double; };

template <class T, int N> struct Lanes { typedef T type __attribute__((vector_size(N * sizeof(T)))); };
template <class A> constexpr int kLanes = kVectorBytes / sizeof(A);
template <class A> using Vector = typename Lanes<A, kLanes<A>>::type;
template <class A> using Four = typename Lanes<A, 4>::type;

template <class T, class A> inline Vector<A> load(const T* from) {
  static_assert(std::is_same_v<T, A>);
  Vector<A> v;
  std::memcpy(&v, from, sizeof v);
  return v;
}
#ifdef __AVX512F__
template <> inline Vector<float> load<BFloat16, float>(const BFloat16* from) {
  return (Vector<float>)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)), 16);
}
template <> inline Vector<float> load<Half, float>(const Half* from) {
  return (Vector<float>)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
}
#else
template <> inline Vector<float> load<BFloat16, float>(const BFloat16* from) {
  return (Vector<float>)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from)), 16);
}
template <> inline Vector<float> load<Half, float>(const Half* from) {
  return (Vector<float>)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
}
#endif

template <class A> inline A widen(A v) { return v; }
inline float widen(BFloat16 v) {
  uint32_t wide = uint32_t(v.bits) << 16;
  float f;
  std::memcpy(&f, &wide, sizeof f);
  return f;
}
inline float widen(Half v) { return _cvtsh_ss(v.bits); }

template <class T> inline T narrow(typename SumOf<T>::type v) {
  if constexpr (std::is_same_v<T, Half>) {
    return {_cvtss_sh(v, _MM_FROUND_TO_NEAREST_INT)};
  } else if constexpr (std::is_same_v<T, BFloat16>) {  // to nearest, ties to even
    uint32_t bits;
    std::memcpy(&bits, &v, sizeof bits);
    return {v != v ? uint16_t(0x7fc0) : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
  } else {
    return v;
  }
}

template <class A> inline Four<A> fold(Vector<A> v) {
  Four<A> parts[kLanes<A> / 4];
  std::memcpy(parts, &v, sizeof v);
  for (int i = 1; i < kLanes<A> / 4; ++i) parts[0] += parts[i];
  return parts[0];
}

// Memory that vectors are read from without crossing a line of the cache.
template <class A> struct Aligned {
  explicit Aligned(int64_t count) : data(static_cast<A*>(::operator new(count * sizeof(A), kAlignment))) {}
  ~Aligned() { ::operator delete(data, kAlignment); }
  Aligned(const Aligned&) = delete;
  static constexpr std::align_val_t kAlignment{64};
  A* const data;
};

// The sums of four vectors.
template <class A> inline Four<A> sums_of(Four<A> a, Four<A> b, Four<A> c, Four<A> d) {
  using Index = typename Lanes<std::conditional_t<sizeof(A) == 8, int64_t, int32_t>, 4>::type;
  auto ab = __builtin_shuffle(a, b, Index{0, 4, 1, 5}) + __builtin_shuffle(a, b, Index{2, 6, 3, 7});
  auto cd = __builtin_shuffle(c, d, Index{0, 4, 1, 5}) + __builtin_shuffle(c, d, Index{2, 6, 3, 7});
  return __builtin_shuffle(ab, cd, Index{0, 1, 4, 5}) + __builtin_shuffle(ab, cd, Index{2, 3, 6, 7});
}

// Adds the products of R rows of `w` and T rows of `x`, over `width` columns, to sums[t][r]. Rows have `k`
// columns, `left` of them from `w` on.
template <class T, class A, int R, int N>
void tile(const T* w, const A* x, int64_t k, int64_t left, int64_t width, Four<A>* sums) {
  Vector<A> acc[R][N];
  for (int r = 0; r < R; ++r)
    for (int t = 0; t < N; ++t) acc[r][t] = Vector<A>{};
  // The processor does not foresee the jumps between rows: what is read next is the rest of the row, then the next
  // tile's. Long rows of one token's pass it foresees by itself.
  const bool foresee = k <= kColumns || N > 1 || sizeof(T) < sizeof(float);
  int64_t i = 0;
  for (; i + kLanes<A> <= width; i += kLanes<A>) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      if (foresee) __builtin_prefetch(w + r * k + i + kAhead + (i + kAhead < left ? 0 : 3 * k), 0, 2);
      Vector<A> weights = load<T, A>(w + r * k + i);
#pragma GCC unroll 8
      for (int t = 0; t < N; ++t) acc[r][t] += weights * load<A, A>(x + t * k + i);
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
      for (int r = 0; r < R; ++r) sums[t][r] += A(widen(w[r * k + i])) * x[t * k + i];
}

template <class T, class A, int N>
void tile_of(int rows, const T* w, const A* x, int64_t k, int64_t left, int64_t width, Four<A>* sums) {
  if (rows == 4) return tile<T, A, 4, N>(w, x, k, left, width, sums);
  // The last rows of a matrix, if their number is no multiple of four: one after another.
  for (int r = 0; r < rows; ++r)
    for (int t = 0; t < N; ++t) {
      Four<A> one = {};
      tile<T, A, 1, 1>(w + r * k, x + t * k, k, left, width, &one);
      sums[t][r] += one[0];
    }
}

// The products of up to four rows of weights and all tokens. Tokens come in groups of about equal size, which read the
// same columns of the weights one after another, from the cache.
template <class T, class A>
void products(int rows, const T* w, const A* x, int64_t tokens, int64_t k, Four<A>* sums) {
  const int64_t groups = (tokens + kTokens - 1) / kTokens;
  for (int64_t at = 0; at < k; at += kColumns) {
    const int64_t width = std::min(kColumns, k - at);
    for (int64_t group = 0, t = 0; group < groups; ++group) {
      const int64_t size = (tokens - t + groups - group - 1) / (groups - group);
      const A* tokens_from = x + t * k + at;
      switch (size) {
        case 1: tile_of<T, A, 1>(rows, w + at, tokens_from, k, k - at, width, sums + t); break;
        case 2: tile_of<T, A, 2>(rows, w + at, tokens_from, k, k - at, width, sums + t); break;
        case 3: tile_of<T, A, 3>(rows, w + at, tokens_from, k, k - at, width, sums + t); break;
        case 4: tile_of<T, A, 4>(rows, w + at, tokens_from, k, k - at, width, sums + t); break;
        case 5: tile_of<T, A, 5>(rows, w + at, tokens_from, k, k - at, width, sums + t); break;
        case 6: tile_of<T, A, 6>(rows, w + at, tokens_from, k, k - at, width, sums + t); break;
      }
      t += size;
    }
  }
}

template <class T>
void linear_of(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, Tensor& output) {
  using A = typename SumOf<T>::type;
  const int64_t n = weight.size(0), k = weight.size(1), tokens = output.numel() / n;
  const T* w = static_cast<const T*>(weight.data_ptr());
  const T* b = bias ? static_cast<const T*>(bias->data_ptr()) : nullptr;
  const T* given = static_cast<const T*>(input.data_ptr());
  T* out = static_cast<T*>(output.data_ptr());
  const Aligned<A> widened(std::is_same_v<T, A> ? 0 : tokens * k);
  const A* x = widened.data;
  if constexpr (std::is_same_v<T, A>) {
    x = given;
  } else {
    for (int64_t i = 0; i < tokens * k; ++i) widened.data[i] = widen(given[i]);
  }
#pragma omp parallel if (n * k * tokens > kSerial)
  {
    std::vector<Four<A>> sums(tokens);
#pragma omp for schedule(static)
    for (int64_t row = 0; row < n; row += 4) {
      const int rows = int(std::min<int64_t>(4, n - row));
      std::fill(sums.begin(), sums.end(), Four<A>{});
      products<T, A>(rows, w + row * k, x, tokens, k, sums.data());
      for (int64_t t = 0; t < tokens; ++t)
        for (int r = 0; r < rows; ++r)
          out[t * n + row + r] = narrow<T>(sums[t][r] + (b ? A(widen(b[row + r])) : A(0)));
    }
  }
}


struct Shape {
  int64_t heads, queries, slots, width;  // of one row and one head of the keys: the heads of queries that share it
  int64_t mask_head, mask_query, out_head, out_query;  // strides
};

// Some heads' queries over the keys and values that they share.
template <class T, class A>
void attend(const A* scaled, const T* key, const T* value, const T* mask, T* out, const Shape& shape) {
  const int64_t rows = shape.heads * shape.queries, width = shape.width, slots = shape.slots;
  std::vector<A> scores(rows * slots), mixed(width);
  std::vector<Four<A>> sums(rows);
  std::vector<const T*> masks(rows);
  for (int64_t row = 0; row < rows; ++row)
    masks[row] = mask + row / shape.queries * shape.mask_head + row % shape.queries * shape.mask_query;
  const auto hidden = [&](int64_t row, int64_t slot) {
    return widen(masks[row][slot]) <= A(std::is_same_v<T, Half> ? -65504.0 : std::is_same_v<T, double>
        ? double(std::numeric_limits<double>::lowest()) : -3.3895314e38);
  };
  for (int64_t slot = 0; slot < slots; slot += 4) {
    const int count = int(std::min<int64_t>(4, slots - slot));
    bool seen = false;
    for (int64_t row = 0; row < rows && !seen; ++row)
      for (int at = 0; at < count; ++at) seen |= !hidden(row, slot + at);
    if (seen) {
      std::fill(sums.begin(), sums.end(), Four<A>{});
      products<T, A>(count, key + slot * width, scaled, rows, width, sums.data());
    }
    // What a mask hides is left out, whatever it holds.
    for (int64_t row = 0; row < rows; ++row)
      for (int at = 0; at < count; ++at)
        scores[row * slots + slot + at] = seen && !hidden(row, slot + at)
            ? sums[row][at] + widen(masks[row][slot + at]) : -std::numeric_limits<A>::infinity();
  }
  for (int64_t row = 0; row < rows; ++row) {
    A* weights = scores.data() + row * slots;
    const A most = *std::max_element(weights, weights + slots);
    A total = 0;
    std::fill(mixed.begin(), mixed.end(), A(0));
    for (int64_t slot = 0; slot < slots; ++slot) {
      if (weights[slot] == -std::numeric_limits<A>::infinity()) continue;
      const A weight = std::exp(weights[slot] - most);
      const T* from = value + slot * width;
      total += weight;
      int64_t d = 0;
      for (; d + kLanes<A> <= width; d += kLanes<A>) {
        const Vector<A> sum = load<A, A>(mixed.data() + d) + weight * load<T, A>(from + d);
        std::memcpy(mixed.data() + d, &sum, sizeof sum);
      }
      for (; d < width; ++d) mixed[d] += weight * A(widen(from[d]));
    }
    T* to = out + row / shape.queries * shape.out_head + row % shape.queries * shape.out_query;
    for (int64_t d = 0; d < width; ++d) to[d] = narrow<T>(total > 0 || total != total ? mixed[d] / total : A(0));
  }
}

template <class T>
void attention_of(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& mask, double scale,
                  Tensor& output) {
  using A = typename SumOf<T>::type;
  const int64_t batch = query.size(0), heads = query.size(1), queries = query.size(2), width = query.size(3);
  const int64_t shared = key.size(1), slots = key.size(2), group = heads / shared;
  // Heads that share keys are taken together where that leaves work for all threads.
  const int64_t together = batch * shared >= 2 * omp_get_max_threads() ? group : 1;
  const int64_t mask_row = mask.size(0) > 1 ? mask.stride(0) : 0;
  const Shape shape{together, queries, slots, width, mask.size(1) > 1 ? mask.stride(1) : 0,
                    mask.size(2) > 1 ? mask.stride(2) : 0, width, heads * width};
  const T* q = static_cast<const T*>(query.data_ptr());
  const T* k = static_cast<const T*>(key.data_ptr());
  const T* v = static_cast<const T*>(value.data_ptr());
  const T* m = static_cast<const T*>(mask.data_ptr());
  T* out = static_cast<T*>(output.data_ptr());
#pragma omp parallel for schedule(dynamic) if (batch * heads * queries * slots * width > kSerial)
  for (int64_t unit = 0; unit < batch * heads / together; ++unit) {
    const int64_t row = unit * together / heads, head = unit * together % heads;
    const Aligned<A> scaled(together * queries * width);
    for (int64_t h = 0; h < together; ++h)
      for (int64_t at = 0; at < queries; ++at)
        for (int64_t d = 0; d < width; ++d)
          scaled.data[(h * queries + at) * width + d] = A(scale) * A(widen(
              q[row * query.stride(0) + (head + h) * query.stride(1) + at * query.stride(2) + d]));
    attend<T, A>(scaled.data, k + row * key.stride(0) + head / group * key.stride(1),
                 v + row * value.stride(0) + head / group * value.stride(1),
                 m + row * mask_row + head * shape.mask_head, out + (row * queries * heads + head) * width, shape);
  }
}

// `function<T>(arguments…)` for the type of the numbers in `like`.
#define FOR_TYPE_OF(like, function, ...)                                                      \
  switch ((like).scalar_type()) {                                                             \
    case ScalarType::Float: function<float>(__VA_ARGS__); break;                              \
    case ScalarType::Double: function<double>(__VA_ARGS__); break;                            \
    case ScalarType::BFloat16: function<BFloat16>(__VA_ARGS__); break;                        \
    case ScalarType::Half: function<Half>(__VA_ARGS__); break;                                \
    default: STD_TORCH_CHECK(false, "few-token products take floating-point numbers only");   \
  }

// `[..., K]`, `[N, K]` and `[N]` to `[..., N]`; all contiguous.
Tensor linear(Tensor input, Tensor weight, std::optional<Tensor> bias) {
  std::vector<int64_t> sizes(input.sizes().begin(), input.sizes().end());
  sizes.back() = weight.size(0);
  Tensor output = torch::stable::new_empty(input, sizes);
  FOR_TYPE_OF(input, linear_of, input, weight, bias, output)
  return output;
}

// `[B, H, Q, D]` over `[B, H_kv, S, D]`, with a mask `[B or 1, H or 1, Q or 1, S]` to be added, to `[B, Q, H, D]`. The
// last dimension of all is contiguous, and the last two of keys and values are.
Tensor attention(Tensor query, Tensor key, Tensor value, Tensor mask, double scale) {
  Tensor output = torch::stable::new_empty(query, {query.size(0), query.size(2), query.size(1), query.size(3)});
  FOR_TYPE_OF(query, attention_of, query, key, value, mask, scale, output)
  return output;
}

}  // namespace

STABLE_TORCH_LIBRARY(hf_specdec, library) {
  library.def("linear(Tensor input, Tensor weight, Tensor? bias) -> Tensor");
  library.def("attention(Tensor query, Tensor key, Tensor value, Tensor mask, float scale) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(hf_specdec, CPU, library) {
  library.impl("linear", TORCH_BOX(&linear));
  library.impl("attention", TORCH_BOX(&attention));
}
