#include "pool.h"

#include <chrono>
#include <stdexcept>
#include <string>
#include <system_error>

#ifdef __linux__
#include <pthread.h>
#include <sched.h>
#endif

namespace engine_cpu {
namespace {

// The gap between two steps is shorter than these, and a wake-up of a sleeping thread costs about 50 us. Who yields leaves
// the processor to anybody who wants it, and uses the process's time nevertheless where nobody does.
constexpr auto kNone = std::chrono::microseconds(0);
constexpr auto kShort = std::chrono::microseconds(100);
constexpr auto kLong = std::chrono::microseconds(2000);

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

int processors() {
#ifdef __linux__
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return CPU_COUNT(&set);
#endif
  return static_cast<int>(std::thread::hardware_concurrency());
}

Patience patience_of(int threads, double share) {
  if (threads > share) return {kNone, kShort};
  if (threads > processors()) return {kNone, kLong};
  return {kShort, kLong};
}

void pin_thread(std::thread& thread, int processor) {
#ifdef __linux__
  cpu_set_t one;
  if (processor < 0 || processor >= CPU_SETSIZE) throw std::invalid_argument("A processor has a number below 1024.");
  CPU_ZERO(&one);
  CPU_SET(processor, &one);
  if (pthread_setaffinity_np(thread.native_handle(), sizeof(one), &one) != 0)
    throw std::invalid_argument("The system refuses to keep a thread on one processor.");
#else
  (void)thread, (void)processor;
#endif
}

void check_pinning(size_t threads, size_t processors) {
#ifndef __linux__
  throw std::invalid_argument("Threads can be pinned on Linux only.");
#endif
  if (threads > processors)
    throw std::invalid_argument(std::to_string(threads) + " threads cannot be pinned to " + std::to_string(processors) +
                                " processors; ask for at most as many.");
}

int checked(int threads) {
  if (threads < 1 || threads > 1024)
    throw std::invalid_argument("A pool has between 1 and 1024 threads, not " + std::to_string(threads) + ".");
  return threads;
}

}  // namespace

void Gate::open() {
  value_.fetch_add(1, std::memory_order_seq_cst);
  // Pairs with the increment in wait(): either this sees the sleeper, or the sleeper sees the new value.
  if (sleepers_.load(std::memory_order_seq_cst) == 0) return;
  std::lock_guard<std::mutex> lock(mutex_);
  condition_.notify_all();
}

void Gate::wait(uint32_t seen, const Patience& patience) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point start = Clock::now();
  while (Clock::now() < start + patience.spin)
    for (int i = 0; i < 32; ++i) {
      if (value() != seen) return;
      pause();
    }
  while (Clock::now() < start + patience.yield) {
    if (value() != seen) return;
    std::this_thread::yield();
  }
  std::unique_lock<std::mutex> lock(mutex_);
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  while (value_.load(std::memory_order_seq_cst) == seen) condition_.wait(lock);
  sleepers_.fetch_sub(1, std::memory_order_relaxed);
}

Pool::Pool(int threads, const std::vector<int>& pin, double share)
    : size_(checked(threads)), patience_(patience_of(threads, share)), counters_(size_), scratch_(size_) {
  if (!pin.empty()) check_pinning(size_, pin.size());
  threads_.reserve(size_ - 1);
  try {
    for (int i = 1; i < size_; ++i) threads_.emplace_back([this, i] { work(i); });
    for (int i = 1; !pin.empty() && i < size_; ++i) pin_thread(threads_[i - 1], pin[i]);
  } catch (const std::system_error&) {
    const size_t started = threads_.size() + 1;
    stop();
    throw std::invalid_argument("The system lets this process have " + std::to_string(started) + " threads, and " +
                                std::to_string(threads) + " were asked for; ask for fewer.");
  } catch (...) {
    stop();
    throw;
  }
}

Pool::~Pool() { stop(); }

void Pool::stop() {
  stop_.store(true, std::memory_order_relaxed);
  start_.open();
  for (std::thread& thread : threads_) thread.join();
}

void Pool::work(int index) {
  uint32_t seen = 0;
  while (true) {
    start_.wait(seen, patience_);
    ++seen;  // one opening a run, and none before the last run's barrier
    if (stop_.load(std::memory_order_relaxed)) return;
    job_(context_, *this, team_of(index));
    barrier();
  }
}

void Pool::reserve(size_t scratch_bytes, size_t shared_bytes) {
  std::lock_guard<std::mutex> lock(running_);
  for (Buffer& scratch : scratch_)
    if (scratch.size() < scratch_bytes) scratch = Buffer(scratch_bytes);
  if (shared_.size() < shared_bytes) shared_ = Buffer(shared_bytes);
}

void Pool::run(Job job, void* context) {
  if (size_ > 1) process_.check();
  std::lock_guard<std::mutex> lock(running_);
  give_back_tasks();
  if (size_ > 1) {
    job_ = job;
    context_ = context;
    start_.open();
  }
  job(context, *this, team_of(0));
  barrier();
}

}  // namespace engine_cpu
