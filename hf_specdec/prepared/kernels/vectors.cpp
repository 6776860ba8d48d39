// Linear layers and attention of passes over few tokens: numbers and vectors of them.
//
// Matrix libraries are tuned for many rows. Here every weight is read from memory once per pass and multiplied with all
// tokens while it is in a register, so that a pass over five tokens takes little more than a pass over one.
// Numbers narrower than float are widened as they are read, sums are kept in float (in double for double), and results
// are rounded to the type of the input. `NUMBER`, that type, and `SUFFIX`, what names of operations on it end with, are
// defined where the files are joined.

namespace {

#if defined(__znver1__) || defined(__znver2__) || defined(__znver3__) || defined(__znver4__) || defined(__znver5__)
constexpr bool kAmd = true;
#else
constexpr bool kAmd = false;
#endif
#ifdef __AVX512F__
constexpr int kVectorBytes = 64;
constexpr int64_t kTokens = 6;  // of a tile; with four rows their sums fill the registers
#else
constexpr int kVectorBytes = 32;
constexpr int64_t kTokens = 3;
#endif
// A tile is four rows of weights and some tokens. Where its rows are far apart, each is the next one of a stream that
// runs straight on, which the processor foresees. Where they are neighbours, the code asks for what comes next.
constexpr bool kFarRows = kVectorBytes == 32 || !kAmd;
constexpr int64_t kMostTokens = 64;  // multiplied together; what is kept of them meanwhile stays in the caches
constexpr int64_t kSerial = 1 << 15;  // multiplications that take less time than waking the other threads
// Where memory is fetched to that is read once: past the second-level cache, which keeps the code between layers, or, on
// Intel processors, to that cache, which waits for more lines at a time than the first-level one. And what is read again.
constexpr int kReadOnce = kAmd ? 0 : 2;
constexpr int kReadAgain = kAmd ? 3 : 2;

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

// Every four lanes joined into four.
template <class A, class Join = std::plus<>> inline Four<A> fold(Vector<A> v, Join join = {}) {
  Four<A> parts[kLanes<A> / 4];
  std::memcpy(parts, &v, sizeof v);
  for (int i = 1; i < kLanes<A> / 4; ++i) parts[0] = join(parts[0], parts[i]);
  return parts[0];
}

// The sums of four vectors: they are shuffled and added until every four lanes hold a part of each sum.
template <class A> inline Four<A> sums_of(Vector<A> a, Vector<A> b, Vector<A> c, Vector<A> d) {
  constexpr int n = kLanes<A>;
  using Index = typename Lanes<std::conditional_t<sizeof(A) == 8, int64_t, int32_t>, n>::type;
  Index pairs, halves;  // of every four lanes: a0 b0 a1 b1, and a0 a1 b0 b1
#pragma GCC unroll 16
  for (int i = 0; i < n; ++i) {
    pairs[i] = i / 4 * 4 + i % 4 / 2 + i % 2 * n;
    halves[i] = i / 4 * 4 + i % 2 + i % 4 / 2 * n;
  }
  const auto ab = __builtin_shuffle(a, b, pairs) + __builtin_shuffle(a, b, pairs + 2);
  const auto cd = __builtin_shuffle(c, d, pairs) + __builtin_shuffle(c, d, pairs + 2);
  return fold<A>(__builtin_shuffle(ab, cd, halves) + __builtin_shuffle(ab, cd, halves + 2));
}

// Tiles, dealt out to threads: large parts first, which memory brings steadily, and small ones last, so that no thread
// waits long for another.
class Parts {
 public:
  explicit Parts(int64_t tiles) : tiles(tiles) {}

  // The next part, from `begin` to `end`, for one of the threads that run; false where nothing is left.
  bool take(int64_t& begin, int64_t& end) {
    begin = taken.load();
    do {
      if (begin >= tiles) return false;
      const int64_t threads = omp_get_num_threads(), rest = tiles - begin;
      end = begin + std::min(rest, std::max((rest + threads - 1) / threads, kLeast));
    } while (!taken.compare_exchange_weak(begin, end));
    return true;
  }

