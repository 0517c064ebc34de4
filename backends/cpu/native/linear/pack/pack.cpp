// Rows of a checkpoint's blocks into the packed layouts of layout.h.
#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "units.h"

namespace engine_cpu {
namespace {

std::array<Packers, 3> all_packers() { return {checkpoint_packers(), gguf_packers(), lattice_packers()}; }

const Packer& packer_of(const std::string& format) {
  std::string known;
  for (const Packers& some : all_packers())
    for (const Packer& packer : some) {
      if (format == packer.layout.format) return packer;
      known += (known.empty() ? "" : ", ") + std::string(packer.layout.format);
    }
  throw std::invalid_argument("The CPU's linear packs the formats " + known + ", and not '" + format + "'.");
}

void pack_unit(const Packer& packer, const PackedWeight& weight, const uint8_t* block, uint8_t* unit, int64_t column) {
  if (packer.table != nullptr && column == 0)
    for (int i = 0; i < 64; ++i) unit[i] = static_cast<uint8_t>(packer.table[i % 16] + packer.offset);
  if (packer.pack_by_grid != nullptr)
    packer.pack_by_grid(block, weight.grid.data(), unit, column);
  else
    packer.pack(block, unit, column);
}

}  // namespace

const Layout& layout_of_format(const std::string& format) { return packer_of(format).layout; }

const Layout& layout_of(const PackedWeight& weight) {
  for (const Packers& some : all_packers())
    for (const Packer& packer : some)
      if (weight.family == packer.layout.name && weight.format == packer.layout.format) return packer.layout;
  throw std::invalid_argument("A weight of family '" + weight.family + "' is no matrix.");
}

std::shared_ptr<PackedWeight> alloc_weight(const std::string& format, int64_t columns, int64_t depth, int64_t count,
                                           std::vector<uint32_t> grid) {
  const Packer& packer = packer_of(format);
  const Layout& layout = packer.layout;
  constexpr int64_t kMost = int64_t{1} << 31;
  if (columns <= 0 || depth <= 0 || count <= 0 || columns >= kMost || depth >= kMost || count >= kMost)
    throw std::invalid_argument("A packed weight has at least one column, one row and one matrix, and less than 2^31 of each.");
  if (depth % layout.block != 0)
    throw std::invalid_argument("Format " + format + " needs a depth that is a multiple of " + std::to_string(layout.block) +
                                ", not " + std::to_string(depth) + ".");
  if (static_cast<int64_t>(grid.size()) != packer.grid)
    throw std::invalid_argument("Format " + format + " is packed by a grid of " + std::to_string(packer.grid) + " entries, not " +
                                std::to_string(grid.size()) + ".");
  const size_t strip = static_cast<size_t>(strip_bytes(layout, depth));
  const size_t matrix = strip * static_cast<size_t>(strips_of(columns));
  size_t bytes;
  if (__builtin_mul_overflow(matrix, static_cast<size_t>(count), &bytes))
    throw std::invalid_argument("A packed weight of this size does not fit in memory.");
  auto weight = make_packed(layout.name, format, columns, depth, count, bytes);
  weight->grid = std::move(grid);
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
        for (int64_t s = s0; s < s1; ++s) pack_unit(packer, weight, source + s * step_source, target + s * step_bytes, column0 + i);
      }
    }
    if (steps * step < depth) {  // bf16's last unit is padded
      for (int64_t i = 0; i < columns; ++i) {
        uint8_t last[64] = {};
        std::memcpy(last, rows + (from + i) * row_size + steps * step_source, row_size - steps * step_source);
        pack_unit(packer, weight, last, target + steps * step_bytes, column0 + i);
      }
    }
    from += columns;
  }
}

}  // namespace engine_cpu
