// A matrix [N, K] lies in panels of 16 columns, K in order within a panel:
//   BITS 4: ushorts of four codes, k lowest; 8: chars; 16: halves, or bf16 where BF16; 32: floats.
// Behind the codes of all panels come scales, then minimums if MINIMUM, [panel][K / GROUP][16], halves or floats.
#define PANEL 16
#define PANELS(n) (((n) + PANEL - 1) / PANEL)
#define PANEL_BYTES(k) ((size_t)(k) * PANEL * BITS / 8)
#define SCALE_BEGIN(n, k) (PANELS(n) * PANEL_BYTES(k))
#define SCALES(n, k) ((size_t)PANELS(n) * ((k) / GROUP) * PANEL * SCALE_BYTES)
#define CODE_BYTES (BITS == 4 ? 2 : BITS / 8)  // of a column, or of four codes of it
#define SCALE_BYTES (HALF_SCALE ? 2 : 4)
#define SCALE_ONE(p) (HALF_SCALE ? vload_half(0, (__global const half *)(p)) : *(__global const float *)(p))
#define SCALE_AT(p) (HALF_SCALE ? LOAD_HALF((__global const half *)(p)) : LOAD((__global const float *)(p)))
#if BITS == 32
#define WEIGHT(p) LOAD((__global const float *)(p))
#elif BITS == 16
#define WEIGHT(p) (BF16 ? LOAD_BF16((__global const ushort *)(p)) : LOAD_HALF((__global const half *)(p)))
#endif

// One weight, by row n and column k of the matrix.
inline float element(__global const uchar *w, int n, int k, int N, int K) {
  const size_t panel = n / PANEL, lane = n % PANEL, at = k * PANEL + lane;
  __global const uchar *own = w + panel * PANEL_BYTES(K);
#if BITS == 32
  return ((__global const float *)own)[at];
#elif BITS == 16
  return BF16 ? as_float((uint)((__global const ushort *)own)[at] << 16) : vload_half(at, (__global const half *)own);
#else
  __global const uchar *scale = w + SCALE_BEGIN(N, K) + ((panel * (K / GROUP) + k / GROUP) * PANEL + lane) * SCALE_BYTES;
  const int code = BITS == 4 ? (((__global const ushort *)own)[k / 4 * PANEL + lane] >> k % 4 * 4 & 15) - OFFSET
                             : ((__global const char *)own)[at];
  return SCALE_ONE(scale) * code + (MINIMUM ? SCALE_ONE(scale + SCALES(N, K)) : 0);
#endif
}

__kernel void embed(__global const uchar *w, __global const int *ids, __global float *y, int N, int K, float scale) {
  const int k = get_global_id(0), row = get_global_id(1);
  if (k < K) y[(size_t)row * K + k] = element(w, ids[row], k, N, K) * scale;
}

// What a column's sum becomes: a bias (``added`` 1) and the residual (2) are added, and whole LANES stored where they fit.
inline void finish(WIDE(float) sum, int n, size_t row, int N, __global const float *bias, __global const float *residual,
                   __global float *y, int added) {
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

#if BITS == 4
#define X short  // activations as they are multiplied
#define DOT int  // their products in a group
#else
#define X float
#define DOT float
#endif
#if BITS <= 8
// 32 numbers to 8 bits: scale = absmax / 127 (or ``fixed_scale``), sums of 16. A group that is not finite stays so.
inline void quantize(__global const float *x, float fixed_scale, __local X *q, __local float *scale, __local short *sums) {
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
