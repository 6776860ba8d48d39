// Products of tokens and a matrix of float, by tiles of bfloat16. A number of float is the sum of three of bfloat16, and
// of the nine products of two such sums, the six that float has room for are added.

#ifdef AMX
namespace {

constexpr int kParts = 3;  // of a number

// The parts of 32 numbers, the highest first; neighbours in `parts` are a number of `even` and one of `odd`. A part has as
// many digits as bfloat16 holds, so that what is left after it is exact.
inline void split_floats(__m512 even, __m512 odd, __m512i (&parts)[kParts]) {
  const __m512i high = _mm512_set1_epi32(0xffff0000);
  const auto part = [&](__m512 of) { return (__m512)_mm512_and_si512((__m512i)of, high); };
#pragma GCC unroll 4
  for (int i = 0; i < kParts; ++i) {
    parts[i] = _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32((__m512i)even, 16), (__m512i)odd);
    even -= part(even);
    odd -= part(odd);
  }
}

// The tokens `[tokens, k]` as tiles of their parts: 16 tokens to a tile, and all tiles of a part together.
class FloatTiles {
 public:
  static constexpr int kRows = kTile;
  static constexpr int64_t kStep = 32;  // columns, multiplied at a time
  static constexpr int64_t kFewest = 16;  // tokens; for fewer, vectors wait for memory only
  struct Sums : TileSums<float> {
    using TileSums::TileSums;
    alignas(64) int8_t parts[2][kParts][kTileBytes];  // of a tile of weights, and of the next one
    alignas(64) float weights[kTile][kStep];          // a tile that is not whole where it lies
  };

  FloatTiles(const float* x, int64_t tokens, int64_t k)
      : tokens(tokens), k(k), groups((tokens + kTile - 1) / kTile),
        tiles(kParts * groups * kTile, (k + kStep - 1) / kStep * kTileWidth) {
#pragma omp parallel for if (tokens * k > kSerial)
    for (int64_t step = 0; step < tiles.steps; ++step) {
      const int64_t width = std::min(kStep, k - step * kStep);
      for (int64_t token = 0; token < tokens; ++token) {
        const float* from = x + token * k + step * kStep;
        __m512i parts[kParts];
        split_floats(load_some(from, width), load_some(from + kTile, width - kTile), parts);
        for (int i = 0; i < kParts; ++i) tiles.write(step, i * groups + token / kTile, token % kTile, parts[i]);
      }
      for (int64_t group = 0; group < tiles.groups; ++group) tiles.turn(step, group);
    }
  }

  // `put(token, sums)` for the products of up to 16 rows of weights and each token.
  template <class Put> void multiply(const float* weights, int64_t rows, Sums& sums, Put put) const {
    switch (groups) {
      case 1: multiply_groups<1>(weights, rows, sums); break;
      case 2: multiply_groups<2>(weights, rows, sums); break;
      case 3: multiply_groups<3>(weights, rows, sums); break;
      case 4: multiply_groups<4>(weights, rows, sums); break;
    }
    for (int64_t first = 0; first < tokens; first += kTile)
      put_columns(sums.of[first / kTile], std::min<int64_t>(kTile, tokens - first),
                  [&](int64_t t, __m512 found) { put(first + t, found); });
  }

  const int64_t tokens, k;

 private:
  static_assert(kMostTokens <= 4 * kTile);

  // The tile of weights of a step, `apart` numbers from one row to the next.
  const float* tile_at(const float* weights, int64_t rows, int64_t step, Sums& sums, int64_t& apart) const {
    const float* from = weights + step * kStep;
    const int64_t width = std::min(kStep, k - step * kStep);
    apart = k;
    if (__builtin_expect(rows == kTile && width == kStep, 1)) return from;
    copy_part(sums.weights, sizeof sums.weights[0], from, k * sizeof(float), rows, width * sizeof(float));
    apart = kStep;
    return sums.weights[0];
  }

  // The parts of some rows of a tile. Meanwhile the tile `ahead` numbers behind it is fetched.
  template <int first, int until>
  static void split_rows(const float* weights, int64_t apart, int64_t ahead, int8_t (&to)[kParts][kTileBytes]) {
    weights += first * apart;
#pragma GCC unroll 16
    for (int r = first; r < until; ++r, weights += apart) {
      __builtin_prefetch(weights + ahead, 0, kReadAgain);
      __builtin_prefetch(weights + ahead + kTile, 0, kReadAgain);
      __m512i parts[kParts];
      split_floats(_mm512_loadu_ps(weights), _mm512_loadu_ps(weights + kTile), parts);
#pragma GCC unroll 4
      for (int i = 0; i < kParts; ++i) _mm512_store_si512(to[i] + r * kTileWidth, parts[i]);
    }
  }

  // The products of a tile of weights and N groups of tokens, to `sums.of`. Meanwhile the next tile of weights is split,
  // and the memory behind the rows is fetched.
  template <int N> void multiply_groups(const float* weights, int64_t rows, Sums& sums) const {
    const int64_t ahead = fetched_ahead(k * sizeof(float)) / sizeof(float);
    int64_t apart;
    const float* from = tile_at(weights, rows, 0, sums, apart);
    split_rows<0, kTile>(from, apart, ahead, sums.parts[0]);
#define ADD(t) if constexpr (t < N) {                                       \
    _tile_loadd(7, tiles.at(step, t), kTileWidth);                         \
    _tile_dpbf16ps(t, 4, 7);                                                \
    _tile_dpbf16ps(t, 5, 7);                                                \
    _tile_dpbf16ps(t, 6, 7);                                                \
    _tile_loadd(7, tiles.at(step, groups + t), kTileWidth);                \
    _tile_dpbf16ps(t, 4, 7);                                                \
    _tile_dpbf16ps(t, 5, 7);                                                \
    _tile_loadd(7, tiles.at(step, 2 * groups + t), kTileWidth);            \
    _tile_dpbf16ps(t, 4, 7);                                                \
    if (another) split_rows<kTile * t / N, kTile * (t + 1) / N>(from, apart, ahead, sums.parts[(step + 1) % 2]); \
  }
    EACH_TILE(START_TILE)
    for (int64_t step = 0; step < tiles.steps; ++step) {
      const bool another = step + 1 < tiles.steps;
      if (another) from = tile_at(weights, rows, step + 1, sums, apart);
      asm volatile("" ::: "memory");  // parts are written before they are read
      const auto& parts = sums.parts[step % 2];
      _tile_loadd(4, parts[0], kTileWidth);
      _tile_loadd(5, parts[1], kTileWidth);
      _tile_loadd(6, parts[2], kTileWidth);
      EACH_TILE(ADD)
    }
    EACH_TILE(STORE_TILE)
#undef ADD
  }

  const int64_t groups;
  TokenTiles tiles;
};

}  // namespace
#endif
