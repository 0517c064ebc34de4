// The bf16 product by the matrix unit (AMX): tdpbf16ps multiplies 16 rows with 16 columns over 32 k, whatever the number of
// rows, so that a row's bits never depend on the others'.
#pragma once

#include "bf16_tiles.h"
#include "product.h"
#include "../tile_registers.h"

#if defined(ENGINE_MATRIX_UNIT)

namespace engine_cpu {
namespace ENGINE_ISA {

constexpr int64_t kTileSide = 16, kTileDepth = 32, kTileBytes = kTileSide * kPairBytes;  // of a strip, for a tile's depth
// k of a strip that stay in the first-level cache while all rows pass; of 16 rows alone, which need not share them, more.
constexpr int64_t kMatrixChunk = 192, kFewRowsChunk = 1024;
static_assert(kTileSide * kFewRowsChunk * 2 <= Scratch::kChunkBytes, "the rows' chunk fits");

// bf16 rows as tiles are loaded from them.
struct TileRows {
  const uint8_t* first;
  int64_t pitch;  // bytes from row to row
};

// k.. of `count` rows, where they lie if whole tiles can be loaded from there, or copied to `copy`, ended by zeros.
inline TileRows tile_rows(const uint8_t* const* rows, int64_t count, int64_t k, int64_t size, uint8_t* copy) {
  const int64_t pitch = count > 1 ? rows[1] - rows[0] : 0;
  bool whole = count % kTileSide == 0 && size % kTileDepth == 0;
  for (int64_t r = 2; r < count && whole; ++r) whole = rows[r] - rows[r - 1] == pitch;
  if (whole) return {rows[0] + 2 * k, pitch};
  const int64_t bytes = (size + kTileDepth - 1) / kTileDepth * kTileDepth * 2;
  for (int64_t r = 0; r < count; ++r) {
    std::memcpy(copy + r * bytes, rows[r] + 2 * k, 2 * size);
    std::memset(copy + r * bytes + 2 * size, 0, bytes - 2 * size);
  }
  return {copy, bytes};
}

// A panel's part of a later tile, in the order in which tiles are loaded: front to back took a fifth longer.
ENGINE_INLINE void prefetch_panel(const uint8_t* weights) {
  for (int i = 0; i < kTileSide; ++i) __builtin_prefetch(weights + 2 * dense_distance(kTileSide) + i * kPairBytes, 0, 2);
}

// acc [16][64] += the product of 16 rows with `steps` times 32 k, or = where kFirst. kFew: there are no more rows, and the
// weights come from memory, later ones of the strip next; else those that are `ahead` are asked for.
template <bool kFirst, bool kFew>
void multiply_tile(const uint8_t* weights, TileRows x, int64_t steps, StreamAhead& ahead, float* acc) {
  if constexpr (kFirst) {
    tile_zero<0>();
    tile_zero<1>();
    tile_zero<2>();
    tile_zero<3>();
  } else {
    tile_load<0>(acc, 4 * kStrip);
    tile_load<1>(acc + 16, 4 * kStrip);
    tile_load<2>(acc + 32, 4 * kStrip);
    tile_load<3>(acc + 48, 4 * kStrip);
  }
  constexpr int kNext = kFew ? 5 : 6, kLast = kFew ? 5 : 7;  // one register for all panels that come from memory is 3 % faster
  for (int64_t i = 0; i < steps; ++i, weights += kTileBytes) {
    tile_load<4>(x.first + 64 * i, x.pitch);
    if constexpr (kFew) prefetch_panel(weights);
    tile_load<5>(weights, kPairBytes);
    tile_dot_bf16<0, 4, 5>();
    if constexpr (kFew) prefetch_panel(weights + 64);
    tile_load<kNext>(weights + 64, kPairBytes);
    tile_dot_bf16<1, 4, kNext>();
    if constexpr (kFew) prefetch_panel(weights + 128);
    tile_load<kLast>(weights + 128, kPairBytes);
    tile_dot_bf16<2, 4, kLast>();
    if constexpr (kFew) prefetch_panel(weights + 192);
    tile_load<5>(weights + 192, kPairBytes);
    tile_dot_bf16<3, 4, 5>();
    if constexpr (!kFew) ahead.next();
  }
  tile_store<0>(acc, 4 * kStrip);
  tile_store<1>(acc + 16, 4 * kStrip);
  tile_store<2>(acc + 32, 4 * kStrip);
  tile_store<3>(acc + 48, 4 * kStrip);
}

// k0.. of the strip, from `weights` on, for all rows. `next`: the weights that will be multiplied after these.
template <bool kFirst>
void multiply_chunk(int64_t rows, const uint8_t* weights, const uint8_t* next, int64_t k0, int64_t size, const Scratch& s) {
  const int64_t steps = (size + kTileDepth - 1) / kTileDepth, tiles = (rows + kTileSide - 1) / kTileSide;
  const auto multiply = tiles == 1 ? multiply_tile<kFirst, true> : multiply_tile<kFirst, false>;
  StreamAhead ahead{next, (kTileBytes / tiles + 63) / 64 * 64};
  for (int64_t r = 0; r < rows; r += kTileSide) {
    const int64_t count = rows - r < kTileSide ? rows - r : kTileSide;
    multiply(weights, tile_rows(s.rows() + r, count, k0, size, s.chunk()), steps, ahead, s.acc() + r * kStrip);
  }
}

// acc [rows, to whole tiles][64] = the strip's product. The rows after the last are of no use and no harm. `following`: the
// strip after this one.
inline void multiply_bf16_strip(int64_t rows, const uint8_t* strip, const uint8_t* following, int64_t depth,
                                const Scratch& s) {
  const int64_t chunk = rows <= kTileSide ? kFewRowsChunk : kMatrixChunk;
  for (int64_t k = 0; k < depth; k += chunk) {
    const uint8_t* const weights = strip + k / 2 * kPairBytes;
    const bool last = k + chunk >= depth;
    const auto multiply = k == 0 ? multiply_chunk<true> : multiply_chunk<false>;
    multiply(rows, weights, last ? following : weights + chunk / 2 * kPairBytes, k, last ? depth - k : chunk, s);
  }
}

inline void multiply_bf16(const Product& product, int64_t row0, int64_t rows, int64_t strip0, int64_t strip1,
                          const Scratch& scratch) {
  const TileRegisters registers({{16, 64}, {16, 64}, {16, 64}, {16, 64}, {16, 64}, {16, 64}, {16, 64}, {16, 64}});
  const int64_t bytes = bf16_strip_bytes(product.depth);
  for (int64_t strip = strip0; strip < strip1; ++strip) {
    const uint8_t* const weights = product.matrix + strip * bytes;
    multiply_bf16_strip(rows, weights, product.following(strip, strip + 1 == strip1, bytes), product.depth, scratch);
    finish_rows(product, row0, rows, strip, scratch.acc());
  }
}

}  // namespace ENGINE_ISA
}  // namespace engine_cpu

#endif
