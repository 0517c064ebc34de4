// Storing keys and values in the cache, for the kernels that write it.
#pragma once

#include "../work_split.h"
#include "attention_tile.h"
#include "kv_layout.h"

namespace engine_cpu {
namespace ENGINE_ISA {

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

// The end of the run of tokens from `token` on whose keys share a tile; of skipped tokens (negative slots) one by one.
inline int64_t run_end(const int32_t* slots, int64_t token, int64_t end, int64_t lanes) {
  int64_t next = token + 1;
  while (next < end && slots[next] == slots[next - 1] + 1 && slots[next] % lanes != 0 && slots[token] >= 0) ++next;
  return next;
}

// A thread's part of a step: tokens in whole runs and all heads; of few tokens all, and some of the heads.
struct KvShare {
  KvShare(const int32_t* slots, int64_t count, int64_t lanes, const Team& team)
      : by_tokens(count >= 2 * team.size), team(team), tokens(by_tokens ? share(count, team) : Range{0, count}) {
    if (!by_tokens) return;
    const auto inside = [&](int64_t t) {
      return t > 0 && t < count && slots[t - 1] >= 0 && slots[t] == slots[t - 1] + 1 && slots[t] % lanes != 0;
    };
    while (inside(tokens.begin)) ++tokens.begin;
    while (inside(tokens.end)) ++tokens.end;
  }
  Range heads(int64_t count) const { return by_tokens ? Range{0, count} : share(count, team); }

  bool by_tokens;
  const Team& team;
  Range tokens;
};

class KvStore {
 public:
  explicit KvStore(const KernelArgs& args)
      : layout_(args) {
    layout_.find_states(args, states_);
  }
  const KvLayout& layout() const { return layout_; }
  size_t scratch_bytes() const { return 16 * layout_.dim * sizeof(float); }

  // Keys of `count` tokens of one tile, the first at `slot`; rows f32 [dim] lie `row_stride` apart.
  template <class T>
  void write_keys(uint8_t* scratch, int64_t slot, int64_t head, int64_t count, const float* rows, int64_t row_stride,
                  T*) const {
    const int64_t block = slot / layout_.block, token = slot % layout_.block, dim = layout_.dim;
    float* scales = reinterpret_cast<float*>(states_[2]) + layout_.scale(block, head) + token;
    uint8_t* keys = states_[0] + (layout_.page(block, head) + layout_.key(token)) * sizeof(T);
    T* stored = reinterpret_cast<T*>(scratch);
    for (int64_t i = 0; i < count; ++i) convert(rows + i * row_stride, dim, stored + i * dim, scales + i);
    using Unit = std::conditional_t<std::is_same_v<T, int8_t>, uint16_t, T>;  // of int8 two dimensions
    put_in_lanes(reinterpret_cast<const Unit*>(stored), count, dim * sizeof(T) / sizeof(Unit),
                 reinterpret_cast<Unit*>(keys));
  }

  template <class T>
  void write_value(uint8_t* scratch, int64_t slot, int64_t head, const float* value, T*) const {
    const int64_t block = slot / layout_.block, token = slot % layout_.block, beside = layout_.beside();
    float* scale = reinterpret_cast<float*>(states_[3]) + layout_.scale(block, head) + token;
    T* target = reinterpret_cast<T*>(states_[1]) + layout_.page(block, head) + layout_.value(token);
    if (beside == 1) return convert(value, layout_.dim, target, scale);
    T* stored = reinterpret_cast<T*>(scratch);
    convert(value, layout_.dim, stored, scale);
    // One by one: another thread may be writing the token beside it.
    for (int64_t d = 0; d < layout_.dim; ++d) target[d * beside + token % beside] = stored[d];
  }

 private:
  // `count` of a tile's rows of units, where the first belongs.
  template <class Unit>
  void put_in_lanes(const Unit* rows, int64_t count, int64_t units, Unit* keys) const {
    if (count == 16) return transpose_rows(rows, units, keys);  // a whole tile
    for (int64_t i = 0; i < count; ++i)
      for (int64_t u = 0; u < units; ++u) keys[u * layout_.lanes + i] = rows[i * units + u];
  }

  KvLayout layout_;
  uint8_t* states_[4] = {};
};

}  // namespace ENGINE_ISA
}  // namespace engine_cpu
