// LANES: numbers that a work-item computes at a time (16 on processors, where WG is 1); WG: work-items of a group.
#pragma OPENCL FP_CONTRACT OFF  // a row has the same bits in every kernel that computes it
#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#if LANES == 1
#define WIDE(type) type
#define LOAD(p) (*(p))
#define STORE(v, p) (*(p) = (v))
#define LOAD_HALF(p) vload_half(0, p)
#define SUM(v) (v)
#define MAX(v) (v)
#else
#define WIDE(type) JOIN(type, LANES)
#define LOAD(p) JOIN(vload, LANES)(0, p)
#define STORE(v, p) JOIN(vstore, LANES)(v, 0, p)
#define LOAD_HALF(p) JOIN(vload_half, LANES)(0, p)
#define SUM(v) sum16(v)
#define MAX(v) max16(v)
#endif
#define TO_FLOAT WIDE(convert_float)
#define BROADCAST(x) ((WIDE(float))(x))

inline float sum16(float16 v) {
  float8 a = v.lo + v.hi;
  float4 b = a.lo + a.hi;
  return (b.x + b.z) + (b.y + b.w);
}

inline float max16(float16 v) {
  float8 a = fmax(v.lo, v.hi);
  float4 b = fmax(a.lo, a.hi);
  return fmax(fmax(b.x, b.z), fmax(b.y, b.w));
}

// The sum over a group's work-items, for each of them; ``shared`` has room for WG numbers.
inline float group_sum(float v, __local float *shared) {
#if WG > 1
  const int own = get_local_id(0);
  barrier(CLK_LOCAL_MEM_FENCE);
  shared[own] = v;
  for (int half_ = WG / 2; half_ > 0; half_ /= 2) {
    barrier(CLK_LOCAL_MEM_FENCE);
    if (own < half_) shared[own] += shared[own + half_];
  }
  barrier(CLK_LOCAL_MEM_FENCE);
  v = shared[0];
#endif
  return v;
}

inline float bf16_to_float(ushort bits) { return as_float((uint)bits << 16); }

// A slice's part of this work-item: vectors, then what is left behind them.
#define EACH(i, n) for (int i = get_local_id(0) * LANES; i + LANES <= (n); i += WG * LANES)
#define REST(i, n) for (int i = (n) / LANES * LANES + get_local_id(0); i < (n); i += WG)

// The root of the mean square of what is left of n numbers when ``mean`` and ``rest`` are taken away.
inline float root_mean_square(__global const float *x, int n, float mean, float rest, float eps, __local float *shared) {
  WIDE(float) squares = 0;
  EACH(i, n) {
    const WIDE(float) v = LOAD(x + i) - mean - rest;
    squares = fma(v, v, squares);
  }
  float one = SUM(squares);
  REST(i, n) {
    const float v = x[i] - mean - rest;
    one = fma(v, v, one);
  }
  return sqrt(group_sum(one, shared) / n + eps);
}

// ``kind``: silu, gelu, gelu_tanh, relu, clamped_swiglu.
inline WIDE(float) activate(WIDE(float) g, WIDE(float) u, int kind, float alpha, float limit) {
  if (kind == 4) {
    g = select(g, BROADCAST(limit), g > limit);
    u = select(select(u, BROADCAST(limit), u > limit), BROADCAST(-limit), u < -limit);
    return g / (1 + exp(-alpha * g)) * (u + 1);
  }
  if (kind == 0) return g / (1 + exp(-g)) * u;
  if (kind == 1) return 0.5f * g * (1 + erf(g * M_SQRT1_2_F)) * u;
  if (kind == 2) return 0.5f * g * (1 + tanh(0.7978845608028654f * (g + 0.044715f * g * g * g))) * u;
  return select(g, BROADCAST(0), g < 0) * u;
}
