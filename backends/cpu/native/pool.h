// The thread team: persistent threads that run one function together and meet at barriers.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <mutex>
#include <thread>
#include <vector>

#include "buffer.h"
#include "process.h"
#include "step.h"

namespace engine_cpu {

// Since the beginning of a wait: until when a thread spins, and until when it yields. Then it sleeps.
struct Patience {
  std::chrono::microseconds spin, yield;
};

// Waits for a counter to leave a value.
class Gate {
 public:
  uint32_t value() const { return value_.load(std::memory_order_acquire); }
  void open();                                         // value += 1 and wake all
  void wait(uint32_t seen, const Patience& patience);  // until value != seen

 private:
  std::atomic<uint32_t> value_{0};
  std::atomic<int32_t> sleepers_{0};
  std::mutex mutex_;
  std::condition_variable condition_;
};

class Pool {
 public:
  // `threads` in all, the caller of run() among them. `pin`, unless it is empty: the processor on which each of the others, from
  // the second number on, stays. The caller's place is the system's choice, since threads that it starts would inherit it.
  // `share`: how many processors' time the system gives the process.
  // Throws std::invalid_argument unless 1 <= threads <= 1024, where the system has no more threads to give, and where threads cannot
  // be pinned or are more than the processors.
  explicit Pool(int threads, const std::vector<int>& pin = {}, double share = std::numeric_limits<double>::infinity());
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int size() const { return size_; }
  const Process& process() const { return process_; }

  // From here on each thread's scratch has at least so many bytes, and what threads share. Waits for a run to end.
  void reserve(size_t scratch_bytes, size_t shared_bytes);
  size_t scratch_bytes() const { return scratch_.front().size(); }
  size_t shared_bytes() const { return shared_.size(); }

  // Calls job(context, team) on every thread, the caller as index 0; returns when all have. One run at a time:
  // a second caller waits for the first. std::runtime_error in a forked process, where the threads are not.
  using Job = void (*)(void* context, Pool& pool, const Team& team);
  void run(Job job, void* context);

  // Inside a job: all threads meet here, and no tasks are taken again. The last to come calls `alone` while the
  // others wait.
  template <class F>
  void barrier(F&& alone) {
    const uint32_t seen = meet_.value();
    if (size_ > 1 && arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 < size_) return meet_.wait(seen, patience_);
    arrived_.store(0, std::memory_order_relaxed);
    give_back_tasks();
    alone();
    if (size_ > 1) meet_.open();
  }
  void barrier() {
    barrier([] {});
  }

 private:
  void work(int index);
  Team team_of(int index) { return {index, size_, counters_.data(), scratch_[index].data(), shared_.data()}; }
  void give_back_tasks() {
    for (TaskCounter& counter : counters_)  // a store where nothing was taken would cost a line's way between cores
      if (counter.taken.load(std::memory_order_relaxed) != 0) counter.taken.store(0, std::memory_order_relaxed);
  }
  void stop();

  const int size_;
  const Patience patience_;
  const Process process_;
  std::mutex running_;
  Job job_ = nullptr;
  void* context_ = nullptr;
  std::atomic<bool> stop_{false};
  alignas(64) Gate start_;
  alignas(64) Gate meet_;
  alignas(64) std::atomic<int32_t> arrived_{0};
  std::vector<TaskCounter> counters_;  // one a thread
  std::vector<Buffer> scratch_;  // one a thread
  Buffer shared_;
  std::vector<std::thread> threads_;
};

}  // namespace engine_cpu
