// The inner products of attention: a tile of query rows against the keys, and the values, of one cache chunk.
//
// Both are C[row][lane] = sum over k of A[row][k] * B[k][lane], k in ascending order with one fma a step, so a row's
// bits do not depend on which rows or lanes share its tile. Scores: lanes are 16 tokens, k runs over the head's
// dimensions. Values: lanes are 16 dimensions, k runs over tokens.
#pragma once

#include <type_traits>

#include "../simd_storage.h"

namespace engine_cpu {
namespace ENGINE_ISA {

constexpr int kChunk = 256;    // tokens whose softmax is computed on its own, cut at multiples of it
constexpr int kTileRows = 12;  // (token, query head) rows that share every key and value load,
constexpr int kMostTileRows = 16;  // and those that a tile has room for
constexpr int kBlockTiles = 16;  // tiles that take a chunk's keys and values one after another, from the nearest cache
constexpr int kBlockRows = 32;   // and so many rows, if they are of several heads: two a head
constexpr int kPanelTiles = 7;   // so many share them in f32: fewer take less time to widen what they read than that takes

// Rows whose sums fit in registers together; more are computed in halves.
constexpr int kRowsInRegisters = kWideRegisters >= 32 ? kTileRows : kWideRegisters >= 8 ? 6 : 2;

// Vectors side by side for R rows: enough accumulators to hide the latency, few enough for the registers.
template <int R>
constexpr int kVectors = kWideRegisters >= 32  ? (R <= 2 ? 8 : R <= 6 ? 4 : 2)
                         : kWideRegisters >= 8 ? (R <= 1 ? 4 : R <= 2 ? 2 : 1)
                                               : (R <= 1 ? 2 : 1);

// Tiles of keys side by side, each a stream of its own from memory: few of them come a little faster.
template <int R>
constexpr int kKeyTiles = kVectors<R> < 4 ? kVectors<R> : 4;

// The rows that a tile of `rows` is computed with.
constexpr int padded_rows(int rows) { return rows <= 2 ? rows : rows <= 8 ? (rows + 1) / 2 * 2 : kTileRows; }

// Calls f with them as a constant.
template <class F>
ENGINE_INLINE void with_rows(int rows, F f) {
  switch (padded_rows(rows)) {
    case 1:
      return f(std::integral_constant<int, 1>{});
    case 2:
      return f(std::integral_constant<int, 2>{});
    case 4:
      return f(std::integral_constant<int, 4>{});
    case 6:
      return f(std::integral_constant<int, 6>{});
    case 8:
      return f(std::integral_constant<int, 8>{});
    default:
      return f(std::integral_constant<int, kTileRows>{});
  }
}

template <class T>
ENGINE_INLINE f32x16 load_part(const T* source, int64_t count) {
  T whole[16] = {};
  std::memcpy(whole, source, count * sizeof(T));
  return load(whole);
}

// Lane j of a[i] and lane i of a[j] change places.
template <class V>
ENGINE_INLINE void transpose(V (&a)[16]) {
  V b[16];
  // Four times the halves in turn bring row i, column j to row j, column i.
#pragma GCC unroll 2
  for (int round = 0; round < 2; ++round) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) zip(a[i], a[i + 8], b[2 * i], b[2 * i + 1]);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) zip(b[i], b[i + 8], a[2 * i], a[2 * i + 1]);
  }
}

// 16 rows of `dim` elements, one after another, as a tile [dim][16].
template <class T>
void transpose_rows(const T* rows, int64_t dim, T* tile) {
  using V = std::conditional_t<sizeof(T) == 4, u32x16, std::conditional_t<sizeof(T) == 2, u16x16, u8x16>>;
  int64_t d = 0;
  for (; d + 16 <= dim; d += 16) {
    V a[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) a[i] = load_as<V>(rows + i * dim + d);
    transpose(a);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) std::memcpy(tile + (d + i) * 16, &a[i], sizeof(V));
  }
  for (; d < dim; ++d)
    for (int i = 0; i < 16; ++i) tile[d * 16 + i] = rows[i * dim + d];
}

