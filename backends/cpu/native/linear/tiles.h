// Tiles of the quantized product: kRows activation rows x one strip of 64 columns.
//
// The arithmetic of one output, the same for every number of rows, chunk and thread:
//   acc = 0;  for each group g of k in order:
//     dot = sum (u - offset) * q over the group, exact in i32
//     acc = fma(f32(dot) * weight_scale[g], activation_scale[g / 32 k], acc)
//     acc = fma(weight_minimum[g], activation_scale[g] * f32(-sum q), acc)       where the family has minimums
// The offset costs nothing: the integer sum starts from -offset * sum q. These starts, or the factors of the minimums,
// are a row's corrections, one a group.
#pragma once

#include <cstring>

#include "q8g32.h"
#include "sources.h"

namespace engine_cpu {
namespace ENGINE_ISA {

// Of 32 vector registers the integer sums of a tile take up to 24, weights 2 or 4 and an activation 1; where a panel takes
// several registers, its sums are those of one panel. Float sums are where the compiler puts them, unless a pass has only two
// panels: then they are in registers, too, and a group stores nothing (each store costs as much as a product on Zen 4), but
// weights that come from memory stream best in one pass.
constexpr int kTileRows = kWideRegisters >= 32 ? 6 : kWideRegisters >= 8 ? 4 : 2;
constexpr int kPanelsAtOnce = kWideRegisters >= 32 ? 4 : 1;
constexpr int kPassPanels = kWideRegisters >= 32 ? 2 : 4;  // with many rows

// The sum of -q over group g.
template <class Source>
ENGINE_INLINE int32_t group_sum(const int32_t* sums, int64_t g) {
  return Source::kGroupSize == 16 ? sums[g] : sums[2 * g] + sums[2 * g + 1];
}

// What dot_bytes takes off the bytes of this source by itself.
template <class Source>
constexpr int kBase = Source::kWide ? kWideBase : 0;

// A row's corrections, kDepth / kGroupSize of them: i32 starts, or f32 factors where there are minimums.
template <class Packed>
void correct_row(const uint8_t* row, int64_t depth, int32_t* out) {
  const int32_t* const sums = q8g32_sums(row, depth);
  const float* const scales = q8g32_scales(row, depth);
  for (int64_t g = 0; g < depth / Packed::kGroupSize; ++g) {
    const int32_t sum = group_sum<Packed>(sums, g);
    if constexpr (Packed::kMinimums)
      out[g] = bit_cast<int32_t>(static_cast<float>(sum) * scales[g * Packed::kGroupSize / 32]);
    else
      out[g] = kDotBias + (Packed::kOffset - kBase<Packed>) * sum;
  }
}

template <int kStep, class Source, int kRows, int kPanels>
ENGINE_INLINE void dot_steps(const Source& source, int group, int panel0, const int8_t* const* q,
                             i32x16 (&dots)[kRows][kPanels]) {
  if constexpr (kStep < Source::kGroupSize / 4) {
    u32x16 w[kPanels];
#pragma GCC unroll 8
    for (int p = 0; p < kPanels; ++p) w[p] = source.template weights<kStep>(group, panel0 + p);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const i32x16 a = splat_step(q[r] + 4 * kStep);
#pragma GCC unroll 8
      for (int p = 0; p < kPanels; ++p) dot_bytes<Source::kWide>(dots[r][p], w[p], a);
    }
    dot_steps<kStep + 1>(source, group, panel0, q, dots);
  }
}

// The rows of a tile, from some k on.
template <int kRows>
struct QuantizedRows {
  const int8_t* q[kRows];
  const float* scales[kRows];
  const int32_t* nsums[kRows];
  const int32_t* corrections;  // `pitch` from row to row
  int64_t pitch;

  ENGINE_INLINE int32_t correction(int row, int group) const { return corrections[row * pitch + group]; }

  // k0 is a multiple of 32; corrections: of the first row, from its first group on.
  template <int kGroupSize>
  ENGINE_INLINE static QuantizedRows at(const uint8_t* const* rows, int64_t depth, int64_t k0, const int32_t* corrections) {
    QuantizedRows tile;
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      tile.q[r] = reinterpret_cast<const int8_t*>(rows[r]) + k0;
      tile.scales[r] = q8g32_scales(rows[r], depth) + k0 / 32;
      tile.nsums[r] = q8g32_sums(rows[r], depth) + k0 / 16;
    }
    tile.pitch = depth / kGroupSize;
    tile.corrections = corrections + k0 / kGroupSize;
    return tile;
  }
};

