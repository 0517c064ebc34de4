// add, gated_act, scale_softcap, gather_rows, gather_columns, concat_heads: what happens to each element, or each row, by
// itself.
#include <algorithm>
#include <stdexcept>
#include <vector>

#include "../isa.h"
#include "../linear/quantize.h"
#include "../simd_math.h"
#include "gating.h"

namespace engine_cpu {
namespace ENGINE_ISA {
namespace {

// z[i] = op(x[i], y[i]); the last lanes go through the same operations as all others.
template <class Op>
ENGINE_INLINE void map(const float* x, const float* y, float* z, Range range, Op op) {
  int64_t i = range.begin;
  for (; i + 16 <= range.end; i += 16) store(z + i, op(load(x + i), load(y + i)));
  if (i < range.end) {
    const int64_t rest = range.end - i;
    store_first(z + i, op(load_first(x + i, rest), load_first(y + i, rest)), rest);
  }
}

constexpr int64_t kGrain = 256;  // elements: a thread's share starts at whole cache lines

// x, y [T or R, width] -> x + y. Numbers: width, rows_dim (0).
class Add final : public Kernel {
 public:
  explicit Add(const KernelArgs& args)
      : x_(args.inputs.at(0)),
        y_(args.inputs.at(1)),
        sum_(args.outputs.at(0)),
        rows_(args),
        width_(args.integer("width")) {}

  bool serial(const Dims& dims) const override { return little(rows_.count(dims) * width_); }

  void run(const Frame& frame, const Team& team, int) override {
    map(input<float>(frame, x_), input<float>(frame, y_), output<float>(frame, sum_),
        share(rows_.count(frame.dims) * width_, team, kGrain), [](f32x16 x, f32x16 y) { return x + y; });
  }

 private:
  int x_, y_, sum_;
  RowsDim rows_;
  int64_t width_;
};

// gate, up [rows, width] -> activation(gate) * up, plain, packed as q8g32, or both; without up (-1) the activation alone.
// Numbers: width, those of Gating, rows_dim (0), choices (rows = T * choices, 1 if absent), span.
class GatedAct final : public Kernel {
 public:
  explicit GatedAct(const KernelArgs& args)
      : gate_(args.inputs.at(0)),
        up_(args.inputs.at(1)),
        y_(args.outputs.at(0)),
        packed_(args.outputs.size() > 1 ? args.outputs[1] : -1),
        rows_(args),
        width_(args.integer("width")),
        choices_(static_cast<int64_t>(args.number_or("choices", 1))),
        gating_(args) {
    if (y_ < 0 && packed_ < 0) throw std::invalid_argument("gated_act needs an output.");
    if (packed_ >= 0) span_ = span_of(args, width_);
    if (up_ < 0 && gating_.needs_up()) throw std::invalid_argument("clamped_swiglu needs up.");
  }

  bool serial(const Dims& dims) const override { return little(rows_.count(dims) * choices_ * width_); }

  void run(const Frame& frame, const Team& team, int) override {
    if (up_ >= 0)
      gating_.with_up([&](auto op) { apply(frame, team, op); });
    else
      gating_.alone([&](auto activation) { apply(frame, team, [activation](f32x16 g, f32x16) { return activation(g); }); });
  }

 private:
  template <class Op>
  void apply(const Frame& frame, const Team& team, Op op) const {
    const float* gate = input<float>(frame, gate_);
    const float* up = input<float>(frame, up_ < 0 ? gate_ : up_);
    float* y = y_ < 0 ? nullptr : output<float>(frame, y_);
    const int64_t rows = rows_.count(frame.dims) * choices_;
    if (packed_ < 0) return map(gate, up, y, share(rows * width_, team, kGrain), op);
    share_groups(rows, width_, team, [&](int64_t row, int64_t first, int64_t end) {
      const int64_t at = row * width_;
      quantize_groups(frame.values[packed_] + row * q8g32_row_bytes(width_), width_, first, end, span_, 0.0f, [=](int64_t k) {
        const f32x16 v = op(load(gate + at + k), load(up + at + k));
        if (y != nullptr) store(y + at + k, v);
        return v;
      });
    });
  }

  int gate_, up_, y_, packed_;
  RowsDim rows_;
  int64_t width_, choices_, span_ = kGroup;
  Gating gating_;
};

// x [T or R, width] -> softcap tanh(scale x / softcap), or scale x where softcap is 0.
// Numbers: width, scale, softcap, rows_dim (0).
class ScaleSoftcap final : public Kernel {
 public:
  explicit ScaleSoftcap(const KernelArgs& args)
      : x_(args.inputs.at(0)),
        y_(args.outputs.at(0)),
        rows_(args),
        width_(args.integer("width")),
        scale_(static_cast<float>(args.number("scale"))),
        softcap_(static_cast<float>(args.number("softcap"))) {}

  bool serial(const Dims& dims) const override { return little(rows_.count(dims) * width_); }

