// rms_norm, add_rms_norm, layer_norm: statistics in f32, summed in an order that only the width decides.
#include <stdexcept>

#include "../isa.h"
#include "../simd.h"
#include "../work_split.h"

namespace engine_cpu {
namespace ENGINE_ISA {
namespace {

// sum over i of term(lanes from i on), with four running sums; `term` sees zeros beyond the width.
template <class Term>
ENGINE_INLINE float sum_lanes(const float* x, int64_t width, Term term) {
  f32x16 sums[4] = {};
  int64_t i = 0;
  for (; i + 64 <= width; i += 64)
    for (int j = 0; j < 4; ++j) sums[j] = term(load(x + i + 16 * j), sums[j]);
  for (int j = 0; i < width; ++j, i += 16)
    sums[j] = term(i + 16 <= width ? load(x + i) : load_first(x + i, width - i), sums[j]);
  return reduce_add((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// y = x * scale * weight
ENGINE_INLINE void scale_row(const float* x, const float* weight, float scale, float* y, int64_t width) {
  int64_t i = 0;
  for (; i + 16 <= width; i += 16) store(y + i, load(x + i) * scale * load(weight + i));
  for (; i < width; ++i) y[i] = x[i] * scale * weight[i];
}

ENGINE_INLINE void rms_row(const float* x, const float* weight, float eps, float* y, int64_t width) {
  const float squares = sum_lanes(x, width, [](f32x16 v, f32x16 sum) { return fma(v, v, sum); });
  scale_row(x, weight, 1.0f / __builtin_sqrtf(squares / static_cast<float>(width) + eps), y, width);
}

// The weight of a norm as f32 [width], plus `weight_offset` (Gemma keeps w - 1).
class NormWeight {
 public:
  explicit NormWeight(const KernelArgs& args) : values_(args.weights.at(0)->nbytes) {
    const PackedWeight& weight = *args.weights.at(0);
    width_ = weight.columns;
    const float offset = static_cast<float>(args.number_or("weight_offset", 0));
    for (int64_t i = 0; i < width_; ++i) values_.as<float>()[i] = weight.f32()[i] + offset;
  }
  const float* data() const { return values_.as<float>(); }
  int64_t width() const { return width_; }

 private:
  Buffer values_;
  int64_t width_;
};

// x [T or R, width] -> y of the same shape. Weight [width], or [head_dim]: then each head_dim slice of a row is
// normalised by itself. Numbers: width, eps, weight_offset (0), rows_dim (0).
class RmsNorm final : public Kernel {
 public:
  explicit RmsNorm(const KernelArgs& args)
      : x_(args.inputs.at(0)),
        y_(args.outputs.at(0)),
        rows_(args),
        weight_(args),
        slices_(args.integer("width") / weight_.width()),
        eps_(static_cast<float>(args.number("eps"))) {
    if (slices_ * weight_.width() != args.integer("width"))
      throw std::invalid_argument("the width must be a multiple of the weight's.");
  }

  void run(const Frame& frame, const Team& team, int) override {
    const auto* x = input<float>(frame, x_);
    auto* y = output<float>(frame, y_);
    const int64_t width = weight_.width();
    const Range range = share(rows_.count(frame.dims) * slices_, team);
    for (int64_t i = range.begin; i < range.end; ++i)
      rms_row(x + i * width, weight_.data(), eps_, y + i * width, width);
  }

 private:
  int x_, y_;
  RowsDim rows_;
  NormWeight weight_;
  int64_t slices_;
  float eps_;
};

// x, residual [T or R, width] -> sum = x + residual, normed = rms_norm(sum). Numbers as of rms_norm, no slices.
class AddRmsNorm final : public Kernel {
 public:
  explicit AddRmsNorm(const KernelArgs& args)
      : x_(args.inputs.at(0)),
        residual_(args.inputs.at(1)),
        sum_(args.outputs.at(0)),
        normed_(args.outputs.at(1)),
        rows_(args),
        weight_(args),
        eps_(static_cast<float>(args.number("eps"))) {}

  void run(const Frame& frame, const Team& team, int) override {
    const int64_t width = weight_.width();
    const Range range = share(rows_.count(frame.dims), team);
    for (int64_t row = range.begin; row < range.end; ++row) {
      const float* x = input<float>(frame, x_) + row * width;
      const float* residual = input<float>(frame, residual_) + row * width;
      float* sum = output<float>(frame, sum_) + row * width;
      int64_t i = 0;
      for (; i + 16 <= width; i += 16) store(sum + i, load(x + i) + load(residual + i));
      for (; i < width; ++i) sum[i] = x[i] + residual[i];
      rms_row(sum, weight_.data(), eps_, output<float>(frame, normed_) + row * width, width);
    }
  }

 private:
  int x_, residual_, sum_, normed_;
  RowsDim rows_;
  NormWeight weight_;
  float eps_;
};

// x [T or R, width] -> (x - mean) / sqrt(variance + eps) * weight (+ bias, the second weight). Numbers: eps, rows_dim
// (0), head_dim (0: mean and variance are those of the row; else of each head_dim slice by itself).
class LayerNorm final : public Kernel {
 public:
  explicit LayerNorm(const KernelArgs& args)
      : x_(args.inputs.at(0)),
        y_(args.outputs.at(0)),
        rows_(args),
        weight_(args.weights.at(0)->f32()),
        bias_(args.weights.size() > 1 ? args.weights[1]->f32() : nullptr),
        width_(args.weights.at(0)->columns),
        slice_(args.number_or("head_dim", 0) > 0 ? args.integer("head_dim") : width_),
        eps_(static_cast<float>(args.number("eps"))) {
    if (width_ % slice_ != 0) throw std::invalid_argument("the width must be a multiple of head_dim.");
  }

  void run(const Frame& frame, const Team& team, int) override {
    const int64_t slices = width_ / slice_;
    const Range range = share(rows_.count(frame.dims) * slices, team);
    for (int64_t i = range.begin; i < range.end; ++i)
      norm_slice(input<float>(frame, x_) + i * slice_, output<float>(frame, y_) + i * slice_, i % slices * slice_);
  }

 private:
  // `at`: where the slice begins in its row.
  void norm_slice(const float* x, float* y, int64_t at) const {
    const float width = static_cast<float>(slice_);
    const float mean = sum_lanes(x, slice_, [](f32x16 v, f32x16 sum) { return sum + v; }) / width;
    for (int64_t i = 0; i < slice_; ++i) y[i] = x[i] - mean;
    const float squares = sum_lanes(y, slice_, [](f32x16 v, f32x16 sum) { return fma(v, v, sum); });
    scale_row(y, weight_ + at, 1.0f / __builtin_sqrtf(squares / width + eps_), y, slice_);
    if (bias_ == nullptr) return;
    for (int64_t i = 0; i < slice_; ++i) y[i] += bias_[at + i];
  }

  int x_, y_;
  RowsDim rows_;
  const float* weight_;
  const float* bias_;
  int64_t width_, slice_;
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
