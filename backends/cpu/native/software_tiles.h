// Tile registers in software, for tests on machines without a matrix unit. What the unit faults on ends the process: a register
// that no shape was given, or shapes that do not multiply (Intel's Architecture Instruction Set Extensions, chapter 3).
#pragma once

#include <cstring>
#include <initializer_list>

#include "simd.h"

namespace engine_cpu {
namespace ENGINE_ISA {

struct SoftwareTile {
  int rows, row_bytes;
  uint8_t bytes[16][64];

  __m512i row(int number) const { return _mm512_loadu_si512(bytes[number]); }
  int32_t four(int row, int k) const {  // bytes, or two of bf16
    int32_t value;
    std::memcpy(&value, bytes[row] + 4 * k, sizeof(value));
    return value;
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

// Byte j of each four, as int8 or as uint8.
template <bool kSigned, int kJ>
__m512i byte_of(__m512i fours) {
  const __m512i high = _mm512_slli_epi32(fours, 24 - 8 * kJ);
  return kSigned ? _mm512_srai_epi32(high, 24) : _mm512_srli_epi32(high, 24);
}

template <bool kSignedA, bool kSignedB, int kJ>
__m512i product_of(__m512i a, __m512i b) {
  return _mm512_mullo_epi32(byte_of<kSignedA, kJ>(a), byte_of<kSignedB, kJ>(b));
}

template <bool kSignedA, bool kSignedB, int kC, int kA, int kB>
void tile_dot() {
  SoftwareTile& c = shaped_tile(kC);
  const SoftwareTile &a = shaped_tile(kA), &b = shaped_tile(kB);
  fault_unless_they_multiply(c, a, b);
  for (int r = 0; r < c.rows; ++r) {
    __m512i sum = c.row(r);
    for (int k = 0; k < b.rows; ++k) {
      const __m512i fours = _mm512_set1_epi32(a.four(r, k)), columns = b.row(k);
      sum = _mm512_add_epi32(sum, product_of<kSignedA, kSignedB, 0>(fours, columns));
      sum = _mm512_add_epi32(sum, product_of<kSignedA, kSignedB, 1>(fours, columns));
      sum = _mm512_add_epi32(sum, product_of<kSignedA, kSignedB, 2>(fours, columns));
      sum = _mm512_add_epi32(sum, product_of<kSignedA, kSignedB, 3>(fours, columns));
    }
    _mm512_storeu_si512(c.bytes[r], sum);
  }
}

// Subnormal numbers count as zero, before and after.
inline __m512 without_subnormal(__m512 x) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(_mm512_abs_ps(x), _mm512_set1_ps(0x1p-126f), _CMP_NLT_UQ), x);
}

inline __m512 fused(__m512 x, __m512 y, __m512 sum) {
  return without_subnormal(_mm512_fmadd_ps(without_subnormal(x), without_subnormal(y), sum));
}

// The first or the second bf16 of each two.
inline __m512 even_of(__m512i twos) { return _mm512_castsi512_ps(_mm512_slli_epi32(twos, 16)); }
inline __m512 odd_of(__m512i twos) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_srli_epi32(twos, 16), 16)); }

// Even and odd k are summed apart, each by fused multiply-adds.
template <int kC, int kA, int kB>
void tile_dot_bf16() {
  SoftwareTile& c = shaped_tile(kC);
  const SoftwareTile &a = shaped_tile(kA), &b = shaped_tile(kB);
  fault_unless_they_multiply(c, a, b);
  for (int r = 0; r < c.rows; ++r) {
    __m512 even = _mm512_setzero_ps(), odd = _mm512_setzero_ps();
    for (int k = 0; k < b.rows; ++k) {
      const __m512i twos = _mm512_set1_epi32(a.four(r, k)), columns = b.row(k);
      even = fused(even_of(twos), even_of(columns), even);
      odd = fused(odd_of(twos), odd_of(columns), odd);
    }
    const __m512 before = without_subnormal(_mm512_castsi512_ps(c.row(r)));
    const __m512 sum = without_subnormal(_mm512_add_ps(before, without_subnormal(_mm512_add_ps(even, odd))));
    _mm512_storeu_si512(c.bytes[r], _mm512_castps_si512(sum));
  }
}

}  // namespace ENGINE_ISA
}  // namespace engine_cpu
