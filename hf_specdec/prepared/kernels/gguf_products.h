// Products of few tokens and a matrix in the blocks of GGUF files. Weights are widened exactly, a stretch of some rows at a
// time, and multiplied with unrounded numbers.

#pragma once

#include <optional>

#include "floats.h"
#include "gguf_lanes.h"

namespace {

// Writes the widened numbers of a stretch.
template <class A, class Block> INLINE void widen_stretch(const Block* blocks, int pieces, A* to) {
  alignas(32) float scale[kStretch / Block::kScaled], shift[kStretch / Block::kScaled];
  blocks->scales(pieces, scale, shift);
  for (int piece = 0; piece < pieces; ++piece) {
    alignas(32) uint8_t quants[kPiece];
    _mm256_store_si256(reinterpret_cast<__m256i*>(quants), blocks->quants(OneRow(), piece));
    for (int i = 0; i < kPiece; i += 8, to += 8) {
      const int at = (piece * kPiece + i) / Block::kScaled;
      const __m256i eight = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(quants + i)));
      const __m256 by = _mm256_set1_ps(scale[at]), and_then = _mm256_set1_ps(shift[at]);
      const __m256 numbers = _mm256_fmadd_ps(_mm256_cvtepi32_ps(eight), by, and_then);
      if constexpr (sizeof(A) == 4) _mm256_storeu_ps(to, numbers);
      else {
        _mm256_storeu_pd(to, _mm256_cvtps_pd(_mm256_castps256_ps128(numbers)));
        _mm256_storeu_pd(to + 4, _mm256_cvtps_pd(_mm256_extractf128_ps(numbers, 1)));
      }
    }
  }
}

#ifndef MULTIPLIES_BYTES
constexpr int kVectors = 16 / kLaneRows;  // of rows, multiplied with the same numbers

// The bytes of two pieces of rows, and the scale and shift of every part.
template <class Stored> struct Unpacked {
  Halves weights[2 * kPiece / 4][kVectors];
  Lanes scales[2 * kPiece / Stored::kScaled][kVectors][2];
};

// Adds the products of parts of `4 * words` numbers of rows and N tokens, whose numbers are `[parts * 4 * words, N]`. A
// byte is multiplied where it lies in its word, so numbers are divided by 1, 2^8, 2^16 and 1 in turn. `totals`
// `[parts, N]` are the sums of a part's undivided numbers. One function serves all types of blocks.
template <int N, int words>
__attribute__((noinline)) void add_parts(const Halves (*weights)[kVectors], const Lanes (*scales)[kVectors][2], int parts,
                                         const float* numbers, const float* totals, Lanes (*sums)[kVectors]) {
  // Sums in turn, so that additions needn't wait for each other.
  constexpr int kSums = N * kVectors <= 2 ? 4 : N * kVectors <= 5 ? 2 : 1;
  const LaneWords masks[] = {LaneWords{} + 0xff, LaneWords{} + 0xff00, LaneWords{} + 0xff0000};
  for (int part = 0; part < parts; ++part, ++scales, totals += N) {
    Lanes found[kSums][N][kVectors] = {};
#pragma GCC unroll 1
    for (int word = 0; word < words; ++word, ++weights, numbers += 4 * N)
      each<4>([&](auto i) __attribute__((always_inline)) {
        Lanes widened[kVectors];
        each<kVectors>([&](auto v) __attribute__((always_inline)) {
          const LaneWords four = (LaneWords)(*weights)[v];
          widened[v] = as_floats(i == 3 ? four >> 24 : four & masks[i % 3]);
          asm("" : "+v"(widened[v]));  // once for all tokens
        });
        each<N>([&](auto t) __attribute__((always_inline)) {
          each<kVectors>([&](auto v) __attribute__((always_inline)) {
            found[i % kSums][t][v] += widened[v] * numbers[i * N + t];
          });
        });
      });
    each<N>([&](auto t) __attribute__((always_inline)) {
      each<kVectors>([&](auto v) __attribute__((always_inline)) {
        Lanes sum = found[0][t][v];
        if constexpr (kSums > 1)
          each<kSums - 1>([&](auto at) __attribute__((always_inline)) { sum += found[at + 1][t][v]; });
        sums[t][v] += (*scales)[v][1] * totals[t];
        sums[t][v] += (*scales)[v][0] * sum;
      });
    });
  }
}

