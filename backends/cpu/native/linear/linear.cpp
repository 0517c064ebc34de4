// linear: y_i = x W_i^T (+ bias_i) (+ residual) for one or more weights on the same rows.
#include <stdexcept>

#include "../isa.h"
#include "../kernels/greedy.h"
#include "../work_split.h"
#include "families/ops.h"
#include "q8g32.h"

namespace engine_cpu {
namespace ENGINE_ISA {

const FamilyOps& family_ops(const PackedWeight& weight) {
  switch (layout_of(weight).family) {
    case Family::f32: return kF32Ops;
    case Family::f16: return kF16Ops;
    case Family::bf16: return kBF16Ops;
    case Family::f8: return kF8Ops;
    case Family::nf4: return kNF4Ops;
    case Family::fp4: return kFP4Ops;
    case Family::w4: return kW4Ops;
    case Family::w5: return kW5Ops;
    case Family::w4m: return kW4MOps;
    case Family::w5m: return kW5MOps;
    case Family::w4z: return kW4ZOps;
    case Family::w4k: return kW4KOps;
    case Family::w5k: return kW5KOps;
    case Family::w2k: return kW2KOps;
    case Family::w3k: return kW3KOps;
    case Family::w6: return kW6Ops;
    case Family::w4nl: return kW4NLOps;
    case Family::w4e: return kW4EOps;
    case Family::w4e16: return kW4E16Ops;
    case Family::w4x: return kW4XOps;
    case Family::w4l: return kW4LOps;
    case Family::w4l16: return kW4L16Ops;
    case Family::w8: return kW8Ops;
    case Family::w8s: return kW8SOps;
    case Family::w8m: return kW8MOps;
  }
  __builtin_unreachable();
}

Product product_of(const PackedWeight& weight, bool packed, bool plain) {
  Product product{};
  product.ops = &family_ops(weight);
  if (weight.count != 1) throw std::invalid_argument("linear takes one matrix a weight; moe_linear takes many.");
  if (!product.reads_plain() && !packed) throw std::invalid_argument("a quantized weight needs its input as q8g32.");
  if (product.reads_plain() && !plain)
    throw std::invalid_argument("a dense weight needs its input as f32, or as bf16 where it is bf16 itself.");
  product.matrix = weight.data;
  product.columns = weight.columns;
  product.depth = weight.depth;
  product.x_bytes = row_bytes(product.ops->activation, weight.depth);
  return product;
}

namespace {

// Keeps the greatest of each row's logits.
class BestOfRows final : public SumsTaker {
 public:
  explicit BestOfRows(BestLogit* best) : best_(best) {}

  void take(const Product& product, int64_t row, int64_t rows, int64_t strip, const float* acc) const override {
    for (int64_t i = 0; i < rows; ++i)
      best_[row + i].take(acc + i * kStrip, product.valid_columns(strip), static_cast<int32_t>(strip * kStrip));
  }

 private:
  BestLogit* best_;
};

// inputs: x as q8g32, x as f32 or bf16 (each -1 where no weight's family reads it), residual [rows, N] (-1: none; one output only).
// outputs: y_i f32 [rows, N_i]. weights: one matrix an output, then "plain" biases [N_i] of those that have one, in order.
// Numbers: rows_dim; bias: sum of 2^i over the outputs i with a bias (0 if absent).
//
// A head that may keep its rows' best has one matrix, no bias and no residual; after its other inputs those of GreedyRows, and
// after y two outputs more: best BestLogit [threads, rows], what each thread has found; greedy i32 [1], 1 if best was written,
// and 0 if y was.
class Linear final : public Kernel {
 public:
  explicit Linear(const KernelArgs& args)
      : packed_(args.inputs.at(0)), plain_(args.inputs.at(1)), residual_(args.inputs.at(2)), rows_(args) {
    is_head_ = args.inputs.size() > kPlainInputs;
    const size_t count = args.outputs.size() - (is_head_ ? 2 : 0);
    if (count == 0 || count > kMost) throw std::invalid_argument("linear takes one to eight outputs.");
    if (residual_ >= 0 && count != 1) throw std::invalid_argument("linear adds a residual to one output only.");
    const auto biased = static_cast<uint64_t>(args.number_or("bias", 0));
    size_t bias = count;
    int64_t max_depth = 0;
    for (size_t i = 0; i < count; ++i) {
      weights_[i] = args.weights.at(i);
      outputs_[i] = args.outputs[i];
      parts_[i] = product_of(*weights_[i], packed_ >= 0, plain_ >= 0);
      max_depth = std::max(max_depth, parts_[i].depth);
      for (size_t j = 0; j < i; ++j)
        if (parts_[i].reads_plain() && parts_[j].reads_plain() && parts_[i].ops->activation != parts_[j].ops->activation)
          throw std::invalid_argument("the dense weights of one input are either all bf16 or none of them.");
      if (biased >> i & 1) {
        biases_[i] = args.weights.at(bias++);
        if (biases_[i]->family != "plain" || biases_[i]->columns != parts_[i].columns)
          throw std::invalid_argument("a bias is a plain weight with one number a column of its matrix.");
        parts_[i].bias = biases_[i]->f32();
      }
    }
    count_ = static_cast<int>(count);
    if (is_head_) {
      if (args.inputs.size() != kPlainInputs + GreedyRows::kInputs || count != 1 || biased != 0 || residual_ >= 0)
        throw std::invalid_argument("a head has one matrix, no bias, no residual, and all that tells greedy rows.");
      asked_ = GreedyRows(args.inputs.data() + kPlainInputs);
      best_ = args.outputs[1];
      greedy_ = args.outputs[2];
    }
    max_depth_ = max_depth;
  }

