// Making q8g32 rows: groups of a row from values that are in registers, so that whoever computes a row can pack it.
#pragma once

#include <cstring>
#include <stdexcept>
#include <string>

#include "../simd_storage.h"
#include "../work_split.h"
#include "q8g32.h"

namespace engine_cpu {
namespace ENGINE_ISA {

// From this absmax on a group's scale is a normal number, and 127 / absmax is finite.
constexpr float kLeastAbsmax = 0x1.fcp-120f;  // 127 * 2^-126

ENGINE_INLINE i32x16 clamp(i32x16 x, int32_t least, int32_t most) {
  return select(x > most, splat_i32(most), select(x < least, splat_i32(least), x));
}

// x to the nearest whole number from -128 to 127.
ENGINE_INLINE i32x16 saturate_i8(f32x16 x) {
  const f32x16 least = splat(-128.0f), most = splat(127.0f);
  return round_i32(select(x > most, most, select(x < least, least, x)));
}

// The bits of |x| order as integers with infinity above every number and NaN above infinity.
ENGINE_INLINE i32x16 greater_magnitude(f32x16 x, f32x16 y) {
  return max(bit_cast<i32x16>(abs(x)), bit_cast<i32x16>(abs(y)));
}

// One group of 32 values, given in two halves, into place in its row. absmax: of its span. `fixed`: the scale, where it is not 0.
inline void quantize_group(f32x16 low, f32x16 high, float absmax, int8_t* q, float* scale, int32_t* nsum16, float fixed) {
  float s = absmax / 127.0f;
  i32x16 x{}, y{};
  if (fixed != 0.0f && s < __builtin_inff()) {
    s = fixed;
    x = saturate_i8(low / s);
    y = saturate_i8(high / s);
  } else if (absmax >= kLeastAbsmax && s < __builtin_inff()) {
    x = round_i32(low * (127.0f / absmax));
    y = round_i32(high * (127.0f / absmax));
  } else if (s > 0.0f && s < __builtin_inff()) {  // a subnormal scale is coarse: x / scale may pass 127
    x = clamp(round_i32(low / s), -127, 127);
    y = clamp(round_i32(high / s), -127, 127);
  }
  *scale = s;
  store(q, narrow_i8(x));
  store(q + 16, narrow_i8(y));
  nsum16[0] = -reduce_add(x);
  nsum16[1] = -reduce_add(y);
}

// Where a row's groups from one on belong.
struct PackedGroups {
  int8_t* q;
  float* scales;
  int32_t* nsums;

  ENGINE_INLINE PackedGroups(uint8_t* row, int64_t depth, int64_t group)
      : q(q8g32_values(row) + group * kGroup), scales(q8g32_scales(row, depth) + group),
        nsums(q8g32_sums(row, depth) + 2 * group) {}

  ENGINE_INLINE void put(int64_t group, f32x16 low, f32x16 high, float absmax, float fixed) const {
    quantize_group(low, high, absmax, q + group * kGroup, scales + group, nsums + 2 * group, fixed);
  }
  // A group that is a span.
  ENGINE_INLINE void put(int64_t group, f32x16 low, f32x16 high, float fixed) const {
    put(group, low, high, bit_cast<float>(reduce_max(greater_magnitude(low, high))), fixed);
  }
};

// Four groups at once: two that lie together at `a` and two at `b`. kOne: they are a span.
template <bool kOne>
ENGINE_INLINE void quantize_two_pairs(const f32x16 (&x)[8], const PackedGroups& a, const PackedGroups& b, float fixed) {
  i32x4 most = max_of_each(greater_magnitude(x[0], x[1]), greater_magnitude(x[2], x[3]),
                           greater_magnitude(x[4], x[5]), greater_magnitude(x[6], x[7]));
  if constexpr (kOne) most = greatest_of(most);
  if (__builtin_expect(fixed != 0.0f || !all_within(most, kLeastAbsmax, __builtin_inff()), 0)) {
    const f32x4 absmax = bit_cast<f32x4>(most);
    for (int i = 0; i < 2; ++i) {
      a.put(i, x[2 * i], x[2 * i + 1], absmax[i], fixed);
      b.put(i, x[4 + 2 * i], x[5 + 2 * i], absmax[2 + i], fixed);
    }
    return;
  }
  const f32x4 absmax = bit_cast<f32x4>(most);
  const f32x4 scales = absmax / 127.0f, factors = 127.0f / absmax;
  std::memcpy(a.scales, &scales, 8);
  std::memcpy(b.scales, reinterpret_cast<const float*>(&scales) + 2, 8);
  i32x16 rounded[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) rounded[i] = round_i32(x[i] * splat(factors[i / 2]));
  store_i8_sums(a.q, a.nsums, rounded[0], rounded[1], rounded[2], rounded[3]);
  store_i8_sums(b.q, b.nsums, rounded[4], rounded[5], rounded[6], rounded[7]);
}

// Groups first to end of a row, whole spans: `values(k)` gives the 16 values from k on, and is called once for each, in order.
template <class Values>
ENGINE_INLINE void quantize_groups(uint8_t* row, int64_t depth, int64_t first, int64_t end, int64_t span, float fixed,
                                   Values values) {
  int64_t g = first;
  for (; g + 4 <= end; g += 4) {
    f32x16 x[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) x[i] = values(g * kGroup + 16 * i);
    const PackedGroups a(row, depth, g), b(row, depth, g + 2);
    if (span == kLongSpan)
      quantize_two_pairs<true>(x, a, b, fixed);
    else
      quantize_two_pairs<false>(x, a, b, fixed);
  }
  for (; g < end; ++g) {
    const f32x16 low = values(g * kGroup);
    PackedGroups(row, depth, g).put(0, low, values(g * kGroup + 16), fixed);
  }
}

// x f32 [depth] as one row.
ENGINE_INLINE void quantize_row(const float* x, int64_t depth, int64_t span, uint8_t* row) {
  quantize_groups(row, depth, 0, depth / kGroup, span, 0.0f, [x](int64_t k) { return load(x + k); });
}

// The span that a kernel packs its result's rows of `width` with: number span, 32 or 128 (32 if absent).
// std::invalid_argument where it is another, or the rows are no whole spans.
inline int64_t span_of(const KernelArgs& args, int64_t width) {
  const auto span = static_cast<int64_t>(args.number_or("span", kGroup));
  if (span != kGroup && span != kLongSpan) throw std::invalid_argument("a span of packed activations is 32 or 128.");
  if (width <= 0 || width % span != 0)
    throw std::invalid_argument("rows are packed whole, in a width that is a multiple of " + std::to_string(span) + ".");
  return span;
}

// This thread's share of the groups of `rows` rows: visit(row, first group, end). A long row alone keeps all threads busy.
template <class Visit>
ENGINE_INLINE void share_groups(int64_t rows, int64_t depth, const Team& team, Visit visit) {
  const int64_t groups = depth / kGroup;
  const Range mine = share(rows * groups, team, 4);
  for (int64_t at = mine.begin; at < mine.end;) {
    const int64_t row = at / groups, first = at % groups;
    const int64_t end = groups < first + mine.end - at ? groups : first + mine.end - at;
    visit(row, first, end);
    at += end - first;
  }
}

}  // namespace ENGINE_ISA
}  // namespace engine_cpu
