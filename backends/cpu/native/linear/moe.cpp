// moe_route, moe_linear, moe_combine: mixtures of experts, rows grouped by expert so that each expert is read once.
#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <vector>

#include "../isa.h"
#include "../work_split.h"
#include "product.h"
#include "q8g32.h"

namespace engine_cpu {
namespace ENGINE_ISA {
namespace {

// inputs logits f32 [T, E]; outputs ids i32 [T, k], weights f32 [T, k], by descending logit, the lower id on ties.
// Weights: a correction bias [E] and a scale an expert [E], each where the numbers bias and scaled (0) say so. Numbers beside
// these: experts, k; score (0: softmax over all experts, 1: sigmoid);
// renormalize (0, 1); scale (1); groups, groups_kept, group_best (1 each). With a bias or groups the choice is by score +
// bias, among the groups whose group_best best members sum highest. NaN logits are chosen last; softmax makes all weights
// of their token NaN.
class MoeRoute final : public Kernel {
 public:
  explicit MoeRoute(const KernelArgs& args)
      : logits_(args.inputs.at(0)), ids_(args.outputs.at(0)), weights_(args.outputs.at(1)), experts_(args.integer("experts")),
        k_(args.integer("k")), sigmoid_(args.integer("score") == 1), renormalize_(args.integer("renormalize") == 1),
        scale_(static_cast<float>(args.number_or("scale", 1))), groups_(static_cast<int64_t>(args.number_or("groups", 1))),
        groups_kept_(static_cast<int64_t>(args.number_or("groups_kept", 1))),
        group_best_(static_cast<int64_t>(args.number_or("group_best", 1))) {
    if (k_ < 1 || k_ > experts_) throw std::invalid_argument("moe_route needs 1 <= k <= experts.");
    if (groups_ < 1 || experts_ % groups_ != 0 || groups_kept_ < 1 || groups_kept_ > groups_ || group_best_ < 1 ||
        group_best_ > experts_ / groups_ || k_ > experts_ / groups_ * groups_kept_)
      throw std::invalid_argument("moe_route needs equal groups, of which k experts are left.");
    size_t given = 0;
    for (auto [name, weight] : {std::pair{"bias", &bias_}, std::pair{"scaled", &expert_scale_}}) {
      if (args.number_or(name, 0) == 0) continue;
      *weight = args.weights.at(given++);
      if ((*weight)->family != "plain" || (*weight)->columns != experts_)
        throw std::invalid_argument("a correction bias, or a scale, is a plain weight with one number an expert.");
    }
  }

  size_t scratch_bytes() const override {
    return (2 * experts_ + groups_) * sizeof(float) + std::max(group_best_, groups_kept_) * sizeof(int32_t);
  }
  bool serial(const Dims& dims) const override { return little(dims.T * experts_ * k_); }

  void run(const Frame& frame, const Team& team, int) override {
    const Range mine = share(frame.dims.T, team);
    for (int64_t t = mine.begin; t < mine.end; ++t)
      route(input<float>(frame, logits_) + t * experts_, reinterpret_cast<float*>(team.scratch), output<int32_t>(frame, ids_) + t * k_,
            output<float>(frame, weights_) + t * k_);
  }

 private:
  void route(const float* logits, float* scores, int32_t* ids, float* weights) const {
    float most = -std::numeric_limits<float>::infinity();
    for (int64_t e = 0; e < experts_; ++e) most = logits[e] > most ? logits[e] : most;
    float sum = 0;
    for (int64_t e = 0; e < experts_; ++e) {
      scores[e] = sigmoid_ ? 1.0f / (1.0f + std::exp(-logits[e])) : std::exp(logits[e] - most);
      sum += scores[e];
    }
    if (!sigmoid_)
      for (int64_t e = 0; e < experts_; ++e) scores[e] /= sum;
    const float* choice = logits;
    if (bias_ != nullptr || groups_ > 1) {
      float* sums = scores + experts_;
      for (int64_t e = 0; e < experts_; ++e) sums[e] = scores[e] + (bias_ == nullptr ? 0.0f : bias_->f32()[e]);
      if (groups_ > 1) keep_groups(sums, sums + experts_);
      choice = sums;
    }
    float chosen = 0;
    for (int64_t c = 0; c < k_; ++c) {
      ids[c] = best(choice, experts_, ids, c);
      weights[c] = scores[ids[c]];
      chosen += weights[c];
    }
    for (int64_t c = 0; c < k_; ++c) {
      const float own = expert_scale_ == nullptr ? 1.0f : expert_scale_->f32()[ids[c]];
      weights[c] = (renormalize_ ? weights[c] / chosen : weights[c]) * own * scale_;
    }
  }

