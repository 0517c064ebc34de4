// A matrix [N, K] lies in panels of 16 columns of CODE, K in order within a panel. BITS 4: a ushort has four codes, k lowest.
// Behind the codes of all panels come scales of SCALE, then minimums if MINIMUM, [panel][K / GROUP][16]. Activations are
// multiplied as X, and their products in a group summed as DOT.
#define PANEL 16
#define PANELS(n) (((n) + PANEL - 1) / PANEL)
#define PANEL_BYTES(k) ((size_t)(k) * PANEL * BITS / 8)
#define SCALE_BEGIN(n, k) (PANELS(n) * PANEL_BYTES(k))
#define SCALES(n, k) ((size_t)PANELS(n) * ((k) / GROUP) * PANEL * sizeof(SCALE))
// One weight, by row n and column k of the matrix.
inline float element(IN uchar *w, int n, int k, int N, int K) {
  const size_t panel = n / PANEL, lane = n % PANEL;
  IN CODE *own = (IN CODE *)(w + panel * PANEL_BYTES(K)) + (BITS == 4 ? k / 4 : k) * PANEL + lane;
#if BITS >= 16
  return FLOAT(CODE, own);
#else
  IN uchar *scale = w + SCALE_BEGIN(N, K) + ((panel * (K / GROUP) + k / GROUP) * PANEL + lane) * sizeof(SCALE);
  const int code = BITS == 4 ? (*own >> k % 4 * 4 & 15) - OFFSET : *own;
  return FLOAT(SCALE, scale) * code + (MINIMUM ? FLOAT(SCALE, scale + SCALES(N, K)) : 0);
#endif
}
__kernel void embed(IN uchar *w, IN int *ids, OUT float *y, int N, int K, float scale) {
  const int k = get_global_id(0), row = get_global_id(1);
  if (k < K) y[(size_t)row * K + k] = element(w, ids[row], k, N, K) * scale;
}
// What a column's sum becomes: a bias (``added`` 1) and the residual (2) are added, and whole LANES stored where they fit.
inline void finish(WIDE(float) sum, int n, size_t row, int N, IN float *bias, IN float *residual, OUT float *y, int added) {
  y += row * N + n;
  residual += row * N + n;
  float one[LANES];
  if (n + LANES <= N) {
    if (added & 1) sum += LOAD(bias + n);
    if (added & 2) sum += LOAD(residual);
    STORE(sum, y);
    return;
  }
  STORE(sum, one);
  for (int i = 0; i < N - n; i++) y[i] = one[i] + (added & 1 ? bias[n + i] : 0) + (added & 2 ? residual[i] : 0);
}
#if BITS <= 8
// 32 numbers to 8 bits: scale = absmax / 127 (or ``fixed_scale``), sums of 16. A group that is not finite stays so.
inline void quantize(IN float *x, float fixed_scale, LOCAL X *q, LOCAL float *scale, LOCAL short *sums) {
  const float16 a = vload16(0, x), b = vload16(1, x);
  const int broken = any(isnan(a) | isinf(a) | isnan(b) | isinf(b));
  const float most = max16(fmax(fabs(a), fabs(b))), factor = most < 1e-36f ? 0 : 127 / most;
  const float16 c = fixed_scale > 0 ? a / fixed_scale : a * factor, d = fixed_scale > 0 ? b / fixed_scale : b * factor;
  const short16 low = broken ? (short16)0 : convert_short16(clamp(rint(c), -128.0f, 127.0f));
  const short16 high = broken ? (short16)0 : convert_short16(clamp(rint(d), -128.0f, 127.0f));
  vstore16(JOIN(JOIN(convert_, X), 16)(low), 0, q);
  vstore16(JOIN(JOIN(convert_, X), 16)(high), 1, q);
  *scale = broken ? NAN : fixed_scale > 0 ? fixed_scale : most / 127;
  sums[0] = convert_short(sum16(convert_float16(low)));
  sums[1] = convert_short(sum16(convert_float16(high)));
}
#endif
