// gated_linear: activation(x G^T) * (x U^T), packed as q8g32. Of linear's two products only some strips are there at a time, so
// that they are written to and read from a core's own caches.
#include <stdexcept>

#include "../isa.h"
#include "../kernels/gating.h"
#include "../work_split.h"
#include "product.h"
#include "quantize.h"

namespace engine_cpu {
namespace ENGINE_ISA {
namespace {

constexpr int64_t kStripGroups = kStrip / kGroup;

// Packs the activation of both sums of rows as they become whole. Of rows row0.. the gate's are there, [rows][64].
class GatedRows final : public SumsTaker {
 public:
  GatedRows(const Gating& gating, const float* gates, int64_t row0, uint8_t* y) : gating_(gating), gates_(gates), row0_(row0), y_(y) {}

  // Two rows at a time where the strip is whole.
  void take(const Product& up, int64_t row, int64_t rows, int64_t strip, const float* ups) const override {
    const int64_t width = up.columns, bytes = q8g32_row_bytes(width), group = strip * kStripGroups;
    const float* const gates = gates_ + (row - row0_) * kStrip;
    uint8_t* const y = y_ + row * bytes;
    const bool whole = up.valid_columns(strip) == kStrip;
    gating_.with_up([&](auto op) {
      const auto value = [&](int64_t r, int i) { return op(load(gates + r * kStrip + 16 * i), load(ups + r * kStrip + 16 * i)); };
      int64_t r = 0;
      for (; whole && r + 2 <= rows; r += 2) {
        f32x16 x[8];
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) x[i] = value(r + i / 4, i % 4);
        const PackedGroups one(y + r * bytes, width, group), other(y + (r + 1) * bytes, width, group);
        quantize_two_pairs<false>(x, one, other, 0.0f);
      }
      for (; r < rows; ++r)
        for (int g = 0; g < (whole ? 2 : 1); ++g)
          PackedGroups(y + r * bytes, width, group).put(g, value(r, 2 * g), value(r, 2 * g + 1), 0.0f);
    });
  }

 private:
  const Gating& gating_;
  const float* gates_;
  int64_t row0_;
  uint8_t* y_;
};

// The same for spans of two strips, the first of which keeps its activation in place of its gates. `rows`: of a strip's gates.
class GatedSpans final : public SumsTaker {
 public:
  GatedSpans(const Gating& gating, float* gates, int64_t row0, int64_t rows, uint8_t* y)
      : gating_(gating), gates_(gates), row0_(row0), rows_(rows), y_(y) {}

  void take(const Product& up, int64_t row, int64_t rows, int64_t strip, const float* ups) const override {
    float* const gates = gates_ + (row - row0_) * kStrip;
    gating_.with_up([&](auto op) {
      const auto value = [&](int64_t at) { return op(load(gates + at), load(ups + at)); };
      if (strip % 2 == 0) {
        for (int64_t at = 0; at < rows * kStrip; at += 16) store(gates + at, value(at));
        return;
      }
      const float* const before = gates - rows_ * kStrip;
      const int64_t width = up.columns, bytes = q8g32_row_bytes(width), group = (strip - 1) * kStripGroups;
      uint8_t* y = y_ + row * bytes;
      for (int64_t at = 0; at < rows * kStrip; at += kStrip, y += bytes) {
        f32x16 x[8];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
          x[i] = load(before + at + 16 * i);
          x[4 + i] = value(at + 16 * i);
        }
        quantize_two_pairs<true>(x, PackedGroups(y, width, group), PackedGroups(y, width, group + kStripGroups), 0.0f);
      }
    });
  }

 private:
  const Gating& gating_;
  float* gates_;
  int64_t row0_, rows_;
  uint8_t* y_;
};

// inputs: x as q8g32, x as f32 or bf16 (-1: the one that the weights' family does not read). outputs: the plain result, which
// must be absent (-1), and the packed one [rows, N]. weights: G and U, of one family and shape, N a multiple of the span.
// Numbers: rows_dim, span, and those of Gating.
class GatedLinear final : public Kernel {
 public:
  explicit GatedLinear(const KernelArgs& args) : x_(args.inputs.at(0)), rows_(args), gating_(args) {
    if (args.weights.size() != 2 || args.weights[0]->family != args.weights[1]->family ||
        args.weights[0]->columns != args.weights[1]->columns || args.weights[0]->depth != args.weights[1]->depth)
      throw std::invalid_argument("gated_linear takes two weights of one family and shape.");
    if (args.outputs.size() != 2 || args.outputs[0] >= 0)
      throw std::invalid_argument("gated_linear packs its rows, and gives no others.");
    y_ = args.outputs[1];
    const int64_t span = span_of(args, args.weights[0]->columns);
    together_ = span > kStrip ? span / kStrip : 1;
    for (int i = 0; i < 2; ++i) {
      weights_[i] = args.weights[i];
      parts_[i] = product_of(*weights_[i], args.inputs[0] >= 0, args.inputs.at(1) >= 0);
    }
    if (parts_[0].reads_plain()) x_ = args.inputs[1];
  }

