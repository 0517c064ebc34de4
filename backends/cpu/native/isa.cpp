#include "isa.h"

#include <cstdlib>
#include <stdexcept>

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

extern "C" {
#define ENGINE_VARIANT(name) void engine_cpu_register_##name(engine_cpu::Table& table);
#include "variants.inc"
#undef ENGINE_VARIANT
}

namespace engine_cpu {
namespace {

struct Variant {
  const char* name;
  bool (*available)();
  void (*enter)(Table&);
};

#if defined(__x86_64__)
[[maybe_unused]] bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
         __builtin_cpu_supports("bmi2");
}

[[maybe_unused]] bool has_avx_vnni() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return has_avx2() && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1u << 4) != 0;
}

[[maybe_unused]] bool has_avx512_vnni() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
}

[[maybe_unused]] bool has_avx512() { return has_avx512_vnni() && __builtin_cpu_supports("avx512bf16"); }

#if defined(ENGINE_SOFTWARE_TILES)
[[maybe_unused]] bool has_amx() { return has_avx512(); }
#elif defined(__linux__)
// The tile registers' state is large, and Linux gives it to a process that has asked for it.
[[maybe_unused]] bool has_amx() {
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24, kInt8 = 1u << 25;  // CPUID 7, edx
  constexpr int kRequestPermission = 0x1023, kTileData = 18;                // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  constexpr unsigned kStates = 3u << 17;                                    // the configuration and the data, in XCR0
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!has_avx512() || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  constexpr unsigned kAll = kBf16 | kTile | kInt8;
  unsigned low = 0, high = 0;
  asm("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (d & kAll) == kAll && (low & kStates) == kStates && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif
#elif defined(__aarch64__)
// Every 64-bit Arm has NEON, and every Mac's the dot product.
[[maybe_unused]] bool has_neon_dot() {
#if defined(__linux__)
  return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#else
  return true;
#endif
}
#endif
[[maybe_unused]] bool has_neon() { return true; }
[[maybe_unused]] bool has_portable() { return true; }

const Variant kVariants[] = {
#define ENGINE_VARIANT(name) {#name, has_##name, engine_cpu_register_##name},
#include "variants.inc"
#undef ENGINE_VARIANT
};

std::string joined(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

}  // namespace

std::vector<std::string> isa_list() {
  std::vector<std::string> names;
  for (const Variant& variant : kVariants)
    if (variant.available()) names.emplace_back(variant.name);
  return names;
}

std::string default_isa() {
  const std::vector<std::string> names = isa_list();
  const char* forced = std::getenv("ENGINE_CPU_ISA");
  if (forced == nullptr || *forced == '\0') return names.front();
  for (const std::string& name : names)
    if (name == forced) return name;
  throw std::invalid_argument("ENGINE_CPU_ISA is '" + std::string(forced) +
                              "', and this machine can run: " + joined(names) + ".");
}

const Table& isa_table(const std::string& name) {
  static std::map<std::string, Table> tables;  // callers hold the GIL
  const auto found = tables.find(name);
  if (found != tables.end()) return found->second;
  for (const Variant& variant : kVariants) {
    if (name != variant.name || !variant.available()) continue;
    Table& table = tables[name];
    variant.enter(table);
    return table;
  }
  throw std::invalid_argument("The instruction set '" + name +
                              "' is not one this machine can run: " + joined(isa_list()) + ".");
}

Core this_core() {
#if defined(__x86_64__)
  constexpr unsigned kAuth = 0x68747541;  // of AuthenticAMD, CPUID 0, ebx
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid(0, &a, &b, &c, &d) || b != kAuth || !__get_cpuid(1, &a, &b, &c, &d)) return Core::kOther;
  const unsigned family = (a >> 8 & 15) + (a >> 20 & 255), models = a >> 16 & 15;  // sixteen models each
  if (family == 0x1a) return Core::kZen5;
  const bool is_zen4 = models == 1 || models == 6 || models == 7 || models == 10;
  if (family == 0x19 && !is_zen4) return Core::kZen3;
#endif
  return Core::kOther;
}

}  // namespace engine_cpu
