// Tiles of the dense product: kRows f32 activation rows x one strip of 64 columns. Every output is
//   acc = 0;  for each k in order: acc = fma(weight[k], x[k], acc)
// for every number of rows, chunk and thread.
#pragma once

#include "four_bits.h"
#include "tiles.h"

namespace engine_cpu {
namespace ENGINE_ISA {

// What a strip holds: kPerUnit consecutive k in kUnitBytes; weights(unit, panel, i) gives k = i of it in 16 columns.
struct DenseF32 {
  static constexpr int kPerUnit = 1, kUnitBytes = 256;
  static ENGINE_INLINE f32x16 weights(const uint8_t* unit, int panel, int) {
    return load_as<f32x16>(unit + 64 * panel);
  }
};

struct DenseF16 {
  static constexpr int kPerUnit = 1, kUnitBytes = 128;
  static ENGINE_INLINE f32x16 weights(const uint8_t* unit, int panel, int) {
    return widen_f16(load_as<u16x16>(unit + 32 * panel));
  }
};

// E4M3: seven bits of exponent and fraction, shifted, are those of an f16 that is 2^-8 of the number.
struct DenseF8 {
  static constexpr int kPerUnit = 32, kUnitBytes = 2304;
  static ENGINE_INLINE f32x16 weights(const uint8_t* unit, int panel, int index) {
    const u16x16 byte = to_u16(load_as<u8x16>(unit + 256 + 64 * index + 16 * panel));
    const f32x16 number = widen_f16((byte & 0x80) << 8 | (byte & 0x7f) << 7) * 256.0f;
    return number * load_as<f32x16>(unit + 64 * panel);
  }
};

template <const float (&kTable)[16]>
struct DenseTable {
  static constexpr int kPerUnit = 64, kUnitBytes = 2304;
  static ENGINE_INLINE f32x16 weights(const uint8_t* unit, int panel, int index) {
    const u32x16 byte = bit_cast<u32x16>(to_i32(load_as<u8x16>(unit + 256 + 64 * (index / 2) + 16 * panel)));
    return look_up(kTable, index % 2 == 0 ? byte >> 4 : byte & 15) * load_as<f32x16>(unit + 64 * panel);
  }
};
using DenseNF4 = DenseTable<kNF4>;
using DenseFP4 = DenseTable<kFP4>;

template <class Dense, int kRows, int kPanels>
ENGINE_INLINE void add_unit(const uint8_t* unit, int index, int panel0, const float* const (&x)[kRows], int64_t k,
                            f32x16 (&sums)[kRows][kPanels]) {
  f32x16 w[kPanels];
#pragma GCC unroll 8
  for (int p = 0; p < kPanels; ++p) w[p] = Dense::weights(unit, panel0 + p, index);
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    const f32x16 a = splat(x[r][k + index]);
#pragma GCC unroll 8
    for (int p = 0; p < kPanels; ++p) sums[r][p] = fma(w[p], a, sums[r][p]);
  }
}

// acc [kRows][64] += `depth` k of the strip from `unit` on, times x[r][0..depth), or = where they begin the sums.
template <class Dense, int kRows, class Ahead>
void tile_dense(const uint8_t* unit, const float* const* rows, int64_t depth, bool begin, Ahead ahead, float* acc) {
  static_assert(kRows <= kTileRows);
  constexpr int kPanels = dense_panels<kRows>();
  const float* x[kRows];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) x[r] = rows[r];
#pragma GCC unroll 4
  for (int panel0 = 0; panel0 < 4; panel0 += kPanels) {
    f32x16 sums[kRows][kPanels];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
      for (int p = 0; p < kPanels; ++p) sums[r][p] = begin ? f32x16{} : load(acc + r * kStrip + 16 * (panel0 + p));
    const uint8_t* at = unit;
    int64_t k = 0;
    for (; k + Dense::kPerUnit <= depth; k += Dense::kPerUnit, at += Dense::kUnitBytes) {
      ahead.template ask<Dense::kUnitBytes, 4 / kPanels>(at);
#pragma GCC unroll 2
      for (int i = 0; i < Dense::kPerUnit; ++i) add_unit<Dense>(at, i, panel0, x, k, sums);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
      for (int p = 0; p < kPanels; ++p) store(acc + r * kStrip + 16 * (panel0 + p), sums[r][p]);
  }
}

constexpr int64_t kWidenDistance = 4096;
constexpr int kDenseChunk = 128;  // k of a strip that are widened at a time, to stay in the first-level cache

// A chunk of a strip as f32 [depth][64].
template <class Dense>
void widen_chunk(const uint8_t* units, int64_t depth, float* out) {
  for (int64_t k = 0; k < depth; k += Dense::kPerUnit, units += Dense::kUnitBytes) {
    for (int i = 0; i < Dense::kUnitBytes; i += 64) __builtin_prefetch(units + kWidenDistance + i, 0, 2);
#pragma GCC unroll 2
    for (int i = 0; i < Dense::kPerUnit; ++i)
      for (int p = 0; p < 4; ++p) store(out + (k + i) * kStrip + 16 * p, Dense::weights(units, p, i));
  }
}

}  // namespace ENGINE_ISA
}  // namespace engine_cpu
