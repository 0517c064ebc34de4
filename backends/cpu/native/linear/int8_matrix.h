// The quantized product of many rows through the matrix unit (AMX): tiles.h's arithmetic, its integer sums in tile registers.
//
// While tile instructions are in flight, and for some 300 cycles after, one of the core's two units for fma is closed to zmm
// registers (Sapphire Rapids). So the float sums, one or two fma a group, row and 16 columns, are what takes the time; the
// integer sums of the next part of the product are made beside them.
#pragma once

#include <algorithm>
#include <cstring>
#include <utility>

#include "product.h"
#include "../tile_registers.h"
#include "tiles.h"

#if defined(ENGINE_MATRIX_UNIT)

namespace engine_cpu {
namespace ENGINE_ISA {

constexpr int kCellRows = 16;         // of a tile
constexpr int kMatrixPart = 4;          // groups of k of a part,
constexpr int kPartSums = 4 * 2 * 256;  // and its integer sums: groups x 2 panels x 16 rows x 16 columns
static_assert(2 * kPartSums * sizeof(int32_t) == Scratch::kSumsBytes);

// Fewer rows go through vpdpbusd, and so do depths that are no whole parts.
template <class Packed>
constexpr int64_t kLeastMatrixRows = Packed::kGroupSize == 16 ? 48 : 40;
template <class Packed>
ENGINE_INLINE bool suits_matrix(int64_t rows, int64_t depth) {
  return rows >= kLeastMatrixRows<Packed> && depth % (kMatrixPart * Packed::kGroupSize) == 0;
}

// A cell, 16 rows x 32 k of the activations: int8 [16][32], f32 rescale[16] (RowFactors), and with minimums f32 -sum[16] for each
// group. A tile's cells follow each other in k.
template <class Packed>
constexpr int64_t kCellBytes = kCellRows * (32 + 4 + (Packed::kMinimums ? 4 * 32 / Packed::kGroupSize : 0));
static_assert(kCellBytes<W2K> == Scratch::kMostCellBytes);

// Rows are as equal in the tiles as can be; those that are missing are zeros.
struct MatrixTiles {
  int64_t tiles, rows;  // rows: of a tile, 14 or 16, since there are at least 40

