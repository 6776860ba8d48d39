// Products of a matrix and as many tokens as fill vectors: of batches. A vector holds one number of each of several tokens
// and is multiplied with one weight, so that no sums within a vector are left to be added at the end.

namespace {

constexpr int kMostVectors = 4;  // of tokens, multiplied with a weight together

// Rows of weights that are multiplied together; with so many vectors, their sums fill the registers.
template <int vectors> constexpr int kRowsWith = std::min(8, (kVectorBytes == 64 ? 24 : 12) / vectors);

// The tokens `[tokens, k]` turned into `[k, vectors, lanes]`, with zeros after the last token.
template <class A> struct TurnedTokens {
  static constexpr int kRows = 24;  // of weights, as all of `kRowsWith` divide it
  struct Sums {
    explicit Sums(int64_t) {}
    alignas(64) A of[kRows][kMostVectors * kLanes<A>];
  };

  TurnedTokens(const A* x, int64_t tokens, int64_t k)
      : tokens(tokens), k(k), vectors((tokens + kLanes<A> - 1) / kLanes<A>), numbers(k * vectors * kLanes<A>) {
    const int64_t lanes = vectors * kLanes<A>;
#pragma omp parallel for if (lanes * k > kSerial)
    for (int64_t i = 0; i < k; ++i) {
      for (int64_t t = 0; t < tokens; ++t) numbers.data[i * lanes + t] = x[t * k + i];
      for (int64_t t = tokens; t < lanes; ++t) numbers.data[i * lanes + t] = 0;
    }
  }

  // `put(token, row, sum)` for the products of `rows` rows of weights, up to 24, and all tokens.
  template <class Put> void multiply(const A* weights, int64_t rows, Sums& sums, Put put) const {
    for_groups(vectors, kMostVectors, 1, [&](int64_t first, int64_t count, bool) {
      switch (count) {
        case 1: return some_vectors<1>(weights, rows, first, sums, put);
        case 2: return some_vectors<2>(weights, rows, first, sums, put);
        case 3: return some_vectors<3>(weights, rows, first, sums, put);
        case 4: return some_vectors<4>(weights, rows, first, sums, put);
      }
    });
  }

  const int64_t tokens, k;

 private:
  template <int N, class Put>
  void some_vectors(const A* weights, int64_t rows, int64_t first, Sums& sums, Put put) const {
    constexpr int R = kRowsWith<N>;
    const int64_t until = std::min<int64_t>(tokens, (first + N) * kLanes<A>);
    for (int64_t row = 0; row < rows; row += R) {
      const A* from[R];  // the last row stands for those that are missing
      for (int r = 0; r < R; ++r) from[r] = weights + std::min(row + r, rows - 1) * k;
      Vector<A> acc[R][N];
      add_products<N, R>(from, numbers.data + first * kLanes<A>, acc);
      for (int64_t r = 0; r < std::min<int64_t>(R, rows - row); ++r) std::memcpy(sums.of[row + r], acc[r], sizeof acc[r]);
    }
    for (int64_t t = first * kLanes<A>, at = 0; t < until; ++t, ++at)
      for (int64_t r = 0; r < rows; ++r) put(t, r, sums.of[r][at]);
  }

  // Meanwhile the memory behind the rows is fetched.
  template <int N, int R> void add_products(const A* const (&rows)[R], const A* x, Vector<A> (&sums)[R][N]) const {
    Vector<A> acc[R][N];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < N; ++v) acc[r][v] = Vector<A>{};
    const auto add = [&](int64_t i) __attribute__((always_inline)) {
      Vector<A> token[N];
#pragma GCC unroll 4
      for (int v = 0; v < N; ++v) token[v] = load<A, A>(x + v * kLanes<A>);
      x += vectors * kLanes<A>;
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        Vector<A> weight = rows[r][i] - Vector<A>{};
        asm("" : "+v"(weight));
#pragma GCC unroll 4
        for (int v = 0; v < N; ++v) acc[r][v] += weight * token[v];
      }
    };
    const char* next = (const char*)(rows[0] + R * k);  // a line for every two columns: as many as the rows have, or more
    int64_t i = 0;
    for (; i + 2 <= k; i += 2, next += 64) {
      __builtin_prefetch(next, 0, kReadAgain);
      add(i);
      add(i + 1);
    }
    if (i < k) add(i);
    std::memcpy(sums, acc, sizeof acc);
  }

  const int64_t vectors;
  const Aligned<A> numbers;
};

}  // namespace
