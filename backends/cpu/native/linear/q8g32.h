// The packed activation "q8g32": a row of K values (K a multiple of 32) as
//   [int8 q[K]] [f32 scale[K/32]] [i32 nsum16[K/16]],   K + K/8 + K/4 bytes, rows contiguous,
// with scale = absmax / 127 of each 32, q = x * (127 / absmax) to nearest, ties to even, and nsum16 = minus the sum of each
// 16 q. Where scale is 0 or not finite, q is 0; a scale that is not finite makes every product with it so. A scale that a
// model fixes takes the place of the finite ones, q is x / scale and saturates from -128 to 127. quantize.h makes rows.
#pragma once

#include "../simd.h"

namespace engine_cpu {
namespace ENGINE_ISA {

constexpr int64_t kGroup = 32;

ENGINE_INLINE int64_t q8g32_row_bytes(int64_t depth) { return depth + depth / 8 + depth / 4; }

// Where the parts of a row begin.
ENGINE_INLINE int8_t* q8g32_values(uint8_t* row) { return reinterpret_cast<int8_t*>(row); }
ENGINE_INLINE float* q8g32_scales(uint8_t* row, int64_t depth) { return reinterpret_cast<float*>(row + depth); }
ENGINE_INLINE int32_t* q8g32_sums(uint8_t* row, int64_t depth) { return reinterpret_cast<int32_t*>(row + depth + depth / 8); }
ENGINE_INLINE const float* q8g32_scales(const uint8_t* row, int64_t depth) {
  return reinterpret_cast<const float*>(row + depth);
}
ENGINE_INLINE const int32_t* q8g32_sums(const uint8_t* row, int64_t depth) {
  return reinterpret_cast<const int32_t*>(row + depth + depth / 8);
}

// What the float work of a group needs of a row beside its bytes (tiles.h): its scale, and its correction's bits.
struct RowFactors {
  float scale;
  int32_t correction;
};

}  // namespace ENGINE_ISA
}  // namespace engine_cpu
