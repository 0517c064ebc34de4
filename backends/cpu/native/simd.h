// Vectors of 16 lanes for every variant: one source, with intrinsics only here and in hot loops.
//
// Products and sums are never contracted (-ffp-contract=off): what is fused says fma. Where the machine has no fused
// multiply-add (baseline x86-64), fma(a, b, c) rounds twice; a variant is bitwise equal to itself, not to another.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#elif defined(__x86_64__)
#include <emmintrin.h>
#endif

#define ENGINE_INLINE inline __attribute__((always_inline))

namespace engine_cpu {
namespace ENGINE_ISA {

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef int16_t i16x16 __attribute__((vector_size(32)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef int8_t i8x16 __attribute__((vector_size(16)));
typedef uint8_t u8x16 __attribute__((vector_size(16)));
typedef double f64x8 __attribute__((vector_size(64)));
typedef float f32x8 __attribute__((vector_size(32)));

// Storage types without arithmetic, so that an element's dtype is its C++ type.
struct f16 {
  uint16_t bits;
};
struct bf16 {
  uint16_t bits;
};

// ---- loads, stores, broadcasts: unaligned -----------------------------------------------------------------------

template <class V>
ENGINE_INLINE V load_as(const void* source) {
  V value;
  std::memcpy(&value, source, sizeof(V));
  return value;
}

template <class V>
ENGINE_INLINE void store(void* target, V value) {
  std::memcpy(target, &value, sizeof(V));
}

// The first `count` (0..16) lanes; the rest are zero when loaded, untouched when stored.
ENGINE_INLINE f32x16 load_first(const float* source, int64_t count) {
#if defined(__AVX512F__)
  return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1), source);
#else
  f32x16 value{};
  std::memcpy(&value, source, count * sizeof(float));
  return value;
#endif
}

ENGINE_INLINE void store_first(float* target, f32x16 value, int64_t count) {
#if defined(__AVX512F__)
  _mm512_mask_storeu_ps(target, static_cast<__mmask16>((1u << count) - 1), value);
#else
  std::memcpy(target, &value, count * sizeof(float));
#endif
}

ENGINE_INLINE f32x16 splat(float x) { return f32x16{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
ENGINE_INLINE i32x16 splat_i32(int32_t x) { return i32x16{} + x; }
ENGINE_INLINE i32x16 lane_index() { return i32x16{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }

// ---- bits and selection -----------------------------------------------------------------------------------------

template <class To, class From>
ENGINE_INLINE To bit_cast(From value) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To result;
  std::memcpy(&result, &value, sizeof(To));
  return result;
}

// A mask is what a comparison gives: all ones or zeros a lane. Lanes where it is set come from `a`, whatever `b` holds.
ENGINE_INLINE f32x16 select(i32x16 mask, f32x16 a, f32x16 b) { return mask ? a : b; }
ENGINE_INLINE i32x16 select(i32x16 mask, i32x16 a, i32x16 b) { return mask ? a : b; }

// Bit i is lane i of a mask.
ENGINE_INLINE uint32_t lane_bits(i32x16 mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask(bit_cast<__m512i>(mask), bit_cast<__m512i>(mask));
#elif defined(__SSE2__)
  __m128i p[4];
  std::memcpy(p, &mask, 64);
  return static_cast<uint32_t>(
      _mm_movemask_epi8(_mm_packs_epi16(_mm_packs_epi32(p[0], p[1]), _mm_packs_epi32(p[2], p[3]))));
#else
  uint32_t bits = 0;
  for (int i = 0; i < 16; ++i) bits |= static_cast<uint32_t>(mask[i] & 1) << i;
  return bits;
#endif
}

// All ones in the lanes whose bit is set.
ENGINE_INLINE i32x16 bits_mask(uint32_t bits) {
  return (splat_i32(static_cast<int32_t>(bits)) >> lane_index() & 1) != 0;
}

ENGINE_INLINE bool any(i32x16 mask) { return lane_bits(mask) != 0; }

// Neither infinite nor NaN.
ENGINE_INLINE i32x16 is_finite(f32x16 x) { return (bit_cast<i32x16>(x) & 0x7f800000) != 0x7f800000; }

// ---- arithmetic -------------------------------------------------------------------------------------------------

ENGINE_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__ARM_NEON)
  float32x4_t p[4], q[4], r[4];
  std::memcpy(p, &a, 64);
  std::memcpy(q, &b, 64);
  std::memcpy(r, &c, 64);
  for (int i = 0; i < 4; ++i) r[i] = vfmaq_f32(r[i], p[i], q[i]);
  std::memcpy(&c, r, 64);
  return c;
#else
  return a * b + c;
#endif
}

ENGINE_INLINE f32x16 abs(f32x16 x) { return bit_cast<f32x16>(bit_cast<i32x16>(x) & 0x7fffffff); }
// As the machine's vmaxps: the second operand where either is NaN.
ENGINE_INLINE f32x16 max(f32x16 a, f32x16 b) { return a > b ? a : b; }
ENGINE_INLINE f32x16 min(f32x16 a, f32x16 b) { return a < b ? a : b; }

ENGINE_INLINE f32x16 sqrt(f32x16 x) {
#if defined(__AVX512F__)
  return _mm512_sqrt_ps(x);
#else
  for (int i = 0; i < 16; ++i) x[i] = __builtin_sqrtf(x[i]);
  return x;
#endif
}

ENGINE_INLINE f32x16 to_f32(i32x16 x) { return __builtin_convertvector(x, f32x16); }

// To the nearest integer, ties to even, for |x| < 2^31.
ENGINE_INLINE i32x16 round_i32(f32x16 x) {
#if defined(__AVX512F__)
  return bit_cast<i32x16>(_mm512_cvtps_epi32(x));
#elif defined(__ARM_NEON)
  float32x4_t p[4];
  int32x4_t r[4];
  std::memcpy(p, &x, 64);
  for (int i = 0; i < 4; ++i) r[i] = vcvtnq_s32_f32(p[i]);
  return load_as<i32x16>(r);
#elif defined(__x86_64__)
  __m128 p[4];
  __m128i r[4];
  std::memcpy(p, &x, 64);
  for (int i = 0; i < 4; ++i) r[i] = _mm_cvtps_epi32(p[i]);
  return load_as<i32x16>(r);
#else
  i32x16 r;
  for (int i = 0; i < 16; ++i) r[i] = static_cast<int32_t>(__builtin_rintf(x[i]));
  return r;
#endif
}

// ---- reductions, always by the same tree ------------------------------------------------------------------------

ENGINE_INLINE float reduce_add(f32x16 x) {
  float lane[16];
  store(lane, x);
  for (int width = 8; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lane[i] += lane[i + width];
  return lane[0];
}

ENGINE_INLINE float reduce_max(f32x16 x) {
  float lane[16];
  store(lane, x);
  for (int width = 8; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lane[i] = lane[i] > lane[i + width] ? lane[i] : lane[i + width];
  return lane[0];
}

ENGINE_INLINE int32_t reduce_add(i32x16 x) {
  int32_t sum = 0;
  for (int i = 0; i < 16; ++i) sum += x[i];
  return sum;
}

// ---- widening loads: 16 elements of a storage type to f32 -------------------------------------------------------

ENGINE_INLINE u32x16 widen_u16(u16x16 x) {
#if defined(__AVX512F__)
  return bit_cast<u32x16>(_mm512_cvtepu16_epi32(bit_cast<__m256i>(x)));  // g++ 12 widens in halves by itself
#else
  return __builtin_convertvector(x, u32x16);
#endif
}

ENGINE_INLINE f32x16 widen_f16(u16x16 half) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(bit_cast<__m256i>(half));
#else
  // Shift into place and rescale by 2^112; what was infinity or NaN gets the exponent of one.
  const u32x16 h = widen_u16(half);
  const u32x16 magnitude = (h & 0x7fff) << 13;
  const f32x16 scaled = bit_cast<f32x16>(magnitude) * 0x1p112f;
  const u32x16 special = magnitude | 0x7f800000;
  const i32x16 is_special = bit_cast<i32x16>((h & 0x7c00) == 0x7c00);
  const u32x16 bits = bit_cast<u32x16>(select(is_special, bit_cast<i32x16>(special), bit_cast<i32x16>(scaled)));
  return bit_cast<f32x16>(bits | ((h & 0x8000) << 16));
#endif
}

ENGINE_INLINE f32x16 widen_bf16(u16x16 bits) { return bit_cast<f32x16>(widen_u16(bits) << 16); }

ENGINE_INLINE f32x16 widen_i8(i8x16 x) {
#if defined(__AVX512F__)
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bit_cast<__m128i>(x)));
#else
  return to_f32(__builtin_convertvector(x, i32x16));
#endif
}

ENGINE_INLINE f32x16 load(const float* p) { return load_as<f32x16>(p); }
ENGINE_INLINE f32x16 load(const f16* p) { return widen_f16(load_as<u16x16>(p)); }
ENGINE_INLINE f32x16 load(const bf16* p) { return widen_bf16(load_as<u16x16>(p)); }
ENGINE_INLINE f32x16 load(const int8_t* p) { return widen_i8(load_as<i8x16>(p)); }

ENGINE_INLINE float to_f32(float x) { return x; }
ENGINE_INLINE float to_f32(int8_t x) { return static_cast<float>(x); }
ENGINE_INLINE float to_f32(bf16 x) { return bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }
ENGINE_INLINE float to_f32(f16 x) {
#if defined(__AVX512F__)
  return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(x.bits)));
