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
// `width` columns, to sums[t][r]. Meanwhile memory is fetched, if `ahead` is given: from there on as it lies there, or,
// where rows are far apart, as many columns of four rows that begin there.
template <class T, class X, class A, int N>
void tile(const T* w, int64_t apart, const X* x, int64_t k, int64_t width, const T* ahead, Four<A>* sums) {
  using Multiply = Product<T, X>;
  constexpr int kWidth = Multiply::kWidth;
  Vector<A> acc[4][N];
  for (int r = 0; r < 4; ++r)
    for (int t = 0; t < N; ++t) acc[r][t] = Vector<A>{};
  int64_t i = 0;
  for (; i + kWidth <= width; i += kWidth) {
    // These stay in registers: gcc would read them again for every product.
    typename Multiply::Token token[N];
#pragma GCC unroll 8
    for (int t = 0; t < N; ++t) {
      token[t] = Multiply::token(x + t * k + i);
      asm("" : "+v"(token[t]));
    }
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) {
      if (ahead) __builtin_prefetch(ahead + (kFarRows ? r * apart + i : 4 * i + r * kWidth), 0, kReadAgain);
      typename Multiply::Weights weights = Multiply::weights(w + r * apart + i);
      asm("" : "+v"(weights));
#pragma GCC unroll 8
      for (int t = 0; t < N; ++t) acc[r][t] = Multiply::add(acc[r][t], weights, token[t]);
    }
  }
#pragma GCC unroll 8
  for (int t = 0; t < N; ++t)
    sums[t] += sums_of<A>(acc[0][t], acc[1][t], acc[2][t], acc[3][t]);
  for (; i < width; ++i)
    for (int t = 0; t < N; ++t)
      for (int r = 0; r < 4; ++r) sums[t][r] += A(widen(w[r * apart + i])) * A(widen(x[t * k + i]));
}

// The same for up to `kTokens` tokens.
template <class T, class X, class A>
void tile_of(int64_t tokens, const T* w, int64_t apart, const X* x, int64_t k, int64_t width, const T* ahead,
             Four<A>* sums) {
  switch (tokens) {
    case 1: return tile<T, X, A, 1>(w, apart, x, k, width, ahead, sums);
    case 2: return tile<T, X, A, 2>(w, apart, x, k, width, ahead, sums);
    case 3: return tile<T, X, A, 3>(w, apart, x, k, width, ahead, sums);
#ifdef __AVX512F__
    case 4: return tile<T, X, A, 4>(w, apart, x, k, width, ahead, sums);
    case 5: return tile<T, X, A, 5>(w, apart, x, k, width, ahead, sums);
    case 6: return tile<T, X, A, 6>(w, apart, x, k, width, ahead, sums);
#endif
  }
}

}  // namespace
