// A block: some rows of weights and some columns of tokens, multiplied together. Each weight is read once for all columns.
//
// A `Product` defines how they are multiplied: the type `Stored` of the weights in memory, how many of a row an instruction
// reads (`kStep`), loading these to a register (`weights(from, row)`), and adding products to a vector of sums (`Sum`,
// `add(sum, weights, column)`). `Columns` are the tokens in the form that the product reads: `at(column, i)`.

#pragma once

#include "vectors.h"

namespace {

// Calls `work(first, size, last)` for groups of about equal size, of at most `most`.
template <class Work> INLINE void for_groups(int64_t count, int64_t most, const Work& work) {
  const int64_t groups = (count + most - 1) / most;
  for (int64_t group = 0, first = 0, size; group < groups; ++group, first += size) {
    size = (count - first + groups - group - 1) / (groups - group);
    work(first, size, group == groups - 1);
  }
}

template <class S, int R, int N>
__attribute__((noinline)) void copy_last(const S* const (&rows)[R], int64_t at, int64_t count, S (&to)[R][N]) {
  std::memset(to, 0, sizeof to);
  for (int r = 0; r < R; ++r) std::copy_n(rows[r] + at, count, to[r]);
}

// Adds the products of R rows and N columns from `first` on, over the numbers from `begin` to `end`, to their sums.
// Meanwhile `fetch(r, i)` may prefetch memory.
template <class Product, int R, int N, class Columns, class Fetch>
INLINE void multiply(const typename Product::Stored* const (&rows)[R], const Columns& columns, int64_t first,
                     int64_t begin, int64_t end, const Fetch& fetch, typename Product::Sum (&sums)[R][N], const Product& product = {}) {
  constexpr int kStep = Product::kStep;
  const auto add = [&](int64_t i, const auto& row) __attribute__((always_inline)) {
    typename Product::Column column[N];
    typename Product::Weights weights[R];
    const auto take_column = [&](auto t) __attribute__((always_inline)) {
      column[t] = columns.at(first + t, i);
      Product::hold(column[t]);
    };
    const auto take_weights = [&](auto r) __attribute__((always_inline)) {
      fetch(r, i);
      weights[r] = product.weights(row(r), r);
      Product::hold(weights[r]);
    };
    // The side with fewer vectors stays in registers.
    if constexpr (N <= R) {
      each<N>(take_column);
      each<R>([&](auto r) __attribute__((always_inline)) {
        take_weights(r);
        each<N>([&](auto t) __attribute__((always_inline)) { Product::add(sums[r][t], weights[r], column[t]); });
      });
    } else {
      each<R>(take_weights);
      each<N>([&](auto t) __attribute__((always_inline)) {
        take_column(t);
        each<R>([&](auto r) __attribute__((always_inline)) { Product::add(sums[r][t], weights[r], column[t]); });
      });
    }
  };
  // An incomplete last step is copied first, since a call would spill the sums from their registers.
  typename Product::Stored last[R][kStep];
  const int64_t whole = end - (end - begin) % kStep;
  if (whole < end) copy_last(rows, whole, end - whole, last);
  for (int64_t i = begin; i < whole; i += kStep)
    add(i, [&](auto r) __attribute__((always_inline)) { return rows[r] + i; });
  if (whole < end) add(whole, [&](auto r) __attribute__((always_inline)) { return last[r]; });
}

constexpr auto fetch_nothing = [](int, int64_t) {};

}  // namespace
