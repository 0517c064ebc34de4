// Tables of numbers of four bits: NF4 (QLoRA, arXiv 2305.14314, appendix E) and FP4 of bitsandbytes, those of ggml's IQ4, and E2M1
// (OCP Microscaling Formats 1.0) doubled.
#pragma once

#include <cstring>

#include "../simd_storage.h"

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

constexpr int8_t kNonLinear[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int8_t kE2M1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// A table of bytes for look_up: numbers from an offset on, once for each 16 bytes of a register.
struct RepeatedTable {
  alignas(64) uint8_t bytes[64];

  constexpr RepeatedTable(const int8_t (&numbers)[16], int offset) : bytes() {
    for (int i = 0; i < 64; ++i) bytes[i] = static_cast<uint8_t>(numbers[i % 16] + offset);
  }
};

// The table's bytes at these places, 0 to 15 each.
template <class V>
ENGINE_INLINE V look_up(V places, const uint8_t* table) {
  if constexpr (kIsPair<V>) {
    return {look_up(places.lo, table), look_up(places.hi, table)};
  } else {
#if defined(__AVX512BW__)
    return bit_cast<V>(_mm512_shuffle_epi8(load_as<__m512i>(table), bit_cast<__m512i>(places)));
#elif defined(__AVX2__)
    return bit_cast<V>(_mm256_shuffle_epi8(load_as<__m256i>(table), bit_cast<__m256i>(places)));
#elif defined(__ARM_NEON)
    return bit_cast<V>(vqtbl1q_u8(vld1q_u8(table), bit_cast<uint8x16_t>(places)));
#else
    uint8_t bytes[sizeof(V)];
    std::memcpy(bytes, &places, sizeof(V));
    for (uint8_t& byte : bytes) byte = table[byte];
    return load_as<V>(bytes);
#endif
  }
}

// E4M3 (OCP 8-bit Floating Point Specification 1.0) as f32; NaN's two codes give 480 and -480.
ENGINE_INLINE float e4m3(uint8_t code) {
  return to_f32(f16{static_cast<uint16_t>((code & 0x80) << 8 | (code & 0x7f) << 7)}) * 256.0f;
}

}  // namespace ENGINE_ISA
}  // namespace engine_cpu
