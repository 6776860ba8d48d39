// Products of few tokens and a matrix of blocks as GGUF files hold them. Numbers are widened as they are read, exactly,
// or, for many tokens, before.

#pragma once

#include "floats.h"
#include "gguf_types.h"
#include "layers.h"

#ifdef __clang__
#define UNROLLED _Pragma("clang loop unroll(full)")
#else
#define UNROLLED _Pragma("GCC unroll 4")
#endif

namespace {

template <class A> constexpr int kParts = kPlace / kLanes<A>;  // vectors of a place

template <class A> struct Place {
  Vector<A> part[kParts<A>];
};

// A place of a span of R rows. Where numbers have four bits and a vector 16 lanes, they are looked up.
template <class Block, class A, int R> struct PlaceProduct {
  using Stored = Block;
  using Weights = Place<A>;
  using Column = Place<A>;
  using Sum = Vector<A>;
  using Scales = typename Block::template Scales<A, R>;
  static constexpr int kStep = 1;
  static constexpr bool kTable = Block::kFourBits && kParts<A> == 1 && sizeof(A) == 4;

  INLINE PlaceProduct(const Scales& scales, int span, int place) : span(span), place(place) {
    each<R>([&](auto r) __attribute__((always_inline)) {
      scale[r] = scales.scale(r, span, place);
      if constexpr (Block::kShifts) shift[r] = scales.shift(r, span, place);
      if constexpr (kTable) scale[r] = numbers(Vector<A>::arange(A(-Block::kOffset), A(1)), r);
    });
  }
  INLINE Vector<A> numbers(const Vector<A>& quants, int row) const {
    return Block::kShifts ? at::vec::fmadd(quants, scale[row], shift[row]) : quants * scale[row];
  }
  INLINE Place<A> weights(const Block* block, int row) const {
    Place<A> widened;
    if constexpr (kTable) {
#ifdef CPU_CAPABILITY_AVX512
      const __m512i bytes = _mm512_cvtepu8_epi32(block->raw(span, place));
      const __m512i places = Block::high(place) ? _mm512_srli_epi32(bytes, 4) : bytes;
      widened.part[0] = _mm512_permutexvar_ps(places, scale[row]);
#endif
    } else {
      const __m128i bytes = block->quants(span, place);
      each<kParts<A>>([&](auto part) __attribute__((always_inline)) {
        widened.part[part] = numbers(widen<A>(_mm_srli_si128(bytes, decltype(part)::value * kLanes<A>)), row);
      });
    }
    return widened;
  }
  static INLINE void hold(Place<A>& numbers) {
    each<kParts<A>>([&](auto part) __attribute__((always_inline)) { keep(numbers.part[part]); });
  }
  static INLINE void add(Sum& sum, const Place<A>& weights, const Place<A>& token) {
    each<kParts<A>>([&](auto part) __attribute__((always_inline)) {
      sum = at::vec::fmadd(weights.part[part], token.part[part], sum);
    });
  }
  const int span, place;
  Vector<A> scale[R], shift[R];  // of each row, or the table of its numbers in place of the scale
};

// Calls `work(product, first)` for the places of a block of R rows, the first number of which is `first`.
template <class A, int R, class Block, class Work> INLINE void each_place(const Block* const (&rows)[R], const Work& work) {
  const typename Block::template Scales<A, R> scales(rows);
  for (int span = 0; span < Block::kNumbers / Block::kSpan; ++span)
    UNROLLED for (int place = 0; place < Block::kSpan / kPlace; ++place)
      work(PlaceProduct<Block, A, R>(scales, span, place), span * Block::kSpan + place * kPlace);
}

// Writes the numbers of a block.
template <class A, class Block> INLINE void widen_block(const Block* block, A* to) {
  each_place<A, 1, Block>({block}, [&](const auto& product, int first) __attribute__((always_inline)) {
    const Place<A> numbers = product.weights(block, 0);
    each<kParts<A>>([&](auto part) __attribute__((always_inline)) {
      numbers.part[part].store(to + first + part * kLanes<A>);
    });
  });
}

// Places of tokens, `apart` numbers from one token to the next.
template <class A> struct Places {
  INLINE Place<A> at(int64_t token, int64_t) const {
    Place<A> numbers;
    each<kParts<A>>([&](auto part) __attribute__((always_inline)) {
      numbers.part[part] = Vector<A>::loadu(data + token * apart + part * kLanes<A>);
    });
    return numbers;
  }
  const A* data;
  int64_t apart;
};

constexpr int64_t kWidened = 256;  // numbers of four rows that are widened at a time, into the first-level cache

// Adds the products of widened rows and many tokens: one function for all types of blocks.
template <class A>
__attribute__((noinline)) void multiply_widened(const A (&weights)[4][kWidened], const Tokens<FloatProduct<A, A>>& tokens,
                                                int64_t count, int64_t numbers, Four<A>* sums) {
  multiply_four<FloatProduct<A, A>>({weights[0], weights[1], weights[2], weights[3]}, tokens, count, 0, numbers,
                                    [](bool, int, int64_t) {}, sums);
}

template <class Block_, class T> class GgufTokens {
 public:
  using A = SumOf<T>;
  static constexpr int kRows = 4, kHalves = 1;
  static constexpr bool far() { return true; }
  struct Scratch {
    alignas(64) A weights[4][kWidened];
  };

  GgufTokens(const T* x, int64_t tokens, int64_t k) : count(tokens), k(k), padded(x, tokens, k) {}

  void multiply(const Block<Block_, T>& block, A* sums, Scratch& scratch) const {
    auto* to = reinterpret_cast<Four<A>*>(sums);
    const Block_* const rows[4] = {block.row(0), block.row(1), block.row(2), block.row(3)};
    if (count <= kMost) return for_constant<kMost>(count, [&](auto n) { multiply_read<n>(rows, to); });
    std::fill_n(to, count, Four<A>{});
    for (int64_t begin = 0; begin < k; begin += kWidened) {
      const int64_t numbers = std::min(kWidened, k - begin);
      for (int r = 0; r < 4; ++r)
        for (int64_t at = 0; at < numbers; at += Block_::kNumbers)
          widen_block(rows[r] + (begin + at) / Block_::kNumbers, scratch.weights[r] + at);
      multiply_widened(scratch.weights, {padded.data + begin, padded.width}, count, numbers, to);
    }
  }

  const int64_t count, k;

 private:
  static constexpr int kMost = kWide ? 5 : 2;  // tokens that meet numbers as these are read

  template <int N> void multiply_read(const Block_* const (&rows)[4], Four<A>* sums) const {
    Vector<A> found[4][N];
    const A* token = padded.data;
    for (int64_t i = 0; i < k / Block_::kNumbers; ++i, token += Block_::kNumbers)
      each_place<A, 4, Block_>({rows[0] + i, rows[1] + i, rows[2] + i, rows[3] + i},
                               [&](const auto& product, int first) __attribute__((always_inline)) {
        ::multiply<PlaceProduct<Block_, A, 4>, 4, N>(rows, Places<A>{token + first, padded.width}, 0, i, i + 1,
                                                          fetch_nothing, found, product);
      });
    each<N>([&](auto t) __attribute__((always_inline)) {
      sums[t] = sums_of<A>(found[0][t], found[1][t], found[2][t], found[3][t]);
    });
  }

  const Padded<T, A> padded;
};

}  // namespace