  // Minus infinity for the experts of all groups but the best. Scratch: a float a group, then the ids in hand.
  void keep_groups(float* choice, float* totals) const {
    const int64_t size = experts_ / groups_;
    auto* ids = reinterpret_cast<int32_t*>(totals + groups_);
    for (int64_t g = 0; g < groups_; ++g) {
      totals[g] = 0;
      for (int64_t c = 0; c < group_best_; ++c) {
        ids[c] = best(choice + g * size, size, ids, c);
        totals[g] += choice[g * size + ids[c]];
      }
    }
    for (int64_t c = 0; c < groups_kept_; ++c) ids[c] = best(totals, groups_, ids, c);
    for (int64_t g = 0; g < groups_; ++g)
      if (std::find(ids, ids + groups_kept_, g) == ids + groups_kept_)
        std::fill_n(choice + g * size, size, -std::numeric_limits<float>::infinity());
  }

  // The place of the highest of `count` values that is not among the first `taken` ids.
  static int32_t best(const float* values, int64_t count, const int32_t* ids, int64_t taken) {
    int32_t winner = -1;
    for (int32_t e = 0; e < count; ++e) {
      bool free = true;
      for (int64_t c = 0; c < taken; ++c) free = free && ids[c] != e;
      const bool better = winner < 0 || values[e] > values[winner] || (std::isnan(values[winner]) && !std::isnan(values[e]));
      if (free && better) winner = e;
    }
    return winner;
  }

  int logits_, ids_, weights_;
  int64_t experts_, k_;
  bool sigmoid_, renormalize_;
  float scale_;
  int64_t groups_, groups_kept_, group_best_;
  std::shared_ptr<PackedWeight> bias_, expert_scale_;
};

// inputs: x as q8g32, x as f32 or bf16 (each -1 where no weight's family reads it), ids i32 [T, k]; outputs y_i f32 [T, k, N_i];
// weights: one an output, with a matrix an expert, then "plain" biases [experts * N_i] of those that have one, in order.
// Numbers: k; per_choice (0: x is [T, K], shared by a token's choices; 1: x is [T, k, K]); bias: sum of 2^i over the outputs
// i with a bias (0 if absent). Rows whose id is no expert are left as they are.
class MoeLinear final : public Kernel {
 public:
  explicit MoeLinear(const KernelArgs& args)
      : packed_(args.inputs.at(0)), plain_(args.inputs.at(1)), ids_(args.inputs.at(2)), k_(args.integer("k")),
        per_choice_(args.integer("per_choice") == 1), count_(static_cast<int>(args.outputs.size())) {
    if (count_ < 1 || count_ > kMost) throw std::invalid_argument("moe_linear takes one to four outputs.");
    if (k_ < 1) throw std::invalid_argument("moe_linear needs k >= 1.");
    const auto biased = static_cast<uint64_t>(args.number_or("bias", 0));
    size_t bias = args.outputs.size();
    int64_t max_depth = 0;
    experts_ = args.weights.at(0)->count;
    for (int i = 0; i < count_; ++i) {
      weights_[i] = args.weights.at(i);
      outputs_[i] = args.outputs[i];
      ops_[i] = &family_ops(*weights_[i]);
      if (weights_[i]->count != experts_) throw std::invalid_argument("moe_linear's weights must hold equally many experts.");
      if (x_of(i) < 0) throw std::invalid_argument("moe_linear lacks the input (q8g32, f32 or bf16) that a weight's family reads.");
      max_depth = std::max(max_depth, weights_[i]->depth);
      if (!(biased >> i & 1)) continue;
      biases_[i] = args.weights.at(bias++);
      if (biases_[i]->family != "plain" || biases_[i]->columns != experts_ * weights_[i]->columns)
        throw std::invalid_argument("a bias of moe_linear is a plain weight with one number a column of each expert.");
    }
    const int64_t pairs = args.integer("max_tokens") * k_;
    max_depth_ = max_depth;
    for (int64_t i = 0; i < args.integer("threads"); ++i) orders_.emplace_back((experts_ + 1 + 2 * pairs) * sizeof(int32_t));
  }

