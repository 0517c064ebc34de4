// A dense family's part in a product: tiles over a strip, or over its chunks for many rows.
#pragma once

#include <array>
#include <utility>

#include "../bf16_matrix.h"
#include "../bf16_tiles.h"
#include "../dense_tiles.h"
#include "../product.h"
#include "ops.h"

namespace engine_cpu {
namespace ENGINE_ISA {

static_assert(kDenseChunk * kStrip * sizeof(float) <= Scratch::kChunkBytes, "a chunk fits");

// One function for each number of rows: kDenseTiles[rows - 1], kBf16Tiles[rows - 1].
template <class Dense, class Ahead>
using DenseTile = decltype(&tile_dense<Dense, 1, Ahead>);
template <class Ahead>
using Bf16Tile = decltype(&tile_bf16<1, Ahead>);

template <class Dense, class Ahead, int... kRows>
constexpr std::array<DenseTile<Dense, Ahead>, sizeof...(kRows)> dense_tiles(std::integer_sequence<int, kRows...>) {
  return {tile_dense<Dense, kRows + 1, Ahead>...};
}
template <class Ahead, int... kRows>
constexpr std::array<Bf16Tile<Ahead>, sizeof...(kRows)> bf16_tiles(std::integer_sequence<int, kRows...>) {
  return {tile_bf16<kRows + 1, Ahead>...};
}

template <class Dense, class Ahead>
constexpr auto kDenseTiles = dense_tiles<Dense, Ahead>(std::make_integer_sequence<int, kTileRows>());
template <class Ahead>
constexpr auto kBf16Tiles = bf16_tiles<Ahead>(std::make_integer_sequence<int, kTileRows>());

template <class Dense>
int64_t dense_strip_bytes(int64_t depth) {
  return (depth + Dense::kPerUnit - 1) / Dense::kPerUnit * Dense::kUnitBytes;
}

constexpr int64_t kWidenTiles = 2;  // with more tiles it pays to widen a chunk once and store it

template <class Dense, class Finish>
void multiply_dense_strip(int64_t rows, const uint8_t* strip, int64_t depth, const Scratch& s, const Finish& finish) {
  constexpr int64_t kChunkBytes = kDenseChunk / Dense::kPerUnit * Dense::kUnitBytes;
  using Share = HalfAhead<kChunkBytes, kDenseChunk / Dense::kPerUnit>;
  using WideShare = HalfAhead<kChunkBytes, kDenseChunk>;
  const int64_t tiles = tiles_of(rows, kTileRows);
  const int64_t chunk = tiles == 1 ? depth : kDenseChunk;
  const bool widen = tiles > kWidenTiles;
  for (int64_t k = 0; k < depth; k += chunk, strip += kChunkBytes) {
    const int64_t size = depth - k < chunk ? depth - k : chunk;
    if (widen) widen_chunk<Dense>(strip, size, reinterpret_cast<float*>(s.chunk()));
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t first = tile_start(rows, tiles, t);
      const int64_t count = tile_start(rows, tiles, t + 1) - first;
      const float* x[kTileRows];
      for (int64_t i = 0; i < count; ++i) x[i] = reinterpret_cast<const float*>(s.rows()[first + i]) + k;
      float* const acc = s.acc() + first * kStrip;
      const uint8_t* const ahead = strip + kChunkBytes + t * (kChunkBytes / 2);
      if (tiles == 1)
        kDenseTiles<Dense, SoonAhead>[count - 1](strip, x, size, k == 0, {dense_distance(count)}, acc);
      else if (!widen)
        kDenseTiles<Dense, Share>[count - 1](strip, x, size, k == 0, {ahead}, acc);
      else if (t < 2)
        kDenseTiles<DenseF32, WideShare>[count - 1](s.chunk(), x, size, k == 0, {ahead}, acc);
      else
        kDenseTiles<DenseF32, NoneAhead>[count - 1](s.chunk(), x, size, k == 0, {}, acc);
      if (k + size == depth) finish(first, count);
    }
  }
}

template <class Dense>
void multiply_dense(const Product& product, int64_t row0, int64_t rows, int64_t strip0, int64_t strip1,
                    const Scratch& scratch) {
  const int64_t bytes = dense_strip_bytes<Dense>(product.depth);
  for (int64_t strip = strip0; strip < strip1; ++strip) {
    multiply_dense_strip<Dense>(rows, product.matrix + strip * bytes, product.depth, scratch,
                                finishing(product, row0, strip, scratch));
  }
}

#if !defined(ENGINE_MATRIX_UNIT)
constexpr int64_t kBf16Chunk = 256;  // k whose weights stay in the first-level cache

template <class Finish>
void multiply_bf16_strip(int64_t rows, const uint8_t* strip, int64_t depth, const Scratch& s, const Finish& finish) {
  constexpr int64_t kChunkBytes = kBf16Chunk / 2 * kPairBytes;
  using Share = HalfAhead<kChunkBytes, kBf16Chunk / 2>;
  const int64_t tiles = tiles_of(rows, kTileRows);
  const int64_t chunk = tiles == 1 ? depth : kBf16Chunk;
  for (int64_t k = 0; k < depth; k += chunk, strip += kChunkBytes) {
    const int64_t size = depth - k < chunk ? depth - k : chunk;
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t first = tile_start(rows, tiles, t);
      const int64_t count = tile_start(rows, tiles, t + 1) - first;
      const uint8_t* x[kTileRows];
      for (int64_t i = 0; i < count; ++i) x[i] = s.rows()[first + i] + 2 * k;
      float* const acc = s.acc() + first * kStrip;
      if (tiles == 1)
        kBf16Tiles<SoonAhead>[count - 1](strip, x, size, k == 0, {dense_distance(count)}, acc);
      else if (t < 2)
        kBf16Tiles<Share>[count - 1](strip, x, size, k == 0, {strip + kChunkBytes + t * (kChunkBytes / 2)}, acc);
      else
        kBf16Tiles<NoneAhead>[count - 1](strip, x, size, k == 0, {}, acc);
      if (k + size == depth) finish(first, count);
    }
  }
}

inline void multiply_bf16(const Product& product, int64_t row0, int64_t rows, int64_t strip0, int64_t strip1,
                          const Scratch& scratch) {
  const int64_t bytes = bf16_strip_bytes(product.depth);
  for (int64_t strip = strip0; strip < strip1; ++strip) {
    multiply_bf16_strip(rows, product.matrix + strip * bytes, product.depth, scratch, finishing(product, row0, strip, scratch));
  }
}
#endif

template <class Dense>
constexpr FamilyOps kDenseOps{point_to_rows, multiply_dense<Dense>, dense_strip_bytes<Dense>, Activation::f32};

}  // namespace ENGINE_ISA
}  // namespace engine_cpu
