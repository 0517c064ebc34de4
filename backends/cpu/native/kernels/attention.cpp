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
#include "attention_chunk.h"
#include "attention_heads.h"
#include "attention_plan.h"

namespace engine_cpu {
namespace ENGINE_ISA {
namespace {

// The tokens of R rows in a chunk, relative to it, of any of them, and of all.
template <int R>
struct RowSpans {
  Span of[R];
  Span all{kChunk, 0}, shared{0, kChunk};
};

// q f32 [T, heads * head_dim], seq_starts i32 [S], query_offsets i32 [S+1], page_table i32 [S, P] -> f32 like q, or
// [T, heads * v_head_dim] with a latent cache.
// States k, v (, k_scale, v_scale), this step's tokens written already; the query at position p sees the tokens 0..p
// (the last `window` of them), or without `causal` all of its sequence (those less than `window` away). Numbers: heads,
// kv_heads, head_dim, scale, block_size, kv_dtype, window (0: all), causal, softcap (0: none), latent (0, 1), v_head_dim
// (latent only: how many of a key's dimensions are the value). A first weight, if there is one, is f32 [heads]: a score
// beside those of a head's keys, which takes part in the softmax and brings no value (a sink).
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
        softcap_(static_cast<float>(args.number_or("softcap", 0))),
        scale_(static_cast<float>(args.number("scale")) * (softcap_ > 0 ? 1 : kPowers)),
        window_(static_cast<int32_t>(args.number_or("window", 0))),
        causal_(args.number_or("causal", 1) != 0),
        sinks_(args.weights.empty() ? nullptr : args.weights[0]),
        max_chunks_(args.integer("max_context") / kChunk + 1),
        matrix_(kMatrixUnit && layout_.whole() && suits_matrix(layout_.dim, v_dim_)),
        chunks_{cache_, layout_, v_dim_, width_, softcap_, WholeBounds(layout_), matrix_},
        few_rows_(few_rows()),
        threads_(args.integer("threads")) {
    if (group_ * layout_.heads != heads_) throw std::invalid_argument("heads must be a multiple of kv_heads.");
    if (v_dim_ < 1 || v_dim_ > layout_.dim) throw std::invalid_argument("v_head_dim is 1 to head_dim.");
    if (sinks_ != nullptr && (sinks_->family != "plain" || sinks_->columns != heads_))
      throw std::invalid_argument("sinks are a plain weight with one number a head.");
  }

  int phases() const override { return 2; }

  size_t scratch_bytes() const override { return Workspace::bytes(layout_, width_); }

  // Partials of the blocks that are cut, of which no more are than twice the threads.
  size_t shared_bytes() const override {
    return threads_ == 1 ? 0 : 2 * threads_ * max_chunks_ * kBlockRows * (width_ + 16) * sizeof(float);
  }

  void run(const Frame& frame, const Team& team, int phase) override {
    const AttentionPlan plan(frame.dims.S, input<int32_t>(frame, starts_), input<int32_t>(frame, offsets_),
                             static_cast<int32_t>(layout_.heads), static_cast<int32_t>(group_), window_, causal_,
                             matrix_ ? kMatrixRows : kTileRows, few_rows_, team.size);
    if (phase == 1) return merge_pieces(frame, team, plan);
    with_kv_type(layout_.dtype, [&](auto* type) { run_tasks(frame, team, plan, type); });
  }

 private:
  Partial partial(float* base, int64_t row) const;
  int32_t few_rows() const;
  float* stored(const Team& team, int32_t slot, int64_t chunk) const;
  int32_t position(const Frame& frame, const TileTask& task, int32_t row) const;
  Span span(const Frame& frame, const AttentionPlan& plan, const TileTask& task, int32_t row, int64_t chunk) const;
  int64_t row_index(const Frame& frame, const TileTask& task, int32_t row) const;
  void write_result(const Frame& frame, const TileTask& task, int32_t row, Partial sums) const;
  Queries queries(const Workspace& work, int32_t tile) const;
  void load_queries(const Frame& frame, const TileTask& task, bool widened, const Workspace& work,
                    const Queries& target) const;
  void load_heads_queries(const Frame& frame, const TileTask& block, const Workspace& work) const;
  TileTask head_of(const TileTask& block, int32_t index) const;
  int64_t head_stride(const TileTask& block) const;
  void merge_pieces(const Frame& frame, const Team& team, const AttentionPlan& plan) const;

