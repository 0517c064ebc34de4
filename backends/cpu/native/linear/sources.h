// Where a kernel's weights come from: a unit of a packed strip (layout.h), unpacked in registers as it is read, or a
// chunk unpacked once for many rows. All of them answer the same three questions about a group and a panel:
//   weights<step>(group, panel)   16 columns x 4 k of unsigned bytes
//   scale(group, panel)           16 columns, f32
//   minimum(group, panel)         16 columns, f32, where kMinimums
// with groups of kGroupSize k counted from the unit's start, kOffset = what is added to every q, and kMost = the greatest
// byte, on which the instructions depend that multiply it.
#pragma once

#include <type_traits>

#include "../simd_storage.h"
#include "dot.h"
#include "four_bits.h"
#include "layout.h"
#include "q8g32.h"

namespace engine_cpu {
namespace ENGINE_ISA {

ENGINE_INLINE f32x16 load_half(const uint8_t* p) { return widen_f16(load_as<u16x16>(p)); }
// The nibbles of a group of 32: lines hold an even step low and the next odd one high.
template <int kStep>
ENGINE_INLINE u32x16 nibble_step(const uint8_t* lines, int panel) {
  const u32x16 line = load_as<u32x16>(lines + kStep / 2 * 256 + panel * 64);
  return (kStep % 2 == 0 ? line : line >> 4) & 0x0f0f0f0f;
}

// Steps of five bits: nibbles, and in the line after them the fifth bit of step s at bit s of its bytes.
template <bool kFive, int kStep>
ENGINE_INLINE u32x16 small_step(const uint8_t* lines, int panel) {
  const u32x16 low = nibble_step<kStep>(lines, panel);
  if constexpr (!kFive) return low;
  const u32x16 high = load_as<u32x16>(lines + 1024 + panel * 64);
  if constexpr (kStep < 4)
    return low | (high << (4 - kStep) & 0x10101010);
  else
    return low | (high >> (kStep - 4) & 0x10101010);
}

// Numbers of four bits or five with an f16 scale, from an offset on or less an f16 minimum.
template <bool kFive, bool kMinimums_>
struct Small {
  static constexpr int kUnit = 32, kGroupSize = 32, kOffset = kMinimums_ ? 0 : kFive ? 16 : 8;
  static constexpr bool kMinimums = kMinimums_;
  static constexpr int kMost = kFive ? 31 : 15;
  static constexpr int kPlanes = kMinimums ? 256 : 128, kUnitBytes = kPlanes + (kFive ? 1280 : 1024);
  const uint8_t* unit;

  ENGINE_INLINE explicit Small(const uint8_t* source) : unit(source) {}
  template <int kStep>
  ENGINE_INLINE u32x16 weights(int, int panel) const {
    return small_step<kFive, kStep>(unit + kPlanes, panel);
  }
  ENGINE_INLINE f32x16 scale(int, int panel) const { return load_half(unit + 32 * panel); }
  ENGINE_INLINE f32x16 minimum(int, int panel) const {
    if constexpr (!kMinimums) return f32x16{};
    return load_half(unit + 128 + 32 * panel);
  }
};
using W4 = Small<false, false>;
using W4M = Small<false, true>;
using W5 = Small<true, false>;
using W5M = Small<true, true>;

struct W8 {
  static constexpr int kUnit = 32, kUnitBytes = 2176, kGroupSize = 32, kOffset = 128;
  static constexpr bool kMinimums = false;
  static constexpr int kMost = 255;
  const uint8_t* unit;

  ENGINE_INLINE explicit W8(const uint8_t* source) : unit(source) {}
  template <int kStep>
  ENGINE_INLINE u32x16 weights(int, int panel) const {
    return load_as<u32x16>(unit + 128 + kStep * 256 + panel * 64);
  }
  ENGINE_INLINE f32x16 scale(int, int panel) const { return load_half(unit + 32 * panel); }
  ENGINE_INLINE f32x16 minimum(int, int) const { return f32x16{}; }
};

// Nibbles with an f16 scale and a zero point: the minimum is their product, which is exact in f32.
struct W4Z {
  static constexpr int kUnit = 32, kUnitBytes = 1216, kGroupSize = 32, kOffset = 0;
  static constexpr bool kMinimums = true;
  static constexpr int kMost = 15;
  const uint8_t* unit;

