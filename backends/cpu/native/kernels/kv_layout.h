// The KV layouts "cpu.lanes" and, of int8 and int16, "cpu.pairs": where a token's key and value lie in a layer's state tensors.
//
//   K [blocks][kv_heads][bs / L][D][L], L = min(16, bs): a tile of L tokens lies in the lanes of a vector
//   V [blocks][kv_heads][bs][D]
//
// In cpu.pairs two dimensions of a key lie together, and the values of two tokens, since products come in pairs:
//
//   K [blocks][kv_heads][bs / L][D / 2][L][2]
//   V [blocks][kv_heads][bs / P][D][P], P = min(2, bs)
//   scales f32 [blocks][kv_heads][bs], one a token and head: absmax / 127, or of int16 absmax / 8191
//
// A latent cache, whose values are the first dimensions of its keys, has K alone and L = 1: a token's key is a row.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <type_traits>

#include "../simd_storage.h"
#include "../step.h"

namespace engine_cpu {
namespace ENGINE_ISA {

enum class KvDtype { kF32 = 0, kF16 = 1, kBF16 = 2, kInt8 = 3, kInt16 = 4 };

// The greatest whole number that is stored. Of int16 it leaves room for what is multiplied with it (attention_whole.h).
template <class T>
constexpr int32_t kMostStored = std::is_same_v<T, int8_t> ? 127 : 8191;

template <class T>
constexpr bool kWholeNumbers = std::is_same_v<T, int8_t> || std::is_same_v<T, int16_t>;

// What takes numbers up to `largest` to whole ones up to `most`; next to nothing becomes nothing.
inline float inverse_step(float largest, float most) { return largest > 1e-30f ? most / largest : 0; }

// Two dimensions of a key that lie together, or one.
template <class T>
using KeyUnit = std::conditional_t<std::is_same_v<T, int8_t>, uint16_t, std::conditional_t<std::is_same_v<T, int16_t>, uint32_t, T>>;

struct KvLayout {
  explicit KvLayout(const KernelArgs& args)
      : heads(args.integer("kv_heads")),
        dim(args.integer("head_dim")),
        block(args.integer("block_size")),
        latent(args.number_or("latent", 0) != 0),
        lanes(latent ? 1 : block < 16 ? block : 16),
        dtype(static_cast<KvDtype>(args.integer("kv_dtype"))) {
    if (block < 1 || block > 256 || (block & (block - 1)) != 0)
      throw std::invalid_argument("block_size must be a power of two, at most 256.");
    if (whole() && dim % 2 != 0) throw std::invalid_argument("head_dim must be even for a cache of whole numbers.");
    const int64_t kind = args.integer("kv_dtype");
    if (kind < 0 || kind > 4)
      throw std::invalid_argument("kv_dtype is 0 (f32), 1 (f16), 2 (bf16), 3 (int8) or 4 (int16).");
    if (args.states.size() != (whole() ? 2u : 1u) * (latent ? 1 : 2))
      throw std::invalid_argument("the states are k and v, and k_scale and v_scale of whole numbers; without v's if latent.");
  }

  // k, v, k_scale, v_scale; of a latent cache those of v are k's.
  void find_states(const KernelArgs& args, uint8_t* (&states)[4]) const {
    for (size_t i = 0; i < args.states.size(); ++i) states[latent ? 2 * i : i] = args.states[i];
    if (latent) states[1] = states[0], states[3] = states[2];
  }

  // Whether whole numbers with a scale are stored, and up to which.
  bool whole() const { return dtype == KvDtype::kInt8 || dtype == KvDtype::kInt16; }
  int64_t most() const { return dtype == KvDtype::kInt8 ? kMostStored<int8_t> : kMostStored<int16_t>; }

  // How many tokens' values lie together.
  int64_t beside() const { return whole() && !latent && block > 1 ? 2 : 1; }

  // Element offsets of (block, head), of a token's first key element there, and of its value or the first of its pair.
  int64_t page(int64_t block_id, int64_t head) const { return (block_id * heads + head) * block * dim; }
  int64_t key(int64_t token) const {
    return token / lanes * lanes * dim + token % lanes * (whole() ? 2 : 1);
  }
  int64_t value(int64_t token) const { return token / beside() * beside() * dim; }
  int64_t scale(int64_t block_id, int64_t head) const { return (block_id * heads + head) * block; }

  int64_t heads, dim, block;
  bool latent;
  int64_t lanes;
  KvDtype dtype;
};

// Calls f with a null pointer of the storage type.
template <class F>
ENGINE_INLINE void with_kv_type(KvDtype dtype, F f) {
  switch (dtype) {
    case KvDtype::kF32:
      return f(static_cast<float*>(nullptr));
    case KvDtype::kF16:
      return f(static_cast<f16*>(nullptr));
    case KvDtype::kBF16:
      return f(static_cast<bf16*>(nullptr));
    case KvDtype::kInt8:
      return f(static_cast<int8_t*>(nullptr));
    case KvDtype::kInt16:
      return f(static_cast<int16_t*>(nullptr));
  }
}

}  // namespace ENGINE_ISA
}  // namespace engine_cpu
