// How a block of a checkpoint's row becomes a column of a unit of layout.h, format by format.
#pragma once

#include <cstdint>
#include <cstring>

#include "../layout.h"

namespace engine_cpu {

constexpr uint32_t kNibbles = 0x0f0f0f0f;
constexpr uint32_t kPairs = 0x03030303;
constexpr uint32_t kBits = 0x01010101;

inline uint32_t word(const uint8_t* source, int index) {
  uint32_t value;
  std::memcpy(&value, source + 4 * index, 4);
  return value;
}

// The four bytes of a column in line `line` of four panels of 64 bytes.
inline void put(uint8_t* lines, int line, int64_t column, uint32_t value) {
  std::memcpy(lines + line * 256 + column / kPanel * 64 + column % kPanel * 4, &value, 4);
}

// Steps 0..7 of a group of 32 as w4's nibbles: `even` and `odd` steps to low and high.
inline void put_nibbles(uint8_t* lines, int64_t column, const uint32_t* steps) {
  for (int i = 0; i < 4; ++i) put(lines, i, column, steps[2 * i] | steps[2 * i + 1] << 4);
}

// The same with a fifth bit each: bit i of `high`'s bytes is that of step i.
inline void put_fives(uint8_t* lines, int64_t column, const uint32_t* steps) {
  uint32_t low[8], high = 0;
  for (int i = 0; i < 8; ++i) {
    low[i] = steps[i] & kNibbles;
    high |= (steps[i] >> 4 & kBits) << i;
  }
  put_nibbles(lines, column, low);
  put(lines, 4, column, high);
}

// 32 bytes as the steps of a group.
inline void as_steps(const uint8_t* u, uint32_t* steps) { std::memcpy(steps, u, 32); }

// From a block to the units of its k, or from the blocks of one unit.
using PackUnit = void (*)(const uint8_t* block, uint8_t* unit, int64_t column);
// The same by way of a grid of so many entries (layout.h).
using PackByGrid = void (*)(const uint8_t* block, const uint32_t* grid, uint8_t* unit, int64_t column);

struct Packer {
  Layout layout;
  PackUnit pack;
  PackByGrid pack_by_grid = nullptr;
  int64_t grid = 0;
  const int8_t* table = nullptr;  // 16 numbers, of units that have a table of their own,
  int offset = 0;                 // which holds them from here on
};

struct Packers {
  const Packer* begin_;
  const Packer* end_;
  const Packer* begin() const { return begin_; }
  const Packer* end() const { return end_; }
};

// Each of the files of these names has some.
Packers gguf_packers();
Packers lattice_packers();
Packers checkpoint_packers();

}  // namespace engine_cpu
