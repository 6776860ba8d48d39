// Numbers and vectors of them. Code that depends on the instruction set by more than its width is in this file and in
// those of int8 and GGUF products.
//
// Numbers narrower than float are widened as they are read, sums are kept in float (in double for double), and results
// are rounded to the type of the input.

#pragma once

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <c10/util/Unroll.h>
#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <type_traits>

#define INLINE inline __attribute__((always_inline))

namespace {

#if defined(__znver1__) || defined(__znver2__) || defined(__znver3__) || defined(__znver4__) || defined(__znver5__)
constexpr bool kAmd = true;
#else
constexpr bool kAmd = false;
#endif

using c10::BFloat16;
using c10::Half;

template <class T> using SumOf = std::conditional_t<std::is_same_v<T, double>, double, float>;
template <class A> using Vector = at::vec::Vectorized<A>;
template <class A> constexpr int kLanes = Vector<A>::size();
constexpr bool kWide = kLanes<float> == 16;  // AVX-512, which has 32 registers instead of 16
template <class A, int N> struct Numbers { typedef A type __attribute__((vector_size(N * sizeof(A)))); };
template <class A> using Four = typename Numbers<A, 4>::type;

// Where memory is prefetched to. If read once, it bypasses the second-level cache, which keeps the code between layers; on
// Intel processors it goes to that cache, which waits for more lines at a time than the first-level one.
constexpr int kReadOnce = kAmd ? 0 : 2;
constexpr int kReadAgain = kAmd ? 3 : 2;

// Calls `work(std::integral_constant<int, n>)` for all n below N.
template <int N, class Work> INLINE void each(const Work& work) { c10::ForcedUnroll<N>{}(work); }

// Calls it for n = `count`, from 1 to `most`.
template <int most, class Work> INLINE void for_constant(int64_t count, const Work& work) {
  if (count == most) return work(std::integral_constant<int, most>{});
  if constexpr (most > 1) for_constant<most - 1>(count, work);
}

// Numbers of any type, widened.
template <class A, class T> INLINE Vector<A> load(const T* from) {
  if constexpr (std::is_same_v<T, A>) {
    return Vector<A>::loadu(from);
  } else {
    Vector<float> numbers;
    if constexpr (std::is_same_v<T, BFloat16>) at::vec::load_fp32_from_bf16(from, numbers);
    else at::vec::load_fp32_from_fp16(from, numbers);
    return numbers;
  }
}

// The first of 16 signed or unsigned bytes, widened.
template <class A, bool sign = true> INLINE Vector<A> widen(__m128i bytes) {
#ifdef CPU_CAPABILITY_AVX512
  if constexpr (sizeof(A) == 4) return _mm512_cvtepi32_ps(sign ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
  else return _mm512_cvtepi32_pd(sign ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
#else
  if constexpr (sizeof(A) == 4) return _mm256_cvtepi32_ps(sign ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
  else return _mm256_cvtepi32_pd(sign ? _mm_cvtepi8_epi32(bytes) : _mm_cvtepu8_epi32(bytes));
#endif
}

// Signed bytes or halves of unsigned ones, widened.
enum Part { kByte, kLowBits, kHighBits };
template <class A> INLINE Vector<A> widen(const int8_t* from, Part part) {
  __m128i bytes{};
  std::memcpy(&bytes, from, kLanes<A>);
  if (part == kHighBits) bytes = _mm_srli_epi16(bytes, 4);
  if (part != kByte) bytes = _mm_and_si128(bytes, _mm_set1_epi8(15));
  return widen<A>(bytes);
}

// Keeps a vector in a register; compilers would read it from memory for each use.
template <class A> INLINE void keep(Vector<A>& vector) {
  typename Numbers<A, kLanes<A>>::type bits = vector;
  asm("" : "+v"(bits));
  vector = Vector<A>(bits);
}

#ifdef CPU_CAPABILITY_AVX512
INLINE auto low_pairs(__m512 a, __m512 b) { return _mm512_unpacklo_ps(a, b); }
INLINE auto high_pairs(__m512 a, __m512 b) { return _mm512_unpackhi_ps(a, b); }
INLINE auto low_halves(__m512 a, __m512 b) { return (__m512)_mm512_unpacklo_pd((__m512d)a, (__m512d)b); }
INLINE auto high_halves(__m512 a, __m512 b) { return (__m512)_mm512_unpackhi_pd((__m512d)a, (__m512d)b); }
using Bits = __m512;
using WholeBits = __m512i;
#else
INLINE auto low_pairs(__m256 a, __m256 b) { return _mm256_unpacklo_ps(a, b); }
INLINE auto high_pairs(__m256 a, __m256 b) { return _mm256_unpackhi_ps(a, b); }
INLINE auto low_halves(__m256 a, __m256 b) { return (__m256)_mm256_unpacklo_pd((__m256d)a, (__m256d)b); }
INLINE auto high_halves(__m256 a, __m256 b) { return (__m256)_mm256_unpackhi_pd((__m256d)a, (__m256d)b); }
using Bits = __m256;
using WholeBits = __m256i;
#endif

template <class A> INLINE A sum_of(const Vector<A>& of) {
  return at::vec::vec_reduce_all<A>([](auto a, auto b) { return a + b; }, of);
}

// The sums of four vectors. Numbers of 32 bits are shuffled and added until every four lanes hold a part of each sum.
template <class A> INLINE Four<A> sums_of(Vector<A> a, Vector<A> b, Vector<A> c, Vector<A> d) {
  typedef typename Numbers<A, kLanes<A>>::type Lanes;
  if constexpr (sizeof(A) == 4) {
    using Native = std::conditional_t<std::is_same_v<A, float>, Bits, WholeBits>;
    const auto bits = [](const Vector<A>& of) __attribute__((always_inline)) { return (Bits)Native(of); };
    const auto add = [](Bits a, Bits b) __attribute__((always_inline)) { return (Bits)((Lanes)a + (Lanes)b); };
    const Bits ab = add(low_pairs(bits(a), bits(b)), high_pairs(bits(a), bits(b)));
    const Bits cd = add(low_pairs(bits(c), bits(d)), high_pairs(bits(c), bits(d)));
    const Bits all = add(low_halves(ab, cd), high_halves(ab, cd));
    Four<A> parts[kLanes<A> / 4];
    std::memcpy(parts, &all, sizeof all);
    if constexpr (kWide) return parts[0] + parts[1] + (parts[2] + parts[3]);
    else return parts[0] + parts[1];
  } else {
    return Four<A>{sum_of<A>(a), sum_of<A>(b), sum_of<A>(c), sum_of<A>(d)};
  }
}

// Memory from which vectors are read without crossing cache lines. `malloc` is faster than aligned allocation.
template <class A> struct Aligned {
  explicit Aligned(int64_t count)
      : all(new char[count * sizeof(A) + kLine]),
        data(reinterpret_cast<A*>((reinterpret_cast<uintptr_t>(all.get()) + kLine - 1) / kLine * kLine)) {}
  static constexpr uintptr_t kLine = 64;
  std::unique_ptr<char[]> all;
  A* data;
};

// Rows of numbers `[rows, columns]`, converted to A if they have another type, and padded with zeros to a multiple of
// `step`.
template <class T, class A> struct Padded {
  Padded(const T* from, int64_t rows, int64_t columns, int64_t step = 1)
      : width((columns + step - 1) / step * step), copied(!std::is_same_v<T, A> || width != columns),
        copy(copied ? rows * width : 0), data(copy.data) {
    if constexpr (std::is_same_v<T, A>)
      if (!copied) data = from;
    if (!copied) return;
    for (int64_t row = 0; row < rows; ++row) {
      A* to = std::copy_n(from + row * columns, columns, copy.data + row * width);
      std::fill_n(to, width - columns, A(0));
    }
  }
  const A* row(int64_t at) const { return data + at * width; }

  const int64_t width;
  const bool copied;
  const Aligned<A> copy;
  const A* data;
};

}  // namespace
