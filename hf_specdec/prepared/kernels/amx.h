// Products of tokens and a matrix, where the processor multiplies tiles (AMX).
//
// One instruction multiplies 16 rows of 64 bytes of weights, read in place, with 16 columns of as many bytes: eight times as
// many products per cycle as with vectors. A pass over as many tokens as fill the columns takes as long as over one.

#pragma once

#include <utility>

#include "int8_vnni.h"

#if defined(__linux__) && defined(__AMX_INT8__) && defined(__AMX_BF16__) && defined(__AVX512VNNI__)
#define AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if defined(AMX) || defined(EMULATED_AMX)
#define TILES
namespace {

constexpr int kTile = 16;         // rows of a tile, and its columns of four bytes
constexpr int kTileWidth = 64;    // bytes of a row
constexpr int kTilesAtOnce = 4;   // tiles of tokens, multiplied with a tile of weights while it is in its register
constexpr int64_t kTileBytes = kTile * kTileWidth;

#ifdef AMX
// Whether the operating system lets this process use tiles, after asking for permission.
inline bool tiles_granted() {
  constexpr int kRequest = 0x1023, kTileData = 18;
  static const bool granted = syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
  return granted;
}

// The tile registers of a thread, configured for whole tiles; other libraries configure theirs once per thread.
class TileRegisters {
 public:
  TileRegisters() {
    asm volatile("sttilecfg %0" : "=m"(before));
    const Shapes shapes = {1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
    asm volatile("ldtilecfg %0" ::"m"(shapes));
  }
  TileRegisters(const TileRegisters&) = delete;
  ~TileRegisters() {
    if (before.palette) asm volatile("ldtilecfg %0" ::"m"(before));
    else asm volatile("tilerelease");
  }

  template <int tile> static INLINE void zero() { asm volatile("tilezero %%tmm%c0" ::"i"(tile)); }
  template <int tile> static INLINE void load(const void* from, int64_t apart) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(apart), "i"(tile) : "memory");
  }
  template <int tile> static INLINE void store(void* to) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(int64_t(kTileWidth)), "i"(tile) : "memory");
  }
  // Adds the products of weights and tokens: of four int8 each, or of two bfloat16.
  template <int sums, int weights, int tokens> static INLINE void add(int32_t) {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sums), "i"(weights), "i"(tokens));
  }
  template <int sums, int weights, int tokens> static INLINE void add(float) {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sums), "i"(weights), "i"(tokens));
  }

 private:
  // gcc 12's intrinsics for these instructions declare only the first eight bytes as read or written.
  struct alignas(64) Shapes {
    uint8_t palette, start, reserved[14];
    uint16_t width[16];  // bytes of a row
    uint8_t rows[16];
  };
  Shapes before;
};
#endif

// Transposes rows and columns of 32 bits.
inline void transpose(const void* from, int64_t from_row, void* to, int64_t to_row, int rows, int columns) {
  at::vec::transpose_mxn<float>(static_cast<const float*>(from), from_row, static_cast<float*>(to), to_row, rows, columns);
}

// Columns of tokens as tiles `[steps, groups, 16, 16, 4]`: a step is 64 bytes of a column, four in each row of the tile.
struct TokenTiles {
  // The length of `columns` in bytes must be a multiple of 64.
  TokenTiles(const void* data, int64_t columns, int64_t bytes)
      : steps(bytes / kTileWidth), groups((columns + kTile - 1) / kTile), tiles(steps * groups * kTileBytes) {
    for (int64_t step = 0; step < steps; ++step)
      for (int64_t group = 0; group < groups; ++group) {
        const int64_t first = group * kTile, count = std::min<int64_t>(kTile, columns - first);
        int8_t* to = tiles.data + (step * groups + group) * kTileBytes;
        if (count < kTile) std::memset(to, 0, kTileBytes);
        transpose(static_cast<const int8_t*>(data) + first * bytes + step * kTileWidth, bytes / 4, to, kTile, int(count),
                  kTile);
      }
  }
  const int8_t* at(int64_t step, int64_t group) const { return tiles.data + (step * groups + group) * kTileBytes; }

  const int64_t steps, groups;
  const Aligned<int8_t> tiles;
};

// The memory in which a thread multiplies tiles. `Sum` is the type of the sums.
template <class Sum> struct TileScratch {
  TileRegisters registers;
  alignas(64) Sum sums[kTilesAtOnce][kTile][kTile];
  alignas(64) Sum columns[kTile][kTile];
  alignas(64) int8_t weights[kTileBytes];  // a copy of a tile that is not whole in memory
};

