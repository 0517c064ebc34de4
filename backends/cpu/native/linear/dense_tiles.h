// Tiles of the dense product: kRows f32 activation rows x one strip of 64 columns. Every output is
//   acc = 0;  for each k in order: acc = fma(weight[k], x[k], acc)
// for every number of rows, chunk and thread.
#pragma once

#include "tiles.h"

namespace engine_cpu {
namespace ENGINE_ISA {

// What a strip holds: kPerUnit consecutive k in kUnitBytes; weights<i>(unit, panel) gives k = i of it in 16 columns.
struct DenseF32 {
  static constexpr int kPerUnit = 1, kUnitBytes = 256;
  template <int kIndex>
  static ENGINE_INLINE f32x16 weights(const uint8_t* unit, int panel) {
    return load_as<f32x16>(unit + 64 * panel);
  }
};

struct DenseF16 {
  static constexpr int kPerUnit = 1, kUnitBytes = 128;
  template <int kIndex>
  static ENGINE_INLINE f32x16 weights(const uint8_t* unit, int panel) {
    return widen_f16(load_as<u16x16>(unit + 32 * panel));
  }
};

struct DenseBF16 {
  static constexpr int kPerUnit = 2, kUnitBytes = 256;
  template <int kIndex>
  static ENGINE_INLINE f32x16 weights(const uint8_t* unit, int panel) {
    const u32x16 pair = load_as<u32x16>(unit + 64 * panel);
    return bit_cast<f32x16>(kIndex == 0 ? pair << 16 : pair & 0xffff0000);
  }
};

template <int kIndex, class Dense, int kRows, int kPanels>
ENGINE_INLINE void add_unit(const uint8_t* unit, int panel0, const float* const (&x)[kRows], int64_t k,
                            f32x16 (&sums)[kRows][kPanels]) {
  f32x16 w[kPanels];
#pragma GCC unroll 8
  for (int p = 0; p < kPanels; ++p) w[p] = Dense::template weights<kIndex>(unit, panel0 + p);
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    const f32x16 a = splat(x[r][k + kIndex]);
#pragma GCC unroll 8
    for (int p = 0; p < kPanels; ++p) sums[r][p] = fma(w[p], a, sums[r][p]);
  }
}

// acc [kRows][64] += `depth` k of the strip from `unit` on, times x[r][0..depth).
template <class Dense, int kRows>
void tile_dense(const uint8_t* unit, const float* const* rows, int64_t depth, float* acc) {
  static_assert(kRows <= kRowsAtOnce);
  const float* x[kRows];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) x[r] = rows[r];
  for (int panel0 = 0; panel0 < 4; panel0 += kPanelsAtOnce) {
    f32x16 sums[kRows][kPanelsAtOnce];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
      for (int p = 0; p < kPanelsAtOnce; ++p) sums[r][p] = load(acc + r * kStrip + 16 * (panel0 + p));
    const uint8_t* at = unit;
    int64_t k = 0;
    for (; k + Dense::kPerUnit <= depth; k += Dense::kPerUnit, at += Dense::kUnitBytes) {
      for (int i = 0; i < Dense::kUnitBytes; i += 64) __builtin_prefetch(at + kPrefetchDistance + i, 0, 2);
      add_unit<0, Dense>(at, panel0, x, k, sums);
      if constexpr (Dense::kPerUnit == 2) add_unit<1, Dense>(at, panel0, x, k, sums);
    }
    if (k < depth) add_unit<0, Dense>(at, panel0, x, k, sums);  // an odd depth's last k
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
      for (int p = 0; p < kPanelsAtOnce; ++p) store(acc + r * kStrip + 16 * (panel0 + p), sums[r][p]);
  }
}

// A chunk of a strip as f32 [depth][64]; small, since rows whose length is a power of two fall into the same cache sets.
constexpr int kDenseChunk = 64;

template <class Dense>
void widen_chunk(const uint8_t* units, int64_t depth, float* out) {
  for (int64_t k = 0; k < depth; k += Dense::kPerUnit, units += Dense::kUnitBytes) {
    for (int i = 0; i < Dense::kUnitBytes; i += 64) __builtin_prefetch(units + kPrefetchDistance + i, 0, 2);
    for (int p = 0; p < 4; ++p) {
      store(out + k * kStrip + 16 * p, Dense::template weights<0>(units, p));
      if constexpr (Dense::kPerUnit == 2) store(out + (k + 1) * kStrip + 16 * p, Dense::template weights<1>(units, p));
    }
  }
}

}  // namespace ENGINE_ISA
}  // namespace engine_cpu
