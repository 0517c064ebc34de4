// Philox4x32-10, the counter-based generator of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as
// 1, 2, 3" (SC 2011), for 16 counters at once; and Gumbel noise from its words.
#pragma once

#include "../simd.h"
#include "../simd_math.h"

namespace engine_cpu {
namespace ENGINE_ISA {

// The high and low 32 bits of each lane's product with m.
ENGINE_INLINE void multiply_wide(u32x16 x, uint32_t m, u32x16& high, u32x16& low) {
#if defined(__AVX512F__)
  const __m512i a = bit_cast<__m512i>(x), b = _mm512_set1_epi32(static_cast<int32_t>(m));
  const __m512i even = _mm512_mul_epu32(a, b), odd = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), b);
  high = bit_cast<u32x16>(_mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd));
  low = bit_cast<u32x16>(_mm512_mask_blend_epi32(0xaaaa, even, _mm512_slli_epi64(odd, 32)));
#else
  for (int i = 0; i < 16; ++i) high[i] = static_cast<uint32_t>(static_cast<uint64_t>(x[i]) * m >> 32);
  low = x * m;
#endif
}

// words[j][i]: word j of the counter (first + i, c1, c2, 0).
ENGINE_INLINE void philox(uint32_t first, uint32_t c1, uint32_t c2, const uint32_t* key, u32x16* words) {
  u32x16 w0 = bit_cast<u32x16>(lane_index()) + first, w1 = u32x16{} + c1, w2 = u32x16{} + c2, w3{};
  uint32_t k0 = key[0], k1 = key[1];
  for (int round = 0; round < 10; ++round) {
    u32x16 high0, low0, high1, low1;
    multiply_wide(w0, 0xd2511f53, high0, low0);
    multiply_wide(w2, 0xcd9e8d57, high1, low1);
    w0 = high1 ^ w1 ^ k0;
    w1 = low1;
    w2 = high0 ^ w3 ^ k1;
    w3 = low0;
    k0 += 0x9e3779b9;
    k1 += 0xbb67ae85;
  }
  words[0] = w0;
  words[1] = w1;
  words[2] = w2;
  words[3] = w3;
}

// -log(-log u), u = (word >> 8) * 2^-24 + 2^-25. These u need 25 bits, so near 1 the logarithm is taken of 1 - u,
// which f32 holds exactly.
ENGINE_INLINE f32x16 gumbel(u32x16 word) {
  const i32x16 t = bit_cast<i32x16>(word >> 8);
  const f32x16 u = (to_f32(t) + 0.5f) * 0x1p-24f;
  f32x16 f, n;
  split_power(u, f, n);
  const i32x16 near_one = t >= 12582912;  // 0.75 * 2^24
  f = select(near_one, (to_f32(16777215 - t) + 0.5f) * -0x1p-24f, f);
  n = select(near_one, f32x16{}, n);
  return -log(-log_parts(f, n));
}

// Gumbel noise of the 64 tokens from 4 * counter on: token t takes word t % 4 of counter t / 4.
ENGINE_INLINE void gumbel_tokens(uint32_t counter, uint32_t position, uint32_t branch, const uint32_t* key, float* noise) {
  u32x16 words[4];
  philox(counter, position, branch, key, words);
  float lanes[4][16];
  for (int j = 0; j < 4; ++j) store(lanes[j], gumbel(words[j]));
  for (int i = 0; i < 16; ++i)
    for (int j = 0; j < 4; ++j) noise[4 * i + j] = lanes[j][i];
}

}  // namespace ENGINE_ISA
}  // namespace engine_cpu
