// Products of few tokens and a matrix of 8 bits a number, where the processor has AVX2 only.
//
// One instruction multiplies 16 pairs of words of 16 bits, twice as many as it would of floats. Each 64 numbers of a
// token become whole multiples of their largest one divided by 32767, so that none is off by more than 1/2000 of their
// mean size. Where one is so large that others would be, what the words leave of each is multiplied as well.
// Sums of products are exact, so a result is the same whichever tokens come with it.

namespace {

#ifndef __AVX512F__
constexpr int kLine = 64;          // columns with one unit: as many bytes of a row as a line of the cache holds
constexpr int kWords = 16;         // of a vector
constexpr int64_t kTogether = 32;  // tokens whose sums stay in the first-level cache
constexpr float kMost = 32767;
constexpr float kSpread = 32;      // largest number over the mean size, up to which one word a number is enough

// Sixteen floats, rounded to words.
inline __m256i words_of(Vector<float> first, Vector<float> second) {
  const __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32((__m256)first), _mm256_cvtps_epi32((__m256)second));
  return _mm256_permute4x64_epi64(words, 0b11011000);
}

inline Vector<float> left_of(Vector<float> v) {
  return (v - (Vector<float>)_mm256_round_ps((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)) * (2 * kMost);
}

// The tokens `[tokens, k]` as words `[lines, tokens, 64]`, with zeros after the last column.
struct Words {
  static constexpr int kRows = 4;  // of weights, multiplied together
  using Sums = std::vector<Four<float>>;
  struct Left { int64_t line, token; };

  Words(const float* x, int64_t tokens, int64_t k)
      : tokens(tokens), k(k), lines((k + kLine - 1) / kLine), words(2 * lines * tokens * kLine), unit(lines * tokens) {
    for (int64_t line = 0; line < lines; ++line)
      for (int64_t token = 0; token < tokens; ++token) write(x + token * k + line * kLine, line, token);
  }

  const int16_t* at(int64_t line, int64_t token) const { return words.data + (line * tokens + token) * kLine; }
  float unit_at(int64_t line, int64_t token) const { return unit.data[line * tokens + token]; }

  const int64_t tokens, k, lines;
  const Aligned<int16_t> words;  // the second half is what they leave, in units of 1/65534
  const Aligned<float> unit;     // `[lines, tokens]`: what words are multiples of
  std::vector<Left> left;        // where that counts

 private:
  void write(const float* x, int64_t line, int64_t token) {
    const int64_t given = std::min<int64_t>(kLine, k - line * kLine);
    alignas(32) float numbers[kLine] = {};
    std::memcpy(numbers, x, given * sizeof(float));
    __m256 most = _mm256_setzero_ps();
    Vector<float> sizes{};
    for (int i = 0; i < kLine; i += kLanes<float>) {
      const __m256 size = _mm256_andnot_ps(_mm256_set1_ps(-0.f), _mm256_load_ps(numbers + i));
      most = _mm256_max_ps(most, size);
      sizes += (Vector<float>)size;
    }
    float largest = 0, sum = 0;
    for (int i = 0; i < kLanes<float>; ++i) largest = std::max(largest, most[i]), sum += sizes[i];
    const float scale = largest > 0 ? kMost / largest : 0;
    const bool leaves = largest * given > kSpread * sum;
    unit.data[line * tokens + token] = largest / kMost + sum * 0.f;  // not finite where a number is not
    if (leaves) left.push_back({line, token});
    __m256i* to = (__m256i*)at(line, token);
    __m256i* left_to = (__m256i*)at(lines + line, token);
    for (int i = 0; i < kLine; i += kWords) {
      const auto first = load<float, float>(numbers + i) * scale, second = load<float, float>(numbers + i + 8) * scale;
      *to++ = words_of(first, second);
      if (leaves) *left_to++ = words_of(left_of(first), left_of(second));
    }
  }
};

// What two rows of weights have in a line of columns, and its products with a token.
struct TwoRows {
  TwoRows(const int8_t* first, const int8_t* second) {
#pragma GCC unroll 4
    for (int i = 0; i < kLine / kWords; ++i) {
      weights[0][i] = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)first + i));
      weights[1][i] = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)second + i));
    }
  }

  void add_products(const int16_t* words, float unit, Vector<float>* sums) const {
    __m256i whole[2] = {};
#pragma GCC unroll 4
    for (int i = 0; i < kLine / kWords; ++i) {
      __m256i some = _mm256_load_si256((const __m256i*)words + i);
      asm("" : "+v"(some));  // stays in a register: loads are what bounds this loop
#pragma GCC unroll 2
      for (int r = 0; r < 2; ++r) whole[r] = _mm256_add_epi32(whole[r], _mm256_madd_epi16(weights[r][i], some));
    }
#pragma GCC unroll 2
    for (int r = 0; r < 2; ++r) {
      sums[r] += (Vector<float>)_mm256_cvtepi32_ps(whole[r]) * unit;
      asm("" : "+v"(sums[r]));  // added in this order, however many tokens there are
    }
  }

  __m256i weights[2][kLine / kWords];
};

