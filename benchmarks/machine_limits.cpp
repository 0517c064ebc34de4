// What the machine can do at most: bytes read from memory, and vpdpbusd and f32 multiply-adds from registers.
// Built by machine_limits.py as a shared library for the machine that it runs on.
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

namespace {

typedef int64_t Line __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef float Floats __attribute__((vector_size(64)));

template <class Work>
double seconds(int threads, const Work& work) {
  std::vector<std::thread> team;
  const auto start = std::chrono::steady_clock::now();
  for (int i = 1; i < threads; ++i) team.emplace_back(work, i);
  work(0);
  for (std::thread& thread : team) thread.join();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

extern "C" {

// Bytes a second of `threads` threads that read their shares of `size` bytes at `data` (64-byte aligned) once.
double read_bandwidth(const char* data, size_t size, int threads) {
  const size_t lines = size / 64;
  const double time = seconds(threads, [&](int index) {
    const Line* line = reinterpret_cast<const Line*>(data) + lines * index / threads;
    const Line* const end = reinterpret_cast<const Line*>(data) + lines * (index + 1) / threads;
    Line sum[4] = {};
    for (; line + 4 <= end; line += 4) {
      sum[0] ^= line[0];
      sum[1] ^= line[1];
      sum[2] ^= line[2];
      sum[3] ^= line[3];
    }
    const Line all = sum[0] ^ sum[1] ^ sum[2] ^ sum[3];
    asm volatile("" : : "m"(all));
  });
  return static_cast<double>(lines * 64) / time;
}

// Operations a second (two a multiply-add) of `threads` threads; 0 where the machine has no such instruction.
double int8_peak(int threads) {
#if defined(__AVX512VNNI__)
  constexpr int64_t kRounds = 4000000;
  const double time = seconds(threads, [&](int) {
    Ints a0{}, a1{}, a2{}, a3{}, a4{}, a5{}, a6{}, a7{}, a8{}, a9{}, w{}, x{};
    for (int64_t i = 0; i < kRounds; ++i)
      asm volatile(
          "vpdpbusd %11, %10, %0\n\tvpdpbusd %11, %10, %1\n\tvpdpbusd %11, %10, %2\n\tvpdpbusd %11, %10, %3\n\t"
          "vpdpbusd %11, %10, %4\n\tvpdpbusd %11, %10, %5\n\tvpdpbusd %11, %10, %6\n\tvpdpbusd %11, %10, %7\n\t"
          "vpdpbusd %11, %10, %8\n\tvpdpbusd %11, %10, %9"
          : "+v"(a0), "+v"(a1), "+v"(a2), "+v"(a3), "+v"(a4), "+v"(a5), "+v"(a6), "+v"(a7), "+v"(a8), "+v"(a9)
          : "v"(w), "v"(x));
  });
  return 10.0 * kRounds * 128 * threads / time;
#else
  (void)threads;
  return 0;
#endif
}

double f32_peak(int threads) {
#if defined(__AVX512F__)
  constexpr int64_t kRounds = 4000000;
  const double time = seconds(threads, [&](int) {
    Floats a0{}, a1{}, a2{}, a3{}, a4{}, a5{}, a6{}, a7{}, a8{}, a9{}, w{}, x{};
    for (int64_t i = 0; i < kRounds; ++i)
      asm volatile(
          "vfmadd231ps %11, %10, %0\n\tvfmadd231ps %11, %10, %1\n\tvfmadd231ps %11, %10, %2\n\tvfmadd231ps %11, %10, %3\n\t"
          "vfmadd231ps %11, %10, %4\n\tvfmadd231ps %11, %10, %5\n\tvfmadd231ps %11, %10, %6\n\tvfmadd231ps %11, %10, %7\n\t"
          "vfmadd231ps %11, %10, %8\n\tvfmadd231ps %11, %10, %9"
          : "+v"(a0), "+v"(a1), "+v"(a2), "+v"(a3), "+v"(a4), "+v"(a5), "+v"(a6), "+v"(a7), "+v"(a8), "+v"(a9)
          : "v"(w), "v"(x));
  });
  return 10.0 * kRounds * 32 * threads / time;
#else
  (void)threads;
  return 0;
#endif
}

}  // extern "C"
