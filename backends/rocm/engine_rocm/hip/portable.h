// What the kernels need of a GPU: clang's HIP (hipRTC, too), CUDA (nvcc, NVRTC), or lockstep.h of the tests on the CPU.
//
// WARP: threads that exchange registers. thread(), lane(), block(axis), barrier(), shuffle_xor(), exp2_of(), root_of(),
// nearest(); storage types f32, f16, bf16, e4m3, i8 and u8, which are read by number() and written by put().
#pragma once

#if defined(__HIP__)

#if defined(__GFX9__)
#define WARP 64
#else
#define WARP 32
#endif
#define DEVICE __attribute__((device)) inline __attribute__((always_inline))
#define SHARED(type, name, size) static __attribute__((shared)) type name[size]
#define KERNEL(threads) \
  extern "C" __attribute__((global)) __attribute__((amdgpu_flat_work_group_size(threads, threads))) void

DEVICE int thread() { return __builtin_amdgcn_workitem_id_x(); }
DEVICE int lane() { return thread() % WARP; }
DEVICE int block(int axis) {
  return axis == 0 ? __builtin_amdgcn_workgroup_id_x()
                   : axis == 1 ? __builtin_amdgcn_workgroup_id_y() : __builtin_amdgcn_workgroup_id_z();
}
DEVICE void barrier() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
DEVICE float shuffle_xor(float x, int mask) {
  const int bits = __builtin_amdgcn_ds_bpermute((lane() ^ mask) * 4, __builtin_bit_cast(int, x));
  return __builtin_bit_cast(float, bits);
}
DEVICE float exp2_of(float x) { return __builtin_exp2f(x); }
DEVICE float root_of(float x) { return __builtin_sqrtf(x); }
DEVICE float nearest(float x) { return __builtin_rintf(x); }
DEVICE float of_half(unsigned short bits) { return __builtin_bit_cast(_Float16, bits); }
DEVICE unsigned short to_half(float x) { return __builtin_bit_cast(unsigned short, (_Float16)x); }

#elif defined(__CUDACC__)

#define WARP 32
#define DEVICE __device__ __forceinline__
#define SHARED(type, name, size) static __shared__ type name[size]
#define KERNEL(threads) extern "C" __global__ __launch_bounds__(threads) void

DEVICE int thread() { return threadIdx.x; }
DEVICE int lane() { return thread() % WARP; }
DEVICE int block(int axis) { return axis == 0 ? blockIdx.x : axis == 1 ? blockIdx.y : blockIdx.z; }
DEVICE void barrier() { __syncthreads(); }
DEVICE float shuffle_xor(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
DEVICE float exp2_of(float x) { return exp2f(x); }
DEVICE float root_of(float x) { return __fsqrt_rn(x); }
DEVICE float nearest(float x) { return rintf(x); }
DEVICE float of_half(unsigned short bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
  return x;
}
DEVICE unsigned short to_half(float x) {
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}

#else
#include "lockstep.h"
#endif

typedef float f32;
typedef signed char i8;
typedef unsigned char u8;
struct f16 { unsigned short bits; };
struct bf16 { unsigned short bits; };
struct e4m3 { unsigned char bits; };  // as the OCP has it

union Bits {
  float number;
  unsigned bits;
};

DEVICE float of_bits(unsigned bits) {
  Bits wide;
  wide.bits = bits;
  return wide.number;
}
DEVICE float infinity() { return of_bits(0x7F800000); }
DEVICE float no_number() { return of_bits(0x7FC00000); }

DEVICE float number(f32 x) { return x; }
DEVICE float number(i8 x) { return x; }
DEVICE float number(u8 x) { return x; }
DEVICE float number(f16 x) { return of_half(x.bits); }
DEVICE float number(bf16 x) { return of_bits((unsigned)x.bits << 16); }
DEVICE float number(e4m3 x) {  // moved to where f16 has its exponent and the rest, a number is 2^-8 of itself
  const unsigned size = x.bits & 0x7F;
  return size == 0x7F ? no_number() : of_half((x.bits & 0x80) << 8 | size << 7) * 256;
}
DEVICE void put(f32* to, float x) { *to = x; }
DEVICE void put(f16* to, float x) { to->bits = to_half(x); }
DEVICE void put(bf16* to, float x) {  // to nearest, ties to even; NaN stays one
  Bits wide;
  wide.number = x;
  to->bits = x == x ? (wide.bits + 0x7FFF + (wide.bits >> 16 & 1)) >> 16 : wide.bits >> 16 | 0x40;
}

// COUNT neighbours, read at once: their address is a multiple of their size, or of 16 bytes.
template <class T, int COUNT> struct alignas(sizeof(T) * COUNT < 16 ? sizeof(T) * COUNT : 16) Vector { T at[COUNT]; };
template <int COUNT, class T> DEVICE void load(const T* from, float* to) {
  const auto taken = *reinterpret_cast<const Vector<T, COUNT>*>(from);
  for (int n = 0; n < COUNT; ++n) to[n] = number(taken.at[n]);
}

DEVICE int least_of(int a, int b) { return a < b ? a : b; }
DEVICE int most_of(int a, int b) { return a > b ? a : b; }
DEVICE float most_of(float a, float b) { return a > b ? a : b; }
