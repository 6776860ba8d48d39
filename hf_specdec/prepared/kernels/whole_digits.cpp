// Products of few tokens and a matrix of 8 bits a number, where the processor multiplies bytes (AVX-512 VNNI).
//
// One instruction multiplies 64 pairs of bytes, four times as many as it would of floats, and no weight is widened. A
// token's numbers become whole multiples of its largest one divided by 127 · 2^16, each of three digits to the base 256.
// Sums of products of digits are exact, so a result is as precise as in float, and the same whichever tokens come with
// it.

namespace {

#ifdef __AVX512VNNI__
constexpr int kDigits = 3;
constexpr int kBytes = 64;  // of a row, multiplied at a time
constexpr float kLargest = 127 * 65536;
constexpr int64_t kFetchedBytes = 4096;  // from what is read to what is fetched from memory

// Adds the products of bytes without and with a sign, of every four neighbours to one of 16 sums. Written in assembler
// since gcc copies sums that it could leave in their registers.
inline void add_products(__m512i& sums, __m512i weights, __m512i digits) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(weights), "v"(digits));
}

inline __m512i joined(const __m128i (&parts)[4]) {
  const __m256i low = _mm256_set_m128i(parts[1], parts[0]), high = _mm256_set_m128i(parts[3], parts[2]);
  return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

// The numbers of a token as digits: `put(step, digits)` takes those of 64 columns, the highest first, with zeros after
// the last column. Returns what the numbers are multiples of.
template <class Put> float split(const float* x, int64_t k, Put put) {
  const auto part = [&](int64_t i) {
    return _mm512_maskz_loadu_ps((1u << std::clamp<int64_t>(k - i, 0, 16)) - 1, x + i);
  };
  __m512 most = _mm512_setzero_ps(), zeros = _mm512_setzero_ps();  // zeros unless a number is not finite
  for (int64_t i = 0; i < k; i += 16) {
    most = _mm512_max_ps(most, _mm512_abs_ps(part(i)));
    zeros += part(i) * 0.f;
  }
  const float largest = _mm512_reduce_max_ps(most), scale = largest > 0 ? kLargest / largest : 0;
  for (int64_t step = 0; step * kBytes < k; ++step) {
    __m512i rest[4], digits[kDigits];
    for (int i = 0; i < 4; ++i) rest[i] = _mm512_cvtps_epi32(part(step * kBytes + 16 * i) * scale);
    for (int digit = kDigits - 1; digit >= 0; --digit) {
      __m128i last[4];
      for (int i = 0; i < 4; ++i) {
        last[i] = _mm512_cvtepi32_epi8(rest[i]);
        rest[i] = _mm512_srai_epi32(_mm512_sub_epi32(rest[i], _mm512_cvtepi8_epi32(last[i])), 8);
      }
      digits[digit] = joined(last);
    }
    put(step, digits);
  }
  return largest / kLargest + _mm512_reduce_add_ps(zeros);
}

// The tokens `[tokens, k]` as digits `[steps, tokens, 3, 64]`.
struct Digits {
  static constexpr int kRows = 4;  // of weights, multiplied together
  using Sums = std::vector<Four<float>>;

  Digits(const float* x, int64_t tokens, int64_t k)
      : tokens(tokens), k(k), steps((k + kBytes - 1) / kBytes), digits(steps * tokens * kDigits * kBytes),
        starts(tokens * kDigits), unit(tokens) {
    for (int64_t token = 0; token < tokens; ++token) write(x + token * k, token);
  }

  int8_t* at(int64_t step, int64_t token) const { return digits.data + (step * tokens + token) * kDigits * kBytes; }

  // The columns of a step. Predicted, since every load would wait for a mask that is computed.
  __mmask64 given(int64_t step) const {
    if (__builtin_expect(step < k / kBytes, 1)) return ~0ull;
    return (1ull << k % kBytes) - 1;
  }

  const int64_t tokens, k, steps;
  const Aligned<int8_t> digits;
  const Aligned<__m512i> starts;  // `[tokens, 3]`: what sums start from, as weights without a sign are 128 larger
  const Aligned<float> unit;      // of each token: what its numbers are multiples of

 private:
  void write(const float* x, int64_t token) {
    __m512i sums[kDigits] = {};
    unit.data[token] = split(x, k, [&](int64_t step, const __m512i (&found)[kDigits]) {
      for (int digit = 0; digit < kDigits; ++digit) {
        _mm512_store_si512(at(step, token) + digit * kBytes, found[digit]);
        add_products(sums[digit], _mm512_set1_epi8(-128), found[digit]);
      }
    });
    for (int digit = 0; digit < kDigits; ++digit)
      starts.data[token * kDigits + digit] = _mm512_sub_epi32(_mm512_setzero_si512(), sums[digit]);
  }
};

// A row's bytes without a sign, 128 larger.
inline __m512i unsigned_bytes(const int8_t* from, __mmask64 given) {
  return _mm512_xor_si512(_mm512_maskz_loadu_epi8(given, from), _mm512_set1_epi8(-128));
}

// The sums of four rows as numbers. Where tiles multiply other numbers of tokens, lanes are added as whole numbers first,
// as tiles do it, so that results are equal. Elsewhere digits are joined first, which takes a third of the shuffles.
inline Four<float> numbers_of(const __m512i (&sums)[4][kDigits]) {
#ifdef AMX
  Four<float> numbers = {};
#pragma GCC unroll 4
  for (int digit = 0; digit < kDigits; ++digit) {
    const auto row = [&](int r) { return (Vector<int32_t>)sums[r][digit]; };
    numbers = numbers * 256.f + __builtin_convertvector(sums_of<int32_t>(row(0), row(1), row(2), row(3)), Four<float>);
  }
  return numbers;
#else
  Vector<float> rows[4] = {};
#pragma GCC unroll 4
  for (int r = 0; r < 4; ++r)
#pragma GCC unroll 4
    for (int digit = 0; digit < kDigits; ++digit)
      rows[r] = rows[r] * 256.f + (Vector<float>)_mm512_cvtepi32_ps(sums[r][digit]);
  return sums_of<float>(rows[0], rows[1], rows[2], rows[3]);
#endif
}

// The products of four rows of weights and one token, where this waits for memory only: rows are read as they lie there.
inline void whole_rows_of(const int8_t* const* rows, const Digits& x, Four<float>* sums) {
  __m512i found[4][kDigits];
  for (int r = 0; r < 4; ++r) {
    __m512i acc[kDigits];
#pragma GCC unroll 4
    for (int digit = 0; digit < kDigits; ++digit) acc[digit] = x.starts.data[digit];
    for (int64_t step = 0; step < x.steps; ++step) {
      const int8_t* from = rows[r] + step * kBytes;
      __builtin_prefetch(from + kFetchedBytes, 0, kReadOnce);
      const __m512i weights = unsigned_bytes(from, x.given(step));
#pragma GCC unroll 4
      for (int digit = 0; digit < kDigits; ++digit)
        add_products(acc[digit], weights, _mm512_load_si512(x.at(step, 0) + digit * kBytes));
    }
    std::copy_n(acc, kDigits, found[r]);
  }
  *sums = numbers_of(found) * x.unit.data[0];
}

// The products of four rows of weights and N tokens from `first` on, to sums[t][r]. Meanwhile the memory from `next` on
// is fetched.
template <int N>
void whole_tile(const int8_t* const* rows, const Digits& x, int64_t first, const int8_t* next, Four<float>* sums) {
  __m512i acc[N][4][kDigits];
#pragma GCC unroll 8
  for (int t = 0; t < N; ++t)
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r)
#pragma GCC unroll 4
      for (int digit = 0; digit < kDigits; ++digit) acc[t][r][digit] = x.starts.data[(first + t) * kDigits + digit];
  for (int64_t step = 0; step < x.steps; ++step) {
    const int8_t* digits_of = x.at(step, first);
    const __mmask64 given = x.given(step);
    __m512i weights[4];
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r, next += kBytes) {
      __builtin_prefetch(next, 0, kReadAgain);
      weights[r] = unsigned_bytes(rows[r] + step * kBytes, given);
    }
#pragma GCC unroll 8
    for (int t = 0; t < N; ++t)
#pragma GCC unroll 4
      for (int digit = 0; digit < kDigits; ++digit) {
        const __m512i digits = _mm512_load_si512(digits_of + (t * kDigits + digit) * kBytes);
#pragma GCC unroll 4
        for (int r = 0; r < 4; ++r) add_products(acc[t][r][digit], weights[r], digits);
      }
  }
#pragma GCC unroll 8
  for (int t = 0; t < N; ++t) sums[t] = numbers_of(acc[t]) * x.unit.data[first + t];
}

// The same for all tokens, two at a time, which fills the registers. AMD processors read faster than the sums of a single
// row follow each other.
inline void whole_products(const int8_t* const* rows, const Digits& x, Four<float>* sums) {
  if (!kAmd && x.tokens == 1) return whole_rows_of(rows, x, sums);
  const int8_t* next = rows[0] + 4 * x.k + kFetchedBytes;
  int64_t t = 0;
  for (; t + 2 <= x.tokens; t += 2) whole_tile<2>(rows, x, t, next, sums + t);
  if (t < x.tokens) whole_tile<1>(rows, x, t, next, sums + t);
}
#endif

}  // namespace