  explicit MatrixTiles(int64_t count) : tiles((count + kCellRows - 1) / kCellRows), rows((count + 2 * tiles - 1) / (2 * tiles) * 2) {}
};

template <class Packed>
void lay_out_cell(const uint8_t* row, int64_t depth, const RowUnits& units, int64_t group, uint8_t* cell, int64_t at) {
  constexpr int kFactors = Packed::kMinimums ? 32 / Packed::kGroupSize : 0;
  float* const floats = reinterpret_cast<float*>(cell + kCellRows * 32) + at;
  std::memcpy(cell + 32 * at, row + 32 * group, 32);
  floats[0] = 32 * group % kSpanOf<Packed> == 0 ? units.begin(group) : 1.0f;
  for (int i = 0; i < kFactors; ++i)
    floats[(1 + i) * kCellRows] = static_cast<float>(group_sum<Packed>(q8g32_sums(row, depth), group * kFactors + i));
}

template <class Packed>
void lay_out_cells(int64_t count, int64_t depth, const Scratch& s) {
  const MatrixTiles shape(count);
  const int64_t groups = depth / 32;
  for (int64_t i = 0; i < shape.tiles * shape.rows; ++i) {
    uint8_t* cell = s.cells() + i / shape.rows * groups * kCellBytes<Packed>;
    RowUnits units;
    if (i < count) {
      units = RowUnits(q8g32_scales(s.rows()[i], depth), groups, kSpanOf<Packed> / 32);
      s.factors()[i].rescale = units.end();
    }
    for (int64_t g = 0; g < groups; ++g, cell += kCellBytes<Packed>) {
      if (i < count)
        lay_out_cell<Packed>(s.rows()[i], depth, units, g, cell, i % shape.rows);
      else
        for (int64_t line = 0; line < kCellBytes<Packed> / kCellRows; line += 4)  // the row's 4 bytes of each plane
          std::memset(line < 32 ? cell + 32 * (i % shape.rows) + line : cell + kCellRows * line + 4 * (i % shape.rows), 0, 4);
    }
  }
}

// A chunk of a strip: bytes less the offset, thus signed but where there are minimums.
template <class Packed>
struct MatrixChunk {
  static constexpr int kGroups = kChunk / Packed::kGroupSize;
  alignas(64) uint8_t bytes[kGroups][4][Packed::kGroupSize / 4][64];
  alignas(64) float scales[kGroups][kStrip];
  alignas(64) float minimums[Packed::kMinimums ? kGroups : 1][kStrip];
};

template <class Packed, int... kSteps>
ENGINE_INLINE void unpack_group(const Packed& unit, int group, MatrixChunk<Packed>& chunk, int to,
                                std::integer_sequence<int, kSteps...>) {
  const __m512i offset = _mm512_set1_epi8(static_cast<char>(Packed::kOffset));
  for (int panel = 0; panel < 4; ++panel) {
    (store(chunk.bytes[to][panel][kSteps],
           bit_cast<u32x16>(_mm512_sub_epi8(bit_cast<__m512i>(unit.template weights<kSteps>(group, panel)), offset))),
     ...);
    store(chunk.scales[to] + 16 * panel, unit.scale(group, panel));
    if constexpr (Packed::kMinimums) store(chunk.minimums[to] + 16 * panel, unit.minimum(group, panel));
  }
}

template <class Packed>
void unpack_matrix(const uint8_t* source, int64_t depth, MatrixChunk<Packed>& chunk) {
  int to = 0;
  for (int64_t k = 0; k < depth; k += Packed::kUnit, source += Packed::kUnitBytes) {
    const Packed unit(source);
    for (int group = 0; group < Packed::kUnit / Packed::kGroupSize; ++group, ++to)
      unpack_group(unit, group, chunk, to, std::make_integer_sequence<int, Packed::kGroupSize / 4>());
  }
}

// A part of a product: kMatrixPart groups x 2 panels x the rows of a tile.
template <class Packed>
struct Part {
  const uint8_t* cells;
  const uint8_t* bytes;
  const float* scales;
  const float* minimums;
  float* acc;

