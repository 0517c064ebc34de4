// Compiled once a variant: enters its files of kernels/ and linear/ into its table, over those of ENGINE_BASE if it has one.
#include "isa.h"

#define ENGINE_JOIN2(a, b) a##b
#define ENGINE_JOIN(a, b) ENGINE_JOIN2(a, b)
#define ENGINE_TEXT2(a) #a
#define ENGINE_TEXT(a) ENGINE_TEXT2(a)

namespace engine_cpu {
namespace ENGINE_ISA {
#define ENGINE_KERNEL_FILE(stem) void register_##stem(Table& table);
#include ENGINE_KERNEL_FILES
#undef ENGINE_KERNEL_FILE
}  // namespace ENGINE_ISA
}  // namespace engine_cpu

#if defined(ENGINE_BASE)
extern "C" void ENGINE_JOIN(engine_cpu_register_, ENGINE_BASE)(engine_cpu::Table& table);
#endif

// The one symbol of a variant that the rest of the library sees.
extern "C" void ENGINE_JOIN(engine_cpu_register_, ENGINE_ISA)(engine_cpu::Table& table) {
#if defined(ENGINE_BASE)
  ENGINE_JOIN(engine_cpu_register_, ENGINE_BASE)(table);
  table.base = ENGINE_TEXT(ENGINE_BASE);
#endif
#define ENGINE_KERNEL_FILE(stem) engine_cpu::ENGINE_ISA::register_##stem(table);
#include ENGINE_KERNEL_FILES
#undef ENGINE_KERNEL_FILE
}
