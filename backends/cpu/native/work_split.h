// How the rows and elements of a step are shared out among the threads.
#pragma once

#include "step.h"

namespace engine_cpu {

struct Range {
  int64_t begin, end;
};

// This thread's contiguous share of `count` items, in whole grains (the last may be short).
inline Range share(int64_t count, const Team& team, int64_t grain = 1) {
  const int64_t grains = (count + grain - 1) / grain;
  const int64_t begin = grains * team.index / team.size * grain;
  const int64_t end = grains * (team.index + 1) / team.size * grain;
  return {begin < count ? begin : count, end < count ? end : count};
}

// The tasks of a phase that fall to this thread, of `count`: its own contiguous share, in order, since what is done beside each
// other is best done by one core, and then what others have left of theirs. Once a phase.
class Tasks {
 public:
  Tasks(int64_t count, const Team& team) : count_(count), team_(team), owner_(team) {}

  // The next one, or -1 where none is left.
  int64_t next() {
    for (; asked_ < team_.size; ++asked_) {
      owner_.index = (team_.index + asked_) % team_.size;
      const Range tasks = share(count_, owner_);
      const int64_t task = tasks.begin + team_.counters[owner_.index].taken.fetch_add(1, std::memory_order_relaxed);
      if (task < tasks.end) return task;
    }
    return -1;
  }

 private:
  int64_t count_;
  const Team& team_;
  Team owner_;     // whose share is asked
  int asked_ = 0;  // how many shares have nothing left
};

// Calls visit(task) for those of `count` tasks that fall to this thread.
template <class Visit>
void share_tasks(int64_t count, const Team& team, Visit visit) {
  Tasks tasks(count, team);
  for (int64_t task = tasks.next(); task >= 0; task = tasks.next()) visit(task);
}

// So few elements are done by one thread in less time than a team takes to share them out and meet again.
inline bool little(int64_t elements) { return elements <= 4096; }

// Which count a kernel's rows follow: the number "rows_dim" is the dim's place in Dims, 0 (T, the default) or 2 (R).
class RowsDim {
 public:
  explicit RowsDim(const KernelArgs& args) : heads_(args.number_or("rows_dim", 0) == 2) {}
  int64_t count(const Dims& dims) const { return heads_ ? dims.R : dims.T; }

 private:
  bool heads_;
};

template <class T>
const T* input(const Frame& frame, int id) {
  return reinterpret_cast<const T*>(frame.values[id]);
}

template <class T>
T* output(const Frame& frame, int id) {
  return reinterpret_cast<T*>(frame.values[id]);
}

}  // namespace engine_cpu