  size_t scratch_bytes() const override { return Scratch::bytes(max_depth_); }

  void run(const Frame& frame, const Team& team, int) override {
    const int64_t pairs = frame.dims.T * k_;
    const Scratch scratch(team.scratch, max_depth_);
    int32_t* const starts = orders_[team.index].as<int32_t>();  // [experts + 1]
    int32_t* const y_rows = starts + experts_ + 1;              // pairs sorted by expert
    int32_t* const x_rows = y_rows + pairs;
    sort_pairs(input<int32_t>(frame, ids_), pairs, starts, y_rows, x_rows);
    Tasks mine(all_tasks(starts), team);
    for (int64_t task = mine.next(); task >= 0;) {  // once more from the first expert on where another has left some
      int64_t first = 0;
      for (int64_t e = 0; e < experts_; ++e) {
        const int64_t rows = starts[e + 1] - starts[e];
        for (int i = 0; i < count_; first += tasks(i, rows), ++i) {
          if (task < first || task >= first + tasks(i, rows)) continue;
          Product product = product_of(frame, i, e);
          product.x_rows = x_rows + starts[e];
          product.y_rows = y_rows + starts[e];
          multiply(product, rows, blocks(i, rows), first, task, mine, scratch);
        }
      }
    }
  }

 private:
  static constexpr int kMost = 4;

  // Output i of so many rows: blocks, and tasks, each of a strip and a block.
  int64_t blocks(int i, int64_t rows) const {
    const int64_t most = block_rows(ops_[i]->activation, weights_[i]->depth);
    return (rows + most - 1) / most;
  }
  int64_t tasks(int i, int64_t rows) const { return blocks(i, rows) * strips_of(weights_[i]->columns); }

  int64_t all_tasks(const int32_t* starts) const {
    int64_t all = 0;
    for (int64_t e = 0; e < experts_; ++e)
      for (int i = 0; i < count_; ++i) all += tasks(i, starts[e + 1] - starts[e]);
    return all;
  }

  // From `task` on, which becomes the next one, those of a product's tasks that are this thread's; its first is `first`.
  static void multiply(const Product& product, int64_t rows, int64_t blocks, int64_t first, int64_t& task, Tasks& mine,
                       const Scratch& scratch) {
    const int64_t strips = strips_of(product.columns);
    for (int64_t block = 0; block < blocks; ++block, first += strips) {
      if (task < first || task >= first + strips) continue;
      const int64_t row0 = rows * block / blocks;
      const int64_t count = rows * (block + 1) / blocks - row0;
      product.ops->prepare(product, row0, count, scratch);
      for (; task >= first && task < first + strips; task = mine.next())
        product.ops->multiply(product, row0, count, task - first, task - first + 1, scratch);
    }
  }

  int x_of(int i) const { return ops_[i]->activation == Activation::q8g32 ? packed_ : plain_; }

