// Products of a matrix and enough tokens to fill vectors, as in batches. A vector holds one number of each of several tokens
// and is multiplied with one weight, so that no sums within a vector need to be added at the end. For 60 tokens of a model
// of 135M in float32, on two Intel cores with AVX-512, whole calls take 0.8 times as long as with vectors of rows.

#pragma once

#include "layers.h"

namespace {

template <class A> struct BroadcastProduct {
  using Stored = A;
  using Weights = Vector<A>;
  using Column = Vector<A>;
  using Sum = Vector<A>;
  static constexpr int kStep = 1;
  static INLINE Vector<A> weights(const A* from, int) { return Vector<A>(*from); }
  static INLINE void hold(Vector<A>& vector) { keep(vector); }
  static INLINE void add(Sum& sum, const Weights& weight, const Column& tokens) {
    sum = at::vec::fmadd(weight, tokens, sum);
  }
};

// Vectors `[k, vectors, lanes]`.
template <class A> struct TokenVectors {
  INLINE Vector<A> at(int64_t vector, int64_t i) const { return Vector<A>::loadu(data + i * apart + vector * kLanes<A>); }
  const A* data;
  int64_t apart;
};

template <class A_> class TransposedTokens {
 public:
  using A = A_;
  static constexpr int kRows = 24;  // a multiple of every `kRowsWith`
  static constexpr int kHalves = 1;
  static constexpr bool far() { return false; }
  static constexpr int64_t kFewest = !kWide ? 32 : kAmd ? 16 : 24;  // tokens
  struct Scratch {};

  TransposedTokens(const A* x, int64_t tokens, int64_t k)
      : count(tokens), k(k), vectors((tokens + kLanes<A> - 1) / kLanes<A>), numbers(k * vectors * kLanes<A>) {
    const int64_t lanes = vectors * kLanes<A>;
#pragma omp parallel for if (lanes * k > kSerial)
    for (int64_t i = 0; i < k; ++i) {
      for (int64_t t = 0; t < tokens; ++t) numbers.data[i * lanes + t] = x[t * k + i];
      for (int64_t t = tokens; t < lanes; ++t) numbers.data[i * lanes + t] = 0;
    }
  }

  void multiply(const Block<A, A>& rows, A* sums, Scratch&) const {
    for_groups(vectors, kMostVectors, [&](int64_t first, int64_t size, bool) {
      for_constant<kMostVectors>(size, [&](auto n) { some_vectors<n>(rows, first, sums); });
    });
  }

  const int64_t count, k;

 private:
  static constexpr int kMostVectors = 4;  // multiplied with a weight together
  template <int vectors> static constexpr int kRowsWith = std::min(8, (kWide ? 24 : 12) / vectors);

  // Meanwhile prefetches the memory after the rows: a line for every two columns, at least as many lines as the rows have.
  template <int N> void some_vectors(const Block<A, A>& rows, int64_t first, A* sums) const {
    constexpr int R = kRowsWith<N>;
    for (int64_t row = 0; row < rows.count; row += R) {
      const A* from[R];
      for (int r = 0; r < R; ++r) from[r] = rows.row(row + r);
      Vector<A> found[R][N];
      each<R>([&](auto r) { each<N>([&](auto v) { found[r][v] = Vector<A>(A(0)); }); });
      const char* next = reinterpret_cast<const char*>(from[0] + R * k);
      ::multiply<BroadcastProduct<A>, R, N>(
          from, TokenVectors<A>{numbers.data, vectors * kLanes<A>}, first, 0, k,
          [&](auto r, int64_t i) __attribute__((always_inline)) {
            if (r == 0 && i % 2 == 0) __builtin_prefetch(next + 32 * i, 0, kReadAgain);
          },
          found);
      alignas(64) A turned[R][N * kLanes<A>];
      each<R>([&](auto r) { each<N>([&](auto v) { found[r][v].store(turned[r] + v * kLanes<A>); }); });
      const int64_t begin = first * kLanes<A>, end = std::min<int64_t>(count, begin + N * kLanes<A>);
      for (int64_t t = begin; t < end; ++t)
        for (int64_t r = 0; r < std::min<int64_t>(R, rows.count - row); ++r)
          sums[t * kRows + row + r] = turned[r][t - begin];
    }
  }

  const int64_t vectors;
  const Aligned<A> numbers;
};

}  // namespace