  template <class T>
  void run_tasks(const Frame& frame, const Team& team, const AttentionPlan& plan, T*);
  template <class T>
  void run_piece(const Frame& frame, const AttentionPlan& plan, const TileTask& piece, const Workspace& work,
                 float* partials, T*) const;
  template <class T>
  void run_block(const Frame& frame, const AttentionPlan& plan, const TileTask& task, const Workspace& work,
                 const Following& next, T*) const;
  template <class T>
  void run_heads_block(const Frame& frame, const AttentionPlan& plan, const TileTask& task, const Workspace& work,
                       T*) const;
  bool widens(const TileTask& block) const;
  template <class T>
  void widen_chunk(const Frame& frame, const AttentionPlan& plan, const TileTask& block, int64_t chunk,
                   const Workspace& work, T*) const;
  template <class T>
  void run_tile(const Frame& frame, const AttentionPlan& plan, const TileTask& tile, int64_t chunk, bool widened,
                const Workspace& work, const Queries& queries, float* partials, const Following& next, T* type) const;
  Following following(const Frame& frame, const AttentionPlan& plan, const TileTask& task) const;
  void add_chunk(const Frame& frame, const AttentionPlan& plan, const TileTask& tile, int64_t chunk, float* source,
                 float* state) const;
  template <class T>
  void dispatch_heads(const Frame& frame, const AttentionPlan& plan, const TileTask& block, int64_t chunk,
                      const Workspace& work, float* partials, T*) const;
  template <int R>
  RowSpans<R> row_spans(const Frame& frame, const AttentionPlan& plan, const TileTask& tile, int64_t chunk) const;
  template <int R, bool kPanel, class T>
  void run_chunk(const Frame& frame, const AttentionPlan& plan, const TileTask& tile, int64_t chunk,
                 const Workspace& work, const Queries& queries, float* partials, const Following& next, T*) const;
  template <int R, class T>
  void run_heads(const Frame& frame, const AttentionPlan& plan, const TileTask& block, int64_t chunk,
                 const Workspace& work, float* partials, T*) const;
  const int32_t* chunk_blocks(const Frame& frame, int32_t sequence, int64_t chunk) const;

