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

// sums [row][panel] += the products of the pair of k at `offset` bytes of each row with those of the panels.
#if defined(__AVX512BF16__)
template <int kRows, int kPanels>
ENGINE_INLINE void add_pair(const uint8_t* weights, const uint8_t* const (&x)[kRows], int64_t offset,
                            f32x16 (&sums)[kRows][kPanels]) {
  u32x16 w[kPanels];
#pragma GCC unroll 8
  for (int p = 0; p < kPanels; ++p) w[p] = load_as<u32x16>(weights + 64 * p);
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    const u32x16 a = splat_as<u32x16>(load_as<uint32_t>(x[r] + offset));
#pragma GCC unroll 8
    // Not the intrinsic: g++ 12 spills accumulators around it.
    for (int p = 0; p < kPanels; ++p) asm("vdpbf16ps %2, %1, %0" : "+v"(sums[r][p]) : "v"(w[p]), "v"(a));
  }
}
#else
// The first or the second number of each lane.
template <bool kSecond>
ENGINE_INLINE f32_part widen_half(u32_part bits) {
  return bit_cast<f32_part>(kSecond ? bits & 0xffff0000 : bits << 16);
}

// Of g++ 12's own accord the number would be widened in a register of the other kind and moved over, and sums be copied.
ENGINE_INLINE void hold([[maybe_unused]] u32_part& bits) {
#if defined(__AVX2__)
  asm volatile("" : "+x"(bits));
#endif
}
ENGINE_INLINE void add_product(f32_part& acc, f32_part w, f32_part a) {
#if defined(__AVX2__)
  asm volatile("vfmadd231ps %2, %1, %0" : "+x"(acc) : "x"(w), "x"(a));
#else
  acc = fma(w, a, acc);
#endif
}

// The first k of a pair for all rows, then the second: both at once have no room in 16 registers.
template <int kRows, int kPanels, bool kSecond = false>
ENGINE_INLINE void add_pair(const uint8_t* weights, const uint8_t* const (&x)[kRows], int64_t offset,
                            f32x16 (&sums)[kRows][kPanels]) {
  constexpr auto kParts = std::make_integer_sequence<int, kPartsOf<f32x16>>();
  f32x16 w[kPanels];
#pragma GCC unroll 8
  for (int p = 0; p < kPanels; ++p) {
    const u32x16 bits = load_as<u32x16>(weights + 64 * p);
    each_part(kParts, [&](auto i) __attribute__((always_inline)) { part_of<i>(w[p]) = widen_half<kSecond>(part_of<i>(bits)); });
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    u32_part bits = splat_as<u32_part>(load_as<uint32_t>(x[r] + offset));
    hold(bits);
    const f32_part a = widen_half<kSecond>(bits);
#pragma GCC unroll 8
    for (int p = 0; p < kPanels; ++p)
      each_part(kParts, [&](auto i) __attribute__((always_inline)) {
        add_product(part_of<i>(sums[r][p]), part_of<i>(w[p]), a);
      });
  }
  if constexpr (!kSecond) {
    asm volatile("" : : : "memory");  // or all rows' pairs wait on the stack for their second number
    add_pair<kRows, kPanels, true>(weights, x, offset, sums);
  }
}
#endif

// acc [kRows][64] += `depth` k of the strip from `weights` on, times x[r][0..depth) bf16, or = where they begin the sums.
template <int kRows, class Ahead>
void tile_bf16(const uint8_t* weights, const uint8_t* const* rows, int64_t depth, bool begin, Ahead ahead, float* acc) {
  static_assert(kRows <= kTileRows);
  constexpr int kPanels = dense_panels<kRows>();
  const uint8_t* x[kRows];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) x[r] = rows[r];
  for (int panel0 = 0; panel0 < 4; panel0 += kPanels) {
    f32x16 sums[kRows][kPanels];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
      for (int p = 0; p < kPanels; ++p) sums[r][p] = begin ? f32x16{} : load(acc + r * kStrip + 16 * (panel0 + p));
    const uint8_t* at = weights + 64 * panel0;
    int64_t k = 0;
    for (; k + 2 <= depth; k += 2, at += kPairBytes) {
      ahead.template ask<64 * kPanels, 4 / kPanels>(at);
      add_pair(at, x, 2 * k, sums);
    }
    if (k < depth) {  // an odd depth's last k, beside a weight of 0
      uint8_t pair[kRows][4] = {};
      const uint8_t* pairs[kRows];
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) pairs[r] = static_cast<uint8_t*>(std::memcpy(pair[r], x[r] + 2 * k, 2));
      add_pair(at, pairs, 0, sums);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
      for (int p = 0; p < kPanels; ++p) store(acc + r * kStrip + 16 * (panel0 + p), sums[r][p]);
  }
}

}  // namespace ENGINE_ISA
}  // namespace engine_cpu