  ENGINE_INLINE explicit W4Z(const uint8_t* source) : unit(source) {}
  template <int kStep>
  ENGINE_INLINE u32x16 weights(int, int panel) const {
    return nibble_step<kStep>(unit + 192, panel);
  }
  ENGINE_INLINE f32x16 scale(int, int panel) const { return load_half(unit + 32 * panel); }
  ENGINE_INLINE f32x16 minimum(int, int panel) const { return scale(0, panel) * widen_u8(load_as<u8x16>(unit + 128 + 16 * panel)); }
};

// Bytes with f32 scales, and f32 minimums where kMinimums.
template <bool kMinimums_>
struct W8F {
  static constexpr int kUnit = 32, kGroupSize = 32, kOffset = kMinimums_ ? 0 : 128;
  static constexpr bool kMinimums = kMinimums_;
  static constexpr int kMost = 255;
  static constexpr int kPlanes = kMinimums ? 512 : 256, kUnitBytes = kPlanes + 2048;
  const uint8_t* unit;

  ENGINE_INLINE explicit W8F(const uint8_t* source) : unit(source) {}
  template <int kStep>
  ENGINE_INLINE u32x16 weights(int, int panel) const {
    return load_as<u32x16>(unit + kPlanes + kStep * 256 + panel * 64);
  }
  ENGINE_INLINE f32x16 scale(int, int panel) const { return load_as<f32x16>(unit + 64 * panel); }
  ENGINE_INLINE f32x16 minimum(int, int panel) const {
    if constexpr (!kMinimums) return f32x16{};
    return load_as<f32x16>(unit + 256 + 64 * panel);
  }
};
using W8S = W8F<false>;
using W8M = W8F<true>;

// Numbers of four bits or five, eight groups with scales and minimums of six bits.
template <bool kFive>
struct SmallK {
  static constexpr int kUnit = 256, kGroupSize = 32, kOffset = 0;
  static constexpr int kGroupBytes = kFive ? 1280 : 1024, kUnitBytes = 1024 + 8 * kGroupBytes;
  static constexpr bool kMinimums = true;
  static constexpr int kMost = kFive ? 31 : 15;
  const uint8_t* unit;
  alignas(64) uint8_t scales[8][kStrip];
  alignas(64) uint8_t minimums[8][kStrip];

  ENGINE_INLINE explicit SmallK(const uint8_t* source) : unit(source) {
    const uint8_t* packed = source + 256;
    for (int i = 0; i < 4; ++i) {
      const u32x16 a = load_as<u32x16>(packed + 64 * i);
      const u32x16 b = load_as<u32x16>(packed + 64 * (i + 4));
      const u32x16 c = load_as<u32x16>(packed + 64 * (i + 8));
      store(scales[i], a & 0x3f3f3f3f);
      store(minimums[i], b & 0x3f3f3f3f);
      store(scales[i + 4], (c & 0x0f0f0f0f) | (a >> 2 & 0x30303030));
      store(minimums[i + 4], (c >> 4 & 0x0f0f0f0f) | (b >> 2 & 0x30303030));
    }
  }
  template <int kStep>
  ENGINE_INLINE u32x16 weights(int group, int panel) const {
    return small_step<kFive, kStep>(unit + 1024 + kGroupBytes * group, panel);
  }
  ENGINE_INLINE f32x16 scale(int group, int panel) const {
    return load_half(unit + 32 * panel) * widen_u8(load_as<u8x16>(scales[group] + 16 * panel));
  }
  ENGINE_INLINE f32x16 minimum(int group, int panel) const {
    return load_half(unit + 128 + 32 * panel) * widen_u8(load_as<u8x16>(minimums[group] + 16 * panel));
  }
};

using W4K = SmallK<false>;
using W5K = SmallK<true>;

// Groups of 16, four steps in a line, with scales and minimums of four bits.
struct W2K {
  static constexpr int kUnit = 256, kUnitBytes = 5376, kGroupSize = 16, kOffset = 0;
  static constexpr bool kMinimums = true;
  static constexpr int kMost = 3;
  const uint8_t* unit;
  alignas(64) uint8_t scales[16][kStrip];
  alignas(64) uint8_t minimums[16][kStrip];

