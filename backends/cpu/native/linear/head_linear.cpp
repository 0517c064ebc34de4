// head_linear: each head of a row times a matrix of its own.
#include <algorithm>
#include <stdexcept>

#include "../isa.h"
#include "../work_split.h"
#include "product.h"
#include "quantize.h"

namespace engine_cpu {
namespace ENGINE_ISA {
namespace {

// inputs x f32 [T, heads * K]; outputs f32 [T, heads * N]. Weight: a matrix [N, K] a head. The input of a
// quantized or bf16 weight is packed here, head by head: a row as a whole would be cut at other places.
class HeadLinear final : public Kernel {
 public:
  explicit HeadLinear(const KernelArgs& args)
      : x_(args.inputs.at(0)), y_(args.outputs.at(0)), weight_(args.weights.at(0)), ops_(&family_ops(*weight_)),
        most_rows_(std::min<int64_t>(64, block_rows(ops_->activation, weight_->depth))) {
    if (ops_->activation == Activation::q8g32 && weight_->depth % kGroup != 0)
      throw std::invalid_argument("q8g32 needs a depth that is a multiple of 32.");
  }

  // Of the product, then where its rows' results go, and the rows as it reads them.
  size_t scratch_bytes() const override {
    return packed_at() + (packs() ? most_rows_ * row_bytes(ops_->activation, weight_->depth) : 0);
  }

  // A task is a head and a block of tokens, and packs their input once for all columns; where there are few of these, a
  // share of the columns, too.
  void run(const Frame& frame, const Team& team, int) override {
    const int64_t tokens = frame.dims.T, heads = weight_->count, strips = strips_of(weight_->columns);
    if (tokens == 0) return;
    const int64_t blocks = (tokens + most_rows_ - 1) / most_rows_;
    const int64_t cuts = std::min(strips, (4 * team.size + heads * blocks - 1) / (heads * blocks));
    share_tasks(heads * blocks * cuts, team, [&](int64_t task) {
      const int64_t head = task / cuts % heads, block = task / cuts / heads, cut = task % cuts;
      const int64_t first = tokens * block / blocks;
      multiply(frame, head, first, tokens * (block + 1) / blocks - first, strips * cut / cuts, strips * (cut + 1) / cuts,
               team);
    });
  }

 private:
  bool packs() const { return ops_->activation != Activation::f32; }
  size_t y_rows_at() const { return (Scratch::bytes(weight_->depth) + 63) / 64 * 64; }
  size_t packed_at() const { return y_rows_at() + (most_rows_ * sizeof(int32_t) + 63) / 64 * 64; }

  void multiply(const Frame& frame, int64_t head, int64_t first, int64_t tokens, int64_t strip0, int64_t strip1,
                const Team& team) {
    const int64_t depth = weight_->depth, heads = weight_->count;
    auto* y_rows = reinterpret_cast<int32_t*>(team.scratch + y_rows_at());
    for (int64_t i = 0; i < tokens; ++i) y_rows[i] = static_cast<int32_t>((first + i) * heads + head);
    Product product{};
    product.ops = ops_;
    product.matrix = weight_->data + head * strips_of(weight_->columns) * ops_->strip_bytes(depth);
    product.columns = weight_->columns;
    product.depth = depth;
    product.y = output<float>(frame, y_);
    product.y_rows = y_rows;
    const float* x = input<float>(frame, x_) + (first * heads + head) * depth;
    if (packs()) {
      uint8_t* packed = team.scratch + packed_at();
      product.x = packed;
      product.x_bytes = row_bytes(ops_->activation, depth);
      for (int64_t i = 0; i < tokens; ++i, x += heads * depth, packed += product.x_bytes) {
        if (ops_->activation == Activation::bf16)
          round_row(x, depth, packed);
        else
          quantize_row(x, depth, ops_->span, packed);
      }
    } else {
      product.x_bytes = heads * depth * 4;
      product.x = reinterpret_cast<const uint8_t*>(x);
    }
    const Scratch scratch(team.scratch, depth);
    ops_->prepare(product, 0, tokens, scratch);
    ops_->multiply(product, 0, tokens, strip0, strip1, scratch);
  }

  int x_, y_;
  std::shared_ptr<PackedWeight> weight_;
  const FamilyOps* ops_;
  int64_t most_rows_;
};

}  // namespace

void register_head_linear(Table& table) { table.kernels["head_linear"] = make_kernel<HeadLinear>; }

}  // namespace ENGINE_ISA
}  // namespace engine_cpu
