// Threads of a threadgroup as fibers, run in a random order up to where they wait for each other. Those of a simdgroup or a
// threadgroup that wait in different places are an error. usage: PROGRAM INPUT OUTPUT SEED
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <random>
#include <vector>
#include <ucontext.h>
#include "metal_shim.h"

namespace shim {
constexpr int STACK = 256 << 10;

struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack{new char[STACK]};
    Wait wait = RUNNING;
    int line = 0;
    float value = 0;
};

Position threadgroup_position;
int thread;
static ucontext_t scheduler;
static Fiber* current;

static void fail(const char* what, int line) {
    std::fprintf(stderr, "line %d: %s\n", line, what);
    std::exit(3);
}

float wait(Wait kind, int line, float value) {
    current->wait = kind, current->line = line, current->value = value;
    swapcontext(&current->context, &scheduler);
    return current->value;
}

static void enter() {
    shim_body();
    current->wait = DONE;
    swapcontext(&current->context, &scheduler);
}

static bool together(const std::vector<Fiber>& fibers, int first, int count) {
    for (int n = first; n < first + count; ++n) {
        if (fibers[n].wait != fibers[first].wait || fibers[n].line != fibers[first].line) return false;
    }
    return true;
}

// Releases the simdgroups that wait for a reduction; false where none does.
static bool reduce(std::vector<Fiber>& fibers) {
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

static void run_threadgroup(int count, std::mt19937& random) {
    std::vector<Fiber> fibers(count);
    for (int n = 0; n < count; ++n) {
        Fiber& one = fibers[n];
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
            current = &fibers[n], thread = n;
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
static std::vector<void*> read_arrays(const char* path, std::vector<size_t>& sizes) {
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

static void write_arrays(const char* path, const std::vector<void*>& arrays, const std::vector<size_t>& sizes, size_t first) {
    FILE* file = std::fopen(path, "wb");
    for (size_t n = first; n < arrays.size(); ++n) std::fwrite(arrays[n], 1, sizes[n], file);
    std::fclose(file);
    for (void* array : arrays) std::free(array);
}
}  // namespace shim

int main(int, char** argv) {
    std::vector<size_t> sizes;
    std::vector<void*> arrays = shim::read_arrays(argv[1], sizes);
    shim_bind(arrays.data());
    const int *grid = static_cast<const int*>(arrays[shim_arrays]), *group = grid + 3;
    std::mt19937 random(std::atoi(argv[3]));
    for (int z = 0; z < grid[2] / group[2]; ++z) {
        for (int y = 0; y < grid[1] / group[1]; ++y) {
            for (int x = 0; x < grid[0] / group[0]; ++x) {
                shim::threadgroup_position = {x, y, z};
                shim::run_threadgroup(group[0] * group[1] * group[2], random);
            }
        }
    }
    shim::write_arrays(argv[2], arrays, sizes, shim_first_output);
}
