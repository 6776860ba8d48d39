// Blocks of GGUF files: 32 or 256 numbers of a row in few bits, with what scales them, as the files lay them out.
//
// A number is scale · q, or scale · q + shift in types that have shifts. A block consists of spans of alike layout, and
// these of places of 16 numbers: `quants(span, place)` are the q of a place as bytes. Where they are four bits as they lie,
// `raw(span, place)` has them as the low or (`high(place)`) the high bits of bytes. `Scales` has scales and shifts.

#pragma once

#include <stdexcept>

#include "vectors.h"

namespace {

constexpr int kPlace = 16;  // numbers

INLINE __m128i bytes_at(const uint8_t* from) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)); }
INLINE __m128i low_bits(__m128i bytes, int bits) { return _mm_and_si128(bytes, _mm_set1_epi8(char((1 << bits) - 1))); }
INLINE __m128i four_bits(__m128i bytes, bool high) { return low_bits(high ? _mm_srli_epi16(bytes, 4) : bytes, 4); }
INLINE __m128i shifted(__m128i bytes, int bits) { return _mm_srl_epi16(bytes, _mm_cvtsi32_si128(bits)); }
INLINE __m128i less(__m128i bytes, int by) { return _mm_sub_epi8(bytes, _mm_set1_epi8(char(by))); }

// A float of 16 bits, in all lanes.
template <class A> INLINE Vector<A> spread(const uint8_t (&half)[2]) {
  uint16_t bits;
  std::memcpy(&bits, half, sizeof bits);
  if constexpr (sizeof(A) == 8) return Vector<A>(A(_cvtsh_ss(bits)));
#ifdef CPU_CAPABILITY_AVX512
  else return Vector<A>(_mm512_cvtph_ps(_mm256_set1_epi16(short(bits))));
#else
  else return Vector<A>(_mm256_cvtph_ps(_mm_set1_epi16(short(bits))));
#endif
}

// Numbers of one scale a block, in four bits or five, and one shift if `shifts`; else q is as much above 0 as below.
template <class Block, int bits, bool shifts> struct Block32 {
  static constexpr int kNumbers = 32, kSpan = 32, kOffset = shifts ? 0 : 1 << (bits - 1);
  static constexpr bool kShifts = shifts, kFourBits = bits == 4;
  // In memory, from where an instruction reads one into all lanes.
  template <class A, int R> struct Scales {
    INLINE explicit Scales(const Block* const (&rows)[R]) {
      using Bits = std::conditional_t<shifts, int32_t, int16_t>;
      const auto of = [&](int r) __attribute__((always_inline)) {
        Bits found;
        std::memcpy(&found, rows[r % R]->scales, sizeof found);
        return found;
      };
      const __m128i halves = shifts ? _mm_setr_epi32(of(0), of(1), of(2), of(3))
                                    : _mm_setr_epi16(short(of(0)), short(of(1)), short(of(2)), short(of(3)), 0, 0, 0, 0);
      alignas(32) float numbers[8];
      _mm256_store_ps(numbers, _mm256_cvtph_ps(halves));
      std::copy_n(numbers, 8, by);
    }
    INLINE Vector<A> scale(int row, int, int) const { return Vector<A>(by[shifts ? 2 * row : row]); }
    INLINE Vector<A> shift(int row, int, int) const { return Vector<A>(by[2 * row + 1]); }
    A by[8];
  };
  const Block& block() const { return static_cast<const Block&>(*this); }
  INLINE __m128i raw(int, int) const { return bytes_at(block().q); }
  static INLINE bool high(int place) { return place; }
  INLINE __m128i quants(int, int place) const {
    __m128i numbers = four_bits(bytes_at(block().q), place);
    if constexpr (bits == 5) {
      int16_t fifths;
      std::memcpy(&fifths, block().fifth + 2 * place, sizeof fifths);
      const __m128i its_byte = _mm_set_epi64x(0x0101010101010101, 0), its_bit = _mm_set1_epi64x(0x8040201008040201);
      const __m128i bits_of_bytes = _mm_and_si128(_mm_shuffle_epi8(_mm_set1_epi16(fifths), its_byte), its_bit);
      numbers = _mm_or_si128(numbers, _mm_and_si128(_mm_cmpeq_epi8(bits_of_bytes, its_bit), _mm_set1_epi8(16)));
    }
    return less(numbers, kOffset);
  }
};
struct Q4_0 : Block32<Q4_0, 4, false> {
  uint8_t scales[2], q[16];
};
struct Q4_1 : Block32<Q4_1, 4, true> {
  uint8_t scales[4], q[16];
};
struct Q5_0 : Block32<Q5_0, 5, false> {
  uint8_t scales[2], fifth[4], q[16];
};
struct Q5_1 : Block32<Q5_1, 5, true> {
  uint8_t scales[4], fifth[4], q[16];
};
struct Q8_0 : Block32<Q8_0, 8, false> {
  static constexpr int kOffset = 0;
  INLINE __m128i quants(int, int place) const { return bytes_at(q + place * kPlace); }
  uint8_t scales[2], q[32];
};

