// attention: queries against the cache, for prefill, decode and mixed steps alike.
//
// The cache is cut at multiples of kChunk tokens. For each row and chunk: m = max score, p = exp(score - m), l = sum p,
// o = sum p v, all from scratch; then the chunks of a row are merged in order (as in flash decoding). So a row's bits
// depend on its own tokens only, not on the tile, the thread or whether its chunks were computed apart.
#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "../isa.h"
#include "../simd.h"
#include "../simd_math.h"
#include "../work_split.h"
#include "attention_cache.h"
#include "attention_int8.h"
#include "attention_matrix.h"
#include "attention_partial.h"
#include "attention_plan.h"
#include "attention_softmax.h"
#include "attention_tile.h"
#include "attention_workspace.h"

namespace engine_cpu {
namespace ENGINE_ISA {
namespace {

// Where the task after a block begins: a head's keys in these blocks of its sequence.
struct Following {
  const int32_t* blocks;
  int64_t count, head;
};

// q f32 [T, heads * head_dim], seq_starts i32 [S], query_offsets i32 [S+1], page_table i32 [S, P] -> f32 like q, or
// [T, heads * v_head_dim] with a latent cache.
// States k, v (, k_scale, v_scale), this step's tokens written already; the query at position p sees the tokens 0..p
// (the last `window` of them). Numbers: heads, kv_heads, head_dim, scale, block_size, kv_dtype, window (0: all),
// softcap (0: none), latent (0, 1), v_head_dim (latent only: how many of a key's dimensions are the value). A first weight,
// if there is one, is f32 [heads]: a score beside those of a head's keys, which takes part in the softmax and brings no
// value (a sink).
class Attention final : public Kernel {
 public:
  explicit Attention(const KernelArgs& args)
      : q_(args.inputs.at(0)),
        starts_(args.inputs.at(1)),
        offsets_(args.inputs.at(2)),
        table_(args.inputs.at(3)),
        out_(args.outputs.at(0)),
        cache_(args),
        layout_(cache_.layout()),
        heads_(args.integer("heads")),
        group_(heads_ / layout_.heads),
        v_dim_(layout_.latent ? args.integer("v_head_dim") : layout_.dim),
        width_((v_dim_ + 15) / 16 * 16),
        scale_(static_cast<float>(args.number("scale"))),
        softcap_(static_cast<float>(args.number_or("softcap", 0))),
        window_(static_cast<int32_t>(args.number_or("window", 0))),
        sinks_(args.weights.empty() ? nullptr : args.weights[0]),
        max_chunks_(args.integer("max_context") / kChunk + 1),
        matrix_(kMatrixUnit && layout_.dtype == KvDtype::kInt8 && suits_matrix(layout_.dim, v_dim_)) {
    if (group_ * layout_.heads != heads_) throw std::invalid_argument("heads must be a multiple of kv_heads.");
    if (v_dim_ < 1 || v_dim_ > layout_.dim) throw std::invalid_argument("v_head_dim is 1 to head_dim.");
    if (sinks_ != nullptr && (sinks_->family != "plain" || sinks_->columns != heads_))
      throw std::invalid_argument("sinks are a plain weight with one number a head.");
    const int64_t threads = args.integer("threads");
    if (threads > 1) stored_ = Buffer(2 * threads * max_chunks_ * kMostTileRows * (width_ + 16) * sizeof(float));
  }

  int phases() const override { return 2; }

  size_t scratch_bytes() const override { return Workspace::bytes(layout_, width_); }

  void run(const Frame& frame, const Team& team, int phase) override {
    const AttentionPlan plan(frame.dims.S, input<int32_t>(frame, starts_), input<int32_t>(frame, offsets_),
                             static_cast<int32_t>(layout_.heads), static_cast<int32_t>(group_), window_,
                             matrix_ ? kMatrixRows : kTileRows, team.size);
    if (phase == 1) return merge_tiles(frame, team, plan);
    with_kv_type(layout_.dtype, [&](auto* type) { run_tasks(frame, team, plan, type); });
  }

 private:
  Partial partial(float* base, int64_t row) const;
  float* stored(int32_t slot, int64_t chunk) const;
  int32_t position(const Frame& frame, const TileTask& task, int32_t row) const;
  Span span(const Frame& frame, const AttentionPlan& plan, const TileTask& task, int32_t row, int64_t chunk) const;
  int64_t row_index(const Frame& frame, const TileTask& task, int32_t row) const;
  void write_result(const Frame& frame, const TileTask& task, int32_t row, Partial sums) const;
  Queries queries(const Workspace& work, int32_t tile) const;
  void load_queries(const Frame& frame, const TileTask& task, bool widened, const Workspace& work,
                    const Queries& target) const;
  void merge_tiles(const Frame& frame, const Team& team, const AttentionPlan& plan) const;

