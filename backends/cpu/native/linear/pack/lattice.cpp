// The formats of GGUF whose numbers are few: codebooks of IQ1, IQ2 and IQ3, IQ4_XS and the ternary ones, as ggml has them. All of
// them become nibbles with a table, whole numbers as scales, and an f32 (layout.h).
#define ENGINE_ISA host
#include <iterator>

#include "../../simd_storage.h"
#include "../four_bits.h"
#include "units.h"

namespace engine_cpu {
namespace {

using host::f16;
using host::to_f32;

// Where a unit has its parts.
constexpr int kScales = 320;
template <int kGroup>
constexpr int kNibblesAt = kScales + 256 / kGroup * 64;

// A grid's entry has places below 8; the eighth bit of a number's nibble is its sign, or what else there are two of.
constexpr int8_t kTwos[16] = {8, 25, 43, 0, 0, 0, 0, 0, -8, -25, -43, 0, 0, 0, 0, 0};                           // IQ2
constexpr int8_t kThrees[16] = {4, 12, 20, 28, 36, 44, 52, 62, -4, -12, -20, -28, -36, -44, -52, -62};          // IQ3_XXS
constexpr int8_t kOdds[16] = {1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15};                    // IQ3_S
constexpr int8_t kOnes[16] = {-7, 1, 9, 0, 0, 0, 0, 0, -9, -1, 7, 0, 0, 0, 0, 0};                               // IQ1: 8 g +- 1
constexpr int8_t kTernary[16] = {-1, 0, 1, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0};                              // TQ; 3 is no code of theirs

float half(const uint8_t* source) { return to_f32(host::load_as<f16>(source)); }

void put_factor(uint8_t* unit, int64_t column, float d) { std::memcpy(unit + 64 + 4 * column, &d, 4); }

void put_scale(uint8_t* unit, int group, int64_t column, int scale) {
  unit[kScales + 64 * group + column] = static_cast<uint8_t>(scale);
}

// Bits 0..7 as the highest ones of eight nibbles.
uint32_t as_signs(uint32_t bits) {
  uint32_t signs = 0;
  for (int i = 0; i < 8; ++i) signs |= (bits >> i & 1) << (4 * i + 3);
  return signs;
}

// Seven signs, and an eighth that makes their number even.
uint32_t even_signs(uint32_t seven) {
  uint32_t parity = seven ^ seven >> 4;
  parity ^= parity >> 2;
  parity ^= parity >> 1;
  return as_signs((seven & 127) | (parity & 1) << 7);
}

// A group of 32: four times eight numbers, a nibble each, the first lowest.
void put_eights(uint8_t* lines, int64_t column, const uint32_t* eights) {
  uint8_t u[32];
  for (int k = 0; k < 32; ++k) u[k] = eights[k / 8] >> 4 * (k % 8) & 15;
  uint32_t steps[8];
  as_steps(u, steps);
  put_nibbles(lines, column, steps);
}

// IQ2_XXS: f16 d; for each group of 32 u8 index[4], then u32: seven signs four times, a scale of four bits.
void pack_iq2_xxs(const uint8_t* block, const uint32_t* grid, uint8_t* unit, int64_t column) {
  put_factor(unit, column, half(block) * 0.125f);
  for (int g = 0; g < 8; ++g) {
    const uint8_t* const group = block + 2 + 8 * g;
    const uint32_t rest = word(group, 1);
    uint32_t eights[4];
    for (int i = 0; i < 4; ++i) eights[i] = grid[group[i]] | even_signs(rest >> 7 * i & 127);
    put_scale(unit, g, column, static_cast<int>(2 * (rest >> 28) + 1));
    put_eights(unit + kNibblesAt<32> + 1024 * g, column, eights);
  }
}

// Scales of four bits each for groups of 16, two a byte.
void put_scales16(const uint8_t* scales, uint8_t* unit, int64_t column) {
  for (int g = 0; g < 16; ++g) put_scale(unit, g, column, 2 * (scales[g / 2] >> g % 2 * 4 & 15) + 1);
}

// IQ2_XS: f16 d; u16 qs[32], nine bits of index and seven signs; u8 scales[8].
void pack_iq2_xs(const uint8_t* block, const uint32_t* grid, uint8_t* unit, int64_t column) {
  put_factor(unit, column, half(block) * 0.125f);
  put_scales16(block + 66, unit, column);
  for (int g = 0; g < 8; ++g) {
    uint32_t eights[4];
    for (int i = 0; i < 4; ++i) {
      const auto q = host::load_as<uint16_t>(block + 2 + 8 * g + 2 * i);
      eights[i] = grid[q & 511] | even_signs(q >> 9);
    }
    put_eights(unit + kNibblesAt<16> + 1024 * g, column, eights);
  }
}

// IQ2_S: f16 d; u8 qs[32]; u8 signs[32]; u8 qh[8], two more bits of four indices each; u8 scales[8].
void pack_iq2_s(const uint8_t* block, const uint32_t* grid, uint8_t* unit, int64_t column) {
  put_factor(unit, column, half(block) * 0.125f);
  put_scales16(block + 74, unit, column);
  for (int g = 0; g < 8; ++g) {
    uint32_t eights[4];
    for (int i = 0; i < 4; ++i) {
      const int index = block[2 + 4 * g + i] | (block[66 + g] >> 2 * i & 3) << 8;
      eights[i] = grid[index] | as_signs(block[34 + 4 * g + i]);
    }
    put_eights(unit + kNibblesAt<16> + 1024 * g, column, eights);
  }
}

// IQ3_XXS: f16 d; u8 qs[64], an index for each four; for each group of 32 u32: seven signs four times, a scale of four bits.
void pack_iq3_xxs(const uint8_t* block, const uint32_t* grid, uint8_t* unit, int64_t column) {
  put_factor(unit, column, half(block) * 0.25f);
  for (int g = 0; g < 8; ++g) {
    const uint32_t rest = word(block + 66, g);
    uint32_t eights[4];
    for (int i = 0; i < 4; ++i) {
      const uint8_t* const two = block + 2 + 8 * g + 2 * i;
      eights[i] = grid[two[0]] | grid[two[1]] << 16 | even_signs(rest >> 7 * i & 127);
    }
    put_scale(unit, g, column, static_cast<int>(2 * (rest >> 28) + 1));
    put_eights(unit + kNibblesAt<32> + 1024 * g, column, eights);
  }
}

// IQ3_S: f16 d; u8 qs[64], an index for each four; u8 qh[8], one more bit of each; u8 signs[32]; u8 scales[4], four bits each.
void pack_iq3_s(const uint8_t* block, const uint32_t* grid, uint8_t* unit, int64_t column) {
  put_factor(unit, column, half(block));
  for (int g = 0; g < 8; ++g) {
    uint32_t eights[4];
    for (int i = 0; i < 4; ++i) {
      const int first = 8 * g + 2 * i, high = block[66 + g] >> 2 * i;
      const int low = block[2 + first] | (high & 1) << 8, next = block[3 + first] | (high >> 1 & 1) << 8;
      eights[i] = grid[low] | grid[next] << 16 | as_signs(block[74 + 4 * g + i]);
    }
    put_scale(unit, g, column, 2 * (block[106 + g / 2] >> g % 2 * 4 & 15) + 1);
    put_eights(unit + kNibblesAt<32> + 1024 * g, column, eights);
  }
}

constexpr uint32_t kEighths = 0x88888888;  // the other sign of what is added to each number

// IQ1_S: f16 d; u8 qs[32]; for each group of 32 u16: three more bits of four indices, a scale of three, the sign of an eighth.
void pack_iq1_s(const uint8_t* block, const uint32_t* grid, uint8_t* unit, int64_t column) {
  put_factor(unit, column, half(block) * 0.125f);
  for (int g = 0; g < 8; ++g) {
    const auto rest = host::load_as<uint16_t>(block + 34 + 2 * g);
    uint32_t eights[4];
    for (int i = 0; i < 4; ++i) eights[i] = grid[block[2 + 4 * g + i] | (rest >> 3 * i & 7) << 8] | (rest >> 15 ? kEighths : 0);
    put_scale(unit, g, column, 2 * (rest >> 12 & 7) + 1);
    put_eights(unit + kNibblesAt<32> + 1024 * g, column, eights);
  }
}

// IQ1_M: u8 qs[32]; u8 qh[16], for each index three more bits and the sign of an eighth; u16 scales[4], three bits for each 16 and
// in their highest four a part of an f16.
void pack_iq1_m(const uint8_t* block, const uint32_t* grid, uint8_t* unit, int64_t column) {
  uint16_t scales[4], d = 0;
  std::memcpy(scales, block + 48, 8);
  for (int i = 0; i < 4; ++i) d = static_cast<uint16_t>(d | (scales[i] >> 12) << 4 * i);
  put_factor(unit, column, to_f32(host::bit_cast<f16>(d)) * 0.125f);
  for (int g = 0; g < 16; ++g) put_scale(unit, g, column, 2 * (scales[g / 4] >> 3 * (g % 4) & 7) + 1);
  for (int g = 0; g < 8; ++g) {
    uint32_t eights[4];
    for (int i = 0; i < 4; ++i) {
      const int rest = block[32 + 2 * g + i / 2] >> i % 2 * 4;
      eights[i] = grid[block[4 * g + i] | (rest & 7) << 8] | (rest & 8 ? kEighths : 0);
    }
    put_eights(unit + kNibblesAt<16> + 1024 * g, column, eights);
  }
}

// IQ4_XS: f16 d; six bits a scale: u16 of high pairs, u8[4] of low nibbles; u8 qs[128], 16 a group of 32.
void pack_iq4_xs(const uint8_t* block, uint8_t* unit, int64_t column) {
  put_factor(unit, column, half(block));
  for (int g = 0; g < 8; ++g) {
    const int low = block[4 + g / 2] >> g % 2 * 4 & 15;
    const int high = block[2 + g / 4] >> g % 4 * 2 & 3;
    uint32_t steps[8];
    for (int i = 0; i < 4; ++i) {
      steps[i] = word(block + 8 + 16 * g, i) & kNibbles;
      steps[i + 4] = word(block + 8 + 16 * g, i) >> 4 & kNibbles;
    }
    put_scale(unit, g, column, (low | high << 4) - 32);
    put_nibbles(unit + kNibblesAt<32> + 1024 * g, column, steps);
  }
}

// 256 numbers of a ternary block, 0 to 2 each.
void put_ternary(float d, const uint8_t* u, uint8_t* unit, int64_t column) {
  put_factor(unit, column, d);
  for (int g = 0; g < 8; ++g) {
    uint32_t steps[8];
    as_steps(u + 32 * g, steps);
    put_scale(unit, g, column, 1);
    put_nibbles(unit + kNibblesAt<32> + 1024 * g, column, steps);
  }
}

// TQ2_0: u8 qs[64], each half of which holds four runs of 32, two bits each; f16 d.
void pack_tq2_0(const uint8_t* block, uint8_t* unit, int64_t column) {
  uint8_t u[256];
  for (int k = 0; k < 256; ++k) u[k] = block[k / 128 * 32 + k % 32] >> k / 32 % 4 * 2 & 3;
  put_ternary(half(block + 64), u, unit, column);
}

// TQ1_0: u8 qs[48] of five numbers each, in runs of 32 and then of 16; u8 qh[4] of four each; f16 d. A byte is the numbers' digits in
// base 3 as a fraction of 256.
void pack_tq1_0(const uint8_t* block, uint8_t* unit, int64_t column) {
  constexpr uint8_t kPowers[5] = {1, 3, 9, 27, 81};
  uint8_t u[256];
  const auto digit = [&](int byte, int place) {
    return static_cast<uint8_t>(static_cast<uint8_t>(block[byte] * kPowers[place]) * 3 >> 8);
  };
  for (int k = 0; k < 160; ++k) u[k] = digit(k % 32, k / 32);
  for (int k = 0; k < 80; ++k) u[160 + k] = digit(32 + k % 16, k / 16);
  for (int k = 0; k < 16; ++k) u[240 + k] = digit(48 + k % 4, k / 4);
  put_ternary(half(block + 52), u, unit, column);
}

const Packer kPackers[] = {
    {{Family::w4x, "w4x", "IQ4_XS", 256, 136, 256, 9024}, pack_iq4_xs, nullptr, 0, host::kNonLinear, 128},
    {{Family::w4l, "w4l", "IQ3_S", 256, 110, 256, 9024}, nullptr, pack_iq3_s, 512, kOdds, 64},
    {{Family::w4l, "w4l", "IQ3_XXS", 256, 98, 256, 9024}, nullptr, pack_iq3_xxs, 256, kThrees, 64},
    {{Family::w4l16, "w4l16", "IQ2_S", 256, 82, 256, 9536}, nullptr, pack_iq2_s, 1024, kTwos, 64},
    {{Family::w4l16, "w4l16", "IQ2_XS", 256, 74, 256, 9536}, nullptr, pack_iq2_xs, 512, kTwos, 64},
    {{Family::w4l, "w4l", "IQ2_XXS", 256, 66, 256, 9024}, nullptr, pack_iq2_xxs, 256, kTwos, 64},
    {{Family::w4l16, "w4l16", "IQ1_M", 256, 56, 256, 9536}, nullptr, pack_iq1_m, 2048, kOnes, 64},
    {{Family::w4l, "w4l", "IQ1_S", 256, 50, 256, 9024}, nullptr, pack_iq1_s, 2048, kOnes, 64},
    {{Family::w4l, "w4l", "TQ1_0", 256, 54, 256, 9024}, pack_tq1_0, nullptr, 0, kTernary, 64},
    {{Family::w4l, "w4l", "TQ2_0", 256, 66, 256, 9024}, pack_tq2_0, nullptr, 0, kTernary, 64},
};

}  // namespace

Packers lattice_packers() { return {std::begin(kPackers), std::end(kPackers)}; }

}  // namespace engine_cpu
