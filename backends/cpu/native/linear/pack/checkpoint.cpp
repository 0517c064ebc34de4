// The formats whose codes and scales lie in tensors of their own (core/engine/formats/hfblocks.py), and numbers that are packed
// as they are.
#include <iterator>

#include "../../simd_storage.h"
#include "units.h"

namespace engine_cpu {
namespace {

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
  for (int i = 0; i < 8; ++i) put(unit + 512, i, column, word(block + 8, i));
}

// NVFP4S: f32 scale, times 2^8 for the scales' bits in f16 numbers, and half since the numbers are doubled; u8 scales[4], E4M3
// without their sign, 0x7f for 0; u8 qs[32], 8 a group of 16.
void pack_nvfp4(const uint8_t* block, uint8_t* unit, int64_t column) {
  float scale;
  std::memcpy(&scale, block, 4);
  scale *= 128;
  std::memcpy(unit + 4 * column, &scale, 4);
  for (int half = 0; half < 2; ++half) {
    uint32_t steps[8];
    for (int g = 0; g < 2; ++g) {
      const int group = 2 * half + g;
      const uint8_t code = block[4 + group];
      unit[256 + 64 * group + column] = code == 0x7f ? 0 : code & 0x7f;
      for (int i = 0; i < 2; ++i) {
        const uint32_t bytes = word(block + 8 + 8 * group, i);
        steps[4 * g + i] = bytes & kNibbles;
        steps[4 * g + i + 2] = bytes >> 4 & kNibbles;
      }
    }
    put_nibbles(unit + 512 + 1024 * half, column, steps);
  }
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

const Packer kPackers[] = {
    {{Family::f32, "f32", "F32", 1, 4, 1, 256}, pack_element<4>},
    {{Family::f16, "f16", "F16", 1, 2, 1, 128}, pack_element<2>},
    {{Family::bf16, "bf16", "BF16", 1, 2, 32, 4096}, pack_pairs},
    {{Family::f8, "f8", "FP8", 32, 36, 32, 2304}, pack_scaled_bytes},
    {{Family::nf4, "nf4", "NF4", 64, 36, 64, 2304}, pack_scaled_bytes},
    {{Family::fp4, "fp4", "FP4", 64, 36, 64, 2304}, pack_scaled_bytes},
    {{Family::w4e16, "w4e16", "NVFP4S", 64, 40, 64, 2560}, pack_nvfp4},
    {{Family::w4z, "w4z", "W4Z", 32, 19, 32, 1216}, pack_w4z},
    {{Family::w8s, "w8s", "W8S", 32, 36, 32, 2304}, pack_w8s},
    {{Family::w8m, "w8m", "W8M", 32, 40, 32, 2560}, pack_w8m},
};

}  // namespace

Packers checkpoint_packers() { return {std::begin(kPackers), std::end(kPackers)}; }

}  // namespace engine_cpu
