// A quantized family's part in a product: one pass over a strip for few rows, tiles over its chunks for more.
#pragma once

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "../int8_matrix.h"
#include "../product.h"
#include "../tiles.h"
#include "ops.h"

namespace engine_cpu {
namespace ENGINE_ISA {

// Unpacking has units of its own on Zen 4; on Intel's cores it takes the two that multiply.
#if defined(ENGINE_MATRIX_UNIT)
constexpr bool kUnpackingIsWork = true;
#else
constexpr bool kUnpackingIsWork = false;
#endif

// Up to kOnePassRows rows memory is what takes the time, the longer the more bytes a weight has; more are divided into tiles of
// at most kTileRows, at least kLeastTileRows. Up to kDirectRows read the weights as they are packed, where to store them takes
// longer than to unpack them a tile.
template <class Packed>
constexpr int kOnePassRows = kWideRegisters < 32 || kUnpackingIsWork ? kFewRows
                             : Packed::kGroupSize == 16              ? 4
                             : kIsBytes<Packed>                     ? 8
                                                                     : 6;
constexpr int64_t kDirectRows = kWideRegisters >= 32 && !kUnpackingIsWork ? 32 : kFewRows;
constexpr int kLeastTileRows = kTileRows / 2;
static_assert(sizeof(Chunk<16, true, 15, kLongSpan>) <= Scratch::kChunkBytes &&
                  sizeof(Chunk<32, true, 255, kGroup>) <= Scratch::kChunkBytes,
              "a chunk fits");

// One function for each number of rows: kOnePass[rows - 1], kTiles[rows - kLeastTileRows].
template <class Packed>
using OnePass = decltype(&multiply_in_one_pass<Packed, 1>);
template <class Source>
using Tile = decltype(&add_groups<Source, 1>);

template <class Packed, int... kRows>
constexpr std::array<OnePass<Packed>, sizeof...(kRows)> one_passes(std::integer_sequence<int, kRows...>) {
  return {multiply_in_one_pass<Packed, kRows + 1>...};
}
template <class Source, int... kRows>
constexpr std::array<Tile<Source>, sizeof...(kRows)> tiles(std::integer_sequence<int, kRows...>) {
  return {add_groups<Source, kRows + kLeastTileRows>...};
}

template <class Packed>
constexpr auto kOnePass = one_passes<Packed>(std::make_integer_sequence<int, kOnePassRows<Packed>>());
template <class Source>
constexpr auto kTiles = tiles<Source>(std::make_integer_sequence<int, kTileRows - kLeastTileRows + 1>());

template <class Packed>
void prepare_quantized(const Product& product, int64_t row0, int64_t rows, const Scratch& scratch) {
  point_to_rows(product, row0, rows, scratch);
#if defined(ENGINE_MATRIX_UNIT)
  if (suits_matrix<Packed>(rows, product.depth)) return lay_out_cells<Packed>(rows, product.depth, scratch);
#endif
  for (int64_t i = 0; i < rows; i += kTogether)
    factor_rows<Packed>(scratch.rows(), product.depth, i, std::min(kTogether, rows - i), rows, scratch.factors());
}

// A chunk of a strip, `size` k from k on, to the sums of all rows, which `done` hears of a tile at a time. The tiles share in
// fetching the chunk at `next`, in whole lines a group.
template <class Packed, class Source, class Done>
void add_chunk(const Source& source, int64_t k, int64_t size, int64_t rows, int64_t depth, const uint8_t* next, const Scratch& s,
               const Done& done) {
  constexpr int64_t kNext = kChunk / Packed::kUnit * Packed::kUnitBytes;
  const int64_t tiles = tiles_of(rows, kTileRows);
  const int64_t steps = size / Packed::kGroupSize * (4 / kPassPanels);
  const int64_t step = (kNext / (tiles * steps) + 63) / 64 * 64;
  for (int64_t t = 0; t < tiles; ++t) {
    const int64_t first = tile_start(rows, tiles, t), count = tile_start(rows, tiles, t + 1) - first;
    const int64_t fetched = t * steps * step;
    const auto add = kTiles<Source>[count - kLeastTileRows];
    add(source, k, size, s.rows() + first, depth, s.factors() + first, rows,
        StreamAhead{next + fetched, fetched < kNext ? step : 0}, s.acc() + first * kStrip);
    done(first, count);
  }
}

// The rows' sums with the strip at `strip`, which `finish` is given as they become whole.
template <class Packed, class Finish>
void multiply_packed_strip(int64_t rows, const uint8_t* strip, const uint8_t* next_strip, int64_t depth, const Scratch& s,
                           const Finish& finish) {
  if (rows <= kOnePassRows<Packed>) {
    kOnePass<Packed>[rows - 1](strip, depth, s.rows(), s.factors(), s.acc());
    return finish(0, rows);
  }
  auto& chunk = *reinterpret_cast<ChunkOf<Packed>*>(s.chunk());
  for (int64_t k = 0; k < depth; k += kChunk) {
    const int64_t size = depth - k < kChunk ? depth - k : kChunk;
    const bool last = k + size == depth;
    const auto done = [&](int64_t first, int64_t count) {
      if (last) finish(first, count);
    };
    const uint8_t* const after = strip + size / Packed::kUnit * Packed::kUnitBytes;
    const uint8_t* const next = last ? next_strip : after;
    const uint8_t* const packed = std::exchange(strip, after);
    if constexpr (kDirectRows > kOnePassRows<Packed>) {
      if (rows <= kDirectRows) {
        add_chunk<Packed>(Units<Packed>(packed), k, size, rows, depth, next, s, done);
        continue;
      }
    }
    unpack_chunk<Packed>(packed, size, chunk);
    add_chunk<Packed>(chunk, k, size, rows, depth, next, s, done);
  }
}

template <class Packed>
void multiply_quantized(const Product& product, int64_t row0, int64_t rows, int64_t strip0, int64_t strip1,
                        const Scratch& scratch) {
#if defined(ENGINE_MATRIX_UNIT)
  if (suits_matrix<Packed>(rows, product.depth)) return multiply_matrix<Packed>(product, row0, rows, strip0, strip1, scratch);
#endif
  const int64_t bytes = product.depth / Packed::kUnit * Packed::kUnitBytes;
  for (int64_t strip = strip0; strip < strip1; ++strip) {
    multiply_packed_strip<Packed>(rows, product.matrix + strip * bytes, product.following(strip, strip + 1 == strip1, bytes),
                                  product.depth, scratch, finishing(product, row0, strip, scratch));
  }
}

template <class Packed>
int64_t packed_strip_bytes(int64_t depth) {
  return depth / Packed::kUnit * Packed::kUnitBytes;
}

template <class Packed>
constexpr FamilyOps kQuantizedOps{prepare_quantized<Packed>, multiply_quantized<Packed>, packed_strip_bytes<Packed>,
                                      Activation::q8g32, kSpanOf<Packed>};

}  // namespace ENGINE_ISA
}  // namespace engine_cpu
