#include "packed_weight.h"

#include <utility>

namespace engine_cpu {

std::shared_ptr<PackedWeight> make_packed(std::string family, std::string format, int64_t columns, int64_t depth,
                                          int64_t count, size_t nbytes) {
  auto weight = std::make_shared<PackedWeight>();
  weight->family = std::move(family);
  weight->format = std::move(format);
  weight->columns = columns;
  weight->depth = depth;
  weight->count = count;
  weight->memory = Buffer(nbytes);
  weight->data = weight->memory.data();
  weight->nbytes = nbytes;
  return weight;
}

}  // namespace engine_cpu
