// The best k of a row of values without sorting it: descending, lowest id first on ties.
#pragma once

#include <algorithm>
#include <functional>

#include "../simd.h"

namespace engine_cpu {
namespace ENGINE_ISA {

// A value and its id as one integer: greater keys are better.
ENGINE_INLINE uint64_t make_key(float value, int32_t id) {
  const uint32_t bits = bit_cast<uint32_t>(value + 0.0f);  // -0 and 0 tie
  const uint32_t ordered = bits ^ (bits >> 31 != 0 ? 0xffffffffu : 0x80000000u);
  return static_cast<uint64_t>(ordered) << 32 | ~static_cast<uint32_t>(id);
}

ENGINE_INLINE float key_value(uint64_t key) {
  const uint32_t ordered = static_cast<uint32_t>(key >> 32);
  return bit_cast<float>(ordered ^ (ordered >> 31 != 0 ? 0x80000000u : 0xffffffffu));
}

ENGINE_INLINE int32_t key_id(uint64_t key) { return static_cast<int32_t>(~static_cast<uint32_t>(key)); }

// Collects keys offered in the order of their ids, dropping what cannot be among the best k.
class BestKeys {
 public:
  // `memory` holds `capacity` keys; at least k + 16, or as many as will be offered, + 16.
  BestKeys(uint64_t* memory, int64_t capacity, int64_t k)
      : keys_(memory), limit_(std::min(capacity - 16, 2 * k + 1024)), k_(k) {}

  // values[i] has id first_id + i and takes part where `wanted` is set.
  ENGINE_INLINE void offer(f32x16 values, i32x16 wanted, int64_t first_id) {
    // What ties with the k-th best so far has a greater id than it.
    uint32_t bits = lane_bits(pruned_ ? wanted & (values > floor_) : wanted);
    if (bits == 0) return;
    float lanes[16];
    store(lanes, values);
    for (; bits != 0; bits &= bits - 1) {
      const int lane = __builtin_ctz(bits);
      keys_[size_++] = make_key(lanes[lane], static_cast<int32_t>(first_id + lane));
    }
    if (size_ > limit_ && size_ > k_) prune();
  }

  // The best k, or all there are: keys()[0 .. size()), in no order until sort().
  void finish() {
    if (size_ > k_) prune();
  }
  void sort() { std::sort(keys_, keys_ + size_, std::greater<uint64_t>()); }

  uint64_t* keys() const { return keys_; }
  int64_t size() const { return size_; }

 private:
  void prune() {
    if (k_ > 0) {
      std::nth_element(keys_, keys_ + k_ - 1, keys_ + size_, std::greater<uint64_t>());
      floor_ = key_value(keys_[k_ - 1]);
      pruned_ = true;
    }
    size_ = k_;
  }

  uint64_t* keys_;
  int64_t limit_, k_, size_ = 0;
  float floor_ = 0;
  bool pruned_ = false;
};

}  // namespace ENGINE_ISA
}  // namespace engine_cpu