// Four rows of weights. Their last columns are copied where they fill no line, with zeros behind them.
struct FourRows {
  FourRows(const int8_t* const* rows, int64_t k) : rows(rows), whole(k / kLine) {
    if (k % kLine == 0) return;
    std::memset(last, 0, sizeof last);
    for (int r = 0; r < 4; ++r) std::memcpy(last[r], rows[r] + whole * kLine, k % kLine);
  }

  TwoRows two(int pair, int64_t line) const {
    if (line == whole) return {last[2 * pair], last[2 * pair + 1]};
    return {rows[2 * pair] + line * kLine, rows[2 * pair + 1] + line * kLine};
  }

  const int8_t* const* rows;
  const int64_t whole;  // lines
  int8_t last[4][kLine];
};

// The products of four rows of weights and the tokens from `begin` to `until`, or N tokens. Rows are widened in pairs,
// which fills the registers.
template <int N>
inline void whole_tile(const FourRows& rows, const Words& x, int64_t begin, int64_t until, Four<float>* sums) {
  const int64_t end = N ? begin + N : until;
  Vector<float> found[2][N ? N : kTogether][2];
  for (auto& pair : found) std::fill_n(pair[0], 2 * (end - begin), Vector<float>{});
  for (int64_t line = 0; line < x.lines; ++line)
#pragma GCC unroll 2
    for (int pair = 0; pair < 2; ++pair) {
      const TwoRows two = rows.two(pair, line);
      for (int64_t t = begin; t < end; ++t) two.add_products(x.at(line, t), x.unit_at(line, t), found[pair][t - begin]);
    }
  for (int64_t t = begin; t < end; ++t) {
    const auto &first = found[0][t - begin], &second = found[1][t - begin];
    sums[t] = sums_of<float>(first[0], first[1], second[0], second[1]);
  }
}

// The same with all tokens, and with what their words leave.
inline void whole_products(const int8_t* const* four, const Words& x, Four<float>* sums) {
  const FourRows rows(four, x.k);
  if (x.tokens == 1) whole_tile<1>(rows, x, 0, 1, sums);  // whose sums stay in registers
  else for (int64_t t = 0; t < x.tokens; t += kTogether)
    whole_tile<0>(rows, x, t, std::min(t + kTogether, x.tokens), sums);
  for (const auto& [line, token] : x.left) {
    Vector<float> found[2][2] = {};
    for (int pair = 0; pair < 2; ++pair)
      rows.two(pair, line).add_products(x.at(x.lines + line, token), x.unit_at(line, token) / (2 * kMost), found[pair]);
    sums[token] += sums_of<float>(found[0][0], found[0][1], found[1][0], found[1][1]);
  }
}
#endif

}  // namespace
