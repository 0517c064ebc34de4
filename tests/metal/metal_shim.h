// What Metal's kernels need of Metal, for a C++ compiler: a threadgroup's threads are fibers of one thread, see runtime.cpp.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

using half = _Float16;

struct bfloat16_t {
    uint16_t bits;
    explicit bfloat16_t(float value) {
        uint32_t word;
        std::memcpy(&word, &value, 4);
        bits = std::isnan(value) ? (word >> 16 | 0x40) : (word + 0x7FFF + (word >> 16 & 1)) >> 16;
    }
    operator float() const {
        const uint32_t word = uint32_t(bits) << 16;
        float value;
        std::memcpy(&value, &word, 4);
        return value;
    }
};

namespace precise {
using std::cos, std::exp, std::sin, std::sqrt, std::tanh;
}
using std::fabs, std::isfinite, std::isnan, std::rint;
template <typename T> T max(T a, T b) { return a < b ? b : a; }
template <typename T> T min(T a, T b) { return b < a ? b : a; }
inline float clamp(float x, float low, float high) { return min(max(x, low), high); }

namespace shim {
constexpr int LANES = 32;
enum Wait { RUNNING, SUM, MAX, BARRIER, DONE };
struct Position { int x, y, z; };
extern Position threadgroup_position;
extern int thread;
// Waits in line ``line`` for all that take part, and gives what they make of their values.
float wait(Wait kind, int line, float value);
}  // namespace shim

// Of the program with the kernel in it: arrays in the order of shapes, inputs, outputs; and one thread's run.
extern const int shim_arrays, shim_first_output;
void shim_bind(void** arrays);
void shim_body();

enum class mem_flags { mem_threadgroup };
#define threadgroup static
#define threadgroup_position_in_grid shim::threadgroup_position
#define thread_index_in_simdgroup (shim::thread % shim::LANES)
#define simdgroup_index_in_threadgroup (shim::thread / shim::LANES)
#define simd_sum(x) shim::wait(shim::SUM, __LINE__, x)
#define simd_max(x) shim::wait(shim::MAX, __LINE__, x)
#define threadgroup_barrier(flags) (void(flags), shim::wait(shim::BARRIER, __LINE__, 0))