  template <class T>
  void run_tasks(const Frame& frame, const Team& team, const AttentionPlan& plan, T*);
  template <class T>
  void run_block(const Frame& frame, const AttentionPlan& plan, const TileTask& task, const Workspace& work,
                 const Following& next, T*) const;
  bool widens(const TileTask& block) const;
  template <class T>
  void run_tile(const Frame& frame, const AttentionPlan& plan, const TileTask& tile, int64_t chunk, bool widened,
                const Workspace& work, const Queries& queries, float* partials, const Following& next, T* type) const;
  Following following(const Frame& frame, const AttentionPlan& plan, const TileTask& task, int32_t threads) const;
  template <class T>
  void widen_chunk(const Frame& frame, const AttentionPlan& plan, const TileTask& task, int64_t chunk,
                   const Workspace& work, T*) const;
  void add_chunk(const Frame& frame, const AttentionPlan& plan, const TileTask& tile, int64_t chunk,
                 const Workspace& work, float* state) const;
  template <int R, bool kPanel, class T>
  void run_chunk(const Frame& frame, const AttentionPlan& plan, const TileTask& tile, int64_t chunk,
                 const Workspace& work, const Queries& queries, float* partials, const Following& next, T*) const;
  template <bool kPanel, class T>
  void dispatch(const Frame& frame, const AttentionPlan& plan, const TileTask& tile, int64_t chunk,
                const Workspace& work, const Queries& queries, float* partials, const Following& next, T* type) const;
  const int32_t* chunk_blocks(const Frame& frame, int32_t sequence, int64_t chunk) const;
  template <class T>
  void widen_values(const HeadBlocks& of, Span all, const Workspace& work) const;
  template <class T>
  void find_pages(const HeadBlocks& of, Span all, int64_t end, const Following& next, const Workspace& work, T*) const;
  template <int R, bool kPanel, class T>
  void all_scores(const HeadBlocks& of, Span all, const Workspace& work, const Queries& queries, T*) const;
  template <int R, bool kPanel, class T>
  void sum_values(int32_t rows, const Workspace& work, const Span* spans, Span all, Span shared, float* partials,
                  T*) const;

