#include "queue.h"

#include <algorithm>
#include <stdexcept>
#include <system_error>

namespace engine_cpu {
namespace {

// Columns of a piece: whole strips, so that threads never touch one together, and about a megabyte of rows.
int64_t piece_columns(const PackedWeight& weight) {
  const Layout& layout = layout_of(weight);
  const int64_t strip = std::max<int64_t>(1, row_bytes(layout, weight.depth) * kStrip);
  return kStrip * std::max<int64_t>(1, (int64_t{1} << 20) / strip);
}

}  // namespace

PackQueue::PackQueue(int threads) : size_(threads) {
  if (threads < 1 || threads > 1024) throw std::invalid_argument("A queue has 1 to 1024 threads.");
}

PackQueue::~PackQueue() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  arrived_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void PackQueue::start_threads() {
  try {
    while (static_cast<int>(threads_.size()) < size_) threads_.emplace_back([this] { work(); });
  } catch (const std::system_error&) {  // the system has no more to give
  }
}

int64_t PackQueue::add(PackedWeight& weight, const uint8_t* rows, int64_t count, int64_t first, int64_t index) {
  process_.check();
  const std::lock_guard<std::mutex> lock(mutex_);
  start_threads();
  if (threads_.empty()) {
    pack_columns(weight, rows, count, first, index);
    return ++finished_;
  }
  jobs_.push_back(Job{&weight, rows, count, first, index});
  arrived_.notify_all();
  return finished_ + static_cast<int64_t>(jobs_.size());
}

void PackQueue::wait(int64_t number) {
  process_.check();
  std::unique_lock<std::mutex> lock(mutex_);
  packed_.wait(lock, [&] { return finished_ >= number; });
}

void PackQueue::work() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    arrived_.wait(lock, [this] { return stop_ || open_ < jobs_.size(); });
    if (stop_) return;
    Job& job = jobs_[open_];  // a deque's elements stay where they are while others are pushed and popped
    const int64_t from = job.taken;
    const int64_t to_strip = kStrip - (job.first + from) % kStrip;
    const int64_t count = std::min(job.count - from, to_strip + piece_columns(*job.weight) - kStrip);
    job.taken += count;
    if (job.taken == job.count) ++open_;
    lock.unlock();
    const uint8_t* const rows = job.rows + from * row_bytes(layout_of(*job.weight), job.weight->depth);
    pack_columns(*job.weight, rows, count, job.first + from, job.index);
    lock.lock();
    job.packed += count;
    while (!jobs_.empty() && jobs_.front().packed == jobs_.front().count) {
      jobs_.pop_front();
      ++finished_;
      --open_;
    }
    packed_.notify_all();
  }
}

}  // namespace engine_cpu
