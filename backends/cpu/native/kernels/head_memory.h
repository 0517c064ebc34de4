// A memory [key_dim, value_dim] a head, which each token of a sequence fades, writes to and reads.
#pragma once

#include <cstring>

#include "../isa.h"
#include "../simd_math.h"
#include "../work_split.h"
#include "norm_row.h"
#include "sequences.h"

namespace engine_cpu {
namespace ENGINE_ISA {

// What a token writes with its key: its values, or what they differ by from what the key finds.
enum class Rule { kAdd, kDelta };

// S = kept S; S = S + k (written v), or S + k (written (v - k S)); y = q S + skip v. State f32 [blocks, heads, key_dim,
// value_dim].
template <Rule kRule>
class HeadMemory : public Kernel {
 public:
  // `place`: which input is the first of the sequences'.
  HeadMemory(const KernelArgs& args, size_t place, int64_t heads, int64_t key_dim, int64_t value_dim)
      : sequences_(args, place),
        heads_(heads),
        key_dim_(key_dim),
        value_dim_(value_dim),
        memory_(reinterpret_cast<float*>(args.states.at(0))) {}

  // Two rows of each of some tokens, and some columns of the memory.
  size_t scratch_bytes() const override {
    return static_cast<size_t>((2 * kTokens + 16 * kWide) * key_dim_) * sizeof(float);
  }

  void run(const Frame& frame, const Team& team, int) override {
    share_tasks(frame.dims.S * heads_, team, [&](int64_t task) {
      head(frame, sequences_.of(frame, task / heads_), task % heads_, reinterpret_cast<float*>(team.scratch));
    });
  }

 protected:
  struct Token {
    const float *q, *k, *v;
    float* y;
    float kept, written, skip;
    float* left;  // where the memory is kept after this token; null if nowhere
  };

  // A row of the step for one head, whose query and key may be put in two rows of the scratch.
  virtual Token token(const Frame& frame, int64_t row, int64_t h, float* rows) const = 0;

  // log(1 + exp(x)), to all digits where that is close to 0. NaN stays. By vectors, since a library's exp differs from
  // another's.
  static f32x16 softplus(f32x16 x) {
    const f32x16 small = exp(-abs(x)), more = 1.0f + small;
    const f32x16 tail = select(more == 1.0f, small, log(more) * (small / (more - 1.0f)));
    return select(x == x, select(x > 0.0f, x, f32x16{}) + tail, x);
  }

  static float first(f32x16 x) {
    float lane;
    store_first(&lane, x, 1);
    return lane;
  }

  Sequences sequences_;
  int64_t heads_, key_dim_, value_dim_;
  float* memory_;

 private:
  // Tokens that columns of a memory stay in the first cache for, and vectors of columns at a time: 32 KiB of 128 keys.
  static constexpr int64_t kTokens = 32, kWide = kPartLanes == 16 ? 4 : 2;

  // All tokens of a sequence for one head.
  void head(const Frame& frame, const Sequences::Span& span, int64_t h, float* scratch) const {
    const float* from = span.start > 0 ? memory(span, span.start - 1, h) : nullptr;
    Token tokens[kTokens];
    for (int64_t done = 0; done < span.count; done += kTokens) {
      const int64_t count = span.count - done < kTokens ? span.count - done : kTokens;
      for (int64_t t = 0; t < count; ++t) {
        tokens[t] = token(frame, span.first + done + t, h, scratch + 2 * t * key_dim_);
        if (t + 1 == count || sequences_.ends(span.start + done + t)) tokens[t].left = memory(span, span.start + done + t, h);
      }
      float* const left = tokens[count - 1].left;
      if (from == nullptr) from = static_cast<float*>(std::memset(left, 0, static_cast<size_t>(key_dim_ * value_dim_) * sizeof(float)));
      all_columns(from, tokens, count, scratch + 2 * kTokens * key_dim_);
      from = left;
    }
  }

  float* memory(const Sequences::Span& span, int64_t position, int64_t h) const {
    return memory_ + (sequences_.block(span, position) * heads_ + h) * key_dim_ * value_dim_;
  }

  // Columns of a memory, a row each `stride`.
  struct Columns {
    const float* rows;
    int64_t stride;
  };

