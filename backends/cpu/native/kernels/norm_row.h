// The norm of one row, for the kernels that normalise.
#pragma once

#include "../packed_weight.h"
#include "../simd.h"
#include "../work_split.h"

namespace engine_cpu {
namespace ENGINE_ISA {

// sum over the lanes of term(values, sum), with four running sums. values(i, count): `count` lanes from i on, zeros after.
template <class Values, class Term>
ENGINE_INLINE float sum_lanes(int64_t width, Values values, Term term) {
  f32x16 sums[4] = {};
  int64_t i = 0;
  for (; i + 64 <= width; i += 64)
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) sums[j] = term(values(i + 16 * j, 16), sums[j]);
  for (int j = 0; i < width; ++j, i += 16) sums[j] = term(values(i, i + 16 <= width ? 16 : width - i), sums[j]);
  return reduce_add((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

ENGINE_INLINE f32x16 load_lanes(const float* x, int64_t count) { return count == 16 ? load(x) : load_first(x, count); }
ENGINE_INLINE void store_lanes(float* y, f32x16 x, int64_t count) {
  if (count == 16) return store(y, x);
  store_first(y, x, count);
}

ENGINE_INLINE f32x16 add_square(f32x16 x, f32x16 sum) { return fma(x, x, sum); }

ENGINE_INLINE float rms_scale(float squares, float eps, int64_t width) {
  return 1.0f / __builtin_sqrtf(squares / static_cast<float>(width) + eps);
}

// y = rms_norm(x), both f32 [width].
ENGINE_INLINE void rms_row(const float* x, const float* weight, float eps, float* y, int64_t width) {
  const auto values = [x](int64_t i, int64_t count) { return load_lanes(x + i, count); };
  const float scale = rms_scale(sum_lanes(width, values, add_square), eps, width);
  int64_t i = 0;
  for (; i + 16 <= width; i += 16) store(y + i, load(x + i) * scale * load(weight + i));
  if (i < width) store_first(y + i, load_lanes(x + i, width - i) * scale * load_lanes(weight + i, width - i), width - i);
}

// The weight of a norm as f32 [width], plus `weight_offset` (Gemma keeps w - 1).
class NormWeight {
 public:
  NormWeight(const KernelArgs& args, const PackedWeight& weight) : values_(weight.nbytes) {
    width_ = weight.columns;
    const float offset = static_cast<float>(args.number_or("weight_offset", 0));
    for (int64_t i = 0; i < width_; ++i) values_.as<float>()[i] = weight.f32()[i] + offset;
  }
  const float* data() const { return values_.as<float>(); }
  int64_t width() const { return width_; }

 private:
  Buffer values_;
  int64_t width_;
};

}  // namespace ENGINE_ISA
}  // namespace engine_cpu
