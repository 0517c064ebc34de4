// Owned, aligned memory: packed weights, the arena, and the scratch of kernels.
#pragma once

#include <cstddef>
#include <cstdint>

namespace engine_cpu {

// `size` bytes, 64-byte aligned, contents undefined; 2 MiB aligned and asked to be huge pages when large.
// Throws std::bad_alloc. Untouched pages cost nothing.
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(size_t size);
  ~Buffer();
  Buffer(Buffer&& other) noexcept;
  Buffer& operator=(Buffer&& other) noexcept;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  uint8_t* data() const { return data_; }
  size_t size() const { return size_; }
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }

 private:
  uint8_t* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace engine_cpu
