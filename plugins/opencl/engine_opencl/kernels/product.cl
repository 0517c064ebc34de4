// Rows of x times columns of the matrix: a group takes ROWS rows, and ``count`` columns from its second number on. Rows
// beyond the last repeat it. ``added``: 1, a bias; 2, a residual. This file is compiled once for each ROWS.
#if BITS <= 8
__kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void JOIN(linear_, ROWS)(
    __global const uchar *w, __global const float *x, __global float *y, __global const float *bias,
    __global const float *residual, int rows, int N, int K, int count, int added, float fixed_scale, __local short *q,
    __local float *xscale, __local short *xsum) {
  const int row = get_group_id(0) * ROWS, first = get_group_id(1) * count, groups = K / 32;
  for (int i = get_local_id(0); i < ROWS * groups; i += WG) {
    const size_t from = (size_t)min(row + i / groups, rows - 1) * K + i % groups * 32;
    quantize(x + from, fixed_scale, q + i * 32, xscale + i, xsum + i * 2);
  }
  barrier(CLK_LOCAL_MEM_FENCE);
  const size_t panels = (N + PANEL - 1) / PANEL;
  __global const uchar *scales = w + panels * PANEL_BYTES(K);
  __global const uchar *minimums = scales + panels * (K / GROUP) * PANEL * SCALE_BYTES;
  for (int n = first + get_local_id(0) * LANES; n < min(first + count, N); n += WG * LANES) {
    const size_t panel = n / PANEL, lane = n % PANEL;
    __global const uchar *codes = w + panel * PANEL_BYTES(K) + lane * CODE_BYTES;
    size_t at = panel * (K / GROUP) * PANEL + lane;
    WIDE(float) sum[ROWS];
    for (int r = 0; r < ROWS; r++) sum[r] = 0;
    for (int k = 0; k < K; at += PANEL) {
      WIDE(int) dot[ROWS];
      for (int r = 0; r < ROWS; r++) dot[r] = 0;
      const int begin = k;
      for (; k < begin + GROUP; k += 16) {
#if BITS == 4  // sixteen products of at most 15 * 128 fit a short
        WIDE(short) part[ROWS];
        for (int r = 0; r < ROWS; r++) part[r] = 0;
        for (int j = 0; j < 16; j += 4, codes += PANEL * CODE_BYTES) {
          const WIDE(ushort) four = LOAD((__global const ushort *)codes);
          const WIDE(short) c0 = AS_SHORT(four & (ushort)15), c1 = AS_SHORT(four >> (ushort)4 & (ushort)15);
          const WIDE(short) c2 = AS_SHORT(four >> (ushort)8 & (ushort)15), c3 = AS_SHORT(four >> (ushort)12);
          for (int r = 0; r < ROWS; r++) {
            __local const short *own = q + r * K + k + j;
            part[r] += c0 * own[0] + c1 * own[1] + c2 * own[2] + c3 * own[3];
          }
        }
        for (int r = 0; r < ROWS; r++) dot[r] += WIDE(convert_int)(part[r]) - OFFSET * xsum[r * groups * 2 + k / 16];
#else
        for (int j = 0; j < 16; j++, codes += PANEL * CODE_BYTES) {
          const WIDE(int) code = WIDE(convert_int)(LOAD((__global const char *)codes));
          for (int r = 0; r < ROWS; r++) dot[r] += code * q[r * K + k + j];
        }
#endif
      }
      const WIDE(float) scale = SCALE_AT(scales, at);
      for (int r = 0; r < ROWS; r++) {
        const float step = xscale[r * groups + begin / 32];
        sum[r] = fma(TO_FLOAT(dot[r]), scale * step, sum[r]);
#if MINIMUM
        sum[r] = fma(SCALE_AT(minimums, at), BROADCAST(step * XSUM(r, begin)), sum[r]);
#endif
      }
    }
    for (int r = 0; r < ROWS; r++)
      if (row + r < rows) finish(sum[r], n, row + r, N, bias, residual, y, added);
  }
}
#else
__kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void JOIN(linear_, ROWS)(
    __global const uchar *w, __global const float *x, __global float *y, __global const float *bias,
    __global const float *residual, int rows, int N, int K, int count, int added) {
  const int row = get_group_id(0) * ROWS, first = get_group_id(1) * count;
  for (int n = first + get_local_id(0) * LANES; n < min(first + count, N); n += WG * LANES) {
    __global const uchar *codes = w + n / PANEL * PANEL_BYTES(K) + n % PANEL * CODE_BYTES;
    __global const float *from[ROWS];
    WIDE(float) sum[ROWS][4];  // four, so that a product need not wait for the last
    for (int r = 0; r < ROWS; r++) {
      from[r] = x + (size_t)min(row + r, rows - 1) * K;
      sum[r][0] = sum[r][1] = sum[r][2] = sum[r][3] = 0;
    }
    for (int k = 0; k < K / 4 * 4; k += 4)
      for (int j = 0; j < 4; j++, codes += PANEL * CODE_BYTES) {
        const WIDE(float) weight = WEIGHT(codes);
        for (int r = 0; r < ROWS; r++) sum[r][j] = fma(weight, BROADCAST(from[r][k + j]), sum[r][j]);
      }
    for (int k = K / 4 * 4; k < K; k++, codes += PANEL * CODE_BYTES)
      for (int r = 0; r < ROWS; r++) sum[r][0] = fma(WEIGHT(codes), BROADCAST(from[r][k]), sum[r][0]);
    for (int r = 0; r < ROWS; r++)
      if (row + r < rows)
        finish((sum[r][0] + sum[r][1]) + (sum[r][2] + sum[r][3]), n, row + r, N, bias, residual, y, added);
  }
}
#endif
