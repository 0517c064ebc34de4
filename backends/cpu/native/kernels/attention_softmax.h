// The softmax of one row over one chunk: scores become weights of the values, with the row's maximum and sum beside.
#pragma once

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

ENGINE_INLINE f32x16 capped(f32x16 s, float softcap) { return softcap > 0 ? softcap * tanh(s / softcap) : s; }

// weights: the row's scores, turned into exp(score - max) within the span.
inline void softmax_row(float softcap, Span span, float* weights, Partial sums) {
  f32x16 most = splat(-__builtin_inff());
  const int32_t first = span.begin / 16 * 16;
  for (int32_t t = first; t < span.end; t += 16) {
    const f32x16 s = within(span, t, capped(load(weights + t), softcap), -__builtin_inff());
    store(weights + t, s);
    most = max(s, most);
  }
  const float m = reduce_max(most);
  f32x16 sum{};
  for (int32_t t = first; t < span.end; t += 16) {
    const f32x16 p = exp(load(weights + t) - m);
    sum += p;
    store(weights + t, p);  // what lies outside the span is not read
  }
  *sums.m = m;
  *sums.l = reduce_add(sum);
}

// What every row of a tile multiplies with: the scales of a chunk's keys and values, one a token of `all` and of the 16
// that its first and last lie in.
struct TokenScales {
  alignas(64) float keys[kChunk], values[kChunk];

  TokenScales(const AttentionCache& cache, const HeadBlocks& of, Span all) {
    for (int32_t t = all.begin / 16 * 16; t < all.end; t += 16) {
      store(keys + t, cache.token_scales(2, of, t, all.end));
      store(values + t, cache.token_scales(3, of, t, all.end));
    }
  }
};

// Whole scores, i32 in the memory of `weights`, times query_scale and their keys' scales; gives back the lanes' maxima.
template <bool kCapped>
ENGINE_INLINE f32x16 scale_scores(const TokenScales& scales, float softcap, float query_scale, Span span, int32_t first,
                                  int32_t last, float* weights) {
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

// softmax_row of whole scores in three steps, each to be done for all rows before the next: what ends a row's step, reductions
// across lanes, is waited for by its own next step alone.
struct WholeRow {
  const TokenScales& scales;
  Span span;
  float* weights;
  int32_t first = span.begin / 16 * 16, last = (span.end + 15) / 16 * 16;

  // The greatest score.
  float find_most(float softcap, float query_scale) const {
    return reduce_max(softcap > 0 ? scale_scores<true>(scales, softcap, query_scale, span, first, last, weights)
                                  : scale_scores<false>(scales, 0, query_scale, span, first, last, weights));
  }

  // exp(score - most) times the value's scale, and how they are to be rounded: a sum within the bound.
  WholeScale exponentiate(float most, float bound, Partial sums, float& together) const {
    f32x16 sum{}, top{}, total{};
    for (int32_t t = first; t < last; t += 16) {
      const f32x16 p = exp(load(weights + t) - most);
      const f32x16 weight = within(span, t, p * load(scales.values + t), 0);
      sum += p;
      top = max(weight, top);
      total += weight;
      store(weights + t, weight);
    }
    *sums.m = most;
    *sums.l = reduce_add(sum);
    together = reduce_add(total);
    return {reduce_max(top), together, bound};
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
