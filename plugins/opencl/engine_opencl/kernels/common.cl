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