// Numbers of a block of 256 with a scale and a shift for each 32, in six bits each, and one for these.
template <class Block, int bits> struct Block256 {
  static constexpr int kNumbers = 256, kSpan = 64, kOffset = 0;
  static constexpr bool kShifts = true, kFourBits = bits == 4;
  template <class A, int R> struct Scales {
    INLINE explicit Scales(const Block* const (&rows)[R]) {
      for (int r = 0; r < R; ++r) read(*rows[r], by[r]);
    }
    static INLINE void read(const Block& block, A (&by)[16]) {
      // Six bits of the first four scales, of the first four shifts, and four each of the others, whose upper two bits
      // are above those of the first.
      uint32_t words[3], all[4];
      std::memcpy(words, block.scales, sizeof words);
      all[0] = words[0] & 0x3f3f3f3f;
      all[1] = (words[2] & 0x0f0f0f0f) | (words[0] >> 2 & 0x30303030);
      all[2] = words[1] & 0x3f3f3f3f;
      all[3] = (words[2] >> 4 & 0x0f0f0f0f) | (words[1] >> 2 & 0x30303030);
      const Vector<A> d = spread<A>(block.d), m = spread<A>(block.m).neg();
      int8_t bytes[16];
      std::memcpy(bytes, all, sizeof all);
      for (int at = 0; at < 16; at += kLanes<A>) {
        const Vector<A> numbers = ::widen<A>(bytes + at, kByte);
        if constexpr (kLanes<A> == 16) (numbers * Vector<A>::template blend<0xff00>(d, m)).store(by);
        else (numbers * (at < 8 ? d : m)).store(by + at);
      }
    }
    INLINE Vector<A> scale(int row, int span, int place) const { return Vector<A>(by[row][2 * span + place / 2]); }
    INLINE Vector<A> shift(int row, int span, int place) const { return Vector<A>(by[row][8 + 2 * span + place / 2]); }
    alignas(64) A by[R][16];
  };
  const Block& block() const { return static_cast<const Block&>(*this); }
  INLINE __m128i raw(int span, int place) const {
    return bytes_at(block().q + span * (kSpan / 2) + place % 2 * kPlace);
  }
  static INLINE bool high(int place) { return place / 2; }
  INLINE __m128i quants(int span, int place) const {
    const __m128i numbers = four_bits(raw(span, place), high(place));
    if constexpr (bits == 4) return numbers;
    else {
      const __m128i fifths = shifted(bytes_at(block().fifth + place % 2 * kPlace), 2 * span + place / 2);
      return _mm_or_si128(numbers, _mm_slli_epi16(low_bits(fifths, 1), 4));
    }
  }
};
struct Q4_K : Block256<Q4_K, 4> {
  uint8_t d[2], m[2], scales[12], q[128];
};
struct Q5_K : Block256<Q5_K, 5> {
  uint8_t d[2], m[2], scales[12], fifth[32], q[128];
};

// Numbers in six bits, a scale for each 16 in eight bits, and one for these.
struct Q6_K {
  static constexpr int kNumbers = 256, kSpan = 64, kOffset = 32;
  static constexpr bool kShifts = false, kFourBits = false;
  template <class A, int R> struct Scales {
    INLINE explicit Scales(const Q6_K* const (&rows)[R]) {
      for (int r = 0; r < R; ++r)
        for (int at = 0; at < 16; at += kLanes<A>)
          (::widen<A>(rows[r]->scales + at, kByte) * spread<A>(rows[r]->d)).store(by[r] + at);
    }
    INLINE Vector<A> scale(int row, int span, int place) const { return Vector<A>(by[row][4 * span + place]); }
    alignas(64) A by[R][16];
  };
  INLINE __m128i quants(int span, int place) const {
    const int half = span / 2, bits = span % 2 * 4;  // of the block, and how far up the first numbers' bits are
    const __m128i numbers = low_bits(shifted(bytes_at(low + 64 * half + place * kPlace), bits), 4);
    const __m128i rest = shifted(bytes_at(upper + 32 * half + place % 2 * kPlace), bits + place / 2 * 2);
    return less(_mm_or_si128(numbers, _mm_slli_epi16(low_bits(rest, 2), 4)), kOffset);
  }
  uint8_t low[128], upper[64];
  int8_t scales[16];
  uint8_t d[2];
};

// Calls `work` with a block of the type that has so many bytes.
template <class Work> void for_type(int64_t bytes, const Work& work) {
  const auto try_types = [&](auto... types) { return ((bytes == int64_t(sizeof types) && (work(types), true)) || ...); };
  if (!try_types(Q4_0{}, Q4_1{}, Q5_0{}, Q5_1{}, Q8_0{}, Q4_K{}, Q5_K{}, Q6_K{}))
    throw std::invalid_argument("no type of GGUF files has blocks of so many bytes");
}

}  // namespace
