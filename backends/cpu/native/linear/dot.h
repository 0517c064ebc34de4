// The integer dot product of the quantized kernels: 16 lanes of u8 x 4 times i8 x 4 added to i32.
#pragma once

#include "../simd.h"

namespace engine_cpu {
namespace ENGINE_ISA {

// dot_bytes<kWide>: acc += the four products of each lane's bytes of w, less `base`, with the signed bytes of a, exactly.
// w is unsigned, below 128 unless kWide; base is kWideBase where kWide, else 0.
#if defined(__AVX512VNNI__)
constexpr bool kWideDiffers = false;
constexpr int kWideBase = 0;
#elif defined(__AVX2__)
constexpr bool kWideDiffers = true;
constexpr int kWideBase = 0;
#elif defined(__ARM_NEON)
constexpr bool kWideDiffers = true;
constexpr int kWideBase = 128;
#else
constexpr bool kWideDiffers = false;
constexpr int kWideBase = 0;
#endif

template <bool kWide>
ENGINE_INLINE void dot_bytes(i32_part& acc, u32_part w, i32_part a) {
#if defined(__AVX512VNNI__)
  // Not the intrinsic: g++ 12 spills accumulators around it.
  asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(w), "v"(a));
#elif defined(__AVX2__)
  const auto u = bit_cast<__m256i>(w), s = bit_cast<__m256i>(a);
  __m256i sums;
  if constexpr (kWide) {  // bytes 0 and 2, then 1 and 3, as 16-bit pairs
    const __m256i even = _mm256_and_si256(u, _mm256_set1_epi16(255)), odd = _mm256_srli_epi16(u, 8);
    sums = _mm256_add_epi32(_mm256_madd_epi16(even, _mm256_srai_epi16(_mm256_slli_epi16(s, 8), 8)),
                            _mm256_madd_epi16(odd, _mm256_srai_epi16(s, 8)));
  } else {  // two products in 16 bits are at most 2 * 127 * 128
    sums = _mm256_madd_epi16(_mm256_maddubs_epi16(u, s), _mm256_set1_epi16(1));
  }
  acc += bit_cast<i32_part>(sums);
  asm("" : "+x"(acc));  // or g++ 12 sums in another order, with all the terms on the stack first
#elif defined(__ARM_NEON)
  const auto less = bit_cast<int8x16_t>(kWide ? w ^ 0x80808080 : w);
  const auto s = bit_cast<int8x16_t>(a);
#if defined(__ARM_FEATURE_DOTPROD)
  acc = vdotq_s32(acc, less, s);
#else
  const int16x8_t low = vmull_s8(vget_low_s8(less), vget_low_s8(s)), high = vmull_high_s8(less, s);
  if constexpr (kWide)
    acc += vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high));
  else  // two products in 16 bits are at most 2 * 127 * 128
    acc = vpadalq_s16(acc, vpaddq_s16(low, high));
#endif
#elif defined(__SSE2__)
  // Bytes 0 and 2, then 1 and 3, as 16-bit pairs for pmaddwd.
  const auto u = bit_cast<__m128i>(w), s = bit_cast<__m128i>(a);
  const __m128i even = _mm_madd_epi16(_mm_and_si128(u, _mm_set1_epi16(255)), _mm_srai_epi16(_mm_slli_epi16(s, 8), 8));
  const __m128i odd = _mm_madd_epi16(_mm_srli_epi16(u, 8), _mm_srai_epi16(s, 8));
  acc += bit_cast<i32_part>(_mm_add_epi32(even, odd));
  asm("" : "+x"(acc));  // or g++ 12 sums in another order, with all the terms on the stack first
#else
  for (int byte = 0; byte < 4; ++byte)
    acc += bit_cast<i32_part>(w >> 8 * byte & 255) * ((a << (24 - 8 * byte)) >> 24);
#endif
}

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
