#include "packed_weight.h"

#include <mutex>
#include <utility>

namespace engine_cpu {
namespace {

#if defined(__SANITIZE_ADDRESS__)  // each weight alone, so that a read beyond one is found
constexpr size_t kPieceBytes = 0;
#else
constexpr size_t kPieceBytes = size_t{32} << 20;
#endif

// Memory for `nbytes` at weight.data. Small weights lie beside each other, since one alone would not fill huge pages; what
// they share is given back when the last of them is gone.
void give_memory(PackedWeight& weight, size_t nbytes) {
  static std::mutex mutex;
  static std::weak_ptr<Buffer> latest;
  static size_t used = 0;
  if (nbytes > kPieceBytes / 4) {
    weight.memory = std::make_shared<Buffer>(nbytes);
    weight.data = weight.memory->data();
    return;
  }
  const std::lock_guard locked(mutex);
  weight.memory = latest.lock();
  if (weight.memory == nullptr || kPieceBytes - used < nbytes) {
    weight.memory = std::make_shared<Buffer>(kPieceBytes);
    latest = weight.memory;
    used = 0;
  }
  weight.data = weight.memory->data() + used;
  used += (nbytes + 63) / 64 * 64;
}

}  // namespace

std::shared_ptr<PackedWeight> make_packed(std::string family, std::string format, int64_t columns, int64_t depth,
                                          int64_t count, size_t nbytes) {
  auto weight = std::make_shared<PackedWeight>();
  weight->family = std::move(family);
  weight->format = std::move(format);
  weight->columns = columns;
  weight->depth = depth;
  weight->count = count;
  give_memory(*weight, nbytes);
  weight->nbytes = nbytes;
  return weight;
}

}  // namespace engine_cpu
