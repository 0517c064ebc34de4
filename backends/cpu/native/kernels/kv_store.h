// Storing keys and values in the cache, for the kernels that write it.
#pragma once

#include "../work_split.h"
#include "attention_tile.h"
#include "kv_layout.h"

namespace engine_cpu {
namespace ENGINE_ISA {

// One head's vector in the storage type.
template <class T>
ENGINE_INLINE void convert(const float* x, int64_t dim, T* y, float*) {
  int64_t i = 0;
  for (; i + 16 <= dim; i += 16) narrow(y + i, load(x + i));
  if (i == dim) return;
  T rest[16];
  narrow(rest, load_first(x + i, dim - i));
  std::memcpy(y + i, rest, (dim - i) * sizeof(T));
}

ENGINE_INLINE i8x16 narrow_whole(i32x16 q, int8_t*) { return narrow_i8(q); }
ENGINE_INLINE u16x16 narrow_whole(i32x16 q, int16_t*) { return narrow_u16(bit_cast<u32x16>(q)); }

// The same as whole numbers, x times kMostStored / absmax, to the nearest even, and the scale that goes with them, absmax / kMostStored.
// Where something is not finite, that is infinite or NaN, and all numbers are 0.
template <class T>
ENGINE_INLINE void convert_whole(const float* x, int64_t dim, T* y, float* scale) {
  constexpr float kMost = kMostStored<T>;
  f32x16 most{}, bad{};
  int64_t i = 0;
  const auto see = [&](f32x16 v) __attribute__((always_inline)) {
    most = max(abs(v), most);
    bad += v * 0.0f;
  };
  for (; i + 16 <= dim; i += 16) see(load(x + i));
  if (i < dim) see(load_first(x + i, dim - i));
  const float top = reduce_max(most), broken = reduce_add(bad);
  const float inverse = broken == 0 ? inverse_step(top, kMost) : 0;
  *scale = top / kMost + broken;
  const auto whole = [&](f32x16 v) __attribute__((always_inline)) {
    const f32x16 q = v * inverse;
    return narrow_whole(round_i32(select(abs(q) < kMost + 0.5f, q, f32x16{})), y);
  };
  for (i = 0; i + 16 <= dim; i += 16) store(y + i, whole(load(x + i)));
  if (i == dim) return;
  const auto rest = whole(load_first(x + i, dim - i));
  std::memcpy(y + i, &rest, (dim - i) * sizeof(T));
}

template <>
ENGINE_INLINE void convert(const float* x, int64_t dim, int8_t* y, float* scale) {
  convert_whole(x, dim, y, scale);
}
template <>
ENGINE_INLINE void convert(const float* x, int64_t dim, int16_t* y, float* scale) {
  convert_whole(x, dim, y, scale);
}

// The end of the run of tokens from `token` on whose keys share a tile; of skipped tokens (negative slots) one by one.
inline int64_t run_end(const int32_t* slots, int64_t token, int64_t end, int64_t lanes) {
  int64_t next = token + 1;
  while (next < end && slots[next] == slots[next - 1] + 1 && slots[next] % lanes != 0 && slots[token] >= 0) ++next;
  return next;
}

// A thread's part of a step: tokens in whole runs and all heads; where threads would have very different numbers of tokens, or
// next to none, all of them and some of the heads.
struct KvShare {
  KvShare(const int32_t* slots, int64_t count, int64_t lanes, const Team& team)
      : by_tokens(are_even(slots, count, lanes, team)), team(team),
        tokens(by_tokens ? whole_runs(slots, count, lanes, team) : Range{0, count}) {}
  Range heads(int64_t count) const { return by_tokens ? Range{0, count} : share(count, team); }

  bool by_tokens;
  const Team& team;
  Range tokens;

 private:
  static Range whole_runs(const int32_t* slots, int64_t count, int64_t lanes, const Team& team) {
    Range tokens = share(count, team);
    const auto inside = [&](int64_t t) {
      return t > 0 && t < count && slots[t - 1] >= 0 && slots[t] == slots[t - 1] + 1 && slots[t] % lanes != 0;
    };
    while (inside(tokens.begin)) ++tokens.begin;
    while (inside(tokens.end)) ++tokens.end;
    return tokens;
  }

  // Of many tokens a run is a small part.
  static bool are_even(const int32_t* slots, int64_t count, int64_t lanes, Team team) {
    if (count < 2 * team.size) return false;
    if (count >= 8 * lanes * team.size) return true;
    for (team.index = 0; team.index < team.size; ++team.index) {
      const Range tokens = whole_runs(slots, count, lanes, team);
      if (4 * team.size * (tokens.end - tokens.begin) > 5 * count) return false;
    }
    return true;
  }
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
    using Unit = KeyUnit<T>;
    put_in_lanes(reinterpret_cast<const Unit*>(stored), count, dim * sizeof(T) / sizeof(Unit),
                 reinterpret_cast<Unit*>(keys));
  }

  // Their values, likewise.
  template <class T>
  void write_values(uint8_t* scratch, int64_t slot, int64_t head, int64_t count, const float* rows, int64_t row_stride,
                    T*) const {
    const int64_t block = slot / layout_.block, dim = layout_.dim;
    float* const scales = reinterpret_cast<float*>(states_[3]) + layout_.scale(block, head);
    T* const page = reinterpret_cast<T*>(states_[1]) + layout_.page(block, head);
    const int64_t first = slot % layout_.block, end = first + count;
    if (layout_.beside() == 1) {
      for (int64_t t = first; t < end; ++t, rows += row_stride) convert(rows, dim, page + layout_.value(t), scales + t);
      return;
    }
    if constexpr (kWholeNumbers<T>) {
      T* const stored = reinterpret_cast<T*>(scratch);
      for (int64_t t = first; t < end; rows += row_stride) {
        T* const target = page + layout_.value(t);
        convert(rows, dim, stored, scales + t);
        if (t % 2 == 0 && t + 1 < end) {
          convert(rows += row_stride, dim, stored + dim, scales + t + 1);
          put_beside(stored, dim, target);
          t += 2;
        } else {  // one by one: another thread may be writing the token beside it
          for (int64_t d = 0; d < dim; ++d) target[2 * d + t % 2] = stored[d];
          ++t;
        }
      }
    }
  }

 private:
  // Two rows of values where they lie together.
  template <class T>
  static void put_beside(const T* rows, int64_t dim, T* target) {
    using V = std::conditional_t<sizeof(T) == 1, u8x16, u16x16>;
    int64_t d = 0;
    for (; d + 16 <= dim; d += 16) {
      V pairs[2];
      zip(load_as<V>(rows + d), load_as<V>(rows + dim + d), pairs[0], pairs[1]);
      std::memcpy(target + 2 * d, pairs, sizeof(pairs));
    }
    for (; d < dim; ++d)
      for (int64_t i = 0; i < 2; ++i) target[2 * d + i] = rows[i * dim + d];
  }

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
