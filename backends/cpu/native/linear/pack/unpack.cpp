// The packed layouts back to f32, exactly as the formats define their values.
#define ENGINE_ISA host
#include "../../simd.h"
#include "../four_bits.h"
#include "../layout.h"

namespace engine_cpu {
namespace {

using host::bf16;
using host::f16;
using host::to_f32;

float half_at(const uint8_t* plane, int64_t column) { return to_f32(host::load_as<f16>(plane + 2 * column)); }

// The byte of (column, j) in a line of four panels.
uint8_t at(const uint8_t* lines, int line, int64_t column, int j) {
  return lines[line * 256 + column / kPanel * 64 + column % kPanel * 4 + j];
}

// k = 0..31 of a group in nibbles.
uint8_t nibble(const uint8_t* lines, int64_t column, int k) {
  return at(lines, k / 8, column, k % 4) >> (k / 4 % 2 * 4) & 15;
}

void unpack_w4(const uint8_t* unit, int64_t column, float* out) {
  const float d = half_at(unit, column);
  for (int k = 0; k < 32; ++k) out[k] = d * static_cast<float>(nibble(unit + 128, column, k) - 8);
}

void unpack_w4z(const uint8_t* unit, int64_t column, float* out) {
  const float scale = half_at(unit, column);
  const int zero = unit[128 + column];
  for (int k = 0; k < 32; ++k) out[k] = scale * static_cast<float>(nibble(unit + 192, column, k) - zero);
}

void unpack_f8(const uint8_t* unit, int64_t column, float* out) {
  const float scale = host::load_as<float>(unit + 4 * column);
  for (int k = 0; k < 32; ++k) out[k] = host::e4m3(unit[256 + 64 * k + column]) * scale;
}

template <const float (&kTable)[16]>
void unpack_table(const uint8_t* unit, int64_t column, float* out) {
  const float scale = host::load_as<float>(unit + 4 * column);
  for (int i = 0; i < 32; ++i) {
    const uint8_t byte = unit[256 + 64 * i + column];
    out[2 * i] = kTable[byte >> 4] * scale;
    out[2 * i + 1] = kTable[byte & 15] * scale;
  }
}

void unpack_w4k(const uint8_t* unit, int64_t column, float* out) {
  const float d = half_at(unit, column);
  const float dmin = half_at(unit + 128, column);
  const auto packed = [&](int i) { return static_cast<int>(unit[256 + 64 * i + column]); };
  for (int g = 0; g < 8; ++g) {
    const int scale = g < 4 ? packed(g) & 63 : (packed(g + 4) & 15) | (packed(g - 4) >> 6 << 4);
    const int minimum = g < 4 ? packed(g + 4) & 63 : (packed(g + 4) >> 4) | (packed(g) >> 6 << 4);
    const float s = d * static_cast<float>(scale);
    const float m = dmin * static_cast<float>(minimum);
    for (int k = 0; k < 32; ++k)
      out[32 * g + k] = s * static_cast<float>(nibble(unit + 1024 + 1024 * g, column, k)) - m;
  }
}

void unpack_w6(const uint8_t* unit, int64_t column, float* out) {
  const float d = half_at(unit, column);
  for (int g = 0; g < 16; ++g) {
    const float scale = d * static_cast<float>(static_cast<int8_t>(unit[128 + 64 * g + column]));
    const uint8_t* const lines = unit + 1152 + 768 * g;
    for (int j = 0; j < 4; ++j) {
      int last = 0;
      for (int i = 0; i < 3; ++i) {
        const int u = at(lines, i, column, j);
        out[16 * g + 4 * i + j] = scale * static_cast<float>((u & 63) - 32);
        last |= u >> 6 << 2 * i;
      }
      out[16 * g + 12 + j] = scale * static_cast<float>(last - 32);
    }
  }
}

void unpack_w8(const uint8_t* unit, int64_t column, float* out) {
  const float d = half_at(unit, column);
  for (int k = 0; k < 32; ++k) out[k] = d * static_cast<float>(at(unit + 128, k / 4, column, k % 4) - 128);
}

// Bytes with f32 scales for groups of kGroup, and minimums or the offset 128.
template <int kGroup, bool kMinimums>
void unpack_w8f(const uint8_t* unit, int64_t column, float* out) {
  constexpr int kPlanes = 32 / kGroup * 256;
  const auto number = [&](int offset, int group) {
    return host::load_as<float>(unit + offset + 256 * group + 4 * column);
  };
  for (int k = 0; k < 32; ++k) {
    const int u = at(unit + (kMinimums ? 2 : 1) * kPlanes, k / 4, column, k % 4);
    const float scale = number(0, k / kGroup);
    out[k] = kMinimums ? scale * static_cast<float>(u) - number(kPlanes, k / kGroup) : scale * static_cast<float>(u - 128);
  }
}

template <class T>
void unpack_dense(const uint8_t* strip, int64_t column, int64_t depth, float* out) {
  const T* const values = reinterpret_cast<const T*>(strip);
  for (int64_t k = 0; k < depth; ++k) out[k] = to_f32(values[k * kStrip + column]);
}

void unpack_pairs(const uint8_t* strip, int64_t column, int64_t depth, float* out) {
  const bf16* const values = reinterpret_cast<const bf16*>(strip);
  for (int64_t k = 0; k < depth; ++k) out[k] = to_f32(values[(k / 2 * kStrip + column) * 2 + k % 2]);
}

template <void (*kUnpack)(const uint8_t*, int64_t, float*)>
void unpack_units(const uint8_t* strip, int64_t column, int64_t depth, const Layout& layout, float* out) {
  for (int64_t k = 0; k < depth; k += layout.unit) kUnpack(strip + k / layout.unit * layout.unit_bytes, column, out + k);
}

}  // namespace

void unpack_column(const PackedWeight& weight, int64_t column, int64_t index, float* out) {
  const Layout& layout = layout_of(weight);
  const int64_t depth = weight.depth;
  const uint8_t* const strip =
      weight.data + (index * strips_of(weight.columns) + column / kStrip) * strip_bytes(layout, depth);
  column %= kStrip;
  switch (layout.family) {
    case Family::f32: return unpack_dense<float>(strip, column, depth, out);
    case Family::f16: return unpack_dense<f16>(strip, column, depth, out);
    case Family::bf16: return unpack_pairs(strip, column, depth, out);
    case Family::f8: return unpack_units<unpack_f8>(strip, column, depth, layout, out);
    case Family::nf4: return unpack_units<unpack_table<host::kNF4>>(strip, column, depth, layout, out);
    case Family::fp4: return unpack_units<unpack_table<host::kFP4>>(strip, column, depth, layout, out);
    case Family::w4z: return unpack_units<unpack_w4z>(strip, column, depth, layout, out);
    case Family::w4: return unpack_units<unpack_w4>(strip, column, depth, layout, out);
    case Family::w4k: return unpack_units<unpack_w4k>(strip, column, depth, layout, out);
    case Family::w6: return unpack_units<unpack_w6>(strip, column, depth, layout, out);
    case Family::w8: return unpack_units<unpack_w8>(strip, column, depth, layout, out);
    case Family::w8s: return unpack_units<unpack_w8f<32, false>>(strip, column, depth, layout, out);
    case Family::w8m: return unpack_units<unpack_w8f<32, true>>(strip, column, depth, layout, out);
    case Family::w8m16: return unpack_units<unpack_w8f<16, true>>(strip, column, depth, layout, out);
  }
}

}  // namespace engine_cpu
