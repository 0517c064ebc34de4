// sample: the next token of each row, and logprobs; alone, or with the processing of the logits before it.
#include "../isa.h"
#include "draw.h"
#include "logit_row.h"

namespace engine_cpu {
namespace ENGINE_ISA {
namespace {

// Inputs: processed f32 [R, width], then those of Draw, whose outputs, states and numbers are the kernel's.
class Sample final : public Kernel {
 public:
  explicit Sample(const KernelArgs& args) : processed_(args.inputs.at(0)), draw_(args, 1), width_(args.integer("width")) {}

  int phases() const override { return 2; }

  void run(const Frame& frame, const Team& team, int phase) override {
    const auto row_of = [&](int64_t row) { return input<float>(frame, processed_) + row * width_; };
    const int64_t rows = frame.dims.R, pieces = draw_.pieces();
    if (phase == 0) {
      share_tasks(rows * pieces, team, [&](int64_t task) {
        draw_.search(frame, task / pieces, task % pieces, row_of(task / pieces));
      });
    } else {
      share_tasks(rows, team, [&](int64_t row) { draw_.decide(frame, row, team.index, row_of(row)); });
    }
  }

 private:
  int32_t processed_;
  Draw draw_;
  int64_t width_;
};

// Both in one, where nothing else reads what is drawn from: a thread keeps it in memory of its own, near. Fewer rows than
// threads are drawn from by all threads. Inputs: those of LogitRows, those of Draw, best BestLogit [threads, R] and greedy i32
// [1], of a head that may keep its rows' best (1: it did, and there are no logits), each -1 without such a head.
class ProcessAndSample final : public Kernel {
 public:
  explicit ProcessAndSample(const KernelArgs& args)
      : rows_(args), draw_(args, LogitRows::kInputs), best_(args.inputs.at(LogitRows::kInputs + Draw::kInputs)),
        greedy_(args.inputs.at(LogitRows::kInputs + Draw::kInputs + 1)),
        memory_(args.integer("threads") * rows_.width() * sizeof(float)) {}

  int phases() const override { return 3; }

  void run(const Frame& frame, const Team& team, int phase) override {
    if (greedy_ >= 0 && *input<int32_t>(frame, greedy_) != 0) {
      if (phase == 0) take_best(frame, team);
    } else if (frame.dims.R >= team.size) {
      if (phase == 0) draw_whole_rows(frame, team);
    } else {
      draw_together(frame, team, phase);
    }
  }

 private:
  float* memory(int64_t i) const { return memory_.as<float>() + i * rows_.width(); }

  void take_best(const Frame& frame, const Team& team) const {
    const int64_t rows = frame.dims.R;
    share_tasks(rows, team, [&](int64_t row) {
      BestLogit best;
      for (int64_t i = 0; i < team.size; ++i) best.take(input<BestLogit>(frame, best_)[i * rows + row]);
      draw_.take(frame, row, best);
    });
  }

  void draw_whole_rows(const Frame& frame, const Team& team) const {
    float* const values = memory(team.index);
    share_tasks(frame.dims.R, team, [&](int64_t row) {
      rows_.process(frame, row, team.index, values);
      for (int64_t piece = 0; piece < draw_.pieces(); ++piece) draw_.search(frame, row, piece, values);
      draw_.decide(frame, row, team.index, values);
    });
  }

  void draw_together(const Frame& frame, const Team& team, int phase) const {
    const int64_t rows = frame.dims.R, pieces = draw_.pieces();
    share_tasks(phase == 1 ? rows * pieces : rows, team, [&](int64_t task) {
      if (phase == 0)
        rows_.process(frame, task, team.index, memory(task));
      else if (phase == 1)
        draw_.search(frame, task / pieces, task % pieces, memory(task / pieces));
      else
        draw_.decide(frame, task, team.index, memory(task));
    });
  }

  LogitRows rows_;
  Draw draw_;
  int32_t best_, greedy_;
  Buffer memory_;
};

}  // namespace

void register_sample(Table& table) {
  table.kernels["sample"] = make_kernel<Sample>;
  table.kernels["process_and_sample"] = make_kernel<ProcessAndSample>;
}

}  // namespace ENGINE_ISA
}  // namespace engine_cpu
