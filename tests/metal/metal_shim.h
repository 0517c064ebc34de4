// What Metal's kernels need of Metal, for a C++ compiler: a threadgroup's threads are fibers of one thread, run in a random
// order up to where they wait for each other. A simdgroup's or threadgroup's threads that wait in different places are an error.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <vector>
#include <ucontext.h>

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
using std::fabs, std::isfinite, std::isnan, std::max, std::min, std::rint;
inline float clamp(float x, float low, float high) { return min(max(x, low), high); }

namespace shim {
constexpr int LANES = 32, STACK = 256 << 10;
enum Wait { RUNNING, SUM, MAX, BARRIER, DONE };
struct Position { int x, y, z; };

struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack{new char[STACK]};
    int index;
    Wait wait = RUNNING;
    int line = 0;
    float value = 0;
};

inline ucontext_t scheduler;
inline Fiber* current;
inline Position threadgroup_position;
inline void (*body)();

inline void fail(const char* what, int line) {
    std::fprintf(stderr, "line %d: %s\n", line, what);
    std::exit(3);
}

inline float wait(Wait kind, int line, float value) {
    current->wait = kind, current->line = line, current->value = value;
    swapcontext(&current->context, &scheduler);
    return current->value;
}

inline void enter() {
    body();
    current->wait = DONE;
    swapcontext(&current->context, &scheduler);
}

inline bool together(const std::vector<Fiber>& fibers, int first, int count) {
    for (int n = first; n < first + count; ++n) {
        if (fibers[n].wait != fibers[first].wait || fibers[n].line != fibers[first].line) return false;
    }
    return true;
}

// Releases the simdgroups that wait for a reduction; false where none does.
inline bool reduce(std::vector<Fiber>& fibers) {
    bool any = false;
    for (size_t first = 0; first < fibers.size(); first += LANES) {
        const Wait kind = fibers[first].wait;
        if ((kind != SUM && kind != MAX) || !together(fibers, int(first), LANES)) continue;
        float result = fibers[first].value;
        for (int n = 1; n < LANES; ++n) {
            const float value = fibers[first + n].value;
            result = kind == SUM ? result + value : std::fmax(result, value);
        }
        for (int n = 0; n < LANES; ++n) fibers[first + n].value = result, fibers[first + n].wait = RUNNING;
        any = true;
    }
    return any;
}

inline void run_threadgroup(int count, std::mt19937& random) {
    std::vector<Fiber> fibers(count);
    for (int n = 0; n < count; ++n) {
        Fiber& one = fibers[n];
        one.index = n;
        getcontext(&one.context);
        one.context.uc_stack.ss_sp = one.stack.get(), one.context.uc_stack.ss_size = STACK;
        one.context.uc_link = nullptr;
        makecontext(&one.context, enter, 0);
    }
    std::vector<int> order(count);
    std::iota(order.begin(), order.end(), 0);
    while (true) {
        std::shuffle(order.begin(), order.end(), random);
        for (int n : order) {
            if (fibers[n].wait != RUNNING) continue;
            current = &fibers[n];
            swapcontext(&scheduler, &current->context);
        }
        if (reduce(fibers)) continue;
        if (!together(fibers, 0, count)) fail("threads wait for each other in different places.", fibers[0].line);
        if (fibers[0].wait == DONE) return;
        if (fibers[0].wait != BARRIER) fail("a simdgroup is not whole.", fibers[0].line);
        for (Fiber& one : fibers) one.wait = RUNNING;
    }
}

// Each array in memory of exactly its size, so that the sanitizer sees what is read or written beside it.
inline std::vector<void*> read_arrays(const char* path, std::vector<size_t>& sizes) {
    FILE* file = std::fopen(path, "rb");
    std::vector<void*> arrays;
    uint64_t size;
    while (std::fread(&size, 8, 1, file) == 1) {
        arrays.push_back(std::malloc(size));
        sizes.push_back(size);
        if (std::fread(arrays.back(), 1, size, file) != size) fail("the file is short.", 0);
    }
    std::fclose(file);
    return arrays;
}

inline void write_arrays(const char* path, const std::vector<void*>& arrays, const std::vector<size_t>& sizes, size_t first) {
    FILE* file = std::fopen(path, "wb");
    for (size_t n = first; n < arrays.size(); ++n) std::fwrite(arrays[n], 1, sizes[n], file);
    std::fclose(file);
    for (void* array : arrays) std::free(array);
}
}  // namespace shim

enum class mem_flags { mem_threadgroup };
#define threadgroup static
#define threadgroup_position_in_grid shim::threadgroup_position
#define thread_index_in_simdgroup (shim::current->index % shim::LANES)
#define simdgroup_index_in_threadgroup (shim::current->index / shim::LANES)
#define simd_sum(x) shim::wait(shim::SUM, __LINE__, x)
#define simd_max(x) shim::wait(shim::MAX, __LINE__, x)
#define threadgroup_barrier(flags) (void(flags), shim::wait(shim::BARRIER, __LINE__, 0))
