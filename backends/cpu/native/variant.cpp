// Compiled once a variant: enters every file of kernels/ and linear/ into the variant's table.
#include "isa.h"

#define ENGINE_JOIN2(a, b) a##b
#define ENGINE_JOIN(a, b) ENGINE_JOIN2(a, b)

namespace engine_cpu {
namespace ENGINE_ISA {
#define ENGINE_KERNEL_FILE(stem) void register_##stem(Table& table);
#include "kernel_files.inc"
#undef ENGINE_KERNEL_FILE
}  // namespace ENGINE_ISA
}  // namespace engine_cpu

// The one symbol of a variant that the rest of the library sees.
extern "C" void ENGINE_JOIN(engine_cpu_register_, ENGINE_ISA)(engine_cpu::Table& table) {
#define ENGINE_KERNEL_FILE(stem) engine_cpu::ENGINE_ISA::register_##stem(table);
#include "kernel_files.inc"
#undef ENGINE_KERNEL_FILE
}
