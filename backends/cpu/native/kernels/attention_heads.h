// Few rows of a sequence against a chunk of the cache, for all KV heads together: block after block, and in a block head
// after head, which is the order in which keys, and then values, lie in memory. So the hardware foresees what is read as
// long as blocks follow each other, where the pages of one head lie apart. Row by row it is the arithmetic of one head.
#pragma once

#include "../isa.h"
#include "attention_cache.h"
#include "attention_whole.h"
#include "attention_softmax.h"
#include "attention_workspace.h"

namespace engine_cpu {
namespace ENGINE_ISA {

// How many heads further, of so many bytes in a page, memory is asked for: some 4 KiB. Zen 5 takes turns at reading and computing
// without (of some 80 GB/s of memory 46 came, with it 55); on Zen 4 it hid from the hardware in which order memory is read.
inline int64_t heads_ahead(int64_t heads, int64_t page_bytes) {
  static const bool asks = this_core() == Core::kZen5;
  return asks ? std::clamp<int64_t>(4096 / page_bytes, 1, heads) : 0;
}

// A head's part of one of a chunk's pages.
struct HeadPage {
  int32_t page;
  int64_t head;
};

// R rows of each head.
struct HeadsChunk {
  const AttentionCache& cache;
  const int32_t* blocks;  // the chunk's
  int64_t heads;
  const Span* spans;  // of the R rows, the same for all heads
  Span all, shared;   // as in ValueChunk
  int64_t ahead;      // at most `heads`

  int32_t first_page() const { return all.begin >> cache.block_shift(); }
  int32_t last_page() const { return (all.end - 1) >> cache.block_shift(); }

  // Tokens of a page, of those that any row sees.
  Span tokens(int32_t page) const { return within(all, page); }
  Span shared_tokens(int32_t page) const { return within(shared, page); }

  // Whether the next page lies elsewhere in memory.
  bool scattered(int32_t page) const { return page < last_page() && blocks[page + 1] != blocks[page] + 1; }

  // Whether memory is asked for while a head's part of a page is read: `ahead` heads further, in the page or the next one, or,
  // where that is 0, the head's part of a next page that lies elsewhere.
  bool asks(int32_t page) const { return ahead > 0 || scattered(page); }
  HeadPage asked(int32_t page, int64_t head) const {
    if (ahead == 0) return {page + 1, head};
    const int64_t to = head + ahead;
    return to < heads || page == last_page() ? HeadPage{page, to % heads} : HeadPage{page + 1, to - heads};
  }