// Query rows times `scale` as [dim][padded]. May write up to 15 numbers beyond.
ENGINE_INLINE void transpose_queries(const float* const (&rows)[16], int padded, int64_t dim, float scale, float* q) {
  int64_t d = 0;
  for (; padded > 2 && d + 16 <= dim; d += 16) {
    f32x16 a[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) a[i] = load(rows[i] + d) * scale;
    transpose(a);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) store(q + (d + i) * padded, a[i]);  // the next ones overwrite what is too much
  }
  for (; d < dim; ++d)
    for (int r = 0; r < padded; ++r) q[d * padded + r] = rows[r][d] * scale;
}

// scores[row * kChunk + 16 j + lane] = q[.][row] . key of the token at `lane` of tile j; tiles are [dim][16], and q is
// [dim][Q], R of its Q rows from where it points.
// ahead[j] (as many bytes as a tile; null for none) is asked for meanwhile: the blocks of a sequence are scattered, so
// the hardware does not foresee them.
template <int R, int N, int Q, bool kAhead, class T>
void tile_scores(const float* q, const T* const* tiles, const T* const* ahead, int64_t dim, float* scores) {
  if constexpr (R > kRowsInRegisters) {
    tile_scores<R / 2, N, Q, kAhead>(q, tiles, ahead, dim, scores);
    return tile_scores<R - R / 2, N, Q, kAhead>(q + R / 2, tiles, ahead, dim, scores + R / 2 * kChunk);
  }
  constexpr int64_t kStep = kAhead ? 4 / sizeof(T) : R * N > 4 ? 1 : 4;  // dimensions: of a cache line of a tile, or a few
  f32x16 sum[R][N] = {};
  const auto step = [&](int64_t first, int64_t d) __attribute__((always_inline)) {
    f32x16 key[N];
#pragma GCC unroll 16
    for (int j = 0; j < N; ++j) key[j] = load(tiles[j] + 16 * first + 16 * d);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const f32x16 a = splat(q[first * Q + d * Q + r]);
#pragma GCC unroll 16
      for (int j = 0; j < N; ++j) sum[r][j] = fma(a, key[j], sum[r][j]);
    }
  };
  int64_t first = 0;
  for (; first + kStep <= dim; first += kStep) {
    if constexpr (kAhead) {
#pragma GCC unroll 16
      for (int j = 0; j < N; ++j) __builtin_prefetch(ahead[j] + 16 * first, 0, 2);
    }
#pragma GCC unroll 4
    for (int64_t d = 0; d < kStep; ++d) step(first, d);
  }
  for (; first < dim; ++first) step(first, 0);
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int j = 0; j < N; ++j) store(scores + r * kChunk + 16 * j, sum[r][j]);
}

// Tokens of a chunk, relative to its start.
struct Span {
  int32_t begin, end;
};

// Where the values of a chunk are read: in a panel, in pages while others are asked for, or in pages that lie in order.
enum class ValuesIn { kPanel, kScattered, kInOrder };

// What the value product of one chunk reads: the values where they are stored, or a panel of them (T is float then).
template <class T>
struct ValueChunk {
  const T* const* pages;  // the head's values in each block of the chunk, [block_size][stride]
  const T* const* ahead;  // a page to be prefetched for each of them
  const float* panel;     // or, if not null, [dim / n][kChunk][n] with n = 16 N, or 16 for what is left of dim
  int32_t block_shift;    // log2(block_size)
  int64_t stride;         // from token to token,
  int64_t dim;            // of which so many dimensions are the value
  const float* weights;   // [row][kChunk], zero or garbage outside a row's span
  const Span* spans;      // a row's tokens
  Span all;               // the tokens of any row
  Span shared;            // the tokens of every row (may be empty)
  bool onward;            // `out` holds the sums of the tokens before these
};

