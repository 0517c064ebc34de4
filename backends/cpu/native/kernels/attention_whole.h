// The inner products of attention over a cache of int8 or int16, in whole numbers: queries and softmax weights have 16 bits each,
// keys and values the numbers that are stored, and the sums 32 bits. They are exact in any order, so a row's bits do not
// depend on which rows or lanes share its tile.
//
// That no sum leaves 32 bits is seen to where queries and weights are rounded. With numbers up to `most` in a key, its root of a sum of
// squares is no more than most sqrt(dim), so a query's must be no more than 2^31 over that (Cauchy and Schwarz); with numbers up to `most`
// in values, the sum of a row's weights no more than 2^31 / most. Rounding adds half to each number.
//
// Products come in pairs, so keys lie as [dim / 2][16 tokens][2] and values as [tokens / 2][dim][2]; where many tiles
// share a chunk they are widened once, to i16 panels of the same order.
#pragma once

#include <algorithm>

#include <cmath>

#include "attention_tile.h"
#include "dot_pairs.h"
#include "kv_layout.h"

namespace engine_cpu {
namespace ENGINE_ISA {

constexpr float kMostRounded = 32767;  // the largest number of a query, and of a softmax weight

// How much a query's numbers may be together, as the root of the sum of their squares, and a row's weights in a chunk, as their sum.
struct WholeBounds {
  float query, weights;

  explicit WholeBounds(const KvLayout& layout)
      : query(static_cast<float>(INT32_MAX / (layout.most() * std::sqrt(layout.dim)) - std::sqrt(layout.dim))),
        weights(static_cast<float>(INT32_MAX / layout.most() - kChunk)) {}
};

// Scales and their inverses, of 16 rows: of numbers up to `largest`, which come to `together`, both in bounds. Not finite, or
// nothing, where `together` is not.
struct WholeScales {
  f32x16 scale, inverse;

  ENGINE_INLINE WholeScales(f32x16 largest, f32x16 together, float bound)
      : scale(max(largest / kMostRounded, together / bound)),
        inverse(min(inverse_steps(largest, kMostRounded), inverse_steps(together, bound))) {}

 private:
  static ENGINE_INLINE f32x16 inverse_steps(f32x16 most, float whole) { return select(most > 1e-30f, whole / most, f32x16{}); }
};

// x times `factor` as whole numbers times the scale that is given back, which is NaN where x is not finite.
ENGINE_INLINE float quantize_pairs(const float* x, int64_t count, float factor, float bound, int16_t* q) {
  f32x16 top{}, squares{};
  int64_t i = 0;
  const auto see = [&](f32x16 v) __attribute__((always_inline)) {
    top = max(abs(v), top);
    squares = fma(v, v, squares);
  };
  for (; i + 16 <= count; i += 16) see(load(x + i) * factor);
  if (i < count) see(load_first(x + i, count - i) * factor);
  const float sum = reduce_add(squares);
  const WholeScales whole(splat(reduce_max(top)), splat(std::sqrt(sum)), bound);
  const auto rounded = [&](f32x16 v) __attribute__((always_inline)) {
    return narrow_u16(bit_cast<u32x16>(round_i32(v * factor * whole.inverse)));
  };
  for (i = 0; i + 32 <= count; i += 32) {
    const u16x16 two[2] = {rounded(load(x + i)), rounded(load(x + i + 16))};
    std::memcpy(q + i, two, 64);  // at once, as they are read
  }
  for (; i < count; i += 16) {
    const u16x16 bits = rounded(load_first(x + i, count - i < 16 ? count - i : 16));
    std::memcpy(q + i, &bits, 32);  // up to 15 numbers more, all zero
  }
  return whole.scale[0] + sum * 0.0f;
}

// Query rows times `factor` as i32 [dim / 2][padded], each a pair, with a scale a row. `room`: i16 [16][dim padded to
// 16]. May write up to 15 pairs beyond.
ENGINE_INLINE void transpose_query_pairs(const float* const (&rows)[16], int padded, int64_t dim, float factor, float bound,
                                         int16_t* room, int32_t* q, float* scales) {
  const int64_t width = (dim + 15) / 16 * 16, pairs = dim / 2;
  for (int r = 0; r < padded; ++r) scales[r] = quantize_pairs(rows[r], dim, factor, bound, room + r * width);
  const auto pair = [&](int r, int64_t k) { return room + r * width + 2 * k; };
  int64_t k = 0;
  for (; padded > 2 && k + 16 <= pairs; k += 16) {
    i32x16 a[16];
#pragma GCC unroll 16
    for (int r = 0; r < 16; ++r) a[r] = load_as<i32x16>(pair(r < padded ? r : 0, k));
    transpose(a);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) store(q + (k + i) * padded, a[i]);  // the next ones overwrite what is too much
  }
  for (; k < pairs; ++k)
    for (int r = 0; r < padded; ++r) q[k * padded + r] = load_as<int32_t>(pair(r, k));
}

template <class T>
constexpr int kLineOf = 64 / sizeof(T);  // numbers of a cache line

// scores[row * kChunk + 16 j + lane] = q[.][row] . key of the token at `lane` of tile j; the rest as in tile_scores.
template <int R, int N, int Q, bool kAhead, class T>
void tile_score_pairs(const int32_t* q, const T* const* tiles, const T* const* ahead, int64_t pairs, int32_t* scores) {
  if constexpr (R > kRowsInRegisters) {
    tile_score_pairs<R / 2, N, Q, kAhead>(q, tiles, ahead, pairs, scores);
    return tile_score_pairs<R - R / 2, N, Q, kAhead>(q + R / 2, tiles, ahead, pairs, scores + R / 2 * kChunk);
  }
  constexpr int kSums = R * N > 4 ? 1 : 2;  // few would wait for each other
  i32x16 sum[kSums][R][N] = {};
  const auto step = [&](int64_t first, int k) __attribute__((always_inline)) {
    i32x16 key[N];
#pragma GCC unroll 16
    for (int j = 0; j < N; ++j) key[j] = load_pairs(tiles[j] + 32 * first + 32 * k);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const i32x16 a = splat_i32(q[first * Q + k * Q + r]);
#pragma GCC unroll 16
      for (int j = 0; j < N; ++j) sum[k % kSums][r][j] = dot_pairs(sum[k % kSums][r][j], a, key[j]);
    }
  };
  int64_t first = 0;
  for (; first + 2 <= pairs; first += 2) {  // a cache line of a tile of bytes, two of wider numbers
    if constexpr (kAhead) {
#pragma GCC unroll 16
      for (int j = 0; j < N; ++j)
#pragma GCC unroll 2
        for (int i = 0; i < 64; i += kLineOf<T>) __builtin_prefetch(ahead[j] + 32 * first + i, 0, 2);
    }
#pragma GCC unroll 2
    for (int k = 0; k < 2; ++k) step(first, k);
  }
  if (first < pairs) step(first, 0);
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int j = 0; j < N; ++j) {
      if constexpr (kSums == 2)  // may wrap, as within dot_pairs
        sum[0][r][j] = bit_cast<i32x16>(bit_cast<u32x16>(sum[0][r][j]) + bit_cast<u32x16>(sum[1][r][j]));
      store(scores + r * kChunk + 16 * j, sum[0][r][j]);
    }
}

