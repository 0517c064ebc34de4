// What is done with the keys and values that a head has in one chunk of the cache.
#pragma once

#include <algorithm>

#include "attention_cache.h"
#include "attention_whole.h"
#include "attention_matrix.h"
#include "attention_partial.h"
#include "attention_softmax.h"
#include "attention_tile.h"
#include "attention_workspace.h"

namespace engine_cpu {
namespace ENGINE_ISA {

// Where the task after a block begins: a head's keys in these blocks of its sequence.
struct Following {
  const int32_t* blocks;
  int64_t count, head;
};

struct ChunkWork {
  const AttentionCache& cache;
  const KvLayout& layout;
  int64_t v_dim, width;  // dimensions of a value; padded to 16
  float softcap;
  WholeBounds bounds;
  bool matrix;  // what is widened goes through the matrix unit

  // Keys that lie as their panel would, and are read where they lie.
  bool keys_in_place() const { return !matrix && layout.dtype == KvDtype::kInt16 && layout.lanes == 16; }

  template <class T>
  void widen(const HeadBlocks& of, Span all, const Workspace& work, T*) const;
  template <int R, bool kPanel, class T>
  void all_scores(const HeadBlocks& of, Span all, const Workspace& work, const Queries& queries, T*) const;
  template <bool kPanel, class T>
  void softmax_rows(const HeadBlocks& of, const Queries& queries, int32_t rows, int64_t first, const Span* spans,
                    Span all, const Workspace& work, float* partials) const;
  template <class T>
  void find_pages(const HeadBlocks& of, Span all, int64_t end, const Following& next, const Workspace& work, T*) const;
  template <int R, bool kPanel, class T>
  void sum_values(int32_t rows, const Workspace& work, const Span* spans, Span all, Span shared, float* partials,
                  T*) const;

