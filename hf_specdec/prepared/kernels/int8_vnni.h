// Products of few tokens and a matrix of int8, where the processor multiplies bytes (AVX-512 VNNI).
//
// One instruction multiplies 64 pairs of bytes, four times as many as of floats, and no weight is widened. A token's
// numbers become integers, in units of its largest one divided by 127 · 2^16, of three digits in base 256. Sums of products
// of digits are exact, so a token's result is as precise as in float and does not depend on the other tokens.

#pragma once

#include "layers.h"

#ifdef __AVX512VNNI__
namespace {

constexpr int kDigits = 3;
constexpr int kBytes = 64;  // of a row, multiplied at a time
constexpr float kLargest = 127 * 65536;

// The tokens `[tokens, k]` as digits `[tokens * 3, width]`, the highest ones of a token first, with zeros at the end.
struct Digits {
  Digits(const float* x, int64_t tokens, int64_t k)
      : width((k + kBytes - 1) / kBytes * kBytes), data(tokens * kDigits * width), totals(tokens * kDigits),
        unit(tokens) {
    for (int64_t token = 0; token < tokens; ++token) split(x + token * k, k, token);
  }

  const int64_t width;
  const Aligned<int8_t> data;
  const Aligned<int32_t> totals;  // of each column's digits
  const Aligned<float> unit;      // of each token's numbers; not finite if a number is not

 private:
  void split(const float* x, int64_t k, int64_t token) {
    const auto part = [&](int64_t i) {
      return _mm512_maskz_loadu_ps((1u << std::clamp<int64_t>(k - i, 0, 16)) - 1, x + i);
    };
    __m512 most = _mm512_setzero_ps(), zeros = _mm512_setzero_ps();  // zeros unless a number is not finite
    for (int64_t i = 0; i < k; i += 16) {
      most = _mm512_max_ps(most, _mm512_abs_ps(part(i)));
      zeros = _mm512_fmadd_ps(part(i), _mm512_setzero_ps(), zeros);
    }
    const float largest = _mm512_reduce_max_ps(most);
    const __m512 scale = _mm512_set1_ps(largest > 0 ? kLargest / largest : 0);
    __m512i total[kDigits] = {};
    for (int64_t i = 0; i < width; i += 16) {
      __m512i rest = _mm512_cvtps_epi32(_mm512_mul_ps(part(i), scale));
      for (int digit = kDigits - 1; digit >= 0; --digit) {
        const __m128i last = _mm512_cvtepi32_epi8(rest);
        const __m512i wide = _mm512_cvtepi8_epi32(last);
        _mm_store_si128((__m128i*)(data.data + (token * kDigits + digit) * width + i), last);
        total[digit] = _mm512_add_epi32(total[digit], wide);
        rest = _mm512_srai_epi32(_mm512_sub_epi32(rest, wide), 8);
      }
    }
    for (int digit = 0; digit < kDigits; ++digit)
      totals.data[token * kDigits + digit] = _mm512_reduce_add_epi32(total[digit]);
    unit.data[token] = largest / kLargest + _mm512_reduce_add_ps(zeros);
  }
};

struct DigitColumns {
  INLINE __m512i at(int64_t column, int64_t i) const { return _mm512_load_si512(data + column * width + i); }
  const int8_t* data;
  int64_t width;
};

struct DigitProduct {
  using Stored = int8_t;
  using Weights = __m512i;
  using Column = __m512i;
  using Sum = __m512i;
  static constexpr int kStep = kBytes;
  // Weights as unsigned bytes, 128 larger.
  static INLINE __m512i weights(const int8_t* from, int) {
    return _mm512_xor_si512(_mm512_loadu_si512(from), _mm512_set1_epi8(-128));
  }
  static INLINE void hold(__m512i& bytes) { asm("" : "+v"(bytes)); }
  // Adds four neighbouring products of unsigned and signed bytes to each of 16 sums. In assembler, since gcc copies sums
  // that it could leave in their registers.
  static INLINE void add(Sum& sum, const Weights& weights, const Column& digits) {
    __m512i added = sum;
    asm("vpdpbusd %2, %1, %0" : "+v"(added) : "v"(weights), "v"(digits));
    sum = added;
  }
};

class Int8VnniTokens {
 public:
  using A = float;
  struct Scratch {};
  static constexpr int kRows = 4;
  static constexpr int kHalves = 1;

  Int8VnniTokens(const float* x, int64_t tokens, int64_t k) : count(tokens), k(k), digits(x, tokens, k) {}

  // For one token, the processor prefetches what is read; for more, the code does.
  bool far() const { return count == 1; }

  // Two tokens at a time, whose sums fill the registers.
  template <class T> void multiply(const Block<int8_t, T>& rows, float* sums, Scratch&) const {
    const int8_t* const four[4] = {rows.row(0), rows.row(1), rows.row(2), rows.row(3)};
    for (int64_t token = 0; token < count; token += 2)
      for_constant<2>(std::min<int64_t>(2, count - token), [&](auto n) { some_tokens<n>(four, token, sums + 4 * token); });
  }

  const int64_t count, k;

 private:
  static constexpr int64_t kAhead = 4096;  // bytes from what is read to what is prefetched

  template <int N> void some_tokens(const int8_t* const (&rows)[4], int64_t token, float* sums) const {
    __m512i found[4][N * kDigits] = {};
    ::multiply<DigitProduct, 4, N * kDigits>(
        rows, DigitColumns{digits.data.data, digits.width}, token * kDigits, 0, k,
        [&](auto r, int64_t i) __attribute__((always_inline)) {
          if (N > 1) __builtin_prefetch(rows[0] + 4 * (k + i) + r * kBytes + kAhead, 0, kReadAgain);
        },
        found);
    each<N>([&](auto t) __attribute__((always_inline)) {
      Four<float> numbers{};
      each<kDigits>([&](auto digit) __attribute__((always_inline)) {
        constexpr int column = t * kDigits + digit;
        const Four<int32_t> whole =
            sums_of<int32_t>(found[0][column], found[1][column], found[2][column], found[3][column]) -
            128 * digits.totals.data[(token + t) * kDigits + digit];
        numbers = numbers * 256.f + __builtin_convertvector(whole, Four<float>);
      });
      numbers *= digits.unit.data[token + t];
      std::memcpy(sums + 4 * t, &numbers, sizeof numbers);
    });
  }

  const Digits digits;
};

}  // namespace
#endif
