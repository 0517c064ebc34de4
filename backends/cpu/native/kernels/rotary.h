// Rotary position embedding (Su et al., 2021) of one head.
#pragma once

#include <stdexcept>

#include "../simd.h"
#include "../work_split.h"

namespace engine_cpu {
namespace ENGINE_ISA {

// The angle within a quarter turn's half, [-pi/4, pi/4], and how many quarter turns were taken off.
struct Reduced {
  f32x16 angle;
  i32x16 quadrant;
};

// angle mod pi/2 in double: what is left is exact to 1e-9 for angles to 1e9.
ENGINE_INLINE Reduced reduce_angle(f32x16 angle) {
  const auto x = convert<f64x16>(angle);
  // Adding and taking away 1.5 * 2^52 rounds to the nearest integer.
  const f64x16 n = (x * 0.63661977236758134308 + 0x1.8p52) - 0x1.8p52;
  const f64x16 rest = (x - n * 0x1.921fb54p0) - n * 0x1.10b4611a62633p-30;
  return {convert<f32x16>(rest), convert<i32x16>(n)};
}

// Taylor polynomials: the first term left out is under 4e-10 on [-pi/4, pi/4].
ENGINE_INLINE void sine_cosine(Reduced x, f32x16& sine, f32x16& cosine) {
  const f32x16 z = x.angle * x.angle;
  f32x16 s = splat(2.7557319e-6f);
  s = fma(s, z, splat(-1.9841270e-4f));
  s = fma(s, z, splat(8.3333333e-3f));
  s = fma(s, z, splat(-1.6666667e-1f));
  s = fma(s * z, x.angle, x.angle);
  f32x16 c = splat(2.4801587e-5f);
  c = fma(c, z, splat(-1.3888889e-3f));
  c = fma(c, z, splat(4.1666667e-2f));
  c = fma(c, z, splat(-0.5f));
  c = fma(c, z, splat(1.0f));
  const i32x16 swap = (x.quadrant & 1) != 0;
  const i32x16 sine_sign = (x.quadrant & 2) << 30;
  const i32x16 cosine_sign = ((x.quadrant + 1) & 2) << 30;
  sine = bit_cast<f32x16>(bit_cast<i32x16>(select(swap, c, s)) ^ sine_sign);
  cosine = bit_cast<f32x16>(bit_cast<i32x16>(select(swap, s, c)) ^ cosine_sign);
}

// The angle of pair i is f32(position) * frequency[i], an f32 product, as models are trained with. The first rotary_dim
// of a head are rotated in pairs: (i, i + rotary_dim / 2), or (2i, 2i + 1) if interleaved. `frequencies`: f32
// [rotary_dim / 2]. Numbers: head_dim, rotary_dim, interleaved, scale (multiplies cosine and sine).
class Rotary {
 public:
  Rotary(const KernelArgs& args, const PackedWeight& frequencies)
      : dim_(args.integer("head_dim")),
        half_(args.integer("rotary_dim") / 2),
        padded_((half_ + 15) / 16 * 16),
        interleaved_(args.number_or("interleaved", 0) != 0),
        scale_(static_cast<float>(args.number_or("scale", 1))),
        frequencies_(padded_ * sizeof(float)) {
    if (half_ * 2 > dim_ || frequencies.columns != half_)
      throw std::invalid_argument("rotary_dim is at most head_dim, and there are rotary_dim / 2 frequencies.");
    std::memset(frequencies_.data(), 0, frequencies_.size());
    std::memcpy(frequencies_.data(), frequencies.data, half_ * sizeof(float));
  }

  // Floats of a position's table: cosines, then sines.
  int64_t table_size() const { return 2 * padded_; }

  void fill_table(int32_t position, float* table) const {
    for (int64_t i = 0; i < padded_; i += 16) {
      f32x16 s, c;
      sine_cosine(reduce_angle(static_cast<float>(position) * load(frequencies_.as<float>() + i)), s, c);
      store(table + i, c * scale_);
      store(table + padded_ + i, s * scale_);
    }
  }

  // A head x [head_dim] into y of the same size, which is another.
  ENGINE_INLINE void rotate(const float* x, const float* table, float* y) const {
    if (interleaved_)
      rotate_pairs(x, table, y, 2, 1);
    else
      rotate_pairs(x, table, y, 1, half_);
    std::memcpy(y + half_ * 2, x + half_ * 2, (dim_ - half_ * 2) * sizeof(float));
  }

 private:
  // Pair i is (i * step, i * step + other).
  ENGINE_INLINE void rotate_pairs(const float* x, const float* table, float* __restrict y, int64_t step,
                                  int64_t other) const {
    const float *cosine = table, *sine = table + padded_;
    for (int64_t i = 0; i < half_; ++i) {
      const float a = x[i * step], b = x[i * step + other];
      y[i * step] = a * cosine[i] - b * sine[i];
      y[i * step + other] = b * cosine[i] + a * sine[i];
    }
  }

  int64_t dim_, half_, padded_;
  bool interleaved_;
  float scale_;
  Buffer frequencies_;
};

}  // namespace ENGINE_ISA
}  // namespace engine_cpu
