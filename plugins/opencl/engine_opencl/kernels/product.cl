// ROWS rows of x times ``count`` columns of up to three matrices, one behind the other in whole panels. ``added``: two bits a
// matrix, 1 for a bias and 2 for the residual. This file is compiled once for each ROWS; its sums do not depend on it.
__kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void JOIN(linear_, ROWS)(
    __global const float *x, __global const float *residual, __global const uchar *w0, __global const uchar *w1,
    __global const uchar *w2, __global const float *b0, __global const float *b1, __global const float *b2,
    __global float *y0, __global float *y1, __global float *y2, __local X *q, __local float *xscale, __local short *xsum,
    int N0, int N1, int N2, int K, int added, float fixed_scale, int rows, int count) {
  const int row = get_group_id(0) * ROWS, first = get_group_id(1) * count, here = min(ROWS, rows - row);
  for (int r = 0; r < ROWS; r++) {
    __global const float *from = x + (size_t)(row + min(r, here - 1)) * K;
#if BITS <= 8
    for (int i = get_local_id(0); i < K / 32; i += WG)
      quantize(from + i * 32, fixed_scale, q + r * K + i * 32, xscale + r * K / 32 + i, xsum + r * K / 16 + i * 2);
#else
    for (int i = get_local_id(0); i < K; i += WG) q[r * K + i] = from[i];
#endif
  }
  barrier(CLK_LOCAL_MEM_FENCE);
  const int end0 = PANELS(N0) * PANEL, end1 = end0 + PANELS(N1) * PANEL;
  for (int c = first + get_local_id(0) * LANES; c < min(first + count, end1 + N2); c += WG * LANES) {
    const int m = c < end0 ? 0 : c < end1 ? 1 : 2, n = c - (m == 0 ? 0 : m == 1 ? end0 : end1);
    const int N = m == 0 ? N0 : m == 1 ? N1 : N2;
    if (n >= N) continue;  // behind the last column of a matrix, in its last panel
    __global const uchar *w = m == 0 ? w0 : m == 1 ? w1 : w2;
    __global const uchar *codes = w + n / PANEL * PANEL_BYTES(K) + n % PANEL * CODE_BYTES;
    WIDE(float) sum[ROWS];
#if BITS <= 8
    __global const uchar *scales = w + SCALE_BEGIN(N, K) + (n / PANEL * (K / GROUP) * PANEL + n % PANEL) * SCALE_BYTES;
    __global const uchar *minimums = scales + SCALES(N, K);
    for (int r = 0; r < ROWS; r++) sum[r] = 0;
    for (int begin = 0; begin < K; begin += GROUP, scales += PANEL * SCALE_BYTES, minimums += PANEL * SCALE_BYTES) {
      WIDE(int) dot[ROWS];
      int part_sum[ROWS];
      for (int r = 0; r < ROWS; r++) dot[r] = part_sum[r] = 0;
#pragma unroll
      for (int k = begin; k < begin + GROUP; k += 16) {
#if BITS == 4  // sixteen products of at most 15 * 128 fit a short
        WIDE(short) part[ROWS];
        for (int r = 0; r < ROWS; r++) part[r] = 0;
#pragma unroll
        for (int j = k; j < k + 16; j += 4, codes += PANEL * CODE_BYTES) {
          const WIDE(ushort) four = LOAD((__global const ushort *)codes);
          const WIDE(short) c0 = AS_SHORT(four & (ushort)15), c1 = AS_SHORT(four >> (ushort)4 & (ushort)15);
          const WIDE(short) c2 = AS_SHORT(four >> (ushort)8 & (ushort)15), c3 = AS_SHORT(four >> (ushort)12);
          for (int r = 0; r < ROWS; r++) {
            __local const short *own = q + r * K + j;
            part[r] += c0 * own[0] + c1 * own[1] + c2 * own[2] + c3 * own[3];
          }
        }
        for (int r = 0; r < ROWS; r++) dot[r] += WIDE(convert_int)(part[r]);
#else
#pragma unroll
        for (int j = k; j < k + 16; j++, codes += PANEL * CODE_BYTES) {
          const WIDE(int) code = WIDE(convert_int)(LOAD((__global const char *)codes));
          for (int r = 0; r < ROWS; r++) dot[r] += code * q[r * K + j];
        }
#endif
        for (int r = 0; r < ROWS; r++) part_sum[r] += xsum[(r * K + k) / 16];
      }
      const WIDE(float) scale = SCALE_AT(scales);
      for (int r = 0; r < ROWS; r++) {
        const float step = xscale[(r * K + begin) / 32];
        sum[r] = fma(TO_FLOAT(dot[r] - OFFSET * part_sum[r]), scale * step, sum[r]);
        if (MINIMUM) sum[r] = fma(SCALE_AT(minimums), BROADCAST(step * part_sum[r]), sum[r]);
      }
    }
#else
    WIDE(float) part[ROWS][4];  // four, so that a product need not wait for the last
    for (int r = 0; r < ROWS; r++) part[r][0] = part[r][1] = part[r][2] = part[r][3] = 0;
    for (int k = 0; k < K / 4 * 4; k += 4)
#pragma unroll
      for (int j = 0; j < 4; j++, codes += PANEL * CODE_BYTES) {
        const WIDE(float) weight = WEIGHT(codes);
        for (int r = 0; r < ROWS; r++) part[r][j] = fma(weight, BROADCAST(q[r * K + k + j]), part[r][j]);
      }
    for (int k = K / 4 * 4; k < K; k++, codes += PANEL * CODE_BYTES)
      for (int r = 0; r < ROWS; r++) part[r][0] = fma(WEIGHT(codes), BROADCAST(q[r * K + k]), part[r][0]);
    for (int r = 0; r < ROWS; r++) sum[r] = (part[r][0] + part[r][1]) + (part[r][2] + part[r][3]);
#endif
    for (int r = 0; r < here; r++)
      finish(sum[r], n, row + r, N, m == 0 ? b0 : m == 1 ? b1 : b2, residual, m == 0 ? y0 : m == 1 ? y1 : y2, added >> 2 * m);
  }
}