// Rows that follow one another in memory are multiplied together, and the next ones are prefetched meanwhile. On an AMD Zen 3
// this is faster than rows far apart, which the processor prefetches itself.
template <class Stored, class T> class GgufFloats {
 public:
  using A = float;
  static constexpr int kRows = kLaneRows * kVectors, kHalves = 1;
  static constexpr int64_t kBlocks = kStretch / Stored::kNumbers;  // of a stretch
  static constexpr bool far() { return false; }
  struct Scratch {
    Unpacked<Stored> unpacked;
    Stored rows[kRows][kBlocks];
  };

  GgufFloats(const T* x, int64_t tokens, int64_t k)
      : count(tokens), k(k), numbers(tokens * k), totals(tokens * k / kScaled) {
    for_groups(count, kMost, [&](int64_t first, int64_t size, bool) {
      float* to = numbers.data + first * k;
      float* total = totals.data + first * k / kScaled;
      std::fill_n(total, size * k / kScaled, 0.f);
      for (int64_t i = 0; i < k; i += 4)
        for (int64_t t = 0; t < size; ++t) {
          const T* four = x + (first + t) * k + i;
          const float a = float(four[0]), b = float(four[1]), c = float(four[2]), d = float(four[3]);
          total[i / kScaled * size + t] += (a + b) + (c + d);
          to[i * size + t] = a;
          to[(i + 1) * size + t] = b * 0x1p-8f;
          to[(i + 2) * size + t] = c * 0x1p-16f;
          to[(i + 3) * size + t] = d;
        }
    });
  }

  void multiply(const Block<Stored, T>& block, float* sums, Scratch& scratch) const {
    const int64_t blocks = k / Stored::kNumbers;
    auto* to = reinterpret_cast<Lanes(*)[kVectors]>(sums);
    std::fill_n(sums, count * kRows, 0.f);
    for (int64_t at = 0; at < blocks; at += kBlocks) {
      const int64_t here = std::min(kBlocks, blocks - at);
      const char* next = reinterpret_cast<const char*>(block.row(0) + kRows * (blocks + at));
      if (block.count == kRows) {
        add_stretch(block.row(0) + at, blocks * int64_t(sizeof(Stored)), at, here, next, scratch.unpacked, to);
      } else {  // the last row stands for missing ones
        for (int64_t r = 0; r < kRows; ++r) std::copy_n(block.row(r) + at, here, scratch.rows[r]);
        add_stretch(scratch.rows[0], sizeof scratch.rows[0], at, here, next, scratch.unpacked, to);
      }
    }
  }

  const int64_t count, k;

 private:
  static constexpr int kScaled = Stored::kScaled, kParts = kPiece / kScaled;  // of a piece, each with its own scale
  static constexpr int64_t kMost = 6;  // tokens whose sums fill the registers
  static constexpr int kBytes = kPiece * int(sizeof(Stored)) / Stored::kNumbers;  // of a piece

  // Adds the products of `here` blocks of every row, which are those from `at` on. Pieces are multiplied two at a time, so
  // that the processor overlaps this with reading the next two.
  void add_stretch(const Stored* blocks, int64_t apart, int64_t at, int64_t here, const char* next,
                   Unpacked<Stored>& unpacked, Lanes (*sums)[kVectors]) const {
    const SomeRows rows{apart};
    const Stored* of[kVectors];
    std::optional<LaneScales<Stored>> scales[kVectors];
    each<kVectors>([&](auto v) __attribute__((always_inline)) {
      of[v] = reinterpret_cast<const Stored*>(reinterpret_cast<const uint8_t*>(blocks) + v * kLaneRows * apart);
      scales[v].emplace(of[v], rows);
    });
    const int pieces = int(here * Stored::kNumbers / kPiece);
    for (int pair = 0; pair < pieces; pair += 2) {
      const int some = std::min(2, pieces - pair);
      each<2>([&](auto odd) __attribute__((always_inline)) {
        if (odd == some) return;
        each<kVectors>([&](auto v) __attribute__((always_inline)) {
          each<(kLaneRows * kBytes + 63) / 64>([&](auto line) { __builtin_prefetch(next + 64 * line, 0, kReadAgain); });
          next += kLaneRows * kBytes;
          // Read before anything is written, so that bytes next to a scale are read along with it.
          const auto weights = of[v]->quants(rows, pair + odd);
          Lanes read[kParts][2];
          each<kParts>([&](auto part) __attribute__((always_inline)) {
            scales[v]->read(pair + odd, part, read[part][0], read[part][1]);
          });
          each<8>([&](auto i) __attribute__((always_inline)) { unpacked.weights[8 * odd + i][v] = weights.part[i]; });
          each<2 * kParts>([&](auto i) __attribute__((always_inline)) {
            unpacked.scales[odd * kParts + i / 2][v][i % 2] = read[i / 2][i % 2];
          });
        });
      });
      const int64_t first = at * Stored::kNumbers + pair * kPiece;
      each_group([&](int64_t token, auto n) {
        const int64_t of_group = token * k + first * n;
        add_parts<n, kScaled / 4>(unpacked.weights, unpacked.scales, some * kParts, numbers.data + of_group,
                                  totals.data + of_group / kScaled, sums + token);
      });
    }
  }

  // Calls `work(first, size)` for groups of tokens.
  template <class Work> void each_group(const Work& work) const {
    if (count <= kMost) return for_constant<kMost>(count, [&](auto n) { work(0, n); });  // without divisions
    for_groups(count, kMost, [&](int64_t first, int64_t size, bool) {
      for_constant<kMost>(size, [&](auto n) { work(first, n); });
    });
  }

  const Aligned<float> numbers, totals;  // `[count, k]` in groups of tokens, each `[k, tokens of the group]`
};
#endif