  int q_, starts_, offsets_, table_, out_;
  AttentionCache cache_;
  const KvLayout& layout_;
  int64_t heads_, group_, v_dim_, width_;
  float scale_, softcap_;
  int32_t window_;
  std::shared_ptr<PackedWeight> sinks_;
  int64_t max_chunks_;
  bool matrix_;  // what is widened goes through the matrix unit
  Buffer stored_;
};

Partial Attention::partial(float* base, int64_t row) const {
  float* p = base + row * (width_ + 16);
  return {p + width_, p + width_ + 1, p};
}

float* Attention::stored(int32_t slot, int64_t chunk) const {
  return stored_.as<float>() + (slot * max_chunks_ + chunk) * kMostTileRows * (width_ + 16);
}

int32_t Attention::position(const Frame& frame, const TileTask& task, int32_t row) const {
  return input<int32_t>(frame, starts_)[task.sequence] + (task.first_row + row) / static_cast<int32_t>(group_);
}

// The row's tokens in the chunk, relative to it; empty if begin >= end.
Span Attention::span(const Frame& frame, const AttentionPlan& plan, const TileTask& task, int32_t row,
                     int64_t chunk) const {
  const int32_t own = position(frame, task, row), origin = static_cast<int32_t>(chunk * kChunk);
  const int32_t begin = plan.first_token(own) - origin, end = own + 1 - origin;
  return {begin > 0 ? begin : 0, end < kChunk ? end : kChunk};
}

// Which (token, query head) row `row` of the tile is, in q and in the output.
int64_t Attention::row_index(const Frame& frame, const TileTask& task, int32_t row) const {
  const int64_t index = task.first_row + row;
  const int64_t token = input<int32_t>(frame, offsets_)[task.sequence] + index / group_;
  return token * heads_ + task.head * group_ + index % group_;
}

void Attention::write_result(const Frame& frame, const TileTask& task, int32_t row, Partial sums) const {
  float* out = output<float>(frame, out_) + row_index(frame, task, row) * v_dim_;
  f32x16 scale = splat(1.0f);
  float total = *sums.l;
  if (sinks_ != nullptr) {
    const float sink = sinks_->f32()[task.head * group_ + (task.first_row + row) % group_];
    const float m = sink > *sums.m ? sink : *sums.m;
    scale = exp(splat(*sums.m - m));
    total = total * scale[0] + exp(splat(sink - m))[0];
  }
  scale /= total;
  for (int64_t d = 0; d < v_dim_; d += 16)
    store_first(out + d, load(sums.o + d) * scale, v_dim_ - d < 16 ? v_dim_ - d : 16);
}

Queries Attention::queries(const Workspace& work, int32_t tile) const {
  return {work.queries.rows + tile * kMostTileRows * layout_.dim, work.queries.scales + tile * kMostTileRows};
}

// Rows beyond the tile's own repeat the last, or are anything for the matrix unit.
void Attention::load_queries(const Frame& frame, const TileTask& tile, bool widened, const Workspace& work,
                             const Queries& target) const {
  const float* rows[16];
  for (int32_t r = 0; r < 16; ++r)
    rows[r] = input<float>(frame, q_) + row_index(frame, tile, r < tile.rows ? r : tile.rows - 1) * layout_.dim;
  if (layout_.dtype != KvDtype::kInt8)
    return transpose_queries(rows, padded_rows(tile.rows), layout_.dim, scale_, target.rows);
  int16_t* room = reinterpret_cast<int16_t*>(work.key_panel);
  if (widened && matrix_)
    return lay_out_queries(rows, tile.rows, layout_.dim, scale_, room, reinterpret_cast<uint8_t*>(target.rows),
                           target.scales);
  transpose_query_pairs(rows, padded_rows(tile.rows), layout_.dim, scale_, room,
                        reinterpret_cast<int32_t*>(target.rows), target.scales);
}

template <class T>
void Attention::run_tasks(const Frame& frame, const Team& team, const AttentionPlan& plan, T* type) {
  const Workspace work(team.scratch, layout_, width_);
  int64_t mine = team.take();
  plan.walk([&](const TileTask& task, int64_t first, int64_t tasks, int32_t slot) {
    for (; mine < first + tasks; mine = team.take()) {
      if (slot < 0) {
        run_block(frame, plan, task, work, following(frame, plan, task, team.size), type);
      } else {
        const bool widened = widens(task);
        load_queries(frame, task, widened, work, queries(work, 0));
        TileTask piece = task;
        piece.first_chunk += static_cast<int32_t>(mine - first);
        piece.chunks = 1;
        if (widened) widen_chunk(frame, plan, piece, piece.first_chunk, work, type);
        run_tile(frame, plan, piece, piece.first_chunk, widened, work, queries(work, 0), stored(slot, mine - first), {},
                 type);
      }
    }
  });
}

// Of decodes, what this thread or another will come to soon: threads take one task after the other, a KV head each.
Following Attention::following(const Frame& frame, const AttentionPlan& plan, const TileTask& task,
                               int32_t threads) const {
  const int64_t index = task.sequence * layout_.heads + task.head + threads, sequence = index / layout_.heads;
  if (task.rows > group_ || sequence >= frame.dims.S) return {};
  const int32_t start = input<int32_t>(frame, starts_)[sequence];
  const int64_t chunk = plan.first_token(start) / kChunk;
  const int64_t left = (start >> cache_.block_shift()) + 1 - (chunk * kChunk >> cache_.block_shift());
  return {chunk_blocks(frame, static_cast<int32_t>(sequence), chunk), left, index % layout_.heads};
}

// Whether the tiles of a block share a chunk's keys and values in panels.
bool Attention::widens(const TileTask& block) const {
  const bool whole = layout_.dtype == KvDtype::kInt8;
  if (layout_.lanes < 16) return block.tiles >= 2 || whole;  // keys are put in order first, and int8 values, too
  return matrix_ ? block.rows >= kLeastMatrixRows : block.tiles >= kPanelTiles;
}

// All chunks of a block's tiles, merged as they come.
template <class T>
void Attention::run_block(const Frame& frame, const AttentionPlan& plan, const TileTask& block, const Workspace& work,
                          const Following& next, T* type) const {
  const int64_t state_stride = kMostTileRows * (width_ + 16);
  const bool widened = widens(block);
  for (int32_t i = 0; i < block.tiles; ++i) load_queries(frame, plan.tile(block, i), widened, work, queries(work, i));
  for (int64_t chunk = block.first_chunk; chunk < block.first_chunk + block.chunks; ++chunk) {
    if (widened) widen_chunk(frame, plan, block, chunk, work, type);
    for (int32_t i = 0; i < block.tiles; ++i) {
      const TileTask tile = plan.tile(block, i);
      float* state = work.state + i * state_stride;
      float* partials = chunk == tile.first_chunk ? state : work.chunk;
      run_tile(frame, plan, tile, chunk, widened, work, queries(work, i), partials, next, type);
      if (partials != state) add_chunk(frame, plan, tile, chunk, work, state);
    }
  }
  for (int32_t i = 0; i < block.tiles; ++i) {
    const TileTask tile = plan.tile(block, i);
    for (int32_t r = 0; r < tile.rows; ++r)
      write_result(frame, tile, r, partial(work.state + i * state_stride, r));
  }
}

// The chunk's partials after those of the chunks before; of a row that sees none of those they are the first.
void Attention::add_chunk(const Frame& frame, const AttentionPlan& plan, const TileTask& tile, int64_t chunk,
                          const Workspace& work, float* state) const {
  for (int32_t r = 0; r < tile.rows; ++r) {
    const Span tokens = span(frame, plan, tile, r, chunk);
    if (tokens.begin >= tokens.end) continue;
    if (plan.first_token(position(frame, tile, r)) / kChunk == chunk)
      assign(partial(state, r), partial(work.chunk, r), width_);
    else
      merge(partial(state, r), partial(work.chunk, r), width_);
  }
}

// The tiles that were cut: their chunks' partials, merged in order into the first.
void Attention::merge_tiles(const Frame& frame, const Team& team, const AttentionPlan& plan) const {
  plan.walk([&](const TileTask& task, int64_t, int64_t, int32_t slot) {
    if (slot < 0) return;
    for (int32_t r = team.index; r < task.rows; r += team.size) {
      Partial sums{};
      for (int64_t i = 0; i < task.chunks; ++i) {
        const Span tokens = span(frame, plan, task, r, task.first_chunk + i);
        if (tokens.begin >= tokens.end) continue;
        const Partial next = partial(stored(slot, i), r);
        if (sums.o != nullptr)
          merge(sums, next, width_);
        else
          sums = next;
      }
      write_result(frame, task, r, sums);
    }
  });
}

template <class T>
void Attention::run_tile(const Frame& frame, const AttentionPlan& plan, const TileTask& tile, int64_t chunk,
                         bool widened, const Workspace& work, const Queries& queries, float* partials,
                         const Following& next, T* type) const {
  using Panel = std::conditional_t<kWholeNumbers<T>, int16_t, float>;
  if constexpr (kMatrixUnit && std::is_same_v<T, int8_t>) {
    MatrixByte* panel = nullptr;
    if (widened && matrix_)
      return run_chunk<kMatrixRows, true>(frame, plan, tile, chunk, work, queries, partials, next, panel);
  }
  if (widened)
    dispatch<true>(frame, plan, tile, chunk, work, queries, partials, next, static_cast<Panel*>(nullptr));
  else
    dispatch<false>(frame, plan, tile, chunk, work, queries, partials, next, type);
}

template <bool kPanel, class T>
void Attention::dispatch(const Frame& frame, const AttentionPlan& plan, const TileTask& tile, int64_t chunk,
                         const Workspace& work, const Queries& queries, float* partials, const Following& next,
                         T* type) const {
  const int32_t rows = padded_rows(tile.rows);
  if constexpr (!std::is_same_v<T, float> || !kPanel) {  // the tiles of a larger block have at least six rows
    if (rows == 1) return run_chunk<1, kPanel>(frame, plan, tile, chunk, work, queries, partials, next, type);
    if (rows == 2) return run_chunk<2, kPanel>(frame, plan, tile, chunk, work, queries, partials, next, type);
    if (rows == 4) return run_chunk<4, kPanel>(frame, plan, tile, chunk, work, queries, partials, next, type);
  }
  if (rows == 6) return run_chunk<6, kPanel>(frame, plan, tile, chunk, work, queries, partials, next, type);
  if (rows == 8) return run_chunk<8, kPanel>(frame, plan, tile, chunk, work, queries, partials, next, type);
  return run_chunk<kTileRows, kPanel>(frame, plan, tile, chunk, work, queries, partials, next, type);
}

// The partials of the tile's rows over one chunk, from the panels or from where keys and values are stored. R >=
// tile.rows; the rows beyond repeat the last.
template <int R, bool kPanel, class T>
void Attention::run_chunk(const Frame& frame, const AttentionPlan& plan, const TileTask& tile, int64_t chunk,
                          const Workspace& work, const Queries& queries, float* partials, const Following& next,
                          T* type) const {
  const HeadBlocks of{chunk_blocks(frame, tile.sequence, chunk), tile.head};
  Span spans[R];
  Span all{kChunk, 0}, shared{0, kChunk};
  for (int32_t r = 0; r < R; ++r) {
    spans[r] = span(frame, plan, tile, r < tile.rows ? r : tile.rows - 1, chunk);
    shared = {std::max(spans[r].begin, shared.begin), std::min(spans[r].end, shared.end)};
    if (spans[r].begin >= spans[r].end) continue;
    all = {std::min(spans[r].begin, all.begin), std::max(spans[r].end, all.end)};
  }
  if (all.begin >= all.end) return;
  if constexpr (std::is_same_v<T, MatrixByte>)
    matrix_scores(tile.rows, reinterpret_cast<const uint8_t*>(queries.rows), reinterpret_cast<const T*>(work.key_panel),
                  layout_.dim, all, reinterpret_cast<int32_t*>(work.weights));
  else
    all_scores<R, kPanel>(of, all, work, queries, type);
  if constexpr (kWholeNumbers<T>) {
    const TokenScales scales(cache_, of, all);
    for (int32_t r = 0; r < tile.rows; ++r)
      work.scales[r] = softmax_row_int8(scales, softcap_, queries.scales[r], spans[r], all, work.weights + r * kChunk,
                                        RoundedRow<T>(work.rounded, r), partial(partials, r));
  } else {
    for (int32_t r = 0; r < tile.rows; ++r)
      if (spans[r].begin < spans[r].end)
        softmax_row(softcap_, spans[r], work.weights + r * kChunk, partial(partials, r));
  }
  if constexpr (!kPanel) {
    const bool more = chunk + 1 < tile.first_chunk + tile.chunks;
    find_pages(of, all, more ? position(frame, tile, tile.rows - 1) + 1 - chunk * kChunk : 0,
               more ? Following{} : next, work, type);
  }
  sum_values<R, kPanel>(tile.rows, work, spans, all, shared, partials, type);
}

template <int R, bool kPanel, class T>
void Attention::sum_values(int32_t rows, const Workspace& work, const Span* spans, Span all, Span shared,
                           float* partials, T*) const {
  constexpr int N = kPanel ? kVectors<kTileRows> : kVectors<R>;
  const auto pages = reinterpret_cast<const T* const*>(work.pages), ahead = reinterpret_cast<const T* const*>(work.ahead);
  const int64_t dim = kPanel ? width_ : v_dim_;
  const T* panel = reinterpret_cast<const T*>(work.value_panel);
  if constexpr (std::is_same_v<T, MatrixByte>) {
    matrix_values(rows, reinterpret_cast<const uint8_t*>(work.rounded), work.scales, panel, dim, all, partials,
                  width_ + 16);
  } else if constexpr (kWholeNumbers<T>) {
    const ValuePairs<T> values{pages, ahead, panel, cache_.block_shift(), dim, work.rounded, work.scales, all};
    all_value_pairs<R, N, kPanel>(values, 0, partials, width_ + 16);
  } else {
    const ValueChunk<T> values{pages,       ahead, work.value_panel, cache_.block_shift(), layout_.dim, dim,
                               work.weights, spans, all,              shared};
    all_values<R, N, kPanel>(values, 0, partials, width_ + 16);
  }
}

// The page table from the chunk's first block on.
const int32_t* Attention::chunk_blocks(const Frame& frame, int32_t sequence, int64_t chunk) const {
  const int64_t row = static_cast<int64_t>(sequence) * frame.dims.P;
  return input<int32_t>(frame, table_) + row + (chunk * kChunk >> cache_.block_shift());
}

// The panels of what any row of a block sees of a chunk.
template <class T>
void Attention::widen_chunk(const Frame& frame, const AttentionPlan& plan, const TileTask& block, int64_t chunk,
                            const Workspace& work, T*) const {
  const HeadBlocks of{chunk_blocks(frame, block.sequence, chunk), block.head};
  const Span first = span(frame, plan, block, 0, chunk), last = span(frame, plan, block, block.rows - 1, chunk);
  for (int32_t tile = first.begin / 16; tile * 16 < last.end; ++tile) {
    const T* keys = cache_.key_tile(of, tile * 16, last.end, reinterpret_cast<T*>(work.keys));
    const int64_t at = tile * 16 * layout_.dim;
    if constexpr (!kWholeNumbers<T>)
      for (int64_t d = 0; d < layout_.dim; ++d) store(work.key_panel + at + 16 * d, load(keys + 16 * d));
    else if (matrix_)
      lay_out_keys(keys, cache_.value<T>(of, tile * 16), layout_.dim, reinterpret_cast<MatrixByte*>(work.key_panel) + at);
    else
      widen_key_pairs(keys, layout_.dim / 2, reinterpret_cast<int16_t*>(work.key_panel) + at);
  }
  widen_values<T>(of, {first.begin, last.end}, work);
}

template <class T>
void Attention::widen_values(const HeadBlocks& of, Span all, const Workspace& work) const {
  if constexpr (kWholeNumbers<T>) {
    if (matrix_) return lay_out_values(cache_, of, v_dim_, all, reinterpret_cast<MatrixByte*>(work.value_panel));
    int16_t* panel = reinterpret_cast<int16_t*>(work.value_panel);
    for (int32_t t = all.begin / 2 * 2; t < all.end; t += 2) {
      if (layout_.beside() == 2) {
        widen_value_pairs(cache_.value<T>(of, t), v_dim_, t / 2, panel);
      } else {  // a neighbour that is not seen has weight zero
        const int32_t even = std::max(t, all.begin), odd = std::min(t + 1, all.end - 1);
        widen_value_rows(cache_.value<T>(of, even), cache_.value<T>(of, odd), v_dim_, t / 2, panel);
      }
    }
  } else {
    for (int32_t t = all.begin; t < all.end; ++t)
      widen_value<kVectors<kTileRows>>(cache_.value<T>(of, t), v_dim_, width_, t, work.value_panel);
  }
}

// The value pages of a chunk's blocks, and beside each the key page one chunk later, if the task goes on to it: `end`
// is where its tokens end, relative to this chunk. Else one of those that follow.
template <class T>
void Attention::find_pages(const HeadBlocks& of, Span all, int64_t end, const Following& next, const Workspace& work,
                           T*) const {
  const int32_t shift = cache_.block_shift();
  for (int32_t block = all.begin >> shift; block <= (all.end - 1) >> shift; ++block) {
    work.pages[block] = cache_.value_page<T>(of.blocks[block], of.head);
    const int64_t later = block + (kChunk >> shift);
    work.ahead[block] = later << shift < end ? cache_.key_page<T>(of.blocks[later], of.head)
                        : block < next.count ? cache_.key_page<T>(next.blocks[block], next.head)
                                             : work.pages[block];
  }
}

template <int R, bool kPanel, class T>
void Attention::all_scores(const HeadBlocks& of, Span all, const Workspace& work, const Queries& queries, T*) const {
  constexpr int N = kKeyTiles<R>;
  const int32_t first = all.begin / 16, last = (all.end - 1) / 16;
  const int64_t tile_size = 16 * layout_.dim;
  for (int32_t tile = first / N * N; tile <= last; tile += N) {
    const T *tiles[N], *ahead[N];
    for (int32_t j = 0; j < N; ++j) {
      // Beyond the ends a tile that exists is read again; its scores are not used.
      const int32_t index = std::clamp(tile + j, first, last);
      if constexpr (kPanel) {
        tiles[j] = reinterpret_cast<const T*>(work.key_panel) + index * tile_size;
      } else {
        tiles[j] = cache_.key_tile(of, index * 16, all.end, reinterpret_cast<T*>(work.keys) + j * tile_size);
        ahead[j] = cache_.value<T>(of, index * 16);
        if constexpr (kWholeNumbers<T>)
          for (int which : {2, 3}) __builtin_prefetch(cache_.token_scale(which, of, index * 16));
      }
    }
    float* scores = work.weights + tile * 16;
    if constexpr (kWholeNumbers<T>)
      tile_score_pairs<R, N, R, !kPanel>(reinterpret_cast<const int32_t*>(queries.rows), tiles, ahead, layout_.dim / 2,
                                         reinterpret_cast<int32_t*>(scores));
    else
      tile_scores<R, N, R, !kPanel>(queries.rows, tiles, ahead, layout_.dim, scores);
  }
}

}  // namespace

void register_attention(Table& table) { table.kernels["attention"] = make_kernel<Attention>; }

}  // namespace ENGINE_ISA
}  // namespace engine_cpu
