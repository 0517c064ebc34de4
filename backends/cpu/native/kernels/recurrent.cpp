// causal_conv, gated_delta: layers whose memory does not grow with the tokens. It lies in blocks by the page table; a sequence
// goes on from the block of the token before its first, and each token leaves it in its own block.
#include <cstring>
#include <stdexcept>
#include <vector>

#include "../isa.h"
#include "../simd_math.h"
#include "../work_split.h"
#include "gating.h"
#include "norm_row.h"

namespace engine_cpu {
namespace ENGINE_ISA {
namespace {

// The sequences of a step and the blocks of their memory, whose first inputs are `first`, ...: seq_starts i32 [S],
// query_offsets i32 [S + 1], page_table i32 [S, P]. Numbers: block_size.
class Sequences {
 public:
  Sequences(const KernelArgs& args, size_t first)
      : starts_(args.inputs.at(first)),
        offsets_(args.inputs.at(first + 1)),
        table_(args.inputs.at(first + 2)),
        block_size_(args.integer("block_size")) {
    if (block_size_ < 1) throw std::invalid_argument("block_size must be at least 1.");
  }

  struct Span {
    int64_t first, count;  // tokens of the step
    int64_t start;         // those before them
    const int32_t* table;
  };

  Span of(const Frame& frame, int64_t sequence) const {
    const int32_t* const offsets = input<int32_t>(frame, offsets_) + sequence;
    return {offsets[0], offsets[1] - offsets[0], input<int32_t>(frame, starts_)[sequence],
            input<int32_t>(frame, table_) + sequence * frame.dims.P};
  }

  int64_t block(const Span& span, int64_t position) const { return span.table[position / block_size_]; }
  bool ends(int64_t position) const { return (position + 1) % block_size_ == 0; }

 private:
  int starts_, offsets_, table_;
  int64_t block_size_;
};

// x [T, columns] -> a causal filter a column, along each sequence, and its silu where the number silu says so. Weight [columns,
// width]. State f32 [blocks, width - 1, columns]: the last rows of x. Numbers: columns, width, block_size, silu (0, 1).
class CausalConv final : public Kernel {
 public:
  explicit CausalConv(const KernelArgs& args)
      : x_(args.inputs.at(0)),
        y_(args.outputs.at(0)),
        sequences_(args, 1),
        columns_(args.integer("columns")),
        width_(args.integer("width")),
        silu_(args.integer("silu") == 1),
        tail_(reinterpret_cast<float*>(args.states.at(0))),
        taps_(static_cast<size_t>(columns_ * width_)) {
    if (width_ < 2) throw std::invalid_argument("a filter is at least 2 wide.");
    const float* const weight = args.weights.at(0)->f32();
    for (int64_t column = 0; column < columns_; ++column)
      for (int64_t n = 0; n < width_; ++n) taps_[n * columns_ + column] = weight[column * width_ + n];
  }

  bool serial(const Dims& dims) const override { return little(static_cast<int64_t>(dims.T) * columns_); }
  size_t scratch_bytes() const override { return static_cast<size_t>((width_ - 1) * columns_) * sizeof(float); }

  // Each thread has its columns of all sequences: rows of the memory that it reads are those that it writes.
  void run(const Frame& frame, const Team& team, int) override {
    const Range columns = share(columns_, team, 16);
    if (columns.begin == columns.end) return;
    for (int64_t s = 0; s < frame.dims.S; ++s) run(frame, sequences_.of(frame, s), columns, reinterpret_cast<float*>(team.scratch));
  }

 private:
  void run(const Frame& frame, const Sequences::Span& span, Range columns, float* before) const {
    const float* const x = input<float>(frame, x_) + span.first * columns_;
    float* const y = output<float>(frame, y_) + span.first * columns_;
    const int64_t kept = width_ - 1, bytes = (columns.end - columns.begin) * static_cast<int64_t>(sizeof(float));
    const float* const tail =
        span.start > 0 ? tail_ + sequences_.block(span, span.start - 1) * kept * columns_ : nullptr;
    for (int64_t n = 0; n < kept; ++n) {
      float* const row = before + n * columns_ + columns.begin;
      tail ? std::memcpy(row, tail + n * columns_ + columns.begin, bytes) : std::memset(row, 0, bytes);
    }
    // Row n of the step, or of what was before it.
    const auto row = [=](int64_t n) { return n >= 0 ? x + n * columns_ : before + (kept + n) * columns_; };
    for (int64_t t = 0; t < span.count; ++t) {
      filter(row, t, y + t * columns_, columns);
      if (t + 1 < span.count && !sequences_.ends(span.start + t)) continue;
      float* const left = tail_ + sequences_.block(span, span.start + t) * kept * columns_;
      for (int64_t n = 0; n < kept; ++n)
        std::memcpy(left + n * columns_ + columns.begin, row(t + 1 - kept + n) + columns.begin, bytes);
    }
  }

  // The usual width is known to the compiler, so that a loop over columns has its rows at hand.
  template <class Row>
  ENGINE_INLINE void filter(Row row, int64_t t, float* y, Range columns) const {
    width_ == 4 ? filter<4>(row, t, y, columns) : filter<0>(row, t, y, columns);
  }