// out[row][d .. d + 16 N) = sum over the row's tokens of weight * value. Tokens outside a row's span do not touch it,
// whatever they hold. kPart: the last `part` dimensions only (N = 1).
template <int R, int N, ValuesIn kIn, bool kPart, class T>
void tile_values(const ValueChunk<T>& chunk, int64_t d, int64_t part, float* out, int64_t out_stride) {
  if constexpr (R > kRowsInRegisters) {
    ValueChunk<T> rest = chunk;
    rest.weights += R / 2 * kChunk;
    rest.spans += R / 2;
    tile_values<R / 2, N, kIn, kPart>(chunk, d, part, out, out_stride);
    return tile_values<R - R / 2, N, kIn, kPart>(rest, d, part, out + R / 2 * out_stride, out_stride);
  }
  f32x16 sum[R][N] = {};
  if (chunk.onward)
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
      for (int j = 0; j < N; ++j) sum[r][j] = load(out + r * out_stride + d + 16 * j);
  const auto step = [&](int32_t t, const T* source, auto masked) __attribute__((always_inline)) {
    f32x16 value[N];
#pragma GCC unroll 16
    for (int j = 0; j < N; ++j) value[j] = kPart ? load_part(source, part) : load(source + 16 * j);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      if (decltype(masked)::value && (t < chunk.spans[r].begin || t >= chunk.spans[r].end)) continue;
      const f32x16 a = splat(chunk.weights[r * kChunk + t]);
#pragma GCC unroll 16
      for (int j = 0; j < N; ++j) sum[r][j] = fma(a, value[j], sum[r][j]);
    }
  };
  const auto run = [&](int32_t begin, int32_t end, auto masked) __attribute__((always_inline)) {
    if constexpr (kIn == ValuesIn::kPanel) {
      for (int32_t t = begin; t < end; ++t) step(t, chunk.panel + d * kChunk + t * (16 * N), masked);
      return;
    }
    const int32_t mask = (1 << chunk.block_shift) - 1;
    for (int32_t t = begin; t < end;) {
      const int32_t stop = (t | mask) + 1 < end ? (t | mask) + 1 : end;
      const int64_t offset = (t & mask) * chunk.stride + d;
      const T* source = chunk.pages[t >> chunk.block_shift] + offset;
      if constexpr (kIn == ValuesIn::kInOrder) {
        for (; t < stop; ++t, source += chunk.stride) step(t, source, masked);
        continue;
      }
      const T* next = chunk.ahead[t >> chunk.block_shift] + offset;
      for (; t < stop; ++t, source += chunk.stride, next += chunk.stride) {
        constexpr size_t kBytes = 16 * N * sizeof(T);
        for (size_t i = 0; i < kBytes; i += 64)  // each line once, though a step may be less than one
          if (kBytes >= 64 || reinterpret_cast<uintptr_t>(next) % 64 < kBytes)
            __builtin_prefetch(reinterpret_cast<const char*>(next) + i, 0, 2);
        step(t, source, masked);
      }
    }
  };
  if (chunk.shared.begin < chunk.shared.end) {
    run(chunk.all.begin, chunk.shared.begin, std::true_type{});
    run(chunk.shared.begin, chunk.shared.end, std::false_type{});
    run(chunk.shared.end, chunk.all.end, std::true_type{});
  } else {
    run(chunk.all.begin, chunk.all.end, std::true_type{});
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int j = 0; j < N; ++j) store(out + r * out_stride + d + 16 * j, sum[r][j]);
}

// All dimensions from d on, in blocks of N vectors and then of fewer. The rows of `out` and of a panel are padded to 16.
template <int R, int N, ValuesIn kIn, class T>
ENGINE_INLINE void all_values(const ValueChunk<T>& chunk, int64_t d, float* out, int64_t out_stride) {
  for (; d + 16 * N <= chunk.dim; d += 16 * N) tile_values<R, N, kIn, false>(chunk, d, 0, out, out_stride);
  if constexpr (N > 1)
    all_values<R, N / 2, kIn>(chunk, d, out, out_stride);
  else if constexpr (kIn != ValuesIn::kPanel)
    if (d < chunk.dim) tile_values<R, 1, kIn, true>(chunk, d, chunk.dim - d, out, out_stride);
}

// Values of one token, `dim` of them, into a panel of `width` (dim padded to 16) as ValueChunk describes it.
template <int N, class T>
ENGINE_INLINE void widen_value(const T* value, int64_t dim, int64_t width, int32_t t, float* panel) {
  for (int64_t d = 0; d < width; d += 16) {
    const int64_t group = d / (16 * N) * (16 * N);
    const bool whole = group + 16 * N <= width;
    float* target = whole ? panel + group * kChunk + t * (16 * N) + (d - group) : panel + d * kChunk + t * 16;
    store(target, d + 16 <= dim ? load(value + d) : load_part(value + d, dim - d));
  }
}

}  // namespace ENGINE_ISA
}  // namespace engine_cpu
