// The packed activation "q8g32": a row of K values (K a multiple of 32) as
//   [int8 q[K]] [f32 scale[K/32]] [i32 nsum16[K/16]],   K + K/8 + K/4 bytes, rows contiguous,
// with scale = absmax / 127 of each 32, q = x / scale to nearest, ties to even, and nsum16 = minus the sum of each 16 q.
// Where scale is 0 or not finite, q is 0; a scale that is not finite makes every product with it so. A scale that a model
// fixes takes the place of the finite ones, and q saturates from -128 to 127.
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

ENGINE_INLINE i32x16 clamp(i32x16 x, int32_t least, int32_t most) {
  return select(x > most, splat_i32(most), select(x < least, splat_i32(least), x));
}

// x to the nearest whole number from -128 to 127.
ENGINE_INLINE i32x16 saturate_i8(f32x16 x) {
  const f32x16 least = splat(-128.0f), most = splat(127.0f);
  return round_i32(select(x > most, most, select(x < least, least, x)));
}

// One group of 32 values, given in two halves, into place in its row. `fixed`: the scale, where it is not 0.
ENGINE_INLINE void quantize_group(f32x16 low, f32x16 high, int8_t* q, float* scale, int32_t* nsum16, float fixed = 0.0f) {
  // The bits of |x| order as integers with infinity above every number and NaN above infinity.
  const i32x16 a = bit_cast<i32x16>(abs(low));
  const i32x16 b = bit_cast<i32x16>(abs(high));
  float s = bit_cast<float>(reduce_max(select(a > b, a, b))) / 127.0f;
  const bool saturates = fixed != 0.0f && s < __builtin_inff();
  if (saturates) s = fixed;
  *scale = s;
  const bool usable = s > 0.0f && s < __builtin_inff();
  const f32x16 divisor = splat(usable ? s : __builtin_inff());  // x / inf is 0, or NaN, which goes next
  i32x16 x = saturates ? saturate_i8(low / divisor) : round_i32(low / divisor);
  i32x16 y = saturates ? saturate_i8(high / divisor) : round_i32(high / divisor);
  if (!saturates && __builtin_expect(!usable || s < 0x1p-126f, 0)) {  // a subnormal scale is coarse: x / scale may pass 127
    x = usable ? clamp(x, -127, 127) : i32x16{};
    y = usable ? clamp(y, -127, 127) : i32x16{};
  }
  store(q, narrow_i8(x));
  store(q + 16, narrow_i8(y));
  nsum16[0] = -reduce_add(x);
  nsum16[1] = -reduce_add(y);
}

// x f32 [depth] as one row.
ENGINE_INLINE void quantize_row(const float* x, int64_t depth, uint8_t* row) {
  int8_t* q = q8g32_values(row);
  float* scales = q8g32_scales(row, depth);
  int32_t* sums = q8g32_sums(row, depth);
  for (int64_t g = 0; g < depth / kGroup; ++g)
    quantize_group(load(x + g * kGroup), load(x + g * kGroup + 16), q + g * kGroup, scales + g, sums + 2 * g);
}

}  // namespace ENGINE_ISA
}  // namespace engine_cpu
