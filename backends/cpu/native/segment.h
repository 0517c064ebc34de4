// A segment: kernels bound to values, run in order by the team, one native call a step.
#pragma once

#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "arena.h"
#include "buffer.h"
#include "isa.h"
#include "packed_weight.h"
#include "pool.h"
#include "step.h"

namespace engine_cpu {

constexpr int kDims = 10;
inline constexpr const char* kDimNames = "TSRPCHFBMK";  // the order of Dims

// How many rows a value has: a product of counts, each perhaps plus one ("T", "S+1", "S*P", "1").
class Rows {
 public:
  explicit Rows(const std::string& text);  // throws std::invalid_argument
  size_t count(const int32_t* dims) const;

 private:
  std::vector<std::pair<int, int>> factors_;  // dim, addend
};

struct NodeTime {
  std::string name;
  int64_t calls = 0;
  double seconds = 0;
};

// What is bound to a boundary value for one run.
struct Binding {
  uint8_t* data;
  size_t nbytes;
};

class Segment {
 public:
  // `maxima`: the largest dims, in Dims order. `poison`: every output is filled with NaN before its kernel runs, and
  // what it works in with large numbers (tests).
  Segment(std::shared_ptr<Pool> pool, const std::string& isa, const std::vector<int32_t>& maxima, int64_t max_context,
          bool poison);

  // All of these throw std::invalid_argument with a sentence.
  void value(int32_t id, size_t row_bytes, const std::string& rows, const std::string& dtype);
  void add(const std::string& kernel, KernelArgs args);
  void keep(std::shared_ptr<void> owner) { kept_.push_back(std::move(owner)); }  // of states' memory
  void finish(const std::vector<int32_t>& inputs, const std::vector<int32_t>& outputs);

  // Runs all nodes. inputs and outputs are bound in the order given to finish. No allocation; call without the GIL.
  void run(const std::vector<int32_t>& dims, const std::vector<Binding>& inputs, const std::vector<Binding>& outputs);

  const std::vector<int32_t>& inputs() const { return inputs_; }
  const std::vector<int32_t>& outputs() const { return outputs_; }
  const std::string& dtype(int32_t id) const { return values_[id].dtype; }
  size_t arena_bytes() const { return arena_.size(); }

  void set_profiling(bool on);  // starts from zero
  const std::vector<NodeTime>& profile() const { return times_; }

 private:
  using Clock = std::chrono::steady_clock;

  struct Value {
    size_t row_bytes = 0;
    Rows rows{"1"};
    std::string dtype;
    bool declared = false;
    bool external = false;  // bound at each run
    int producer = -1;
  };
  struct Node {
    std::string name;
    std::unique_ptr<Kernel> kernel;
    KernelArgs args;
    bool serial = false;  // in the running step
  };

  static void job(void* self, Pool& pool, const Team& team);
  void work(Pool& pool, const Team& team);
  void run_serial(size_t first, const Team& team);
  size_t after_serial(size_t first) const;
  void plan();
  void bind(const std::vector<int32_t>& ids, const std::vector<Binding>& bindings, const char* what);
  void poison_outputs(const Node& node);
  Clock::time_point now() const { return profiling_ ? Clock::now() : Clock::time_point(); }
  void book(size_t node, Clock::time_point start);
  const Value& used(const std::string& kernel, int32_t id) const;

  std::shared_ptr<Pool> pool_;
  const Table& table_;
  std::vector<int32_t> maxima_;
  int64_t max_context_;
  bool poison_;
  bool profiling_ = false;
  bool finished_ = false;
  std::vector<Value> values_;
  std::vector<std::shared_ptr<void>> kept_;
  std::vector<Node> nodes_;
  std::vector<int32_t> inputs_, outputs_;
  Buffer arena_;
  std::vector<uint8_t*> pointers_;
  std::vector<NodeTime> times_;
  Frame frame_{};
  std::mutex running_;
};

}  // namespace engine_cpu
