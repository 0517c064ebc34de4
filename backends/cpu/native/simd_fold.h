// The lanes of 16 vectors put together at once, each by the tree of fold() in simd.h: to the same bits as one after the other.
#pragma once

#include "simd.h"

namespace engine_cpu {
namespace ENGINE_ISA {

#if defined(__AVX512F__)

// Lane i is all of of[i].
template <class Combine>
ENGINE_INLINE f32x16 fold_each(const f32x16 (&of)[16], Combine combine) {
  f32x16 halves[8], quarters[4], pairs[2];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i)
    halves[i] = combine(_mm512_shuffle_f32x4(of[i], of[i + 8], 0x44), _mm512_shuffle_f32x4(of[i], of[i + 8], 0xee));
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i)
    quarters[i] = combine(_mm512_shuffle_f32x4(halves[i], halves[i + 4], 0x88),
                          _mm512_shuffle_f32x4(halves[i], halves[i + 4], 0xdd));
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i)
    pairs[i] = combine(_mm512_shuffle_ps(quarters[i], quarters[i + 2], 0x44),
                       _mm512_shuffle_ps(quarters[i], quarters[i + 2], 0xee));
  const f32x16 all = combine(_mm512_shuffle_ps(pairs[0], pairs[1], 0x88), _mm512_shuffle_ps(pairs[0], pairs[1], 0xdd));
  const __m512i order = _mm512_setr_epi32(0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15);
  return _mm512_permutexvar_ps(order, all);
}

ENGINE_INLINE f32x16 sum_of_each(const f32x16 (&of)[16]) {
  return fold_each(of, [](f32x16 a, f32x16 b) { return a + b; });
}
ENGINE_INLINE f32x16 max_of_each(const f32x16 (&of)[16]) {
  return fold_each(of, [](f32x16 a, f32x16 b) { return select(a > b, a, b); });
}

#else

ENGINE_INLINE f32x16 sum_of_each(const f32x16 (&of)[16]) {
  float lanes[16];
  for (int i = 0; i < 16; ++i) lanes[i] = reduce_add(of[i]);
  return load(lanes);
}
ENGINE_INLINE f32x16 max_of_each(const f32x16 (&of)[16]) {
  float lanes[16];
  for (int i = 0; i < 16; ++i) lanes[i] = reduce_max(of[i]);
  return load(lanes);
}

#endif

}  // namespace ENGINE_ISA
}  // namespace engine_cpu
