// Blocks of GGUF files in their layout: 32 or 256 numbers of a row in few bits each, with scales.
//
// A number is scale · q + shift, where q ≥ 0. Rows are read in stretches of 256 numbers, one block or eight, and these in
// pieces of 32. `quants(rows, piece)` returns the q of a piece as bytes, for one row or several (`rows`); `scales` writes a
// scale and a shift for every `kScaled` numbers of a stretch.

#pragma once

#include <stdexcept>

#include "vectors.h"

namespace {

constexpr int kPiece = 32, kStretch = 256, kPieces = kStretch / kPiece;

INLINE __m256i low_bits(__m256i bytes, int bits) {
  return _mm256_and_si256(bytes, _mm256_set1_epi8(char((1 << bits) - 1)));
}
INLINE __m256i shifted(__m256i bytes, int bits) { return _mm256_srl_epi16(bytes, _mm_cvtsi32_si128(bits)); }
INLINE __m256i either(__m256i a, __m256i b) { return _mm256_or_si256(a, b); }
INLINE __m256i with_upper(__m256i four_bits, __m256i upper) {
  return _mm256_or_si256(four_bits, _mm256_slli_epi16(upper, 4));
}
INLINE __m256i flipped(__m256i bytes) { return _mm256_xor_si256(bytes, _mm256_set1_epi8(-128)); }

// Reads bytes of one row.
struct OneRow {
  static INLINE __m256i bytes(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
  // The low four bits of 16 bytes, then their high four bits.
  static INLINE __m256i nibbles(const void* from) {
    const __m128i bytes = _mm_loadu_si128(static_cast<const __m128i*>(from));
    return low_bits(_mm256_srlv_epi64(_mm256_broadcastsi128_si256(bytes), _mm256_setr_epi64x(0, 0, 4, 4)), 4);
  }
  // 32 bits as bytes of 0 or 16.
  template <int at> static INLINE __m256i fifths(const uint8_t* from) {
    int32_t bits;
    std::memcpy(&bits, from + at, sizeof bits);
    const __m256i its_byte = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i its_bit = _mm256_set1_epi64x(0x8040201008040201);
    const __m256i found = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(bits), its_byte), its_bit);
    return _mm256_and_si256(_mm256_cmpeq_epi8(found, its_bit), _mm256_set1_epi8(16));
  }
};

INLINE __m256 widened(__m128i halves) { return _mm256_cvtph_ps(halves); }
INLINE __m256 spread(const uint8_t (&half)[2]) {
  int16_t bits;
  std::memcpy(&bits, half, sizeof bits);
  return widened(_mm_set1_epi16(bits));
}
INLINE __m256 eight_bytes(const int8_t* from) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
}

// Blocks of 32 numbers with a scale and a shift; if there is a `middle`, q - middle is scaled instead.
template <class Block, int middle> struct Block32 {
  static constexpr int kNumbers = 32, kScaled = 32, kMiddle = middle;
  const Block& block(int at) const { return static_cast<const Block*>(this)[at]; }
  INLINE void scales(int pieces, float* scale, float* shift) const {
    const auto pair = [&](int piece) __attribute__((always_inline)) {  // a scale and the 16 bits after it
      int32_t bits;
      std::memcpy(&bits, block(std::min(piece, pieces - 1)).scale, sizeof bits);
      return bits;
    };
    const auto four = [&](int piece) __attribute__((always_inline)) {
      return _mm_setr_epi32(pair(piece), pair(piece + 1), pair(piece + 2), pair(piece + 3));
    };
    const __m256i pairs = _mm256_set_m128i(four(4), four(0)), first = _mm256_set1_epi32(0xffff);
    const __m256i packed = _mm256_packus_epi32(_mm256_and_si256(pairs, first), _mm256_srli_epi32(pairs, 16));
    const __m256i halves = _mm256_permute4x64_epi64(packed, 0b11011000);
    const __m256 by = widened(_mm256_castsi256_si128(halves));
    _mm256_storeu_ps(scale, by);
    const __m256 second = widened(_mm256_extracti128_si256(halves, 1));
    _mm256_storeu_ps(shift, middle ? _mm256_mul_ps(by, _mm256_set1_ps(-middle)) : second);
  }
  template <class Rows> INLINE auto five_bits(const Rows& rows, int piece) const {
    return either(rows.nibbles(block(piece).q), rows.template fifths<sizeof(Block::scale)>(block(piece).scale));
  }
};
struct Q4_0 : Block32<Q4_0, 8> {
  template <class Rows> INLINE auto quants(const Rows& rows, int piece) const { return rows.nibbles(block(piece).q); }
  uint8_t scale[2], q[16];
};
struct Q4_1 : Block32<Q4_1, 0> {
  template <class Rows> INLINE auto quants(const Rows& rows, int piece) const { return rows.nibbles(block(piece).q); }
  uint8_t scale[4], q[16];
};
struct Q5_0 : Block32<Q5_0, 16> {
  template <class Rows> INLINE auto quants(const Rows& rows, int piece) const { return five_bits(rows, piece); }
  uint8_t scale[2], fifth[4], q[16];
};
struct Q5_1 : Block32<Q5_1, 0> {
  template <class Rows> INLINE auto quants(const Rows& rows, int piece) const { return five_bits(rows, piece); }
  uint8_t scale[4], fifth[4], q[16];
};
struct Q8_0 : Block32<Q8_0, 128> {
  template <class Rows> INLINE auto quants(const Rows& rows, int piece) const {
    return flipped(rows.bytes(block(piece).q));
  }
  uint8_t scale[2], q[32];
};

