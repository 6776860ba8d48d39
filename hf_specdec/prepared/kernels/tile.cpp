// Products of four rows of weights and some tokens, which read each weight once.

namespace {

// Calls `work(first, size, last)` for groups of about equal size, of at most `most`: at least `least` groups.
template <class Work> void for_groups(int64_t count, int64_t most, int64_t least, Work work) {
  const int64_t groups = std::max((count + most - 1) / most, least);
  for (int64_t group = 0, first = 0, size; group < groups; ++group, first += size) {
    size = (count - first + groups - group - 1) / (groups - group);
    work(first, size, group == groups - 1);
  }
}

// The same for tokens, as many as a tile takes.
template <class Work> void for_token_groups(int64_t tokens, int64_t least, Work work) {
  for_groups(tokens, kTokens, least, work);
}

// Adds the products of four rows of weights, `apart` numbers from one to the next, and N tokens of `k` numbers each, over
// `width` columns, to sums[t][r]; R rows at a time. Meanwhile memory is fetched, if `ahead` is given: from there on as it
// lies there, or, where rows are far apart or not all read at a time, as many columns of four rows that begin there.
template <class T, class X, class A, int N, int R = 4>
void tile(const T* w, int64_t apart, const X* x, int64_t k, int64_t width, const T* ahead, Four<A>* sums) {
  using Multiply = Product<T, X>;
  constexpr int kWidth = Multiply::kWidth;
  constexpr bool kByRows = kFarRows || R < 4;
  Vector<A> all[4][N];
  int64_t i = 0;
  for (int first = 0; first < 4; first += R) {
    const T* from = w + first * apart;
    Vector<A> acc[R][N];
    for (int r = 0; r < R; ++r)
      for (int t = 0; t < N; ++t) acc[r][t] = Vector<A>{};
    for (i = 0; i + kWidth <= width; i += kWidth) {
      // These stay in registers: gcc would read them again for every product.
      typename Multiply::Token token[N];
#pragma GCC unroll 8
      for (int t = 0; t < N; ++t) {
        token[t] = Multiply::token(x + t * k + i);
        asm("" : "+v"(token[t]));
      }
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        if (ahead) __builtin_prefetch(ahead + (kByRows ? (first + r) * apart + i : 4 * i + r * kWidth), 0, kReadAgain);
        typename Multiply::Weights weights = Multiply::weights(from + r * apart + i);
        asm("" : "+v"(weights));
#pragma GCC unroll 8
        for (int t = 0; t < N; ++t) acc[r][t] = Multiply::add(acc[r][t], weights, token[t]);
      }
    }
    std::memcpy(all[first], acc, sizeof acc);
  }
#pragma GCC unroll 8
  for (int t = 0; t < N; ++t)
    sums[t] += sums_of<A>(all[0][t], all[1][t], all[2][t], all[3][t]);
  for (; i < width; ++i)
    for (int t = 0; t < N; ++t)
      for (int r = 0; r < 4; ++r) sums[t][r] += A(widen(w[r * apart + i])) * A(widen(x[t * k + i]));
}

// The same for up to `kTokens` tokens, or, by pairs of rows, `kTokensOfPairs`.
template <class T, class X, class A, int R = 4>
void tile_of(int64_t tokens, const T* w, int64_t apart, const X* x, int64_t k, int64_t width, const T* ahead,
             Four<A>* sums) {
  switch (tokens) {
    case 1: return tile<T, X, A, 1, R>(w, apart, x, k, width, ahead, sums);
    case 2: return tile<T, X, A, 2, R>(w, apart, x, k, width, ahead, sums);
    case 3: return tile<T, X, A, 3, R>(w, apart, x, k, width, ahead, sums);
#ifdef __AVX512F__
    case 4: return tile<T, X, A, 4, R>(w, apart, x, k, width, ahead, sums);
    case 5: return tile<T, X, A, 5, R>(w, apart, x, k, width, ahead, sums);
    case 6: return tile<T, X, A, 6, R>(w, apart, x, k, width, ahead, sums);
    case 7: if constexpr (R == 2) return tile<T, X, A, 7, R>(w, apart, x, k, width, ahead, sums);
    case 8: if constexpr (R == 2) return tile<T, X, A, 8, R>(w, apart, x, k, width, ahead, sums);
#endif
  }
}

}  // namespace
