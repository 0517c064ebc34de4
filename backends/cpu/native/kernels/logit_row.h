// A row of logits becomes what the next token is drawn from.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "../buffer.h"
#include "../simd.h"
#include "../simd_math.h"
#include "../work_split.h"
#include "best_keys.h"

namespace engine_cpu {
namespace ENGINE_ISA {

constexpr float kRemoved = -__builtin_inff();

// The sum of exp(logit(key) - most) over keys.
template <class Logit>
ENGINE_INLINE double mass(const uint64_t* keys, int64_t count, float most, Logit logit) {
  double sum = 0;
  for (int64_t i = 0; i < count; i += 16) {
    f32x16 values = splat(kRemoved);
    for (int64_t j = 0; j < 16 && i + j < count; ++j) values[j] = logit(keys[i + j]);
    sum += reduce_add(exp(values - most));
  }
  return sum;
}

// How many of the best keys reach `wanted` of the mass with what comes `before` them: puts them first. At least one, if
// there is one.
template <class Logit>
int64_t reach_mass(uint64_t* keys, int64_t count, float most, double wanted, double before, Logit logit) {
  int64_t begin = 0, end = count;
  while (end - begin > 32) {  // halves by rank, keeping the one in which the sum gets there
    const int64_t middle = begin + (end - begin) / 2;
    std::nth_element(keys + begin, keys + middle, keys + end, std::greater<uint64_t>());
    const double upper = mass(keys + begin, middle - begin, most, logit);
    if (before + upper >= wanted) {
      end = middle;
    } else {
      before += upper;
      begin = middle;
    }
  }
  std::sort(keys + begin, keys + end, std::greater<uint64_t>());
  for (; begin < end; ++begin) {
    before += mass(keys + begin, 1, most, logit);
    if (before >= wanted) return begin + 1;
  }
  return begin;
}

// Where tokens are ordered by their logits. No functions: a pointer to one might not be inlined.
struct LogitScore {
  ENGINE_INLINE f32x16 operator()(f32x16 v) const { return v; }
};
struct KeyLogit {
  ENGINE_INLINE float operator()(uint64_t key) const { return key_value(key); }
};

// Inputs: logits f32 [R, width]; rows i32 [R], positions, token_seq i32 [T], seq_slots i32 [S]: where each row is;
// prompt_lengths i32 [R]; temperature f32, top_k i32 (0: off), top_p f32 (1), min_p f32 (0), repetition f32 (1),
// frequency f32 (0), presence f32 (0), each [R]; bias_offsets i32 [R+1], bias_ids i32 [B], bias_values f32 [B];
// mask_rows i32 [R] (-1: none), masks u32 [M, ceil(width / 32)] (set: allowed); each of these may be absent: typical_p
// f32 [R] (1: off), no_repeat_ngram_size i32 [R] (0), candidates i32 [R] (0). State: history i32 [slots, max_len]. A row
// becomes f32 [width], what is removed is -inf. In this order: log-softmax where candidates > 0, bias, mask, repetition penalty
// over the tokens of history 0..position, n-gram bans over the same (Paulus et al., 2017), frequency and presence over those
// from the prompt's length on, temperature (0: nothing further), top-k (Fan et al., 2018), top-p (Holtzman et al., 2020), min-p
// (Nguyen et al., 2024), typical-p (Meister et al., 2022).
// Numbers: width, max_len.
class LogitRows {
 public:
  enum Input {
    kLogits,
    kRows,
    kPositions,
    kTokenSeq,
    kSeqSlots,
    kPromptLengths,
    kTemperature,
    kTopK,
    kTopP,
    kMinP,
    kRepetition,
    kFrequency,
    kPresence,
    kBiasOffsets,
    kBiasIds,
    kBiasValues,
    kMaskRows,
    kMasks,
    kTypicalP,
    kNgramSize,
    kCandidates,
    kInputs
  };

  // The kernel's inputs from `first` on are in the order of Input.
  explicit LogitRows(const KernelArgs& args, size_t first = 0)
      : history_(reinterpret_cast<const int32_t*>(args.states.at(0))),
        width_(args.integer("width")),
        max_len_(args.integer("max_len")),
        key_memory_(args.integer("threads") * (width_ + 16) * sizeof(uint64_t)),
        count_memory_(args.integer("threads") * width_ * sizeof(int32_t)) {
    for (int i = 0; i < kInputs; ++i) inputs_[i] = args.inputs.at(first + i);
    std::memset(count_memory_.data(), 0, count_memory_.size());
  }

  int64_t width() const { return width_; }

