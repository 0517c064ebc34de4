// Checkpoint blocks into the packed layouts of layout.h. Block formats as ggml's gguf specification has them.
#define ENGINE_ISA host
#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "../../simd.h"
#include "../layout.h"

namespace engine_cpu {
namespace {

constexpr uint32_t kNibbles = 0x0f0f0f0f;
constexpr uint32_t kPairs = 0x03030303;
constexpr uint32_t kBits = 0x01010101;

uint32_t word(const uint8_t* source, int index) {
  uint32_t value;
  std::memcpy(&value, source + 4 * index, 4);
  return value;
}

// The four bytes of a column in line `line` of four panels of 64 bytes.
void put(uint8_t* lines, int line, int64_t column, uint32_t value) {
  std::memcpy(lines + line * 256 + column / kPanel * 64 + column % kPanel * 4, &value, 4);
}

// Steps 0..7 of a group of 32 as w4's nibbles: `even` and `odd` steps to low and high.
void put_nibbles(uint8_t* lines, int64_t column, const uint32_t* steps) {
  for (int i = 0; i < 4; ++i) put(lines, i, column, steps[2 * i] | steps[2 * i + 1] << 4);
}

// Q4_0: f16 d; u8 qs[16], k = j in the low nibble of byte j, j + 16 in the high.
void pack_q4_0(const uint8_t* block, uint8_t* unit, int64_t column) {
  std::memcpy(unit + 2 * column, block, 2);
  uint32_t steps[8];
  for (int i = 0; i < 4; ++i) {
    steps[i] = word(block + 2, i) & kNibbles;
    steps[i + 4] = word(block + 2, i) >> 4 & kNibbles;
  }
  put_nibbles(unit + 128, column, steps);
}

// Q4_K: f16 d, dmin; u8 scales[12]; u8 qs[128], each 32 bytes of which hold two groups of 32, low and high nibbles.
void pack_q4_k(const uint8_t* block, uint8_t* unit, int64_t column) {
  std::memcpy(unit + 2 * column, block, 2);
  std::memcpy(unit + 128 + 2 * column, block + 2, 2);
  for (int i = 0; i < 12; ++i) unit[256 + 64 * i + column] = block[4 + i];
  for (int pair = 0; pair < 4; ++pair) {
    const uint8_t* qs = block + 16 + 32 * pair;
    uint32_t low[8], high[8];
    for (int i = 0; i < 8; ++i) {
      low[i] = word(qs, i) & kNibbles;
      high[i] = word(qs, i) >> 4 & kNibbles;
    }
    put_nibbles(unit + 1024 + 2048 * pair, column, low);
    put_nibbles(unit + 1024 + 2048 * pair + 1024, column, high);
  }
}

// The 64 steps of a unit of w6, of six bits each.
void put_six_bits(uint8_t* unit, int64_t column, const uint32_t* steps) {
  for (int group = 0; group < 16; ++group) {
    const uint32_t* const s = steps + 4 * group;
    uint8_t* const lines = unit + 1152 + 768 * group;
    for (int i = 0; i < 3; ++i) put(lines, i, column, s[i] | (s[3] >> 2 * i & kPairs) << 6);
  }
}

// Q6_K: u8 ql[128], qh[64]; i8 scales[16]; f16 d. Each half holds 128 k: four runs of 32 share the bytes of qh.
void pack_q6_k(const uint8_t* block, uint8_t* unit, int64_t column) {
  std::memcpy(unit + 2 * column, block + 208, 2);
  for (int i = 0; i < 16; ++i) unit[128 + 64 * i + column] = block[192 + i];
  uint32_t steps[64];
  for (int half = 0; half < 2; ++half) {
    for (int i = 0; i < 8; ++i) {
      const uint32_t a = word(block + 64 * half, i);
      const uint32_t b = word(block + 64 * half + 32, i);
      const uint32_t high = word(block + 128 + 32 * half, i);
      uint32_t* const run = steps + 32 * half + i;
      run[0] = (a & kNibbles) | (high & kPairs) << 4;
      run[8] = (b & kNibbles) | (high >> 2 & kPairs) << 4;
      run[16] = (a >> 4 & kNibbles) | (high >> 4 & kPairs) << 4;
      run[24] = (b >> 4 & kNibbles) | (high >> 6 & kPairs) << 4;
    }
  }
  put_six_bits(unit, column, steps);
}

// Q8_0: f16 d; i8 qs[32].
void pack_q8_0(const uint8_t* block, uint8_t* unit, int64_t column) {
  std::memcpy(unit + 2 * column, block, 2);
  for (int i = 0; i < 8; ++i) put(unit + 128, i, column, word(block + 2, i) ^ 0x80808080);  // + 128
}

// Q3_K: u8 high[32], bit i of which belongs to run i of 32; u8 qs[64], each half of which holds four runs; u8 scales[12], six
// bits each: 8 bytes of low nibbles, 4 of high pairs; f16 d. q is 4 less where the high bit is 0.
void pack_q3_k(const uint8_t* block, uint8_t* unit, int64_t column) {
  const uint8_t* const scales = block + 96;
  std::memcpy(unit + 2 * column, block + 108, 2);
  for (int i = 0; i < 16; ++i) {
    const int low = scales[i % 8] >> i / 8 * 4 & 15;
    const int high = scales[8 + i % 4] >> i / 4 * 2 & 3;
    unit[128 + 64 * i + column] = static_cast<uint8_t>((low | high << 4) - 32);
  }
  uint32_t steps[64];
  for (int run = 0; run < 8; ++run)
    for (int i = 0; i < 8; ++i) {
      const uint32_t low = word(block + 32 + run / 4 * 32, i) >> run % 4 * 2 & kPairs;
      const uint32_t high = word(block, i) >> run & kBits;
      steps[8 * run + i] = (low | high << 2) + 0x1c1c1c1c;  // - 4 + 32
    }
  put_six_bits(unit, column, steps);
}

// -- formats widened to bytes -------------------------------------------------------------------------------------------

using host::f16;
using host::to_f32;

float half(const uint8_t* source) { return to_f32(host::load_as<f16>(source)); }
void put_f32(uint8_t* planes, int plane, int64_t column, float value) {
  std::memcpy(planes + 256 * plane + 4 * column, &value, 4);
}
void put_bytes(uint8_t* lines, int64_t column, const uint8_t* u) {
  for (int i = 0; i < 8; ++i) put(lines, i, column, word(u, i));
}

// 16 bytes as 32 nibbles: the low ones first.
void split_nibbles(const uint8_t* qs, uint8_t* u) {
  for (int j = 0; j < 16; ++j) {
    u[j] = qs[j] & 15;
    u[j + 16] = qs[j] >> 4;
  }
}

// The same with a fifth bit each, bit k of `high`.
void split_fives(const uint8_t* qs, const uint8_t* high, uint8_t* u) {
  split_nibbles(qs, u);
  for (int k = 0; k < 32; ++k) u[k] |= (word(high, 0) >> k & 1) << 4;
}

// Nibbles as indices into 16 numbers, plus 128.
void look_up(const uint8_t* qs, const int8_t* numbers, uint8_t* u) {
  split_nibbles(qs, u);
  for (int k = 0; k < 32; ++k) u[k] = static_cast<uint8_t>(numbers[u[k]] + 128);
}

constexpr int8_t kNonLinear[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};  // IQ4
constexpr int8_t kE2M1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};                        // doubled

// Q5_0: f16 d; u32 high; u8 qs[16].
void pack_q5_0(const uint8_t* block, uint8_t* unit, int64_t column) {
  uint8_t u[32];
  split_fives(block + 6, block + 2, u);
  for (uint8_t& value : u) value += 112;  // - 16 + 128
  std::memcpy(unit + 2 * column, block, 2);
  put_bytes(unit + 128, column, u);
}

// IQ4_NL: f16 d; u8 qs[16].
void pack_iq4_nl(const uint8_t* block, uint8_t* unit, int64_t column) {
  uint8_t u[32];
  look_up(block + 2, kNonLinear, u);
  std::memcpy(unit + 2 * column, block, 2);
  put_bytes(unit + 128, column, u);
}

// MXFP4 (OCP Microscaling Formats 1.0): u8 e, the scale 2^(e - 127); u8 qs[16]. The numbers are doubled, so the scale is half.
void pack_mxfp4(const uint8_t* block, uint8_t* unit, int64_t column) {
  uint8_t u[32];
  look_up(block + 1, kE2M1, u);
  const uint32_t e = block[0];
  put_f32(unit, 0, column, host::bit_cast<float>(e < 2 ? 0x00200000u << e : (e - 1) << 23));
  put_bytes(unit + 256, column, u);
}

// IQ4_XS: f16 d; six bits a scale: u16 of high pairs, u8[4] of low nibbles; u8 qs[128], 16 a group of 32.
void pack_iq4_xs(const uint8_t* block, uint8_t* unit, int64_t column) {
  for (int g = 0; g < 8; ++g, unit += 2304) {
    const int low = block[4 + g / 2] >> g % 2 * 4 & 15;
    const int high = block[2 + g / 4] >> g % 4 * 2 & 3;
    uint8_t u[32];
    look_up(block + 8 + 16 * g, kNonLinear, u);
    put_f32(unit, 0, column, half(block) * static_cast<float>((low | high << 4) - 32));
    put_bytes(unit + 256, column, u);
  }
}

// One unit of w8m: weight = scale * u - minimum.
void put_w8m(uint8_t* unit, int64_t column, float scale, float minimum, const uint8_t* u) {
  put_f32(unit, 0, column, scale);
  put_f32(unit, 1, column, minimum);
  put_bytes(unit + 512, column, u);
}

// Q4_1: f16 d, m; u8 qs[16]. weight = d * u + m.
void pack_q4_1(const uint8_t* block, uint8_t* unit, int64_t column) {
  uint8_t u[32];
  split_nibbles(block + 4, u);
  put_w8m(unit, column, half(block), -half(block + 2), u);
}

// Q5_1: f16 d, m; u32 high; u8 qs[16]. weight = d * u + m.
void pack_q5_1(const uint8_t* block, uint8_t* unit, int64_t column) {
  uint8_t u[32];
  split_fives(block + 8, block + 4, u);
  put_w8m(unit, column, half(block), -half(block + 2), u);
}

// Q5_K: f16 d, dmin; u8 scales[12] and qs[128] as in Q4_K, with u8 high[32] between, bit g of which belongs to group g.
void pack_q5_k(const uint8_t* block, uint8_t* unit, int64_t column) {
  const uint8_t* const packed = block + 4;
  for (int g = 0; g < 8; ++g, unit += 2560) {
    const int scale = g < 4 ? packed[g] & 63 : (packed[g + 4] & 15) | packed[g - 4] >> 6 << 4;
    const int minimum = g < 4 ? packed[g + 4] & 63 : packed[g + 4] >> 4 | packed[g] >> 6 << 4;
    uint8_t u[32];
    for (int k = 0; k < 32; ++k)
      u[k] = static_cast<uint8_t>((block[48 + g / 2 * 32 + k] >> g % 2 * 4 & 15) | (block[16 + k] >> g & 1) << 4);
    put_w8m(unit, column, half(block) * static_cast<float>(scale), half(block + 2) * static_cast<float>(minimum), u);
  }
}

// Q2_K: u8 scales[16], a nibble of scale and one of minimum for each 16; u8 qs[64], each half of which holds four runs of 32;
// f16 d, dmin.
void pack_q2_k(const uint8_t* block, uint8_t* unit, int64_t column) {
  for (int run = 0; run < 8; ++run, unit += 3072) {
    for (int i = 0; i < 2; ++i) {
      const int both = block[2 * run + i];
      put_f32(unit, i, column, half(block + 80) * static_cast<float>(both & 15));
      put_f32(unit, 2 + i, column, half(block + 82) * static_cast<float>(both >> 4));
    }
    for (int i = 0; i < 8; ++i) put(unit + 1024, i, column, word(block + 16 + run / 4 * 32, i) >> run % 4 * 2 & kPairs);
  }
}

// -- formats of Hugging Face checkpoints (core/engine/formats/hfblocks.py) ----------------------------------------------------

// W4Z: f16 scale; u8 zero; u8 qs[16] as in Q4_0.
void pack_w4z(const uint8_t* block, uint8_t* unit, int64_t column) {
  uint32_t steps[8];
  for (int i = 0; i < 4; ++i) {
    steps[i] = word(block + 3, i) & kNibbles;
    steps[i + 4] = word(block + 3, i) >> 4 & kNibbles;
  }
  std::memcpy(unit + 2 * column, block, 2);
  unit[128 + column] = block[2];
  put_nibbles(unit + 192, column, steps);
}

// W8S: f32 scale; i8 q[32].
void pack_w8s(const uint8_t* block, uint8_t* unit, int64_t column) {
  std::memcpy(unit + 4 * column, block, 4);
  for (int i = 0; i < 8; ++i) put(unit + 256, i, column, word(block + 4, i) ^ 0x80808080);  // + 128
}

// W8M: f32 scale, minimum; u8 q[32].
void pack_w8m(const uint8_t* block, uint8_t* unit, int64_t column) {
  std::memcpy(unit + 4 * column, block, 4);
  std::memcpy(unit + 256 + 4 * column, block + 4, 4);
  put_bytes(unit + 512, column, block + 8);
}

// FP8, NF4 and FP4: f32 scale; 32 bytes.
void pack_scaled_bytes(const uint8_t* block, uint8_t* unit, int64_t column) {
  std::memcpy(unit + 4 * column, block, 4);
  for (int i = 0; i < 32; ++i) unit[256 + 64 * i + column] = block[4 + i];
}

template <int kBytes>
void pack_element(const uint8_t* block, uint8_t* unit, int64_t column) {
  std::memcpy(unit + kBytes * column, block, kBytes);
}

// bf16: 16 pairs of k.
void pack_pairs(const uint8_t* block, uint8_t* unit, int64_t column) {
  for (int i = 0; i < 16; ++i) put(unit, i, column, word(block, i));
}

// From a block to the units of its k, or from the blocks of one unit.
using PackUnit = void (*)(const uint8_t* block, uint8_t* unit, int64_t column);

struct Packer {
  Layout layout;
  PackUnit pack;
};

const Packer kPackers[] = {
    {{Family::f32, "f32", "F32", 1, 4, 1, 256}, pack_element<4>},
    {{Family::f16, "f16", "F16", 1, 2, 1, 128}, pack_element<2>},
    {{Family::bf16, "bf16", "BF16", 1, 2, 32, 4096}, pack_pairs},
    {{Family::f8, "f8", "FP8", 32, 36, 32, 2304}, pack_scaled_bytes},
    {{Family::nf4, "nf4", "NF4", 64, 36, 64, 2304}, pack_scaled_bytes},
    {{Family::fp4, "fp4", "FP4", 64, 36, 64, 2304}, pack_scaled_bytes},
    {{Family::w4z, "w4z", "W4Z", 32, 19, 32, 1216}, pack_w4z},
    {{Family::w8s, "w8s", "W8S", 32, 36, 32, 2304}, pack_w8s},
    {{Family::w8m, "w8m", "W8M", 32, 40, 32, 2560}, pack_w8m},
    {{Family::w4, "w4", "Q4_0", 32, 18, 32, 1152}, pack_q4_0},
    {{Family::w4k, "w4k", "Q4_K", 256, 144, 256, 9216}, pack_q4_k},
    {{Family::w6, "w6", "Q6_K", 256, 210, 256, 13440}, pack_q6_k},
    {{Family::w8, "w8", "Q8_0", 32, 34, 32, 2176}, pack_q8_0},
    {{Family::w6, "w6", "Q3_K", 256, 110, 256, 13440}, pack_q3_k},
    {{Family::w8, "w8", "Q5_0", 32, 22, 32, 2176}, pack_q5_0},
    {{Family::w8, "w8", "IQ4_NL", 32, 18, 32, 2176}, pack_iq4_nl},
    {{Family::w8s, "w8s", "MXFP4", 32, 17, 32, 2304}, pack_mxfp4},
    {{Family::w8s, "w8s", "IQ4_XS", 256, 136, 32, 2304}, pack_iq4_xs},
    {{Family::w8m, "w8m", "Q4_1", 32, 20, 32, 2560}, pack_q4_1},
    {{Family::w8m, "w8m", "Q5_1", 32, 24, 32, 2560}, pack_q5_1},
    {{Family::w8m, "w8m", "Q5_K", 256, 176, 32, 2560}, pack_q5_k},
    {{Family::w8m16, "w8m16", "Q2_K", 256, 84, 32, 3072}, pack_q2_k},
};

const Packer& packer_of(const std::string& format) {
  std::string known;
  for (const Packer& packer : kPackers) {
    if (format == packer.layout.format) return packer;
    known += (known.empty() ? "" : ", ") + std::string(packer.layout.format);
  }
  throw std::invalid_argument("The CPU's linear packs the formats " + known + ", and not '" + format + "'.");
}

}  // namespace

