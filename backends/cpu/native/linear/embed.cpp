// embed: rows of a packed matrix, dequantized.
#include <stdexcept>

#include "../isa.h"
#include "../work_split.h"
#include "layout.h"

namespace engine_cpu {
namespace ENGINE_ISA {
namespace {

// inputs ids i32 [T]; outputs f32 [T, K]; weights: a matrix of any family, a column a token. Numbers: scale (1 if absent).
// Ids outside the matrix give rows of NaN.
class Embed final : public Kernel {
 public:
  explicit Embed(const KernelArgs& args)
      : ids_(args.inputs.at(0)), out_(args.outputs.at(0)), weight_(args.weights.at(0)),
        scale_(static_cast<float>(args.number_or("scale", 1))) {
    layout_of(*weight_);  // refuses what is no matrix
  }

  bool serial(const Dims& dims) const override { return little(dims.T * weight_->depth); }

  void run(const Frame& frame, const Team& team, int) override {
    const auto* ids = input<int32_t>(frame, ids_);
    const Range mine = share(frame.dims.T, team);
    for (int64_t t = mine.begin; t < mine.end; ++t) {
      float* out = output<float>(frame, out_) + t * weight_->depth;
      const bool known = ids[t] >= 0 && ids[t] < weight_->columns;
      if (known) unpack_column(*weight_, ids[t], 0, out);
      for (int64_t k = 0; k < weight_->depth; ++k) out[k] = known ? out[k] * scale_ : __builtin_nanf("");
    }
  }

 private:
  int ids_, out_;
  std::shared_ptr<PackedWeight> weight_;
  float scale_;
};

}  // namespace

void register_embed(Table& table) { table.kernels["embed"] = make_kernel<Embed>; }

}  // namespace ENGINE_ISA
}  // namespace engine_cpu
