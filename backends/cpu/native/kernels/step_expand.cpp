// step_expand: from what the core sends to what the ops of a step read. Integers only, on one thread.
#include <cstring>
#include <stdexcept>

#include "../isa.h"
#include "../work_split.h"

namespace engine_cpu {
namespace ENGINE_ISA {
namespace {

// Inputs, all i32: token_ids [T] (-1: take history[slot, position]), seq_slots [S], seq_starts [S], query_offsets
// [S+1], history_copies [H, 2] (source and destination slot), fill_slots, fill_positions, fill_ids [F], page_table [S,
// P] a group. State: history i32 [slots, max_len]. First the copies, then the fills, then the step's tokens enter the
// history. Outputs, all i32 [T]: ids, positions, token_seq, then kv_slots a group = table[seq, position / bs] * bs +
// position % bs. Numbers: max_len, groups, block_size.0, block_size.1, ...
class StepExpand final : public Kernel {
 public:
  explicit StepExpand(const KernelArgs& args)
      : history_(reinterpret_cast<int32_t*>(args.states.at(0))),
        max_len_(args.integer("max_len")),
        inputs_(args.inputs),
        outputs_(args.outputs) {
    for (int64_t g = 0; g < args.integer("groups"); ++g)
      block_sizes_.push_back(args.integer("block_size." + std::to_string(g)));
    if (inputs_.size() != 8 + block_sizes_.size() || outputs_.size() != 3 + block_sizes_.size())
      throw std::invalid_argument("there are 8 inputs and 3 outputs, and one more of each a cache group.");
  }

  bool serial(const Dims&) const override { return true; }

  void run(const Frame& frame, const Team&, int) override {
    copy_history(frame);
    fill_history(frame);
    expand_tokens(frame);
    for (size_t g = 0; g < block_sizes_.size(); ++g) find_slots(frame, g);
  }

 private:
  const int32_t* in(const Frame& frame, size_t index) const { return input<int32_t>(frame, inputs_[index]); }
  int32_t* out(const Frame& frame, size_t index) const { return output<int32_t>(frame, outputs_[index]); }

  void copy_history(const Frame& frame) const {
    const int32_t* copies = in(frame, 4);
    for (int32_t i = 0; i < frame.dims.H; ++i)
      std::memmove(history_ + copies[2 * i + 1] * max_len_, history_ + copies[2 * i] * max_len_,
                   max_len_ * sizeof(int32_t));
  }

  void fill_history(const Frame& frame) const {
    const int32_t *slots = in(frame, 5), *positions = in(frame, 6), *fills = in(frame, 7);
    for (int32_t i = 0; i < frame.dims.F; ++i) history_[slots[i] * max_len_ + positions[i]] = fills[i];
  }

  void expand_tokens(const Frame& frame) const {
    const int32_t *token_ids = in(frame, 0), *slots = in(frame, 1), *starts = in(frame, 2), *offsets = in(frame, 3);
    int32_t *ids = out(frame, 0), *positions = out(frame, 1), *token_seq = out(frame, 2);
    for (int32_t s = 0; s < frame.dims.S; ++s) {
      int32_t* row = history_ + slots[s] * max_len_;
      for (int32_t t = offsets[s]; t < offsets[s + 1]; ++t) {
        const int32_t position = starts[s] + t - offsets[s];
        if (token_ids[t] >= 0) row[position] = token_ids[t];
        ids[t] = row[position];
        positions[t] = position;
        token_seq[t] = s;
      }
    }
  }

  void find_slots(const Frame& frame, size_t group) const {
    const int32_t *table = in(frame, 8 + group), *positions = out(frame, 1), *token_seq = out(frame, 2);
    const int64_t block_size = block_sizes_[group];
    int32_t* slots = out(frame, 3 + group);
    for (int32_t t = 0; t < frame.dims.T; ++t) {
      const int64_t block = table[static_cast<int64_t>(token_seq[t]) * frame.dims.P + positions[t] / block_size];
      slots[t] = static_cast<int32_t>(block * block_size + positions[t] % block_size);
    }
  }

  int32_t* history_;
  int64_t max_len_;
  std::vector<int32_t> inputs_, outputs_;
  std::vector<int64_t> block_sizes_;
};

}  // namespace

void register_step_expand(Table& table) { table.kernels["step_expand"] = make_kernel<StepExpand>; }

}  // namespace ENGINE_ISA
}  // namespace engine_cpu
