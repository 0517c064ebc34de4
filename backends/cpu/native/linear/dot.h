// The integer dot product of the quantized kernels: 16 lanes of u8 x 4 times i8 x 4 added to i32.
#pragma once

#include "../simd.h"

namespace engine_cpu {
namespace ENGINE_ISA {

// dot_bytes<kWide>: acc += the four products of each lane's bytes of w, less `base`, with the signed bytes of a, exactly.
// w is unsigned, below 128 unless kWide; a is in -127..127; base is kWideBase where kWide, else 0.
#if defined(__AVX512VNNI__)
constexpr bool kWideCosts = false;
constexpr int kWideBase = 0;
template <bool kWide>
ENGINE_INLINE void dot_bytes(i32_part& acc, u32_part w, i32_part a) {
  // Not the intrinsic: g++ 12 spills accumulators around it.
  asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(w), "v"(a));
}
#elif defined(__AVX2__)
constexpr bool kWideCosts = true;
constexpr int kWideBase = 128;
template <bool kWide>
ENGINE_INLINE void dot_bytes(i32_part& acc, u32_part w, i32_part a) {
  // vpmaddubsw adds two products in 16 bits: at most 2 * 128 * 127, if the unsigned byte is at most 128. A wide byte, less
  // 128, gives its sign to the other factor.
  auto u = bit_cast<__m256i>(w), s = bit_cast<__m256i>(a);
  if constexpr (kWide) {
    const __m256i less = _mm256_xor_si256(u, _mm256_set1_epi8(-128));
    u = _mm256_abs_epi8(less);
    s = _mm256_sign_epi8(s, less);
  }
  const __m256i pairs = _mm256_maddubs_epi16(u, s);
  acc += bit_cast<i32_part>(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  asm("" : "+x"(acc));  // or g++ 12 sums in another order, with all the terms on the stack first
}
#elif defined(__ARM_NEON)
constexpr bool kWideCosts = true;
constexpr int kWideBase = 128;
template <bool kWide>
ENGINE_INLINE void dot_bytes(i32_part& acc, u32_part w, i32_part a) {
  const auto less = bit_cast<int8x16_t>(kWide ? w ^ 0x80808080 : w);
  const auto s = bit_cast<int8x16_t>(a);
#if defined(__ARM_FEATURE_DOTPROD)
  acc = vdotq_s32(acc, less, s);
#else
  // The sum of two products is at most 2 * 128 * 127, and so fits in 16 bits.
  const int16x8_t low = vmull_s8(vget_low_s8(less), vget_low_s8(s)), high = vmull_high_s8(less, s);
  acc = vpadalq_s16(acc, vpaddq_s16(low, high));
#endif
}
#elif defined(__SSE2__)
constexpr bool kWideCosts = false;
constexpr int kWideBase = 0;
template <bool kWide>
ENGINE_INLINE void dot_bytes(i32_part& acc, u32_part w, i32_part a) {
  // Bytes 0 and 2, then 1 and 3, as 16-bit pairs for pmaddwd.
  const auto u = bit_cast<__m128i>(w), s = bit_cast<__m128i>(a);
  const __m128i even = _mm_madd_epi16(_mm_and_si128(u, _mm_set1_epi16(255)), _mm_srai_epi16(_mm_slli_epi16(s, 8), 8));
  const __m128i odd = _mm_madd_epi16(_mm_srli_epi16(u, 8), _mm_srai_epi16(s, 8));
  acc += bit_cast<i32_part>(_mm_add_epi32(even, odd));
  asm("" : "+x"(acc));  // as above
}
#else
constexpr bool kWideCosts = false;
constexpr int kWideBase = 0;
template <bool kWide>
ENGINE_INLINE void dot_bytes(i32_part& acc, u32_part w, i32_part a) {
  for (int byte = 0; byte < 4; ++byte)
    acc += bit_cast<i32_part>(w >> 8 * byte & 255) * ((a << (24 - 8 * byte)) >> 24);
}
#endif

template <bool kWide, class A, class W>
ENGINE_INLINE void dot_bytes(Pair<A>& acc, Pair<W> w, Pair<A> a) {
  dot_bytes<kWide>(acc.lo, w.lo, a.lo);
  dot_bytes<kWide>(acc.hi, w.hi, a.hi);
}

// Integer sums start from kDotBias. With registers to spare, that is the bits of the float 1.5 * 2^23, so that a sum's bits
// are the float 1.5 * 2^23 + dot (|dot| < 2^22), and one fma gives what conversion and product would: with no more than 22
// significant bits in the scale, 1.5 * 2^23 * scale is exact, and fma rounds once.
#if defined(__AVX512F__)
constexpr int32_t kDotBias = 0x4b400000;
ENGINE_INLINE f32x16 scaled_dot(i32x16 dot, f32x16 scale) {
  return fma(bit_cast<f32x16>(dot), scale, scale * -12582912.0f);
}
#else
constexpr int32_t kDotBias = 0;
ENGINE_INLINE f32x16 scaled_dot(i32x16 dot, f32x16 scale) { return to_f32(dot) * scale; }
#endif

// Four consecutive activation bytes in every lane.
ENGINE_INLINE i32x16 splat_step(const int8_t* q) { return splat_i32(load_as<int32_t>(q)); }

}  // namespace ENGINE_ISA
}  // namespace engine_cpu
