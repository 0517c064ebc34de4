#include "arena.h"

#include <algorithm>

namespace engine_cpu {

// Largest first, each at the lowest offset free during its life.
size_t plan_arena(std::vector<Lifetime>& values) {
  std::vector<Lifetime*> order;
  for (Lifetime& value : values) {
    value.bytes = (value.bytes + 63) / 64 * 64;
    order.push_back(&value);
  }
  std::stable_sort(order.begin(), order.end(),
                   [](const Lifetime* a, const Lifetime* b) { return a->bytes > b->bytes; });
  std::vector<Lifetime*> placed;  // by offset
  size_t size = 0;
  for (Lifetime* value : order) {
    size_t offset = 0;
    for (const Lifetime* other : placed) {
      if (other->last < value->first || value->last < other->first) continue;
      if (offset + value->bytes <= other->offset) break;
      offset = std::max(offset, other->offset + other->bytes);
    }
    value->offset = offset;
    size = std::max(size, offset + value->bytes);
    const auto after = std::upper_bound(placed.begin(), placed.end(), value,
                                        [](const Lifetime* a, const Lifetime* b) { return a->offset < b->offset; });
    placed.insert(after, value);
  }
  return size;
}

}  // namespace engine_cpu
