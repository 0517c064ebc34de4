#include "buffer.h"

#include <cstdlib>
#include <new>
#include <utility>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace engine_cpu {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;

}  // namespace

Buffer::Buffer(size_t size) : size_(size) {
  const size_t alignment = size >= kHugePage ? kHugePage : 64;
  void* memory = nullptr;
  // One spare cache line, so that a 64-byte load of the last bytes stays inside.
  if (posix_memalign(&memory, alignment, size + 64) != 0) throw std::bad_alloc();
  data_ = static_cast<uint8_t*>(memory);
#ifdef __linux__
  if (size >= kHugePage) madvise(memory, size, MADV_HUGEPAGE);  // a hint: failure changes speed only
#endif
}

Buffer::~Buffer() { std::free(data_); }

Buffer::Buffer(Buffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

}  // namespace engine_cpu
