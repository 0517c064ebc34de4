// What a thread of attention works in.
#pragma once

#include <vector>

#include "../buffer.h"
#include "attention_tile.h"
#include "kv_layout.h"

namespace engine_cpu {
namespace ENGINE_ISA {

// The queries of a tile: f32 [dim][rows], or i32 [dim / 2][rows] with a scale a row where the cache is int8, or bytes as
// the matrix unit takes them.
struct Queries {
  float* rows;
  float* scales;
};

// One thread's working memory.
struct Workspace {
  Queries queries;     // of kBlockTiles tiles
  float* weights;      // [kMostTileRows][kChunk]: scores, then probabilities
  int16_t* rounded;    // [kMostTileRows][kChunk]: those of int8 values, and the scale of each row
  float* scales;
  float* chunk;        // [kMostTileRows] partials of the chunk in hand
  float* state;        // [kBlockTiles * kMostTileRows] partials so far
  float* key_panel;    // a chunk's keys in f32, [kChunk / 16][dim][16], or in i16, [kChunk / 16][dim / 2][16][2], or
  float* value_panel;  // in bytes, and its values, as ValueChunk, ValuePairs or the matrix unit has them
  uint8_t* keys;       // tiles put together from blocks of fewer than 16 tokens, or from rows
  const void** pages;  // [kChunk] values of a chunk's blocks
  const void** ahead;  // [kChunk] what to prefetch beside each
};

// The working memory of each thread. Of the arrays all but pages and ahead begin at a cache line.
class Workspaces {
 public:
  Workspaces(int64_t threads, const KvLayout& layout, int64_t width) {
    const int64_t partials = kMostTileRows * (width + 16), queries = kBlockTiles * kMostTileRows * layout.dim;
    const int64_t scores = kMostTileRows * kChunk, panels = kChunk * (layout.dim + width);
    const int64_t rounded = scores / 2, scales = ((1 + kBlockTiles) * kMostTileRows + 15) / 16 * 16;
    const int64_t keys = layout.lanes < 16 ? kVectors<1> * layout.dim * 16 * 4 : 0;
    const int64_t floats = scores + rounded + scales + queries + (1 + kBlockTiles) * partials + panels;
    const int64_t stride = (floats * 4 + keys + 2 * kChunk * sizeof(void*) + 63) / 64 * 64;
    memory_ = Buffer(threads * stride);
    for (int64_t i = 0; i < threads; ++i) {
      Workspace work;
      work.weights = reinterpret_cast<float*>(memory_.data() + i * stride);
      work.rounded = reinterpret_cast<int16_t*>(work.weights + scores);
      work.scales = work.weights + scores + rounded;
      work.queries = {work.scales + scales, work.scales + kMostTileRows};
      work.chunk = work.queries.rows + queries;
      work.state = work.chunk + partials;
      work.key_panel = work.state + kBlockTiles * partials;
      work.value_panel = work.key_panel + kChunk * layout.dim;
      work.keys = reinterpret_cast<uint8_t*>(work.value_panel + kChunk * width);
      work.pages = reinterpret_cast<const void**>(work.keys + keys);
      work.ahead = work.pages + kChunk;
      workspaces_.push_back(work);
    }
  }

  const Workspace& operator[](int thread) const { return workspaces_[thread]; }

 private:
  Buffer memory_;
  std::vector<Workspace> workspaces_;
};

}  // namespace ENGINE_ISA
}  // namespace engine_cpu
