// The integer dot product of the quantized kernels: 16 lanes of u8 x 4 times i8 x 4 added to i32.
#pragma once

#include "../simd.h"

namespace engine_cpu {
namespace ENGINE_ISA {

typedef int16_t i16x32 __attribute__((vector_size(64)));

// acc += the four products of each lane's unsigned bytes of w with the signed bytes of a: exact.
ENGINE_INLINE void dot_u8i8(i32x16& acc, u32x16 w, i32x16 a) {
#if defined(__AVX512VNNI__)
  // Not the intrinsic: g++ 12 spills accumulators around it.
  asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(w), "v"(a));
#elif defined(__SSE2__)
  // Bytes 0 and 2, then 1 and 3, as 16-bit pairs for pmaddwd.
  const i16x32 signs = bit_cast<i16x32>(a);
  const i16x32 factors[2] = {(signs << 8) >> 8, signs >> 8};
  const u32x16 bytes[2] = {w & 0x00ff00ff, w >> 8 & 0x00ff00ff};
  for (int i = 0; i < 2; ++i) {
    __m128i p[4], q[4];
    std::memcpy(p, &bytes[i], 64);
    std::memcpy(q, &factors[i], 64);
    for (int j = 0; j < 4; ++j) p[j] = _mm_madd_epi16(p[j], q[j]);
    acc += load_as<i32x16>(p);
  }
#else
  for (int byte = 0; byte < 4; ++byte)
    acc += bit_cast<i32x16>(w >> 8 * byte & 255) * ((a << (24 - 8 * byte)) >> 24);
#endif
}

// Integer sums start from kDotBias. Where fma is fused, that is the bits of the float 1.5 * 2^23, so that a sum's bits are
// the float 1.5 * 2^23 + dot (|dot| < 2^22), and one fma gives what conversion and product would: with no more than 22
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
