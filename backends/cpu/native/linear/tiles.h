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

#include "q8g32.h"
#include "sources.h"

namespace engine_cpu {
namespace ENGINE_ISA {

// Rows and panels whose integer sums are in registers together. Of 32 vector registers 24 hold sums, 4 weights and 1 an
// activation; where a panel takes several registers, those of one panel.
constexpr int kRowsAtOnce = kWideRegisters >= 32 ? 6 : kWideRegisters >= 8 ? 4 : 2;
constexpr int kPanelsAtOnce = kWideRegisters >= 32 ? 4 : 1;

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

// Adds one group to the sums of kRows rows. q: the rows' bytes of this group; scales: the rows' scales of it; nsums: theirs
// of -q; corrections: of the group, rows `pitch` apart.
template <int kRows, class Source>
ENGINE_INLINE void add_group(const Source& source, int group, const int8_t* const* q, const float* const* scales,
                             const int32_t* const* nsums, const int32_t* corrections, int64_t pitch, f32x16 (*sums)[4]) {
#pragma GCC unroll 4
  for (int panel0 = 0; panel0 < 4; panel0 += kPanelsAtOnce) {
    i32x16 dots[kRows][kPanelsAtOnce];
    const int8_t* bytes[kRows];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      bytes[r] = q[r];
      // Or the compiler keeps the group's activations for the next panel, on the stack.
      if constexpr (kPanelsAtOnce < 4) asm("" : "+r"(bytes[r]));
      const i32x16 start = splat_i32(!Source::kMinimums   ? corrections[r * pitch]
                                     : kBase<Source> == 0 ? kDotBias
                                                          : kDotBias - kBase<Source> * group_sum<Source>(nsums[r], group));
#pragma GCC unroll 8
      for (int p = 0; p < kPanelsAtOnce; ++p) dots[r][p] = start;
    }
    dot_steps<0>(source, group, panel0, bytes, dots);
#pragma GCC unroll 8
    for (int p = 0; p < kPanelsAtOnce; ++p) {
      const f32x16 scale = source.scale(group, panel0 + p);
      const f32x16 minimum = source.minimum(group, panel0 + p);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        f32x16& sum = sums[r][panel0 + p];
        sum = fma(scaled_dot(dots[r][p], scale), splat(*scales[r]), sum);
        if constexpr (Source::kMinimums) sum = fma(minimum, splat(bit_cast<float>(corrections[r * pitch])), sum);
      }
    }
  }
}

constexpr int64_t kPrefetchDistance = 4096;  // what a core has in flight at its share of the memory's bandwidth

// A stream of weight bytes to bring nearer: `step` bytes a group, so that memory works while the sums do.
struct Ahead {
  const uint8_t* bytes;
  int64_t step;

  ENGINE_INLINE void next() {
    for (int64_t i = 0; i < step; i += 64) __builtin_prefetch(bytes + i, 0, 2);
    bytes += step;
  }
};

// Adds the groups of `depth` k that begin at k0 (a multiple of 32) of the rows (each `row_depth` deep), from the source's
// first groups on.
template <int kRows, class Source>
ENGINE_INLINE void add_groups(const Source& source, const uint8_t* const* rows, int64_t row_depth, int64_t k0, int64_t depth,
                              const int32_t* corrections, Ahead ahead, f32x16 (&sums)[kRows][4]) {
  constexpr int kSize = Source::kGroupSize;
  constexpr int kFirst = kRows <= kRowsAtOnce ? kRows : (kRows + 1) / 2;
  const int64_t pitch = row_depth / kSize;
  const int8_t* q[kRows];
  const float* scales[kRows];
  const int32_t* nsums[kRows];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    q[r] = reinterpret_cast<const int8_t*>(rows[r]) + k0;
    scales[r] = q8g32_scales(rows[r], row_depth) + k0 / 32;
    nsums[r] = q8g32_sums(rows[r], row_depth) + k0 / 16;
  }
  corrections += k0 / kSize;
  for (int group = 0; group < depth / kSize; ++group) {
    ahead.next();
    add_group<kFirst>(source, group, q, scales, nsums, corrections + group, pitch, sums);
    if constexpr (kFirst < kRows)
      add_group<kRows - kFirst>(source, group, q + kFirst, scales + kFirst, nsums + kFirst,
                                corrections + group + kFirst * pitch, pitch, sums + kFirst);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      q[r] += kSize;
      if (kSize == 32 || group % 2 == 1) ++scales[r];
    }
  }
}

template <int kRows>
ENGINE_INLINE void store_sums(const f32x16 (&sums)[kRows][4], float* acc) {
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int p = 0; p < 4; ++p) store(acc + r * kStrip + 16 * p, sums[r][p]);
}

// A whole strip from its packed form: acc [kRows][64] = the product over all of depth.
template <class Packed, int kRows>
void tile_packed(const uint8_t* strip, int64_t depth, const uint8_t* const* rows, const int32_t* corrections, float* acc) {
  constexpr int64_t kStep = Packed::kUnitBytes / (Packed::kUnit / Packed::kGroupSize);
  f32x16 sums[kRows][4] = {};
  for (int64_t k = 0; k < depth; k += Packed::kUnit, strip += Packed::kUnitBytes)
    add_groups<kRows>(Packed(strip), rows, depth, k, Packed::kUnit, corrections, Ahead{strip + kPrefetchDistance, kStep}, sums);
  store_sums(sums, acc);
}

// One chunk of a strip: acc [kRows][64] += its part.
template <class Source, int kRows>
void tile_chunk(const Source& chunk, int64_t k0, int64_t depth, const uint8_t* const* rows, int64_t row_depth,
                const int32_t* corrections, Ahead ahead, float* acc) {
  f32x16 sums[kRows][4];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int p = 0; p < 4; ++p) sums[r][p] = load(acc + r * kStrip + 16 * p);
  add_groups<kRows>(chunk, rows, row_depth, k0, depth, corrections, ahead, sums);
  store_sums(sums, acc);
}

}  // namespace ENGINE_ISA
}  // namespace engine_cpu
