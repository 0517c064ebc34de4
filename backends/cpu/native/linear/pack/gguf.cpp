// The formats of GGUF whose numbers stand for themselves, as ggml's gguf specification has them.
#include <iterator>

#include "units.h"

namespace engine_cpu {
namespace {

constexpr uint16_t kSign = 0x8000;

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

// 16 bytes as 32 nibbles: the low ones first.
void split_nibbles(const uint8_t* qs, uint32_t* steps) {
  for (int i = 0; i < 4; ++i) {
    steps[i] = word(qs, i) & kNibbles;
    steps[i + 4] = word(qs, i) >> 4 & kNibbles;
  }
}

// The same with a fifth bit each, bit k of `high`.
void split_fives(const uint8_t* qs, const uint8_t* high, uint32_t* steps) {
  split_nibbles(qs, steps);
  for (int k = 0; k < 32; ++k) steps[k / 4] |= (word(high, 0) >> k & 1) << (8 * (k % 4) + 4);
}

// An f16 with the other sign.
void put_negated(uint8_t* plane, int64_t column, const uint8_t* half) {
  uint16_t bits;
  std::memcpy(&bits, half, 2);
  bits ^= kSign;
  std::memcpy(plane + 2 * column, &bits, 2);
}

// Q4_1: f16 d, m; u8 qs[16]. weight = d * u + m.
void pack_q4_1(const uint8_t* block, uint8_t* unit, int64_t column) {
  uint32_t steps[8];
  split_nibbles(block + 4, steps);
  std::memcpy(unit + 2 * column, block, 2);
  put_negated(unit + 128, column, block + 2);
  put_nibbles(unit + 256, column, steps);
}

// Q5_0: f16 d; u32 high; u8 qs[16].
void pack_q5_0(const uint8_t* block, uint8_t* unit, int64_t column) {
  uint32_t steps[8];
  split_fives(block + 6, block + 2, steps);
  std::memcpy(unit + 2 * column, block, 2);
  put_fives(unit + 128, column, steps);
}

// Q5_1: f16 d, m; u32 high; u8 qs[16]. weight = d * u + m.
void pack_q5_1(const uint8_t* block, uint8_t* unit, int64_t column) {
  uint32_t steps[8];
  split_fives(block + 8, block + 4, steps);
  std::memcpy(unit + 2 * column, block, 2);
  put_negated(unit + 128, column, block + 2);
  put_fives(unit + 256, column, steps);
}

// Q5_K: f16 d, dmin; u8 scales[12] and qs[128] as in Q4_K, with u8 high[32] between, bit g of which belongs to group g.
void pack_q5_k(const uint8_t* block, uint8_t* unit, int64_t column) {
  std::memcpy(unit + 2 * column, block, 2);
  std::memcpy(unit + 128 + 2 * column, block + 2, 2);
  for (int i = 0; i < 12; ++i) unit[256 + 64 * i + column] = block[4 + i];
  for (int g = 0; g < 8; ++g) {
    uint32_t steps[8];
    for (int i = 0; i < 8; ++i) {
      const uint32_t low = word(block + 48 + g / 2 * 32, i) >> g % 2 * 4 & kNibbles;
      steps[i] = low | (word(block + 16, i) >> g & kBits) << 4;
    }
    put_fives(unit + 1024 + 1280 * g, column, steps);
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

// Steps 0..3 of a group of 16, two bits each, as a line.
void put_pairs(uint8_t* lines, int line, int64_t column, const uint32_t* steps) {
  put(lines, line, column, steps[0] | steps[1] << 2 | steps[2] << 4 | steps[3] << 6);
}

// Q2_K: u8 scales[16], a nibble of scale and one of minimum for each 16; u8 qs[64], each half of which holds four runs of 32;
// f16 d, dmin.
void pack_q2_k(const uint8_t* block, uint8_t* unit, int64_t column) {
  std::memcpy(unit + 2 * column, block + 80, 2);
  std::memcpy(unit + 128 + 2 * column, block + 82, 2);
  for (int i = 0; i < 16; ++i) unit[256 + 64 * i + column] = block[i];
  for (int group = 0; group < 16; ++group) {
    uint32_t steps[4];
    for (int i = 0; i < 4; ++i) steps[i] = word(block + 16 + group / 8 * 32, group % 2 * 4 + i) >> group / 2 % 4 * 2 & kPairs;
    put_pairs(unit + 1280, group, column, steps);
  }
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
  uint32_t highs[16];
  for (int group = 0; group < 16; ++group) {
    uint32_t steps[4];
    highs[group] = 0;
    for (int i = 0; i < 4; ++i) {
      const int at = group % 2 * 4 + i;
      steps[i] = word(block + 32 + group / 8 * 32, at) >> group / 2 % 4 * 2 & kPairs;
      highs[group] |= (word(block, at) >> group / 2 & kBits) << i;
    }
    put_pairs(unit + 1152, group, column, steps);
  }
  for (int i = 0; i < 8; ++i) put(unit + 5248, i, column, highs[2 * i] | highs[2 * i + 1] << 4);
}

// IQ4_NL: f16 d; u8 qs[16].
void pack_iq4_nl(const uint8_t* block, uint8_t* unit, int64_t column) { pack_q4_0(block, unit, column); }

// MXFP4 (OCP Microscaling Formats 1.0): u8 e, the scale 2^(e - 127); u8 qs[16]. The numbers are doubled, so the scale is half.
void pack_mxfp4(const uint8_t* block, uint8_t* unit, int64_t column) {
  const uint32_t e = block[0];
  const auto scale = static_cast<uint16_t>(e < 2 ? 0x0020u << e : (e - 1) << 7);
  uint32_t steps[8];
  split_nibbles(block + 1, steps);
  std::memcpy(unit + 2 * column, &scale, 2);
  put_nibbles(unit + 128, column, steps);
}

const Packer kPackers[] = {
    {{Family::w4, "w4", "Q4_0", 32, 18, 32, 1152}, pack_q4_0},
    {{Family::w4m, "w4m", "Q4_1", 32, 20, 32, 1280}, pack_q4_1},
    {{Family::w5, "w5", "Q5_0", 32, 22, 32, 1408}, pack_q5_0},
    {{Family::w5m, "w5m", "Q5_1", 32, 24, 32, 1536}, pack_q5_1},
    {{Family::w8, "w8", "Q8_0", 32, 34, 32, 2176}, pack_q8_0},
    {{Family::w2k, "w2k", "Q2_K", 256, 84, 256, 5376}, pack_q2_k},
    {{Family::w3k, "w3k", "Q3_K", 256, 110, 256, 7296}, pack_q3_k},
    {{Family::w4k, "w4k", "Q4_K", 256, 144, 256, 9216}, pack_q4_k},
    {{Family::w5k, "w5k", "Q5_K", 256, 176, 256, 11264}, pack_q5_k},
    {{Family::w6, "w6", "Q6_K", 256, 210, 256, 13440}, pack_q6_k},
    {{Family::w4nl, "w4nl", "IQ4_NL", 32, 18, 32, 1152}, pack_iq4_nl},
    {{Family::w4e, "w4e", "MXFP4", 32, 17, 32, 1152}, pack_mxfp4},
};

}  // namespace

Packers gguf_packers() { return {std::begin(kPackers), std::end(kPackers)}; }

}  // namespace engine_cpu