  ENGINE_INLINE explicit W2K(const uint8_t* source) : unit(source) {
    for (int group = 0; group < 16; ++group) {
      const u32x16 both = load_as<u32x16>(source + 256 + 64 * group);
      store(scales[group], both & 0x0f0f0f0f);
      store(minimums[group], both >> 4 & 0x0f0f0f0f);
    }
  }
  template <int kStep>
  ENGINE_INLINE u32x16 weights(int group, int panel) const {
    return load_as<u32x16>(unit + 1280 + 256 * group + 64 * panel) >> 2 * kStep & 0x03030303;
  }
  ENGINE_INLINE f32x16 scale(int group, int panel) const {
    return load_half(unit + 32 * panel) * widen_u8(load_as<u8x16>(scales[group] + 16 * panel));
  }
  ENGINE_INLINE f32x16 minimum(int group, int panel) const {
    return load_half(unit + 128 + 32 * panel) * widen_u8(load_as<u8x16>(minimums[group] + 16 * panel));
  }
};

// Groups of 16, two low bits of four steps in a line, and the third ones of two groups in another.
struct W3K {
  static constexpr int kUnit = 256, kUnitBytes = 7296, kGroupSize = 16, kOffset = 4;
  static constexpr bool kMinimums = false;
  static constexpr int kMost = 7;
  const uint8_t* unit;

  ENGINE_INLINE explicit W3K(const uint8_t* source) : unit(source) {}
  template <int kStep>
  ENGINE_INLINE u32x16 weights(int group, int panel) const {
    const u32x16 low = load_as<u32x16>(unit + 1152 + 256 * group + 64 * panel) >> 2 * kStep & 0x03030303;
    const u32x16 high = load_as<u32x16>(unit + 5248 + group / 2 * 256 + 64 * panel) >> (group % 2 * 4 + kStep) & 0x01010101;
    return low | high << 2;
  }
  ENGINE_INLINE f32x16 scale(int group, int panel) const {
    return load_half(unit + 32 * panel) * widen_i8(load_as<i8x16>(unit + 128 + 64 * group + 16 * panel));
  }
  ENGINE_INLINE f32x16 minimum(int, int) const { return f32x16{}; }
};

// Nibbles that are places in a table of the format, with a scale of 16 bits.
template <class Table>
struct Looked {
  static constexpr int kUnit = 32, kUnitBytes = 1152, kGroupSize = 32, kOffset = Table::kOffset, kMost = Table::kMost;
  static constexpr bool kMinimums = false;
  const uint8_t* unit;

  ENGINE_INLINE explicit Looked(const uint8_t* source) : unit(source) {}
  template <int kStep>
  ENGINE_INLINE u32x16 weights(int, int panel) const {
    return look_up(nibble_step<kStep>(unit + 128, panel), Table::kNumbers.bytes);
  }
  ENGINE_INLINE f32x16 scale(int, int panel) const { return Table::widen(load_as<u16x16>(unit + 32 * panel)); }
  ENGINE_INLINE f32x16 minimum(int, int) const { return f32x16{}; }
};
struct NonLinear {
  static constexpr int kOffset = 128, kMost = 255;
  static constexpr RepeatedTable kNumbers{kNonLinear, kOffset};
  ENGINE_INLINE static f32x16 widen(u16x16 scale) { return widen_f16(scale); }
};
struct E2M1 {
  static constexpr int kOffset = 12, kMost = 31;
  static constexpr RepeatedTable kNumbers{kE2M1, kOffset};
  ENGINE_INLINE static f32x16 widen(u16x16 scale) { return widen_bf16(scale); }
};
using W4NL = Looked<NonLinear>;
using W4E = Looked<E2M1>;

// Nibbles of E2M1 in groups of 16 with scales of E4M3, whose bits in an f16 number are 2^-8 of it.
struct W4E16 {
  static constexpr int kUnit = 64, kUnitBytes = 2560, kGroupSize = 16, kOffset = E2M1::kOffset, kMost = E2M1::kMost;
  static constexpr bool kMinimums = false;
  const uint8_t* unit;

