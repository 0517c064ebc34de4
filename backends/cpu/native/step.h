// What a kernel sees of a step: value pointers, the step's true counts, and its place in the thread team.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace engine_cpu {

// True counts of one step. Values are allocated at their maxima; kernels loop to these.
struct Dims {
  int32_t T = 0;  // tokens
  int32_t S = 0;  // sequences
  int32_t R = 0;  // rows that reach the head
  int32_t P = 0;  // width of the page tables
  int32_t C = 0;  // block copies
  int32_t H = 0;  // history copies
  int32_t F = 0;  // history fills
  int32_t B = 0;  // logit-bias entries
  int32_t M = 0;  // token masks
  int32_t K = 0;  // logprobs a row
};

struct Frame {
  uint8_t* const* values;  // one pointer a value id
  Dims dims;
};

// How many tasks of the running phase are taken, on a line of its own.
struct alignas(64) TaskCounter {
  std::atomic<int64_t> taken{0};
};

// One thread's place in the team. `counters` hand out the tasks of the running phase, by Tasks (work_split.h), which a kernel may
// use only where the result does not depend on who takes which task.
struct Team {
  int index;
  int size;
  TaskCounter* counters;  // [size]
  uint8_t* scratch;  // of this thread, as many bytes as any kernel of its pool asks for, from one kernel to the next undefined
  uint8_t* shared;   // of all threads, likewise
};

// A bound op. `run` is called once a phase by every thread of the team, with a barrier between phases; or, in a step where
// it is `serial` (so little work that a barrier would cost more), by one thread that is a team by itself.
class Kernel {
 public:
  virtual ~Kernel() = default;
  virtual int phases() const { return 1; }
  virtual bool serial(const Dims&) const { return false; }
  virtual size_t scratch_bytes() const { return 0; }  // a thread
  virtual size_t shared_bytes() const { return 0; }
  virtual void run(const Frame& frame, const Team& team, int phase) = 0;
};

// A weight in a kernel family's packed layout. `family` and `columns`/`depth` tell a kernel what it holds.
struct PackedWeight;

// What a kernel is made from: value ids (-1: absent), packed weights, state buffers, and named numbers.
struct KernelArgs {
  std::vector<int32_t> inputs;
  std::vector<int32_t> outputs;
  std::vector<std::shared_ptr<PackedWeight>> weights;
  std::vector<uint8_t*> states;
  std::map<std::string, double> numbers;

  double number(const std::string& name) const;  // throws std::invalid_argument naming what is missing
  int64_t integer(const std::string& name) const;
  double number_or(const std::string& name, double fallback) const;
};

using KernelFactory = std::unique_ptr<Kernel> (*)(const KernelArgs&);

}  // namespace engine_cpu
