// kv_write and kv_copy: what changes the KV state besides the ops that read it.
#include <cstring>

#include "../isa.h"
#include "kv_store.h"

namespace engine_cpu {
namespace ENGINE_ISA {
namespace {

// k, v f32 [T, kv_heads * head_dim] (v -1 if latent) and kv_slots i32 [T] (negative: skip) into the states k, v (,
// k_scale, v_scale). Numbers: kv_heads, head_dim, block_size, kv_dtype (0 f32, 1 f16, 2 bf16, 3 int8, 4 int16), latent.
class KvWrite final : public Kernel {
 public:
  explicit KvWrite(const KernelArgs& args)
      : k_(args.inputs.at(0)), v_(args.inputs.at(1)), slots_(args.inputs.at(2)), store_(args) {}

  size_t scratch_bytes() const override { return store_.scratch_bytes(); }

  void run(const Frame& frame, const Team& team, int) override {
    with_kv_type(store_.layout().dtype, [&](auto* type) { write(frame, team, type); });
  }

 private:
  template <class T>
  void write(const Frame& frame, const Team& team, T* type) const {
    const KvLayout& layout = store_.layout();
    const int64_t width = layout.heads * layout.dim;
    const int32_t* slots = input<int32_t>(frame, slots_);
    const KvShare part(slots, frame.dims.T, layout.lanes, team);
    const Range heads = part.heads(layout.heads);
    for (int64_t t = part.tokens.begin, end; t < part.tokens.end; t = end) {
      end = run_end(slots, t, part.tokens.end, layout.lanes);
      if (slots[t] < 0) continue;
      for (int64_t h = heads.begin; h < heads.end; ++h) {
        const int64_t at = t * width + h * layout.dim;
        store_.write_keys(team.scratch, slots[t], h, end - t, input<float>(frame, k_) + at, width, type);
        if (layout.latent) continue;
        store_.write_values(team.scratch, slots[t], h, end - t, input<float>(frame, v_) + at, width, type);
      }
    }
  }

  int k_, v_, slots_;
  KvStore store_;
};

// block_copies i32 [C, 2] (source and destination block), in the order given, in every state.
// Numbers: block_bytes.0, block_bytes.1, ... one a state.
class KvCopy final : public Kernel {
 public:
  explicit KvCopy(const KernelArgs& args) : copies_(args.inputs.at(0)) {
    for (size_t i = 0; i < args.states.size(); ++i)
      states_.push_back({args.states[i], args.integer("block_bytes." + std::to_string(i))});
  }

  bool serial(const Dims& dims) const override { return dims.C == 0; }

  // Each thread moves its slice of every block, so that each slice sees the copies in order.
  void run(const Frame& frame, const Team& team, int) override {
    const int32_t* copies = input<int32_t>(frame, copies_);
    for (int32_t c = 0; c < frame.dims.C; ++c) {
      const int64_t source = copies[2 * c], target = copies[2 * c + 1];
      for (const State& state : states_) {
        const Range bytes = share(state.block_bytes, team, 64);
        std::memmove(state.data + target * state.block_bytes + bytes.begin,
                     state.data + source * state.block_bytes + bytes.begin, bytes.end - bytes.begin);
      }
    }
  }

 private:
  struct State {
    uint8_t* data;
    int64_t block_bytes;
  };
  int copies_;
  std::vector<State> states_;
};

}  // namespace

void register_kv_cache(Table& table) {
  table.kernels["kv_write"] = make_kernel<KvWrite>;
  table.kernels["kv_copy"] = make_kernel<KvCopy>;
}

}  // namespace ENGINE_ISA
}  // namespace engine_cpu
