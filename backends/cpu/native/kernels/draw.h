// The next token of a row, drawn from its processed logits, and logprobs.
#pragma once

#include <algorithm>
#include <cmath>

#include "../buffer.h"
#include "../simd.h"
#include "../simd_math.h"
#include "../work_split.h"
#include "best_keys.h"
#include "greedy.h"
#include "philox.h"

namespace engine_cpu {
namespace ENGINE_ISA {

// Inputs: logits f32 [R, width]; rows i32 [R], positions, token_seq i32 [T], seq_slots i32 [S];
// temperature f32 [R], seeds u32 [R, 2], branches u32 [R], want_logprobs i32 [R] (-1: none, n: the token's and the n
// best); each of these may be absent: candidates i32 [R] (0: none, k: the k best processed ones in place of logprobs),
// targets i32 [R] (-1: none, else the token, and none is chosen). State: history i32 [slots, max_len], into which the
// token goes at position + 1 if that is below max_len and the row is the last of its sequence.
// Outputs: tokens i32 [R], status i32 [R] (0 good, 1 a NaN or +inf in the raw logits, 2 no finite processed logit),
// logprob f32 [R], top_ids i32 [R, K], top_logprobs f32 [R, K]: of the raw logits' softmax; what is not wanted is id
// -1, logprob 0. Temperature 0: the greatest processed logit, else the greatest of processed + gumbel noise (philox.h;
// key seeds[row], counter (token / 4, position + 1, branch, 0), word token % 4). Lowest id on ties. Numbers: width,
// max_len.
class Draw {
 public:
  enum Input {
    kLogits,
    kRows,
    kPositions,
    kTokenSeq,
    kSeqSlots,
    kTemperature,
    kSeeds,
    kBranches,
    kWantLogprobs,
    kCandidates,
    kTargets,
    kInputs
  };
  enum Output { kTokens, kStatus, kLogprob, kTopIds, kTopLogprobs, kOutputs };
  enum Status : int32_t { kGood = 0, kNonFinite = 1, kFullyMasked = 2 };

  // The kernel's inputs from `first` on are in the order of Input.
  explicit Draw(const KernelArgs& args, size_t first)
      : history_(reinterpret_cast<int32_t*>(args.states.at(0))),
        width_(args.integer("width")),
        max_len_(args.integer("max_len")),
        pieces_((width_ + kPiece - 1) / kPiece),
        found_(args.integer("max_rows") * pieces_ * sizeof(Found)),
        key_memory_(args.integer("threads") * (width_ + 16) * sizeof(uint64_t)) {
    for (int i = 0; i < kInputs; ++i) inputs_[i] = args.inputs.at(first + i);
    for (int i = 0; i < kOutputs; ++i) outputs_[i] = args.outputs.at(i);
  }

  int64_t pieces() const { return pieces_; }

  // Looks at a piece of a row. processed [width].
  void search(const Frame& frame, int64_t row, int64_t piece, const float* processed) const {
    const int64_t begin = piece * kPiece, end = begin + kPiece < width_ ? begin + kPiece : width_;
    Found found{};
    search_raw(in<float>(frame, kLogits) + row * width_, begin, end, in<int32_t>(frame, kWantLogprobs)[row] >= 0,
               found);
    Best best;
    if (in<float>(frame, kTemperature)[row] == 0) {
      each_vector(processed, begin, end,
                  [&](f32x16 v, i32x16 inside, int64_t i) { best.offer(v, is_finite(v) & inside, i); });
    } else {
      search_random(frame, row, processed, begin, end, best);
    }
    reduce(best, found);
    found_.as<Found>()[row * pieces_ + piece] = found;
  }

  // The row's outputs, once all of its pieces are looked at. `thread`: of the team, whose memory it uses.
  void decide(const Frame& frame, int64_t row, int thread, const float* processed) const {
    const Found all = best_of_pieces(row);
    if (!give_token(frame, row, all)) return;
    uint64_t* const memory = key_memory_.as<uint64_t>() + thread * (width_ + 16);
    const int32_t candidates = optional(frame, kCandidates, row, 0);
    if (candidates > 0)
      give_candidates(frame, row, candidates, processed, memory);
    else if (in<int32_t>(frame, kWantLogprobs)[row] >= 0)
      give_logprobs(frame, row, out<int32_t>(frame, kTokens)[row], all.most, memory);
  }

  // The row's outputs where it wants nothing but its greatest logit, which is known.
  void take(const Frame& frame, int64_t row, BestLogit best) const {
    give_token(frame, row, Found{best.score, best.id, best.id == BestLogit::kBroken, best.score, 0});
  }

