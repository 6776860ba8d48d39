// Products of few tokens and a matrix, where the processor multiplies tiles (AMX).
//
// One instruction multiplies 16 rows of 64 bytes of weights, read as they lie there, with 16 columns of as many bytes:
// eight times as many products in a cycle as with vectors. A pass over as many tokens as fill the columns takes as long
// as a pass over one.

#if defined(__linux__) && defined(__AMX_INT8__) && defined(__AMX_BF16__) && defined(__AVX512VNNI__)
#define AMX
#include <sys/syscall.h>
#include <unistd.h>

namespace {

constexpr int kTile = 16;         // rows of a tile, and its columns of four bytes
constexpr int kTileWidth = 64;    // bytes of a row
constexpr int kTilesAtOnce = 6;   // of tokens, multiplied with a tile of weights while that is in its register
constexpr int64_t kTileBytes = kTile * kTileWidth;
constexpr int64_t kForeseen = 12 << 10;  // bytes; what is read of longer rows the processor foresees

// Whether the operating system lets this process use tiles; it must be asked.
inline bool tiles_granted() {
  constexpr int kRequest = 0x1023, kTileData = 18;
  static const bool granted = syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
  return granted;
}

inline __m512i up_to_15() { return _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0); }

// Exchanges rows and columns: of every two rows that are `apart`, the half blocks that are off the diagonal.
template <int apart = kTile / 2> inline void transpose(__m512i (&rows)[kTile]) {
  const __m512i lanes = up_to_15(), step = _mm512_set1_epi32(apart), other = _mm512_set1_epi32(kTile - apart);
  const __mmask16 second = _mm512_test_epi32_mask(lanes, step);
  const __m512i first_half = _mm512_mask_add_epi32(lanes, second, lanes, other);
  const __m512i second_half = _mm512_mask_add_epi32(_mm512_add_epi32(lanes, step), second, lanes, _mm512_set1_epi32(kTile));
#pragma GCC unroll 16
  for (int i = 0; i < kTile; ++i) {
    if (i & apart) continue;
    const __m512i upper = rows[i], lower = rows[i + apart];
    rows[i] = _mm512_permutex2var_epi32(upper, first_half, lower);
    rows[i + apart] = _mm512_permutex2var_epi32(upper, second_half, lower);
  }
  if constexpr (apart > 1) transpose<apart / 2>(rows);
}

// A tile that is read from memory with rows and columns exchanged.
inline void load_turned(const void* from, __m512i (&rows)[kTile]) {
#pragma GCC unroll 16
  for (int r = 0; r < kTile; ++r) rows[r] = _mm512_load_si512((const int8_t*)from + r * kTileWidth);
  transpose(rows);
}

// Columns of tokens as tiles `[steps, groups, 16, 16, 4]`: a step is 64 bytes of a column, four in each row of the tile.
struct TokenTiles {
  TokenTiles(int64_t columns, int64_t bytes)
      : bytes(bytes), steps((bytes + kTileWidth - 1) / kTileWidth), groups((columns + kTile - 1) / kTile),
        data(steps * groups * kTileBytes) {}

  int8_t* at(int64_t step, int64_t group) const { return data.data + (step * groups + group) * kTileBytes; }

  // Columns are written as rows, and the tile is turned when all are there.
  void write(int64_t step, int64_t group, int64_t column, __m512i written) {
    _mm512_store_si512(at(step, group) + column * kTileWidth, written);
  }

  void turn(int64_t step, int64_t group) {
    __m512i rows[kTile];
    load_turned(at(step, group), rows);
#pragma GCC unroll 16
    for (int r = 0; r < kTile; ++r) _mm512_store_si512(at(step, group) + r * kTileWidth, rows[r]);
  }

  const int64_t bytes, steps, groups;
  const Aligned<int8_t> data;
};

// What shape a thread's registers have. gcc 12's own functions for these instructions know of the first eight bytes only.
struct alignas(64) TileShapes {
  uint8_t palette, start, reserved[14];
  uint16_t width[16];  // bytes of a row
  uint8_t rows[16];
};

