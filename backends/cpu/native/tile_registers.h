// The matrix unit's tile registers (AMX): eight of up to 16 rows x 64 bytes, shaped before use.
#pragma once

#include <initializer_list>

#include "simd.h"

#if defined(ENGINE_MATRIX_UNIT) && defined(ENGINE_SOFTWARE_TILES)
#include "software_tiles.h"
#elif defined(ENGINE_MATRIX_UNIT)
#if !defined(__AMX_INT8__) || !defined(__AMX_BF16__)
#error "A variant for a matrix unit is compiled without it."
#endif

namespace engine_cpu {
namespace ENGINE_ISA {

// The shapes of a thread's tile registers, and zeros in them, as long as it lives. Their state is given up at its end, so
// that the system does not carry it through every switch of threads.
class TileRegisters {
 public:
  struct Shape {
    int rows, bytes;  // up to 16, and up to 64 a row
  };

  explicit TileRegisters(std::initializer_list<Shape> shapes) {
    alignas(64) Configuration configuration{};
    int tile = 0;
    for (const Shape& shape : shapes) {
      configuration.bytes[tile] = static_cast<uint16_t>(shape.bytes);
      configuration.rows[tile++] = static_cast<uint8_t>(shape.rows);
    }
    asm volatile("" ::"m"(configuration));  // of which _tile_loadconfig reads, for g++ 12, eight bytes
    _tile_loadconfig(&configuration);
  }
  ~TileRegisters() { _tile_release(); }
  TileRegisters(const TileRegisters&) = delete;
  TileRegisters& operator=(const TileRegisters&) = delete;

 private:
  struct Configuration {  // as LDTILECFG reads it
    uint8_t palette = 1, start_row = 0, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
  };
  static_assert(sizeof(Configuration) == 64);
};

// The instructions, by number of register. Not the intrinsics: for g++ 12 a load of a tile reads no memory.
template <int kTile>
ENGINE_INLINE void tile_load(const void* first, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(first), "r"(stride), "i"(kTile) : "memory");
}
template <int kTile>
ENGINE_INLINE void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
}
template <int kTile>
ENGINE_INLINE void tile_store(void* first, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(first), "r"(stride), "i"(kTile) : "memory");
}

// c += a b: bytes of a in rows, of b in rows of 16 columns x 4 k.
template <bool kSignedA, bool kSignedB, int kC, int kA, int kB>
ENGINE_INLINE void tile_dot() {
  if constexpr (!kSignedA && !kSignedB)
    asm volatile("tdpbuud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kC), "i"(kA), "i"(kB));
  else if constexpr (!kSignedA)
    asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kC), "i"(kA), "i"(kB));
  else if constexpr (kSignedB)
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kC), "i"(kA), "i"(kB));
  else
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kC), "i"(kA), "i"(kB));
}

// c += a b: bf16 of a in rows, of b in rows of 16 columns x 2 k.
template <int kC, int kA, int kB>
ENGINE_INLINE void tile_dot_bf16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kC), "i"(kA), "i"(kB));
}

}  // namespace ENGINE_ISA
}  // namespace engine_cpu

#endif