  size_t scratch_bytes() const override { return gates_at() + (kBlockRows + kTileSlack) * together_ * kStrip * sizeof(float); }

  void run(const Frame& frame, const Team& team, int) override {
    const int64_t rows = rows_.count(frame.dims);
    if (rows == 0) return;
    Pair pair{{parts_[0], parts_[1]}, team, Scratch(team.scratch, parts_[0].depth),
              reinterpret_cast<float*>(team.scratch + gates_at()), frame.values[y_]};
    for (Product& part : pair.parts) part.x = frame.values[x_];
    if (rows <= kFewRows)
      split(pair, rows);
    else
      take(pair, rows);
  }

 private:
  // The two products, and where one thread keeps what it has of them.
  struct Pair {
    Product parts[2];
    const Team& team;
    Scratch scratch;
    float* gates;  // [together_][kBlockRows + kTileSlack][64], of more strips if there are fewer rows
    uint8_t* y;
  };

  size_t gates_at() const { return (Scratch::bytes(parts_[0].depth) + 63) / 64 * 64; }

  // Few rows: the time is that of reading the weights, so each thread takes contiguous strips, as many gates as there is room
  // for and then the others.
  void split(Pair& pair, int64_t rows) const {
    const Range mine = share(strips_of(parts_[0].columns), pair.team, together_);
    if (mine.begin < mine.end) pair.parts[0].ops->prepare(pair.parts[0], 0, rows, pair.scratch);
    const int64_t most = kBlockRows / rows * together_;
    for (int64_t strip = mine.begin; strip < mine.end; strip += most)
      multiply(pair, 0, rows, strip, strip + most < mine.end ? strip + most : mine.end);
  }

  // Many rows: tasks of the strips of a span and a block of rows, block by block so that its activations stay near.
  void take(Pair& pair, int64_t rows) const {
    const int64_t most = block_rows(parts_[0].ops->activation, parts_[0].depth);
    const int64_t spans = strips_of(parts_[0].columns) / together_, blocks = (rows + most - 1) / most;
    int64_t prepared = -1;
    share_tasks(blocks * spans, pair.team, [&](int64_t task) {
      const int64_t block = task / spans, strip = task % spans * together_;
      const int64_t row0 = rows * block / blocks, count = rows * (block + 1) / blocks - row0;
      if (prepared != block) pair.parts[0].ops->prepare(pair.parts[0], row0, count, pair.scratch);
      prepared = block;
      multiply(pair, row0, count, strip, strip + together_);
    });
  }

  // The gate's sums go where they stay, of one strip after the other.
  void multiply(Pair& pair, int64_t row0, int64_t rows, int64_t strip0, int64_t strip1) const {
    auto& [gate, up] = pair.parts;
    const int64_t bytes = gate.ops->strip_bytes(gate.depth);
    float* gates = pair.gates;
    for (int64_t strip = strip0; strip < strip1; ++strip, gates += rows * kStrip) {
      gate.after = strip + 1 < strip1 ? nullptr : up.matrix + strip0 * bytes;
      gate.ops->multiply(gate, row0, rows, strip, strip + 1, pair.scratch.with_sums_at(gates));
    }
    gates = pair.gates;
    for (int64_t strip = strip0; strip < strip1; ++strip, gates += rows * kStrip) {
      up.after = strip + 1 < strip1 ? nullptr : gate.matrix + strip1 * bytes;
      const GatedRows alone(gating_, gates, row0, pair.y);
      const GatedSpans spans(gating_, gates, row0, rows, pair.y);
      up.taker = together_ == 1 ? static_cast<const SumsTaker*>(&alone) : &spans;
      up.ops->multiply(up, row0, rows, strip, strip + 1, pair.scratch);
    }
  }

  int x_, y_;
  int64_t together_;  // strips of a span
  RowsDim rows_;
  Gating gating_;
  Product parts_[2];
  std::shared_ptr<PackedWeight> weights_[2];
};

}  // namespace

void register_gated_linear(Table& table) { table.kernels["gated_linear"] = make_kernel<GatedLinear>; }

}  // namespace ENGINE_ISA
}  // namespace engine_cpu
