// causal_conv, gated_delta, ssm_scan: layers whose memory does not grow with the tokens.
#include <cstring>
#include <stdexcept>
#include <vector>

#include "../isa.h"
#include "../simd_math.h"
#include "../work_split.h"
#include "gating.h"
#include "head_memory.h"
#include "norm_row.h"
#include "sequences.h"

namespace engine_cpu {
namespace ENGINE_ISA {
namespace {

// x [T, columns] -> a causal filter a column, along each sequence, and its silu where the number silu says so. Weights: the
// filters [columns, width], and, where there is one, a bias [columns]. State f32 [blocks, width - 1, columns]: the last rows of x. Numbers: columns, width, block_size, silu (0, 1).
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
        bias_(args.weights.size() > 1 ? args.weights.at(1)->f32() : nullptr),
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
    f32x16 sum = bias_ ? load_lanes(bias_ + column, count) : f32x16{};
    for (int64_t n = 0; n < width; ++n)
      sum = fma(load_lanes(taps_.data() + n * columns_ + column, count), load_lanes(row(t + 1 - width + n) + column, count), sum);
    return silu_ ? silu(sum) : sum;
  }

  int x_, y_;
  Sequences sequences_;
  int64_t columns_, width_;
  bool silu_;
  float* tail_;
  const float* bias_;
  std::vector<float> taps_;  // [width, columns]
};

// qkv [T, 2 * key_heads * key_dim + value_heads * value_dim], decay and beta [T, value_heads] -> y [T, value_heads * value_dim].
// Weights rate and bias [value_heads]. State f32 [blocks, value_heads, key_dim, value_dim]. Numbers: key_heads, value_heads,
// key_dim, value_dim, block_size.
class GatedDelta final : public HeadMemory<Rule::kDelta> {
 public:
  explicit GatedDelta(const KernelArgs& args)
      : HeadMemory(args, 3, args.integer("value_heads"), args.integer("key_dim"), args.integer("value_dim")),
        qkv_(args.inputs.at(0)),
        decay_(args.inputs.at(1)),
        beta_(args.inputs.at(2)),
        y_(args.outputs.at(0)),
        rate_(args.weights.at(0)->f32()),
        bias_(args.weights.at(1)->f32()),
        key_heads_(args.integer("key_heads")) {
    if (key_heads_ < 1 || heads_ % key_heads_ != 0)
      throw std::invalid_argument("value_heads must be a multiple of key_heads.");
  }

 private:
  // The query and the key have length 1.
  Token token(const Frame& frame, int64_t row, int64_t h, float* rows) const override {
    const int64_t keys = key_heads_ * key_dim_, key = h / (heads_ / key_heads_) * key_dim_, gate = row * heads_ + h;
    const float* const qkv = input<float>(frame, qkv_) + row * (2 * keys + heads_ * value_dim_);
    unit(qkv + key, 1.0f / __builtin_sqrtf(static_cast<float>(key_dim_)), rows);
    unit(qkv + keys + key, 1.0f, rows + key_dim_);
    const float decay = input<float>(frame, decay_)[gate] + bias_[h];
    Token token{};
    token.q = rows;
    token.k = rows + key_dim_;
    token.v = qkv + 2 * keys + h * value_dim_;
    token.y = output<float>(frame, y_) + gate * value_dim_;
    token.kept = first(exp(rate_[h] * softplus(splat(decay))));
    token.written = first(sigmoid(splat(input<float>(frame, beta_)[gate])));
    return token;
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

  int qkv_, decay_, beta_, y_;
  const float *rate_, *bias_;
  int64_t key_heads_;
};

// xbc [T, heads * head_dim + 2 * groups * state_dim], dt [T, heads] -> y [T, heads * head_dim]. Weights rate, bias and skip
// [heads]. State f32 [blocks, heads, state_dim, head_dim]. Numbers: heads, groups, state_dim, head_dim, block_size.
class SsmScan final : public HeadMemory<Rule::kAdd> {
 public:
  explicit SsmScan(const KernelArgs& args)
      : HeadMemory(args, 2, args.integer("heads"), args.integer("state_dim"), args.integer("head_dim")),
        xbc_(args.inputs.at(0)),
        dt_(args.inputs.at(1)),
        y_(args.outputs.at(0)),
        rate_(args.weights.at(0)->f32()),
        bias_(args.weights.at(1)->f32()),
        skip_(args.weights.at(2)->f32()),
        groups_(args.integer("groups")) {
    if (groups_ < 1 || heads_ % groups_ != 0) throw std::invalid_argument("heads must be a multiple of groups.");
  }

 private:
  Token token(const Frame& frame, int64_t row, int64_t h, float*) const override {
    const int64_t columns = heads_ * value_dim_, states = groups_ * key_dim_, gate = row * heads_ + h;
    const float* const x = input<float>(frame, xbc_) + row * (columns + 2 * states);
    const f32x16 step = softplus(splat(input<float>(frame, dt_)[gate] + bias_[h]));
    Token token{};
    token.k = x + columns + h / (heads_ / groups_) * key_dim_;
    token.q = token.k + states;
    token.v = x + h * value_dim_;
    token.y = output<float>(frame, y_) + gate * value_dim_;
    token.kept = first(exp(rate_[h] * step));
    token.written = first(step);
    token.skip = skip_[h];
    return token;
  }

  int xbc_, dt_, y_;
  const float *rate_, *bias_, *skip_;
  int64_t groups_;
};

}  // namespace

void register_recurrent(Table& table) {
  table.kernels["causal_conv"] = make_kernel<CausalConv>;
  table.kernels["gated_delta"] = make_kernel<GatedDelta>;
  table.kernels["ssm_scan"] = make_kernel<SsmScan>;
}

}  // namespace ENGINE_ISA
}  // namespace engine_cpu