  int q_, starts_, offsets_, table_, out_;
  AttentionCache cache_;
  const KvLayout& layout_;
  int64_t heads_, group_, v_dim_, width_;
  float softcap_, scale_;  // scores without a cap are powers of two from the first
  int32_t window_;
  bool causal_;
  std::shared_ptr<PackedWeight> sinks_;
  int64_t max_chunks_;
  bool matrix_;  // what is widened goes through the matrix unit
  ChunkWork chunks_;
  int32_t few_rows_;
  int64_t threads_;
};

Partial Attention::partial(float* base, int64_t row) const { return partial_at(base, row, width_); }

// Up to so many rows of a sequence its KV heads are taken together: one or two, if the sums of all dimensions of a value fit
// in registers. Else values would not be read in one pass.
int32_t Attention::few_rows() const {
  if (layout_.heads < 2 || layout_.heads > kBlockTiles || layout_.lanes < 16) return 0;
  return 16 * kVectors<2> >= v_dim_ ? 2 : 16 * kVectors<1> >= v_dim_ ? 1 : 0;
}

float* Attention::stored(const Team& team, int32_t slot, int64_t chunk) const {
  return reinterpret_cast<float*>(team.shared) + (slot * max_chunks_ + chunk) * kBlockRows * (width_ + 16);
}

int32_t Attention::position(const Frame& frame, const TileTask& task, int32_t row) const {
  return input<int32_t>(frame, starts_)[task.sequence] + (task.first_row + row) / static_cast<int32_t>(group_);
}

// The row's tokens in the chunk, relative to it; empty if begin >= end.
Span Attention::span(const Frame& frame, const AttentionPlan& plan, const TileTask& task, int32_t row,
                     int64_t chunk) const {
  const int32_t own = position(frame, task, row), origin = static_cast<int32_t>(chunk * kChunk);
  const int32_t begin = plan.first_token(own) - origin, end = plan.end_token(task.sequence, own) - origin;
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
    const float sink = sinks_->f32()[task.head * group_ + (task.first_row + row) % group_] * kPowers;
    const float m = sink > *sums.m ? sink : *sums.m;
    scale = exp2(splat(*sums.m - m));
    total = total * scale[0] + exp2(splat(sink - m))[0];
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
  if (!layout_.whole())
    return transpose_queries(rows, padded_rows(tile.rows), layout_.dim, scale_, target.rows);
  int16_t* room = reinterpret_cast<int16_t*>(work.key_panel);
  if (widened && matrix_)
    return lay_out_queries(rows, tile.rows, layout_.dim, scale_, chunks_.bounds.query, room,
                           reinterpret_cast<uint8_t*>(target.rows), target.scales);
  transpose_query_pairs(rows, padded_rows(tile.rows), layout_.dim, scale_, chunks_.bounds.query, room,
                        reinterpret_cast<int32_t*>(target.rows), target.scales);
}

void Attention::load_heads_queries(const Frame& frame, const TileTask& block, const Workspace& work) const {
  for (int32_t i = 0; i < block.heads; ++i) load_queries(frame, head_of(block, i), false, work, queries(work, i));
}

// One head of a block of several, and how far apart the partials of two lie.
TileTask Attention::head_of(const TileTask& block, int32_t index) const {
  TileTask tile = block;
  tile.head += index;
  tile.heads = 1;
  return tile;
}

int64_t Attention::head_stride(const TileTask& block) const { return padded_rows(block.rows) * (width_ + 16); }

template <class T>
void Attention::run_tasks(const Frame& frame, const Team& team, const AttentionPlan& plan, T* type) {
  const Workspace work(team.scratch, layout_, width_);
  Tasks mine(plan.tasks(), team);
  int64_t task = mine.next();
  while (task >= 0) {  // once more from the first block on where another has left some
    plan.walk([&](const TileTask& block, int64_t first, int64_t tasks, int32_t slot) {
      for (; task >= first && task < first + tasks; task = mine.next()) {
        if (slot >= 0) {
          const TileTask piece = plan.piece(block, task - first);
          float* const row = stored(team, slot, piece.first_chunk - block.first_chunk);
          run_piece(frame, plan, piece, work, row + (piece.head - block.head) * head_stride(block), type);
        } else if (block.heads > 1) {
          run_heads_block(frame, plan, block, work, type);
        } else {
          run_block(frame, plan, block, work, following(frame, plan, block), type);
        }
      }
    });
  }
}

// The partials of one chunk.
template <class T>
void Attention::run_piece(const Frame& frame, const AttentionPlan& plan, const TileTask& piece, const Workspace& work,
                          float* partials, T* type) const {
  if (piece.heads > 1) {
    load_heads_queries(frame, piece, work);
    return dispatch_heads(frame, plan, piece, piece.first_chunk, work, partials, type);
  }
  const bool widened = widens(piece);
  load_queries(frame, piece, widened, work, queries(work, 0));
  if (widened) widen_chunk(frame, plan, piece, piece.first_chunk, work, type);
  run_tile(frame, plan, piece, piece.first_chunk, widened, work, queries(work, 0), partials, {}, type);
}

// Of decodes, what this thread will come to next: it takes one KV head after the other.
Following Attention::following(const Frame& frame, const AttentionPlan& plan, const TileTask& task) const {
  const int64_t index = task.sequence * layout_.heads + task.head + 1, sequence = index / layout_.heads;
  if (task.rows > group_ || sequence >= frame.dims.S) return {};
  const int32_t start = input<int32_t>(frame, starts_)[sequence];
  const int64_t chunk = plan.first_token(start) / kChunk;
  const int64_t left = (start >> cache_.block_shift()) + 1 - (chunk * kChunk >> cache_.block_shift());
  return {chunk_blocks(frame, static_cast<int32_t>(sequence), chunk), left, index % layout_.heads};
}

template <class T>
void Attention::widen_chunk(const Frame& frame, const AttentionPlan& plan, const TileTask& block, int64_t chunk,
                            const Workspace& work, T* type) const {
  const Span first = span(frame, plan, block, 0, chunk), last = span(frame, plan, block, block.rows - 1, chunk);
  chunks_.widen({chunk_blocks(frame, block.sequence, chunk), block.head}, {first.begin, last.end}, work, type);
}

// Whether the tiles of a block share a chunk's keys and values in panels.
bool Attention::widens(const TileTask& block) const {
  if (layout_.lanes < 16) return block.tiles >= 2 || layout_.whole();  // keys are put in order first, and values in pairs
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
      if (partials != state) add_chunk(frame, plan, tile, chunk, partials, state);
    }
  }
  for (int32_t i = 0; i < block.tiles; ++i) {
    const TileTask tile = plan.tile(block, i);
    for (int32_t r = 0; r < tile.rows; ++r)
      write_result(frame, tile, r, partial(work.state + i * state_stride, r));
  }
}

