// Where attention finds what the cache holds of a head: tiles of keys, pages of values, scales.
#pragma once

#include <type_traits>

#include "attention_tile.h"
#include "kv_layout.h"

namespace engine_cpu {
namespace ENGINE_ISA {

// A head's part of the blocks of one chunk.
struct HeadBlocks {
  const int32_t* blocks;
  int64_t head;
};

class AttentionCache {
 public:
  explicit AttentionCache(const KernelArgs& args) : layout_(args) {
    layout_.find_states(args, states_);
    while (int64_t{1} << block_shift_ < layout_.block) ++block_shift_;
  }
  const KvLayout& layout() const { return layout_; }
  int32_t block_shift() const { return block_shift_; }

  template <class T>
  const T* key_page(int32_t block, int64_t head) const {
    return reinterpret_cast<const T*>(states_[0]) + layout_.page(block, head);
  }
  template <class T>
  const T* value_page(int32_t block, int64_t head) const {
    return reinterpret_cast<const T*>(states_[1]) + layout_.page(block, head);
  }

  // A token's value; of int8 that of its pair, where values lie in pairs.
  template <class T>
  const T* value(const HeadBlocks& of, int64_t token) const {
    return value_page<T>(block(of, token), of.head) + layout_.value(within(token));
  }

  // The block of the chunk's token, and the token within it.
  int32_t block(const HeadBlocks& of, int64_t token) const { return of.blocks[token >> block_shift_]; }
  int64_t within(int64_t token) const { return token & (layout_.block - 1); }

  // The keys of the 16 tokens from `token` on as a tile of 16 lanes: in place, or from rows, or put together from small
  // blocks up to `end`. In lanes of whole numbers lie two dimensions each.
  template <class T>
  const T* key_tile(const HeadBlocks& of, int32_t token, int32_t end, T* assembled) const {
    using Unit = KeyUnit<T>;
    const int64_t lanes = layout_.lanes, units = layout_.dim * sizeof(T) / sizeof(Unit);
    if (layout_.block >= 16) {
      const T* source = key_page<T>(block(of, token), of.head) + layout_.key(within(token));
      if (lanes == 16) return source;
      transpose_rows(reinterpret_cast<const Unit*>(source), units, reinterpret_cast<Unit*>(assembled));
      return assembled;
    }
    for (int64_t i = 0; i < 16 && token + i < end; i += lanes) {
      const T* source = key_page<T>(block(of, token + i), of.head) + layout_.key(within(token + i));
      for (int64_t u = 0; u < units; ++u)
        std::memcpy(reinterpret_cast<Unit*>(assembled) + u * 16 + i, reinterpret_cast<const Unit*>(source) + u * lanes,
                    lanes * sizeof(Unit));
    }
    return assembled;
  }

  // Where a token's scale is stored: of its key (which = 2) or of its value (3).
  const float* token_scale(int which, const HeadBlocks& of, int32_t token) const {
    return reinterpret_cast<const float*>(states_[which]) + layout_.scale(block(of, token), of.head) + within(token);
  }

  // The scales of the 16 tokens from `token` on, up to `end`.
  f32x16 token_scales(int which, const HeadBlocks& of, int32_t token, int32_t end) const {
    if (layout_.block >= 16) return load(token_scale(which, of, token));
    f32x16 result{};
    for (int32_t i = 0; i < 16 && token + i < end; ++i) result[i] = *token_scale(which, of, token + i);
    return result;
  }

 private:
  KvLayout layout_;
  uint8_t* states_[4] = {};
  int32_t block_shift_ = 0;
};

// What every row of a tile multiplies with: the scales of a chunk's keys and values, one a token of `all` and of the 16
// that its first and last lie in.
struct TokenScales {
  float keys[kChunk], values[kChunk];

  void take(const AttentionCache& cache, const HeadBlocks& of, Span all) {
    for (int32_t t = all.begin / 16 * 16; t < all.end; t += 16) {
      store(keys + t, cache.token_scales(2, of, t, all.end));
      store(values + t, cache.token_scales(3, of, t, all.end));
    }
  }
};

}  // namespace ENGINE_ISA
}  // namespace engine_cpu
