// What asks memory for weights before they are multiplied.
#pragma once

#include <type_traits>

#include "../isa.h"
#include "dot.h"

namespace engine_cpu {
namespace ENGINE_ISA {

template <class Packed>
constexpr bool kIsBytes = Packed::kUnitBytes >= 64 * Packed::kUnit;  // at least one a number of a strip

// How many bytes ahead. On Zen 4 weights that the sums keep up with come soonest where little more than the next lines are
// asked for, beside what the processor fetches of itself; behind slower sums they have to be on their way for longer, and on
// Zen 5 and, but for dense ones, on Zen 3 all of them. Intel's cores with AMX read weights of a byte 6 to 8 % faster from nearer.
#if defined(ENGINE_MATRIX_UNIT)
ENGINE_INLINE int64_t dense_distance(int64_t) { return 4096; }
template <class Packed, int kRows>
ENGINE_INLINE int64_t packed_distance() {
  return kIsBytes<Packed> ? 1536 : 4096;
}
#else
struct Distances {
  int64_t one_row, few_rows;  // of quantized weights that the sums keep up with
  int64_t dense;              // of dense ones
  int64_t many_rows;          // of any that they do not
};
inline const Distances& distances() {
  static const Distances found = this_core() == Core::kZen5   ? Distances{3072, 6144, 4096, 6144}
                                 : this_core() == Core::kZen3 ? Distances{3072, 6144, 1024, 6144}
                                                              : Distances{512, 512, 512, 6144};
  return found;
}
// Weights that have a table of their own come at 28 GB/s in place of 16 from far ahead (one row, Zen 4).
template <class Packed, class = void>
constexpr bool kHasTable = false;
template <class Packed>
constexpr bool kHasTable<Packed, std::void_t<decltype(Packed::kTableBytes)>> = true;

// Sums keep up with dense weights and one row, or more where a register holds all of a panel; with quantized ones and one row,
// and there with three where weights are bytes.
ENGINE_INLINE int64_t dense_distance(int64_t rows) {
  return rows == 1 || kWideRegisters >= 32 ? distances().dense : distances().many_rows;
}
template <class Packed, int kRows>
ENGINE_INLINE int64_t packed_distance() {
  constexpr int kKeptUp = kIsBytes<Packed> && kWideRegisters >= 32 ? 3 : 1;
  if (Packed::kGroupSize != 32 || kRows > kKeptUp || kHasTable<Packed>) return distances().many_rows;
  return kRows == 1 ? distances().one_row : distances().few_rows;
}
#endif

ENGINE_INLINE void ask_for(const uint8_t* bytes, int64_t size) {
#pragma GCC unroll 16
  for (int64_t i = 0; i < size; i += 64) __builtin_prefetch(bytes + i, 0, 2);
}

// kLines lines while a group's products are summed, a few each step, so that memory is always at work.
template <int kLines>
struct LinesAhead {
  const uint8_t* bytes;

  template <int kStep, int kSteps>
  ENGINE_INLINE void ask() const {
    constexpr int kFirst = kLines * kStep / kSteps;
    ask_for(bytes + 64 * kFirst, 64 * (kLines * (kStep + 1) / kSteps - kFirst));
  }
};

// `step` bytes a group.
struct StreamAhead {
  const uint8_t* bytes;
  int64_t step;

  ENGINE_INLINE void next() {
    ask_for(bytes, step);
    bytes += step;
  }
};

// Of dense weights, kBytes of which are read beside a unit's sums, at `at`, in each of kPasses passes: those soon after,
struct SoonAhead {
  int64_t distance;

  template <int kBytes, int kPasses>
  ENGINE_INLINE void ask(const uint8_t* at) const {
    ask_for(at + distance, kBytes);
  }
};

// or, with kUnits units, half of the kChunk bytes that are multiplied next: a chunk's first two tiles ask for one half each.
template <int64_t kChunk, int64_t kUnits>
struct HalfAhead {
  const uint8_t* bytes;

  template <int kBytes, int kPasses>
  ENGINE_INLINE void ask(const uint8_t*) {
    constexpr int64_t kStep = kChunk / 2 / kUnits / kPasses;
    ask_for(bytes, kStep);
    bytes += kStep;
  }
};

struct NoneAhead {
  template <int, int>
  ENGINE_INLINE void ask() const {}
  template <int, int>
  ENGINE_INLINE void ask(const uint8_t*) const {}
};

}  // namespace ENGINE_ISA
}  // namespace engine_cpu
