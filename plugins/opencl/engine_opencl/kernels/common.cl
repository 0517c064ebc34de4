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
#define LOAD_BF16(p) WIDE(as_float)(WIDE(convert_uint)(LOAD(p)) << 16)
#define BROADCAST(x) ((WIDE(float))(x))
#define EACH(i, n) for (int i = get_local_id(0) * LANES; i < (n); i += WG * LANES)  // n is whole LANES

inline float sum16(float16 v) {
  const float8 a = v.lo + v.hi;
  const float4 b = a.lo + a.hi;
  return (b.x + b.z) + (b.y + b.w);
}

inline float max16(float16 v) {
  const float8 a = fmax(v.lo, v.hi);
  const float4 b = fmax(a.lo, a.hi);
  return fmax(fmax(b.x, b.z), fmax(b.y, b.w));
}