// Adds the products of four widened rows and all tokens; one function for all types of blocks.
inline __attribute__((noinline)) void multiply_widened(const double (&weights)[4][kStretch],
                                                       const Tokens<FloatProduct<double, double>>& tokens, int64_t count,
                                                       int64_t numbers, Four<double>* sums) {
  multiply_four<FloatProduct<double, double>>({weights[0], weights[1], weights[2], weights[3]}, tokens, count, 0, numbers,
                                              [](bool, int, int64_t) {}, sums);
}

template <class Stored> class GgufDoubles {
 public:
  using A = double;
  static constexpr int kRows = 4, kHalves = 1;
  static constexpr bool far() { return true; }
  struct Scratch {
    alignas(64) double weights[4][kStretch];
  };

  GgufDoubles(const double* x, int64_t tokens, int64_t k) : count(tokens), k(k), tokens{x, k} {}

  void multiply(const Block<Stored, double>& block, double* sums, Scratch& scratch) const {
    auto* to = reinterpret_cast<Four<double>*>(sums);
    std::fill_n(to, count, Four<double>{});
    for (int64_t first = 0; first < k; first += kStretch) {
      const int pieces = int(std::min<int64_t>(kStretch, k - first) / kPiece);
      for (int r = 0; r < 4; ++r) widen_stretch(block.row(r) + first / Stored::kNumbers, pieces, scratch.weights[r]);
      multiply_widened(scratch.weights, {tokens.data + first, k}, count, pieces * kPiece, to);
    }
  }

  const int64_t count, k;

 private:
  const Tokens<FloatProduct<double, double>> tokens;
};

}  // namespace