 private:
  static constexpr int64_t kLeast = 4;
  const int64_t tiles;
  std::atomic<int64_t> taken{0};
};

// Memory that vectors are read from without crossing a line of the cache. `malloc` is faster than what aligns.
template <class A> struct Aligned {
  explicit Aligned(int64_t count)
      : all(new char[count * sizeof(A) + kLine]),
        data(reinterpret_cast<A*>((reinterpret_cast<uintptr_t>(all.get()) + kLine - 1) / kLine * kLine)) {}
  static constexpr uintptr_t kLine = 64;
  const std::unique_ptr<char[]> all;
  A* const data;
};

// Numbers as the sums have them, converted where they are others.
template <class T, class A> struct Widened {
  explicit Widened(Given from) : Widened(pointer<const T>(from), from.numel()) {}
  Widened(const T* given, int64_t count) : copy(std::is_same_v<T, A> ? 0 : count), data(copy.data) {
    if constexpr (std::is_same_v<T, A>) data = given;
    else for (int64_t i = 0; i < count; ++i) copy.data[i] = widen(given[i]);
  }
  const Aligned<A> copy;
  const A* data;
};

// How a row of weights meets a token: the type of the token's numbers, as many of both as an instruction multiplies, and
// that instruction. Weights are widened where the token's numbers are wider.
template <class T, class X> struct Product {
  using Weights = Vector<X>;
  using Token = Vector<X>;
  static constexpr int kWidth = kLanes<X>;
  static Weights weights(const T* from) { return load<T, X>(from); }
  static Token token(const X* from) { return load<X, X>(from); }
  static Vector<X> add(Vector<X> sum, Weights weights, Token token) { return sum + weights * token; }
};
#ifdef __AVX512BF16__
template <class T> using TokenOf = std::conditional_t<std::is_same_v<T, BFloat16>, BFloat16, typename SumOf<T>::type>;
// Pairs of products are exact and summed in float. Both sides are bits: gcc keeps no __m512bh in a register that is named.
template <> struct Product<BFloat16, BFloat16> {
  using Weights = Vector<float>;
  using Token = Vector<float>;
  static constexpr int kWidth = 32;
  static Weights weights(const BFloat16* from) { return (Weights)_mm512_loadu_si512(from); }
  static Token token(const BFloat16* from) { return (Token)_mm512_loadu_si512(from); }
  static Vector<float> add(Vector<float> sum, Weights weights, Token token) {
    return (Vector<float>)_mm512_dpbf16_ps((__m512)sum, (__m512bh)weights, (__m512bh)token);
  }
};
#else
template <class T> using TokenOf = typename SumOf<T>::type;
#endif

template <class A> constexpr A kNever = -std::numeric_limits<A>::infinity();

// e^x by lanes, for x of at most 0; float within two units in the last place, 0 below its normal numbers.
template <class A> inline Vector<A> exponential(Vector<A> x) {
  if constexpr (std::is_same_v<A, float>) {
    using Bits = typename Lanes<int32_t, kLanes<A>>::type;
    constexpr float least = -87.3f, whole = 12582912.f;  // adding 1.5 · 2²³ rounds to a whole number, in the low bits
    const Vector<A> bounded = x < least ? Vector<A>{} + least : x;
    const Vector<A> shifted = bounded * 1.44269504f + whole, power = shifted - whole;
    const Vector<A> r = bounded - power * 0.693359375f + power * 2.12194440e-4f;
    Vector<A> sum = r * 1.9875691500e-4f + 1.3981999507e-3f;
    for (float term : {8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f}) sum = sum * r + term;
    sum = sum * r * r + r + 1.f;
    return x < least ? Vector<A>{} : (Vector<A>)((Bits)sum + ((Bits)shifted << 23));
  } else {
    for (int i = 0; i < kLanes<A>; ++i) x[i] = std::exp(x[i]);
    return x;
  }
}

}  // namespace
