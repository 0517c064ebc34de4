// Tile registers in software, for tests on machines without a matrix unit. What the unit faults on ends the process: a register
// that no shape was given, or shapes that do not multiply (Intel's Architecture Instruction Set Extensions, chapter 3).
#pragma once

#include <cmath>
#include <cstring>
#include <initializer_list>

#include "simd.h"

namespace engine_cpu {
namespace ENGINE_ISA {

struct SoftwareTile {
  int rows, row_bytes;
  uint8_t bytes[16][64];

  template <class T>
  T at(int row, int column) const {
    T value;
    std::memcpy(&value, bytes[row] + column * sizeof(T), sizeof(T));
    return value;
  }
  template <class T>
  void put(int row, int column, T value) {
    std::memcpy(bytes[row] + column * sizeof(T), &value, sizeof(T));
  }
};

inline thread_local SoftwareTile software_tiles[8];

inline void fault_unless(bool allowed) {
  if (!allowed) __builtin_trap();
}

inline SoftwareTile& shaped_tile(int number) {
  SoftwareTile& tile = software_tiles[number];
  fault_unless(tile.rows > 0 && tile.row_bytes > 0);
  return tile;
}

class TileRegisters {
 public:
  struct Shape {
    int rows, bytes;
  };

  explicit TileRegisters(std::initializer_list<Shape> shapes) {
    int number = 0;
    for (const Shape& shape : shapes) {
      fault_unless(number < 8 && shape.rows <= 16 && shape.bytes <= 64 && (shape.rows > 0) == (shape.bytes > 0));
      software_tiles[number++] = {shape.rows, shape.bytes, {}};
    }
  }
  ~TileRegisters() {
    for (SoftwareTile& tile : software_tiles) tile = {};
  }
  TileRegisters(const TileRegisters&) = delete;
  TileRegisters& operator=(const TileRegisters&) = delete;
};

template <int kTile>
void tile_zero() {
  SoftwareTile& tile = shaped_tile(kTile);
  std::memset(tile.bytes, 0, sizeof(tile.bytes));
}

template <int kTile>
void tile_load(const void* first, int64_t stride) {
  SoftwareTile& tile = shaped_tile(kTile);
  std::memset(tile.bytes, 0, sizeof(tile.bytes));
  for (int r = 0; r < tile.rows; ++r) std::memcpy(tile.bytes[r], static_cast<const uint8_t*>(first) + r * stride, tile.row_bytes);
}

template <int kTile>
void tile_store(void* first, int64_t stride) {
  const SoftwareTile& tile = shaped_tile(kTile);
  for (int r = 0; r < tile.rows; ++r) std::memcpy(static_cast<uint8_t*>(first) + r * stride, tile.bytes[r], tile.row_bytes);
}

inline void fault_unless_they_multiply(const SoftwareTile& c, const SoftwareTile& a, const SoftwareTile& b) {
  fault_unless(c.rows == a.rows && c.row_bytes == b.row_bytes && a.row_bytes == 4 * b.rows);
}

// The sums of one row and one column: int8 and uint8 in fours.
template <class A, class B>
int32_t dot_bytes(const SoftwareTile& a, const SoftwareTile& b, int row, int column, int32_t sum) {
  for (int k = 0; k < a.row_bytes; ++k) sum += int32_t{a.at<A>(row, k)} * b.at<B>(k / 4, 4 * column + k % 4);
  return sum;
}

template <bool kSignedA, bool kSignedB, int kC, int kA, int kB>
void tile_dot() {
  SoftwareTile& c = shaped_tile(kC);
  const SoftwareTile &a = shaped_tile(kA), &b = shaped_tile(kB);
  fault_unless_they_multiply(c, a, b);
  using A = std::conditional_t<kSignedA, int8_t, uint8_t>;
  using B = std::conditional_t<kSignedB, int8_t, uint8_t>;
  for (int r = 0; r < c.rows; ++r)
    for (int n = 0; n < c.row_bytes / 4; ++n) c.put(r, n, dot_bytes<A, B>(a, b, r, n, c.at<int32_t>(r, n)));
}

// Subnormal numbers count as zero, before and after.
inline float without_subnormal(float x) { return std::fabs(x) < 0x1p-126f ? 0.0f : x; }

// Even and odd k are summed apart, each by fused multiply-adds.
inline float dot_bf16(const SoftwareTile& a, const SoftwareTile& b, int row, int column) {
  float sums[2] = {};
  for (int k = 0; k < a.row_bytes / 2; ++k) {
    const float x = bit_cast<float>(static_cast<uint32_t>(a.at<uint16_t>(row, k)) << 16);
    const float y = bit_cast<float>(static_cast<uint32_t>(b.at<uint16_t>(k / 2, 2 * column + k % 2)) << 16);
    sums[k % 2] = without_subnormal(std::fma(without_subnormal(x), without_subnormal(y), sums[k % 2]));
  }
  return without_subnormal(sums[0] + sums[1]);
}

template <int kC, int kA, int kB>
void tile_dot_bf16() {
  SoftwareTile& c = shaped_tile(kC);
  const SoftwareTile &a = shaped_tile(kA), &b = shaped_tile(kB);
  fault_unless_they_multiply(c, a, b);
  for (int r = 0; r < c.rows; ++r)
    for (int n = 0; n < c.row_bytes / 4; ++n)
      c.put(r, n, without_subnormal(without_subnormal(c.at<float>(r, n)) + dot_bf16(a, b, r, n)));
}

}  // namespace ENGINE_ISA
}  // namespace engine_cpu