const Layout& layout_of_format(const std::string& format) { return packer_of(format).layout; }

const Layout& layout_of(const PackedWeight& weight) {
  for (const Packer& packer : kPackers)
    if (weight.family == packer.layout.name && weight.format == packer.layout.format) return packer.layout;
  throw std::invalid_argument("A weight of family '" + weight.family + "' is no matrix.");
}

std::shared_ptr<PackedWeight> alloc_weight(const std::string& format, int64_t columns, int64_t depth, int64_t count) {
  const Layout& layout = layout_of_format(format);
  constexpr int64_t kMost = int64_t{1} << 31;
  if (columns <= 0 || depth <= 0 || count <= 0 || columns >= kMost || depth >= kMost || count >= kMost)
    throw std::invalid_argument("A packed weight has at least one column, one row and one matrix, and less than 2^31 of each.");
  if (depth % layout.block != 0)
    throw std::invalid_argument("Format " + format + " needs a depth that is a multiple of " + std::to_string(layout.block) +
                                ", not " + std::to_string(depth) + ".");
  const size_t strip = static_cast<size_t>(strip_bytes(layout, depth));
  const size_t matrix = strip * static_cast<size_t>(strips_of(columns));
  size_t bytes;
  if (__builtin_mul_overflow(matrix, static_cast<size_t>(count), &bytes))
    throw std::invalid_argument("A packed weight of this size does not fit in memory.");
  auto weight = make_packed(layout.name, format, columns, depth, count, bytes);
  if (columns % kStrip != 0)
    for (int64_t i = 1; i <= count; ++i) std::memset(weight->data + i * matrix - strip, 0, strip);
  return weight;
}