// The registers of a thread, and what they are stored in. `Sum` is the type of the sums.
template <class Sum> class TileSums {
 public:
  explicit TileSums(int64_t) {
    asm volatile("sttilecfg %0" : "=m"(before));
    const TileShapes shapes = {1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
    asm volatile("ldtilecfg %0" ::"m"(shapes));
  }
  TileSums(const TileSums&) = delete;
  ~TileSums() {
    if (before.palette) asm volatile("ldtilecfg %0" ::"m"(before));
    else _tile_release();
  }

  alignas(64) Sum of[kTilesAtOnce][kTile][kTile];
  alignas(64) int8_t weights[kTileBytes];  // a tile that is not whole where it lies

 private:
  TileShapes before;  // other libraries set theirs once for each thread
};

// From a tile of weights to the one that is fetched meanwhile, in bytes: the next one of the same columns, or itself.
inline int64_t fetched_ahead(int64_t row_bytes) { return row_bytes > kForeseen ? 0 : kTile * row_bytes; }

// Rows of `width` bytes as the beginning of 16 rows of `to_row` bytes each, which are zero elsewhere.
inline void copy_part(void* to, int64_t to_row, const void* from, int64_t from_row, int64_t rows, int64_t width) {
  std::memset(to, 0, kTile * to_row);
  for (int64_t r = 0; r < rows; ++r) std::memcpy((int8_t*)to + r * to_row, (const int8_t*)from + r * from_row, width);
}

// Instructions name their registers by constants: what N of them do, and with the sums in `sums.of`.
#define EACH_TILE(of) of(0) of(1) of(2) of(3) of(4) of(5)
#define START_TILE(t) if constexpr (t < N) _tile_zero(t);
#define STORE_TILE(t) if constexpr (t < N) _tile_stored(t, sums.of[t], kTileWidth);

// The products of `rows` rows of weights, up to 16, and N groups of columns from `first` on, to `sums.of`.
template <int N, class Sum>
void multiply_tiles(const int8_t* weights, int64_t rows, const TokenTiles& x, int64_t first, TileSums<Sum>& sums) {
#define ADD(t) if constexpr (t < N) {                                        \
    _tile_loadd(7, x.at(step, first + t), kTileWidth);                      \
    if constexpr (std::is_same_v<Sum, int32_t>) _tile_dpbssd(t, 6, 7);      \
    else _tile_dpbf16ps(t, 6, 7);                                            \
  }
  const int64_t ahead = fetched_ahead(x.bytes);
  EACH_TILE(START_TILE)
  for (int64_t step = 0; step < x.steps; ++step) {
    const int8_t* from = weights + step * kTileWidth;
    const int64_t width = std::min<int64_t>(kTileWidth, x.bytes - step * kTileWidth);
    if (__builtin_expect(rows == kTile && width == kTileWidth, 1)) {
      _tile_loadd(6, from, x.bytes);
    } else {
      copy_part(sums.weights, kTileWidth, from, x.bytes, rows, width);
      asm volatile("" ::: "memory");  // it is written before it is read
      _tile_loadd(6, sums.weights, kTileWidth);
    }
#pragma GCC unroll 16
    for (int r = 0; r < kTile; ++r) __builtin_prefetch(from + ahead + r * x.bytes, 0, kReadAgain);
    EACH_TILE(ADD)
  }
  EACH_TILE(STORE_TILE)
#undef ADD
}

// Calls `take(group, sums)` with the products of `rows` rows of weights and each group of columns, `[16, 16]`.
template <class Sum, class Take>
void tile_products(const int8_t* weights, int64_t rows, const TokenTiles& x, TileSums<Sum>& sums, Take take) {
  for (int64_t group = 0; group < x.groups; group += kTilesAtOnce) {
    const int64_t count = std::min<int64_t>(kTilesAtOnce, x.groups - group);
    switch (count) {
      case 1: multiply_tiles<1>(weights, rows, x, group, sums); break;
      case 2: multiply_tiles<2>(weights, rows, x, group, sums); break;
      case 3: multiply_tiles<3>(weights, rows, x, group, sums); break;
      case 4: multiply_tiles<4>(weights, rows, x, group, sums); break;
      case 5: multiply_tiles<5>(weights, rows, x, group, sums); break;
      case 6: multiply_tiles<6>(weights, rows, x, group, sums); break;
    }
    for (int64_t g = 0; g < count; ++g) take(group + g, sums.of[g]);
  }
}

inline __mmask16 first_lanes(int64_t count) { return (1u << std::clamp<int64_t>(count, 0, kTile)) - 1; }

// Up to 16 numbers, widened.
template <class T> inline __m512 load_some(const T* from, int64_t count) {
  const __mmask16 given = first_lanes(count);
  if constexpr (std::is_same_v<T, float>) return _mm512_maskz_loadu_ps(given, from);
  const __m256i narrow = _mm256_maskz_loadu_epi16(given, from);
  if constexpr (std::is_same_v<T, Half>) return _mm512_cvtph_ps(narrow);
  return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16);
}

// The first numbers of a vector, each as `narrow` rounds it.
template <class T> inline void store_some(T* to, int64_t count, __m512 numbers) {
  const __mmask16 given = first_lanes(count);
  if constexpr (std::is_same_v<T, float>) return _mm512_mask_storeu_ps(to, given, numbers);
  __m256i narrow;
  if constexpr (std::is_same_v<T, Half>) {
    narrow = _mm512_cvtps_ph(numbers, _MM_FROUND_TO_NEAREST_INT);
  } else {
    const __m512i bits = (__m512i)numbers, last = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), last);
    const __mmask16 none = _mm512_cmp_ps_mask(numbers, numbers, _CMP_UNORD_Q);
    narrow = _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(_mm512_srli_epi32(rounded, 16), none, _mm512_set1_epi32(0x7fc0)));
  }
  _mm256_mask_storeu_epi16(to, given, narrow);
}

// `put(column, sums)` for the first columns of `[16, 16]`.
template <class Put> void put_columns(const float (&sums)[kTile][kTile], int64_t columns, Put put) {
  __m512i turned[kTile];
  load_turned(sums, turned);
#pragma GCC unroll 16
  for (int c = 0; c < kTile; ++c)
    if (c < columns) put(c, (__m512)turned[c]);
}

}  // namespace
#endif
