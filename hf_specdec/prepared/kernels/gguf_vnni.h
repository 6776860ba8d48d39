// Products of few tokens and a matrix of blocks as GGUF files hold them, where the processor multiplies bytes (VNNI).
//
// An instruction multiplies 32 pairs of bytes, and no weight is widened. Each 32 numbers of a token become whole multiples
// of a unit, the largest of them divided by 2^21, in three digits to the base 256. Sums of products of digits are exact, so
// that a result is about as precise as in float. Four of these products are below 2^31, whatever the bytes of the weights.

#pragma once

#include "gguf_types.h"
#include "layers.h"

#if (defined(__AVX512VNNI__) && defined(__AVX512VL__)) || defined(__AVXVNNI__)
#define MULTIPLIES_BYTES
namespace {

INLINE __m256i add_products(__m256i sums, __m256i bytes, __m256i digits) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
  return _mm256_dpbusd_epi32(sums, bytes, digits);
#else
  return _mm256_dpbusd_avx_epi32(sums, bytes, digits);
#endif
}

template <class Stored, class T> class GgufDigits {
 public:
  using A = float;
  static constexpr int kRows = 4, kHalves = 1;
  static constexpr int64_t kMost = kWide ? 3 : 2;  // tokens; more take longer than in float, or more registers
  static constexpr bool far() { return true; }
  struct Scratch {};

  GgufDigits(const T* x, int64_t tokens, int64_t k)
      : count(tokens), k(k), stretches((k + kStretch - 1) / kStretch), digits(tokens * stretches * kPieces * kDigits),
        units(tokens * stretches * kScales), totals(tokens * stretches * kScales) {
    std::fill_n(units.data, tokens * stretches * kScales, 0.f);
    std::fill_n(totals.data, tokens * stretches * kScales, 0.f);
    for (int64_t token = 0; token < tokens; ++token)
      for (int64_t at = 0; at < k; at += kPiece) split(x + token * k + at, token * stretches * kPieces + at / kPiece);
  }

  void multiply(const Block<Stored, T>& block, float* sums, Scratch&) const {
    const Stored* const rows[4] = {block.row(0), block.row(1), block.row(2), block.row(3)};
    for_constant<kMost>(count, [&](auto n) { multiply_tokens<n>(rows, sums); });
  }

  const int64_t count, k;

 private:
  static constexpr int kDigits = 3;
  static constexpr float kLargest = (1 << 21) - 1;
  static constexpr int kScales = kStretch / Stored::kScaled;       // of a stretch
  static constexpr bool kPairs = Stored::kScaled == kPiece / 2;  // of scales, for every other four numbers
  using Digits = int8_t[kPiece];

  // Every other four bytes are from the second half of a piece, if that has another scale.
  static int place(int i) { return kPairs ? i % 16 / 4 * 8 + i / 16 * 4 + i % 4 : i; }
  static INLINE __m256i placed(__m256i bytes) {
    return kPairs ? _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)) : bytes;
  }

  void split(const T* x, int64_t piece) {
    float largest = 0, zero = 0;  // zero unless a number is not finite
    for (int i = 0; i < kPiece; ++i) {
      largest = std::max(largest, std::abs(float(x[i])));
      zero += float(x[i]) * 0;
    }
    const float unit = largest / kLargest, by = unit > 0 ? 1 / unit : 0;
    int32_t rest[kPiece];
    for (int i = 0; i < kPiece; ++i) rest[place(i)] = int32_t(std::nearbyint(float(x[i]) * by));
    for (int part = 0; part < kPiece; part += Stored::kScaled) {
      const int64_t at = (piece * kPiece + part) / Stored::kScaled;
      int32_t total = 0;
      for (int i = part; i < part + Stored::kScaled; ++i) total += rest[place(i)];
      units.data[at] = unit + zero;
      totals.data[at] = float(total) * (unit + zero);
    }
    for (int digit = kDigits - 1; digit >= 0; --digit)
      for (int i = 0; i < kPiece; ++i) {
        const int8_t last = int8_t(rest[i]);
        digits.data[piece * kDigits + digit][i] = last;
        rest[i] = (rest[i] - last) >> 8;
      }
  }

  template <int N> void multiply_tokens(const Stored* const (&rows)[4], float* sums) const {
    __m256 found[4][N];
    each<4>([&](auto r) { each<N>([&](auto t) { found[r][t] = _mm256_setzero_ps(); }); });
    const int64_t whole = k / kStretch;
    for (int64_t stretch = 0; stretch < whole; ++stretch) add_stretch<N>(rows, stretch, kPieces, found);
    if (whole < stretches) add_stretch<N>(rows, whole, int(k % kStretch / kPiece), found);
    each<N>([&](auto t) { each<4>([&](auto r) { sums[4 * t + r] = sum_of(found[r][t]); }); });
  }

  static INLINE float sum_of(__m256 of) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(of), _mm256_extractf128_ps(of, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  }

  template <int N>
  INLINE void add_stretch(const Stored* const (&rows)[4], int64_t stretch, int pieces, __m256 (&found)[4][N]) const {
    const int64_t blocks = stretch * kStretch / Stored::kNumbers;
    alignas(32) float factors[4][N][kScales];
    each<4>([&](auto r) __attribute__((always_inline)) {
      alignas(32) float scale[kScales], shift[kScales];
      (rows[r] + blocks)->scales(pieces, scale, shift);
      each<N>([&](auto t) __attribute__((always_inline)) {
        const int64_t from = (t * stretches + stretch) * kScales;
        for (int i = 0; i < kScales; i += 8) {
          const __m256 unit = _mm256_loadu_ps(units.data + from + i), total = _mm256_loadu_ps(totals.data + from + i);
          found[r][t] = _mm256_fmadd_ps(_mm256_load_ps(shift + i), total, found[r][t]);
          _mm256_store_ps(factors[r][t] + i, _mm256_mul_ps(_mm256_load_ps(scale + i), unit));
        }
      });
    });
    for (int piece = 0; piece < pieces; ++piece) {
      __m256i weights[4];
      each<4>([&](auto r) __attribute__((always_inline)) { weights[r] = placed((rows[r] + blocks)->quants(piece)); });
      each<N>([&](auto t) __attribute__((always_inline)) {
        __m256i digit[kDigits];
        each<kDigits>([&](auto at) __attribute__((always_inline)) {
          digit[at] = bytes_at(digits.data[((t * stretches + stretch) * kPieces + piece) * kDigits + at]);
          asm("" : "+v"(digit[at]));  // or compilers would read it for each row
        });
        each<4>([&](auto r) __attribute__((always_inline)) {
          __m256i sum = add_products(_mm256_setzero_si256(), weights[r], digit[0]);
          sum = add_products(_mm256_slli_epi32(sum, 8), weights[r], digit[1]);
          sum = add_products(_mm256_slli_epi32(sum, 8), weights[r], digit[2]);
          found[r][t] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), factor(factors[r][t], piece), found[r][t]);
        });
      });
    }
  }

  static INLINE __m256 factor(const float* factors, int piece) {
    if constexpr (!kPairs) return _mm256_set1_ps(factors[piece]);
    double pair;
    std::memcpy(&pair, factors + 2 * piece, sizeof pair);
    return _mm256_castpd_ps(_mm256_set1_pd(pair));
  }

  const int64_t stretches;
  const Aligned<Digits> digits;  // [tokens, pieces, digits], the highest ones first
  const Aligned<float> units;    // [tokens, scales], not finite where a number is not
  const Aligned<float> totals;   // of the numbers of each scale
};

}  // namespace
#endif
