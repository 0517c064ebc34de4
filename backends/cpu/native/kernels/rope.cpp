// rope, and rope_kv_write: the same with the norms before it and the cache write after it.
#include "../isa.h"
#include "kv_store.h"
#include "norm_row.h"
#include "rotary.h"

namespace engine_cpu {
namespace ENGINE_ISA {
namespace {

// x [T, heads * head_dim], positions i32 [T] -> the same shape. Weight and numbers as of Rotary; heads.
class Rope final : public Kernel {
 public:
  explicit Rope(const KernelArgs& args)
      : x_(args.inputs.at(0)),
        positions_(args.inputs.at(1)),
        y_(args.outputs.at(0)),
        heads_(args.integer("heads")),
        dim_(args.integer("head_dim")),
        rotary_(args, *args.weights.at(0)) {}

  size_t scratch_bytes() const override { return rotary_.table_size() * sizeof(float); }

  void run(const Frame& frame, const Team& team, int) override {
    const Range range = share(frame.dims.T * heads_, team);
    float* table = reinterpret_cast<float*>(team.scratch);
    int64_t tabled = -1;
    for (int64_t i = range.begin; i < range.end; ++i) {
      const int64_t token = i / heads_;
      if (token != tabled) rotary_.fill_table(input<int32_t>(frame, positions_)[token], table);
      tabled = token;
      rotary_.rotate(input<float>(frame, x_) + i * dim_, table, output<float>(frame, y_) + i * dim_);
    }
  }

 private:
  int x_, positions_, y_;
  int64_t heads_, dim_;
  Rotary rotary_;
};

// q f32 [T, heads * head_dim], k and v f32 [T, kv_heads * head_dim], positions and kv_slots i32 [T] -> q rotated; k rotated
// and v into the states k, v (, k_scale, v_scale), but for tokens with a negative slot. Weights: frequencies, and, if heads
// are normalised before, those of q's and k's RMS norms, f32 [head_dim]. Numbers: as of Rotary and kv_write; heads, eps,
// weight_offset. The bits are those of rms_norm, rope and kv_write.
class RopeKvWrite final : public Kernel {
 public:
  explicit RopeKvWrite(const KernelArgs& args)
      : q_(args.inputs.at(0)),
        k_(args.inputs.at(1)),
        v_(args.inputs.at(2)),
        positions_(args.inputs.at(3)),
        slots_(args.inputs.at(4)),
        y_(args.outputs.at(0)),
        heads_(args.integer("heads")),
        eps_(static_cast<float>(args.number_or("eps", 0))),
        rotary_(args, *args.weights.at(0)),
        store_(args),
        dim_(store_.layout().dim),
        room_(16 * rotary_.table_size() + 17 * ((dim_ + 15) / 16 * 16)) {
    for (size_t i = 1; i < args.weights.size(); ++i) norms_.emplace_back(args, *args.weights[i]);
    if (norms_.size() != 0 && norms_.size() != 2) throw std::invalid_argument("q and k both have norms, or neither.");
    for (const NormWeight& norm : norms_)
      if (norm.width() != dim_) throw std::invalid_argument("the norms of q and k are head_dim wide.");
    if (store_.layout().latent) throw std::invalid_argument("a latent cache takes rope and kv_write.");
  }

  bool serial(const Dims& dims) const override {
    return little(dims.T * (heads_ + 2 * store_.layout().heads) * dim_);
  }

  size_t scratch_bytes() const override { return room_ * sizeof(float) + store_.scratch_bytes(); }

  void run(const Frame& frame, const Team& team, int) override {
    with_kv_type(store_.layout().dtype, [&](auto* type) { run_typed(frame, team, type); });
  }

 private:
  template <class T>
  void run_typed(const Frame& frame, const Team& team, T* type) const {
    const int32_t* slots = input<int32_t>(frame, slots_);
    const KvLayout& layout = store_.layout();
    const KvShare part(slots, frame.dims.T, layout.lanes, team);
    const Range heads = part.heads(heads_), kv_heads = part.heads(layout.heads);
    float* tables = reinterpret_cast<float*>(team.scratch);
    float* keys = tables + 16 * rotary_.table_size();
    for (int64_t t = part.tokens.begin; t < part.tokens.end;) {
      const int64_t count = run_end(slots, t, part.tokens.end, layout.lanes) - t;
      for (int64_t i = 0; i < count; ++i)
        rotary_.fill_table(input<int32_t>(frame, positions_)[t + i], tables + i * rotary_.table_size());
      for (int64_t i = 0; i < count; ++i)
        for (int64_t h = heads.begin; h < heads.end; ++h) {
          const int64_t at = ((t + i) * heads_ + h) * dim_;
          turn(input<float>(frame, q_) + at, 0, tables + i * rotary_.table_size(), keys, output<float>(frame, y_) + at);
        }
      if (slots[t] >= 0) write(frame, team, t, count, kv_heads, tables, keys, type);
      t += count;
    }
  }

  // Keys and values of a run of tokens.
  template <class T>
  void write(const Frame& frame, const Team& team, int64_t t, int64_t count, Range heads, const float* tables,
             float* keys, T* type) const {
    uint8_t* const scratch = team.scratch + room_ * sizeof(float);
    const int64_t slot = input<int32_t>(frame, slots_)[t], kv_heads = store_.layout().heads;
    for (int64_t h = heads.begin; h < heads.end; ++h) {
      for (int64_t i = 0; i < count; ++i) {
        const int64_t at = ((t + i) * kv_heads + h) * dim_;
        turn(input<float>(frame, k_) + at, 1, tables + i * rotary_.table_size(), keys, keys + (i + 1) * dim_);
      }
      store_.write_keys(scratch, slot, h, count, keys + dim_, dim_, type);
      const float* const values = input<float>(frame, v_) + (t * kv_heads + h) * dim_;
      store_.write_values(scratch, slot, h, count, values, kv_heads * dim_, type);
    }
  }

  // Norm `which`, if there are norms, and rotation of one head. `normed`: room for one.
  ENGINE_INLINE void turn(const float* x, size_t which, const float* table, float* normed, float* y) const {
    if (!norms_.empty()) {
      rms_row(x, norms_[which].data(), eps_, normed, dim_);
      x = normed;
    }
    rotary_.rotate(x, table, y);
  }

  int q_, k_, v_, positions_, slots_, y_;
  int64_t heads_;
  float eps_;
  Rotary rotary_;
  KvStore store_;
  int64_t dim_, room_;  // room: floats of a thread's tables, keys and a normed head
  std::vector<NormWeight> norms_;
};

}  // namespace

void register_rope(Table& table) {
  table.kernels["rope"] = make_kernel<Rope>;
  table.kernels["rope_kv_write"] = make_kernel<RopeKvWrite>;
}

}  // namespace ENGINE_ISA
}  // namespace engine_cpu
