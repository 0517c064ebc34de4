// Tiles of the bf16 product: kRows bf16 activation rows x one strip of 64 columns, whose weights lie in pairs of k. Every
// output is a chain over these pairs,
//   acc = 0;  for each pair in order: acc = acc + w[k] x[k] + w[k + 1] x[k + 1]
// for every number of rows, chunk and thread. vdpbf16ps rounds within a pair in its own way, and takes subnormal numbers for
// 0; without it a pair is two fused multiply-adds. So the last bits differ between instruction sets.
#pragma once

#include "tiles.h"

namespace engine_cpu {
namespace ENGINE_ISA {

constexpr int64_t kPairBytes = 4 * kStrip;
constexpr int64_t kBf16Unit = 32, kBf16UnitBytes = kBf16Unit / 2 * kPairBytes;

inline int64_t bf16_strip_bytes(int64_t depth) { return (depth + kBf16Unit - 1) / kBf16Unit * kBf16UnitBytes; }

// Two consecutive k of 16 columns, or of one row for all columns.
#if defined(__AVX512BF16__)
using Bf16Pair = u32x16;
ENGINE_INLINE Bf16Pair bf16_pair(u32x16 bits) { return bits; }
ENGINE_INLINE void dot_pair(f32x16& acc, Bf16Pair w, Bf16Pair x) {
  // Not the intrinsic: g++ 12 spills accumulators around it.
  asm("vdpbf16ps %2, %1, %0" : "+v"(acc) : "v"(w), "v"(x));
}
#else
struct Bf16Pair {
  f32x16 first, second;
};
ENGINE_INLINE Bf16Pair bf16_pair(u32x16 bits) { return {bit_cast<f32x16>(bits << 16), bit_cast<f32x16>(bits & 0xffff0000)}; }
ENGINE_INLINE void dot_pair(f32x16& acc, Bf16Pair w, Bf16Pair x) {
  acc = fma(w.second, x.second, fma(w.first, x.first, acc));
}
#endif

template <int kRows, int kPanels>
ENGINE_INLINE void add_pair(const uint8_t* weights, const uint32_t (&x)[kRows], f32x16 (&sums)[kRows][kPanels]) {
  Bf16Pair w[kPanels];
#pragma GCC unroll 8
  for (int p = 0; p < kPanels; ++p) w[p] = bf16_pair(load_as<u32x16>(weights + 64 * p));
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    const Bf16Pair a = bf16_pair(splat_as<u32x16>(x[r]));
#pragma GCC unroll 8
    for (int p = 0; p < kPanels; ++p) dot_pair(sums[r][p], w[p], a);
  }
}

// acc [kRows][64] += `depth` k of the strip from `weights` on, times x[r][0..depth) bf16. kAhead: the weights come from
// memory.
template <int kRows, bool kAhead>
void tile_bf16(const uint8_t* weights, const uint8_t* const* rows, int64_t depth, float* acc) {
  static_assert(kRows <= kTileRows);
  const uint8_t* x[kRows];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) x[r] = rows[r];
  for (int panel0 = 0; panel0 < 4; panel0 += kPanelsAtOnce) {
    f32x16 sums[kRows][kPanelsAtOnce];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
      for (int p = 0; p < kPanelsAtOnce; ++p) sums[r][p] = load(acc + r * kStrip + 16 * (panel0 + p));
    const uint8_t* at = weights + 64 * panel0;
    uint32_t pair[kRows];
    int64_t k = 0;
    for (; k + 2 <= depth; k += 2, at += kPairBytes) {
      if constexpr (kAhead)
        for (int i = 0; i < 64 * kPanelsAtOnce; i += 64) __builtin_prefetch(at + kPrefetchDistance + i, 0, 2);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) std::memcpy(&pair[r], x[r] + 2 * k, 4);
      add_pair(at, pair, sums);
    }
    if (k < depth) {  // an odd depth's last k, beside a weight of 0
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        pair[r] = 0;
        std::memcpy(&pair[r], x[r] + 2 * k, 2);
      }
      add_pair(at, pair, sums);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
      for (int p = 0; p < kPanelsAtOnce; ++p) store(acc + r * kStrip + 16 * (panel0 + p), sums[r][p]);
  }
}

}  // namespace ENGINE_ISA
}  // namespace engine_cpu
