// Layers of one input, whose rows are distributed over threads.
//
// A class defines how tokens are multiplied: created from the tokens `[count, k]`, it has the number of rows that it reads
// at a time (`kRows`), whether these should be far apart (`far()`), the number of outputs per row (`kHalves`), a thread's
// memory (`Scratch`), and `multiply(block, sums, scratch)`, which writes `[count, kHalves, kRows]`.

#pragma once

#include <cmath>
#include <span>
#include <vector>

#include "blocks.h"

namespace {

constexpr int64_t kMostTokens = 64;   // multiplied together, so that their data stays in the caches
constexpr int64_t kSerial = 1 << 15;  // multiplications that are faster than waking the other threads

// The number of a row's numbers in one S.
template <class S> constexpr int64_t numbers_in() {
  if constexpr (requires { S::kNumbers; }) return S::kNumbers;
  else return 1;
}

// A matrix `[rows, k]` stored as S, and its outputs: products are scaled by row, if it has scales, and added to a bias.
template <class S, class T> struct Layer {
  using A = SumOf<T>;

  // Writes the outputs of `count` of R rows from `first` on, `apart` rows from one to the next, by sums `[tokens, width]`.
  template <int R>
  INLINE void put(int64_t first, int64_t apart, int64_t count, const A* sums, int64_t width, int64_t tokens) const {
    const auto factor = [&](int64_t row) { return scales && !shifts ? scales[row] : A(1); };
    const auto added = [&](int64_t row) { return bias ? A(bias[row]) : A(0); };
    const auto result = [&](A sum, A factor, A added) { return T(std::fma(sum, factor, added)); };  // rounded once
    if (apart != 1 || count < R) {
      for (int64_t r = 0, row = first; r < count; ++r, row += apart) {
        const A by = factor(row), and_then = added(row);
        for (int64_t t = 0; t < tokens; ++t) output[t * outputs + row] = result(sums[t * width + r], by, and_then);
      }
      return;
    }
    A by[R], and_then[R];
    for (int r = 0; r < R; ++r) by[r] = factor(first + r), and_then[r] = added(first + r);
    for (int64_t t = 0; t < tokens; ++t)
      for (int r = 0; r < R; ++r) output[t * outputs + first + r] = result(sums[t * width + r], by[r], and_then[r]);
  }

  const S* weight;
  int64_t rows, k;
  const T* bias;
  T* output;
  int64_t outputs;  // per token: the rows, or twice as many if a byte holds numbers of two rows
  const A* scales = nullptr;
  const A* shifts = nullptr;  // if given, a number q stands for scale · q − shift, both `[outputs, groups]`
  int64_t groups = 1;
};

// Some rows of a layer, `apart` rows from one to the next.
template <class S, class T> struct Block {
  int64_t index(int64_t r) const { return first + std::min(r, count - 1) * apart; }  // the last one stands for missing ones
  const S* row(int64_t r) const { return layer.weight + index(r) * (layer.k / numbers_in<S>()); }
  const Layer<S, T>& layer;
  int64_t first, apart, count;
};

// Not a template of the number of layers, which would be compiled for each.
template <class S, class T, class X> void multiply_layers(std::span<const Layer<S, T>> layers, const X& x) {
  constexpr int kRows = X::kRows, kWidth = kRows * X::kHalves;
  int64_t work = 0;
  for (const auto& layer : layers) work += layer.outputs * layer.k * x.count;
#pragma omp parallel if (work > kSerial)
  {
    typename X::Scratch scratch;
    const Aligned<typename X::A> sums(x.count * kWidth);
    for (const auto& layer : layers) {
      const int64_t least = (layer.rows + kRows - 1) / kRows;
      // Rows whose addresses end alike would share sets of the cache.
      const bool alike = least * (layer.k / numbers_in<S>()) * int64_t(sizeof(S)) % 4096 == 0;
      const int64_t apart = x.far() ? least + alike : 1, blocks = x.far() ? std::min(apart, layer.rows) : least;
      // Large parts first, which are read steadily, and small ones last, so that no thread waits long for another.
#pragma omp for schedule(guided, 4) nowait
      for (int64_t at = 0; at < blocks; ++at) {
        const int64_t first = x.far() ? at : at * kRows;
        const int64_t count = std::min<int64_t>(kRows, (layer.rows - first + apart - 1) / apart);
        x.multiply(Block<S, T>{layer, first, apart, count}, sums.data, scratch);
        for (int half = 0; half < X::kHalves; ++half)
          layer.template put<kRows>(first + half * layer.rows, apart, count, sums.data + half * kRows, kWidth, x.count);
      }
    }
  }
}

}  // namespace