 private:
  Span within(Span span, int32_t page) const {
    const int32_t shift = cache.block_shift();
    return {std::max(span.begin, page << shift), std::min(span.end, (page + 1) << shift)};
  }
};

// Scores of all heads' rows, [heads * R][kChunk]; queries(head) gives a head's, [.][R]. One tile after the other, since several
// hide from the hardware in which order memory is read.
template <int R, class T, class HeadQueries>
void heads_scores(const HeadsChunk& chunk, const Workspace& work, HeadQueries queries) {
  const AttentionCache& cache = chunk.cache;
  const KvLayout& layout = cache.layout();
  for (int32_t page = chunk.first_page(); page <= chunk.last_page(); ++page) {
    const Span tokens = chunk.tokens(page);
    const bool asks = chunk.asks(page);
    for (int64_t head = 0; head < chunk.heads; ++head) {
      const HeadPage asked = asks ? chunk.asked(page, head) : HeadPage{page, head};
      const T* const keys = cache.key_page<T>(chunk.blocks[page], head);
      const T* const next = cache.key_page<T>(chunk.blocks[asked.page], asked.head);
      for (int32_t t = tokens.begin / 16 * 16; t < tokens.end; t += 16) {
        const int64_t at = layout.key(cache.within(t));
        const T *const tile = keys + at, *const ahead = next + at;
        float* const scores = work.weights + head * R * kChunk + t;
        const auto score = [&](auto prefetch) __attribute__((always_inline)) {
          constexpr bool kAhead = decltype(prefetch)::value;
          if constexpr (kWholeNumbers<T>)
            tile_score_pairs<R, 1, R, kAhead>(reinterpret_cast<const int32_t*>(queries(head)), &tile, &ahead,
                                              layout.dim / 2, reinterpret_cast<int32_t*>(scores));
          else
            tile_scores<R, 1, R, kAhead>(queries(head), &tile, &ahead, layout.dim, scores);
        };
        if constexpr (kWholeNumbers<T>)
          for (int which : {2, 3}) __builtin_prefetch(cache.token_scale(which, {chunk.blocks, head}, t));
        asks ? score(std::true_type{}) : score(std::false_type{});
      }
    }
  }
}

// Asks for a head's part of the first value page, which the softmax does not need, but leaves memory idle.
template <class T>
ENGINE_INLINE void ask_for_values(const HeadsChunk& chunk, int64_t head) {
  if (chunk.ahead == 0) return;
  const T* const page = chunk.cache.value_page<T>(chunk.blocks[chunk.first_page()], head);
  const KvLayout& layout = chunk.cache.layout();
  for (int64_t i = 0; i < layout.block * layout.dim; i += kLineOf<T>) __builtin_prefetch(page + i, 0, 2);
}

// The value pages of all heads, and beside each what is asked for meanwhile.
template <class T>
void find_heads_pages(const HeadsChunk& chunk, const Workspace& work) {
  const int64_t pages = kChunk >> chunk.cache.block_shift();
  for (int32_t page = chunk.first_page(); page <= chunk.last_page(); ++page)
    for (int64_t head = 0; head < chunk.heads; ++head) {
      work.pages[head * pages + page] = chunk.cache.value_page<T>(chunk.blocks[page], head);
      if (chunk.asks(page)) {
        const HeadPage asked = chunk.asked(page, head);
        work.ahead[head * pages + page] = chunk.cache.value_page<T>(chunk.blocks[asked.page], asked.head);
      }
    }
}

// out[head * R + row][0 .. dim) = sum over the row's tokens of weight * value, or what of it is known after this page.
template <int R, ValuesIn kIn, class T>
void head_values(const HeadsChunk& chunk, const Workspace& work, int32_t page, int64_t head, int64_t dim, float* out,
                 int64_t out_stride) {
  constexpr int N = kVectors<R>;
  const int32_t shift = chunk.cache.block_shift();
  const auto pages = reinterpret_cast<const T* const*>(work.pages) + head * (kChunk >> shift);
  const auto ahead = reinterpret_cast<const T* const*>(work.ahead) + head * (kChunk >> shift);
  const bool onward = page > chunk.first_page();
  const int64_t row = head * R * kChunk;
  if constexpr (kWholeNumbers<T>) {
    const ValuePairs<T> values{pages, ahead, nullptr, shift, dim, work.rounded + row, work.scales + head * R,
                               chunk.tokens(page), onward, page == chunk.last_page()};
    all_value_pairs<R, N, kIn>(values, 0, out + head * R * out_stride, out_stride);
  } else {
    const ValueChunk<T> values{pages, ahead, nullptr, shift, chunk.cache.layout().dim, dim, work.weights + row,
                               chunk.spans, chunk.tokens(page), chunk.shared_tokens(page), onward};
    all_values<R, N, kIn>(values, 0, out + head * R * out_stride, out_stride);
  }
}

// The same for all pages and heads.
template <int R, class T>
void heads_values(const HeadsChunk& chunk, const Workspace& work, int64_t dim, float* out, int64_t out_stride) {
  find_heads_pages<T>(chunk, work);
  for (int32_t page = chunk.first_page(); page <= chunk.last_page(); ++page)
    for (int64_t head = 0; head < chunk.heads; ++head)
      if (chunk.asks(page))
        head_values<R, ValuesIn::kScattered, T>(chunk, work, page, head, dim, out, out_stride);
      else
        head_values<R, ValuesIn::kInOrder, T>(chunk, work, page, head, dim, out, out_stride);
}

}  // namespace ENGINE_ISA
}  // namespace engine_cpu
