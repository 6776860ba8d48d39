// Rows in the blocks of GGUF files, transposed into the lanes of vectors, 32 bits of each, once for all tokens; and their
// products with few tokens where the processor multiplies bytes (VNNI).
//
// An instruction multiplies four bytes of each of 16 rows (8 without AVX-512) with four of a token. No weight is widened.
// A token's numbers become integers, in units of its largest one divided by 127 · 2^16, of three digits in base 256. Sums
// of products of digits are exact, so results are about as precise as in float.

#pragma once

#include "gguf_types.h"
#include "layers.h"

#if (defined(__AVX512VNNI__) && defined(CPU_CAPABILITY_AVX512)) || (defined(__AVXVNNI__) && !defined(CPU_CAPABILITY_AVX512))
#define MULTIPLIES_BYTES
#endif

namespace {

constexpr int kLaneRows = kLanes<float>;
using LaneWords = Numbers<uint32_t, kLaneRows>::type;  // 32 bits of every row
using Halves = Numbers<uint16_t, 2 * kLaneRows>::type;
using Ints = Numbers<int32_t, kLaneRows>::type;
using Lanes = Numbers<float, kLaneRows>::type;

// Sixteen bytes of every fourth row, `apart` bytes from one row to the next.
INLINE Bits every_fourth(const uint8_t* from, int64_t apart) {
  const auto row = [&](int at) __attribute__((always_inline)) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + at * apart));
  };
#ifdef CPU_CAPABILITY_AVX512
  const __m512i half = _mm512_inserti32x4(_mm512_castsi128_si512(row(0)), row(4), 1);
  return (Bits)_mm512_inserti32x4(_mm512_inserti32x4(half, row(8), 2), row(12), 3);
#else
  return (Bits)_mm256_inserti128_si256(_mm256_castsi128_si256(row(0)), row(4), 1);
#endif
}
// The lower 16 bits of words as floats.
INLINE Lanes lower_floats(LaneWords words) {
#ifdef CPU_CAPABILITY_AVX512
  return (Lanes)_mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)words));
#else
  const __m256i packed = _mm256_packus_epi32((__m256i)(words & 0xffff), _mm256_setzero_si256());
  return (Lanes)_mm256_cvtph_ps(_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0b1000)));
#endif
}
// The upper four bits of a byte of every word, as bytes of 0 or 16.
INLINE LaneWords upper_bits(LaneWords words, int byte) {
  const __m128i words_of_four = _mm_setr_epi32(0, 0x04040404, 0x08080808, 0x0c0c0c0c);
  const __m128i places = _mm_add_epi8(words_of_four, _mm_set1_epi8(char(byte)));
#ifdef CPU_CAPABILITY_AVX512
  const __m512i spread = _mm512_shuffle_epi8((__m512i)words, _mm512_broadcast_i32x4(places));
  return (LaneWords)_mm512_min_epu8(_mm512_and_si512(spread, _mm512_set1_epi32(int(0x80402010))), _mm512_set1_epi8(16));
#else
  const __m256i spread = _mm256_shuffle_epi8((__m256i)words, _mm256_broadcastsi128_si256(places));
  return (LaneWords)_mm256_min_epu8(_mm256_and_si256(spread, _mm256_set1_epi32(int(0x80402010))), _mm256_set1_epi8(16));
#endif
}
INLINE Lanes as_floats(LaneWords whole) { return __builtin_convertvector((Ints)whole, Lanes); }

// Reads bytes of as many rows as a vector has lanes, `apart` bytes from one row to the next.
struct SomeRows {
  // 32 bytes of each row: four in each of eight vectors.
  struct Bytes {
    template <class Change> INLINE Bytes changed(const Change& change) const {
      Bytes changed;
      each<8>([&](auto i) __attribute__((always_inline)) { changed.part[i] = change(part[i], i); });
      return changed;
    }
    Halves part[8];
  };
  // The four words of 16 bytes of each row, transposed in groups of four rows.
  INLINE void read(const uint8_t* from, LaneWords (&to)[4]) const {
    Bits row[4];
    each<4>([&](auto i) __attribute__((always_inline)) { row[i] = every_fourth(from + i * apart, apart); });
    const Bits first = low_pairs(row[0], row[1]), second = low_pairs(row[2], row[3]);
    const Bits third = high_pairs(row[0], row[1]), fourth = high_pairs(row[2], row[3]);
    to[0] = (LaneWords)low_halves(first, second);
    to[1] = (LaneWords)high_halves(first, second);
    to[2] = (LaneWords)low_halves(third, fourth);
    to[3] = (LaneWords)high_halves(third, fourth);
  }
  INLINE Bytes bytes(const uint8_t* from) const {
    LaneWords found[2][4];
    read(from, found[0]);
    read(from + 16, found[1]);
    return Bytes().changed([&](Halves, auto i) __attribute__((always_inline)) { return (Halves)found[i / 4][i % 4]; });
  }
  INLINE Bytes nibbles(const uint8_t* from) const {
    LaneWords found[4];
    read(from, found);
    return Bytes().changed([&](Halves, auto i) __attribute__((always_inline)) {
      return (Halves)((i < 4 ? found[i % 4] : found[i % 4] >> 4) & 0x0f0f0f0f);
    });
  }
  // 32 bits of each row, `at` bytes after `from`, as bytes of 0 or 16; 16 bytes of each row must be readable.
  template <int at> INLINE Bytes fifths(const uint8_t* from) const {
    LaneWords found[4];
    read(from, found);
    const LaneWords bits = at == 4 ? found[1] : found[0] >> 16 | found[1] << 16, words[] = {bits << 4, bits};
    return Bytes().changed([&](Halves, auto i) __attribute__((always_inline)) {
      return (Halves)upper_bits(words[i % 2], i / 2);
    });
  }

