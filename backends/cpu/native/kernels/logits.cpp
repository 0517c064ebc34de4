// process_logits: from the head's logits to what the next token is drawn from.
#include "../isa.h"
#include "logit_row.h"

namespace engine_cpu {
namespace ENGINE_ISA {
namespace {

// Inputs, states and numbers: those of LogitRows. Output: f32 [R, width].
class ProcessLogits final : public Kernel {
 public:
  explicit ProcessLogits(const KernelArgs& args) : rows_(args), out_(args.outputs.at(0)) {}

  void run(const Frame& frame, const Team& team, int) override {
    share_tasks(frame.dims.R, team, [&](int64_t row) {
      rows_.process(frame, row, team.index, output<float>(frame, out_) + row * rows_.width());
    });
  }

 private:
  LogitRows rows_;
  int32_t out_;
};

}  // namespace

void register_logits(Table& table) { table.kernels["process_logits"] = make_kernel<ProcessLogits>; }

}  // namespace ENGINE_ISA
}  // namespace engine_cpu
