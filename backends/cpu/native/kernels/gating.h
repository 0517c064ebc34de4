// Activations of a gate, and what they make of it and of what it lets pass.
#pragma once

#include <stdexcept>

#include "../simd_math.h"
#include "../step.h"

namespace engine_cpu {
namespace ENGINE_ISA {

ENGINE_INLINE f32x16 silu(f32x16 x) { return x / (1.0f + exp(-x)); }

// x Phi(x) through erfc of |x|, so that the lower tail keeps its relative accuracy.
ENGINE_INLINE f32x16 gelu(f32x16 x) {
  const f32x16 tail = 0.5f * erfc_positive(abs(x) * 0.70710678f);
  return x * select(x < 0.0f, tail, 1.0f - tail);
}

// x/2 (1 + tanh u) = x / (1 + exp(-2u)), u = sqrt(2/pi) (x + 0.044715 x^3)
ENGINE_INLINE f32x16 gelu_tanh(f32x16 x) {
  const f32x16 u = 0.79788456f * fma(x * x * 0.044715f, x, x);
  return x / (1.0f + exp(-2.0f * u));
}

ENGINE_INLINE f32x16 sigmoid(f32x16 x) { return 1.0f / (1.0f + exp(-x)); }

ENGINE_INLINE f32x16 relu(f32x16 x) { return select(x < 0.0f, f32x16{}, x); }

// g sigmoid(alpha g) (u + 1), g no more than the limit, u within it on both sides. NaN stays.
ENGINE_INLINE f32x16 clamped_swiglu(f32x16 gate, f32x16 up, float alpha, float limit) {
  const f32x16 most = splat(limit);
  const f32x16 g = select(gate > most, most, gate);
  const f32x16 u = select(up > most, most, select(up < -most, -most, up));
  return g / (1.0f + exp(-alpha * g)) * (u + 1.0f);
}

// Numbers: kind (0 silu, 1 gelu by erf, 2 gelu by tanh, 3 relu, 4 clamped swiglu, which needs an up and alone has alpha and
// limit, 5 sigmoid, 6 identity).
class Gating {
 public:
  explicit Gating(const KernelArgs& args) : kind_(static_cast<Kind>(args.integer("kind"))) {
    if (args.integer("kind") < 0 || args.integer("kind") > 6)
      throw std::invalid_argument(
          "kind is 0 (silu), 1 (gelu), 2 (gelu_tanh), 3 (relu), 4 (clamped_swiglu), 5 (sigmoid) or 6 (identity).");
    if (!needs_up()) return;
    alpha_ = static_cast<float>(args.number("alpha"));
    limit_ = static_cast<float>(args.number("limit"));
  }

  bool needs_up() const { return kind_ == Kind::kClampedSwiglu; }

  // visit(op), with op(gate, up) on 16 values.
  template <class Visit>
  ENGINE_INLINE void with_up(Visit visit) const {
    if (needs_up())
      visit([alpha = alpha_, limit = limit_](f32x16 g, f32x16 u) { return clamped_swiglu(g, u, alpha, limit); });
    else
      alone([&](auto activation) { visit([activation](f32x16 g, f32x16 u) { return activation(g) * u; }); });
  }

  // visit(activation), with activation(gate) on 16 values, of kinds that need no up.
  template <class Visit>
  ENGINE_INLINE void alone(Visit visit) const {
    switch (kind_) {
      case Kind::kSilu: return visit([](f32x16 x) { return silu(x); });
      case Kind::kGelu: return visit([](f32x16 x) { return gelu(x); });
      case Kind::kGeluTanh: return visit([](f32x16 x) { return gelu_tanh(x); });
      case Kind::kRelu: return visit([](f32x16 x) { return relu(x); });
      case Kind::kSigmoid: return visit([](f32x16 x) { return sigmoid(x); });
      case Kind::kIdentity: return visit([](f32x16 x) { return x; });
      case Kind::kClampedSwiglu: return;
    }
  }

 private:
  enum class Kind { kSilu, kGelu, kGeluTanh, kRelu, kClampedSwiglu, kSigmoid, kIdentity };

  Kind kind_;
  float alpha_ = 0, limit_ = 0;
};

}  // namespace ENGINE_ISA
}  // namespace engine_cpu
