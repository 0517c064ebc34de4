// The packed layouts back to f32, exactly as the formats define their values.
#define ENGINE_ISA host
#include "../../simd_storage.h"
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

// The same with a fifth bit in the line behind the nibbles.
template <bool kFive>
int small(const uint8_t* lines, int64_t column, int k) {
  return nibble(lines, column, k) | (kFive ? (at(lines, 4, column, k % 4) >> (k / 4) & 1) << 4 : 0);
}

template <bool kFive>
void unpack_offset(const uint8_t* unit, int64_t column, float* out) {
  const float d = half_at(unit, column);
  for (int k = 0; k < 32; ++k) out[k] = d * static_cast<float>(small<kFive>(unit + 128, column, k) - (kFive ? 16 : 8));
}

template <bool kFive>
void unpack_minimum(const uint8_t* unit, int64_t column, float* out) {
  const float d = half_at(unit, column), minimum = half_at(unit + 128, column);
  for (int k = 0; k < 32; ++k) out[k] = d * static_cast<float>(small<kFive>(unit + 256, column, k)) - minimum;
}

void unpack_w4nl(const uint8_t* unit, int64_t column, float* out) {
  const float d = half_at(unit, column);
  for (int k = 0; k < 32; ++k) out[k] = d * static_cast<float>(host::kNonLinear[nibble(unit + 128, column, k)]);
}

void unpack_w4e(const uint8_t* unit, int64_t column, float* out) {
  const float d = to_f32(host::load_as<bf16>(unit + 2 * column));
  for (int k = 0; k < 32; ++k) out[k] = d * static_cast<float>(host::kE2M1[nibble(unit + 128, column, k)]);
}

void unpack_w4e16(const uint8_t* unit, int64_t column, float* out) {
  const float d = host::load_as<float>(unit + 4 * column) / 256;
  for (int k = 0; k < 64; ++k) {
    const float scale = d * host::e4m3(unit[256 + k / 16 * 64 + column]);
    out[k] = scale * static_cast<float>(host::kE2M1[nibble(unit + 512 + k / 32 * 1024, column, k % 32)]);
  }
}

template <int kGroup, int kOffset>
void unpack_lattice(const uint8_t* unit, int64_t column, float* out) {
  constexpr int kScales = 320, kNibblesAt = kScales + 256 / kGroup * 64;
  const float d = host::load_as<float>(unit + 64 + 4 * column);
  for (int k = 0; k < 256; ++k) {
    const float scale = d * static_cast<float>(static_cast<int8_t>(unit[kScales + k / kGroup * 64 + column]));
    out[k] = scale * static_cast<float>(unit[nibble(unit + kNibblesAt + k / 32 * 1024, column, k % 32)] - kOffset);
  }
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

template <bool kFive>
void unpack_k(const uint8_t* unit, int64_t column, float* out) {
  const float d = half_at(unit, column);
  const float dmin = half_at(unit + 128, column);
  const auto packed = [&](int i) { return static_cast<int>(unit[256 + 64 * i + column]); };
  for (int g = 0; g < 8; ++g) {
    const int scale = g < 4 ? packed(g) & 63 : (packed(g + 4) & 15) | (packed(g - 4) >> 6 << 4);
    const int minimum = g < 4 ? packed(g + 4) & 63 : (packed(g + 4) >> 4) | (packed(g) >> 6 << 4);
    const float s = d * static_cast<float>(scale);
    const float m = dmin * static_cast<float>(minimum);
    for (int k = 0; k < 32; ++k)
      out[32 * g + k] = s * static_cast<float>(small<kFive>(unit + 1024 + (kFive ? 1280 : 1024) * g, column, k)) - m;
  }
}

// The two low bits of number k of a group of 16.
int pair(const uint8_t* lines, int group, int64_t column, int k) { return at(lines, group, column, k % 4) >> k / 4 * 2 & 3; }

void unpack_w2k(const uint8_t* unit, int64_t column, float* out) {
  const float d = half_at(unit, column), dmin = half_at(unit + 128, column);
  for (int g = 0; g < 16; ++g) {
    const int both = unit[256 + 64 * g + column];
    const float scale = d * static_cast<float>(both & 15), minimum = dmin * static_cast<float>(both >> 4);
    for (int k = 0; k < 16; ++k) out[16 * g + k] = scale * static_cast<float>(pair(unit + 1280, g, column, k)) - minimum;
  }
}

void unpack_w3k(const uint8_t* unit, int64_t column, float* out) {
  const float d = half_at(unit, column);
  for (int g = 0; g < 16; ++g) {
    const float scale = d * static_cast<float>(static_cast<int8_t>(unit[128 + 64 * g + column]));
    for (int k = 0; k < 16; ++k) {
      const int high = at(unit + 5248, g / 2, column, k % 4) >> (g % 2 * 4 + k / 4) & 1;
      out[16 * g + k] = scale * static_cast<float>((pair(unit + 1152, g, column, k) | high << 2) - 4);
    }
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

// Bytes with f32 scales, and minimums or the offset 128.
template <bool kMinimums>
void unpack_w8f(const uint8_t* unit, int64_t column, float* out) {
  const float scale = host::load_as<float>(unit + 4 * column);
  const float minimum = kMinimums ? host::load_as<float>(unit + 256 + 4 * column) : 0.0f;
  for (int k = 0; k < 32; ++k) {
    const int u = at(unit + (kMinimums ? 512 : 256), k / 4, column, k % 4);
    out[k] = kMinimums ? scale * static_cast<float>(u) - minimum : scale * static_cast<float>(u - 128);
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
    case Family::w4: return unpack_units<unpack_offset<false>>(strip, column, depth, layout, out);
    case Family::w5: return unpack_units<unpack_offset<true>>(strip, column, depth, layout, out);
    case Family::w4m: return unpack_units<unpack_minimum<false>>(strip, column, depth, layout, out);
    case Family::w5m: return unpack_units<unpack_minimum<true>>(strip, column, depth, layout, out);
    case Family::w4k: return unpack_units<unpack_k<false>>(strip, column, depth, layout, out);
    case Family::w5k: return unpack_units<unpack_k<true>>(strip, column, depth, layout, out);
    case Family::w2k: return unpack_units<unpack_w2k>(strip, column, depth, layout, out);
    case Family::w3k: return unpack_units<unpack_w3k>(strip, column, depth, layout, out);
    case Family::w6: return unpack_units<unpack_w6>(strip, column, depth, layout, out);
    case Family::w8: return unpack_units<unpack_w8>(strip, column, depth, layout, out);
    case Family::w8s: return unpack_units<unpack_w8f<false>>(strip, column, depth, layout, out);
    case Family::w8m: return unpack_units<unpack_w8f<true>>(strip, column, depth, layout, out);
    case Family::w4nl: return unpack_units<unpack_w4nl>(strip, column, depth, layout, out);
    case Family::w4e: return unpack_units<unpack_w4e>(strip, column, depth, layout, out);
    case Family::w4e16: return unpack_units<unpack_w4e16>(strip, column, depth, layout, out);
    case Family::w4x: return unpack_units<unpack_lattice<32, 128>>(strip, column, depth, layout, out);
    case Family::w4l: return unpack_units<unpack_lattice<32, 64>>(strip, column, depth, layout, out);
    case Family::w4l16: return unpack_units<unpack_lattice<16, 64>>(strip, column, depth, layout, out);
  }
}

}  // namespace engine_cpu
