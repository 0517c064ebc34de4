// Packing beside the interpreter: threads that take pieces of weights in the order of their arrival.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "../../process.h"
#include "../layout.h"

namespace engine_cpu {

class PackQueue {
 public:
  // Threads are made with the first job, as many of them as the system gives. std::invalid_argument unless 1 <= threads <= 1024.
  explicit PackQueue(int threads);
  // Pieces that have begun are finished, the others are not packed.
  ~PackQueue();
  PackQueue(const PackQueue&) = delete;
  PackQueue& operator=(const PackQueue&) = delete;

  // pack_columns of these arguments, done by the threads, or at once where there are none. The weight and its rows must live
  // until wait has returned for the job, whose number this returns: 1, 2, ... std::runtime_error in a forked process, as wait.
  int64_t add(PackedWeight& weight, const uint8_t* rows, int64_t count, int64_t first, int64_t index);

  // Returns when the jobs 1 .. number have been packed.
  void wait(int64_t number);

  const Process& process() const { return process_; }

 private:
  struct Job {
    PackedWeight* weight;
    const uint8_t* rows;
    int64_t count, first, index;
    int64_t taken = 0;   // rows that a thread has
    int64_t packed = 0;  // and that are done
  };

  void start_threads();
  void work();

  const Process process_;
  const int size_;
  std::mutex mutex_;
  std::condition_variable arrived_, packed_;
  std::deque<Job> jobs_;    // the oldest unfinished one first; none moves while others come and go
  int64_t finished_ = 0;    // jobs before jobs_
  size_t open_ = 0;         // the place in jobs_ of the first one with rows to take
  bool stop_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace engine_cpu
