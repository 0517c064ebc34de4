// Numbers as they are stored, of 8 and 16 bits, to lanes of 32 and back: simd.h's other half.
#pragma once

#include "simd.h"

namespace engine_cpu {
namespace ENGINE_ISA {

using u16_part = NativeLanes<uint16_t, kPartLanes>::type;

// Storage types without arithmetic, so that an element's dtype is its C++ type.
struct f16 {
  uint16_t bits;
};
struct bf16 {
  uint16_t bits;
};

// ---- widening: 16 elements of a storage type to f32 -------------------------------------------------------------

ENGINE_INLINE u32_part widen_u16(u16_part x) {
#if defined(__AVX512F__)
  return bit_cast<u32_part>(_mm512_cvtepu16_epi32(bit_cast<__m256i>(x)));  // g++ 12 widens in halves by itself
#elif defined(__AVX2__)
  return bit_cast<u32_part>(_mm256_cvtepu16_epi32(bit_cast<__m128i>(x)));
#elif defined(__ARM_NEON)
  return vmovl_u16(x);
#else
  return convert<u32_part>(x);
#endif
}
ENGINE_CARRY1(widen_u16)

ENGINE_INLINE f32_part widen_f16(u16_part half) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(bit_cast<__m256i>(half));
#elif defined(__AVX2__)
  return _mm256_cvtph_ps(bit_cast<__m128i>(half));
#elif defined(__ARM_NEON)
  return vcvt_f32_f16(vreinterpret_f16_u16(half));
#else
  // Shift into place and rescale by 2^112; what was infinity or NaN gets the exponent of one.
  const u32_part h = widen_u16(half);
  const u32_part magnitude = (h & 0x7fff) << 13;
  const f32_part scaled = bit_cast<f32_part>(magnitude) * 0x1p112f;
  const u32_part special = magnitude | 0x7f800000;
  const auto is_special = bit_cast<i32_part>((h & 0x7c00) == 0x7c00);
  const auto bits = bit_cast<u32_part>(select(is_special, bit_cast<i32_part>(special), bit_cast<i32_part>(scaled)));
  return bit_cast<f32_part>(bits | ((h & 0x8000) << 16));
#endif
}
ENGINE_CARRY1(widen_f16)

ENGINE_INLINE f32x16 widen_bf16(u16x16 bits) { return bit_cast<f32x16>(widen_u16(bits) << 16); }

ENGINE_INLINE i32x16 to_i32(i8x16 x) {
#if defined(__AVX512F__)
  return bit_cast<i32x16>(_mm512_cvtepi8_epi32(bit_cast<__m128i>(x)));
#elif defined(__AVX2__)
  const auto all = bit_cast<__m128i>(x);
  return {bit_cast<i32_part>(_mm256_cvtepi8_epi32(all)),
          bit_cast<i32_part>(_mm256_cvtepi8_epi32(_mm_unpackhi_epi64(all, all)))};
#elif defined(__ARM_NEON)
  const int16x8_t low = vmovl_s8(vget_low_s8(x)), high = vmovl_high_s8(x);
  return {{vmovl_s16(vget_low_s16(low)), vmovl_high_s16(low)}, {vmovl_s16(vget_low_s16(high)), vmovl_high_s16(high)}};
#else
  return convert<i32x16>(x);
#endif
}

ENGINE_INLINE i32x16 to_i32(u8x16 x) {
#if defined(__AVX512F__)
  return bit_cast<i32x16>(_mm512_cvtepu8_epi32(bit_cast<__m128i>(x)));
#elif defined(__AVX2__)
  const auto all = bit_cast<__m128i>(x);
  return {bit_cast<i32_part>(_mm256_cvtepu8_epi32(all)),
          bit_cast<i32_part>(_mm256_cvtepu8_epi32(_mm_unpackhi_epi64(all, all)))};
#else
  return to_i32(bit_cast<i8x16>(x)) & 0xff;
#endif
}

ENGINE_INLINE u16x16 to_u16(u8x16 x) {
#if defined(__AVX512F__)
  return bit_cast<u16x16>(_mm256_cvtepu8_epi16(bit_cast<__m128i>(x)));
#elif defined(__AVX2__)
  const auto all = bit_cast<__m128i>(x);
  return bit_cast<u16x16>(Pair<__m128i>{_mm_cvtepu8_epi16(all), _mm_unpackhi_epi8(all, _mm_setzero_si128())});
#elif defined(__ARM_NEON)
  return bit_cast<u16x16>(Pair<uint16x8_t>{vmovl_u8(vget_low_u8(x)), vmovl_high_u8(x)});
#else
  return convert<u16x16>(x);
#endif
}

ENGINE_INLINE f32x16 widen_i8(i8x16 x) { return to_f32(to_i32(x)); }
ENGINE_INLINE f32x16 widen_u8(u8x16 x) { return to_f32(to_i32(x)); }

ENGINE_INLINE f32x16 load(const f16* p) { return widen_f16(load_as<u16x16>(p)); }
ENGINE_INLINE f32x16 load(const bf16* p) { return widen_bf16(load_as<u16x16>(p)); }

ENGINE_INLINE float to_f32(float x) { return x; }
ENGINE_INLINE float to_f32(bf16 x) { return bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }
ENGINE_INLINE float to_f32(f16 x) {
#if defined(__F16C__)
  return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(x.bits)));
#else
  return widen_f16(u16_part{x.bits})[0];
#endif
}

// ---- narrowing stores: round to nearest even --------------------------------------------------------------------