// A tile of weights: 64 bytes of each row from the byte `at` on, in place or copied to `copy`. Also prefetches the tile of
// the next rows, unless rows are so long that the processor prefetches them by itself.
template <class S, class T>
std::pair<const int8_t*, int64_t> weight_tile(const Block<S, T>& block, int64_t at, int8_t* copy) {
  constexpr int64_t kForeseen = 12 << 10;
  const int64_t bytes = block.layer.k * int64_t(sizeof(S)), width = std::min<int64_t>(kTileWidth, bytes - at);
  const auto* from = reinterpret_cast<const int8_t*>(block.row(0)) + at;
  const int64_t ahead = bytes > kForeseen ? 0 : kTile * bytes;
  for (int r = 0; r < kTile; ++r) __builtin_prefetch(from + ahead + r * bytes, 0, kReadAgain);
  if (block.count == kTile && width == kTileWidth) return {from, bytes};
  std::memset(copy, 0, kTileBytes);
  for (int64_t r = 0; width > 0 && r < block.count; ++r) std::memcpy(copy + r * kTileWidth, from + r * bytes, width);
  return {copy, kTileWidth};
}

// Calls `take(group, sums)` with the products of 16 rows of weights and each group of columns, `[16, 16]`.
template <class Sum, class S, class T, class Take>
void multiply_tiles(const Block<S, T>& block, const TokenTiles& tokens, TileScratch<Sum>& scratch, const Take& take) {
  using Registers = TileRegisters;
  for_groups(tokens.groups, kTilesAtOnce, [&](int64_t first, int64_t size, bool) {
    for_constant<kTilesAtOnce>(size, [&](auto n) {
      each<n>([](auto t) { Registers::zero<t>(); });
      for (int64_t step = 0; step < tokens.steps; ++step) {
        const auto [weights, apart] = weight_tile(block, step * kTileWidth, scratch.weights);
        Registers::load<6>(weights, apart);
        each<n>([&](auto t) {
          Registers::load<7>(tokens.at(step, first + t), kTileWidth);
          Registers::add<t, 6, 7>(Sum());
        });
      }
      each<n>([&](auto t) { Registers::store<t>(scratch.sums[t]); });
    });
    for (int64_t group = 0; group < size; ++group) take(first + group, scratch.sums[group]);
  });
}

// Matrices of bfloat16. Pairs of products are exact and summed in float.
class BFloat16Tiles {
 public:
  using A = float;
  using Scratch = TileScratch<float>;
  static constexpr int kRows = kTile;
  static constexpr int kHalves = 1;
  static constexpr bool far() { return false; }
  static constexpr int64_t kFewest = 8;  // tokens; for fewer, vectors are faster, since tiles take time to start

  BFloat16Tiles(const BFloat16* x, int64_t tokens, int64_t k)
      : count(tokens), padded(x, tokens, k, kTileWidth / sizeof(BFloat16)),
        tiles(padded.data, tokens, padded.width * sizeof(BFloat16)) {}

  void multiply(const Block<BFloat16, BFloat16>& block, float* sums, Scratch& scratch) const {
    multiply_tiles(block, tiles, scratch, [&](int64_t group, const float (&found)[kTile][kTile]) {
      const int64_t first = group * kTile;
      transpose(found, kTile, sums + first * kTile, kTile, kTile, int(std::min<int64_t>(kTile, count - first)));
    });
  }

  const int64_t count;

 private:
  const Padded<BFloat16, BFloat16> padded;
  const TokenTiles tiles;
};

// Matrices of int8: the digits of five tokens fill a tile.
class Int8Tiles {
 public:
  using A = float;
  using Scratch = TileScratch<int32_t>;
  static constexpr int kRows = kTile;
  static constexpr int kHalves = 1;
  static constexpr bool far() { return false; }
  static constexpr int64_t kFewest = 2;  // tokens; for one, vectors are fast enough, and tiles take time to start

  Int8Tiles(const float* x, int64_t tokens, int64_t k)
      : count(tokens), digits(x, tokens, k), tiles(digits.data.data, tokens * kDigits, digits.width) {}

  template <class T> void multiply(const Block<int8_t, T>& block, float* sums, Scratch& scratch) const {
    multiply_tiles(block, tiles, scratch, [&](int64_t group, const int32_t (&found)[kTile][kTile]) {
      auto& columns = scratch.columns;
      transpose(found, kTile, columns, kTile, kTile, kTile);
      for (int c = 0; c < kTile; ++c) {
        const int64_t column = group * kTile + c, token = column / kDigits, digit = column % kDigits;
        if (token >= count) break;
        float* to = sums + token * kTile;
        const float unit = digit == kDigits - 1 ? digits.unit.data[token] : 1;
        for (int r = 0; r < kTile; ++r) to[r] = ((digit ? to[r] * 256 : 0) + float(columns[c][r])) * unit;
      }
    });
  }

  const int64_t count;

 private:
  const Digits digits;
  const TokenTiles tiles;
};

}  // namespace
#endif
