// RMS norm of a row, rounded to 8 bits with a scale a row, in one pass over memory.
//
// Compiled with WIDTH (at least the row's, at most 32 a thread) and the types ACT of x and RESIDUAL of what it is added to.
#include "portable.h"

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / WARP;
constexpr int KEPT = (WIDTH + THREADS - 1) / THREADS;

struct Sum {
  DEVICE static float of(float a, float b) { return a + b; }
};
struct Most {
  DEVICE static float of(float a, float b) { return most_of(a, b); }
};

// Over all threads; ``shared`` [WARPS] is used by no other reduction.
template <class How> DEVICE float over_threads(float x, float* shared) {
  for (int mask = 1; mask < WARP; mask *= 2) x = How::of(x, shuffle_xor(x, mask));
  if (lane() == 0) shared[thread() / WARP] = x;
  barrier();
  x = shared[0];
  for (int n = 1; n < WARPS; ++n) x = How::of(x, shared[n]);
  return x;
}

// Grid: rows. x [rows, width]; with a residual first x + residual, which goes to total. The normed row as codes from -128 to 127 in
// steps of 2 / 255 of its greatest size: a step of NaN and codes of 0 where it is not finite, and 1 where all is zero.
KERNEL(THREADS) norm_quantize(
    const ACT* x, const RESIDUAL* residual, RESIDUAL* total, const float* weight, i8* codes, float* steps, int width, float eps,
    float offset) {
  SHARED(float, squares, WARPS);
  SHARED(float, greatest, WARPS);
  SHARED(float, strange, WARPS);
  const long row = (long)block(0) * width;
  float kept[KEPT], sum = 0, most = 0, infinite = 0;
  for (int n = 0; n < KEPT; ++n) {
    const int column = n * THREADS + thread();
    kept[n] = 0;
    if (column >= width) continue;
    kept[n] = number(x[row + column]);
    if (residual) {
      kept[n] += number(residual[row + column]);
      put(total + row + column, kept[n]);
    }
    sum += kept[n] * kept[n];
  }
  const float size = root_of(over_threads<Sum>(sum, squares) / width + eps);
  for (int n = 0; n < KEPT; ++n) {
    const int column = n * THREADS + thread();
    if (column >= width) continue;
    kept[n] = kept[n] / size * (weight[column] + offset);
    const float magnitude = kept[n] < 0 ? -kept[n] : kept[n];
    if (magnitude < infinity()) {
      most = most_of(most, magnitude);
    } else {
      infinite = 1;
      kept[n] = 0;
    }
  }
  most = over_threads<Most>(most, greatest);
  infinite = over_threads<Most>(infinite, strange);
  const float step = most > 0 ? most / 127.5f : 1.0f;
  for (int n = 0; n < KEPT; ++n) {
    const int column = n * THREADS + thread();
    if (column >= width) continue;
    const float taken = nearest(kept[n] / step);
    codes[row + column] = (i8)(taken > 127 ? 127 : taken < -128 ? -128 : taken);
  }
  if (thread() == 0) steps[block(0)] = infinite > 0 ? no_number() : step;
}