  template <int64_t kWidth, class Row>
  ENGINE_INLINE void filter(Row row, int64_t t, float* y, Range columns) const {
    const int64_t whole = columns.begin + (columns.end - columns.begin) / 16 * 16;
    for (int64_t c = columns.begin; c < whole; c += 16) store(y + c, filtered<kWidth>(row, t, c, 16));
    if (whole < columns.end) store_first(y + whole, filtered<kWidth>(row, t, whole, columns.end - whole), columns.end - whole);
  }

  template <int64_t kWidth, class Row>
  ENGINE_INLINE f32x16 filtered(Row row, int64_t t, int64_t column, int64_t count) const {
    const int64_t width = kWidth ? kWidth : width_;
    f32x16 sum{};
    for (int64_t n = 0; n < width; ++n)
      sum = fma(load_lanes(taps_.data() + n * columns_ + column, count), load_lanes(row(t + 1 - width + n) + column, count), sum);
    return silu_ ? silu(sum) : sum;
  }

  int x_, y_;
  Sequences sequences_;
  int64_t columns_, width_;
  bool silu_;
  float* tail_;
  std::vector<float> taps_;  // [width, columns]
};

// qkv [T, 2 * key_heads * key_dim + value_heads * value_dim], decay and beta [T, value_heads] -> y [T, value_heads * value_dim].
// Weights rate and bias [value_heads]. State f32 [blocks, value_heads, key_dim, value_dim]. Numbers: key_heads, value_heads,
// key_dim, value_dim, block_size.
class GatedDelta final : public Kernel {
 public:
  explicit GatedDelta(const KernelArgs& args)
      : qkv_(args.inputs.at(0)),
        decay_(args.inputs.at(1)),
        beta_(args.inputs.at(2)),
        y_(args.outputs.at(0)),
        sequences_(args, 3),
        rate_(args.weights.at(0)->f32()),
        bias_(args.weights.at(1)->f32()),
        key_heads_(args.integer("key_heads")),
        value_heads_(args.integer("value_heads")),
        key_dim_(args.integer("key_dim")),
        value_dim_(args.integer("value_dim")),
        memory_(reinterpret_cast<float*>(args.states.at(0))) {
    if (key_heads_ < 1 || value_heads_ % key_heads_ != 0)
      throw std::invalid_argument("value_heads must be a multiple of key_heads.");
  }

  // Queries and keys of some tokens, and some columns of the memory.
  size_t scratch_bytes() const override {
    return static_cast<size_t>((2 * kTokens + 16 * kWide) * key_dim_) * sizeof(float);
  }

  void run(const Frame& frame, const Team& team, int) override {
    share_tasks(frame.dims.S * value_heads_, team, [&](int64_t task) {
      head(frame, sequences_.of(frame, task / value_heads_), task % value_heads_, reinterpret_cast<float*>(team.scratch));
    });
  }

 private:
  // Tokens that columns of a memory stay in the first cache for, and vectors of columns at a time: 32 KiB of 128 keys.
  static constexpr int64_t kTokens = 32, kWide = kPartLanes == 16 ? 4 : 2;

  struct Token {
    const float *q, *k, *v;
    float* y;
    float kept, written;
    float* left;  // where the memory is kept after this token; null if nowhere
  };

  // All tokens of a sequence for one head.
  void head(const Frame& frame, const Sequences::Span& span, int64_t h, float* scratch) const {
    const float* from = span.start > 0 ? memory(span, span.start - 1, h) : nullptr;
    Token tokens[kTokens];
    for (int64_t done = 0; done < span.count; done += kTokens) {
      const int64_t count = span.count - done < kTokens ? span.count - done : kTokens;
      for (int64_t t = 0; t < count; ++t) {
        tokens[t] = token(frame, span, done + t, h, scratch + 2 * t * key_dim_);
        if (t + 1 == count || sequences_.ends(span.start + done + t)) tokens[t].left = memory(span, span.start + done + t, h);
      }
      float* const left = tokens[count - 1].left;
      if (from == nullptr) from = static_cast<float*>(std::memset(left, 0, static_cast<size_t>(key_dim_ * value_dim_) * sizeof(float)));
      all_columns(from, tokens, count, scratch + 2 * kTokens * key_dim_);
      from = left;
    }
  }

  // Token t of the step's for one head, its query and its key of length 1 in `unit_rows`.
  Token token(const Frame& frame, const Sequences::Span& span, int64_t t, int64_t h, float* unit_rows) const {
    const int64_t keys = key_heads_ * key_dim_, key = h / (value_heads_ / key_heads_) * key_dim_;
    const int64_t row = span.first + t, gate = row * value_heads_ + h;
    const float* const qkv = input<float>(frame, qkv_) + row * (2 * keys + value_heads_ * value_dim_);
    unit(qkv + key, 1.0f / __builtin_sqrtf(static_cast<float>(key_dim_)), unit_rows);
    unit(qkv + keys + key, 1.0f, unit_rows + key_dim_);
    const float decay = input<float>(frame, decay_)[gate] + bias_[h];
    return {unit_rows,
            unit_rows + key_dim_,
            qkv + 2 * keys + h * value_dim_,
            output<float>(frame, y_) + gate * value_dim_,
            first(exp(rate_[h] * softplus(splat(decay)))),
            first(sigmoid(splat(input<float>(frame, beta_)[gate]))),
            nullptr};
  }