  const int64_t apart;
};
INLINE SomeRows::Bytes low_bits(const SomeRows::Bytes& bytes, int bits) {
  const uint16_t mask = uint16_t(((1 << bits) - 1) * 0x0101);
  return bytes.changed([&](Halves part, auto) __attribute__((always_inline)) { return part & mask; });
}
INLINE SomeRows::Bytes shifted(const SomeRows::Bytes& bytes, int bits) {
  return bytes.changed([&](Halves part, auto) __attribute__((always_inline)) { return part >> bits; });
}
INLINE SomeRows::Bytes flipped(const SomeRows::Bytes& bytes) {
  return bytes.changed([&](Halves part, auto) __attribute__((always_inline)) { return part ^ uint16_t(0x8080); });
}
INLINE SomeRows::Bytes either(const SomeRows::Bytes& a, const SomeRows::Bytes& b) {
  return a.changed([&](Halves part, auto i) __attribute__((always_inline)) { return part | b.part[i]; });
}
INLINE SomeRows::Bytes with_upper(const SomeRows::Bytes& lower, const SomeRows::Bytes& upper) {
  return lower.changed([&](Halves part, auto i) __attribute__((always_inline)) { return part | upper.part[i] << 4; });
}

// The scales and shifts of a stretch of rows.
template <class Stored> class LaneScales {
 public:
  INLINE LaneScales(const Stored* blocks, const SomeRows& rows) : blocks(blocks), rows(rows) {
    LaneWords found[4];
    if constexpr (kBytes) {
      rows.read(reinterpret_cast<const uint8_t*>(blocks->eighths), words);
      rows.read(blocks->d - 14, found);
      d = lower_floats(found[3] >> 16);
    } else if constexpr (Stored::kNumbers == kStretch) {
      rows.read(blocks->d, found);  // and the bytes after it
      d = lower_floats(found[0]);
      m = lower_floats(found[0] >> 16);
      words[0] = found[1] & 0x3f3f3f3f;
      words[1] = (found[3] & 0x0f0f0f0f) | (found[1] >> 2 & 0x30303030);
      words[2] = found[2] & 0x3f3f3f3f;
      words[3] = (found[3] >> 4 & 0x0f0f0f0f) | (found[2] >> 2 & 0x30303030);
    }
  }
  // The scale and the shift of a part of a piece.
  INLINE void read(int piece, int part, Lanes& scale, Lanes& shift) const {
    if constexpr (kBytes) {
      const int at = 2 * piece + part;
      scale = d * as_floats((LaneWords)((Ints)(words[at / 4] << (24 - at % 4 * 8)) >> 24));
      shift = scale * -32.f;
    } else if constexpr (Stored::kNumbers == kStretch) {
      scale = d * as_floats(words[piece / 4] >> (piece % 4 * 8) & 255);
      shift = m * -as_floats(words[2 + piece / 4] >> (piece % 4 * 8) & 255);
    } else {
      LaneWords found[4];
      rows.read(blocks[piece].scale, found);
      scale = lower_floats(found[0]);
      shift = Stored::kMiddle ? scale * -float(Stored::kMiddle) : lower_floats(found[0] >> 16);
    }
  }

 private:
  static constexpr bool kBytes = Stored::kScaled == 16;
  const Stored* blocks;
  const SomeRows& rows;
  LaneWords words[4];
  Lanes d, m;
};

#ifdef MULTIPLIES_BYTES
// Adds four products of unsigned and signed bytes to each sum.
INLINE void add_products(Ints& sums, Halves bytes, const int32_t& digits) {
#ifdef CPU_CAPABILITY_AVX512
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sums) : "v"(bytes), "m"(digits));
#else
  sums = (Ints)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)bytes, _mm256_set1_epi32(digits));
#endif
}

