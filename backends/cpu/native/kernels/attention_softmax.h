// The softmax of one row over one chunk: scores become weights of the values, with the row's maximum and sum beside.
#pragma once

#include "../simd_fold.h"
#include "../simd_math.h"
#include "attention_cache.h"
#include "attention_whole.h"
#include "attention_partial.h"

namespace engine_cpu {
namespace ENGINE_ISA {

// Lanes of the 16 tokens from `t` on that lie in the span.
ENGINE_INLINE i32x16 inside(Span span, int32_t t) {
  const i32x16 token = lane_index() + t;
  return (token >= span.begin) & (token < span.end);
}

// x where its tokens are in the span, else `other`.
ENGINE_INLINE f32x16 within(Span span, int32_t t, f32x16 x, float other) {
  return t >= span.begin && t + 16 <= span.end ? x : select(inside(span, t), x, splat(other));
}

// A score under a cap, as a power of two.
ENGINE_INLINE f32x16 capped(f32x16 s, float softcap) { return softcap * kPowers * tanh(s / softcap); }

// weights: the row's scores, turned into 2^(score - max) within the span.
inline void softmax_row(float softcap, Span span, float* weights, Partial sums) {
  f32x16 most = splat(-__builtin_inff());
  const int32_t first = span.begin / 16 * 16;
  for (int32_t t = first; t < span.end; t += 16) {
    const f32x16 score = load(weights + t);
    const f32x16 s = within(span, t, softcap > 0 ? capped(score, softcap) : score, -__builtin_inff());
    store(weights + t, s);
    most = max(s, most);
  }
  const float m = reduce_max(most);
  f32x16 sum{};
  for (int32_t t = first; t < span.end; t += 16) {
    const f32x16 p = exp2(load(weights + t) - m);
    sum += p;
    store(weights + t, p);  // what lies outside the span is not read
  }
  *sums.m = m;
  *sums.l = reduce_add(sum);
}

// A vector a row, of a tile's first rows.
struct RowLanes {
  f32x16 of[kMostTileRows];

  // What each row's lanes come to, in a lane a row.
  ENGINE_INLINE f32x16 maxima(int32_t rows) {
    if (rows <= kFew) return few(rows, [](f32x16 x) { return reduce_max(x); });
    fill(rows);
    return max_of_each(of);
  }
  ENGINE_INLINE f32x16 sums(int32_t rows) {
    if (rows <= kFew) return few(rows, [](f32x16 x) { return reduce_add(x); });
    fill(rows);
    return sum_of_each(of);
  }

 private:
  static constexpr int32_t kFew = 2;  // are put together one by one

  template <class Reduce>
  ENGINE_INLINE f32x16 few(int32_t rows, Reduce reduce) const {
    float lanes[kMostTileRows] = {};
    for (int32_t r = 0; r < rows; ++r) lanes[r] = reduce(of[r]);
    return load(lanes);
  }
  ENGINE_INLINE void fill(int32_t rows) {
    for (int32_t r = rows; r < kMostTileRows; ++r) of[r] = of[0];
  }
};

// The softmax of one of a tile's rows of whole scores in three steps, each to be done for all rows before the next. Their lanes
// are put together between, for all rows at once.
struct WholeRow {
  const TokenScales& scales;
  Span span;
  float* weights;  // the row's scores, i32 in the memory of f32
  int32_t first = span.begin / 16 * 16, last = (span.end + 15) / 16 * 16;

  // The scores times their query's and keys' scales, under a cap if there is one. Gives back the lanes' maxima.
  template <bool kCapped>
  ENGINE_INLINE f32x16 scale_scores(float softcap, float query_scale) const {
    f32x16 most = splat(-__builtin_inff());
    for (int32_t t = first; t < last; t += 16) {
      f32x16 s = to_f32(load_as<i32x16>(weights + t)) * (load(scales.keys + t) * query_scale);
      if constexpr (kCapped) s = capped(s, softcap);
      const f32x16 seen = within(span, t, s, -__builtin_inff());
      store(weights + t, seen);
      most = max(seen, most);
    }
    return most;
  }

  // 2^(score - most) times the value's scale; the lanes' sums without it, their maxima and sums with it.
  ENGINE_INLINE void exponentiate(float most, f32x16& sum, f32x16& top, f32x16& together) const {
    sum = top = together = f32x16{};
    for (int32_t t = first; t < last; t += 16) {
      const f32x16 power = exp2<true>(load(weights + t) - most);
      const f32x16 p = within(span, t, power, 0);
      const f32x16 weight = within(span, t, power * load(scales.values + t), 0);
      sum += p;
      top = max(weight, top);
      together += weight;
      store(weights + t, weight);
    }
  }

  // 16 bits each, zero in all steps of [all.begin, all.end) outside the span.
  template <class Rounded>
  void round(float inverse, Span all, Rounded rounded) const {
    constexpr int kStep = Rounded::kStep;
    const int32_t begin = all.begin / kStep * kStep, end = (all.end + kStep - 1) / kStep * kStep;
    for (int32_t t = begin; t < std::min(first, end); t += 16) rounded.put(t, i32x16{});
    for (int32_t t = first; t < last; t += 16) rounded.put(t, round_i32(load(weights + t) * inverse));
    for (int32_t t = std::max(last, begin); t < end; t += 16) rounded.put(t, i32x16{});
  }
};

}  // namespace ENGINE_ISA
}  // namespace engine_cpu
