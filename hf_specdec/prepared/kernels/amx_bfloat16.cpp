// Products of few tokens and a matrix of bfloat16, by tiles. Pairs of products are exact and summed in float.

#ifdef AMX
namespace {

// The tokens `[tokens, k]`, 16 to a tile.
struct BFloat16Tiles {
  static constexpr int kRows = kTile;
  static constexpr int64_t kFewest = 8;  // tokens; for fewer, vectors are faster, as tiles take time to get going
  using Sums = TileSums<float>;

  BFloat16Tiles(const BFloat16* x, int64_t tokens, int64_t k) : tokens(tokens), k(k), tiles(tokens, k * sizeof(BFloat16)) {
    constexpr int64_t kStep = kTileWidth / sizeof(BFloat16);
    for (int64_t step = 0; step < tiles.steps; ++step) {
      const __mmask32 given = (1ull << std::min(kStep, k - step * kStep)) - 1;
      for (int64_t token = 0; token < tokens; ++token)
        tiles.write(step, token / kTile, token % kTile, _mm512_maskz_loadu_epi16(given, x + token * k + step * kStep));
      for (int64_t group = 0; group < tiles.groups; ++group) tiles.turn(step, group);
    }
  }

  // `put(token, sums)` for the products of up to 16 rows of weights and each token.
  template <class Put> void multiply(const BFloat16* weights, int64_t rows, Sums& sums, Put put) const {
    tile_products((const int8_t*)weights, rows, tiles, sums, [&](int64_t group, const float (&found)[kTile][kTile]) {
      const int64_t first = group * kTile, count = std::min<int64_t>(kTile, tokens - first);
      put_columns(found, count, [&](int64_t t, __m512 sums) { put(first + t, sums); });
    });
  }

  const int64_t tokens, k;

 private:
  TokenTiles tiles;
};

}  // namespace
#endif
