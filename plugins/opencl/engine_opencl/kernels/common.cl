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
  return (a.s0 + a.s4 + (a.s2 + a.s6)) + (a.s1 + a.s5 + (a.s3 + a.s7));
}
inline float max16(float16 v) {
  const float8 a = fmax(v.lo, v.hi);
  return fmax(fmax(fmax(a.s0, a.s1), fmax(a.s2, a.s3)), fmax(fmax(a.s4, a.s5), fmax(a.s6, a.s7)));
}
