// attention_whole.h's products through the matrix unit (AMX): the same whole numbers, and so the same bits.
//
// Its factors are bytes, so a number of 16 bits is two planes, the low byte without a sign and the high one, whose sums are put
// together after: high * 256 + low. Queries and softmax weights always are, keys and values where int16 is stored. Products come
// in fours: a plane of keys lies as [kChunk / 16][dim / 4][16 tokens][4], one of values as [dim / 16][kChunk / 4][16][4 tokens].
#pragma once

#include <algorithm>
#include <cstring>

#include "../tile_registers.h"
#include "attention_cache.h"
#include "attention_whole.h"

namespace engine_cpu {
namespace ENGINE_ISA {

// A byte of the panels above, of numbers that are stored as T.
template <class T>
struct MatrixByte {
  int8_t byte;
};
template <class T>
inline constexpr bool kWholeNumbers<MatrixByte<T>> = true;
template <class T>
constexpr bool kIsMatrixByte = false;
template <class T>
constexpr bool kIsMatrixByte<MatrixByte<T>> = true;

constexpr int kMatrixRows = kMostTileRows;  // of a tile
constexpr int kLeastMatrixRows = 9;         // fewer do not pay for the panels
constexpr int kMatrixStep = 64;             // dimensions of a key, and tokens of values, that one instruction takes

inline bool suits_matrix(int64_t dim, int64_t value_dim) { return dim % kMatrixStep == 0 && value_dim % 32 == 0; }

#if defined(ENGINE_MATRIX_UNIT)

constexpr bool kMatrixUnit = true;

// Four numbers of 16 tokens or dimensions, of two rows of pairs; the high bytes of int16 go `plane` bytes on.
ENGINE_INLINE void lay_out_pairs(const int8_t* even, const int8_t* odd, MatrixByte<int8_t>* quads, int64_t) {
  u16x16 zipped[2];
  zip(load_as<u16x16>(even), load_as<u16x16>(odd), zipped[0], zipped[1]);
  std::memcpy(quads, zipped, 64);
}
ENGINE_INLINE void lay_out_pairs(const int16_t* even, const int16_t* odd, MatrixByte<int16_t>* quads, int64_t plane) {
  constexpr __mmask32 kUpper = 0xaaaaaaaa;  // of each two words
  const __m512i low_first = _mm512_set4_epi32(0x0f0d0e0c, 0x0b090a08, 0x07050604, 0x03010200);
  const __m512i x = _mm512_shuffle_epi8(_mm512_loadu_si512(even), low_first);
  const __m512i y = _mm512_shuffle_epi8(_mm512_loadu_si512(odd), low_first);
  _mm512_storeu_si512(quads, _mm512_mask_blend_epi16(kUpper, x, _mm512_slli_epi32(y, 16)));
  _mm512_storeu_si512(quads + plane, _mm512_mask_blend_epi16(kUpper, _mm512_srli_epi32(x, 16), y));
}

// A tile of keys, [dim / 2][16 tokens][2]. As many bytes from `ahead` on are asked for meanwhile.
template <class T>
ENGINE_INLINE void lay_out_keys(const T* tile, const T* ahead, int64_t dim, MatrixByte<T>* panel) {
  for (int64_t k = 0; k < dim; k += 4) {
    for (int64_t i = 0; i < 64; i += kLineOf<T>) __builtin_prefetch(ahead + 16 * k + i, 0, 2);
    lay_out_pairs(tile + 16 * k, tile + 16 * (k + 2), panel + 16 * k, kChunk * dim);
  }
}

// The values of `all` tokens. Those beside them that a four takes have weight zero, whatever they hold.
template <class T>
void lay_out_values(const AttentionCache& cache, const HeadBlocks& of, int64_t dim, Span all, MatrixByte<T>* panel) {
  using V = std::conditional_t<sizeof(T) == 1, u8x16, u16x16>;
  const bool pairs = cache.layout().beside() == 2;
  const auto value = [&](int32_t t) { return cache.value<T>(of, std::clamp(t, all.begin, all.end - 1)); };
  for (int32_t t = all.begin / 4 * 4; t < all.end; t += 4) {
    const T *a = value(t), *b = value(t + 1), *c = value(t + 2), *d = value(t + 3);
    for (int64_t i = 0; i < dim; i += 16) {
      MatrixByte<T>* to = panel + i * kChunk + 16 * t;
      if (pairs) {
        lay_out_pairs(a + 2 * i, c + 2 * i, to, kChunk * dim);
      } else {
        V even[2], odd[2];
        zip(load_as<V>(a + i), load_as<V>(b + i), even[0], even[1]);
        zip(load_as<V>(c + i), load_as<V>(d + i), odd[0], odd[1]);
        lay_out_pairs(reinterpret_cast<const T*>(even), reinterpret_cast<const T*>(odd), to, kChunk * dim);
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
template <class T>
struct RoundedRow<MatrixByte<T>> {
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

// Both planes of a tile's rows, `pitch` bytes from row to row.
struct RowPlanes {
  const uint8_t *low, *high;
  int64_t pitch;

  ENGINE_INLINE RowPlanes from(int64_t step) const { return {low + step, high + step, pitch}; }
};

// What they are multiplied with: 16 columns, and how far it is to the next 16 and to the same in the high plane.
template <class T>
struct ColumnTiles {
  const MatrixByte<T>* at;
  int64_t next, plane;
};

// Integer sums of a tile's rows with kTiles times 16 columns, in registers and then in memory.
template <class T>
struct PlaneSums;

// Bytes: registers 0 and 1 have the low and the high plane's of 16 columns, 2 and 3 of the next 16.
template <>
struct PlaneSums<int8_t> {
  static constexpr int kTiles = 2;
  alignas(64) int32_t of[4][kMatrixRows][16];

  static TileRegisters registers(TileRegisters::Shape rows, TileRegisters::Shape columns) {
    return TileRegisters({rows, rows, rows, rows, rows, rows, columns, columns});
  }
  static ENGINE_INLINE void zero() {
    tile_zero<0>();
    tile_zero<1>();
    tile_zero<2>();
    tile_zero<3>();
  }
  // kMatrixStep more of each.
  static ENGINE_INLINE void add(RowPlanes rows, ColumnTiles<int8_t> columns) {
    tile_load<4>(rows.low, rows.pitch);
    tile_load<6>(columns.at, 64);
    tile_dot<false, true, 0, 4, 6>();
    tile_load<5>(rows.high, rows.pitch);
    tile_dot<true, true, 1, 5, 6>();
    tile_load<7>(columns.at + columns.next, 64);
    tile_dot<false, true, 2, 4, 7>();
    tile_dot<true, true, 3, 5, 7>();
  }
  ENGINE_INLINE void take() {
    tile_store<0>(of[0], 64);
    tile_store<1>(of[1], 64);
    tile_store<2>(of[2], 64);
    tile_store<3>(of[3], 64);
  }
  ENGINE_INLINE i32x16 whole(int row, int tile) const {
    const u32x16 low = load_as<u32x16>(of[2 * tile][row]), high = load_as<u32x16>(of[2 * tile + 1][row]);
    return bit_cast<i32x16>((high << 8) + low);
  }
};

// Numbers of 16 bits: registers 0 to 2 have the sums of two low bytes, of a low and a high one, and of two high ones.
template <>
struct PlaneSums<int16_t> {
  static constexpr int kTiles = 1;
  alignas(64) int32_t of[3][kMatrixRows][16];

  static TileRegisters registers(TileRegisters::Shape rows, TileRegisters::Shape columns) {
    return TileRegisters({rows, rows, rows, {0, 0}, rows, rows, columns, columns});
  }
  static ENGINE_INLINE void zero() {
    tile_zero<0>();
    tile_zero<1>();
    tile_zero<2>();
  }
  static ENGINE_INLINE void add(RowPlanes rows, ColumnTiles<int16_t> columns) {
    tile_load<4>(rows.low, rows.pitch);
    tile_load<6>(columns.at, 64);
    tile_dot<false, false, 0, 4, 6>();
    tile_load<5>(rows.high, rows.pitch);
    tile_dot<true, false, 1, 5, 6>();
    tile_load<7>(columns.at + columns.plane, 64);
    tile_dot<true, true, 2, 5, 7>();
    tile_dot<false, true, 1, 4, 7>();
  }
  ENGINE_INLINE void take() {
    tile_store<0>(of[0], 64);
    tile_store<2>(of[2], 64);
    tile_store<1>(of[1], 64);
  }
  ENGINE_INLINE i32x16 whole(int row, int) const {  // may wrap on the way, as within dot_pairs
    const u32x16 low = load_as<u32x16>(of[0][row]), mixed = load_as<u32x16>(of[1][row]), high = load_as<u32x16>(of[2][row]);
    return bit_cast<i32x16>((high << 16) + (mixed << 8) + low);
  }
};

// Calls finish(first column, sums) for the columns from `begin` to `end`, as many as PlaneSums takes at a time: those of one
// step are finished beside the products of the next. add(column): the products of one step.
template <class T, class Add, class Finish>
ENGINE_INLINE void each_sums(int rows, int64_t begin, int64_t end, Add add, Finish finish) {
  const TileRegisters registers = PlaneSums<T>::registers({rows, 64}, {16, 64});
  PlaneSums<T> sums[2];
  constexpr int kColumns = 16 * PlaneSums<T>::kTiles;
  int at = 0;
  for (int64_t column = begin; column < end; column += kColumns, at ^= 1) {
    PlaneSums<T>::zero();
    add(column);
    sums[at].take();
    if (column > begin) finish(column - kColumns, sums[at ^ 1]);
  }
  finish(begin + (end - begin - 1) / kColumns * kColumns, sums[at ^ 1]);
}

// scores i32 [rows][kChunk] of the tokens of `all`, and of those up to the next 32.
template <class T>
void matrix_scores(int rows, const uint8_t* planes, const MatrixByte<T>* panel, int64_t dim, Span all, int32_t* scores) {
  const RowPlanes queries{planes, planes + kMatrixRows * dim, dim};
  const auto add = [&](int64_t t) __attribute__((always_inline)) {
    for (int64_t k = 0; k < dim; k += kMatrixStep)
      PlaneSums<T>::add(queries.from(k), {panel + t * dim + 16 * k, 16 * dim, kChunk * dim});
  };
  each_sums<T>(rows, all.begin / 32 * 32, all.end, add, [&](int64_t t, const PlaneSums<T>& of) __attribute__((always_inline)) {
    for (int r = 0; r < rows; ++r)
      for (int j = 0; j < of.kTiles; ++j) store(scores + r * kChunk + t + 16 * j, of.whole(r, j));
  });
}

// out[row][0 .. dim) = sum over the tokens of `all` of weight * value; weights are planes [2][kMatrixRows][kChunk], zero
// beside `all` within kMatrixStep, with a scale a row.
template <class T>
void matrix_values(int rows, const uint8_t* planes, const float* scales, const MatrixByte<T>* panel, int64_t dim, Span all,
                   float* out, int64_t out_stride) {
  const RowPlanes weights{planes, planes + kMatrixRows * kChunk, kChunk};
  const auto add = [&](int64_t d) __attribute__((always_inline)) {
    for (int32_t t = all.begin / kMatrixStep * kMatrixStep; t < all.end; t += kMatrixStep)
      PlaneSums<T>::add(weights.from(t), {panel + d * kChunk + 16 * t, 16 * kChunk, kChunk * dim});
  };
  each_sums<T>(rows, 0, dim, add, [&](int64_t d, const PlaneSums<T>& of) __attribute__((always_inline)) {
    for (int r = 0; r < rows; ++r)
      for (int j = 0; j < of.kTiles; ++j) store(out + r * out_stride + d + 16 * j, to_f32(of.whole(r, j)) * scales[r]);
  });
}

#else

constexpr bool kMatrixUnit = false;
inline void lay_out_queries(const float* const (&)[16], int, int64_t, float, float, int16_t*, uint8_t*, float*) {}
template <class T>
void lay_out_keys(const T*, const T*, int64_t, MatrixByte<T>*) {}
template <class T>
void lay_out_values(const AttentionCache&, const HeadBlocks&, int64_t, Span, MatrixByte<T>*) {}

#endif

}  // namespace ENGINE_ISA
}  // namespace engine_cpu