template <class Stored, class T> class GgufDigits {
 public:
  using A = float;
  static constexpr int kRows = kLaneRows, kHalves = 1;
  static constexpr int64_t kBlocks = kStretch / Stored::kNumbers;  // of a stretch
  static constexpr bool far() { return true; }  // otherwise the processor does not prefetch the rows
  struct Scratch {
    Stored rows[kRows][kBlocks];
  };

  GgufDigits(const T* x, int64_t tokens, int64_t k)
      : count(tokens), k(k), pieces((k + kPiece - 1) / kPiece), digits(tokens * pieces * kWords * kDigits), units(tokens),
        totals(tokens * pieces * kParts) {
    for (int64_t token = 0; token < tokens; ++token) split(x + token * k, token);
  }

  void multiply(const Block<Stored, T>& block, float* sums, Scratch& scratch) const {
    const int64_t blocks = k / Stored::kNumbers;
    auto* to = reinterpret_cast<Lanes*>(sums);
    std::fill_n(to, count, Lanes{});
    for (int64_t at = 0; at < blocks; at += kBlocks) {
      const int64_t piece = at * (Stored::kNumbers / kPiece);
      if (block.count == kRows) {
        add_stretch(block.row(0) + at, block.apart * blocks * int64_t(sizeof(Stored)), piece, to);
      } else {  // the last row stands for missing ones
        for (int64_t r = 0; r < kRows; ++r) std::copy_n(block.row(r) + at, std::min(kBlocks, blocks - at), scratch.rows[r]);
        add_stretch(scratch.rows[0], sizeof scratch.rows[0], piece, to);
      }
    }
    for (int64_t token = 0; token < count; ++token) to[token] *= units.data[token];
  }

  const int64_t count, k;

 private:
  static constexpr int kDigits = 3, kWords = kPiece / 4;
  static constexpr int kParts = kPiece / Stored::kScaled;  // of a piece, each with its own scale
  static constexpr float kLargest = 127 * 65536;

  void split(const T* x, int64_t token) {
    float largest = 0, zero = 0;  // zero unless a number is not finite
    for (int64_t i = 0; i < k; ++i) {
      largest = std::max(largest, std::abs(float(x[i])));
      zero += float(x[i]) * 0;
    }
    const float by = largest > 0 ? kLargest / largest : 0;
    units.data[token] = largest / kLargest + zero;
    for (int64_t piece = 0; piece < pieces; ++piece) {
      int32_t rest[kPiece];
      for (int i = 0; i < kPiece; ++i) rest[i] = int32_t(std::nearbyint(float(x[piece * kPiece + i]) * by));
      for (int part = 0; part < kParts; ++part) {
        int32_t total = 0;
        for (int i = 0; i < Stored::kScaled; ++i) total += rest[part * Stored::kScaled + i];
        totals.data[(token * pieces + piece) * kParts + part] = float(total);
      }
      auto* to = reinterpret_cast<int8_t*>(digits_of(token, piece));
      for (int digit = kDigits - 1; digit >= 0; --digit)
        for (int i = 0; i < kPiece; ++i) {
          const int8_t last = int8_t(rest[i]);
          to[digit * kPiece + i] = last;
          rest[i] = (rest[i] - last) >> 8;
        }
    }
  }

  int32_t* digits_of(int64_t token, int64_t piece) const {
    return digits.data + (token * pieces + piece) * (kWords * kDigits);
  }

  void add_stretch(const Stored* blocks, int64_t apart, int64_t first, Lanes* sums) const {
    const int here = int(std::min<int64_t>(kPieces, pieces - first));
    const SomeRows rows{apart};
    const LaneScales<Stored> scales(blocks, rows);
    for (int pair = 0; pair < here; pair += 2)
      each<2>([&](auto odd) __attribute__((always_inline)) {
        if (odd && pair + 1 == here) return;
        const auto weights = blocks->quants(rows, pair + odd);
        each<kParts>([&](auto part) __attribute__((always_inline)) {
          Lanes scale, shift;
          scales.read(pair + odd, part, scale, shift);
          int64_t token = 0;
          for (; token + 1 < count; token += 2) add_tokens<2, part>(weights, scale, shift, token, first + pair + odd, sums);
          if (token < count) add_tokens<1, part>(weights, scale, shift, token, first + pair + odd, sums);
        });
      });
  }

  template <int N, int part>
  INLINE void add_tokens(const SomeRows::Bytes& weights, Lanes scale, Lanes shift, int64_t token, int64_t piece,
                         Lanes* sums) const {
    Ints found[N][kDigits] = {};
    each<kWords / kParts>([&](auto word) __attribute__((always_inline)) {
      constexpr int kAt = part * (kWords / kParts) + word;
      each<N>([&](auto t) __attribute__((always_inline)) {
        each<kDigits>([&](auto i) __attribute__((always_inline)) {
          add_products(found[t][i], weights.part[kAt], digits_of(token + t, piece)[i * kWords + kAt]);
        });
      });
    });
    each<N>([&](auto t) __attribute__((always_inline)) {
      const Lanes high = as_floats((LaneWords)found[t][0]), low = as_floats((LaneWords)((found[t][1] << 8) + found[t][2]));
      const float total = totals.data[((token + t) * pieces + piece) * kParts + part];
      sums[token + t] += shift * total;
      sums[token + t] += scale * (high * 65536.f + low);
    });
  }

  const int64_t pieces;
  const Aligned<int32_t> digits;  // four per word: [tokens, pieces, digits, words], high digits first
  const Aligned<float> units;     // [tokens], not finite if a number of the token is not
  const Aligned<float> totals;    // sums of the numbers that share a scale, [tokens, pieces, parts]
};

#endif

}  // namespace