 private:
  template <class T>
  void widen_values(const HeadBlocks& of, Span all, const Workspace& work) const;
};

// The panels of what any row of a block sees of a chunk.
template <class T>
void ChunkWork::widen(const HeadBlocks& of, Span all, const Workspace& work, T*) const {
  for (int32_t tile = all.begin / 16; tile * 16 < all.end && !keys_in_place(); ++tile) {
    const T* keys = cache.key_tile(of, tile * 16, all.end, reinterpret_cast<T*>(work.keys));
    const int64_t at = tile * 16 * layout.dim;
    if constexpr (kWholeNumbers<T>)
      if (matrix) {
        lay_out_keys(keys, cache.value<T>(of, tile * 16), layout.dim, reinterpret_cast<MatrixByte<T>*>(work.key_panel) + at);
        continue;
      }
    if constexpr (kWholeNumbers<T>)
      widen_key_pairs(keys, layout.dim / 2, reinterpret_cast<int16_t*>(work.key_panel) + at);
    else
      for (int64_t d = 0; d < layout.dim; ++d) store(work.key_panel + at + 16 * d, load(keys + 16 * d));
  }
  widen_values<T>(of, all, work);
  if constexpr (kWholeNumbers<T>) work.token_scales->take(cache, of, all);
}

template <class T>
void ChunkWork::widen_values(const HeadBlocks& of, Span all, const Workspace& work) const {
  if constexpr (kWholeNumbers<T>) {
    if (matrix) return lay_out_values(cache, of, v_dim, all, reinterpret_cast<MatrixByte<T>*>(work.value_panel));
    int16_t* panel = reinterpret_cast<int16_t*>(work.value_panel);
    for (int32_t t = all.begin / 2 * 2; t < all.end; t += 2) {
      if (layout.beside() == 2) {
        widen_value_pairs(cache.value<T>(of, t), v_dim, t / 2, panel);
      } else {  // a neighbour that is not seen has weight zero
        const int32_t even = std::max(t, all.begin), odd = std::min(t + 1, all.end - 1);
        widen_value_rows(cache.value<T>(of, even), cache.value<T>(of, odd), v_dim, t / 2, panel);
      }
    }
  } else {
    for (int32_t t = all.begin; t < all.end; ++t)
      widen_value<kVectors<kTileRows>>(cache.value<T>(of, t), v_dim, width, t, work.value_panel);
  }
}

template <int R, bool kPanel, class T>
void ChunkWork::all_scores(const HeadBlocks& of, Span all, const Workspace& work, const Queries& queries, T*) const {
  constexpr int N = kKeyTiles<R>;
  const int32_t first = all.begin / 16, last = (all.end - 1) / 16;
  const int64_t tile_size = 16 * layout.dim;
  for (int32_t tile = first / N * N; tile <= last; tile += N) {
    const T *tiles[N], *ahead[N];
    for (int32_t j = 0; j < N; ++j) {
      // Beyond the ends a tile that exists is read again; its scores are not used.
      const int32_t index = std::clamp(tile + j, first, last);
      if constexpr (kPanel && std::is_same_v<T, int16_t>)
        if (keys_in_place()) {
          tiles[j] = cache.key_tile<T>(of, index * 16, all.end, nullptr);
          continue;
        }
      if constexpr (kPanel) {
        tiles[j] = reinterpret_cast<const T*>(work.key_panel) + index * tile_size;
      } else {
        tiles[j] = cache.key_tile(of, index * 16, all.end, reinterpret_cast<T*>(work.keys) + j * tile_size);
        ahead[j] = cache.value<T>(of, index * 16);
        if constexpr (kWholeNumbers<T>)
          for (int which : {2, 3}) __builtin_prefetch(cache.token_scale(which, of, index * 16));
      }
    }
    float* scores = work.weights + tile * 16;
    if constexpr (kWholeNumbers<T>)
      tile_score_pairs<R, N, R, !kPanel>(reinterpret_cast<const int32_t*>(queries.rows), tiles, ahead, layout.dim / 2,
                                         reinterpret_cast<int32_t*>(scores));
    else
      tile_scores<R, N, R, !kPanel>(queries.rows, tiles, ahead, layout.dim, scores);
  }
}

// The softmax of a head's rows, of which the first is row `first` of the workspace and of the partials.
template <bool kPanel, class T>
void ChunkWork::softmax_rows(const HeadBlocks& of, const Queries& queries, int32_t rows, int64_t first,
                             const Span* spans, Span all, const Workspace& work, float* partials) const {
  float* const weights = work.weights + first * kChunk;
  if constexpr (kWholeNumbers<T>) {
    if constexpr (!kPanel) work.token_scales->take(cache, of, all);
    const auto row = [&](int32_t r) __attribute__((always_inline)) { return WholeRow{*work.token_scales, spans[r], weights + r * kChunk}; };
    RowLanes most, sum, top, together;
    for (int32_t r = 0; r < rows; ++r)
      most.of[r] = softcap > 0 ? row(r).template scale_scores<true>(softcap, queries.scales[r])
                               : row(r).template scale_scores<false>(0, queries.scales[r]);
    alignas(64) float greatest[kMostTileRows], sums[kMostTileRows], scale[kMostTileRows], inverse[kMostTileRows];
    store(greatest, most.maxima(rows));
    for (int32_t r = 0; r < rows; ++r) row(r).exponentiate(greatest[r], sum.of[r], top.of[r], together.of[r]);
    store(sums, sum.sums(rows));
    const f32x16 all_weights = together.sums(rows);
    const WholeScales whole(top.maxima(rows), all_weights, bounds.weights);
    store(scale, whole.scale + all_weights * 0.0f);  // NaN where one is not finite
    store(inverse, whole.inverse);
    for (int32_t r = 0; r < rows; ++r) {
      const Partial of_row = partial_at(partials, first + r, width);
      *of_row.m = greatest[r];
      *of_row.l = sums[r];
      work.scales[first + r] = scale[r];
      row(r).round(inverse[r], all, RoundedRow<T>(work.rounded, first + r));
    }
  } else {
    for (int32_t r = 0; r < rows; ++r)
      if (spans[r].begin < spans[r].end)
        softmax_row(softcap, spans[r], weights + r * kChunk, partial_at(partials, first + r, width));
  }
}

// The value pages of a chunk's blocks, and beside each the key page one chunk later, if the task goes on to it: `end`
// is where its tokens end, relative to this chunk. Else one of those that follow.
template <class T>
void ChunkWork::find_pages(const HeadBlocks& of, Span all, int64_t end, const Following& next, const Workspace& work,
                           T*) const {
  const int32_t shift = cache.block_shift();
  for (int32_t block = all.begin >> shift; block <= (all.end - 1) >> shift; ++block) {
    work.pages[block] = cache.value_page<T>(of.blocks[block], of.head);
    const int64_t later = block + (kChunk >> shift);
    work.ahead[block] = later << shift < end ? cache.key_page<T>(of.blocks[later], of.head)
                        : block < next.count ? cache.key_page<T>(next.blocks[block], next.head)
                                             : work.pages[block];
  }
}

template <int R, bool kPanel, class T>
void ChunkWork::sum_values(int32_t rows, const Workspace& work, const Span* spans, Span all, Span shared,
                           float* partials, T*) const {
  constexpr ValuesIn kIn = kPanel ? ValuesIn::kPanel : ValuesIn::kScattered;
  constexpr int N = kPanel ? kVectors<kTileRows> : kVectors<R>;
  const auto pages = reinterpret_cast<const T* const*>(work.pages), ahead = reinterpret_cast<const T* const*>(work.ahead);
  const int64_t dim = kPanel ? width : v_dim;
  const T* panel = reinterpret_cast<const T*>(work.value_panel);
  if constexpr (kIsMatrixByte<T>) {
    matrix_values(rows, reinterpret_cast<const uint8_t*>(work.rounded), work.scales, panel, dim, all, partials,
                  width + 16);
  } else if constexpr (kWholeNumbers<T>) {
    const ValuePairs<T> values{pages, ahead, panel, cache.block_shift(), dim, work.rounded, work.scales, all, false, true};
    all_value_pairs<R, N, kIn>(values, 0, partials, width + 16);
  } else {
    const ValueChunk<T> values{pages,       ahead, work.value_panel, cache.block_shift(), layout.dim, dim,
                               work.weights, spans, all,              shared,          false};
    all_values<R, N, kIn>(values, 0, partials, width + 16);
  }
}

}  // namespace ENGINE_ISA
}  // namespace engine_cpu