  void run(const Frame& frame, const Team& team, int) override {
    const float* x = input<float>(frame, x_);
    const Range range = share(rows_.count(frame.dims) * width_, team, kGrain);
    const float scale = scale_, softcap = softcap_;
    if (softcap == 0)
      return map(x, x, output<float>(frame, y_), range, [scale](f32x16 a, f32x16) { return a * scale; });
    map(x, x, output<float>(frame, y_), range,
        [scale, softcap](f32x16 a, f32x16) { return softcap * tanh(a * scale / softcap); });
  }

 private:
  int x_, y_;
  RowsDim rows_;
  int64_t width_;
  float scale_, softcap_;
};

// x [T, width], rows i32 [R] -> x[rows] [R, width]. Numbers: width.
class GatherRows final : public Kernel {
 public:
  explicit GatherRows(const KernelArgs& args)
      : x_(args.inputs.at(0)), rows_(args.inputs.at(1)), y_(args.outputs.at(0)), width_(args.integer("width")) {}

  bool serial(const Dims& dims) const override { return little(dims.R * width_); }

  void run(const Frame& frame, const Team& team, int) override {
    const int32_t* rows = input<int32_t>(frame, rows_);
    const Range range = share(frame.dims.R, team);
    for (int64_t r = range.begin; r < range.end; ++r)
      std::memcpy(output<float>(frame, y_) + r * width_, input<float>(frame, x_) + rows[r] * width_,
                  width_ * sizeof(float));
  }

 private:
  int x_, rows_, y_;
  int64_t width_;
};

// x [T or R, K], columns plain f32 [N], whole numbers -> these columns of x. Numbers: width (K), rows_dim.
class GatherColumns final : public Kernel {
 public:
  explicit GatherColumns(const KernelArgs& args)
      : x_(args.inputs.at(0)),
        y_(args.outputs.at(0)),
        rows_(args),
        width_(args.integer("width")),
        count_(args.weights.at(0)->columns) {
    const PackedWeight& columns = *args.weights[0];
    if (columns.family != "plain") throw std::invalid_argument("gather_columns takes its columns as a plain weight.");
    for (int64_t k = 0; k < count_; ++k) {
      const float column = columns.f32()[k];
      if (!(column >= 0 && column < static_cast<float>(width_)))
        throw std::invalid_argument("gather_columns needs columns from 0 to one less than the width of its input.");
      columns_.push_back(static_cast<int32_t>(column));
    }
  }

  bool serial(const Dims& dims) const override { return little(rows_.count(dims) * count_); }

  void run(const Frame& frame, const Team& team, int) override {
    const Range range = share(rows_.count(frame.dims) * count_, team);
    for (int64_t i = range.begin; i < range.end;) {
      const int64_t row = i / count_, end = std::min(range.end, (row + 1) * count_);
      const float* const x = input<float>(frame, x_) + row * width_;
      float* const y = output<float>(frame, y_) + row * count_;
      for (int64_t k = i - row * count_; k < end - row * count_; ++k) y[k] = x[columns_[k]];
      i = end;
    }
  }

 private:
  int x_, y_;
  RowsDim rows_;
  int64_t width_, count_;
  std::vector<int32_t> columns_;
};

// a [T, heads * A], b [T, heads * B] -> [T, heads * (A + B)], head by head a and then b. Numbers: heads, a, b (widths of
// a head).
class ConcatHeads final : public Kernel {
 public:
  explicit ConcatHeads(const KernelArgs& args)
      : inputs_{args.inputs.at(0), args.inputs.at(1)},
        y_(args.outputs.at(0)),
        heads_(args.integer("heads")),
        widths_{args.integer("a"), args.integer("b")} {}

  bool serial(const Dims& dims) const override { return little(dims.T * heads_ * (widths_[0] + widths_[1])); }

  void run(const Frame& frame, const Team& team, int) override {
    const Range range = share(frame.dims.T * heads_, team);
    for (int64_t i = range.begin; i < range.end; ++i) {
      float* y = output<float>(frame, y_) + i * (widths_[0] + widths_[1]);
      std::memcpy(y, input<float>(frame, inputs_[0]) + i * widths_[0], widths_[0] * sizeof(float));
      std::memcpy(y + widths_[0], input<float>(frame, inputs_[1]) + i * widths_[1], widths_[1] * sizeof(float));
    }
  }

 private:
  int inputs_[2], y_;
  int64_t heads_, widths_[2];
};

}  // namespace

void register_elementwise(Table& table) {
  table.kernels["add"] = make_kernel<Add>;
  table.kernels["gated_act"] = make_kernel<GatedAct>;
  table.kernels["scale_softcap"] = make_kernel<ScaleSoftcap>;
  table.kernels["gather_rows"] = make_kernel<GatherRows>;
  table.kernels["gather_columns"] = make_kernel<GatherColumns>;
  table.kernels["concat_heads"] = make_kernel<ConcatHeads>;
}

}  // namespace ENGINE_ISA
}  // namespace engine_cpu
