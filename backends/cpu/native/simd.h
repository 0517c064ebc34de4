// Vectors of 16 lanes for every variant: one source, with intrinsics only here, in dot.h and in hot loops.
//
// What an instruction set does in its own way is defined here for one register ("a part") and carried over to pairs;
// the rest is operators. Products and sums are never contracted (-ffp-contract=off): what is fused says fma. Where the
// machine has no fused multiply-add (baseline x86-64), fma(a, b, c) rounds twice; all other variants give the same bits.
#pragma once

#include "lanes.h"

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#elif defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace engine_cpu {
namespace ENGINE_ISA {

using f32x16 = Lanes<float, 16>;
using f64x16 = Lanes<double, 16>;
using i32x16 = Lanes<int32_t, 16>;
using u32x16 = Lanes<uint32_t, 16>;
using u16x16 = Lanes<uint16_t, 16>;
using i8x16 = NativeLanes<int8_t, 16>::type;
using u8x16 = NativeLanes<uint8_t, 16>::type;

using f32x4 = NativeLanes<float, 4>::type;
using i32x4 = NativeLanes<int32_t, 4>::type;

using f32_part = NativeLanes<float, kPartLanes>::type;
using i32_part = NativeLanes<int32_t, kPartLanes>::type;
using u32_part = NativeLanes<uint32_t, kPartLanes>::type;

// ---- loads, stores, broadcasts: unaligned -----------------------------------------------------------------------

// The first `count` (0..16) lanes; the rest are zero when loaded, untouched when stored.
ENGINE_INLINE f32x16 load_first(const float* source, int64_t count) {
#if defined(__AVX512F__)
  return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1), source);
#else
  if (count == 16) return load_as<f32x16>(source);
  float lanes[16] = {};
  std::memcpy(lanes, source, count * sizeof(float));
  return load_as<f32x16>(lanes);
#endif
}

ENGINE_INLINE void store_first(float* target, f32x16 value, int64_t count) {
#if defined(__AVX512F__)
  _mm512_mask_storeu_ps(target, static_cast<__mmask16>((1u << count) - 1), value);
#else
  if (count == 16) return store(target, value);
  float lanes[16];
  store(lanes, value);
  std::memcpy(target, lanes, count * sizeof(float));
#endif
}

ENGINE_INLINE f32x16 load(const float* p) { return load_as<f32x16>(p); }
ENGINE_INLINE f32x16 splat(float x) { return splat_as<f32x16>(x); }
ENGINE_INLINE i32x16 splat_i32(int32_t x) { return splat_as<i32x16>(x); }
ENGINE_INLINE i32x16 lane_index() {
  constexpr int32_t kIndex[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return load_as<i32x16>(kIndex);
}

// ---- bits and selection -----------------------------------------------------------------------------------------

// A mask is what a comparison gives: all ones or zeros a lane. Lanes where it is set come from `a`, whatever `b` holds.
ENGINE_INLINE f32_part select(i32_part mask, f32_part a, f32_part b) { return mask ? a : b; }
ENGINE_INLINE i32_part select(i32_part mask, i32_part a, i32_part b) { return mask ? a : b; }
template <class M, class H>
ENGINE_INLINE Pair<H> select(Pair<M> mask, Pair<H> a, Pair<H> b) {
  return {select(mask.lo, a.lo, b.lo), select(mask.hi, a.hi, b.hi)};
}

// Bit i is lane i of a mask.
ENGINE_INLINE uint32_t lane_bits(i32_part mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask(bit_cast<__m512i>(mask), bit_cast<__m512i>(mask));
#elif defined(__AVX2__)
  return static_cast<uint32_t>(_mm256_movemask_ps(bit_cast<__m256>(mask)));
#elif defined(__SSE2__)
  return static_cast<uint32_t>(_mm_movemask_ps(bit_cast<__m128>(mask)));
#else
  const i32_part bits = mask & i32_part{1, 2, 4, 8};
  return static_cast<uint32_t>(bits[0] | bits[1] | bits[2] | bits[3]);
#endif
}
template <class H>
ENGINE_INLINE uint32_t lane_bits(Pair<H> mask) {
  return lane_bits(mask.lo) | lane_bits(mask.hi) << Traits<H>::kLanes;
}

// All ones in the lanes whose bit is set.
ENGINE_INLINE i32x16 bits_mask(uint32_t bits) {
  return (splat_i32(static_cast<int32_t>(bits)) >> lane_index() & 1) != 0;
}

ENGINE_INLINE bool any(i32x16 mask) { return lane_bits(mask) != 0; }

// Neither infinite nor NaN.
ENGINE_INLINE i32x16 is_finite(f32x16 x) { return (bit_cast<i32x16>(x) & 0x7f800000) != 0x7f800000; }

// Lanes 0 and 1 of each block of four of both, alternating; or lanes 2 and 3.
ENGINE_INLINE f32_part zip_low(f32_part a, f32_part b) {
#if defined(__AVX512F__)
  return _mm512_unpacklo_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_unpacklo_ps(a, b);
#else
  return f32_part{a[0], b[0], a[1], b[1]};
#endif
}
ENGINE_INLINE f32_part zip_high(f32_part a, f32_part b) {
#if defined(__AVX512F__)
  return _mm512_unpackhi_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_unpackhi_ps(a, b);
#else
  return f32_part{a[2], b[2], a[3], b[3]};
#endif
}
ENGINE_CARRY2(zip_low)
ENGINE_CARRY2(zip_high)

// ---- arithmetic -------------------------------------------------------------------------------------------------

ENGINE_INLINE f32_part fma(f32_part a, f32_part b, f32_part c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__ARM_NEON)
  return vfmaq_f32(c, a, b);
#else
  return a * b + c;
#endif
}
template <class H>
ENGINE_INLINE Pair<H> fma(Pair<H> a, Pair<H> b, Pair<H> c) {
  return {fma(a.lo, b.lo, c.lo), fma(a.hi, b.hi, c.hi)};
}

