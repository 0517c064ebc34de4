// rope: rotary position embedding (Su et al., 2021) of queries or keys.
#include <stdexcept>

#include "../isa.h"
#include "../simd.h"
#include "../work_split.h"

namespace engine_cpu {
namespace ENGINE_ISA {
namespace {

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

// The angle of pair i is f32(position) * frequency[i], an f32 product, as models are trained with.
//
// x [T, heads * head_dim], positions i32 [T] -> the same shape, the first rotary_dim of each head rotated in pairs:
// (i, i + rotary_dim / 2), or (2i, 2i + 1) if interleaved. Weight: frequencies f32 [rotary_dim / 2].
// Numbers: heads, head_dim, rotary_dim, interleaved, scale (multiplies cosine and sine).
class Rope final : public Kernel {
 public:
  explicit Rope(const KernelArgs& args)
      : x_(args.inputs.at(0)),
        positions_(args.inputs.at(1)),
        y_(args.outputs.at(0)),
        heads_(args.integer("heads")),
        head_dim_(args.integer("head_dim")),
        half_(args.integer("rotary_dim") / 2),
        padded_((half_ + 15) / 16 * 16),
        interleaved_(args.number_or("interleaved", 0) != 0),
        scale_(static_cast<float>(args.number_or("scale", 1))),
        frequencies_(padded_ * sizeof(float)),
        tables_(args.integer("threads") * padded_ * 2 * sizeof(float)) {
    if (half_ * 2 > head_dim_ || args.weights.at(0)->columns != half_)
      throw std::invalid_argument("rotary_dim is at most head_dim, and there are rotary_dim / 2 frequencies.");
    std::memset(frequencies_.data(), 0, frequencies_.size());
    std::memcpy(frequencies_.data(), args.weights[0]->data, half_ * sizeof(float));
  }

  void run(const Frame& frame, const Team& team, int) override {
    const Range range = share(frame.dims.T * heads_, team);
    float* cosine = tables_.as<float>() + team.index * padded_ * 2;
    float* sine = cosine + padded_;
    int64_t tabled = -1;
    for (int64_t i = range.begin; i < range.end; ++i) {
      const int64_t token = i / heads_;
      if (token != tabled) fill_table(input<int32_t>(frame, positions_)[token], cosine, sine);
      tabled = token;
      const float* x = input<float>(frame, x_) + i * head_dim_;
      float* y = output<float>(frame, y_) + i * head_dim_;
      if (interleaved_)
        rotate(x, cosine, sine, y, 2, 1);
      else
        rotate(x, cosine, sine, y, 1, half_);
      std::memcpy(y + half_ * 2, x + half_ * 2, (head_dim_ - half_ * 2) * sizeof(float));
    }
  }

 private:
  void fill_table(int32_t position, float* cosine, float* sine) const {
    for (int64_t i = 0; i < padded_; i += 16) {
      f32x16 s, c;
      sine_cosine(reduce_angle(static_cast<float>(position) * load(frequencies_.as<float>() + i)), s, c);
      store(sine + i, s * scale_);
      store(cosine + i, c * scale_);
    }
  }

  // Pair i is (i * step, i * step + other).
  ENGINE_INLINE void rotate(const float* x, const float* cosine, const float* sine, float* __restrict y, int64_t step,
                            int64_t other) const {
    for (int64_t i = 0; i < half_; ++i) {
      const float a = x[i * step], b = x[i * step + other];
      y[i * step] = a * cosine[i] - b * sine[i];
      y[i * step + other] = b * cosine[i] + a * sine[i];
    }
  }

  int x_, positions_, y_;
  int64_t heads_, head_dim_, half_, padded_;
  bool interleaved_;
  float scale_;
  Buffer frequencies_, tables_;
};

}  // namespace

void register_rope(Table& table) { table.kernels["rope"] = make_kernel<Rope>; }

}  // namespace ENGINE_ISA
}  // namespace engine_cpu
