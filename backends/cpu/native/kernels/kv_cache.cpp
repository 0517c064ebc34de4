// kv_write and kv_copy: what changes the KV state besides the ops that read it.
#include <cstring>

#include "../isa.h"
#include "../simd.h"
#include "../work_split.h"
#include "kv_layout.h"

namespace engine_cpu {
namespace ENGINE_ISA {
namespace {

// One head's vector in the storage type. int8 also gives its scale: absmax / 127, quants to the nearest even.
template <class T>
ENGINE_INLINE void convert(const float* x, int64_t dim, T* y, float*) {
  int64_t i = 0;
  for (; i + 16 <= dim; i += 16) narrow(y + i, load(x + i));
  if (i == dim) return;
  T rest[16];
  narrow(rest, load_first(x + i, dim - i));
  std::memcpy(y + i, rest, (dim - i) * sizeof(T));
}

template <>
ENGINE_INLINE void convert(const float* x, int64_t dim, int8_t* y, float* scale) {
  f32x16 most{};
  f32x16 bad{};  // stays zero unless something is not finite
  for (int64_t i = 0; i < dim; i += 16) {
    const f32x16 v = load_first(x + i, dim - i < 16 ? dim - i : 16);
    most = max(abs(v), most);
    bad += v * 0.0f;
  }
  const float top = reduce_max(most);
  *scale = top / 127.0f + reduce_add(bad);
  for (int64_t i = 0; i < dim; i += 16) {
    const int64_t count = dim - i < 16 ? dim - i : 16;
    const f32x16 v = load_first(x + i, count) / *scale;
    const i8x16 q = narrow_i8(round_i32(select(abs(v) < 127.5f, v, f32x16{})));  // NaN and 0 / 0 give 0
    std::memcpy(y + i, &q, count);
  }
}

// k, v f32 [T, kv_heads * head_dim] (v -1 if latent) and kv_slots i32 [T] (negative: skip) into the states k, v (,
// k_scale, v_scale). Numbers: kv_heads, head_dim, block_size, kv_dtype (0 f32, 1 f16, 2 bf16, 3 int8), latent.
class KvWrite final : public Kernel {
 public:
  explicit KvWrite(const KernelArgs& args)
      : k_(args.inputs.at(0)),
        v_(args.inputs.at(1)),
        slots_(args.inputs.at(2)),
        layout_(args),
        scratch_stride_((layout_.dim * 4 + 63) / 64 * 64),
        scratch_(args.integer("threads") * scratch_stride_) {
    layout_.find_states(args, states_);
  }

  void run(const Frame& frame, const Team& team, int) override {
    with_kv_type(layout_.dtype, [&](auto* type) { write(frame, team, type); });
  }

 private:
  template <class T>
  void write(const Frame& frame, const Team& team, T*) {
    const float* k = input<float>(frame, k_);
    const float* v = layout_.latent ? nullptr : input<float>(frame, v_);
    const int32_t* slots = input<int32_t>(frame, slots_);
    T* key = reinterpret_cast<T*>(scratch_.data() + team.index * scratch_stride_);
    const Range range = share(frame.dims.T * layout_.heads, team);
    for (int64_t i = range.begin; i < range.end; ++i) {
      const int64_t slot = slots[i / layout_.heads], head = i % layout_.heads;
      if (slot < 0) continue;
      const int64_t block = slot / layout_.block, token = slot % layout_.block;
      const int64_t page = layout_.page(block, head), scale = layout_.scale(block, head) + token;
      convert(k + i * layout_.dim, layout_.dim, key, reinterpret_cast<float*>(states_[2]) + scale);
      T* keys = reinterpret_cast<T*>(states_[0]) + page + layout_.key(token);
      for (int64_t d = 0; d < layout_.dim; ++d) keys[d * layout_.lanes] = key[d];
      if (v == nullptr) continue;
      T* value = reinterpret_cast<T*>(states_[1]) + page + token * layout_.dim;
      convert(v + i * layout_.dim, layout_.dim, value, reinterpret_cast<float*>(states_[3]) + scale);
    }
  }

  int k_, v_, slots_;
  KvLayout layout_;
  uint8_t* states_[4] = {};
  int64_t scratch_stride_;
  Buffer scratch_;
};

// block_copies i32 [C, 2] (source and destination block), in the order given, in every state.
// Numbers: block_bytes.0, block_bytes.1, ... one a state.
class KvCopy final : public Kernel {
 public:
  explicit KvCopy(const KernelArgs& args) : copies_(args.inputs.at(0)) {
    for (size_t i = 0; i < args.states.size(); ++i)
      states_.push_back({args.states[i], args.integer("block_bytes." + std::to_string(i))});
  }

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
