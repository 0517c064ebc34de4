// The sequences of a step, and the blocks that what they remember lies in.
#pragma once

#include <stdexcept>

#include "../step.h"

namespace engine_cpu {
namespace ENGINE_ISA {

// They go on from the block of the token before their first, and each token leaves its memory in its own block. The inputs are `first`, ...: seq_starts i32 [S],
// query_offsets i32 [S + 1], page_table i32 [S, P]. Numbers: block_size.
class Sequences {
 public:
  Sequences(const KernelArgs& args, size_t first)
      : starts_(args.inputs.at(first)),
        offsets_(args.inputs.at(first + 1)),
        table_(args.inputs.at(first + 2)),
        block_size_(args.integer("block_size")) {
    if (block_size_ < 1) throw std::invalid_argument("block_size must be at least 1.");
  }

  struct Span {
    int64_t first, count;  // tokens of the step
    int64_t start;         // those before them
    const int32_t* table;
  };

  Span of(const Frame& frame, int64_t sequence) const {
    const int32_t* const offsets = input<int32_t>(frame, offsets_) + sequence;
    return {offsets[0], offsets[1] - offsets[0], input<int32_t>(frame, starts_)[sequence],
            input<int32_t>(frame, table_) + sequence * frame.dims.P};
  }

  int64_t block(const Span& span, int64_t position) const { return span.table[position / block_size_]; }
  bool ends(int64_t position) const { return (position + 1) % block_size_ == 0; }

 private:
  int starts_, offsets_, table_;
  int64_t block_size_;
};

}  // namespace ENGINE_ISA
}  // namespace engine_cpu
