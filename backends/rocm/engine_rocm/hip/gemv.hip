// Products of a few rows with a matrix of codes and factors, as engine_cuda's repack lays it out:
//     number = (code - ZERO) * scale - least        or        table[code] * scale
//
// Compiled with OUTPUTS (rows of the matrix a workgroup), BITS (4 or 8), GROUP and SUPER (columns of a fine and of a whole
// factor), ZERO, ROWS (of x, 1 to 8), the types ACT of x, OUT of y and the residual, CODE, FACTOR and FINE. A warp has one row of
// the matrix at a time, so that its codes are read once, in order.
#include "portable.h"

constexpr int THREADS = 128;
constexpr int WARPS = THREADS / WARP;
constexpr int BYTES = 16;  // of codes, which a thread takes at once; all of their columns are in one group
constexpr int HALVES = 8 / BITS;
static_assert(GROUP % BYTES == 0 && SUPER % GROUP == 0, "a thread's columns share their factors");

struct Factors {
  const FACTOR* whole;
  const FINE* fine;
  int supers, groups;

  DEVICE float at(long row, int column) const {
    const float factor = number(whole[row * supers + column / SUPER]);
    return fine ? factor * number(fine[row * groups + column / GROUP]) : factor;
  }
};

// The columns from ``column`` on: what a thread's BYTES codes, or their nibbles of one side, are multiplied with.
DEVICE void multiply(
    const ACT* x, int depth, int column, const float (&numbers)[BYTES], float scale, float least, float (&sums)[ROWS]) {
  for (int row = 0; row < ROWS; ++row) {
    float values[BYTES], dot = 0, total = 0;
    load<BYTES>(x + (long)row * depth + column, values);
    for (int n = 0; n < BYTES; ++n) {
      dot += numbers[n] * values[n];
      total += values[n];
    }
    sums[row] += scale * dot - least * total;
  }
}

// Grid: outputs by OUTPUTS. x [ROWS, depth], depth a multiple of 32; codes [outputs, code_row] bytes: of 4 bits those of columns 64 i +
// j, low, and 64 i + 32 + j. table, fine_scale, least, fine_least, bias [outputs] and residual [ROWS, outputs] may be null.
KERNEL(THREADS) gemv(
    const ACT* x, const CODE* codes, const float* table, const FACTOR* scale, const FINE* fine_scale, const FACTOR* least,
    const FINE* fine_least, const float* bias, const OUT* residual, OUT* y, int outputs, int depth, int code_row, int groups,
    int supers) {
  const Factors scales{scale, fine_scale, supers, groups}, leasts{least, fine_least, supers, groups};
  const int end = least_of(outputs, (block(0) + 1) * OUTPUTS);
  for (int row = block(0) * OUTPUTS + thread() / WARP; row < end; row += WARPS) {
    float sums[ROWS] = {};
    for (int byte = lane() * BYTES; byte < code_row; byte += WARP * BYTES) {
      const auto taken = *reinterpret_cast<const Vector<CODE, BYTES>*>(codes + (long)row * code_row + byte);
      for (int half = 0; half < HALVES; ++half) {
        const int column = BITS == 8 ? byte : byte / 32 * 64 + half * 32 + byte % 32;
        if (column >= depth) break;
        float numbers[BYTES];
        for (int n = 0; n < BYTES; ++n) {
          const int code = BITS == 8 ? (int)taken.at[n] : taken.at[n] >> 4 * half & 15;
          numbers[n] = table ? table[code] : (float)(code - ZERO);
        }
        multiply(x, depth, column, numbers, scales.at(row, column), least ? leasts.at(row, column) : 0.0f, sums);
      }
    }
    for (int n = 0; n < ROWS; ++n) {
      for (int mask = 1; mask < WARP; mask *= 2) sums[n] += shuffle_xor(sums[n], mask);
      if (lane() != 0) continue;
      if (bias) sums[n] += bias[row];
      if (residual) sums[n] += number(residual[n * (long)outputs + row]);
      put(y + n * (long)outputs + row, sums[n]);
    }
  }
}
