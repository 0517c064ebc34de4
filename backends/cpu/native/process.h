// The process that has started threads. One that is forked from it has none of them.
#pragma once

#include <unistd.h>

#include <stdexcept>

namespace engine_cpu {

class Process {
 public:
  bool is_this() const { return getpid() == id_; }
  void check() const {
    if (!is_this())
      throw std::runtime_error("This process was forked from the one that loaded the model and has none of its threads; load the model "
                               "here, or start the process with multiprocessing's method 'spawn'.");
  }

 private:
  const pid_t id_ = getpid();
};

// Deletes what has threads. In a forked process it is left: its threads cannot be joined, and what they were asleep on waits for
// them when it is destroyed.
struct DeleteAtHome {
  template <class Team>
  void operator()(const Team* team) const {
    if (team->process().is_this()) delete team;
  }
};

}  // namespace engine_cpu