 private:
  static constexpr int64_t kPiece = 4096;  // tokens of the vocabulary that are looked at in one go; a multiple of 64

  // What a task found in its piece of a row.
  struct Found {
    float score;  // the best of the finite processed logits, noise included
    int32_t id;   // -1: none is finite
    bool broken;  // a NaN or +inf among the raw logits
    float most;   // of the raw logits
    float sum;    // of exp(raw - most)
  };

  // The best score so far in each lane, the first to reach it kept.
  struct Best {
    f32x16 score = splat(-__builtin_inff());
    i32x16 id = splat_i32(-1);

    ENGINE_INLINE void offer(f32x16 scores, i32x16 finite, int64_t first_id) {
      const i32x16 better = finite & (scores > score);
      score = select(better, scores, score);
      id = select(better, lane_index() + static_cast<int32_t>(first_id), id);
    }
  };

  template <class T>
  const T* in(const Frame& frame, Input which) const {
    return input<T>(frame, inputs_[which]);
  }
  template <class T>
  T* out(const Frame& frame, Output which) const {
    return output<T>(frame, outputs_[which]);
  }
  // A row's parameter, `off` where the input is absent.
  int32_t optional(const Frame& frame, Input which, int64_t row, int32_t off) const {
    return inputs_[which] < 0 ? off : in<int32_t>(frame, which)[row];
  }
  // The position that the row's new token will have.
  int32_t position(const Frame& frame, int64_t row) const {
    return in<int32_t>(frame, kPositions)[in<int32_t>(frame, kRows)[row]] + 1;
  }

  // f(values, lanes inside, first id) over [begin, end).
  template <class F>
  static ENGINE_INLINE void each_vector(const float* values, int64_t begin, int64_t end, F f) {
    for (int64_t i = begin; i < end; i += 16) {
      const int64_t count = end - i < 16 ? end - i : 16;
      f(load_first(values + i, count), lane_index() < static_cast<int32_t>(count), i);
    }
  }

  static void search_raw(const float* raw, int64_t begin, int64_t end, bool summed, Found& found) {
    i32x16 broken{};
    f32x16 most = splat(-__builtin_inff());
    each_vector(raw, begin, end, [&](f32x16 v, i32x16 inside, int64_t) {
      broken |= (v != v) | (v == __builtin_inff());
      most = max(select(inside, v, splat(-__builtin_inff())), most);
    });
    found.broken = any(broken);
    found.most = reduce_max(most);
    if (!summed || found.broken || found.most == -__builtin_inff()) return;
    f32x16 sum{};
    each_vector(raw, begin, end,
                [&](f32x16 v, i32x16 inside, int64_t) { sum += select(inside, exp(v - found.most), f32x16{}); });
    found.sum = reduce_add(sum);
  }

  // Where the greatest of 64 tokens cannot win with the noise of any of them, the logarithms of that are spared.
  void search_random(const Frame& frame, int64_t row, const float* processed, int64_t begin, int64_t end,
                     Best& best) const {
    const uint32_t* key = in<uint32_t>(frame, kSeeds) + 2 * row;
    const auto place = static_cast<uint32_t>(position(frame, row));
    const uint32_t branch = in<uint32_t>(frame, kBranches)[row];
    float level = -__builtin_inff();
    for (int64_t i = begin; i < end; i += 64) {
      f32x16 greatest = splat(-__builtin_inff());
      const int64_t stop = i + 64 < end ? i + 64 : end;
      each_vector(processed, i, stop, [&](f32x16 v, i32x16 inside, int64_t) {
        greatest = max(select(is_finite(v) & inside, v, splat(-__builtin_inff())), greatest);
      });
      const float most = reduce_max(greatest);
      if (most == -__builtin_inff()) continue;
      u32x16 words[4];
      token_words(static_cast<uint32_t>(i / 4), place, branch, key, words);
      const float rounding = 1e-3f + 1e-6f * std::fabs(level);
      if (!may_reach(words, level - most - rounding)) continue;
      f32x16 noise[4];
      gumbel_tokens(words, noise);
      each_vector(processed, i, stop, [&](f32x16 v, i32x16 inside, int64_t j) {
        best.offer(v + noise[(j - i) / 16], is_finite(v) & inside, j);
      });
      level = reduce_max(best.score);
    }
  }

