// rms_norm, add_rms_norm, layer_norm: statistics in f32, summed in an order that only the width decides. Each writes its
// rows plain, as q8g32, or both.
#include <stdexcept>

#include "../isa.h"
#include "../linear/quantize.h"
#include "norm_row.h"

namespace engine_cpu {
namespace ENGINE_ISA {
namespace {

// Where a normalised row goes: y f32 [width], packed q8g32 of as many with spans of so many, either of them null.
struct Target {
  float* y;
  uint8_t* packed;
  int64_t span;
};

// values(i, count) as in sum_lanes.
template <class Values>
ENGINE_INLINE void write_row(Target to, int64_t width, Values values) {
  float* const y = to.y;
  if (to.packed == nullptr) {
    int64_t i = 0;
    for (; i + 16 <= width; i += 16) store(y + i, values(i, 16));
    if (i < width) store_first(y + i, values(i, width - i), width - i);
  } else if (y == nullptr) {
    quantize_groups(to.packed, width, 0, width / kGroup, to.span, 0.0f, [&](int64_t k) { return values(k, 16); });
  } else {
    quantize_groups(to.packed, width, 0, width / kGroup, to.span, 0.0f, [&](int64_t k) {
      const f32x16 v = values(k, 16);
      store(y + k, v);
      return v;
    });
  }
}

ENGINE_INLINE void scale_row(const float* x, const float* weight, float squares, float eps, int64_t width, Target to) {
  const float scale = rms_scale(squares, eps, width);
  write_row(to, width, [=](int64_t i, int64_t count) {
    return load_lanes(x + i, count) * scale * load_lanes(weight + i, count);
  });
}

// The plain and the packed output of a norm; either may be absent (-1), and the packed one beyond the list.
class Outputs {
 public:
  Outputs(const KernelArgs& args, size_t first, int64_t width, int64_t slices)
      : y_(args.outputs.at(first)), packed_(args.outputs.size() > first + 1 ? args.outputs[first + 1] : -1), width_(width) {
    if (y_ < 0 && packed_ < 0) throw std::invalid_argument("a norm needs an output.");
    if (packed_ < 0) return;
    if (slices != 1) throw std::invalid_argument("a norm packs whole rows.");
    span_ = span_of(args, width);
  }

  Target of(const Frame& frame, int64_t row) const {
    return {y_ < 0 ? nullptr : output<float>(frame, y_) + row * width_,
            packed_ < 0 ? nullptr : frame.values[packed_] + row * q8g32_row_bytes(width_),
            span_};
  }

 private:
  int y_, packed_;
  int64_t width_, span_ = kGroup;
};

// x [T or R, width] -> y of the same shape, and packed. Each head_dim slice of a row is normalised by itself; where there are
// several, nothing is packed. Weight [width], or [head_dim] of all slices. Numbers: width, head_dim (the weight's width), eps,
// weight_offset (0), rows_dim (0), span.
class RmsNorm final : public Kernel {
 public:
  explicit RmsNorm(const KernelArgs& args)
      : x_(args.inputs.at(0)),
        rows_(args),
        weight_(args, *args.weights.at(0)),
        width_(static_cast<int64_t>(args.number_or("head_dim", static_cast<double>(weight_.width())))),
        slices_(args.integer("width") / width_),
        weights_(weight_.width() / width_),
        outputs_(args, 0, width_, slices_),
        eps_(static_cast<float>(args.number("eps"))) {
    if (slices_ * width_ != args.integer("width")) throw std::invalid_argument("the width must be a multiple of a slice's.");
    if (weights_ * width_ != weight_.width() || (weights_ != 1 && weights_ != slices_))
      throw std::invalid_argument("the weight must be that of one slice, or of all.");
  }

  bool serial(const Dims& dims) const override { return little(rows_.count(dims) * slices_ * width_); }

  void run(const Frame& frame, const Team& team, int) override {
    const int64_t width = width_;
    const Range range = share(rows_.count(frame.dims) * slices_, team);
    for (int64_t i = range.begin; i < range.end; ++i) {
      const float* x = input<float>(frame, x_) + i * width;
      const float squares =
          sum_lanes(width, [x](int64_t k, int64_t count) { return load_lanes(x + k, count); }, add_square);
      scale_row(x, weight_.data() + i % weights_ * width, squares, eps_, width, outputs_.of(frame, i));
    }
  }

