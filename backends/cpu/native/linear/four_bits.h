// Tables of the four-bit numbers of bitsandbytes: NF4 (QLoRA, arXiv 2305.14314, appendix E) and FP4.
#pragma once

#include "../simd.h"

namespace engine_cpu {
namespace ENGINE_ISA {

alignas(64) constexpr float kNF4[16] = {
    -1.0f,
    -0.6961928009986877f,
    -0.5250730514526367f,
    -0.39491748809814453f,
    -0.28444138169288635f,
    -0.18477343022823334f,
    -0.09105003625154495f,
    0.0f,
    0.07958029955625534f,
    0.16093020141124725f,
    0.24611230194568634f,
    0.33791524171829224f,
    0.44070982933044434f,
    0.5626170039176941f,
    0.7229568362236023f,
    1.0f,
};
alignas(64) constexpr float kFP4[16] = {
    0.0f,  0.0625f / 12,  8.0f / 12,  1.0f,  4.0f / 12,  0.5f,  2.0f / 12,  0.25f,
    -0.0f, -0.0625f / 12, -8.0f / 12, -1.0f, -4.0f / 12, -0.5f, -2.0f / 12, -0.25f,
};

ENGINE_INLINE u16x16 widen_bytes(const uint8_t* p) {
#if defined(__AVX512F__)
  return bit_cast<u16x16>(_mm256_cvtepu8_epi16(load_as<__m128i>(p)));
#else
  return __builtin_convertvector(load_as<u8x16>(p), u16x16);
#endif
}

// 16 numbers of a table, by the low four bits of each index.
ENGINE_INLINE f32x16 look_up(const float (&table)[16], u32x16 index) {
#if defined(__AVX512F__)
  return _mm512_permutexvar_ps(bit_cast<__m512i>(index), load_as<__m512>(table));
#else
  f32x16 found;
  for (int i = 0; i < 16; ++i) found[i] = table[index[i] & 15];
  return found;
#endif
}

// E4M3 (OCP 8-bit Floating Point Specification 1.0) as f32; NaN's two codes give 480 and -480.
ENGINE_INLINE float e4m3(uint8_t code) {
  return widen_f16(u16x16{static_cast<uint16_t>((code & 0x80) << 8 | (code & 0x7f) << 7)})[0] * 256.0f;
}

}  // namespace ENGINE_ISA
}  // namespace engine_cpu
