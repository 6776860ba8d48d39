// Products of few tokens and a matrix in the blocks of GGUF files. Numbers are widened exactly: as they are read or, for
// more tokens, a stretch of four rows at a time.

#pragma once

#include "floats.h"
#include "gguf_types.h"
#include "layers.h"

namespace {

// Calls `work(block, pieces, first)` for each stretch of a row of k numbers: the index of its first block, its number of
// pieces, and the index of its first number.
template <class Block, class Work> INLINE void each_stretch(int64_t k, const Work& work) {
  for (int64_t first = 0; first < k; first += kStretch)
    work(first / Block::kNumbers, int(std::min<int64_t>(kStretch, k - first) / kPiece), first);
}

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

// Adds the products of four widened rows and all tokens; one function for all types of blocks.
template <class A>
__attribute__((noinline)) void multiply_widened(const A (&weights)[4][kStretch], const Tokens<FloatProduct<A, A>>& tokens,
                                                int64_t count, int64_t numbers, Four<A>* sums) {
  multiply_four<FloatProduct<A, A>>({weights[0], weights[1], weights[2], weights[3]}, tokens, count, 0, numbers,
                                    [](bool, int, int64_t) {}, sums);
}

template <class Stored, class T> class GgufTokens {
 public:
  using A = SumOf<T>;
  static constexpr int kRows = 4, kHalves = 1;
  static constexpr bool far() { return true; }
  struct Scratch {
    alignas(64) A weights[4][kStretch];
  };

  GgufTokens(const T* x, int64_t tokens, int64_t k) : count(tokens), k(k), padded(x, tokens, k) {}

  void multiply(const Block<Stored, T>& block, A* sums, Scratch& scratch) const {
    auto* to = reinterpret_cast<Four<A>*>(sums);
    if constexpr (sizeof(A) == 4)
      if (count <= kMost) return for_constant<kMost>(count, [&](auto n) { multiply_read<n>(block, to); });
    std::fill_n(to, count, Four<A>{});
    each_stretch<Stored>(k, [&](int64_t at, int pieces, int64_t first) {
      for (int r = 0; r < 4; ++r) widen_stretch(block.row(r) + at, pieces, scratch.weights[r]);
      multiply_widened(scratch.weights, {padded.data + first, padded.width}, count, pieces * kPiece, to);
    });
  }

  const int64_t count, k;

 private:
  static constexpr int kMost = kWide ? 5 : 2;  // tokens for which numbers are widened as they are read

  template <int N> void multiply_read(const Block<Stored, T>& block, Four<A>* sums) const {
    constexpr int kScales = kStretch / Stored::kScaled;
    const Stored* const rows[4] = {block.row(0), block.row(1), block.row(2), block.row(3)};
    Vector<A> found[4][N];
    each_stretch<Stored>(k, [&](int64_t blocks, int pieces, int64_t first) __attribute__((always_inline)) {
      alignas(32) float scale[4][kScales], shift[4][kScales];
      each<4>([&](auto r) __attribute__((always_inline)) { (rows[r] + blocks)->scales(pieces, scale[r], shift[r]); });
      const A* token = padded.data + first;
      for (int piece = 0; piece < pieces; ++piece, token += kPiece) {
        __m256i quants[4];
        each<4>([&](auto r) __attribute__((always_inline)) { quants[r] = (rows[r] + blocks)->quants(OneRow(), piece); });
        each<kPiece / kLanes<A>>([&](auto part) __attribute__((always_inline)) {
          constexpr int kFirst = part * kLanes<A>;
          const int at = piece * (kPiece / Stored::kScaled) + kFirst / Stored::kScaled;
          Vector<A> weights[4];
          each<4>([&](auto r) __attribute__((always_inline)) {
            __m128i bytes = kFirst < 16 ? _mm256_castsi256_si128(quants[r]) : _mm256_extracti128_si256(quants[r], 1);
            if constexpr (kFirst % 16) bytes = _mm_srli_si128(bytes, kFirst % 16);
            weights[r] = at::vec::fmadd(widen<A, false>(bytes), Vector<A>(scale[r][at]), Vector<A>(shift[r][at]));
            keep(weights[r]);
          });
          each<N>([&](auto t) __attribute__((always_inline)) {
            Vector<A> column = Vector<A>::loadu(token + t * padded.width + kFirst);
            keep(column);
            each<4>([&](auto r) __attribute__((always_inline)) {
              found[r][t] = at::vec::fmadd(weights[r], column, found[r][t]);
            });
          });
        });
      }
    });
    each<N>([&](auto t) __attribute__((always_inline)) {
      sums[t] = sums_of<A>(found[0][t], found[1][t], found[2][t], found[3][t]);
    });
  }

  const Padded<T, A> padded;
};

}  // namespace