// Adds one group of kPanels panels to the sums, from column `at` on, of kRows rows from kFirst on.
template <int kFirst, int kRows, int kPanels, class Source, int kAll, int kWidth>
ENGINE_INLINE void add_group(const Source& source, int group, int panel0, int at, const QuantizedRows<kAll>& rows,
                             f32x16 (&sums)[kAll][kWidth]) {
  i32x16 dots[kRows][kPanels];
  const int8_t* q[kRows];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    q[r] = rows.q[kFirst + r] + group * Source::kGroupSize;
    // Or the compiler keeps the group's activations for the next panel, on the stack.
    if constexpr (kPanels < kWidth) asm("" : "+r"(q[r]));
    const i32x16 start = splat_i32(!Source::kMinimums   ? rows.correction(kFirst + r, group)
                                   : kBase<Source> == 0 ? kDotBias
                                                        : kDotBias - kBase<Source> * group_sum<Source>(rows.nsums[kFirst + r], group));
#pragma GCC unroll 8
    for (int p = 0; p < kPanels; ++p) dots[r][p] = start;
  }
  dot_steps<0>(source, group, panel0, q, dots);
#pragma GCC unroll 8
  for (int p = 0; p < kPanels; ++p) {
    const f32x16 scale = source.scale(group, panel0 + p);
    const f32x16 minimum = source.minimum(group, panel0 + p);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      f32x16& sum = sums[kFirst + r][at + p];
      sum = fma(scaled_dot(dots[r][p], scale), splat(rows.scales[kFirst + r][group * Source::kGroupSize / 32]), sum);
      if constexpr (Source::kMinimums) sum = fma(minimum, splat(bit_cast<float>(rows.correction(kFirst + r, group))), sum);
    }
  }
}

constexpr int64_t kPrefetchDistance = 4096;  // what a core has in flight at its share of the memory's bandwidth
// Of weights as they are packed. Intel's cores with AMX read those of a byte 6 to 8 % faster from nearer.
#if defined(__AMX_INT8__)
template <class Packed>
constexpr int64_t kPackedDistance = Packed::kWide ? 1536 : kPrefetchDistance;
#else
template <class Packed>
constexpr int64_t kPackedDistance = kPrefetchDistance;
#endif

// A stream of weight bytes to bring nearer: `step` bytes a group, so that memory works while the sums do.
struct Ahead {
  const uint8_t* bytes;
  int64_t step;

  ENGINE_INLINE void next() {
    for (int64_t i = 0; i < step; i += 64) __builtin_prefetch(bytes + i, 0, 2);
    bytes += step;
  }
};

// acc [kRows][64] = the product of a strip as it is packed, in one pass. Where all of the rows are too many for the registers,
// each half of them adds a group in turn.
template <class Packed, int kRows>
void multiply_in_one_pass(const uint8_t* strip, int64_t depth, const uint8_t* const* all, const int32_t* corrections, float* acc) {
  constexpr int kFirst = kRows <= kTileRows ? kRows : (kRows + 1) / 2, kGroups = Packed::kUnit / Packed::kGroupSize;
  f32x16 sums[kRows][4] = {};
  for (int64_t k = 0; k < depth; k += Packed::kUnit, strip += Packed::kUnitBytes) {
    const Packed unit(strip);
    const auto rows = QuantizedRows<kRows>::template at<Packed::kGroupSize>(all, depth, k, corrections);
    Ahead ahead{strip + kPackedDistance<Packed>, Packed::kUnitBytes / kGroups};
    for (int group = 0; group < kGroups; ++group) {
      ahead.next();
#pragma GCC unroll 4
      for (int panel = 0; panel < 4; panel += kPanelsAtOnce) {
        add_group<0, kFirst, kPanelsAtOnce>(unit, group, panel, panel, rows, sums);
        if constexpr (kFirst < kRows) add_group<kFirst, kRows - kFirst, kPanelsAtOnce>(unit, group, panel, panel, rows, sums);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int p = 0; p < 4; ++p) store(acc + r * kStrip + 16 * p, sums[r][p]);
}

// acc [kRows][64] += the source's groups, `size` k that begin at k0 of the rows, which are `depth` deep.
template <class Source, int kRows>
void add_groups(const Source& source, int64_t k0, int64_t size, const uint8_t* const* all, int64_t depth,
                const int32_t* corrections, Ahead ahead, float* acc) {
  const auto rows = QuantizedRows<kRows>::template at<Source::kGroupSize>(all, depth, k0, corrections);
  const int groups = static_cast<int>(size / Source::kGroupSize);
  constexpr int kPanels = kPassPanels < kPanelsAtOnce ? kPassPanels : kPanelsAtOnce;
#pragma GCC unroll 1
  for (int panel0 = 0; panel0 < 4; panel0 += kPassPanels) {
    f32x16 sums[kRows][kPassPanels];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
      for (int p = 0; p < kPassPanels; ++p) sums[r][p] = load(acc + r * kStrip + 16 * (panel0 + p));
    for (int group = 0; group < groups; ++group) {
      ahead.next();
#pragma GCC unroll 4
      for (int p = 0; p < kPassPanels; p += kPanels) add_group<0, kRows, kPanels>(source, group, panel0 + p, p, rows, sums);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
      for (int p = 0; p < kPassPanels; ++p) store(acc + r * kStrip + 16 * (panel0 + p), sums[r][p]);
  }
}

}  // namespace ENGINE_ISA
}  // namespace engine_cpu
