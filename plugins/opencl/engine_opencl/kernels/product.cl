// ROWS rows of x times ``count`` columns of up to three matrices, one behind the other in whole panels. ``added``: two bits a
// matrix, for ``finish``. This file is compiled once for each ROWS, on which sums do not depend.
#define OF(m, a, b, c) ((m) == 0 ? (a) : (m) == 1 ? (b) : (c))
#define ALL(r) _Pragma("unroll") for (int r = 0; r < ROWS; r++)
KERNEL JOIN(linear_, ROWS)(
    IN float *x, IN float *residual, IN uchar *w0, IN uchar *w1, IN uchar *w2, IN float *b0, IN float *b1, IN float *b2,
    OUT float *y0, OUT float *y1, OUT float *y2, LOCAL X *q, LOCAL float *xscale, LOCAL short *xsum, int N0, int N1, int N2,
    int K, int added, float fixed_scale, int rows, int count) {
  const int row = get_group_id(0) * ROWS, first = get_group_id(1) * count, here = min(ROWS, rows - row);
  ALL(r) {  // rows behind the last repeat it
    IN float *from = x + (size_t)(row + min(r, here - 1)) * K;
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
    const int m = c < end0 ? 0 : c < end1 ? 1 : 2, n = c - OF(m, 0, end0, end1), N = OF(m, N0, N1, N2);
    if (n >= N) continue;  // in the last panel, behind the last column
    IN uchar *w = OF(m, w0, w1, w2);
    IN CODE *codes = (IN CODE *)(w + n / PANEL * PANEL_BYTES(K)) + n % PANEL;
    WIDE(float) sum[ROWS];
#if BITS <= 8
    IN uchar *scales = w + SCALE_BEGIN(N, K) + (n / PANEL * (K / GROUP) * PANEL + n % PANEL) * sizeof(SCALE);
    ALL(r) sum[r] = 0;
    for (int begin = 0; begin < K; begin += GROUP, scales += PANEL * sizeof(SCALE)) {
      WIDE(DOT) dot[ROWS];
      int sums[ROWS];
      ALL(r) dot[r] = sums[r] = 0;
#pragma unroll
      for (int k = begin; k < begin + GROUP; k += 16) {
#if BITS == 4  // sixteen products of at most 15 * 128 fit a short
        WIDE(short) part[ROWS];
        ALL(r) part[r] = 0;
#pragma unroll
        for (int j = k; j < k + 16; j += 4, codes += PANEL) {
          const WIDE(short) four = LOAD((IN short *)codes), c0 = four & (short)15, c1 = four >> (short)4 & (short)15;
          const WIDE(short) c2 = four >> (short)8 & (short)15, c3 = four >> (short)12 & (short)15;
          ALL(r) {
            LOCAL const short *own = q + r * K + j;
            part[r] += c0 * own[0] + c1 * own[1] + c2 * own[2] + c3 * own[3];
          }
        }
        ALL(r) dot[r] += WIDE(convert_int)(part[r]);
#else
#pragma unroll
        for (int j = k; j < k + 16; j++, codes += PANEL) {
          const WIDE(float) code = FLOATS(CODE, codes);
          ALL(r) dot[r] = fma(code, BROADCAST(q[r * K + j]), dot[r]);  // whole numbers below 2^24
        }
#endif
        ALL(r) sums[r] += xsum[(r * K + k) / 16];
      }
      const WIDE(float) scale = FLOATS(SCALE, scales);
      ALL(r) {
        const float step = xscale[(r * K + begin) / 32];
        sum[r] = fma(WIDE(convert_float)(dot[r] - OFFSET * sums[r]), scale * step, sum[r]);
        if (MINIMUM) sum[r] = fma(FLOATS(SCALE, scales + SCALES(N, K)), BROADCAST(step * sums[r]), sum[r]);
      }
    }
#else
    WIDE(float) part[ROWS][4];  // four, so that a product need not wait for the last
    ALL(r) part[r][0] = part[r][1] = part[r][2] = part[r][3] = 0;
    for (int k = 0; k < K; k += 4)
#pragma unroll
      for (int j = 0; j < 4; j++, codes += PANEL)
        if (k + j < K) {
          const WIDE(float) weight = FLOATS(CODE, codes);
          ALL(r) part[r][j] = fma(weight, BROADCAST(q[r * K + k + j]), part[r][j]);
        }
    ALL(r) sum[r] = (part[r][0] + part[r][1]) + (part[r][2] + part[r][3]);
#endif
    for (int r = 0; r < here; r++)
      finish(sum[r], n, row + r, N, OF(m, b0, b1, b2), residual, OF(m, y0, y1, y2), added >> 2 * m);
  }
}
#undef ALL