  Product product_of(const Frame& frame, int i, int64_t expert) const {
    const PackedWeight& weight = *weights_[i];
    Product product{};
    product.ops = ops_[i];
    product.columns = weight.columns;
    product.depth = weight.depth;
    product.matrix = weight.data + expert * strips_of(weight.columns) * ops_[i]->strip_bytes(weight.depth);
    product.x = frame.values[x_of(i)];
    product.x_bytes = row_bytes(ops_[i]->activation, weight.depth);
    product.y = output<float>(frame, outputs_[i]);
    if (biases_[i] != nullptr) product.bias = biases_[i]->f32() + expert * weight.columns;
    return product;
  }

  // Counting sort of (token, choice) pairs by expert, stable. Every thread does it for itself: cheaper than a barrier.
  void sort_pairs(const int32_t* ids, int64_t pairs, int32_t* starts, int32_t* y_rows, int32_t* x_rows) const {
    for (int64_t e = 0; e <= experts_; ++e) starts[e] = 0;
    for (int64_t p = 0; p < pairs; ++p)
      if (ids[p] >= 0 && ids[p] < experts_) ++starts[ids[p]];
    int32_t at = 0;
    for (int64_t e = 0; e <= experts_; ++e) {
      at += starts[e];
      starts[e] = at;  // the end of e; filling from the back makes it the start
    }
    for (int64_t p = pairs - 1; p >= 0; --p) {
      if (ids[p] < 0 || ids[p] >= experts_) continue;
      const int32_t place = --starts[ids[p]];
      y_rows[place] = static_cast<int32_t>(p);
      x_rows[place] = static_cast<int32_t>(per_choice_ ? p : p / k_);
    }
  }

  int packed_, plain_, ids_;
  int64_t k_;
  bool per_choice_;
  int count_;
  int64_t experts_ = 0;
  int32_t outputs_[kMost] = {};
  const FamilyOps* ops_[kMost] = {};
  std::shared_ptr<PackedWeight> weights_[kMost], biases_[kMost];
  int64_t max_depth_ = 0;
  std::vector<Buffer> orders_;
};

// inputs y f32 [T, k, N], weights f32 [T, k], residual f32 [T, N] (-1: none); outputs f32 [T, N]: the sum over a token's
// choices in order, then + residual. Numbers: k, width N.
class MoeCombine final : public Kernel {
 public:
  explicit MoeCombine(const KernelArgs& args)
      : y_(args.inputs.at(0)), weights_(args.inputs.at(1)), residual_(args.inputs.at(2)), out_(args.outputs.at(0)),
        k_(args.integer("k")), width_(args.integer("width")) {}

  bool serial(const Dims& dims) const override { return little(dims.T * k_ * width_); }

  void run(const Frame& frame, const Team& team, int) override {
    const auto* y = input<float>(frame, y_);
    const auto* weights = input<float>(frame, weights_);
    const auto* residual = residual_ < 0 ? nullptr : input<float>(frame, residual_);
    auto* out = output<float>(frame, out_);
    const Range mine = share(frame.dims.T, team);
    for (int64_t t = mine.begin; t < mine.end; ++t) {
      const float* const rows = y + t * k_ * width_;
      for (int64_t n = 0; n < width_; n += 16) {
        const int64_t lanes = std::min<int64_t>(16, width_ - n);
        f32x16 sum = {};
        for (int64_t c = 0; c < k_; ++c) sum += load_first(rows + c * width_ + n, lanes) * splat(weights[t * k_ + c]);
        if (residual != nullptr) sum = load_first(residual + t * width_ + n, lanes) + sum;
        store_first(out + t * width_ + n, sum, lanes);
      }
    }
  }

 private:
  int y_, weights_, residual_, out_;
  int64_t k_, width_;
};

}  // namespace

void register_moe(Table& table) {
  table.kernels["moe_route"] = make_kernel<MoeRoute>;
  table.kernels["moe_linear"] = make_kernel<MoeLinear>;
  table.kernels["moe_combine"] = make_kernel<MoeCombine>;
}

}  // namespace ENGINE_ISA
}  // namespace engine_cpu