 private:
  int x_;
  RowsDim rows_;
  NormWeight weight_;
  int64_t width_, slices_, weights_;
  Outputs outputs_;
  float eps_;
};

// x, residual [T or R, width] -> sum = x + residual, normed = rms_norm(sum), and packed. Numbers as of rms_norm, no slices.
class AddRmsNorm final : public Kernel {
 public:
  explicit AddRmsNorm(const KernelArgs& args)
      : x_(args.inputs.at(0)),
        residual_(args.inputs.at(1)),
        sum_(args.outputs.at(0)),
        rows_(args),
        weight_(args, *args.weights.at(0)),
        outputs_(args, 1, weight_.width(), 1),
        eps_(static_cast<float>(args.number("eps"))) {}

  bool serial(const Dims& dims) const override { return little(rows_.count(dims) * weight_.width()); }

  void run(const Frame& frame, const Team& team, int) override {
    const int64_t width = weight_.width();
    const Range range = share(rows_.count(frame.dims), team);
    for (int64_t row = range.begin; row < range.end; ++row) {
      const float* x = input<float>(frame, x_) + row * width;
      const float* residual = input<float>(frame, residual_) + row * width;
      float* sum = output<float>(frame, sum_) + row * width;
      const auto add = [=](int64_t i, int64_t count) {
        const f32x16 total = load_lanes(x + i, count) + load_lanes(residual + i, count);
        store_lanes(sum + i, total, count);
        return total;
      };
      const float squares = sum_lanes(width, add, add_square);
      scale_row(sum, weight_.data(), squares, eps_, width, outputs_.of(frame, row));
    }
  }

 private:
  int x_, residual_, sum_;
  RowsDim rows_;
  NormWeight weight_;
  Outputs outputs_;
  float eps_;
};

// x [T or R, width] -> (x - mean) / sqrt(variance + eps) * weight (+ bias, the second weight), and packed. Numbers: eps,
// rows_dim (0), head_dim (0: mean and variance are those of the row; else of each head_dim slice by itself, and nothing
// packed).
class LayerNorm final : public Kernel {
 public:
  explicit LayerNorm(const KernelArgs& args)
      : x_(args.inputs.at(0)),
        rows_(args),
        weight_(args.weights.at(0)->f32()),
        bias_(args.weights.size() > 1 ? args.weights[1]->f32() : nullptr),
        width_(args.weights.at(0)->columns),
        slice_(args.number_or("head_dim", 0) > 0 ? args.integer("head_dim") : width_),
        outputs_(args, 0, slice_, width_ / slice_),
        eps_(static_cast<float>(args.number("eps"))) {
    if (width_ % slice_ != 0) throw std::invalid_argument("the width must be a multiple of head_dim.");
  }

  bool serial(const Dims& dims) const override { return little(rows_.count(dims) * width_); }

  void run(const Frame& frame, const Team& team, int) override {
    const int64_t slices = width_ / slice_;
    const Range range = share(rows_.count(frame.dims) * slices, team);
    for (int64_t i = range.begin; i < range.end; ++i)
      norm_slice(input<float>(frame, x_) + i * slice_, i % slices * slice_, outputs_.of(frame, i));
  }

 private:
  // `at`: where the slice begins in its row.
  void norm_slice(const float* x, int64_t at, Target to) const {
    const float width = static_cast<float>(slice_);
    const auto values = [x](int64_t i, int64_t count) { return load_lanes(x + i, count); };
    const float mean = sum_lanes(slice_, values, [](f32x16 v, f32x16 sum) { return sum + v; }) / width;
    const auto centred = [=](int64_t i, int64_t count) {
      const f32x16 v = values(i, count) - mean;
      return count == 16 ? v : select(lane_index() < static_cast<int32_t>(count), v, f32x16{});
    };
    const float scale = 1.0f / __builtin_sqrtf(sum_lanes(slice_, centred, add_square) / width + eps_);
    const float* const weight = weight_ + at;
    if (bias_ == nullptr)
      return write_row(to, slice_, [=](int64_t i, int64_t count) {
        return centred(i, count) * scale * load_lanes(weight + i, count);
      });
    const float* const bias = bias_ + at;
    write_row(to, slice_, [=](int64_t i, int64_t count) {
      return centred(i, count) * scale * load_lanes(weight + i, count) + load_lanes(bias + i, count);
    });
  }

  int x_;
  RowsDim rows_;
  const float* weight_;
  const float* bias_;
  int64_t width_, slice_;
  Outputs outputs_;
  float eps_;
};

}  // namespace

void register_norm(Table& table) {
  table.kernels["rms_norm"] = make_kernel<RmsNorm>;
  table.kernels["add_rms_norm"] = make_kernel<AddRmsNorm>;
  table.kernels["layer_norm"] = make_kernel<LayerNorm>;
}

}  // namespace ENGINE_ISA
}  // namespace engine_cpu