  size_t scratch_bytes() const override { return Scratch::bytes(max_depth_); }

  void run(const Frame& frame, const Team& team, int) override {
    const int64_t rows = rows_.count(frame.dims);
    Product products[kMost];
    for (int i = 0; i < count_; ++i) {
      products[i] = parts_[i];
      products[i].x = frame.values[parts_[i].reads_plain() ? plain_ : packed_];
      products[i].y = output<float>(frame, outputs_[i]);
      if (residual_ >= 0) products[i].residual = input<float>(frame, residual_);
    }
    BestLogit* const best = is_head_ ? decide(frame, team, rows) : nullptr;
    const BestOfRows taker(best);
    if (best != nullptr) products[0].taker = &taker;
    if (rows == 0) return;
    if (rows <= kFewRows)
      split(products, rows, team);
    else
      take(products, rows, team);
  }

 private:
  static constexpr int kMost = 8;
  static constexpr size_t kPlainInputs = 3;

  // Where this thread keeps the best of its rows; null where a row wants more.
  BestLogit* decide(const Frame& frame, const Team& team, int64_t rows) const {
    const bool greedy = asked_.all(frame);
    if (team.index == 0) *output<int32_t>(frame, greedy_) = greedy;
    if (!greedy) return nullptr;
    BestLogit* const best = output<BestLogit>(frame, best_) + team.index * rows;
    std::fill_n(best, rows, BestLogit{});
    return best;
  }

  // Few rows: the time is that of reading the weights, so each thread takes a contiguous share of their bytes.
  void split(const Product* products, int64_t rows, const Team& team) const {
    const Scratch scratch(team.scratch, max_depth_);
    int64_t total = 0;
    for (int i = 0; i < count_; ++i) total += strips_of(products[i].columns) * products[i].ops->strip_bytes(products[i].depth);
    int64_t begin = total * team.index / team.size;
    int64_t end = total * (team.index + 1) / team.size;
    for (int i = 0; i < count_; ++i) {
      const int64_t size = products[i].ops->strip_bytes(products[i].depth);
      const int64_t strips = strips_of(products[i].columns);
      const auto first_at = [&](int64_t byte) { return byte <= 0 ? 0 : std::min((byte + size - 1) / size, strips); };
      const int64_t strip0 = first_at(begin);
      const int64_t strip1 = first_at(end);
      if (strip0 < strip1) {
        products[i].ops->prepare(products[i], 0, rows, scratch);
        products[i].ops->multiply(products[i], 0, rows, strip0, strip1, scratch);
      }
      begin -= strips * size;
      end -= strips * size;
    }
  }

  // Many rows: tasks of a strip and a block of rows, block by block so that its activations stay near.
  void take(Product* products, int64_t rows, const Team& team) const {
    const Scratch scratch(team.scratch, max_depth_);
    int64_t most = kBlockRows;
    int64_t strips = 0;
    for (int i = 0; i < count_; ++i) {
      most = std::min(most, block_rows(products[i].ops->activation, products[i].depth));
      strips += strips_of(products[i].columns);
    }
    const int64_t blocks = (rows + most - 1) / most;
    int64_t prepared = -1;  // which block, for
    const FamilyOps* prepared_for = nullptr;
    share_tasks(blocks * strips, team, [&](int64_t task) {
      const int64_t block = task / strips;
      int64_t strip = task % strips;
      int i = 0;
      for (; strip >= strips_of(products[i].columns); ++i) strip -= strips_of(products[i].columns);
      const int64_t row0 = rows * block / blocks;
      const int64_t count = rows * (block + 1) / blocks - row0;
      if (prepared != block || prepared_for != products[i].ops) products[i].ops->prepare(products[i], row0, count, scratch);
      prepared = block;
      prepared_for = products[i].ops;
      products[i].ops->multiply(products[i], row0, count, strip, strip + 1, scratch);
    });
  }

  int packed_, plain_, residual_;
  RowsDim rows_;
  int count_ = 0;
  bool is_head_ = false;
  int32_t best_ = -1, greedy_ = -1;
  GreedyRows asked_;
  int32_t outputs_[kMost] = {};
  Product parts_[kMost] = {};
  std::shared_ptr<PackedWeight> weights_[kMost], biases_[kMost];
  int64_t max_depth_ = 0;
};

}  // namespace

void register_linear(Table& table) { table.kernels["linear"] = make_kernel<Linear>; }

}  // namespace ENGINE_ISA
}  // namespace engine_cpu
