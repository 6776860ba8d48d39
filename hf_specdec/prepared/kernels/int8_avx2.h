// Products of few tokens and a matrix of int8, where the processor has AVX2 only.
//
// One instruction multiplies 16 pairs of 16-bit words, twice as many as of floats. Every 64 numbers of a token become
// integers in units of the largest one divided by 32767, so that no error exceeds 1/2000 of their mean size. If one number
// is too large for that, the remainders of all 64 are multiplied as well.
// Sums of products are exact, so a token's result does not depend on the other tokens.

#pragma once

#include <vector>

#include "layers.h"

#ifndef CPU_CAPABILITY_AVX512
namespace {

constexpr int kLine = 64;      // columns that share a unit: a cache line of a row's bytes
constexpr float kMost = 32767;
constexpr float kSpread = 32;  // largest number over the mean size, up to which one word per number is enough

// The words of 64 neighbouring numbers of a token, and their unit.
struct Line {
  const int16_t* words;
  float unit;
};

// The tokens `[tokens, k]` as words `[lines, tokens, 64]`, with zeros after the last column.
struct Words {
  Words(const float* x, int64_t tokens, int64_t k)
      : tokens(tokens), lines((k + kLine - 1) / kLine), words(2 * lines * tokens * kLine), units(lines * tokens) {
    for (int64_t line = 0; line < lines; ++line)
      for (int64_t token = 0; token < tokens; ++token) write(x + token * k, k, line, token);
  }

  INLINE Line at(int64_t token, int64_t i) const {
    const int64_t place = i / kLine * tokens + token;
    return {words.data + place * kLine, units.data[place]};
  }

  struct Left {
    int64_t line, token;
  };
  const int64_t tokens, lines;
  const Aligned<int16_t> words;  // the second half holds the remainders, in units of 1/65534
  const Aligned<float> units;
  std::vector<Left> left;  // where remainders are needed

 private:
  void write(const float* x, int64_t k, int64_t line, int64_t token) {
    const int64_t given = std::min<int64_t>(kLine, k - line * kLine), place = line * tokens + token;
    float numbers[kLine] = {}, largest = 0, sum = 0;
    std::copy_n(x + line * kLine, given, numbers);
    for (float number : numbers) largest = std::max(largest, std::abs(number)), sum += std::abs(number);
    const float scale = largest > 0 ? kMost / largest : 0;
    const bool leaves = largest * given > kSpread * sum;
    units.data[place] = largest / kMost + sum * 0.f;  // not finite if a number is not
    if (leaves) left.push_back({line, token});
    int16_t *to = words.data + place * kLine, *left_to = to + lines * tokens * kLine;
    for (int i = 0; i < kLine; i += 16, to += 16, left_to += 16) {
      const Vector<float> first = Vector<float>::loadu(numbers + i) * scale;
      const Vector<float> second = Vector<float>::loadu(numbers + i + 8) * scale;
      store(first, second, to);
      if (leaves) store((first - first.round()) * (2 * kMost), (second - second.round()) * (2 * kMost), left_to);
    }
  }

  // Sixteen numbers, rounded.
  static void store(__m256 first, __m256 second, int16_t* to) {
    const __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(first), _mm256_cvtps_epi32(second));
    _mm256_store_si256((__m256i*)to, _mm256_permute4x64_epi64(words, 0b11011000));
  }
};

// The remainders of some lines.
struct LeftWords {
  INLINE Line at(int64_t token, int64_t i) const {
    const Line line = whole.at(token, i);
    return {line.words + whole.lines * whole.tokens * kLine, line.unit / (2 * kMost)};
  }
  const Words& whole;
};

struct WordProduct {
  struct Weights {
    __m256i of[kLine / 16];
  };
  using Stored = int8_t;
  using Column = Line;
  using Sum = Vector<float>;
  static constexpr int kStep = kLine;
  static INLINE Weights weights(const int8_t* from, int) {
    Weights weights;
    each<kLine / 16>([&](auto i) __attribute__((always_inline)) {
      weights.of[i] = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)from + i));
    });
    return weights;
  }
  static INLINE void hold(Line&) {}
  static INLINE void hold(Weights&) {}
  static INLINE void add(Sum& sum, const Weights& weights, const Line& line) {
    __m256i whole = _mm256_setzero_si256();
    each<kLine / 16>([&](auto i) __attribute__((always_inline)) {
      const __m256i words = _mm256_load_si256((const __m256i*)line.words + i);
      whole = _mm256_add_epi32(whole, _mm256_madd_epi16(weights.of[i], words));
    });
    sum = at::vec::fmadd(Vector<float>(_mm256_cvtepi32_ps(whole)), Vector<float>(line.unit), sum);
    keep(sum);  // keeps the order of additions for any number of tokens
  }
};

class Int8Avx2Tokens {
 public:
  using A = float;
  struct Scratch {};
  static constexpr int kRows = 4;
  static constexpr int kHalves = 1;
  static constexpr bool far() { return true; }

  Int8Avx2Tokens(const float* x, int64_t tokens, int64_t k) : count(tokens), k(k), words(x, tokens, k) {}

  template <class T> void multiply(const Block<int8_t, T>& rows, float* sums, Scratch&) const {
    const int8_t* const four[4] = {rows.row(0), rows.row(1), rows.row(2), rows.row(3)};
    auto* to = reinterpret_cast<Four<float>*>(sums);
    std::fill_n(to, count, Four<float>{});
    for_groups(count, kTogether, [&](int64_t first, int64_t size, bool) {
      for_constant<kTogether>(size, [&](auto n) { some_tokens<n>(four, words, first, 0, k, to + first); });
    });
    for (const auto& [line, token] : words.left)
      some_tokens<1>(four, LeftWords{words}, token, line * kLine, std::min((line + 1) * kLine, k), to + token);
  }

  const int64_t count, k;

 private:
  static constexpr int kTogether = 6;

  template <int N, class Columns>
  static void some_tokens(const int8_t* const (&rows)[4], const Columns& columns, int64_t first, int64_t begin,
                          int64_t end, Four<float>* sums) {
    Vector<float> found[4][N];
    ::multiply<WordProduct, 4, N>(rows, columns, first, begin, end, fetch_nothing, found);
    for (int t = 0; t < N; ++t) {
      sums[t] += sums_of<float>(found[0][t], found[1][t], found[2][t], found[3][t]);
    }
  }

  const Words words;
};

}  // namespace
#endif