// Numbers of a table of 16, by indices below 16.
ENGINE_INLINE f32_part look_up(const float (&table)[16], u32_part index) {
#if defined(__AVX512F__)
  return _mm512_permutexvar_ps(bit_cast<__m512i>(index), load_as<__m512>(table));
#elif defined(__AVX2__)
  const auto i = bit_cast<__m256i>(index);
  const __m256 low = _mm256_permutevar8x32_ps(load_as<__m256>(table), i);
  const __m256 high = _mm256_permutevar8x32_ps(load_as<__m256>(table + 8), i);
  return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(i, 28)));
#elif defined(__ARM_NEON)
  const uint8x16x4_t bytes = vld1q_u8_x4(reinterpret_cast<const uint8_t*>(table));
  return bit_cast<f32_part>(vqtbl4q_u8(bytes, bit_cast<uint8x16_t>(index * 0x04040404 + 0x03020100)));
#else
  f32_part found;
  for (int i = 0; i < kPartLanes; ++i) found[i] = table[index[i] & 15];
  return found;
#endif
}
template <class H>
ENGINE_INLINE auto look_up(const float (&table)[16], Pair<H> index) {
  using Half = decltype(look_up(table, index.lo));
  return Pair<Half>{look_up(table, index.lo), look_up(table, index.hi)};
}

ENGINE_INLINE f32x16 abs(f32x16 x) { return bit_cast<f32x16>(bit_cast<i32x16>(x) & 0x7fffffff); }

// As the machine's vmaxps: the second operand where either is NaN.
ENGINE_INLINE f32_part max(f32_part a, f32_part b) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  return _mm256_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}
ENGINE_INLINE f32_part min(f32_part a, f32_part b) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  return _mm256_min_ps(a, b);
#else
  return a < b ? a : b;
#endif
}
ENGINE_INLINE i32_part max(i32_part a, i32_part b) { return a > b ? a : b; }
ENGINE_CARRY2(max)
ENGINE_CARRY2(min)

// The high and low 32 bits of each lane's product with m.
ENGINE_INLINE void multiply_wide(u32_part x, uint32_t m, u32_part& high, u32_part& low) {
#if defined(__AVX512F__)
  const __m512i a = bit_cast<__m512i>(x), b = _mm512_set1_epi32(static_cast<int32_t>(m));
  const __m512i even = _mm512_mul_epu32(a, b), odd = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), b);
  high = bit_cast<u32_part>(_mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd));
  low = bit_cast<u32_part>(_mm512_mask_blend_epi32(0xaaaa, even, _mm512_slli_epi64(odd, 32)));
#elif defined(__AVX2__)
  const __m256i a = bit_cast<__m256i>(x), b = _mm256_set1_epi32(static_cast<int32_t>(m));
  const __m256i even = _mm256_mul_epu32(a, b), odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), b);
  high = bit_cast<u32_part>(_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa));
  low = x * m;
#elif defined(__ARM_NEON)
  const uint64x2_t a = vmull_u32(vget_low_u32(x), vdup_n_u32(m)), b = vmull_high_u32(x, vdupq_n_u32(m));
  high = vuzp2q_u32(vreinterpretq_u32_u64(a), vreinterpretq_u32_u64(b));
  low = x * m;
#else
  for (int i = 0; i < kPartLanes; ++i) high[i] = static_cast<uint32_t>(static_cast<uint64_t>(x[i]) * m >> 32);
  low = x * m;
#endif
}
template <class H>
ENGINE_INLINE void multiply_wide(Pair<H> x, uint32_t m, Pair<H>& high, Pair<H>& low) {
  multiply_wide(x.lo, m, high.lo, low.lo);
  multiply_wide(x.hi, m, high.hi, low.hi);
}

ENGINE_INLINE f32x16 to_f32(i32x16 x) { return convert<f32x16>(x); }

