// Checkpoint blocks into the packed layouts of layout.h. Block formats as ggml's gguf specification has them.
#include <cstring>
#include <stdexcept>

#include "../layout.h"

namespace engine_cpu {
namespace {

constexpr uint32_t kNibbles = 0x0f0f0f0f;
constexpr uint32_t kPairs = 0x03030303;

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
  for (int group = 0; group < 16; ++group) {
    const uint32_t* const s = steps + 4 * group;
    uint8_t* const lines = unit + 1152 + 768 * group;
    for (int i = 0; i < 3; ++i) put(lines, i, column, s[i] | (s[3] >> 2 * i & kPairs) << 6);
  }
}

// Q8_0: f16 d; i8 qs[32].
void pack_q8_0(const uint8_t* block, uint8_t* unit, int64_t column) {
  std::memcpy(unit + 2 * column, block, 2);
  for (int i = 0; i < 8; ++i) put(unit + 128, i, column, word(block + 2, i) ^ 0x80808080);  // + 128
}

template <int kBytes>
void pack_element(const uint8_t* block, uint8_t* unit, int64_t column) {
  std::memcpy(unit + kBytes * column, block, kBytes);
}

// bf16: two k a unit.
void pack_pair(const uint8_t* block, uint8_t* unit, int64_t column) { std::memcpy(unit + 4 * column, block, 4); }

using PackUnit = void (*)(const uint8_t* block, uint8_t* unit, int64_t column);

struct Packer {
  Layout layout;
  PackUnit pack;
};

const Packer kPackers[] = {
    {{Family::f32, "f32", "F32", 1, 4, 1, 256}, pack_element<4>},
    {{Family::f16, "f16", "F16", 1, 2, 1, 128}, pack_element<2>},
    {{Family::bf16, "bf16", "BF16", 1, 2, 2, 256}, pack_pair},
    {{Family::w4, "w4", "Q4_0", 32, 18, 32, 1152}, pack_q4_0},
    {{Family::w4k, "w4k", "Q4_K", 256, 144, 256, 9216}, pack_q4_k},
    {{Family::w6, "w6", "Q6_K", 256, 210, 256, 13440}, pack_q6_k},
    {{Family::w8, "w8", "Q8_0", 32, 34, 32, 2176}, pack_q8_0},
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
    if (weight.family == packer.layout.name) return packer.layout;
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
  const int64_t row_bytes = depth / layout.block * layout.block_bytes;
  const int64_t unit_source = layout.unit / layout.block * layout.block_bytes;
  const int64_t units = depth / layout.unit;
  const int64_t visit = layout.unit < 16 ? 16 : 256 / layout.unit;  // units of a column at a time: whole cache lines
  const int64_t strip_size = strip_bytes(layout, depth);
  for (int64_t from = 0; from < count;) {
    const int64_t strip = (first + from) / kStrip;
    const int64_t column0 = (first + from) % kStrip;
    const int64_t columns = kStrip - column0 < count - from ? kStrip - column0 : count - from;
    uint8_t* const target = weight.data + (index * strips_of(weight.columns) + strip) * strip_size;
    for (int64_t u0 = 0; u0 < units; u0 += visit) {
      const int64_t u1 = u0 + visit < units ? u0 + visit : units;
      for (int64_t i = 0; i < columns; ++i) {
        const uint8_t* const source = rows + (from + i) * row_bytes;
        for (int64_t u = u0; u < u1; ++u)
          packer.pack(source + u * unit_source, target + u * layout.unit_bytes, column0 + i);
      }
    }
    if (units * layout.unit < depth) {  // bf16 of odd depth
      for (int64_t i = 0; i < columns; ++i) {
        uint8_t last[4] = {0, 0, 0, 0};
        std::memcpy(last, rows + (from + i) * row_bytes + units * unit_source, layout.block_bytes);
        packer.pack(last, target + units * layout.unit_bytes, column0 + i);
      }
    }
    from += columns;
  }
}

}  // namespace engine_cpu
