// The integer dot product of attention over a cache of whole numbers: 16 lanes of i16 x 2 times i16 x 2 added to i32.
#pragma once

#include "../simd.h"

namespace engine_cpu {
namespace ENGINE_ISA {

// acc and both products of each lane's halves, exactly unless the sum leaves 32 bits: it wraps then, as do the sums of rows that
// only fill a tile. By value: of sums whose address it is given g++ 12 keeps every one in memory.
ENGINE_INLINE i32_part dot_pairs(i32_part acc, i32_part a, i32_part b) {
#if defined(__AVX512VNNI__)
  // Not the intrinsic: g++ 12 spills accumulators around it.
  asm("vpdpwssd %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));
  return acc;
#elif defined(__AVXVNNI__)
  asm("%{vex%} vpdpwssd %2, %1, %0" : "+x"(acc) : "x"(a), "x"(b));
  return acc;
#else
  u32_part products;
#if defined(__AVX2__)
  products = bit_cast<u32_part>(_mm256_madd_epi16(bit_cast<__m256i>(a), bit_cast<__m256i>(b)));
#elif defined(__ARM_NEON)
  const auto x = bit_cast<int16x8_t>(a), y = bit_cast<int16x8_t>(b);
  products = bit_cast<u32_part>(vpaddq_s32(vmull_s16(vget_low_s16(x), vget_low_s16(y)), vmull_high_s16(x, y)));
#elif defined(__SSE2__)
  products = bit_cast<u32_part>(_mm_madd_epi16(bit_cast<__m128i>(a), bit_cast<__m128i>(b)));
#else
  products = bit_cast<u32_part>(((a << 16) >> 16) * ((b << 16) >> 16)) + bit_cast<u32_part>((a >> 16) * (b >> 16));
#endif
  return bit_cast<i32_part>(bit_cast<u32_part>(acc) + products);
#endif
}
template <class H>
ENGINE_INLINE Pair<H> dot_pairs(Pair<H> acc, Pair<H> a, Pair<H> b) {
  return {dot_pairs(acc.lo, a.lo, b.lo), dot_pairs(acc.hi, a.hi, b.hi)};
}

// 32 signed bytes as pairs of 16 bits.
template <class V = i32x16>
ENGINE_INLINE V widen_pairs(const int8_t* bytes) {
  if constexpr (kIsPair<V>) {
    return {widen_pairs<HalfOf<V>>(bytes), widen_pairs<HalfOf<V>>(bytes + sizeof(V) / 4)};
  } else {
#if defined(__AVX512F__)
    return bit_cast<V>(_mm512_cvtepi8_epi16(load_as<__m256i>(bytes)));
#elif defined(__AVX2__)
    return bit_cast<V>(_mm256_cvtepi8_epi16(load_as<__m128i>(bytes)));
#elif defined(__ARM_NEON)
    return bit_cast<V>(vmovl_s8(vld1_s8(bytes)));
#else
    typename NativeLanes<int16_t, 2 * kPartLanes>::type wide;
    for (int i = 0; i < 2 * kPartLanes; ++i) wide[i] = bytes[i];
    return bit_cast<V>(wide);
#endif
  }
}

ENGINE_INLINE i32x16 load_pairs(const int8_t* bytes) { return widen_pairs(bytes); }
ENGINE_INLINE i32x16 load_pairs(const int16_t* wide) { return load_as<i32x16>(wide); }

}  // namespace ENGINE_ISA
}  // namespace engine_cpu