// The same of a block of several heads, with a tile each.
template <class T>
void Attention::run_heads_block(const Frame& frame, const AttentionPlan& plan, const TileTask& block,
                                const Workspace& work, T* type) const {
  const int64_t stride = head_stride(block);
  load_heads_queries(frame, block, work);
  for (int32_t chunk = block.first_chunk; chunk < block.first_chunk + block.chunks; ++chunk) {
    const bool first = chunk == block.first_chunk;
    dispatch_heads(frame, plan, block, chunk, work, first ? work.state : work.chunk, type);
    for (int32_t i = 0; !first && i < block.heads; ++i)
      add_chunk(frame, plan, head_of(block, i), chunk, work.chunk + i * stride, work.state + i * stride);
  }
  for (int32_t i = 0; i < block.heads; ++i)
    for (int32_t r = 0; r < block.rows; ++r)
      write_result(frame, head_of(block, i), r, partial(work.state + i * stride, r));
}

// The chunk's partials after those of the chunks before; of a row that sees none of those they are the first.
void Attention::add_chunk(const Frame& frame, const AttentionPlan& plan, const TileTask& tile, int64_t chunk,
                          float* source, float* state) const {
  for (int32_t r = 0; r < tile.rows; ++r) {
    const Span tokens = span(frame, plan, tile, r, chunk);
    if (tokens.begin >= tokens.end) continue;
    if (plan.first_token(position(frame, tile, r)) / kChunk == chunk)
      assign(partial(state, r), partial(source, r), width_);
    else
      merge(partial(state, r), partial(source, r), width_);
  }
}

// The blocks that were cut: their chunks' partials, merged in order into the first.
void Attention::merge_pieces(const Frame& frame, const Team& team, const AttentionPlan& plan) const {
  plan.walk([&](const TileTask& block, int64_t, int64_t, int32_t slot) {
    if (slot < 0) return;
    for (int32_t row = team.index; row < block.heads * block.rows; row += team.size) {
      const int32_t head = row / block.rows, r = row % block.rows;
      Partial sums{};
      for (int64_t i = 0; i < block.chunks; ++i) {
        const Span tokens = span(frame, plan, block, r, block.first_chunk + i);
        if (tokens.begin >= tokens.end) continue;
        const Partial next = partial(stored(team, slot, i) + head * head_stride(block), r);
        if (sums.o != nullptr)
          merge(sums, next, width_);
        else
          sums = next;
      }
      write_result(frame, head_of(block, head), r, sums);
    }
  });
}

template <class T>
void Attention::run_tile(const Frame& frame, const AttentionPlan& plan, const TileTask& tile, int64_t chunk,
                         bool widened, const Workspace& work, const Queries& queries, float* partials,
                         const Following& next, T* type) const {
  using Panel = std::conditional_t<kWholeNumbers<T>, int16_t, float>;
  if constexpr (kMatrixUnit && kWholeNumbers<T>) {
    MatrixByte<T>* panel = nullptr;
    if (widened && matrix_)
      return run_chunk<kMatrixRows, true>(frame, plan, tile, chunk, work, queries, partials, next, panel);
  }
  with_rows(tile.rows, [&](auto rows) {
    constexpr int R = decltype(rows)::value;
    if (!widened)
      run_chunk<R, false>(frame, plan, tile, chunk, work, queries, partials, next, type);
    else if constexpr (R >= 6 || !std::is_same_v<Panel, float>)  // the tiles of a larger block have at least six rows
      run_chunk<R, true>(frame, plan, tile, chunk, work, queries, partials, next, static_cast<Panel*>(nullptr));
  });
}