  ENGINE_INLINE explicit W4E16(const uint8_t* source) : unit(source) {}
  template <int kStep>
  ENGINE_INLINE u32x16 weights(int group, int panel) const {
    return look_up(nibble_step<kStep>(unit + 512 + 512 * group, panel), E2M1::kNumbers.bytes);
  }
  ENGINE_INLINE f32x16 scale(int group, int panel) const {
    const u16x16 half = to_u16(load_as<u8x16>(unit + 256 + 64 * group + 16 * panel)) << 7;
    return widen_f16(half) * load_as<f32x16>(unit + 64 * panel);
  }
  ENGINE_INLINE f32x16 minimum(int, int) const { return f32x16{}; }
};

// The same with a table of the weight's own in each unit, and whole numbers as scales.
template <int kGroup_, bool kWide>
struct Lattice {
  static constexpr int kUnit = 256, kGroupSize = kGroup_, kOffset = kWide ? 128 : 64, kMost = kWide ? 255 : 127;
  static constexpr bool kMinimums = false;
  static constexpr int kTableBytes = 64, kScales = 320, kNibbles = kScales + kUnit / kGroupSize * 64, kUnitBytes = kNibbles + 8192;
  const uint8_t* unit;

  ENGINE_INLINE explicit Lattice(const uint8_t* source) : unit(source) {}
  template <int kStep>
  ENGINE_INLINE u32x16 weights(int group, int panel) const {
    return look_up(nibble_step<kStep>(unit + kNibbles + group * kGroupSize * 32, panel), unit);
  }
  ENGINE_INLINE f32x16 scale(int group, int panel) const {
    return load_as<f32x16>(unit + kTableBytes + 64 * panel) * widen_i8(load_as<i8x16>(unit + kScales + 64 * group + 16 * panel));
  }
  ENGINE_INLINE f32x16 minimum(int, int) const { return f32x16{}; }
};
using W4X = Lattice<32, true>;
using W4L = Lattice<32, false>;
using W4L16 = Lattice<16, false>;

struct W6 {
  static constexpr int kUnit = 256, kUnitBytes = 13440, kGroupSize = 16, kOffset = 32;
  static constexpr bool kMinimums = false;
  static constexpr int kMost = 63;
  const uint8_t* unit;

  ENGINE_INLINE explicit W6(const uint8_t* source) : unit(source) {}
  template <int kStep>
  ENGINE_INLINE u32x16 weights(int group, int panel) const {
    const uint8_t* lines = unit + 1152 + 768 * group + 64 * panel;
    if (kStep < 3) return load_as<u32x16>(lines + 256 * kStep) & 0x3f3f3f3f;
    return (load_as<u32x16>(lines) >> 6 & 0x03030303) | (load_as<u32x16>(lines + 256) >> 4 & 0x0c0c0c0c) |
           (load_as<u32x16>(lines + 512) >> 2 & 0x30303030);
  }
  ENGINE_INLINE f32x16 scale(int group, int panel) const {
    return load_half(unit + 32 * panel) * widen_i8(load_as<i8x16>(unit + 128 + 64 * group + 16 * panel));
  }
  ENGINE_INLINE f32x16 minimum(int, int) const { return f32x16{}; }
};

constexpr int kChunk = 256;  // k that a tile's sums stay in registers for

// The span of one activation scale (q8g32.h). Rows of long spans serve formats of short ones, too.
template <class Packed>
constexpr int kSpanOf = Packed::kUnit == 256 ? kLongSpan : kGroup;

// Up to kChunk k of a strip as they are packed.
template <class Packed>
struct Units {
  static constexpr int kSpan = kSpanOf<Packed>;
  static constexpr int kGroupSize = Packed::kGroupSize, kInUnit = Packed::kUnit / kGroupSize;
  static constexpr bool kMinimums = Packed::kMinimums;
  static constexpr int kMost = Packed::kMost;
  static constexpr bool kOne = Packed::kUnit == kChunk;
  std::conditional_t<kOne, Packed, const uint8_t*> units;