// A row's rounded softmax weights, [row][kChunk] for products with T. Zeros fill whole steps.
template <class T>
struct RoundedRow {
  static constexpr int kStep = 16;
  int16_t* weights;
  RoundedRow(int16_t* rounded, int row) : weights(rounded + row * kChunk) {}
  ENGINE_INLINE void put(int32_t t, i32x16 whole) const { store(weights + t, narrow_u16(bit_cast<u32x16>(whole))); }
};

// What the value product of one chunk reads: the values where they are stored, or a panel of them (T = int16_t).
template <class T>
struct ValuePairs {
  const T* const* pages;   // the head's values in each block of the chunk, [block_size / 2][dim][2]
  const T* const* ahead;   // a page to be prefetched for each of them
  const T* panel;          // or, if not null, [dim / 16][kChunk / 2][16][2]
  int32_t block_shift;     // log2(block_size)
  int64_t dim;
  const int16_t* weights;  // [row][kChunk], zero outside a row's span and within `all`
  const float* scales;     // of the weights of each row
  Span all;                // the tokens of any row
  bool onward;             // `out` holds the whole sums of the tokens before these,
  bool last;               // and is to hold those of these, too, unless no others come
};

// out[row][d .. d + 16 N) = sum over the row's tokens of weight * value. kPart: the last `part` dimensions only (N = 1).
template <int R, int N, ValuesIn kIn, bool kPart, class T>
void tile_value_pairs(const ValuePairs<T>& chunk, int64_t d, int64_t part, float* out, int64_t out_stride) {
  if constexpr (R > kRowsInRegisters) {
    ValuePairs<T> rest = chunk;
    rest.weights += R / 2 * kChunk;
    rest.scales += R / 2;
    tile_value_pairs<R / 2, N, kIn, kPart>(chunk, d, part, out, out_stride);
    return tile_value_pairs<R - R / 2, N, kIn, kPart>(rest, d, part, out + R / 2 * out_stride, out_stride);
  }
  constexpr int64_t kBeside = kIn == ValuesIn::kPanel ? 16 * kChunk : 32;  // from a vector's values to those of the next dimensions
  i32x16 sum[R][N] = {};
  if (chunk.onward)
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
      for (int j = 0; j < N; ++j) sum[r][j] = load_as<i32x16>(out + r * out_stride + d + 16 * j);
  const auto step = [&](int32_t u, const T* source) __attribute__((always_inline)) {
    i32x16 value[N];
    if constexpr (kPart) {
      T whole[32] = {};
      std::memcpy(whole, source, 2 * part * sizeof(T));
      value[0] = load_pairs(whole);
    } else {
#pragma GCC unroll 16
      for (int j = 0; j < N; ++j) value[j] = load_pairs(source + kBeside * j);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const i32x16 a = splat_i32(load_as<int32_t>(chunk.weights + r * kChunk + 2 * u));
#pragma GCC unroll 16
      for (int j = 0; j < N; ++j) sum[r][j] = dot_pairs(sum[r][j], a, value[j]);
    }
  };
  const int32_t end = (chunk.all.end + 1) / 2;
  if constexpr (kIn == ValuesIn::kPanel) {
    for (int32_t u = chunk.all.begin / 2; u < end; ++u) step(u, chunk.panel + d * kChunk + 32 * u);
  } else {
    const int32_t shift = chunk.block_shift - 1, mask = (1 << shift) - 1;
    const int64_t stride = 2 * chunk.dim;
    for (int32_t u = chunk.all.begin / 2; u < end;) {
      const int32_t stop = std::min((u | mask) + 1, end);
      const int64_t offset = (u & mask) * stride + 2 * d;
      const T* source = chunk.pages[u >> shift] + offset;
      if constexpr (kIn == ValuesIn::kInOrder) {
        for (; u < stop; ++u, source += stride) step(u, source);
        continue;
      }
      const T* next = chunk.ahead[u >> shift] + offset;
      for (; u < stop; ++u, source += stride, next += stride) {
        for (int i = 0; i < 32 * N; i += kLineOf<T>)  // each line once, though a step may be less than one
          if (32 * N >= kLineOf<T> || reinterpret_cast<uintptr_t>(next) % 64 < 32) __builtin_prefetch(next + i, 0, 2);
        step(u, source);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int j = 0; j < N; ++j) {
      float* const target = out + r * out_stride + d + 16 * j;
      if (chunk.last)
        store(target, to_f32(sum[r][j]) * chunk.scales[r]);
      else
        store(target, bit_cast<f32x16>(sum[r][j]));
    }
}

// All dimensions from d on, in blocks of N vectors and then of fewer. The rows of `out` and of a panel are padded to 16.
template <int R, int N, ValuesIn kIn, class T>
ENGINE_INLINE void all_value_pairs(const ValuePairs<T>& chunk, int64_t d, float* out, int64_t out_stride) {
  for (; d + 16 * N <= chunk.dim; d += 16 * N) tile_value_pairs<R, N, kIn, false>(chunk, d, 0, out, out_stride);
  if constexpr (N > 1)
    all_value_pairs<R, N / 2, kIn>(chunk, d, out, out_stride);
  else if constexpr (kIn != ValuesIn::kPanel)
    if (d < chunk.dim) tile_value_pairs<R, 1, kIn, true>(chunk, d, chunk.dim - d, out, out_stride);
}

// A tile of keys, `pairs` dimension pairs of 16 tokens, in 16 bits.
template <class T>
ENGINE_INLINE void widen_key_pairs(const T* tile, int64_t pairs, int16_t* panel) {
  for (int64_t k = 0; k < pairs; ++k) store(panel + 32 * k, load_pairs(tile + 32 * k));
}

// The values of tokens 2 u and 2 u + 1 of a chunk, [dim][2] as they are stored, into a panel as ValuePairs has it.
template <class T>
ENGINE_INLINE void widen_value_pairs(const T* values, int64_t dim, int32_t u, int16_t* panel) {
  int64_t d = 0;
  for (; d + 16 <= dim; d += 16) store(panel + d * kChunk + 32 * u, load_pairs(values + 2 * d));
  if (d == dim) return;
  T rest[32] = {};
  std::memcpy(rest, values + 2 * d, 2 * (dim - d) * sizeof(T));
  store(panel + d * kChunk + 32 * u, load_pairs(rest));
}

// The same of two rows [dim].
template <class T>
ENGINE_INLINE void widen_value_rows(const T* even, const T* odd, int64_t dim, int32_t u, int16_t* panel) {
  using V = std::conditional_t<sizeof(T) == 1, u8x16, u16x16>;
  for (int64_t d = 0; d < dim; d += 16) {
    V rows[2] = {}, pairs[2];
    const int64_t bytes = std::min<int64_t>(dim - d, 16) * sizeof(T);
    std::memcpy(&rows[0], even + d, bytes);
    std::memcpy(&rows[1], odd + d, bytes);
    zip(rows[0], rows[1], pairs[0], pairs[1]);
    store(panel + d * kChunk + 32 * u, load_pairs(reinterpret_cast<const T*>(pairs)));
  }
}

}  // namespace ENGINE_ISA
}  // namespace engine_cpu