template <class T>
void Attention::dispatch_heads(const Frame& frame, const AttentionPlan& plan, const TileTask& block, int64_t chunk,
                               const Workspace& work, float* partials, T* type) const {
  if (block.rows == 1)
    run_heads<1>(frame, plan, block, chunk, work, partials, type);
  else
    run_heads<2>(frame, plan, block, chunk, work, partials, type);
}

template <int R>
RowSpans<R> Attention::row_spans(const Frame& frame, const AttentionPlan& plan, const TileTask& tile,
                                 int64_t chunk) const {
  RowSpans<R> spans;
  for (int32_t r = 0; r < R; ++r) {
    spans.of[r] = span(frame, plan, tile, r < tile.rows ? r : tile.rows - 1, chunk);
    const Span& own = spans.of[r];
    spans.shared = {std::max(own.begin, spans.shared.begin), std::min(own.end, spans.shared.end)};
    if (own.begin >= own.end) continue;
    spans.all = {std::min(own.begin, spans.all.begin), std::max(own.end, spans.all.end)};
  }
  return spans;
}

// The partials of the tile's rows over one chunk, from the panels or from where keys and values are stored. R >=
// tile.rows; the rows beyond repeat the last.
template <int R, bool kPanel, class T>
void Attention::run_chunk(const Frame& frame, const AttentionPlan& plan, const TileTask& tile, int64_t chunk,
                          const Workspace& work, const Queries& queries, float* partials, const Following& next,
                          T* type) const {
  const HeadBlocks of{chunk_blocks(frame, tile.sequence, chunk), tile.head};
  const RowSpans<R> spans = row_spans<R>(frame, plan, tile, chunk);
  const Span all = spans.all;
  if (all.begin >= all.end) return;
  if constexpr (kIsMatrixByte<T>)
    matrix_scores(tile.rows, reinterpret_cast<const uint8_t*>(queries.rows), reinterpret_cast<const T*>(work.key_panel),
                  layout_.dim, all, reinterpret_cast<int32_t*>(work.weights));
  else
    chunks_.all_scores<R, kPanel>(of, all, work, queries, type);
  chunks_.softmax_rows<kPanel, T>(of, queries, tile.rows, 0, spans.of, all, work, partials);
  if constexpr (!kPanel) {
    const bool more = chunk + 1 < tile.first_chunk + tile.chunks;
    const int32_t end = plan.end_token(tile.sequence, position(frame, tile, tile.rows - 1));
    chunks_.find_pages(of, all, more ? end - chunk * kChunk : 0, more ? Following{} : next, work, type);
  }
  chunks_.sum_values<R, kPanel>(tile.rows, work, spans.of, all, spans.shared, partials, type);
}

// The same of all heads of a block, R rows each.
template <int R, class T>
void Attention::run_heads(const Frame& frame, const AttentionPlan& plan, const TileTask& block, int64_t chunk,
                          const Workspace& work, float* partials, T*) const {
  const RowSpans<R> spans = row_spans<R>(frame, plan, block, chunk);
  if (spans.all.begin >= spans.all.end) return;
  const int32_t* blocks = chunk_blocks(frame, block.sequence, chunk);
  const HeadsChunk heads{cache_, blocks, block.heads, spans.of, spans.all, spans.shared,
                         heads_ahead(block.heads, layout_.block * layout_.dim * sizeof(T))};
  heads_scores<R, T>(heads, work, [&](int64_t head) { return queries(work, head).rows; });
  for (int32_t head = 0; head < block.heads; ++head) {
    ask_for_values<T>(heads, head);
    chunks_.softmax_rows<false, T>({blocks, head}, queries(work, head), block.rows, head * R, spans.of, spans.all, work,
                            partials);
  }
  heads_values<R, T>(heads, work, v_dim_, partials, width_ + 16);
}

// The page table from the chunk's first block on.
const int32_t* Attention::chunk_blocks(const Frame& frame, int32_t sequence, int64_t chunk) const {
  const int64_t row = static_cast<int64_t>(sequence) * frame.dims.P;
  return input<int32_t>(frame, table_) + row + (chunk * kChunk >> cache_.block_shift());
}

}  // namespace

void register_attention(Table& table) { table.kernels["attention"] = make_kernel<Attention>; }

}  // namespace ENGINE_ISA
}  // namespace engine_cpu