  ENGINE_INLINE explicit Units(const uint8_t* source) : units(source) {}
  ENGINE_INLINE decltype(auto) of(int group) const {
    if constexpr (kOne)
      return (units);
    else
      return Packed(units + group / kInUnit * Packed::kUnitBytes);
  }
  template <int kStep>
  ENGINE_INLINE u32x16 weights(int group, int panel) const {
    return of(group).template weights<kStep>(group % kInUnit, panel);
  }
  ENGINE_INLINE f32x16 scale(int group, int panel) const { return of(group).scale(group % kInUnit, panel); }
  ENGINE_INLINE f32x16 minimum(int group, int panel) const { return of(group).minimum(group % kInUnit, panel); }
};

// Up to kChunk k of a strip as whole bytes and what each group and column has in f32, small enough for the first-level cache.
template <int kGroup_, bool kMinimums_, int kMost_, int kSpan_>
struct Chunk {
  static constexpr int kGroupSize = kGroup_, kMost = kMost_, kSpan = kSpan_;
  static constexpr bool kMinimums = kMinimums_;
  static constexpr int kGroups = kChunk / kGroupSize;
  static constexpr int kSteps = kGroupSize / 4;
  alignas(64) uint8_t bytes[kGroups * kSteps][4][64];
  alignas(64) float scales[kGroups][kStrip];
  alignas(64) float minimums[kMinimums ? kGroups : 1][kStrip];

  template <int kStep>
  ENGINE_INLINE u32x16 weights(int group, int panel) const {
    return load_as<u32x16>(bytes[group * kSteps + kStep][panel]);
  }
  ENGINE_INLINE f32x16 scale(int group, int panel) const { return load(scales[group] + 16 * panel); }
  ENGINE_INLINE f32x16 minimum(int group, int panel) const { return load(minimums[kMinimums ? group : 0] + 16 * panel); }
};

template <class Packed>
using ChunkOf = Chunk<Packed::kGroupSize, Packed::kMinimums, kind_of_bytes(Packed::kMost), kSpanOf<Packed>>;

template <int kStep, class Packed>
ENGINE_INLINE void unpack_steps(const Packed& unit, int group, ChunkOf<Packed>& chunk, int to) {
  if constexpr (kStep < Packed::kGroupSize / 4) {
    for (int panel = 0; panel < 4; ++panel)
      store(chunk.bytes[to * chunk.kSteps + kStep][panel], unit.template weights<kStep>(group, panel));
    unpack_steps<kStep + 1>(unit, group, chunk, to);
  }
}

// `depth` <= kChunk k from `source`, a unit's start.
template <class Packed>
void unpack_chunk(const uint8_t* source, int64_t depth, ChunkOf<Packed>& chunk) {
  int to = 0;
  for (int64_t k = 0; k < depth; k += Packed::kUnit, source += Packed::kUnitBytes) {
    const Packed unit(source);
    for (int group = 0; group < Packed::kUnit / Packed::kGroupSize; ++group, ++to) {
      unpack_steps<0>(unit, group, chunk, to);
      for (int panel = 0; panel < 4; ++panel) {
        store(chunk.scales[to] + 16 * panel, unit.scale(group, panel));
        if constexpr (Packed::kMinimums) store(chunk.minimums[to] + 16 * panel, unit.minimum(group, panel));
      }
    }
  }
}

}  // namespace ENGINE_ISA
}  // namespace engine_cpu
