// LANES: numbers that a work-item computes at a time (16 on processors, where WG is 1); WG: work-items of a group.
#pragma OPENCL FP_CONTRACT OFF  // a row has the same bits in every kernel that computes it
#define KERNEL __kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void
#define IN __global const
#define OUT __global
#define LOCAL __local
#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#if LANES == 1
#define WIDE(type) type
#define LOAD(p) (*(p))
#define STORE(v, p) (*(p) = (v))
#define LOAD_half(p) vload_half(0, p)
#define SUM(v) (v)
#define MAX(v) (v)
#else
#define WIDE(type) JOIN(type, LANES)
#define LOAD(p) JOIN(vload, LANES)(0, p)
#define STORE(v, p) JOIN(vstore, LANES)(v, 0, p)
#define LOAD_half(p) JOIN(vload_half, LANES)(0, p)
#define SUM(v) sum16(v)
#define MAX(v) max16(v)
#endif
// Stored numbers as floats, LANES of them or one; a ushort is bf16.
#define LOAD_char(p) WIDE(convert_float)(LOAD(p))
#define LOAD_ushort(p) WIDE(as_float)(WIDE(convert_uint)(LOAD(p)) << 16)
#define LOAD_float(p) LOAD(p)
#define ONE_char(p) (*(p))
#define ONE_ushort(p) as_float((uint) * (p) << 16)
#define ONE_half(p) vload_half(0, p)
#define ONE_float(p) (*(p))
#define FLOATS(type, p) JOIN(LOAD_, type)((IN type *)(p))
#define FLOAT(type, p) JOIN(ONE_, type)((IN type *)(p))
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
