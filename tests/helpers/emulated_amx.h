// Tiles in software, for processors that multiply none: what TileRegisters of kernels/amx.h has.

#pragma once

#include <c10/util/BFloat16.h>

#include <cstdint>
#include <cstring>

#define EMULATED_AMX

namespace {

inline bool tiles_granted() { return true; }

struct TileRegisters {
  template <int tile> static void zero() { std::memset(registers[tile], 0, sizeof registers[tile]); }
  template <int tile> static void load(const void* from, int64_t apart) {
    for (int r = 0; r < 16; ++r) std::memcpy(registers[tile] + 64 * r, static_cast<const char*>(from) + r * apart, 64);
  }
  template <int tile> static void store(void* to) { std::memcpy(to, registers[tile], sizeof registers[tile]); }
  template <int sums, int weights, int tokens> static void add(int32_t) { add_all<sums, weights, tokens, int32_t, int8_t>(); }
  template <int sums, int weights, int tokens> static void add(float) {
    add_all<sums, weights, tokens, float, c10::BFloat16>();
  }

 private:
  template <int sums, int weights, int tokens, class Sum, class Number> static void add_all() {
    constexpr int n = 4 / sizeof(Number);
    auto* sum = reinterpret_cast<Sum*>(registers[sums]);
    const auto* w = reinterpret_cast<const Number*>(registers[weights]);
    const auto* x = reinterpret_cast<const Number*>(registers[tokens]);
    for (int r = 0; r < 16; ++r)
      for (int k = 0; k < 16; ++k)
        for (int c = 0; c < 16; ++c)
          for (int i = 0; i < n; ++i)
            sum[16 * r + c] += Sum(w[n * (16 * r + k) + i]) * Sum(x[n * (16 * k + c) + i]);
  }
  alignas(64) static thread_local unsigned char registers[8][1024];
};
alignas(64) thread_local unsigned char TileRegisters::registers[8][1024];

}  // namespace
