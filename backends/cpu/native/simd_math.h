// exp, 2^x, log, tanh and erfc on 16 lanes: a few units in the last place.
#pragma once

#include "simd.h"

namespace engine_cpu {
namespace ENGINE_ISA {

// p * 2^n for |n| <= 254, in two steps so that neither factor leaves the range.
ENGINE_INLINE f32x16 scale_by_power(f32x16 p, i32x16 n) {
  const i32x16 half = n >> 1;
  const f32x16 a = bit_cast<f32x16>((half + 127) << 23);
  const f32x16 b = bit_cast<f32x16>((n - half + 127) << 23);
  return p * a * b;
}

// e^x: exactly 1 at 0, 0 at -inf, +inf above 88.73, NaN of NaN. Cody-Waite reduction to
// |r| <= ln(2)/2, then 1 + r + r^2 q(r) with q interpolated at Chebyshev nodes.
ENGINE_INLINE f32x16 exp(f32x16 x) {
#if defined(__AVX512F__)
  const f32x16 n = _mm512_roundscale_ps(x * 1.44269504f, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  f32x16 clamped = select(x < -104.0f, splat(-104.0f), x);  // NaN stays
  clamped = select(clamped > 89.0f, splat(89.0f), clamped);
  x = clamped;
  const i32x16 whole = round_i32(x * 1.44269504f);
  const f32x16 n = to_f32(whole);
#endif
  f32x16 r = fma(n, splat(-0.693359375f), x);
  r = fma(n, splat(2.12194440e-4f), r);
  f32x16 p = splat(1.3926176e-3f);
  p = fma(p, r, splat(8.3631732e-3f));
  p = fma(p, r, splat(4.1666556e-2f));
  p = fma(p, r, splat(1.6666578e-1f));
  p = fma(p, r, splat(0.5f));
  p = fma(p, r * r, r) + 1.0f;
#if defined(__AVX512F__)
  // Infinite x leaves r = NaN; put the limits back.
  const f32x16 y = _mm512_scalef_ps(p, n);
  return select(x < -104.0f, f32x16{}, select(x > 89.0f, splat(__builtin_inff()), y));
#else
  return scale_by_power(p, whole);
#endif
}

// 2^x for x below 127: exactly 1 at 0, 0 below -150, NaN of NaN, and of -inf if kFinite says that there is none. 2^r for |r| <= 1/2 is 1 + r q(r), q of the least relative error
// (9e-8), its products in pairs: a chain of them would leave the processor room for fewer vectors at a time.
template <bool kFinite = false>
ENGINE_INLINE f32x16 exp2(f32x16 x) {
#if defined(__AVX512F__)
  if constexpr (!kFinite) x = _mm512_max_ps(splat(-160.0f), x);  // NaN stays
  const f32x16 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  x = max(splat(-160.0f), x);
  const i32x16 whole = round_i32(x);
  const f32x16 n = to_f32(whole);
#endif
  const f32x16 r = x - n, square = r * r;
  const f32x16 low = fma(r, splat(2.40222424e-1f), splat(6.93147004e-1f));
  const f32x16 high = fma(square, splat(1.32647273e-3f), fma(r, splat(9.67151299e-3f), splat(5.55073358e-2f)));
  const f32x16 p = fma(fma(high, square, low), r, splat(1.0f));
#if defined(__AVX512F__)
  return _mm512_scalef_ps(p, n);
#else
  return scale_by_power(p, whole);
#endif
}

// n ln 2 + log(1 + f) for 1 + f in [sqrt(1/2), sqrt(2)): log(1 + f) = f - f^2/2 + f^3 p(f), p interpolated at
// Chebyshev nodes.
ENGINE_INLINE f32x16 log_parts(f32x16 f, f32x16 n) {
  const f32x16 z = f * f;
  f32x16 p = splat(6.97161183e-02f);
  p = fma(p, f, splat(-1.14797339e-01f));
  p = fma(p, f, splat(1.16854198e-01f));
  p = fma(p, f, splat(-1.24256872e-01f));
  p = fma(p, f, splat(1.42490581e-01f));
  p = fma(p, f, splat(-1.66678026e-01f));
  p = fma(p, f, splat(2.00007156e-01f));
  p = fma(p, f, splat(-2.49999970e-01f));
  p = fma(p, f, splat(3.33333313e-01f));
  f32x16 y = p * f * z;
  y = fma(n, splat(-2.12194440e-4f), y);
  y = fma(z, splat(-0.5f), y);
  return fma(n, splat(0.693359375f), f + y);
}

// x = 2^n (1 + f), x positive, normal and finite.
ENGINE_INLINE void split_power(f32x16 x, f32x16& f, f32x16& n) {
  const i32x16 bits = bit_cast<i32x16>(x);
  const i32x16 exponent = (bits - 0x3f3504f3) >> 23;  // 0x3f3504f3 is sqrt(1/2)
  f = bit_cast<f32x16>(bits - (exponent << 23)) - 1.0f;
  n = to_f32(exponent);
}

// Natural logarithm of positive, normal, finite x.
ENGINE_INLINE f32x16 log(f32x16 x) {
  f32x16 f, n;
  split_power(x, f, n);
  return log_parts(f, n);
}

ENGINE_INLINE f32x16 tanh(f32x16 x) {
  const f32x16 a = abs(x);
  const f32x16 e = exp(a * -2.0f);
  const f32x16 large = (1.0f - e) / (1.0f + e);
  // Near zero the quotient cancels: odd polynomial.
  const f32x16 z = x * x;
  f32x16 p = splat(-6.09666388e-03f);
  p = fma(p, z, splat(2.09971312e-02f));
  p = fma(p, z, splat(-5.38508929e-02f));
  p = fma(p, z, splat(1.33327693e-01f));
  p = fma(p, z, splat(-3.33333284e-01f));
  const f32x16 small = fma(p * z, x, x);
  return select(a < 0.625f, small, select(x < 0.0f, -large, large));
}

// erfc(z) for z >= 0, to a few units in the last place: erfc(z) = exp(-z^2) t p(t) with t = 1 / (1 + 0.4 z),
// p interpolated at Chebyshev nodes.
ENGINE_INLINE f32x16 erfc_positive(f32x16 z) {
  z = select(z > 30.0f, splat(30.0f), z);  // 0 from there on, and no infinity in what follows
  const f32x16 t = 1.0f / fma(z, splat(0.4f), splat(1.0f));
  f32x16 p = splat(-2.98686288e-02f);
  p = fma(p, t, splat(1.43841073e-01f));
  p = fma(p, t, splat(-2.43041739e-01f));
  p = fma(p, t, splat(1.46803245e-01f));
  p = fma(p, t, splat(-5.37931658e-02f));
  p = fma(p, t, splat(8.71206447e-02f));
  p = fma(p, t, splat(1.18095122e-01f));
  p = fma(p, t, splat(1.71890572e-01f));
  p = fma(p, t, splat(2.07600728e-01f));
  p = fma(p, t, splat(2.25676313e-01f));
  p = fma(p, t, splat(2.25675836e-01f));
  // exp(-z^2) with the square's rounding error put back, or its relative error would be z^2 times too large.
  const f32x16 square = z * z;
  const f32x16 rest = fma(z, z, -square);
  return t * p * exp(-square) * (1.0f - rest);
}

}  // namespace ENGINE_ISA
}  // namespace engine_cpu