  // values [width]; `thread`: of the team, whose memory it uses.
  void process(const Frame& frame, int64_t row, int thread, float* values) const {
    const float temperature = in<float>(frame, kTemperature)[row];
    const float* logits = in<float>(frame, kLogits) + row * width_;
    if (temperature == 0 || is_adjusted(frame, row)) {
      std::memcpy(values, logits, width_ * sizeof(float));
      logits = values;
      adjust(frame, row, values, count_memory_.as<int32_t>() + thread * width_);
      if (temperature == 0) return;
    }
    const float most = divide(logits, temperature, values);
    uint64_t* keys = key_memory_.as<uint64_t>() + thread * (width_ + 16);
    truncate(frame, row, most, values, keys);
    const float typical_p = optional<float>(frame, kTypicalP, row, 1);
    if (typical_p < 1) keep_typical(values, typical_p, keys);
  }

 private:
  static constexpr int kCuts = 8, kRounds = 3;
  static constexpr int64_t kPiece = 4096;  // numbers that are summed in f32

  template <class T>
  const T* in(const Frame& frame, Input which) const {
    return input<T>(frame, inputs_[which]);
  }

  // A row's parameter, `off` where the input is absent.
  template <class T>
  T optional(const Frame& frame, Input which, int64_t row, T off) const {
    return inputs_[which] < 0 ? off : in<T>(frame, which)[row];
  }

  // Whether anything comes before the temperature.
  bool is_adjusted(const Frame& frame, int64_t row) const {
    const int32_t* bias = in<int32_t>(frame, kBiasOffsets) + row;
    return bias[0] != bias[1] || in<int32_t>(frame, kMaskRows)[row] >= 0 || in<float>(frame, kRepetition)[row] != 1 ||
           in<float>(frame, kFrequency)[row] != 0 || in<float>(frame, kPresence)[row] != 0 ||
           optional<int32_t>(frame, kNgramSize, row, 0) > 0 || optional<int32_t>(frame, kCandidates, row, 0) > 0;
  }

  void adjust(const Frame& frame, int64_t row, float* values, int32_t* counts) const {
    if (optional<int32_t>(frame, kCandidates, row, 0) > 0) log_softmax(values);
    add_bias(frame, row, values);
    apply_mask(frame, row, values);
    penalize(frame, row, values, counts);
  }

  void log_softmax(float* values) const {
    const float most = greatest(values);
    if (most == kRemoved) return;
    const float rest = static_cast<float>(std::log(total_mass(values, most)));
    for (int64_t i = 0; i < width_; i += 16) {
      const int64_t count = width_ - i < 16 ? width_ - i : 16;
      store_first(values + i, load_first(values + i, count) - most - rest, count);
    }
  }

  void add_bias(const Frame& frame, int64_t row, float* values) const {
    const int32_t* offsets = in<int32_t>(frame, kBiasOffsets);
    for (int32_t i = offsets[row]; i < offsets[row + 1]; ++i)
      values[in<int32_t>(frame, kBiasIds)[i]] += in<float>(frame, kBiasValues)[i];
  }

  void apply_mask(const Frame& frame, int64_t row, float* values) const {
    const int32_t mask = in<int32_t>(frame, kMaskRows)[row];
    if (mask < 0) return;
    const uint32_t* words = in<uint32_t>(frame, kMasks) + mask * ((width_ + 31) / 32);
    for (int64_t i = 0; i < width_; i += 16) {
      const int64_t count = width_ - i < 16 ? width_ - i : 16;
      const i32x16 allowed = bits_mask(words[i / 32] >> i % 32 & 0xffff);
      store_first(values + i, select(allowed, load_first(values + i, count), splat(kRemoved)), count);
    }
  }

  // `counts` [width] is all zeros before and after.
  void penalize(const Frame& frame, int64_t row, float* values, int32_t* counts) const {
    const float repetition = in<float>(frame, kRepetition)[row], frequency = in<float>(frame, kFrequency)[row],
                presence = in<float>(frame, kPresence)[row];
    const int32_t token = in<int32_t>(frame, kRows)[row];
    const int64_t end = in<int32_t>(frame, kPositions)[token] + 1;
    const int32_t* past = history_ + in<int32_t>(frame, kSeqSlots)[in<int32_t>(frame, kTokenSeq)[token]] * max_len_;
    if (repetition != 1)
      each_distinct(past, 0, end, counts, [&](int32_t id, int32_t) {
        values[id] = values[id] > 0 ? values[id] / repetition : values[id] * repetition;
      });
    ban_ngrams(past, end, optional<int32_t>(frame, kNgramSize, row, 0), values);
    if (frequency != 0 || presence != 0)
      each_distinct(past, in<int32_t>(frame, kPromptLengths)[row], end, counts,
                    [&](int32_t id, int32_t count) { values[id] -= frequency * static_cast<float>(count) + presence; });
  }