// To the nearest integer, ties to even, for |x| < 2^31.
ENGINE_INLINE i32_part round_i32(f32_part x) {
#if defined(__AVX512F__)
  return bit_cast<i32_part>(_mm512_cvtps_epi32(x));
#elif defined(__AVX2__)
  return bit_cast<i32_part>(_mm256_cvtps_epi32(x));
#elif defined(__SSE2__)
  return bit_cast<i32_part>(_mm_cvtps_epi32(x));
#elif defined(__ARM_NEON)
  return vcvtnq_s32_f32(x);
#else
  i32_part r;
  for (int i = 0; i < kPartLanes; ++i) r[i] = static_cast<int32_t>(__builtin_rintf(x[i]));
  return r;
#endif
}
ENGINE_CARRY1(round_i32)

// ---- reductions, always by the same tree ------------------------------------------------------------------------

// Lane i holds what lane i + n held, going round.
template <int n, int... I>
ENGINE_INLINE f32_part rotate(f32_part x, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(x, x, ((I + n) % kPartLanes)...);
}

// Folds the upper half onto the lower until lane 0 has it all.
template <int width = kPartLanes / 2, class Combine>
ENGINE_INLINE float fold(f32_part x, Combine combine) {
  x = combine(x, rotate<width>(x, std::make_integer_sequence<int, kPartLanes>()));
  if constexpr (width > 1) return fold<width / 2>(x, combine);
  return x[0];
}

ENGINE_INLINE float reduce_add(f32_part x) {
  return fold(x, [](f32_part a, f32_part b) { return a + b; });
}

ENGINE_INLINE float reduce_max(f32_part x) {
  return fold(x, [](f32_part a, f32_part b) { return select(a > b, a, b); });
}

ENGINE_INLINE int32_t reduce_add(i32_part x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_epi32(bit_cast<__m512i>(x));
#elif defined(__ARM_NEON)
  return vaddvq_s32(x);
#else
  int32_t sum = 0;
  for (int i = 0; i < kPartLanes; ++i) sum += x[i];
  return sum;
#endif
}

ENGINE_INLINE int32_t reduce_max(i32_part x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_epi32(bit_cast<__m512i>(x));
#elif defined(__ARM_NEON)
  return vmaxvq_s32(x);
#else
  int32_t most = x[0];
  for (int i = 1; i < kPartLanes; ++i) most = x[i] > most ? x[i] : most;
  return most;
#endif
}

template <class H>
ENGINE_INLINE auto reduce_add(Pair<H> x) {
  return reduce_add(x.lo + x.hi);
}
template <class H>
ENGINE_INLINE auto reduce_max(Pair<H> x) {
  return reduce_max(select(x.lo > x.hi, x.lo, x.hi));
}

// The greatest lane of each of four vectors.
ENGINE_INLINE i32x4 max_of_each(i32x16 a, i32x16 b, i32x16 c, i32x16 d) {
#if defined(__AVX512F__)
  const auto w = bit_cast<__m512i>(a), x = bit_cast<__m512i>(b), y = bit_cast<__m512i>(c), z = bit_cast<__m512i>(d);
  const __m512i ab = _mm512_max_epi32(_mm512_unpacklo_epi32(w, x), _mm512_unpackhi_epi32(w, x));
  const __m512i cd = _mm512_max_epi32(_mm512_unpacklo_epi32(y, z), _mm512_unpackhi_epi32(y, z));
  const __m512i all = _mm512_max_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
  const __m256i half = _mm256_max_epi32(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
  return bit_cast<i32x4>(_mm_max_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1)));
#elif defined(__AVX2__)
  const auto w = bit_cast<__m256i>(max(a.lo, a.hi)), x = bit_cast<__m256i>(max(b.lo, b.hi));
  const auto y = bit_cast<__m256i>(max(c.lo, c.hi)), z = bit_cast<__m256i>(max(d.lo, d.hi));
  const __m256i ab = _mm256_max_epi32(_mm256_unpacklo_epi32(w, x), _mm256_unpackhi_epi32(w, x));
  const __m256i cd = _mm256_max_epi32(_mm256_unpacklo_epi32(y, z), _mm256_unpackhi_epi32(y, z));
  const __m256i all = _mm256_max_epi32(_mm256_unpacklo_epi64(ab, cd), _mm256_unpackhi_epi64(ab, cd));
  return bit_cast<i32x4>(_mm_max_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1)));
#else
  return i32x4{reduce_max(a), reduce_max(b), reduce_max(c), reduce_max(d)};
#endif
}

// The greatest lane in all four.
ENGINE_INLINE i32x4 greatest_of(i32x4 x) {
  const i32x4 halves = __builtin_shufflevector(x, x, 2, 3, 0, 1);
  x = x > halves ? x : halves;
  const i32x4 others = __builtin_shufflevector(x, x, 1, 0, 3, 2);
  return x > others ? x : others;
}

// Whether least <= x < end for positive numbers, given by their bits.
ENGINE_INLINE bool all_within(i32x4 bits, float least, float end) {
  const i32x4 outside = (bits < bit_cast<int32_t>(least)) | (bits >= bit_cast<int32_t>(end));
  return (outside[0] | outside[1] | outside[2] | outside[3]) == 0;
}

}  // namespace ENGINE_ISA
}  // namespace engine_cpu
