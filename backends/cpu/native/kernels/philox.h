// Philox4x32-10, the counter-based generator of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as
// 1, 2, 3" (SC 2011), for 16 counters at once; and Gumbel noise from its words.
#pragma once

#include "../simd.h"
#include "../simd_math.h"

namespace engine_cpu {
namespace ENGINE_ISA {

// words[j][i]: word j of the counter (c0[i], c1, c2, 0).
ENGINE_INLINE void philox(u32x16 c0, uint32_t c1, uint32_t c2, const uint32_t* key, u32x16* words) {
  u32x16 w0 = c0, w1 = splat_as<u32x16>(c1), w2 = splat_as<u32x16>(c2), w3{};
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

// The words of the 64 tokens from 4 * counter on: token t takes word t % 4 of counter t / 4. words[j][4g + r] is that of token
// 16r + 4g + j; gumbel_tokens puts them in order.
ENGINE_INLINE void token_words(uint32_t counter, uint32_t position, uint32_t branch, const uint32_t* key, u32x16* words) {
  const i32x16 lane = lane_index();
  philox(bit_cast<u32x16>((lane & 3) << 2 | lane >> 2) + counter, position, branch, key, words);
}

// The noise of these tokens, in their order.
ENGINE_INLINE void gumbel_tokens(const u32x16* words, f32x16* noise) {
  f32x16 g[4];
  for (int j = 0; j < 4; ++j) g[j] = gumbel(words[j]);
  f32x16 low[2], high[2];
  for (int j = 0; j < 2; ++j) {
    low[j] = zip_low(g[j], g[j + 2]);
    high[j] = zip_high(g[j], g[j + 2]);
  }
  noise[0] = zip_low(low[0], low[1]);
  noise[1] = zip_high(low[0], low[1]);
  noise[2] = zip_low(high[0], high[1]);
  noise[3] = zip_high(high[0], high[1]);
}

// Whether the noise of any of these tokens may be as great as `least`. As -log u >= 1 - u, noise is at most -log(1 - u), and
// u = 1 - (rest - 1/2) * 2^-24 for the 24 bits 2^24 - rest.
ENGINE_INLINE bool may_reach(const u32x16* words, float least) {
  if (!(least > 0)) return true;
  const float rest = exp(splat(-least))[0] * 16777300.0f + 1.0f;  // 2^24 and what exp may be off by
  const i32x16 bits = splat_i32(rest < 16777216.0f ? 16777216 - static_cast<int32_t>(rest) : 0);
  i32x16 found{};
  for (int j = 0; j < 4; ++j) found |= bit_cast<i32x16>(words[j] >> 8) >= bits;
  return any(found);
}

}  // namespace ENGINE_ISA
}  // namespace engine_cpu