// Blocks of 256 numbers with a scale and a shift of six bits for every 32, which have a common scale each (`d`, `m`).
template <class Block> struct Block256 {
  static constexpr int kNumbers = 256, kScaled = 32;
  const Block& block() const { return static_cast<const Block&>(*this); }
  INLINE void scales(int, float* scale, float* shift) const {
    // 12 bytes: the first four scales, the first four shifts, and the lower four bits of the other scales and shifts. The
    // upper two bits of the others are in the upper bits of the first eight bytes.
    uint32_t words[3], all[4];
    std::memcpy(words, block().six_bits, sizeof words);
    all[0] = words[0] & 0x3f3f3f3f;
    all[1] = (words[2] & 0x0f0f0f0f) | (words[0] >> 2 & 0x30303030);
    all[2] = words[1] & 0x3f3f3f3f;
    all[3] = (words[2] >> 4 & 0x0f0f0f0f) | (words[1] >> 2 & 0x30303030);
    int8_t bytes[16];
    std::memcpy(bytes, all, sizeof all);
    _mm256_storeu_ps(scale, _mm256_mul_ps(eight_bytes(bytes), spread(block().d)));
    const __m256 down = _mm256_sub_ps(_mm256_setzero_ps(), spread(block().m));
    _mm256_storeu_ps(shift, _mm256_mul_ps(eight_bytes(bytes + 8), down));
  }
  template <class Rows> INLINE auto four_bits(const Rows& rows, int piece) const {
    return low_bits(shifted(rows.bytes(block().q + piece / 2 * kPiece), piece % 2 * 4), 4);
  }
};
struct Q4_K : Block256<Q4_K> {
  template <class Rows> INLINE auto quants(const Rows& rows, int piece) const { return four_bits(rows, piece); }
  uint8_t d[2], m[2], six_bits[12], q[128];
};
struct Q5_K : Block256<Q5_K> {
  template <class Rows> INLINE auto quants(const Rows& rows, int piece) const {
    return with_upper(four_bits(rows, piece), low_bits(shifted(rows.bytes(fifth), piece), 1));
  }
  uint8_t d[2], m[2], six_bits[12], fifth[32], q[128];
};

// Blocks of 256 numbers of six bits, with a scale of eight bits for every 16 and a common one (`d`); q - 32 is scaled.
struct Q6_K {
  static constexpr int kNumbers = 256, kScaled = 16;
  INLINE void scales(int, float* scale, float* shift) const {
    for (int at = 0; at < 16; at += 8) {
      const __m256 by = _mm256_mul_ps(eight_bytes(eighths + at), spread(d));
      _mm256_storeu_ps(scale + at, by);
      _mm256_storeu_ps(shift + at, _mm256_mul_ps(by, _mm256_set1_ps(-32)));
    }
  }
  template <class Rows> INLINE auto quants(const Rows& rows, int piece) const {
    const int half = piece / 4, place = piece % 4;
    const auto numbers = low_bits(shifted(rows.bytes(low + 64 * half + place % 2 * kPiece), place / 2 * 4), 4);
    return with_upper(numbers, low_bits(shifted(rows.bytes(upper + 32 * half), place * 2), 2));
  }
  uint8_t low[128], upper[64];
  int8_t eighths[16];
  uint8_t d[2];
};

// Calls `work` with a block of the type whose size is `bytes`.
template <class Work> void for_type(int64_t bytes, const Work& work) {
  const auto try_types = [&](auto... types) { return ((bytes == int64_t(sizeof types) && (work(types), true)) || ...); };
  if (!try_types(Q4_0{}, Q4_1{}, Q5_0{}, Q5_1{}, Q8_0{}, Q4_K{}, Q5_K{}, Q6_K{}))
    throw std::invalid_argument("no supported type of GGUF files has blocks of this size");
}

}  // namespace