  // Removes what would complete an n-gram of past[0 .. length) once more.
  void ban_ngrams(const int32_t* past, int64_t length, int64_t size, float* values) const {
    if (size <= 0 || length < size) return;
    const int32_t* begun = past + length - (size - 1);
    for (int64_t i = 0; i + size <= length; ++i) {
      const int32_t next = past[i + size - 1];
      if (next >= 0 && next < width_ && std::memcmp(past + i, begun, (size - 1) * sizeof(int32_t)) == 0)
        values[next] = kRemoved;
    }
  }

  // visit(id, count) for each distinct id of past[begin .. end) below the width.
  template <class Visit>
  ENGINE_INLINE void each_distinct(const int32_t* past, int64_t begin, int64_t end, int32_t* counts,
                                   Visit visit) const {
    const auto known = [this](int32_t id) { return id >= 0 && id < width_; };
    for (int64_t i = begin; i < end; ++i)
      if (known(past[i])) ++counts[past[i]];
    for (int64_t i = begin; i < end; ++i) {
      if (!known(past[i]) || counts[past[i]] == 0) continue;
      visit(past[i], counts[past[i]]);
      counts[past[i]] = 0;
    }
  }

  // values = logits / temperature, of which the greatest finite one is returned; -inf if none is. logits may be values.
  float divide(const float* logits, float temperature, float* values) const {
    const auto each = [&](auto quotient) {
      f32x16 most = splat(kRemoved);
      for (int64_t i = 0; i < width_; i += 16) {
        const int64_t count = width_ - i < 16 ? width_ - i : 16;
        const f32x16 v = quotient(load_first(logits + i, count));
        store_first(values + i, v, count);
        most = max(select(is_finite(v) & (lane_index() < static_cast<int32_t>(count)), v, splat(kRemoved)), most);
      }
      return reduce_max(most);
    };
    if (temperature == 1) return each([](f32x16 v) { return v; });
    return each([&](f32x16 v) { return v / temperature; });
  }

  // f(values, finite, first id) over the row.
  template <class F>
  ENGINE_INLINE void each_vector(const float* values, F f) const {
    for (int64_t i = 0; i < width_; i += 16) {
      const int64_t count = width_ - i < 16 ? width_ - i : 16;
      const f32x16 v = load_first(values + i, count);
      f(v, is_finite(v) & (lane_index() < static_cast<int32_t>(count)), i);
    }
  }

  // The greatest finite value; -inf if none is.
  float greatest(const float* values) const {
    f32x16 most = splat(kRemoved);
    each_vector(values,
                [&](f32x16 v, i32x16 finite, int64_t) { most = max(select(finite, v, splat(kRemoved)), most); });
    return reduce_max(most);
  }

  void truncate(const Frame& frame, int64_t row, float most, float* values, uint64_t* memory) const {
    const int64_t top_k = in<int32_t>(frame, kTopK)[row];
    const float top_p = in<float>(frame, kTopP)[row], min_p = in<float>(frame, kMinP)[row];
    const bool by_k = top_k > 0 && top_k < width_, by_p = top_p < 1;
    if (most == kRemoved || (!by_k && !by_p && !(min_p > 0))) return;
    if (by_k) {
      BestKeys best(memory, width_ + 16, top_k);
      each_vector(values, [&](f32x16 v, i32x16 finite, int64_t first) { best.offer(v, finite, first); });
      best.finish();
      int64_t kept = best.size();
      if (by_p) kept = reach_mass(best.keys(), kept, most, top_p * mass(best.keys(), kept, most, KeyLogit{}), 0, KeyLogit{});
      keep(values, best.keys(), kept);
    } else if (by_p) {
      const uint64_t least = last_of_mass(values, most, most, top_p, memory, LogitScore{}, KeyLogit{});
      const float cut = key_value(least);
      const int32_t last = key_id(least);
      change(values, [&](f32x16 v, i32x16 ids) {
        return select(is_finite(v) & ((v > cut) | ((v == cut) & (ids <= last))), v, splat(kRemoved));
      });
    }
    if (min_p > 0) drop_below(values, most, min_p);
  }

  // Keeps the tokens nearest to the entropy: -log p - entropy is a logit's distance from the mean logit.
  void keep_typical(float* values, float typical_p, uint64_t* memory) const {
    const float most = greatest(values);
    if (most == kRemoved) return;
    double all = 0, weighted = 0;
    each_vector(values, [&](f32x16 v, i32x16 finite, int64_t) {
      const f32x16 share = exp(v - most);
      all += reduce_add(select(finite, share, f32x16{}));
      weighted += reduce_add(select(finite, share * (v - most), f32x16{}));
    });
    const float mean = static_cast<float>(weighted / all);
    const auto nearness = [&](f32x16 v) { return -abs(v - most - mean); };
    const float least = key_value(last_of_mass(values, most, 0, typical_p, memory, nearness,
                                               [&](uint64_t key) { return values[key_id(key)]; }));
    change(values, [&](f32x16 v, i32x16) { return select(nearness(v) < least, splat(kRemoved), v); });
  }