void pack_columns(PackedWeight& weight, const uint8_t* rows, int64_t count, int64_t first, int64_t index) {
  const Packer& packer = packer_of(weight.format);
  const Layout& layout = packer.layout;
  const int64_t depth = weight.depth;
  const int64_t row_size = row_bytes(layout, depth);
  const int64_t step = std::max(layout.unit, layout.block);  // k packed at once
  const int64_t step_source = step / layout.block * layout.block_bytes;
  const int64_t step_bytes = step / layout.unit * layout.unit_bytes;
  const int64_t steps = depth / step;
  const int64_t visit = step < 16 ? 16 : 256 / step;  // steps of a column at a time: whole cache lines
  const int64_t strip_size = strip_bytes(layout, depth);
  for (int64_t from = 0; from < count;) {
    const int64_t strip = (first + from) / kStrip;
    const int64_t column0 = (first + from) % kStrip;
    const int64_t columns = kStrip - column0 < count - from ? kStrip - column0 : count - from;
    uint8_t* const target = weight.data + (index * strips_of(weight.columns) + strip) * strip_size;
    for (int64_t s0 = 0; s0 < steps; s0 += visit) {
      const int64_t s1 = s0 + visit < steps ? s0 + visit : steps;
      for (int64_t i = 0; i < columns; ++i) {
        const uint8_t* const source = rows + (from + i) * row_size;
        for (int64_t s = s0; s < s1; ++s) packer.pack(source + s * step_source, target + s * step_bytes, column0 + i);
      }
    }
    if (steps * step < depth) {  // bf16's last unit is padded
      for (int64_t i = 0; i < columns; ++i) {
        uint8_t last[64] = {};
        std::memcpy(last, rows + (from + i) * row_size + steps * step_source, row_size - steps * step_source);
        packer.pack(last, target + steps * step_bytes, column0 + i);
      }
    }
    from += columns;
  }
}

}  // namespace engine_cpu
