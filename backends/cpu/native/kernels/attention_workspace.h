// What a thread of attention works in.
#pragma once

#include <cstdint>
#include <type_traits>

#include "attention_cache.h"
#include "attention_tile.h"
#include "kv_layout.h"

namespace engine_cpu {
namespace ENGINE_ISA {

// The queries of a tile: f32 [dim][rows], or i32 [dim / 2][rows] with a scale a row where the cache has whole numbers, or bytes as
// the matrix unit takes them.
struct Queries {
  float* rows;
  float* scales;
};

// A thread's working memory, within its scratch. Each array begins at a cache line.
struct Workspace {
  Queries queries;     // of kBlockTiles tiles
  float* weights;      // [kBlockRows][kChunk]: scores, then probabilities
  TokenScales* token_scales;  // of a cache of whole numbers: those of the chunk in hand
  int16_t* rounded;    // [kBlockRows][kChunk]: those of whole numbers, and the scale of each row
  float* scales;
  float* chunk;        // [kBlockRows] partials of the chunk in hand
  float* state;        // [kBlockTiles * kMostTileRows] partials so far
  float* key_panel;    // a chunk's keys in f32, [kChunk / 16][dim][16], or in i16, [kChunk / 16][dim / 2][16][2], or
  float* value_panel;  // in bytes, and its values, as ValueChunk, ValuePairs or the matrix unit has them
  uint8_t* keys;       // tiles put together from blocks of fewer than 16 tokens, or from rows
  const void** pages;  // [kChunk] values of a chunk's blocks, one head after the other
  const void** ahead;  // [kChunk] what to prefetch beside each

  // width: dimensions of a value, padded to 16.
  Workspace(uint8_t* memory, const KvLayout& layout, int64_t width) { lay_out(memory, layout, width); }
  static size_t bytes(const KvLayout& layout, int64_t width) { return Workspace().lay_out(nullptr, layout, width); }

 private:
  Workspace() = default;

  size_t lay_out(uint8_t* memory, const KvLayout& layout, int64_t width) {
    size_t at = 0;
    const auto room = [&](auto*& array, int64_t bytes) {
      array = reinterpret_cast<std::remove_reference_t<decltype(array)>>(reinterpret_cast<uintptr_t>(memory) + at);
      at += (bytes + 63) / 64 * 64;
    };
    const int64_t partial = (width + 16) * sizeof(float), rows = kBlockTiles * kMostTileRows;
    room(weights, kBlockRows * kChunk * sizeof(float));
    room(token_scales, layout.whole() ? sizeof(TokenScales) : 0);
    room(rounded, kBlockRows * kChunk * sizeof(int16_t));
    room(scales, kBlockRows * sizeof(float));
    room(queries.scales, rows * sizeof(float));
    room(queries.rows, rows * layout.dim * sizeof(float));
    room(chunk, kBlockRows * partial);
    room(state, rows * partial);
    room(key_panel, kChunk * layout.dim * sizeof(float));
    room(value_panel, kChunk * width * sizeof(float));
    room(keys, layout.lanes < 16 ? kKeyTiles<1> * layout.dim * 16 * sizeof(float) : 0);
    room(pages, kChunk * sizeof(void*));
    room(ahead, kChunk * sizeof(void*));
    return at;
  }
};

}  // namespace ENGINE_ISA
}  // namespace engine_cpu
