// quantize: rows of f32 as the packed activation q8g32.
#include <stdexcept>

#include "../isa.h"
#include "../work_split.h"
#include "q8g32.h"

namespace engine_cpu {
namespace ENGINE_ISA {
namespace {

// inputs x [rows, K] f32; outputs q8g32 rows. Numbers: width K (a multiple of 32), rows_dim, choices (rows = T * choices,
// 1 if absent), scale (of every group; 0 or absent: each has its own).
class Quantize final : public Kernel {
 public:
  explicit Quantize(const KernelArgs& args)
      : x_(args.inputs.at(0)), y_(args.outputs.at(0)), rows_(args), width_(args.integer("width")),
        choices_(static_cast<int64_t>(args.number_or("choices", 1))),
        scale_(static_cast<float>(args.number_or("scale", 0))) {
    if (width_ <= 0 || width_ % kGroup != 0) throw std::invalid_argument("q8g32 needs a width that is a multiple of 32.");
  }

  void run(const Frame& frame, const Team& team, int) override {
    const auto* x = input<float>(frame, x_);
    const int64_t groups = width_ / kGroup;  // a long row alone keeps every thread busy, too
    const Range mine = share(rows_.count(frame.dims) * choices_ * groups, team);
    for (int64_t i = mine.begin; i < mine.end; ++i) {
      uint8_t* row = frame.values[y_] + i / groups * q8g32_row_bytes(width_);
      const int64_t g = i % groups;
      quantize_group(load(x + i * kGroup), load(x + i * kGroup + 16), q8g32_values(row) + g * kGroup,
                     q8g32_scales(row, width_) + g, q8g32_sums(row, width_) + 2 * g, scale_);
    }
  }

 private:
  int x_, y_;
  RowsDim rows_;
  int64_t width_, choices_;
  float scale_;
};

}  // namespace

void register_quantize(Table& table) { table.kernels["quantize"] = make_kernel<Quantize>; }

}  // namespace ENGINE_ISA
}  // namespace engine_cpu
