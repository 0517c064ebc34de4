// The packed activation "q8g32": a row of K values (K a multiple of 32) as
//   [int8 q[K]] [f32 scale[K/32]] [i32 nsum16[K/16]],   K + K/8 + K/4 bytes, rows contiguous,
// with scale = absmax / 127 of each span of k, q = x * (127 / absmax) to nearest, ties to even, and nsum16 = minus the sum of
// each 16 q. A span is 32, or 128 ("q8g128"), of which each 32 have the same scale in their places: for weights of formats whose
// blocks have 256 k, where llama.cpp has one scale for all of these. Where scale is 0 or not finite, q is 0; a scale that is not
// finite makes every product with it so. A scale that a model fixes takes the place of the finite ones, q is x / scale and
// saturates from -128 to 127. quantize.h makes rows.
#pragma once

#include "../simd.h"

namespace engine_cpu {
namespace ENGINE_ISA {

constexpr int64_t kGroup = 32;
constexpr int64_t kLongSpan = 128;

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

// What the sums of a group need of a row beside its bytes (tiles.h): what they are multiplied by beforehand where a span
// begins, and the group's correction's bits.
struct RowFactors {
  float rescale;
  int32_t correction;
};

// A row's sums are kept in units of the scale of the span that they have come to, and go from unit to unit. A scale counts
// as no less than 2^-40 of the row's greatest: what that adds is beneath the rounding of the greatest's bytes.
class RowUnits {
 public:
  RowUnits() = default;
  // scales [groups of 32], of which each `step` are a span.
  RowUnits(const float* scales, int64_t groups, int64_t step) : scales_(scales), step_(step) {
    int32_t most = 0;
    for (int64_t g = 0; g < groups; g += step) {
      const int32_t bits = bit_cast<int32_t>(scales[g]) & 0x7fffffff;
      most = bits > most ? bits : most;
    }
    finite_ = most < 0x7f800000;
    least_ = bit_cast<float>(most) * 0x1p-40f;
    if (least_ < 0x1p-149f) least_ = most == 0 ? 1.0f : 0x1p-149f;
    last_ = of(groups - step);
  }

  // From the unit of the span before to that of the one which begins with this group of 32.
  float begin(int64_t group) const { return group == 0 || !finite_ ? 1.0f : of(group - step_) / of(group); }
  // From the last unit to 1; a scale that is not finite makes all sums so.
  float end() const { return finite_ ? last_ : __builtin_nanf(""); }

 private:
  float of(int64_t group) const {
    const float scale = scales_[group];
    return __builtin_fabsf(scale) < least_ ? least_ : scale;
  }

  const float* scales_;
  int64_t step_;
  bool finite_;
  float least_, last_;
};

}  // namespace ENGINE_ISA
}  // namespace engine_cpu
