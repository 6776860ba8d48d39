// Products of few tokens and a matrix of 8 bits a number, by tiles. A token's numbers become the digits of
// whole_digits.cpp, and the digits of five tokens fill a tile.

#ifdef AMX
namespace {

// The tokens `[tokens, k]`. Of a tile's columns, the first five are the highest digits, followed by the middle ones and
// the last ones.
struct Int8Tiles {
  static constexpr int kRows = kTile;
  static constexpr int64_t kFewest = 2;  // tokens; for one, vectors are fast enough, and tiles take time to get going
  static constexpr int64_t kTokensOf = kTile / kDigits;  // a tile
  using Sums = TileSums<int32_t>;

  Int8Tiles(const float* x, int64_t tokens, int64_t k)
      : tokens(tokens), tiles((tokens + kTokensOf - 1) / kTokensOf * kTile, k), unit(tiles.groups * kTile) {
    std::fill_n(unit.data, tiles.groups * kTile, 0.f);  // others than these may take long to multiply
    for (int64_t token = 0; token < tokens; ++token) {
      const int64_t group = token / kTokensOf, place = token % kTokensOf;
      unit.data[group * kTile + place] = split(x + token * k, k, [&](int64_t step, const __m512i (&found)[kDigits]) {
        for (int digit = 0; digit < kDigits; ++digit) tiles.write(step, group, digit * kTokensOf + place, found[digit]);
      });
    }
    for (int64_t step = 0; step < tiles.steps; ++step)
      for (int64_t group = 0; group < tiles.groups; ++group) tiles.turn(step, group);
  }

  // `put(token, sums)` for the products of up to 16 rows of weights and each token.
  template <class Put> void multiply(const int8_t* weights, int64_t rows, Sums& sums, Put put) const {
    const __m512i middle = _mm512_add_epi32(up_to_15(), _mm512_set1_epi32(kTokensOf));
    const __m512i last = _mm512_add_epi32(middle, _mm512_set1_epi32(kTokensOf));
    tile_products(weights, rows, tiles, sums, [&](int64_t group, const int32_t (&found)[kTile][kTile]) {
      const __m512 units = _mm512_load_ps(unit.data + group * kTile);
      alignas(64) float numbers[kTile][kTile];
      for (int r = 0; r < kTile; ++r) {
        const __m512 high = _mm512_cvtepi32_ps(_mm512_load_si512(found[r]));
        const __m512 number = (high * 256.f + _mm512_permutexvar_ps(middle, high)) * 256.f +
                              _mm512_permutexvar_ps(last, high);
        _mm512_store_ps(numbers[r], number * units);
      }
      const int64_t first = group * kTokensOf, count = std::min(kTokensOf, tokens - first);
      put_columns(numbers, count, [&](int64_t t, __m512 sums) { put(first + t, sums); });
    });
  }

  const int64_t tokens;

 private:
  TokenTiles tiles;
  const Aligned<float> unit;  // `[groups, 16]`: what the numbers of a token are multiples of
};

}  // namespace
#endif