  // The part of a chunk that begins with group and panel, with a tile's cells and sums.
  ENGINE_INLINE Part(const MatrixChunk<Packed>& chunk, int group, int panel, const uint8_t* tile_cells, float* tile_acc)
      : cells(tile_cells + group * Packed::kGroupSize / 32 * kCellBytes<Packed>), bytes(chunk.bytes[group][panel][0]),
        scales(chunk.scales[group] + 16 * panel), minimums(chunk.minimums[Packed::kMinimums ? group : 0] + 16 * panel),
        acc(tile_acc + 16 * panel) {}
};

// Begins the integer sums of a group and one of its two panels in register kTile (0 to 3, the panel its parity), and stores
// those of the register that was begun two before.
template <class Packed, int kTile>
ENGINE_INLINE void dot_tile(const Part<Packed>& part, int group, int32_t* stored) {
  constexpr int kPanel = kTile % 2, kSize = Packed::kGroupSize;
  if constexpr (kPanel == 0) tile_load<4>(part.cells + group * kSize / 32 * kCellBytes<Packed> + group * kSize % 32, 32);
  tile_load<6 + kPanel>(part.bytes + (group * 4 + kPanel) * kSize * 16, 64);
  tile_zero<kTile>();
  tile_dot<true, !Packed::kMinimums, kTile, 4, 6 + kPanel>();
  tile_store<kTile ^ 2>(stored, 64);
}

// The float sums of a group for half of a tile's rows, and where what they are made of lies.
struct Terms {
  const float* scales;  // of the weights
  const float* minimums;
  const float* cell;    // what the rows' sums are multiplied by first, with the factors of minimums behind
  const int32_t* dots;
};

template <class Packed, int kRows, bool kRescale>
ENGINE_INLINE void add_dots(const Terms& t, const float* factors, f32x16 (&sums)[kRows][2]) {
  const f32x16 scale[2] = {load(t.scales), load(t.scales + 16)};
  const f32x16 minimum[2] = {load(t.minimums), load(t.minimums + 16)};
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
    for (int p = 0; p < 2; ++p) {
      const i32x16 dot = load_as<i32x16>(t.dots + p * 256 + r * 16);
      if constexpr (kRescale) sums[r][p] *= splat(t.cell[r]);
      sums[r][p] = fma(convert<f32x16>(dot), scale[p], sums[r][p]);
      if constexpr (Packed::kMinimums) sums[r][p] = fma(minimum[p], splat(factors[r]), sums[r][p]);
    }
}

// Group kI of a half of `now`, beside a fourth of that half's share of the integer sums of `next`. `before`: where the two
// registers in flight at the half's beginning belong, `after`: those begun in it.
template <class Packed, int kRows, bool kNext, int kI>
ENGINE_INLINE void step_quarter(const Part<Packed>& next, int half, int32_t* before, int32_t* after, Terms& t,
                                f32x16 (&sums)[kRows][2]) {
  int32_t* const stored = kI < 2 ? before + kI * 256 : after + (kI - 2) * 256;
  if constexpr (kNext) {
    dot_tile<Packed, kI>(next, half * 2 + kI / 2, stored);
  } else if constexpr (kI < 2) {
    if (half == 0) tile_store<kI + 2>(stored, 64);
  }
  asm("" : "+r"(t.scales), "+r"(t.minimums), "+r"(t.cell), "+r"(t.dots));  // or each load has a long displacement
  // A part may be less than a span: one that does not begin any has 1 there.
  constexpr bool kRescale = kI * Packed::kGroupSize % std::min(kSpanOf<Packed>, kMatrixPart * Packed::kGroupSize) == 0;
  add_dots<Packed, kRows, kRescale>(t, t.cell + kCellRows * (1 + kI % (32 / Packed::kGroupSize)), sums);
  t.scales += kStrip;
  t.minimums += kStrip;
  t.dots += 512;
  if ((kI + 1) * Packed::kGroupSize % 32 == 0) t.cell += kCellBytes<Packed> / sizeof(float);
}

// The float sums of `now`, beside the integer sums of `next` where kNext. Tiles have 2 kRows rows.
template <class Packed, int kRows, bool kNext>
ENGINE_INLINE void step_part(const Part<Packed>& next, int32_t* next_dots, const Part<Packed>& now, int32_t* now_dots,
                             bool first, StreamAhead& ahead) {
  float* acc = now.acc;
  int32_t* before = now_dots + kPartSums - 512;
#pragma GCC unroll 1
  for (int half = 0; half < 2; ++half, acc += kRows * kStrip, before = next_dots + 512) {
    f32x16 sums[kRows][2];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
      for (int p = 0; p < 2; ++p) sums[r][p] = first ? f32x16{} : load(acc + r * kStrip + 16 * p);
    ahead.next();
    Terms t{now.scales, now.minimums, reinterpret_cast<const float*>(now.cells + kCellRows * 32) + half * kRows,
            now_dots + half * kRows * 16};
    int32_t* const after = next_dots + half * 1024;
    step_quarter<Packed, kRows, kNext, 0>(next, half, before, after, t, sums);
    step_quarter<Packed, kRows, kNext, 1>(next, half, before, after, t, sums);
    step_quarter<Packed, kRows, kNext, 2>(next, half, before, after, t, sums);
    step_quarter<Packed, kRows, kNext, 3>(next, half, before, after, t, sums);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
      for (int p = 0; p < 2; ++p) store(acc + r * kStrip + 16 * p, sums[r][p]);
  }
}

// A chunk, `groups` deep, against all tiles: acc [tiles][2 kRows][64] += its part, or = where it is the first. cells: of the
// chunk's first k, `pitch` bytes from tile to tile.
template <class Packed, int kRows>
void multiply_chunk(const MatrixChunk<Packed>& chunk, int groups, const uint8_t* cells, int64_t pitch, int64_t tiles,
                    int32_t* dots, bool first, const uint8_t* ahead_bytes, float* acc) {
  const int64_t parts = tiles * 2 * (groups / kMatrixPart);
  constexpr int64_t kNextBytes = kChunk / Packed::kUnit * Packed::kUnitBytes;
  StreamAhead ahead{ahead_bytes, (kNextBytes / (2 * parts) + 63) / 64 * 64};
  int group = 0, panel = 0;
  Part<Packed> next(chunk, 0, 0, cells, acc);
  for (int i = 0; i < kMatrixPart; i += 2) {
    dot_tile<Packed, 0>(next, i, dots + (i == 0 ? 0 : 512));  // what the first two store is overwritten
    dot_tile<Packed, 1>(next, i, dots + (i == 0 ? 0 : 768));
    dot_tile<Packed, 2>(next, i + 1, dots + i * 512);
    dot_tile<Packed, 3>(next, i + 1, dots + i * 512 + 256);
  }
  int32_t* other = dots + kPartSums;
  for (int64_t part = 1; part < parts; ++part) {
    const Part<Packed> now = next;
    const bool starts = first && group == 0;
    group += kMatrixPart;
    if (group == groups) {
      group = 0;
      panel ^= 2;
      if (panel == 0) {
        cells += pitch;
        acc += 2 * kRows * kStrip;
      }
    }
    next = Part<Packed>(chunk, group, panel, cells, acc);
    step_part<Packed, kRows, true>(next, other, now, dots, starts, ahead);
    std::swap(dots, other);
  }
  step_part<Packed, kRows, false>(next, other, next, dots, first && group == 0, ahead);
}

// acc [rows][64] = the product of the cells with a strip, in tiles of 2 kRows rows.
template <class Packed, int kRows>
void multiply_strip(const uint8_t* units, const uint8_t* following, int64_t depth, int64_t tiles, const Scratch& s) {
  auto& chunk = *reinterpret_cast<MatrixChunk<Packed>*>(s.chunk());
  static_assert(sizeof(chunk) <= Scratch::kChunkBytes);
  for (int64_t k = 0; k < depth; k += kChunk) {
    const int64_t size = depth - k < kChunk ? depth - k : kChunk;
    unpack_matrix<Packed>(units, size, chunk);
    units += size / Packed::kUnit * Packed::kUnitBytes;
    const uint8_t* const next = k + size < depth ? units : following;
    multiply_chunk<Packed, kRows>(chunk, static_cast<int>(size / Packed::kGroupSize), s.cells() + k / 32 * kCellBytes<Packed>,
                                  depth / 32 * kCellBytes<Packed>, tiles, s.sums(), k == 0, next, s.acc());
  }
}

template <class Packed>
void multiply_matrix(const Product& product, int64_t row0, int64_t rows, int64_t strip0, int64_t strip1, const Scratch& s) {
  const MatrixTiles shape(rows);
  constexpr int kSize = Packed::kGroupSize;
  const int most = static_cast<int>(shape.rows);
  const TileRegisters registers({{most, 64}, {most, 64}, {most, 64}, {most, 64}, {most, kSize}, {0, 0}, {kSize / 4, 64}, {kSize / 4, 64}});
  const auto multiply = most == 16 ? multiply_strip<Packed, 8> : multiply_strip<Packed, 7>;
  const int64_t bytes = product.depth / Packed::kUnit * Packed::kUnitBytes;
  for (int64_t strip = strip0; strip < strip1; ++strip) {
    const uint8_t* const units = product.matrix + strip * bytes;
    multiply(units, product.following(strip, strip + 1 == strip1, bytes), product.depth, shape.tiles, s);
    for (int64_t i = 0; i < rows; ++i)
      for (int panel = 0; panel < 4; ++panel) {
        float* const sums = s.acc() + i * kStrip + 16 * panel;
        store(sums, load(sums) * splat(s.factors()[i].rescale));
      }
    finish_rows(product, row0, rows, strip, s.acc());
  }
}

}  // namespace ENGINE_ISA
}  // namespace engine_cpu

#endif
