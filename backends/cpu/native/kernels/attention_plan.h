// How the attention of a step is cut into tasks. Every thread walks the same list; nothing here changes a result's
// bits.
#pragma once

#include "../step.h"
#include "attention_tile.h"

namespace engine_cpu {
namespace ENGINE_ISA {

// Rows [first_row, first_row + rows) of the (token, query head of the group) list of one sequence and KV head, and the
// chunks of the cache that any of them sees. What a tile is, and a block: tiles [first_tile, first_tile + tiles), or,
// where few rows see the sequence, one tile of each of `heads` KV heads.
struct TileTask {
  int32_t sequence;
  int32_t head, heads;
  int32_t first_row, rows;
  int32_t first_chunk, chunks;
  int32_t first_tile, tiles;
};

class AttentionPlan {
 public:
  // few_rows: up to so many of a sequence its KV heads are better taken together.
  AttentionPlan(int32_t sequences, const int32_t* starts, const int32_t* offsets, int32_t kv_heads, int32_t group,
                int32_t window, bool causal, int32_t tile_rows, int32_t few_rows, int32_t threads)
      : sequences_(sequences),
        starts_(starts),
        offsets_(offsets),
        kv_heads_(kv_heads),
        group_(group),
        window_(window),
        causal_(causal),
        tile_rows_(tile_rows),
        few_rows_(few_rows),
        threads_(threads) {
    int64_t total = 0;
    for (int32_t s = 0; s < sequences; ++s)
      for (int32_t i = 0; i < tiles(s); ++i) total += part(s, 0, i, 1).chunks;
    // Nothing takes longer than half a thread's share: blocks have fewer tiles then, and a tile that does by itself is
    // cut at its chunks. So at most 2 * threads tiles are.
    most_chunks_ = threads == 1 ? INT64_MAX : total * kv_heads / (2 * threads) + 1;
  }

  // How many tasks a walk has.
  int64_t tasks() const {
    int64_t all = 0;
    walk([&](const TileTask&, int64_t, int64_t tasks, int32_t) { all += tasks; });
    return all;
  }

  // Calls visit(block, first task, tasks, slot) for each block in order: one task, or the pieces of a block that is cut, and
  // then a slot >= 0 for their partial results. Of a sequence the last rows, which see most, come first.
  template <class Visit>
  ENGINE_INLINE void walk(Visit visit) const {
    int64_t task = 0;
    int32_t slot = 0;
    for (int32_t s = 0; s < sequences_; ++s) {
      const int32_t blocks = this->blocks(s);
      if (together(s)) {
        TileTask t = part(s, 0, 0, 1);
        t.heads = kv_heads_;
        const bool cut = int64_t{t.chunks} * t.heads > most_chunks_;
        const int64_t tasks = cut ? pieces(t) : 1;
        visit(t, task, tasks, cut ? slot : -1);
        task += tasks;
        slot += cut;
        continue;
      }
      for (int32_t head = 0; head < kv_heads_; ++head)
        for (int32_t i = blocks - 1; i >= 0; --i) {
          const int64_t count = tiles(s);
          const auto first = static_cast<int32_t>(count * i / blocks);
          const TileTask t = part(s, head, first, static_cast<int32_t>(count * (i + 1) / blocks) - first);
          const bool cut = t.tiles == 1 && t.chunks > most_chunks_;
          const int64_t tasks = cut ? pieces(t) : 1;
          visit(t, task, tasks, cut ? slot : -1);
          task += tasks;
          slot += cut;
        }
    }
  }

  // One tile of a block of one head.
  TileTask tile(const TileTask& block, int32_t index) const {
    return part(block.sequence, block.head, block.first_tile + index, 1);
  }

  // A piece of a block that is cut: one of its chunks. Where there are several heads the chunks that are left when every
  // thread has had as many are taken head by head.
  TileTask piece(TileTask block, int64_t index) const {
    const int64_t whole = block.heads == 1 ? block.chunks : block.chunks / threads_ * threads_, rest = index - whole;
    block.first_chunk += static_cast<int32_t>(rest < 0 ? index : whole + rest / block.heads);
    block.chunks = 1;
    if (rest < 0) return block;
    block.head += static_cast<int32_t>(rest % block.heads);
    block.heads = 1;
    return block;
  }

  // The tokens of sequence s that the row at `position` sees: [first_token(position), end_token(s, position)).
  int32_t first_token(int32_t position) const {
    return window_ > 0 && position >= window_ ? position + 1 - window_ : 0;
  }

  int32_t end_token(int32_t s, int32_t position) const {
    if (causal_) return position + 1;
    const int32_t context = starts_[s] + offsets_[s + 1] - offsets_[s];
    return window_ > 0 && window_ < context - position ? position + window_ : context;
  }

 private:
  int32_t rows(int32_t s) const { return (offsets_[s + 1] - offsets_[s]) * group_; }
  int32_t tiles(int32_t s) const { return (rows(s) + tile_rows_ - 1) / tile_rows_; }

  int64_t pieces(const TileTask& block) const {
    const int64_t rest = block.heads == 1 ? 0 : block.chunks % threads_;
    return block.chunks - rest + rest * block.heads;
  }

  // Whether all heads of a sequence are one block: its blocks of the cache are read in the order in which they lie then,
  // for which the threads need a chunk each, and more.
  bool together(int32_t s) const {
    if (rows(s) == 0 || rows(s) > few_rows_) return false;
    const TileTask t = part(s, 0, 0, 1);
    return int64_t{t.chunks} * kv_heads_ <= most_chunks_ || t.chunks >= 2 * threads_;
  }

  // So many blocks that none has more than kBlockTiles tiles, or more work than a tile that need not be cut.
  int32_t blocks(int32_t s) const {
    const int32_t count = tiles(s);
    if (count == 0) return 0;
    const int64_t fitting = most_chunks_ / part(s, 0, count - 1, 1).chunks;
    const int64_t most = fitting < 1 ? 1 : fitting < kBlockTiles ? fitting : kBlockTiles;
    return static_cast<int32_t>((count + most - 1) / most);
  }

  TileTask part(int32_t s, int32_t head, int32_t first_tile, int32_t tiles) const {
    const int64_t all = rows(s), count = this->tiles(s);
    TileTask t;
    t.sequence = s;
    t.head = head;
    t.heads = 1;
    t.first_tile = first_tile;
    t.tiles = tiles;
    t.first_row = static_cast<int32_t>(all * first_tile / count);
    t.rows = static_cast<int32_t>(all * (first_tile + tiles) / count) - t.first_row;
    t.first_chunk = first_token(starts_[s] + t.first_row / group_) / kChunk;
    const int32_t end = end_token(s, starts_[s] + (t.first_row + t.rows - 1) / group_);
    t.chunks = (end - 1) / kChunk + 1 - t.first_chunk;
    return t;
  }

  int32_t sequences_;
  const int32_t *starts_, *offsets_;
  int32_t kv_heads_, group_, window_;
  bool causal_;
  int32_t tile_rows_, few_rows_, threads_;
  int64_t most_chunks_;
};

}  // namespace ENGINE_ISA
}  // namespace engine_cpu
