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

// Of 32 registers up to six rows take all four panels at once (24 sums, 4 weights, 1 activation), more rows two. Without
// such registers a panel is several already.
#if defined(__AVX512F__)
template <int kRows>
#ifndef PP
#define PP 4
#endif
constexpr int kPanelsAtOnce = kRows <= 6 ? PP : 2;
#else
template <int kRows>
constexpr int kPanelsAtOnce = 1;
#endif

// A row's corrections, kDepth / kGroupSize of them: i32 starts, or f32 factors where there are minimums.
template <class Source>
void correct_row(const uint8_t* row, int64_t depth, int offset, int32_t* out) {
  const int32_t* const sums = q8g32_sums(row, depth);
  const float* const scales = q8g32_scales(row, depth);
  for (int64_t g = 0; g < depth / Source::kGroupSize; ++g) {
    if constexpr (Source::kGroupSize == 16) {
      out[g] = kDotBias + offset * sums[g];
    } else if constexpr (Source::kMinimums) {
      out[g] = bit_cast<int32_t>(static_cast<float>(sums[2 * g] + sums[2 * g + 1]) * scales[g]);
    } else {
      out[g] = kDotBias + offset * (sums[2 * g] + sums[2 * g + 1]);
    }
  }
}

template <int kStep, class Source, int kRows, int kPanels>
ENGINE_INLINE void dot_steps(const Source& source, int group, int panel0, const int8_t* const (&q)[kRows],
                             i32x16 (&dots)[kRows][kPanels]) {
  if constexpr (kStep < Source::kGroupSize / 4) {
    u32x16 w[kPanels];
#pragma GCC unroll 8
    for (int p = 0; p < kPanels; ++p) w[p] = source.template weights<kStep>(group, panel0 + p);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const i32x16 a = splat_step(q[r] + 4 * kStep);
#pragma GCC unroll 8
      for (int p = 0; p < kPanels; ++p) dot_u8i8(dots[r][p], w[p], a);
    }
    dot_steps<kStep + 1>(source, group, panel0, q, dots);
  }
}

// Adds one group to the sums. q: the rows' bytes of this group; scales: the rows' scales of it; corrections: of the
// group, rows `pitch` apart.
template <class Source, int kRows>
#ifdef SL
#define SPLATL splat_load(Source::kMinimums ? &kDotBias : corrections + r * pitch)
#else
#define SPLATL splat_i32(Source::kMinimums ? kDotBias : corrections[r * pitch])
#endif
ENGINE_INLINE void add_group(const Source& source, int group, const int8_t* const (&q)[kRows],
                             const float* const (&scales)[kRows], const int32_t* corrections, int64_t pitch,
                             f32x16 (&sums)[kRows][4]) {
  constexpr int kPanels = kPanelsAtOnce<kRows>;
#pragma GCC unroll 2
  for (int panel0 = 0; panel0 < 4; panel0 += kPanels) {
    i32x16 dots[kRows][kPanels];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
      for (int p = 0; p < kPanels; ++p) dots[r][p] = SPLATL;
    dot_steps<0>(source, group, panel0, q, dots);
#pragma GCC unroll 8
    for (int p = 0; p < kPanels; ++p) {
      const f32x16 scale = source.scale(group, panel0 + p);
      const f32x16 minimum = source.minimum(group, panel0 + p);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        f32x16& sum = sums[r][panel0 + p];
        fma_load(sum, scaled_dot(dots[r][p], scale), scales[r]);
        if constexpr (Source::kMinimums) fma_load(sum, minimum, reinterpret_cast<const float*>(corrections + r * pitch));
      }
    }
  }
}

// Adds the groups of `depth` k that begin at k0 (a multiple of 32) of the rows (each `row_depth` deep), from the source's
// first groups on.
template <class Source, int kRows>
ENGINE_INLINE void add_groups(const Source& source, const uint8_t* const* rows, int64_t row_depth, int64_t k0, int64_t depth,
                              const int32_t* corrections, f32x16 (&sums)[kRows][4]) {
  constexpr int kSize = Source::kGroupSize;
  const int64_t pitch = row_depth / kSize;
  const int8_t* q[kRows];
  const float* scales[kRows];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    q[r] = reinterpret_cast<const int8_t*>(rows[r]) + k0;
    scales[r] = q8g32_scales(rows[r], row_depth) + k0 / 32;
  }
  corrections += k0 / kSize;
  for (int group = 0; group < depth / kSize; ++group) {
    add_group(source, group, q, scales, corrections + group, pitch, sums);
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
  f32x16 sums[kRows][4] = {};
  for (int64_t k = 0; k < depth; k += Packed::kUnit, strip += Packed::kUnitBytes)
    add_groups<Packed, kRows>(Packed(strip), rows, depth, k, Packed::kUnit, corrections, sums);
  store_sums(sums, acc);
}

// One chunk of a strip: acc [kRows][64] += its part.
template <class Source, int kRows>
void tile_chunk(const Source& chunk, int64_t k0, int64_t depth, const uint8_t* const* rows, int64_t row_depth,
                const int32_t* corrections, float* acc) {
  f32x16 sums[kRows][4];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int p = 0; p < 4; ++p) sums[r][p] = load(acc + r * kStrip + 16 * p);
  add_groups<Source, kRows>(chunk, rows, row_depth, k0, depth, corrections, sums);
  store_sums(sums, acc);
}

}  // namespace ENGINE_ISA
}  // namespace engine_cpu
