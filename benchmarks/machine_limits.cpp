// What the machine can do at most: bytes read from memory, and products from registers: vpdpbusd, vdpbf16ps and f32
// multiply-adds of 512 bits, or vpmaddubsw and f32 multiply-adds of 256, and AMX tiles. Built by machine_limits.py as a shared
// library for the machine that it runs on.
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>
#if defined(__AMX_TILE__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

typedef int64_t Line __attribute__((vector_size(64)));
#if defined(__AVX512F__)
using Register = Line;
#else
typedef int64_t Register __attribute__((vector_size(32)));
#endif
constexpr int64_t kRounds = 4000000;

template <class Work>
double seconds(int threads, const Work& work) {
  std::vector<std::thread> team;
  const auto start = std::chrono::steady_clock::now();
  for (int i = 1; i < threads; ++i) team.emplace_back(work, i);
  work(0);
  for (std::thread& thread : team) thread.join();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void use(const Line (&sum)[4]) {
  const Line all = sum[0] ^ sum[1] ^ sum[2] ^ sum[3];
  asm volatile("" : : "m"(all));
}

// Ten independent chains of one instruction of two sources: enough for its latency at two a cycle.
#define TEN(instruction)                                                                                           \
  asm volatile(instruction " %11, %10, %0\n\t" instruction " %11, %10, %1\n\t" instruction " %11, %10, %2\n\t"       \
               instruction " %11, %10, %3\n\t" instruction " %11, %10, %4\n\t" instruction " %11, %10, %5\n\t"       \
               instruction " %11, %10, %6\n\t" instruction " %11, %10, %7\n\t" instruction " %11, %10, %8\n\t"       \
               instruction " %11, %10, %9"                                                                         \
               : "+v"(a[0]), "+v"(a[1]), "+v"(a[2]), "+v"(a[3]), "+v"(a[4]), "+v"(a[5]), "+v"(a[6]), "+v"(a[7]),   \
                 "+v"(a[8]), "+v"(a[9])                                                                            \
               : "v"(w), "v"(x))

#define PEAK(name, instruction, operations)                                    \
  double name(int threads) {                                                   \
    const double time = seconds(threads, [](int) {                             \
      Register a[10] = {}, w{}, x{};                                             \
      for (int64_t i = 0; i < kRounds; ++i) TEN(instruction);                  \
    });                                                                        \
    return 10.0 * kRounds * (operations) * threads / time;                     \
  }

#define NO_PEAK(name) \
  double name(int) { return 0; }

#if defined(__AMX_TILE__) && defined(__linux__)
struct TileConfig {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Whether the kernel lets this process use tile registers, which it must be asked for (XFEATURE_XTILEDATA).
bool tiles_allowed() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

// Four tiles of sums from two by two: 16 rows x 16 columns x 64 bytes each.
#define TILES(name, instruction, operations)                                                                       \
  double name(int threads) {                                                                                       \
    if (!tiles_allowed()) return 0;                                                                                \
    constexpr int64_t rounds = kRounds / 16;                                                                       \
    const double time = seconds(threads, [](int) {                                                                 \
      alignas(64) const TileConfig config;                                                                         \
      asm volatile("ldtilecfg %0" : : "m"(config)); /* the whole of it: g++ 12's intrinsic drops stores to the rest */ \
      asm volatile("tilezero %%tmm0\n\ttilezero %%tmm1\n\ttilezero %%tmm2\n\ttilezero %%tmm3\n\t"                   \
                   "tilezero %%tmm4\n\ttilezero %%tmm5\n\ttilezero %%tmm6\n\ttilezero %%tmm7" ::);                  \
      for (int64_t i = 0; i < rounds; ++i)                                                                         \
        asm volatile(instruction " %%tmm6, %%tmm4, %%tmm0\n\t" instruction " %%tmm7, %%tmm4, %%tmm1\n\t"           \
                     instruction " %%tmm6, %%tmm5, %%tmm2\n\t" instruction " %%tmm7, %%tmm5, %%tmm3" ::);          \
      asm volatile("tilerelease" ::);                                                                              \
    });                                                                                                            \
    return 4.0 * rounds * (operations) * threads / time;                                                           \
  }
#endif

}  // namespace

extern "C" {

// Bytes a second of `threads` threads that read their shares of `size` bytes at `data` (64-byte aligned) once, each in one
// stream as the processor prefetches it, or in two with prefetch instructions a KB ahead: which is faster differs.
double read_bandwidth(const char* data, size_t size, int threads) {
  const size_t lines = size / 64 / (8 * threads) * 8;  // of a thread: whole rounds of either way
  const auto start = [&](int index) { return reinterpret_cast<const Line*>(data) + lines * index; };
  const double one = seconds(threads, [&](int index) {
    Line sum[4] = {};
    for (const Line *line = start(index), *end = line + lines; line < end; line += 4)
      for (int i = 0; i < 4; ++i) sum[i] ^= line[i];
    use(sum);
  });
  const double two = seconds(threads, [&](int index) {
    Line sum[4] = {};
    for (const Line *line = start(index), *end = line + lines / 2; line < end; line += 4)
      for (const Line* stream : {line, line + lines / 2}) {
        for (int i = 0; i < 4; ++i) __builtin_prefetch(stream + 16 + i);
        for (int i = 0; i < 4; ++i) sum[i] ^= stream[i];
      }
    use(sum);
  });
  return static_cast<double>(lines * 64 * threads) / (one < two ? one : two);
}

// Operations a second (two a multiply-add) of `threads` threads; 0 where the machine has no such instruction.
#if defined(__AVX512VNNI__)
PEAK(int8_peak, "vpdpbusd", 128)
#elif defined(__AVX2__) && !defined(__AVX512F__)
PEAK(int8_peak, "vpmaddubsw", 64)
#else
NO_PEAK(int8_peak)
#endif

#if defined(__AVX512BF16__)
PEAK(bf16_peak, "vdpbf16ps", 64)
#else
NO_PEAK(bf16_peak)
#endif

#if defined(__AVX512F__)
PEAK(f32_peak, "vfmadd231ps", 32)
#elif defined(__FMA__) && !defined(__AVX512F__)
PEAK(f32_peak, "vfmadd231ps", 16)
#else
NO_PEAK(f32_peak)
#endif

#if defined(__AMX_INT8__) && defined(__linux__)
TILES(amx_int8_peak, "tdpbusd", 2 * 16 * 16 * 64)
#else
NO_PEAK(amx_int8_peak)
#endif

#if defined(__AMX_BF16__) && defined(__linux__)
TILES(amx_bf16_peak, "tdpbf16ps", 2 * 16 * 16 * 32)
#else
NO_PEAK(amx_bf16_peak)
#endif

}  // extern "C"
