// What a row of attention knows of some tokens, and how two of these become one (as in flash decoding).
#pragma once

#include <cstring>

#include "../simd.h"
#include "../simd_math.h"

namespace engine_cpu {
namespace ENGINE_ISA {

// Softmax sums of one row over some tokens: o [width] is relative to the maximum m, a power of two as all scores are here: e^s is
// 2^(s kPowers).
constexpr float kPowers = 1.44269504f;

struct Partial {
  float* m;
  float* l;
  float* o;
};

// That of a row, of [rows][width + 16].
inline Partial partial_at(float* base, int64_t row, int64_t width) {
  float* p = base + row * (width + 16);
  return {p + width, p + width + 1, p};
}

// target = target merged with source, the later chunk.
ENGINE_INLINE void merge(Partial target, Partial source, int64_t width) {
  const float m = *target.m > *source.m ? *target.m : *source.m;
  const f32x16 a = exp2(splat(*target.m - m)), b = exp2(splat(*source.m - m));
  *target.m = m;
  *target.l = *target.l * a[0] + *source.l * b[0];
  for (int64_t d = 0; d < width; d += 16) store(target.o + d, fma(load(source.o + d), b, load(target.o + d) * a));
}

ENGINE_INLINE void assign(Partial target, Partial source, int64_t width) {
  *target.m = *source.m;
  *target.l = *source.l;
  std::memcpy(target.o, source.o, width * sizeof(float));
}

}  // namespace ENGINE_ISA
}  // namespace engine_cpu