// The low half of each lane.
ENGINE_INLINE u16_part narrow_u16(u32_part x) {
#if defined(__AVX512F__)
  return bit_cast<u16_part>(_mm512_cvtepi32_epi16(bit_cast<__m512i>(x)));
#else
  return convert<u16_part>(x);
#endif
}
ENGINE_CARRY1(narrow_u16)

ENGINE_INLINE u16_part narrow_f16(f32_part x) {
#if defined(__AVX512F__)
  return bit_cast<u16_part>(_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__AVX2__)
  return bit_cast<u16_part>(_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__ARM_NEON)
  return vreinterpret_u16_f16(vcvt_f16_f32(x));
#else
  const auto bits = bit_cast<u32_part>(x);
  const u32_part sign = (bits >> 16) & 0x8000;
  const u32_part a = bits & 0x7fffffff;
  // Normal results: add the rounding bias in place; subnormal results: let an addition of 0.5 do the rounding.
  const u32_part normal = (a - 0x38000000 + 0xfff + ((a >> 13) & 1)) >> 13;
  const u32_part tiny = bit_cast<u32_part>(bit_cast<f32_part>(a) + 0.5f) - 0x3f000000;
  const auto s = bit_cast<i32_part>(a);
  i32_part r = select(s < 0x38800000, bit_cast<i32_part>(tiny), bit_cast<i32_part>(normal));
  r = select(s >= 0x477ff000, i32_part{} + 0x7c00, r);
  r = select(s > 0x7f800000, i32_part{} + 0x7e00, r);
  return narrow_u16(bit_cast<u32_part>(r) | sign);
#endif
}
ENGINE_CARRY1(narrow_f16)

ENGINE_INLINE u16x16 narrow_bf16(f32x16 x) {
  const auto bits = bit_cast<u32x16>(x);
  const u32x16 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const i32x16 r = select(bit_cast<i32x16>(bits & 0x7fffffff) > 0x7f800000, bit_cast<i32x16>((bits >> 16) | 0x40),
                          bit_cast<i32x16>(rounded));
  return narrow_u16(bit_cast<u32x16>(r));
}

// The low byte of each lane.
ENGINE_INLINE i8x16 narrow_i8(i32x16 x) {
#if defined(__AVX512F__)
  return bit_cast<i8x16>(_mm512_cvtepi32_epi8(bit_cast<__m512i>(x)));
#elif defined(__AVX2__)
  x = x & 0xff;  // nothing saturates
  const __m256i words = _mm256_packus_epi32(bit_cast<__m256i>(x.lo), bit_cast<__m256i>(x.hi));  // of four, in turn
  const __m256i bytes = _mm256_packus_epi16(words, words);
  const __m256i ordered = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 0, 4, 1, 5));
  return bit_cast<i8x16>(_mm256_castsi256_si128(ordered));
#elif defined(__ARM_NEON)
  const int16x8_t low = vcombine_s16(vmovn_s32(x.lo.lo), vmovn_s32(x.lo.hi));
  const int16x8_t high = vcombine_s16(vmovn_s32(x.hi.lo), vmovn_s32(x.hi.hi));
  return vcombine_s8(vmovn_s16(low), vmovn_s16(high));
#else
  return convert<i8x16>(x);
#endif
}

// 64 whole numbers from -128 to 127 as bytes, and minus the sum of each of the four vectors.
ENGINE_INLINE void store_i8_sums(int8_t* q, int32_t* nsums, i32x16 a, i32x16 b, i32x16 c, i32x16 d) {
#if defined(__AVX512VNNI__)
  const __m512i ab = _mm512_packs_epi32(bit_cast<__m512i>(a), bit_cast<__m512i>(b));
  const __m512i cd = _mm512_packs_epi32(bit_cast<__m512i>(c), bit_cast<__m512i>(d));
  const __m512i bytes = _mm512_packs_epi16(ab, cd);  // a quarter of each vector in turn
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  store(q, _mm512_permutexvar_epi32(order, bytes));
  const __m512i sums = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(1), bytes);
  const __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(sums), _mm512_extracti64x4_epi64(sums, 1));
  const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  store(nsums, _mm_sub_epi32(_mm_setzero_si128(), four));
#elif defined(__AVX2__)
  __m256i words[4], sums[4];
  const i32x16 x[4] = {a, b, c, d};
  for (int i = 0; i < 4; ++i) {
    words[i] = _mm256_packs_epi32(bit_cast<__m256i>(x[i].lo), bit_cast<__m256i>(x[i].hi));  // of four, in turn
    sums[i] = _mm256_madd_epi16(words[i], _mm256_set1_epi16(-1));
  }
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  for (int i = 0; i < 4; i += 2)
    store(q + 16 * i, _mm256_permutevar8x32_epi32(_mm256_packs_epi16(words[i], words[i + 1]), order));
  const __m256i all = _mm256_hadd_epi32(_mm256_hadd_epi32(sums[0], sums[1]), _mm256_hadd_epi32(sums[2], sums[3]));
  store(nsums, _mm_add_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1)));
#else
  const i32x16 x[4] = {a, b, c, d};
  for (int i = 0; i < 4; ++i) {
    store(q + 16 * i, narrow_i8(x[i]));
    nsums[i] = -reduce_add(x[i]);
  }
#endif
}

ENGINE_INLINE void narrow(float* p, f32x16 x) { store(p, x); }
ENGINE_INLINE void narrow(f16* p, f32x16 x) { store(p, narrow_f16(x)); }
ENGINE_INLINE void narrow(bf16* p, f32x16 x) { store(p, narrow_bf16(x)); }

}  // namespace ENGINE_ISA
}  // namespace engine_cpu
