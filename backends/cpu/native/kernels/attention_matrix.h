// attention_whole.h's products through the matrix unit (AMX): the same whole numbers, and so the same bits.
//
// Its factors are bytes, so a query and a softmax weight of 16 bits are two planes, the low byte without a sign and the
// high one, whose sums are put together after: high * 256 + low. Products come in fours: keys lie as
// [kChunk / 16][dim / 4][16 tokens][4] and values as [dim / 16][kChunk / 4][16][4 tokens].
#pragma once

#include <algorithm>
#include <cstring>

#include "../tile_registers.h"
#include "attention_cache.h"
#include "attention_whole.h"

namespace engine_cpu {
namespace ENGINE_ISA {

// A byte of the panels above.
enum class MatrixByte : int8_t {};
template <>
inline constexpr bool kWholeNumbers<MatrixByte> = true;

constexpr int kMatrixRows = kMostTileRows;  // of a tile
constexpr int kLeastMatrixRows = 9;         // fewer do not pay for the panels
constexpr int kMatrixStep = 64;             // dimensions of a key, and tokens of values, that one instruction takes

inline bool suits_matrix(int64_t dim, int64_t value_dim) { return dim % kMatrixStep == 0 && value_dim % 32 == 0; }

#if defined(ENGINE_MATRIX_UNIT)

constexpr bool kMatrixUnit = true;

// Four bytes of 16 tokens or dimensions, of two rows of pairs.
ENGINE_INLINE void zip_pairs(const int8_t* even, const int8_t* odd, MatrixByte* quads) {
  u16x16 low, high;
  zip(load_as<u16x16>(even), load_as<u16x16>(odd), low, high);
  std::memcpy(quads, &low, 32);
  std::memcpy(quads + 32, &high, 32);
}

// A tile of keys, [dim / 2][16 tokens][2]. As many bytes from `ahead` on are asked for meanwhile.
ENGINE_INLINE void lay_out_keys(const int8_t* tile, const int8_t* ahead, int64_t dim, MatrixByte* panel) {
  for (int64_t k = 0; k < dim; k += 4) {
    __builtin_prefetch(ahead + 16 * k, 0, 2);
    zip_pairs(tile + 16 * k, tile + 16 * (k + 2), panel + 16 * k);
  }
}

// The values of `all` tokens. Those beside them that a four takes have weight zero, whatever they hold.
inline void lay_out_values(const AttentionCache& cache, const HeadBlocks& of, int64_t dim, Span all, MatrixByte* panel) {
  const bool pairs = cache.layout().beside() == 2;
  const auto value = [&](int32_t t) { return cache.value<int8_t>(of, std::clamp(t, all.begin, all.end - 1)); };
  for (int32_t t = all.begin / 4 * 4; t < all.end; t += 4) {
    const int8_t *a = value(t), *b = value(t + 1), *c = value(t + 2), *d = value(t + 3);
    for (int64_t i = 0; i < dim; i += 16) {
      MatrixByte* to = panel + i * kChunk + 16 * t;
      if (pairs) {
        zip_pairs(a + 2 * i, c + 2 * i, to);
      } else {
        u8x16 even[2], odd[2];
        zip(load_as<u8x16>(a + i), load_as<u8x16>(b + i), even[0], even[1]);
        zip(load_as<u8x16>(c + i), load_as<u8x16>(d + i), odd[0], odd[1]);
        zip_pairs(reinterpret_cast<const int8_t*>(even), reinterpret_cast<const int8_t*>(odd), to);
      }
    }
  }
}

// 16 numbers, their low 16 bits as two planes, `pitch` bytes from the low to the high one.
ENGINE_INLINE void store_planes(i32x16 whole, uint8_t* low, int64_t pitch) {
  const i8x16 planes[2] = {narrow_i8(whole), narrow_i8(whole >> 8)};
  std::memcpy(low, &planes[0], 16);
  std::memcpy(low + pitch, &planes[1], 16);
}

// A row's rounded softmax weights as planes [2][kMatrixRows][kChunk].
template <>
struct RoundedRow<MatrixByte> {
  static constexpr int kStep = kMatrixStep;
  uint8_t* low;
  RoundedRow(int16_t* rounded, int row) : low(reinterpret_cast<uint8_t*>(rounded) + row * kChunk) {}
  ENGINE_INLINE void put(int32_t t, i32x16 whole) const { store_planes(whole, low + t, kMatrixRows * kChunk); }
};

// A tile's query rows times `factor` as planes [2][kMatrixRows][dim], with a scale a row. `room`: i16 [dim].
ENGINE_INLINE void lay_out_queries(const float* const (&rows)[16], int count, int64_t dim, float factor, float bound,
                                   int16_t* room, uint8_t* planes, float* scales) {
  for (int r = 0; r < count; ++r) {
    scales[r] = quantize_pairs(rows[r], dim, factor, bound, room);
    for (int64_t i = 0; i < dim; i += 16)
      store_planes(bit_cast<i32x16>(widen_u16(load_as<u16x16>(room + i))), planes + r * dim + i, kMatrixRows * dim);
  }
}

// Integer sums of a tile's rows: registers 0 and 1 the low and the high plane of 16 columns, 2 and 3 of the next 16.
struct PlaneSums {
  alignas(64) int32_t of[4][kMatrixRows][16];