  // Tokens in the order of score(logit), which is at most `best`, lowest id first on ties: the key of the one with which
  // the mass, that of the logits less `most`, reaches this share of all. Found by thresholds: three passes shrink the range
  // of scores in which it lies, and only what is left there becomes keys; the first pass has all mass above its last
  // threshold. logit(key) gives a key's logit.
  template <class Score, class Logit>
  ENGINE_INLINE uint64_t last_of_mass(const float* values, float most, float best, float share, uint64_t* memory,
                                      Score score, Logit logit) const {
    double wanted = 0;
    float high = best, low = kRemoved;  // it lies in (low, high]
    double above = 0;                   // the mass of the scores above high
    for (int round = 0; round < kRounds; ++round) {
      float cuts[kCuts];
      double masses[kCuts];
      for (int i = 0; i < kCuts; ++i)
        cuts[i] = round == 0 ? best - std::ldexp(0.5f, i) : high - (high - low) * static_cast<float>(i + 1) / (kCuts + 1);
      if (round == 0) cuts[kCuts - 1] = kRemoved;
      masses_above(values, most, cuts, masses, score);
      if (round == 0) wanted = share * masses[kCuts - 1];
      int reached = 0;
      while (reached < kCuts && masses[reached] < wanted) ++reached;
      if (reached > 0) {
        high = cuts[reached - 1];
        above = masses[reached - 1];
      }
      if (reached < kCuts) low = cuts[reached];
      if (low == kRemoved) break;
    }
    BestKeys keys(memory, width_ + 16, width_);
    each_vector(values, [&](f32x16 v, i32x16 finite, int64_t first) {
      const f32x16 s = score(v);
      keys.offer(s, finite & (s > low) & (s <= high), first);
    });
    if (keys.size() == 0) return make_key(low, static_cast<int32_t>(width_));  // rounding: all of the mass is needed
    return memory[reach_mass(memory, keys.size(), most, wanted, above, logit) - 1];
  }

  // The mass of the finite logits whose score is above each cut, summed in pieces so that few roundings add up.
  template <class Score>
  ENGINE_INLINE void masses_above(const float* values, float most, const float* cuts, double* masses, Score score) const {
    std::fill(masses, masses + kCuts, 0.0);
    for (int64_t begin = 0; begin < width_; begin += kPiece) {
      const int64_t end = begin + kPiece < width_ ? begin + kPiece : width_;
      f32x16 sums[kCuts] = {};
      for (int64_t i = begin; i < end; i += 16) {
        const int64_t count = end - i < 16 ? end - i : 16;
        const f32x16 v = load_first(values + i, count);
        const i32x16 counted = is_finite(v) & (lane_index() < static_cast<int32_t>(count));
        const f32x16 s = score(v), share = select(counted, exp(v - most), f32x16{});
        for (int c = 0; c < kCuts; ++c) sums[c] += select(s > cuts[c], share, f32x16{});
      }
      for (int c = 0; c < kCuts; ++c) masses[c] += reduce_add(sums[c]);
    }
  }

  // Each value v of the row, with the ids of its vector, becomes f(v, ids).
  template <class F>
  ENGINE_INLINE void change(float* values, F f) const {
    for (int64_t i = 0; i < width_; i += 16) {
      const int64_t count = width_ - i < 16 ? width_ - i : 16;
      store_first(values + i, f(load_first(values + i, count), lane_index() + static_cast<int32_t>(i)), count);
    }
  }

  double total_mass(const float* values, float most) const {
    double sum = 0;
    each_vector(values,
                [&](f32x16 v, i32x16 finite, int64_t) { sum += reduce_add(select(finite, exp(v - most), f32x16{})); });
    return sum;
  }

  void keep(float* values, const uint64_t* keys, int64_t count) const {
    std::fill(values, values + width_, kRemoved);
    for (int64_t i = 0; i < count; ++i) values[key_id(keys[i])] = key_value(keys[i]);
  }

  void drop_below(float* values, float most, float share) const {
    for (int64_t i = 0; i < width_; i += 16) {
      const int64_t count = width_ - i < 16 ? width_ - i : 16;
      const f32x16 v = load_first(values + i, count);
      store_first(values + i, select(exp(v - most) < share, splat(kRemoved), v), count);
    }
  }

  int32_t inputs_[kInputs];
  const int32_t* history_;
  int64_t width_, max_len_;
  Buffer key_memory_, count_memory_;
};

}  // namespace ENGINE_ISA
}  // namespace engine_cpu
