// y = x W^T (+ bias) (+ residual) for any number of rows, by one thread, strip by strip.
#pragma once

#include "../buffer.h"
#include "../simd_storage.h"
#include "layout.h"
#include "q8g32.h"

namespace engine_cpu {
namespace ENGINE_ISA {

// So many rows read the packed weights directly; more unpack a chunk at a time and share it.
constexpr int kFewRows = kWideRegisters >= 32 ? 8 : kRegisterBytes >= 32 ? 6 : kWideRegisters >= 8 ? 4 : 1;

// Rows against one matrix. Row i of the product reads row x_rows[i] of x and writes row y_rows[i] of y (null: i).
struct Product {
  const struct FamilyOps* ops;
  const uint8_t* matrix;
  int64_t columns;
  int64_t depth;
  const uint8_t* x;
  int64_t x_bytes;  // of a row
  float* y;  // null: the sums of a strip stay in the scratch, and strips are multiplied one at a time,
  const class SumsTaker* taker = nullptr;  // unless this takes them in place of y
  const float* bias = nullptr;      // [columns]
  const float* residual = nullptr;  // laid out as y
  const int32_t* x_rows = nullptr;
  const int32_t* y_rows = nullptr;
  const uint8_t* after = nullptr;  // what this thread will most likely multiply after the last strip; null: the one behind it

  ENGINE_INLINE int64_t valid_columns(int64_t strip) const {
    return columns - strip * kStrip < kStrip ? columns - strip * kStrip : kStrip;
  }
  bool reads_plain() const;  // x as f32 or bf16
  // What comes after a strip of so many bytes, the last one or not.
  ENGINE_INLINE const uint8_t* following(int64_t strip, bool last, int64_t bytes) const {
    return last && after != nullptr ? after : matrix + (strip + 1) * bytes;
  }
};

// What a family reads as x. Rows of f32 and bf16 are contiguous.
enum class Activation { f32, bf16, q8g32 };

constexpr int64_t kBlockRows = 256;  // the most rows that are multiplied with a strip at a time,
// and their values, which stay in the second-level cache: 1 MiB of a Zen 4 core, 2 of one with AMX,
constexpr int64_t kBlockValues = 384 << 10;
#if defined(ENGINE_MATRIX_UNIT)
constexpr int64_t kPackedBlockValues = 2 * kBlockValues;
#else
constexpr int64_t kPackedBlockValues = kBlockValues;
#endif
constexpr int64_t kLeastBlockRows = 24;  // unless they are very long
constexpr int64_t kTileSlack = 16;  // rows that the last tile of a matrix unit may have beyond those that there are

ENGINE_INLINE int64_t block_rows(Activation activation, int64_t depth) {
  const int64_t rows = (activation == Activation::f32 ? kBlockValues : kPackedBlockValues) / depth;
  return rows < kLeastBlockRows ? kLeastBlockRows : rows > kBlockRows ? kBlockRows : rows;
}

// One thread's scratch for products of at most max_depth, in memory that it shares with all other kernels of its pool.
class Scratch {
 public:
  Scratch(uint8_t* memory, int64_t max_depth)
      : memory_(memory), factor_bytes_(factor_bytes(max_depth)), acc_(reinterpret_cast<float*>(memory + kChunkBytes + kSumsBytes)) {}

  // The same but for the sums, which are to lie elsewhere, with room for kTileSlack rows more.
  Scratch with_sums_at(float* acc) const {
    Scratch other = *this;
    other.acc_ = acc;
    return other;
  }

  static size_t bytes(int64_t max_depth) { return kFixedBytes + factor_bytes(max_depth) + cell_bytes(max_depth); }

  static constexpr size_t kChunkBytes = 32768;
  // Of a machine with a matrix unit (int8_matrix.h): integer sums of two parts, and a block's rows, 16 x 32 k at a time.
#if defined(ENGINE_MATRIX_UNIT)
  static constexpr size_t kSumsBytes = 16384, kMostCellBytes = 16 * (32 + 4 + 8);
#else
  static constexpr size_t kSumsBytes = 0, kMostCellBytes = 0;
#endif

  uint8_t* chunk() const { return memory_; }
  int32_t* sums() const { return reinterpret_cast<int32_t*>(chunk() + kChunkBytes); }
  float* acc() const { return acc_; }  // [rows][64]
  const uint8_t** rows() const { return reinterpret_cast<const uint8_t**>(memory_ + kRowsAt); }  // [rows]
  RowFactors* factors() const { return reinterpret_cast<RowFactors*>(memory_ + kFixedBytes); }  // [depth / group][rows]
  uint8_t* cells() const { return memory_ + kFixedBytes + factor_bytes_; }

 private:
  static constexpr size_t kRowsAt = kChunkBytes + kSumsBytes + kBlockRows * kStrip * sizeof(float);
  static constexpr size_t kFixedBytes = kRowsAt + kBlockRows * sizeof(uint8_t*);
  static_assert(kFixedBytes % 64 == 0);