  ENGINE_INLINE void take() {
    tile_store<0>(of[0], 64);
    tile_store<1>(of[1], 64);
    tile_store<2>(of[2], 64);
    tile_store<3>(of[3], 64);
  }
  ENGINE_INLINE i32x16 whole(int row, int columns) const {
    const u32x16 low = load_as<u32x16>(of[2 * columns][row]), high = load_as<u32x16>(of[2 * columns + 1][row]);
    return bit_cast<i32x16>((high << 8) + low);
  }
};

// The registers of a tile's sums, its two planes and two tiles of columns.
inline TileRegisters plane_registers(int count) {
  const TileRegisters::Shape rows{count, 64}, columns{16, 64};
  return TileRegisters({rows, rows, rows, rows, rows, rows, columns, columns});
}

// The sums of both planes, `pitch` bytes from row to row, with two tiles of columns, kMatrixStep of each at a time.
ENGINE_INLINE void add_planes(const uint8_t* low, const uint8_t* high, int64_t pitch, const MatrixByte* columns,
                              const MatrixByte* next_columns) {
  tile_load<4>(low, pitch);
  tile_load<6>(columns, 64);
  tile_dot<false, true, 0, 4, 6>();
  tile_load<5>(high, pitch);
  tile_dot<true, true, 1, 5, 6>();
  tile_load<7>(next_columns, 64);
  tile_dot<false, true, 2, 4, 7>();
  tile_dot<true, true, 3, 5, 7>();
}

ENGINE_INLINE void zero_sums() {
  tile_zero<0>();
  tile_zero<1>();
  tile_zero<2>();
  tile_zero<3>();
}

// scores i32 [rows][kChunk] of the tokens of `all`, and of those up to the next 32.
inline void matrix_scores(int rows, const uint8_t* planes, const MatrixByte* panel, int64_t dim, Span all,
                          int32_t* scores) {
  const TileRegisters registers = plane_registers(rows);
  PlaneSums sums[2];
  const auto finish = [&](int32_t t, const PlaneSums& of) __attribute__((always_inline)) {
    for (int r = 0; r < rows; ++r)
      for (int j = 0; j < 2; ++j) store(scores + r * kChunk + t + 16 * j, of.whole(r, j));
  };
  const int32_t begin = all.begin / 32 * 32;
  int at = 0;
  for (int32_t t = begin; t < all.end; t += 32, at ^= 1) {
    zero_sums();
    for (int64_t k = 0; k < dim; k += kMatrixStep) {
      const MatrixByte* keys = panel + t * dim + 16 * k;
      add_planes(planes + k, planes + kMatrixRows * dim + k, dim, keys, keys + 16 * dim);
    }
    sums[at].take();
    if (t > begin) finish(t - 32, sums[at ^ 1]);  // beside the sums of this step
  }
  finish((all.end - 1) / 32 * 32, sums[at ^ 1]);
}

// out[row][0 .. dim) = sum over the tokens of `all` of weight * value; weights are planes [2][kMatrixRows][kChunk], zero
// beside `all` within kMatrixStep, with a scale a row.
inline void matrix_values(int rows, const uint8_t* weights, const float* scales, const MatrixByte* panel, int64_t dim,
                          Span all, float* out, int64_t out_stride) {
  const TileRegisters registers = plane_registers(rows);
  PlaneSums sums[2];
  const auto finish = [&](int64_t d, const PlaneSums& of) __attribute__((always_inline)) {
    for (int r = 0; r < rows; ++r)
      for (int j = 0; j < 2; ++j) store(out + r * out_stride + d + 16 * j, to_f32(of.whole(r, j)) * scales[r]);
  };
  int at = 0;
  for (int64_t d = 0; d < dim; d += 32, at ^= 1) {
    zero_sums();
    for (int32_t t = all.begin / kMatrixStep * kMatrixStep; t < all.end; t += kMatrixStep) {
      const MatrixByte* values = panel + d * kChunk + 16 * t;
      add_planes(weights + t, weights + kMatrixRows * kChunk + t, kChunk, values, values + 16 * kChunk);
    }
    sums[at].take();
    if (d > 0) finish(d - 32, sums[at ^ 1]);
  }
  finish(dim - 32, sums[at ^ 1]);
}

#else

constexpr bool kMatrixUnit = false;
inline void lay_out_queries(const float* const (&)[16], int, int64_t, float, float, int16_t*, uint8_t*, float*) {}
inline void lay_out_keys(const int8_t*, const int8_t*, int64_t, MatrixByte*) {}
inline void lay_out_values(const AttentionCache&, const HeadBlocks&, int64_t, Span, MatrixByte*) {}

#endif

}  // namespace ENGINE_ISA
}  // namespace engine_cpu
