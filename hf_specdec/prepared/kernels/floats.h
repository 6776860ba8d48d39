// Products of few tokens and a matrix of floating point.

#pragma once

#include "layers.h"

namespace {

constexpr int64_t kTokens = kWide ? 6 : 3;  // in a block; with four rows, their sums fill the registers

// Weights are widened to the type of a token's numbers.
template <class T, class A> struct FloatProduct {
  using Stored = T;
  using Token = A;
  using Weights = Vector<A>;
  using Column = Vector<A>;
  using Sum = Vector<A>;
  static constexpr int kStep = kLanes<A>;
  static INLINE Vector<A> weights(const T* from, int) { return load<A>(from); }
  static INLINE void hold(Vector<A>& vector) { keep(vector); }
  static INLINE void add(Sum& sum, const Weights& weights, const Column& token) {
    sum = at::vec::fmadd(weights, token, sum);
  }
};

#ifdef __AVX512BF16__
// Pairs of products are exact and summed in float. Both sides are raw bits.
struct BFloat16Product {
  using Stored = BFloat16;
  using Token = BFloat16;
  using Weights = Vector<float>;
  using Column = Vector<float>;
  using Sum = Vector<float>;
  static constexpr int kStep = 32;
  static INLINE Vector<float> weights(const BFloat16* from, int) { return Vector<float>::loadu(from); }
  static INLINE void hold(Vector<float>& vector) { keep(vector); }
  static INLINE void add(Sum& sum, const Weights& weights, const Column& token) {
    sum = _mm512_dpbf16_ps(sum, (__m512bh)__m512(weights), (__m512bh)__m512(token));
  }
};
template <class T>
using ProductOf = std::conditional_t<std::is_same_v<T, BFloat16>, BFloat16Product, FloatProduct<T, SumOf<T>>>;
#else
template <class T> using ProductOf = FloatProduct<T, SumOf<T>>;
#endif

// Tokens, `apart` numbers from one to the next, padded so that no vector reads beyond them.
template <class Product> struct Tokens {
  INLINE auto at(int64_t token, int64_t i) const { return Product::Column::loadu(data + token * apart + i); }
  const typename Product::Token* data;
  int64_t apart;
};

// Adds the products of four rows and all tokens over some numbers to `sums[token]`, in groups of tokens.
// `fetch(last, r, i)` may prefetch memory; `last` says whether this is the last group.
template <class Product, class Fetch>
INLINE void multiply_four(const typename Product::Stored* const (&rows)[4], const Tokens<Product>& tokens, int64_t count,
                          int64_t begin, int64_t end, const Fetch& fetch, Four<SumOf<typename Product::Token>>* sums) {
  using A = SumOf<typename Product::Token>;
  for_groups(count, kTokens, [&](int64_t first, int64_t size, bool last) {
    for_constant<kTokens>(size, [&](auto n) __attribute__((always_inline)) {
      Vector<A> found[4][n];
      multiply<Product, 4, n>(rows, tokens, first, begin, end,
                              [&](auto r, int64_t i) __attribute__((always_inline)) { fetch(last, r, i); }, found);
      each<n>([&](auto t) __attribute__((always_inline)) {
        sums[first + t] += sums_of<A>(found[0][t], found[1][t], found[2][t], found[3][t]);
      });
    });
  });
}

// The tokens `[tokens, k]`, multiplied with four rows at a time, which are far apart: each row continues a sequential
// stream, which the processor prefetches. Groups of tokens read the same strip of the rows one after another, from the
// first-level cache. On Intel processors and with AVX2, the last group prefetches the next strip, while no other request
// is pending.
template <class T> class FloatTokens {
 public:
  using A = SumOf<T>;
  using Product = ProductOf<T>;
  struct Scratch {};
  static constexpr int kRows = 4;
  static constexpr int kHalves = 1;
  static constexpr bool far() { return true; }

  FloatTokens(const T* x, int64_t tokens, int64_t k) : count(tokens), k(k), padded(x, tokens, k, Product::kStep) {}

  void multiply(const Block<T, T>& block, A* sums, Scratch&) const {
    const T* const rows[4] = {block.row(0), block.row(1), block.row(2), block.row(3)};
    auto* to = reinterpret_cast<Four<A>*>(sums);
    std::fill_n(to, count, Four<A>{});
    const bool asks = kAsks && (kWide || count > kTokens);
    const int64_t strip = asks || count > kTokens ? kStrip : k;
    for (int64_t at = 0; at < k; at += strip)
      multiply_four<Product>(
          rows, {padded.data, padded.width}, count, at, std::min(at + strip, k),
          [&](bool last, auto r, int64_t i) __attribute__((always_inline)) {
            if (kAsks && asks && last) __builtin_prefetch(rows[r] + i + strip, 0, kReadAgain);
          },
          to);
  }

  const int64_t count, k;

 private:
  static constexpr bool kAsks = !kAmd || !kWide;
  static constexpr int64_t kStrip = 1024 / sizeof(T);

  const Padded<T, typename Product::Token> padded;
};

}  // namespace
