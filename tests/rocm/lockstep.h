// The kernels on the CPU: each thread of a block is a fiber. Fibers run until they meet at a barrier or a shuffle; one that does
// not come, or comes to something else, ends the program. Shared memory is NaN when a block begins.
//
// Compiled with WARP. ``launch(kernel, grid, threads, arguments...)`` runs the blocks one after the other.
#pragma once

#include <sanitizer/common_interface_defs.h>
#include <ucontext.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

namespace lockstep {

constexpr size_t STACK = 256 << 10;
enum class State { READY, BARRIER, SHUFFLE, DONE };

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack{new char[STACK]};
  void* sanitizer = nullptr;
  State state = State::READY;
  int mask = 0;
  float value = 0;
};

struct Machine {
  ucontext_t scheduler;
  void* sanitizer = nullptr;
  const void* bottom = nullptr;
  size_t size = 0;
  std::vector<Fiber> fibers;
  int current = 0, blocks[3] = {};
  std::function<void()> body;
};
inline Machine machine;

struct Memory {
  void* start;
  size_t size;
};
inline std::vector<Memory> shared;

template <class T, int SIZE> struct Shared {
  T values[SIZE];
  Shared() {
    shared.push_back({values, sizeof values});
    std::memset(values, 0xFF, sizeof values);
  }
  T& operator[](int n) { return values[n]; }
  operator T*() { return values; }
};

[[noreturn]] inline void fail(const char* why) {
  std::fprintf(stderr, "lockstep: %s\n", why);
  std::exit(3);
}

// Back to the scheduler, which goes on with this fiber once all have come.
inline void wait(State state) {
  Fiber& fiber = machine.fibers[machine.current];
  fiber.state = state;
  __sanitizer_start_switch_fiber(state == State::DONE ? nullptr : &fiber.sanitizer, machine.bottom, machine.size);
  swapcontext(&fiber.context, &machine.scheduler);
  __sanitizer_finish_switch_fiber(fiber.sanitizer, nullptr, nullptr);
}

inline void begin() {
  __sanitizer_finish_switch_fiber(nullptr, &machine.bottom, &machine.size);
  machine.body();
  wait(State::DONE);
}

inline void resume(int n) {
  Fiber& fiber = machine.fibers[n];
  machine.current = n;
  __sanitizer_start_switch_fiber(&machine.sanitizer, fiber.stack.get(), STACK);
  swapcontext(&machine.scheduler, &fiber.context);
  __sanitizer_finish_switch_fiber(machine.sanitizer, nullptr, nullptr);
}

inline bool all(int from, int to, State state) {
  for (int n = from; n < to; ++n)
    if (machine.fibers[n].state != state) return false;
  return true;
}

// A warp whose lanes have all come to one shuffle: each gets its partner's value.
inline bool exchange(int from) {
  if (!all(from, from + WARP, State::SHUFFLE)) return false;
  float values[WARP];
  for (int n = 0; n < WARP; ++n) {
    const Fiber& fiber = machine.fibers[from + n];
    if (fiber.mask != machine.fibers[from].mask || fiber.mask >= WARP) fail("lanes of a warp shuffle in different ways");
    values[n] = machine.fibers[from + (n ^ fiber.mask)].value;
  }
  for (int n = 0; n < WARP; ++n) {
    machine.fibers[from + n].value = values[n];
    machine.fibers[from + n].state = State::READY;
  }
  return true;
}

inline void run_block(int threads) {
  for (const Memory& memory : shared) std::memset(memory.start, 0xFF, memory.size);
  machine.fibers.resize(threads);
  for (Fiber& fiber : machine.fibers) {
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = STACK;
    makecontext(&fiber.context, begin, 0);
    fiber.state = State::READY;
  }
  while (!all(0, threads, State::DONE)) {
    bool moved = false;
    for (int n = 0; n < threads; ++n)
      if (machine.fibers[n].state == State::READY) resume(n), moved = true;
    for (int from = 0; from < threads; from += WARP) moved |= exchange(from);
    if (all(0, threads, State::BARRIER)) {
      for (Fiber& fiber : machine.fibers) fiber.state = State::READY;
      moved = true;
    }
    if (!moved) fail("threads wait for others that do not come: a barrier or a shuffle is divergent");
  }
}

template <class... A> void launch(void (*kernel)(A...), const int (&grid)[3], int threads, A... arguments) {
  if (threads % WARP) fail("a block is no multiple of a warp");
  machine.body = [=] { kernel(arguments...); };
  for (int z = 0; z < grid[2]; ++z)
    for (int y = 0; y < grid[1]; ++y)
      for (int x = 0; x < grid[0]; ++x) {
        machine.blocks[0] = x, machine.blocks[1] = y, machine.blocks[2] = z;
        run_block(threads);
      }
}

}  // namespace lockstep

#define DEVICE inline
#define SHARED(type, name, size) static lockstep::Shared<type, size> name
#define KERNEL(threads) static void

DEVICE int thread() { return lockstep::machine.current; }
DEVICE int lane() { return thread() % WARP; }
DEVICE int block(int axis) { return lockstep::machine.blocks[axis]; }
DEVICE void barrier() { lockstep::wait(lockstep::State::BARRIER); }
DEVICE float shuffle_xor(float x, int mask) {
  const int n = thread();
  lockstep::machine.fibers[n].value = x;
  lockstep::machine.fibers[n].mask = mask;
  lockstep::wait(lockstep::State::SHUFFLE);
  return lockstep::machine.fibers[n].value;
}
DEVICE float exp2_of(float x) { return std::exp2(x); }
DEVICE float root_of(float x) { return std::sqrt(x); }
DEVICE float nearest(float x) { return std::rint(x); }
DEVICE float of_half(unsigned short bits) {
  _Float16 x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
DEVICE unsigned short to_half(float x) {
  const _Float16 near = x;
  unsigned short bits;
  std::memcpy(&bits, &near, sizeof bits);
  return bits;
}