#else
  return widen_f16(u16x16{x.bits})[0];
#endif
}

// ---- narrowing stores: round to nearest even --------------------------------------------------------------------

ENGINE_INLINE u16x16 narrow_u16(u32x16 x) {
#if defined(__AVX512F__)
  return bit_cast<u16x16>(_mm512_cvtepi32_epi16(bit_cast<__m512i>(x)));
#else
  return __builtin_convertvector(x, u16x16);
#endif
}

ENGINE_INLINE u16x16 narrow_f16(f32x16 x) {
#if defined(__AVX512F__)
  return bit_cast<u16x16>(_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
  const u32x16 bits = bit_cast<u32x16>(x);
  const u32x16 sign = (bits >> 16) & 0x8000;
  const u32x16 a = bits & 0x7fffffff;
  // Normal results: add the rounding bias in place; subnormal results: let an addition of 0.5 do the rounding.
  const u32x16 normal = (a - 0x38000000 + 0xfff + ((a >> 13) & 1)) >> 13;
  const u32x16 tiny = bit_cast<u32x16>(bit_cast<f32x16>(a) + 0.5f) - 0x3f000000;
  const i32x16 s = bit_cast<i32x16>(a);
  i32x16 r = select(s < 0x38800000, bit_cast<i32x16>(tiny), bit_cast<i32x16>(normal));
  r = select(s >= 0x477ff000, splat_i32(0x7c00), r);
  r = select(s > 0x7f800000, splat_i32(0x7e00), r);
  return narrow_u16(bit_cast<u32x16>(r) | sign);
#endif
}

ENGINE_INLINE u16x16 narrow_bf16(f32x16 x) {
  const u32x16 bits = bit_cast<u32x16>(x);
  const u32x16 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const i32x16 r = select(bit_cast<i32x16>(bits & 0x7fffffff) > 0x7f800000, bit_cast<i32x16>((bits >> 16) | 0x40),
                          bit_cast<i32x16>(rounded));
  return narrow_u16(bit_cast<u32x16>(r));
}

// The low byte of each lane.
ENGINE_INLINE i8x16 narrow_i8(i32x16 x) {
#if defined(__AVX512F__)
  return bit_cast<i8x16>(_mm512_cvtepi32_epi8(bit_cast<__m512i>(x)));
#else
  return __builtin_convertvector(x, i8x16);
#endif
}

ENGINE_INLINE void narrow(float* p, f32x16 x) { store(p, x); }
ENGINE_INLINE void narrow(f16* p, f32x16 x) { store(p, narrow_f16(x)); }
ENGINE_INLINE void narrow(bf16* p, f32x16 x) { store(p, narrow_bf16(x)); }

}  // namespace ENGINE_ISA
}  // namespace engine_cpu
