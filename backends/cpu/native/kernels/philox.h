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

// words[j][i]: word j of the counter (c0[i], c1, c2, 0).
ENGINE_INLINE void philox(u32x16 c0, uint32_t c1, uint32_t c2, const uint32_t* key, u32x16* words) {
  u32x16 w0 = c0, w1 = u32x16{} + c1, w2 = u32x16{} + c2, w3{};
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
ENGINE_INLINE void gumbel_tokens(uint32_t counter, uint32_t position, uint32_t branch, const uint32_t* key,
                                 f32x16* noise) {
  // Lane 4g + r computes counter 4r + g, so that transposing the 4 x 4 blocks of the four words puts tokens in order.
  const u32x16 c0 = u32x16{0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15} + counter;
  u32x16 words[4];
  philox(c0, position, branch, key, words);
  f32x16 g[4];
  for (int j = 0; j < 4; ++j) g[j] = gumbel(words[j]);
  f32x16 low[2], high[2];
  for (int j = 0; j < 2; ++j) {
    low[j] = __builtin_shufflevector(g[j], g[j + 2], 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
    high[j] = __builtin_shufflevector(g[j], g[j + 2], 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
  }
  noise[0] = __builtin_shufflevector(low[0], low[1], 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
  noise[1] = __builtin_shufflevector(low[0], low[1], 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
  noise[2] = __builtin_shufflevector(high[0], high[1], 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
  noise[3] = __builtin_shufflevector(high[0], high[1], 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
}

}  // namespace ENGINE_ISA
}  // namespace engine_cpu
