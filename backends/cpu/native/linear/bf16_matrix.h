// The bf16 product by the matrix unit (AMX): tdpbf16ps multiplies 16 rows with 16 columns over 32 k, whatever the number of
// rows, so that a row's bits never depend on the others'.
#pragma once

#include "bf16_tiles.h"
#include "product.h"
#include "../tile_registers.h"

#if defined(__AMX_BF16__)

namespace engine_cpu {
namespace ENGINE_ISA {

constexpr int64_t kTileSide = 16, kTileDepth = 32, kTileBytes = kTileSide * kPairBytes;  // of a strip, for a tile's depth
constexpr int64_t kMatrixRows = 2 * kTileSide;                                           // that share the weights in registers
// k of these rows, or of two panels, that stay in the first-level cache; of 16 rows alone twice as many.
constexpr int64_t kMatrixChunk = 512;
static_assert(kMatrixRows * kMatrixChunk * 2 <= Scratch::kChunkBytes, "the rows' chunk fits");

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
  asm volatile("" ::: "memory");  // for g++ 12 a load of a tile reads no memory
  return {copy, bytes};
}

// A panel's part of a later tile, in the order in which tiles are loaded: front to back took a fifth longer.
ENGINE_INLINE void prefetch_panel(const uint8_t* weights) {
  for (int i = 0; i < kTileSide; ++i) __builtin_prefetch(weights + 2 * kPrefetchDistance + i * kPairBytes, 0, 2);
}

// Where a product of whole tiles goes: what is there is added to, or replaced where kFirst.
template <bool kFirst>
ENGINE_INLINE void begin_sums(const float* s0, const float* s1, const float* s2, const float* s3) {
  if constexpr (kFirst) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, s0, 4 * kStrip);
    _tile_loadd(1, s1, 4 * kStrip);
    _tile_loadd(2, s2, 4 * kStrip);
    _tile_loadd(3, s3, 4 * kStrip);
  }
}
ENGINE_INLINE void end_sums(float* s0, float* s1, float* s2, float* s3) {
  _tile_stored(0, s0, 4 * kStrip);
  _tile_stored(1, s1, 4 * kStrip);
  _tile_stored(2, s2, 4 * kStrip);
  _tile_stored(3, s3, 4 * kStrip);
}

// 16 rows: acc [16][64] and `steps` times 32 k. The weights come from memory.
template <bool kFirst>
void multiply_tile(const uint8_t* weights, TileRows x, int64_t steps, float* acc) {
  begin_sums<kFirst>(acc, acc + 16, acc + 32, acc + 48);
  for (int64_t i = 0; i < steps; ++i, weights += kTileBytes) {
    _tile_loadd(4, x.first + 64 * i, x.pitch);
    prefetch_panel(weights);
    _tile_loadd(5, weights, kPairBytes);
    _tile_dpbf16ps(0, 4, 5);
    prefetch_panel(weights + 64);
    _tile_loadd(5, weights + 64, kPairBytes);
    _tile_dpbf16ps(1, 4, 5);
    prefetch_panel(weights + 128);
    _tile_loadd(5, weights + 128, kPairBytes);
    _tile_dpbf16ps(2, 4, 5);
    prefetch_panel(weights + 192);
    _tile_loadd(5, weights + 192, kPairBytes);
    _tile_dpbf16ps(3, 4, 5);
  }
  end_sums(acc, acc + 16, acc + 32, acc + 48);
}

// The same for 32 rows, two panels at a time. `ahead`: the weights come from memory.
template <bool kFirst>
void multiply_two_tiles(const uint8_t* weights, TileRows x, int64_t steps, bool ahead, float* acc) {
  const uint8_t* const x1 = x.first + kTileSide * x.pitch;
  for (int panel = 0; panel < 4; panel += 2, weights += 128, acc += 32) {
    float* const below = acc + kTileSide * kStrip;
    begin_sums<kFirst>(acc, acc + 16, below, below + 16);
    const uint8_t* w = weights;
    for (int64_t i = 0; i < steps; ++i, w += kTileBytes) {
      if (ahead) prefetch_panel(w);
      _tile_loadd(4, x.first + 64 * i, x.pitch);
      _tile_loadd(6, w, kPairBytes);
      _tile_loadd(7, w + 64, kPairBytes);
      _tile_dpbf16ps(0, 4, 6);
      if (ahead) prefetch_panel(w + 64);
      _tile_loadd(5, x1 + 64 * i, x.pitch);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    end_sums(acc, acc + 16, below, below + 16);
  }
}

// k0.. of the strip, from `weights` on, for all rows.
template <bool kFirst>
void multiply_chunk(int64_t rows, const uint8_t* weights, int64_t k0, int64_t size, const Scratch& s) {
  const int64_t steps = (size + kTileDepth - 1) / kTileDepth;
  for (int64_t r = 0; r < rows; r += kMatrixRows) {
    const int64_t count = rows - r < kMatrixRows ? rows - r : kMatrixRows;
    const TileRows x = tile_rows(s.rows() + r, count, k0, size, s.chunk());
    if (count <= kTileSide)
      multiply_tile<kFirst>(weights, x, steps, s.acc() + r * kStrip);
    else
      multiply_two_tiles<kFirst>(weights, x, steps, r == 0, s.acc() + r * kStrip);
  }
}

// acc [rows, to whole tiles][64] = the strip's product. The rows after the last are of no use and no harm.
inline void multiply_bf16_strip(int64_t rows, const uint8_t* strip, int64_t depth, const Scratch& s) {
  const int64_t chunk = rows <= kTileSide ? 2 * kMatrixChunk : kMatrixChunk;
  multiply_chunk<true>(rows, strip, 0, depth < chunk ? depth : chunk, s);
  for (int64_t k = chunk; k < depth; k += chunk)
    multiply_chunk<false>(rows, strip + k / 2 * kPairBytes, k, depth - k < chunk ? depth - k : chunk, s);
}

inline void multiply_bf16(const Product& product, int64_t row0, int64_t rows, int64_t strip0, int64_t strip1,
                          const Scratch& scratch) {
  const TileRegisters registers({{16, 64}, {16, 64}, {16, 64}, {16, 64}, {16, 64}, {16, 64}, {16, 64}, {16, 64}});
  const int64_t bytes = bf16_strip_bytes(product.depth);
  for (int64_t strip = strip0; strip < strip1; ++strip) {
    multiply_bf16_strip(rows, product.matrix + strip * bytes, product.depth, scratch);
    finish_strip(product, row0, rows, strip, scratch.acc());
  }
}

}  // namespace ENGINE_ISA
}  // namespace engine_cpu

#endif
