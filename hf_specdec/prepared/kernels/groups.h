// Products of few tokens and a matrix of int8 or int4 with a scale for each group of columns. Weights are widened as they
// are read or, for many tokens, before.

#pragma once

#include "floats.h"
#include "layers.h"

namespace {

// Four rows in some columns of one group: a number q stands for scale · q − shift. A byte of int4, which is unsigned, holds
// numbers of two rows; the low bits hold those of the first two.
template <int bits, class A> struct GroupProduct {
  using Stored = int8_t;
  using Weights = Vector<A>;
  using Column = Vector<A>;
  using Sum = Vector<A>;
  static constexpr int kStep = kLanes<A>;
  template <class Row> INLINE Vector<A> weights(const int8_t* from, Row r) const {
    return at::vec::fmsub(widen<A>(from, bits == 8 ? kByte : r < 2 ? kLowBits : kHighBits), scale[r], shift[r]);
  }
  static INLINE void hold(Vector<A>& vector) { keep(vector); }
  static INLINE void add(Sum& sum, const Weights& weights, const Column& token) {
    sum = at::vec::fmadd(weights, token, sum);
  }
  Vector<A> scale[4], shift[4];
};

template <int bits, class T> class GroupedTokens {
 public:
  using A = SumOf<T>;
  static constexpr int kHalves = 8 / bits;
  static constexpr int kRows = 4 / kHalves;  // of bytes
  static constexpr bool far() { return true; }
  static constexpr int64_t kStrip = 256;  // columns that are widened at a time for many tokens, to fit the first-level cache
  struct Scratch {
    alignas(64) A weights[4][kStrip];
  };

  GroupedTokens(const A* x, int64_t tokens, int64_t k) : count(tokens), k(k), padded(x, tokens, k, kLanes<A>) {}

  void multiply(const Block<int8_t, T>& block, A* sums, Scratch& scratch) const {
    auto* to = reinterpret_cast<Four<A>*>(sums);
    std::fill_n(to, count, Four<A>{});
    const int8_t* const rows[4] = {block.row(0), block.row(1 % kRows), block.row(2 % kRows), block.row(3 % kRows)};
    const int64_t width = block.layer.k / block.layer.groups;
    if (count <= kTokens && width % kLanes<A> == 0)
      for_constant<kTokens>(count, [&](auto n) { multiply_read<n>(block, rows, width, to); });
    else
      multiply_widened(block, rows, width, scratch, to);
  }

  const int64_t count, k;

 private:
  using Product = GroupProduct<bits, A>;

  // The scales and shifts of four rows.
  struct Scales {
    explicit Scales(const Block<int8_t, T>& block) {
      for (int r = 0; r < 4; ++r) {
        const int64_t row = block.index(r % kRows) + r / kRows * block.layer.rows;
        scale[r] = block.layer.scales + row * block.layer.groups;
        shift[r] = block.layer.shifts + row * block.layer.groups;
      }
    }
    INLINE Product product(int64_t group) const {
      Product product;
      each<4>([&](auto r) __attribute__((always_inline)) {
        product.scale[r] = Vector<A>(scale[r][group]);
        product.shift[r] = Vector<A>(shift[r][group]);
      });
      return product;
    }
    const A *scale[4], *shift[4];
  };

  template <int N>
  void multiply_read(const Block<int8_t, T>& block, const int8_t* const (&rows)[4], int64_t width, Four<A>* sums) const {
    const Scales scales(block);
    Vector<A> found[4][N];
    for (int64_t group = 0; group < block.layer.groups; ++group)
      ::multiply<Product, 4, N>(rows, Tokens<FloatProduct<A, A>>{padded.data, padded.width}, 0, group * width,
                                (group + 1) * width, fetch_nothing, found, scales.product(group));
    each<N>([&](auto t) __attribute__((always_inline)) {
      sums[t] = sums_of<A>(found[0][t], found[1][t], found[2][t], found[3][t]);
    });
  }

  void multiply_widened(const Block<int8_t, T>& block, const int8_t* const (&rows)[4], int64_t width, Scratch& scratch,
                        Four<A>* sums) const {
    const A* const widened[4] = {scratch.weights[0], scratch.weights[1], scratch.weights[2], scratch.weights[3]};
    const Scales scales(block);
    for (int64_t begin = 0; begin < k; begin += kStrip) {
      const int64_t end = std::min(begin + kStrip, k);
      for (int64_t i = begin, stop; i < end; i = stop) {
        const Product product = scales.product(i / width);
        stop = std::min(end, (i / width + 1) * width);
        each<4>([&](auto r) __attribute__((always_inline)) {
          int64_t at = i;
          for (; at + kLanes<A> <= stop; at += kLanes<A>)
            product.weights(rows[r] + at, r).store(scratch.weights[r] + at - begin);
          int8_t last[kLanes<A>] = {};
          std::copy_n(rows[r] + at, stop - at, last);
          product.weights(last, r).store(scratch.weights[r] + at - begin, stop - at);
        });
      }
      multiply_four<FloatProduct<A, A>>(widened, {padded.data + begin, padded.width}, count, 0, end - begin,
                                        [](bool, int, int64_t) {}, sums);
    }
  }

  const Padded<A, A> padded;
};

}  // namespace
