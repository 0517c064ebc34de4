// How the attention of a step is cut into tasks. Every thread walks the same list; nothing here changes a result's
// bits.
#pragma once

#include "../step.h"
#include "attention_tile.h"

namespace engine_cpu {
namespace ENGINE_ISA {

// One row tile of one sequence and KV head: rows [first_row, first_row + rows) of its (token, query head of the group)
// list, and the chunks of the cache that any of them sees.
struct TileTask {
  int32_t sequence;
  int32_t head;
  int32_t first_row, rows;
  int32_t first_chunk, chunks;
};

class AttentionPlan {
 public:
  AttentionPlan(int32_t sequences, const int32_t* starts, const int32_t* offsets, int32_t kv_heads, int32_t group,
                int32_t window, int32_t threads)
      : sequences_(sequences), starts_(starts), offsets_(offsets), kv_heads_(kv_heads), group_(group), window_(window) {
    int64_t total = 0;
    for (int32_t s = 0; s < sequences; ++s)
      for (int32_t i = 0; i < tiles(s); ++i) total += tile(s, 0, i).chunks;
    // A tile longer than half a thread's share is cut at its chunks, so at most 2 * threads tiles are.
    most_chunks_ = threads == 1 ? INT64_MAX : total * kv_heads / (2 * threads) + 1;
  }

  // Calls visit(tile, first task, tasks, slot) for each tile in order: one task, or one a chunk and then a slot >= 0
  // for its partial results. Stops when visit returns false.
  template <class Visit>
  ENGINE_INLINE void walk(Visit visit) const {
    int64_t task = 0;
    int32_t slot = 0;
    for (int32_t s = 0; s < sequences_; ++s)
      for (int32_t head = 0; head < kv_heads_; ++head)
        for (int32_t i = 0; i < tiles(s); ++i) {
          const TileTask t = tile(s, head, i);
          const bool cut = t.chunks > most_chunks_;
          const int64_t tasks = cut ? t.chunks : 1;
          if (!visit(t, task, tasks, cut ? slot : -1)) return;
          task += tasks;
          slot += cut;
        }
  }

  // The tokens that the row at `position` sees: [first_token(position), position].
  int32_t first_token(int32_t position) const {
    return window_ > 0 && position >= window_ ? position + 1 - window_ : 0;
  }

 private:
  int32_t rows(int32_t s) const { return (offsets_[s + 1] - offsets_[s]) * group_; }
  int32_t tiles(int32_t s) const { return (rows(s) + kTileRows - 1) / kTileRows; }

  TileTask tile(int32_t s, int32_t head, int32_t index) const {
    const int64_t all = rows(s), count = tiles(s);
    TileTask t;
    t.sequence = s;
    t.head = head;
    t.first_row = static_cast<int32_t>(all * index / count);
    t.rows = static_cast<int32_t>(all * (index + 1) / count) - t.first_row;
    t.first_chunk = first_token(starts_[s] + t.first_row / group_) / kChunk;
    t.chunks = (starts_[s] + (t.first_row + t.rows - 1) / group_) / kChunk + 1 - t.first_chunk;
    return t;
  }

  int32_t sequences_;
  const int32_t *starts_, *offsets_;
  int32_t kv_heads_, group_, window_;
  int64_t most_chunks_;
};

}  // namespace ENGINE_ISA
}  // namespace engine_cpu
