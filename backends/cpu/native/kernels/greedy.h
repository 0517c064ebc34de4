// A step in which every row takes the greatest of its logits and wants nothing else of them: the head keeps each row's best
// while it multiplies, and the logits are neither written nor read.
#pragma once

#include "../simd.h"
#include "../work_split.h"

namespace engine_cpu {
namespace ENGINE_ISA {

// The first of the greatest of a row's finite logits. Where there is none: kNone; with a NaN or +inf among them: kBroken.
struct BestLogit {
  static constexpr int32_t kNone = -1, kBroken = -2;
  float score = -__builtin_inff();
  int32_t id = kNone;

  ENGINE_INLINE void take(BestLogit other) {
    if (other.score > score || (other.score == score && other.id < id)) *this = other;
  }

  // Takes in the first `valid` of 64 logits, those of strips in any order.
  ENGINE_INLINE void take(const float* logits, int64_t valid, int32_t first_id) {
    f32x16 most = splat(-__builtin_inff());
    i32x16 broken{};
    for (int32_t c = 0; c < 64; c += 16) {
      const f32x16 v = select(lane_index() + c < static_cast<int32_t>(valid), load(logits + c), splat(-__builtin_inff()));
      broken |= (v != v) | (v == __builtin_inff());
      most = max(v, most);
    }
    if (!any(broken | (most >= score))) return;  // as nearly all of them are
    if (any(broken)) {
      *this = {__builtin_inff(), kBroken};
    } else if (const float greatest = reduce_max(most); greatest >= score) {
      BestLogit best{greatest, first_id};
      while (*logits++ != greatest) ++best.id;
      take(best);
    }
  }
};

// Which inputs of process_logits and sample ask for more than the greatest logit.
class GreedyRows {
 public:
  enum Input {
    kTemperature,
    kBiasOffsets,
    kMaskRows,
    kRepetition,
    kFrequency,
    kPresence,
    kWantLogprobs,
    kNgramSize,
    kCandidates,
    kTargets,
    kInputs
  };

  GreedyRows() = default;
  // Value ids in the order of Input; those from kNgramSize on may be absent.
  explicit GreedyRows(const int32_t* inputs) { std::copy(inputs, inputs + kInputs, inputs_); }

  bool all(const Frame& frame) const {
    const int32_t* bias_offsets = in<int32_t>(frame, kBiasOffsets);
    if (bias_offsets[frame.dims.R] != bias_offsets[0]) return false;
    for (int64_t row = 0; row < frame.dims.R; ++row)
      if (!is_greedy(frame, row)) return false;
    return true;
  }

 private:
  template <class T>
  const T* in(const Frame& frame, Input which) const {
    return input<T>(frame, inputs_[which]);
  }
  int32_t optional(const Frame& frame, Input which, int64_t row, int32_t off) const {
    return inputs_[which] < 0 ? off : in<int32_t>(frame, which)[row];
  }
  bool is_greedy(const Frame& frame, int64_t row) const {
    return in<float>(frame, kTemperature)[row] == 0 && in<int32_t>(frame, kMaskRows)[row] < 0 &&
           in<float>(frame, kRepetition)[row] == 1 && in<float>(frame, kFrequency)[row] == 0 &&
           in<float>(frame, kPresence)[row] == 0 && in<int32_t>(frame, kWantLogprobs)[row] < 0 &&
           optional(frame, kNgramSize, row, 0) <= 0 && optional(frame, kCandidates, row, 0) <= 0 &&
           optional(frame, kTargets, row, -1) < 0;
  }

  int32_t inputs_[kInputs] = {};
};

}  // namespace ENGINE_ISA
}  // namespace engine_cpu
