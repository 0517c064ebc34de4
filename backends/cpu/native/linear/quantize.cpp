// quantize, quantize_bf16: rows of f32 as packed activations.
#include "quantize.h"

#include <stdexcept>

#include "../isa.h"
#include "product.h"

namespace engine_cpu {
namespace ENGINE_ISA {
namespace {

// inputs x [rows, K] f32; outputs q8g32 rows. Numbers: width K, span, rows_dim, choices (rows = T * choices, 1 if absent), scale
// (of every span; 0 or absent: each has its own).
class Quantize final : public Kernel {
 public:
  explicit Quantize(const KernelArgs& args)
      : x_(args.inputs.at(0)), y_(args.outputs.at(0)), rows_(args), width_(args.integer("width")),
        choices_(static_cast<int64_t>(args.number_or("choices", 1))),
        span_(span_of(args, width_)), scale_(static_cast<float>(args.number_or("scale", 0))) {}

  bool serial(const Dims& dims) const override { return little(rows_.count(dims) * choices_ * width_); }

  void run(const Frame& frame, const Team& team, int) override {
    const auto* values = input<float>(frame, x_);
    uint8_t* packed = frame.values[y_];
    share_groups(rows_.count(frame.dims) * choices_, width_, team, [&](int64_t row, int64_t first, int64_t end) {
      const float* x = values + row * width_;
      quantize_groups(packed + row * q8g32_row_bytes(width_), width_, first, end, span_, scale_,
                      [x](int64_t k) { return load(x + k); });
    });
  }

 private:
  int x_, y_;
  RowsDim rows_;
  int64_t width_, choices_, span_;
  float scale_;
};

// inputs x [rows, K] f32; outputs bf16 [rows, K], to nearest, ties to even. Numbers: width K, rows_dim, choices (rows = T *
// choices, 1 if absent).
class QuantizeBf16 final : public Kernel {
 public:
  explicit QuantizeBf16(const KernelArgs& args)
      : x_(args.inputs.at(0)), y_(args.outputs.at(0)), rows_(args),
        width_(args.integer("width") * static_cast<int64_t>(args.number_or("choices", 1))) {}

  void run(const Frame& frame, const Team& team, int) override {
    const Range mine = share(rows_.count(frame.dims) * width_, team, 64);  // as if it were one row
    round_row(input<float>(frame, x_) + mine.begin, mine.end - mine.begin, frame.values[y_] + 2 * mine.begin);
  }

 private:
  int x_, y_;
  RowsDim rows_;
  int64_t width_;
};

}  // namespace

void register_quantize(Table& table) {
  table.kernels["quantize"] = make_kernel<Quantize>;
  table.kernels["quantize_bf16"] = make_kernel<QuantizeBf16>;
}

}  // namespace ENGINE_ISA
}  // namespace engine_cpu