  void all_columns(const float* from, const Token* tokens, int64_t count, float* scratch) const {
    int64_t column = 0;
    for (const int64_t wide = value_dim_ / 64 * 64; column < wide; column += 16 * kWide)
      columns<kWide, 1>(from, tokens, count, scratch, column, 16);
    for (; column + 32 <= value_dim_; column += 32) columns<2, 2>(from, tokens, count, scratch, column, 16);
    for (; column < value_dim_; column += 16)
      columns<1, 4>(from, tokens, count, scratch, column, value_dim_ - column < 16 ? value_dim_ - column : 16);
  }

  // Columns of the memory by themselves, in the scratch between tokens. `lanes`: of the last vector. `kChains`: in how many sums
  // what is read there comes about, since those of few vectors would wait for each other; the same on all processors.
  template <int64_t kVectors, int64_t kChains>
  ENGINE_INLINE void columns(const float* from, const Token* tokens, int64_t count, float* scratch, int64_t column,
                             int64_t lanes) const {
    Columns memory{from + column, value_dim_};
    f32x16 found[kVectors] = {};  // what the token's key finds
    if constexpr (kRule == Rule::kDelta) {
      f32x16 sums[kChains][kVectors] = {};
      for (int64_t i = 0; i < key_dim_; ++i)
        for (int64_t n = 0; n < kVectors; ++n) {
          f32x16& sum = sums[i % kChains][n];
          sum = fma(splat(tokens->k[i]), load_lanes(memory.rows + i * memory.stride + 16 * n, lanes), sum);
        }
      for (int64_t n = 0; n < kVectors; ++n) found[n] = all_of<kChains>(sums, n);
    }
    for (const Token* token = tokens; token < tokens + count; ++token) {
      float* const to = token->left ? token->left + column : scratch;
      const int64_t stride = token->left ? value_dim_ : 16 * kVectors;
      if (kRule == Rule::kDelta && token + 1 < tokens + count)
        step<kVectors, kChains, true>(*token, token[1].k, memory, to, stride, column, lanes, found);
      else
        step<kVectors, kChains, false>(*token, nullptr, memory, to, stride, column, lanes, found);
      memory = {to, stride};
    }
  }

  // What is left of the memory with what a token writes, what its query finds there, and what the key of the next one does.
  template <int64_t kVectors, int64_t kChains, bool kNext>
  ENGINE_INLINE void step(const Token& token, const float* next, Columns memory, float* to, int64_t stride, int64_t column,
                          int64_t lanes, f32x16* found) const {
    f32x16 changes[kVectors], sums[kChains][kVectors] = {}, next_sums[kChains][kVectors] = {};
    for (int64_t n = 0; n < kVectors; ++n) {
      const f32x16 v = load_lanes(token.v + column + 16 * n, lanes);
      changes[n] = (kRule == Rule::kDelta ? v - found[n] * token.kept : v) * token.written;
      if constexpr (kRule == Rule::kAdd) sums[0][n] = v * token.skip;
    }
    const auto row = [&](int64_t i, int64_t chain) __attribute__((always_inline)) {
      const f32x16 k = splat(token.k[i]), q = splat(token.q[i]);
      for (int64_t n = 0; n < kVectors; ++n) {
        const f32x16 value = fma(k, changes[n], load_lanes(memory.rows + i * memory.stride + 16 * n, lanes) * token.kept);
        store_lanes(to + i * stride + 16 * n, value, lanes);
        sums[chain][n] = fma(q, value, sums[chain][n]);
        if constexpr (kNext) next_sums[chain][n] = fma(splat(next[i]), value, next_sums[chain][n]);
      }
    };
    int64_t i = 0;
    for (; i + kChains <= key_dim_; i += kChains)
      for (int64_t chain = 0; chain < kChains; ++chain) row(i + chain, chain);
    for (int64_t chain = 0; i + chain < key_dim_; ++chain) row(i + chain, chain);
    for (int64_t n = 0; n < kVectors; ++n) {
      store_lanes(token.y + column + 16 * n, all_of<kChains>(sums, n), lanes);
      found[n] = all_of<kChains>(next_sums, n);
    }
  }

  template <int64_t kChains, class Sums>
  static ENGINE_INLINE f32x16 all_of(const Sums& sums, int64_t n) {
    f32x16 found = sums[0][n];
    for (int64_t chain = 1; chain < kChains; ++chain) found = found + sums[chain][n];
    return found;
  }
};

}  // namespace ENGINE_ISA
}  // namespace engine_cpu