  float* memory(const Sequences::Span& span, int64_t position, int64_t h) const {
    return memory_ + (sequences_.block(span, position) * value_heads_ + h) * key_dim_ * value_dim_;
  }

  void unit(const float* x, float scale, float* y) const {
    const float squares =
        sum_lanes(key_dim_, [x](int64_t i, int64_t count) { return load_lanes(x + i, count); }, add_square);
    const float factor = scale / __builtin_sqrtf(squares + 1e-6f);
    for (int64_t i = 0; i < key_dim_; i += 16) {
      const int64_t count = key_dim_ - i < 16 ? key_dim_ - i : 16;
      store_lanes(y + i, load_lanes(x + i, count) * factor, count);
    }
  }

  // log(1 + exp(x)), to an ulp of 1 where it is small. NaN stays. By vectors, since a library's exp differs from another's.
  static f32x16 softplus(f32x16 x) {
    return select(x == x, select(x > 0.0f, x, f32x16{}) + log(1.0f + exp(-abs(x))), x);
  }

  static float first(f32x16 x) {
    float lane;
    store_first(&lane, x, 1);
    return lane;
  }

  // Columns of a memory, a row each `stride`.
  struct Columns {
    const float* rows;
    int64_t stride;
  };

  void all_columns(const float* from, const Token* tokens, int64_t count, float* scratch) const {
    int64_t column = 0;
    for (; column + 16 * kWide <= value_dim_; column += 16 * kWide) columns<kWide>(from, tokens, count, scratch, column, 16);
    for (; column < value_dim_; column += 16)
      columns<1>(from, tokens, count, scratch, column, value_dim_ - column < 16 ? value_dim_ - column : 16);
  }

  // Columns of the memory by themselves, in the scratch between tokens. `lanes`: of the last vector.
  template <int64_t kVectors>
  ENGINE_INLINE void columns(const float* from, const Token* tokens, int64_t count, float* scratch, int64_t column,
                             int64_t lanes) const {
    Columns memory{from + column, value_dim_};
    f32x16 found[kVectors] = {};  // what the token's key finds
    for (int64_t i = 0; i < key_dim_; ++i)
      for (int64_t n = 0; n < kVectors; ++n)
        found[n] = fma(splat(tokens->k[i]), load_lanes(memory.rows + i * memory.stride + 16 * n, lanes), found[n]);
    for (const Token* token = tokens; token < tokens + count; ++token) {
      float* const to = token->left ? token->left + column : scratch;
      const int64_t stride = token->left ? value_dim_ : 16 * kVectors;
      if (token + 1 < tokens + count)
        step<kVectors, true>(*token, token[1].k, memory, to, stride, column, lanes, found);
      else
        step<kVectors, false>(*token, nullptr, memory, to, stride, column, lanes, found);
      memory = {to, stride};
    }
  }

  // What is left of the memory with a token's change, what its query finds there, and what the key of the next one does.
  template <int64_t kVectors, bool kNext>
  ENGINE_INLINE void step(const Token& token, const float* next, Columns memory, float* to, int64_t stride, int64_t column,
                          int64_t lanes, f32x16* found) const {
    f32x16 changes[kVectors], sums[kVectors] = {};
    for (int64_t n = 0; n < kVectors; ++n) {
      changes[n] = (load_lanes(token.v + column + 16 * n, lanes) - found[n] * token.kept) * token.written;
      found[n] = f32x16{};
    }
    for (int64_t i = 0; i < key_dim_; ++i) {
      const f32x16 k = splat(token.k[i]), q = splat(token.q[i]);
      for (int64_t n = 0; n < kVectors; ++n) {
        const f32x16 value = fma(k, changes[n], load_lanes(memory.rows + i * memory.stride + 16 * n, lanes) * token.kept);
        store_lanes(to + i * stride + 16 * n, value, lanes);
        sums[n] = fma(q, value, sums[n]);
        if constexpr (kNext) found[n] = fma(splat(next[i]), value, found[n]);
      }
    }
    for (int64_t n = 0; n < kVectors; ++n) store_lanes(token.y + column + 16 * n, sums[n], lanes);
  }

  int qkv_, decay_, beta_, y_;
  Sequences sequences_;
  const float *rate_, *bias_;
  int64_t key_heads_, value_heads_, key_dim_, value_dim_;
  float* memory_;
};

}  // namespace

void register_recurrent(Table& table) {
  table.kernels["causal_conv"] = make_kernel<CausalConv>;
  table.kernels["gated_delta"] = make_kernel<GatedDelta>;
}

}  // namespace ENGINE_ISA
}  // namespace engine_cpu