  static size_t factor_bytes(int64_t max_depth) {
    return ((kPackedBlockValues + kLeastBlockRows * max_depth + 255) / 256 * 16 + kBlockRows) * sizeof(RowFactors);
  }
  static size_t cell_bytes(int64_t max_depth) {
    return (kPackedBlockValues + (kLeastBlockRows + 15) * max_depth) / (16 * 32) * kMostCellBytes;
  }

  uint8_t* memory_;
  size_t factor_bytes_;
  float* acc_;
};

ENGINE_INLINE int64_t row_bytes(Activation activation, int64_t depth) {
  switch (activation) {
    case Activation::f32: return 4 * depth;
    case Activation::bf16: return 2 * depth;
    case Activation::q8g32: return q8g32_row_bytes(depth);
  }
  __builtin_unreachable();
}

// x f32 [depth] as one row of bf16, to nearest, ties to even.
inline void round_row(const float* x, int64_t depth, uint8_t* row) {
  auto* out = reinterpret_cast<bf16*>(row);
  int64_t k = 0;
  for (; k + 16 <= depth; k += 16) narrow(out + k, load(x + k));
  if (k == depth) return;
  const u16x16 last = narrow_bf16(load_first(x + k, depth - k));
  std::memcpy(out + k, &last, 2 * (depth - k));
}

// Has what it wants of the sums of a strip, acc [rows][64], for rows `row`.. of a product, some of them at a time.
class SumsTaker {
 public:
  virtual void take(const Product& product, int64_t row, int64_t rows, int64_t strip, const float* acc) const = 0;

 protected:
  ~SumsTaker() = default;
};

// What a family does. prepare: once for rows row0.. of a product, before multiply is called for any strips of theirs.
struct FamilyOps {
  void (*prepare)(const Product&, int64_t row0, int64_t rows, const Scratch&);
  void (*multiply)(const Product&, int64_t row0, int64_t rows, int64_t strip0, int64_t strip1, const Scratch&);
  int64_t (*strip_bytes)(int64_t depth);
  Activation activation;
  int64_t span = kGroup;  // of q8g32
};

inline bool Product::reads_plain() const { return ops->activation != Activation::q8g32; }

inline void point_to_rows(const Product& product, int64_t row0, int64_t rows, const Scratch& scratch) {
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t row = product.x_rows == nullptr ? row0 + i : product.x_rows[row0 + i];
    scratch.rows()[i] = product.x + row * product.x_bytes;
  }
}

// The sums of a strip for rows row0.. once they are whole, best while they are in the nearest cache: to y with bias and residual, first
// (acc + bias), then + residual, as separate ops would. Not inline: its loops need not be there for each family.
[[gnu::noinline]] inline void finish_rows(const Product& product, int64_t row0, int64_t rows, int64_t strip, const float* acc) {
  if (product.taker != nullptr) return product.taker->take(product, row0, rows, strip, acc);
  if (product.y == nullptr) return;
  const int64_t column = strip * kStrip;
  const int64_t valid = product.valid_columns(strip);
  for (int64_t i = 0; i < rows; ++i, acc += kStrip) {
    const int64_t row = product.y_rows == nullptr ? row0 + i : product.y_rows[row0 + i];
    const int64_t at = row * product.columns + column;
    int64_t c = 0;
    for (; c + 16 <= valid; c += 16) {
      f32x16 sum = load(acc + c);
      if (product.bias != nullptr) sum += load(product.bias + column + c);
      if (product.residual != nullptr) sum += load(product.residual + at + c);
      store(product.y + at + c, sum);
    }
    for (; c < valid; ++c) {
      float sum = acc[c];
      if (product.bias != nullptr) sum += product.bias[column + c];
      if (product.residual != nullptr) sum += product.residual[at + c];
      product.y[at + c] = sum;
    }
  }
}

// Of a strip, what is to be done with the sums of `count` rows of a block from `first` on.
inline auto finishing(const Product& product, int64_t row0, int64_t strip, const Scratch& s) {
  return [&product, row0, strip, acc = s.acc()](int64_t first, int64_t count) {
    finish_rows(product, row0 + first, count, strip, acc + first * kStrip);
  };
}

// Tile t of `tiles` over `rows` rows begins here; tiles are as equal as can be.
ENGINE_INLINE int64_t tile_start(int64_t rows, int64_t tiles, int64_t t) { return rows * t / tiles; }
ENGINE_INLINE int64_t tiles_of(int64_t rows, int64_t most) { return (rows + most - 1) / most; }

// The operations of a weight's family. std::invalid_argument for a weight that is no matrix.
const FamilyOps& family_ops(const PackedWeight& weight);

// One matrix as a product, but for its rows. x is there as q8g32, as f32 or bf16, or as both. std::invalid_argument where the
// weight is many matrices, or its family reads what is not there.
Product product_of(const PackedWeight& weight, bool packed, bool plain);

}  // namespace ENGINE_ISA
}  // namespace engine_cpu
