// Products of tokens and a matrix of float, by tiles of bfloat16. A number of float is the sum of three of bfloat16, and
// of the nine products of two such sums, the six that float has room for are added.

#pragma once

#include "amx.h"

#ifdef TILES
namespace {

class FloatTiles {
 public:
  using A = float;
  static constexpr int kParts = 3;      // of a number
  static constexpr int64_t kStep = 32;  // columns, multiplied at a time
  static constexpr int kRows = kTile;
  static constexpr int kHalves = 1;
  static constexpr bool far() { return false; }
  static constexpr int64_t kFewest = 16;  // tokens; for fewer, vectors wait for memory only
  struct Scratch : TileScratch<float> {
    alignas(64) int8_t parts[2][kParts][kTileBytes];  // of a tile of weights, and of the next one
    alignas(64) int8_t second[kTileBytes];            // half of a tile that is not whole where it lies
  };

  FloatTiles(const float* x, int64_t tokens, int64_t k)
      : count(tokens), groups((tokens + kTile - 1) / kTile),
        tiles(parts_of(x, tokens, k).data, kParts * groups * kTile, (k + kStep - 1) / kStep * kTileWidth) {}

  void multiply(const Block<float, float>& block, float* sums, Scratch& scratch) const {
    for_constant<kMostTokens / kTile>(groups, [&](auto n) { multiply_groups<n>(block, scratch); });
    for (int64_t first = 0; first < count; first += kTile)
      transpose(scratch.sums[first / kTile], kTile, sums + first * kTile, kTile, kTile,
                int(std::min<int64_t>(kTile, count - first)));
  }

  const int64_t count;

 private:
  // The parts of 32 numbers, the highest first, each with as many digits as bfloat16 holds, so that what is left after it
  // is exact. Neighbours are a number of the first 16 and one of the others.
  static void split(__m512 first, __m512 second, int8_t* to, int64_t apart) {
    const __m512i high = _mm512_set1_epi32(0xffff0000);
    for (int i = 0; i < kParts; ++i, to += apart) {
      const __m512i even = _mm512_and_si512((__m512i)first, high), odd = _mm512_and_si512((__m512i)second, high);
      _mm512_storeu_si512(to, _mm512_or_si512(_mm512_srli_epi32(even, 16), odd));
      first = _mm512_sub_ps(first, (__m512)even);
      second = _mm512_sub_ps(second, (__m512)odd);
    }
  }

  // The tokens `[tokens, k]` as parts `[3, groups * 16, steps * 32]`.
  static Aligned<int8_t> parts_of(const float* x, int64_t tokens, int64_t k) {
    const int64_t steps = (k + kStep - 1) / kStep, rows = (tokens + kTile - 1) / kTile * kTile, apart = steps * kTileWidth;
    Aligned<int8_t> parts(kParts * rows * apart);
    std::memset(parts.data, 0, kParts * rows * apart);
    const Padded<float, float> padded(x, tokens, k, kStep);
    for (int64_t token = 0; token < tokens; ++token)
      for (int64_t step = 0; step < steps; ++step) {
        const float* from = padded.row(token) + step * kStep;
        split(_mm512_loadu_ps(from), _mm512_loadu_ps(from + kTile), parts.data + token * apart + step * kTileWidth,
              rows * apart);
      }
    return parts;
  }

  static void split_tile(const Block<float, float>& block, int64_t step, Scratch& scratch) {
    const auto [first, apart] = weight_tile(block, 2 * step * kTileWidth, scratch.weights);
    const auto [second, second_apart] = weight_tile(block, (2 * step + 1) * kTileWidth, scratch.second);
    for (int r = 0; r < kTile; ++r)
      split(_mm512_loadu_ps(first + r * apart), _mm512_loadu_ps(second + r * second_apart),
            scratch.parts[step % 2][0] + r * kTileWidth, kTileBytes);
  }

  // The products of a tile of weights and N groups of tokens. Meanwhile the next tile of weights is split.
  template <int N> void multiply_groups(const Block<float, float>& block, Scratch& scratch) const {
    using Registers = TileRegisters;
    each<N>([](auto t) { Registers::zero<t>(); });
    split_tile(block, 0, scratch);
    for (int64_t step = 0; step < tiles.steps; ++step) {
      if (step + 1 < tiles.steps) split_tile(block, step + 1, scratch);
      each<kParts>([&](auto i) { Registers::load<4 + i>(scratch.parts[step % 2][i], kTileWidth); });
      each<N>([&](auto t) {
        each<kParts>([&](auto i) {
          Registers::load<7>(tiles.at(step, i * groups + t), kTileWidth);
          each<kParts - i>([&](auto j) { Registers::add<t, 4 + j, 7>(float()); });
        });
      });
    }
    each<N>([&](auto t) { Registers::store<t>(scratch.sums[t]); });
  }

  const int64_t groups;
  const TokenTiles tiles;
};

}  // namespace
#endif
