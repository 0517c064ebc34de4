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
constexpr size_t kPage = size_t{64} << 10;  // or smaller ones that it is a multiple of
constexpr size_t kSpare = 64;  // a cache line, so that a 64-byte load of the last bytes stays inside

uint8_t* allocate(size_t size) {
  void* memory = nullptr;
  if (posix_memalign(&memory, 64, size + kSpare) != 0) throw std::bad_alloc();
  return static_cast<uint8_t*>(memory);
}

#ifdef __linux__
size_t mapped_size(size_t size) { return (size + kSpare + kPage - 1) / kPage * kPage; }

// From the system and not from malloc, which would keep much of a model's weights when they are freed.
uint8_t* map(size_t size) {
  const size_t wanted = mapped_size(size), room = wanted + kHugePage;
  void* memory = mmap(nullptr, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  const auto begin = reinterpret_cast<uintptr_t>(memory), first = (begin + kHugePage - 1) / kHugePage * kHugePage;
  if (first != begin) munmap(memory, first - begin);
  munmap(reinterpret_cast<void*>(first + wanted), room - wanted - (first - begin));
  madvise(reinterpret_cast<void*>(first), wanted, MADV_HUGEPAGE);  // a hint: failure changes speed only
  return reinterpret_cast<uint8_t*>(first);
}
#endif

}  // namespace

#ifdef __linux__
Buffer::Buffer(size_t size) : data_(size < kHugePage ? allocate(size) : map(size)), size_(size) {}

Buffer::~Buffer() {
  if (size_ < kHugePage)
    std::free(data_);
  else
    munmap(data_, mapped_size(size_));
}
#else
Buffer::Buffer(size_t size) : data_(allocate(size)), size_(size) {}

Buffer::~Buffer() { std::free(data_); }
#endif

Buffer::Buffer(Buffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

}  // namespace engine_cpu