  static void reduce(const Best& best, Found& found) {
    float scores[16];
    int32_t ids[16];
    store(scores, best.score);
    store(ids, best.id);
    found.score = -__builtin_inff();
    found.id = -1;
    for (int i = 0; i < 16; ++i) {
      if (ids[i] < 0 || (found.id >= 0 && (scores[i] < found.score || (scores[i] == found.score && ids[i] > found.id))))
        continue;
      found.score = scores[i];
      found.id = ids[i];
    }
  }

  Found best_of_pieces(int64_t row) const {
    const Found* pieces = found_.as<Found>() + row * pieces_;
    Found all = pieces[0];
    for (int64_t i = 1; i < pieces_; ++i) {  // in the order of the ids, so that the first of equals stays
      all.broken |= pieces[i].broken;
      all.most = pieces[i].most > all.most ? pieces[i].most : all.most;
      if (pieces[i].id < 0 || (all.id >= 0 && pieces[i].score <= all.score)) continue;
      all.score = pieces[i].score;
      all.id = pieces[i].id;
    }
    return all;
  }

  // Whether the row's token is good; without logprobs.
  bool give_token(const Frame& frame, int64_t row, const Found& all) const {
    const int32_t target = optional(frame, kTargets, row, -1);
    const Status status = all.broken ? kNonFinite : target < 0 && all.id < 0 ? kFullyMasked : kGood;
    const int32_t token = status != kGood ? 0 : target < 0 ? all.id : target;
    out<int32_t>(frame, kTokens)[row] = token;
    out<int32_t>(frame, kStatus)[row] = status;
    const int32_t place = position(frame, row), at = in<int32_t>(frame, kRows)[row];
    const int32_t* token_seq = in<int32_t>(frame, kTokenSeq);
    const int32_t sequence = token_seq[at];
    const bool is_last = at + 1 == frame.dims.T || token_seq[at + 1] != sequence;
    if (is_last && place < max_len_) history_[in<int32_t>(frame, kSeqSlots)[sequence] * max_len_ + place] = token;
    clear_logprobs(frame, row);
    return status == kGood;
  }

  void clear_logprobs(const Frame& frame, int64_t row) const {
    out<float>(frame, kLogprob)[row] = 0;
    for (int64_t i = row * frame.dims.K; i < (row + 1) * frame.dims.K; ++i) {
      out<int32_t>(frame, kTopIds)[i] = -1;
      out<float>(frame, kTopLogprobs)[i] = 0;
    }
  }

  void give_logprobs(const Frame& frame, int64_t row, int32_t token, float most, uint64_t* memory) const {
    const Found* pieces = found_.as<Found>() + row * pieces_;
    double sum = 0;
    for (int64_t i = 0; i < pieces_; ++i) sum += pieces[i].sum * std::exp(static_cast<double>(pieces[i].most) - most);
    const double norm = most + std::log(sum);
    const float* raw = in<float>(frame, kLogits) + row * width_;
    out<float>(frame, kLogprob)[row] = static_cast<float>(raw[token] - norm);
    const int64_t wanted = in<int32_t>(frame, kWantLogprobs)[row];
    give_best(frame, row, raw, wanted, norm, memory, [](f32x16, i32x16 inside) { return inside; });
  }

  void give_candidates(const Frame& frame, int64_t row, int64_t wanted, const float* processed, uint64_t* memory) const {
    give_best(frame, row, processed, wanted, 0, memory,
              [](f32x16 v, i32x16 inside) { return is_finite(v) & inside; });
  }

  // The best values less `norm` with their ids, of those that `eligible` lets through.
  template <class Eligible>
  ENGINE_INLINE void give_best(const Frame& frame, int64_t row, const float* values, int64_t wanted, double norm,
                               uint64_t* memory, Eligible eligible) const {
    wanted = std::min({wanted, static_cast<int64_t>(frame.dims.K), width_});
    if (wanted <= 0) return;
    BestKeys best(memory, width_ + 16, wanted);
    each_vector(values, 0, width_, [&](f32x16 v, i32x16 inside, int64_t i) { best.offer(v, eligible(v, inside), i); });
    best.finish();
    best.sort();
    for (int64_t i = 0; i < best.size(); ++i) {
      out<int32_t>(frame, kTopIds)[row * frame.dims.K + i] = key_id(best.keys()[i]);
      out<float>(frame, kTopLogprobs)[row * frame.dims.K + i] = static_cast<float>(key_value(best.keys()[i]) - norm);
    }
  }

  int32_t inputs_[kInputs], outputs_[kOutputs];
  int32_t* history_;
  int64_t width_, max_len_, pieces_;
  Buffer found_, key_memory_;
};

}  // namespace ENGINE_ISA
}  // namespace engine_cpu
