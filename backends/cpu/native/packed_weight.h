// A weight in a kernel family's packed layout.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "buffer.h"

namespace engine_cpu {

// `family` names the layout and with it the kernels that read it; `format` the numbers inside ("q4_k", "bf16", ...).
// The matrix is columns (outputs, N) x depth (inputs, K), `count` of them one after another (experts; 1 otherwise).
// Family "plain": f32 as given, columns = number of elements, depth = 1.
struct PackedWeight {
  std::string family;
  std::string format;
  int64_t columns = 0;
  int64_t depth = 0;
  int64_t count = 1;
  uint8_t* data = nullptr;  // 64-byte aligned
  size_t nbytes = 0;
  Buffer memory;
  std::vector<uint32_t> grid;  // of formats whose numbers are packed by way of one (linear/layout.h)

  const float* f32() const { return reinterpret_cast<const float*>(data); }
};

// An empty weight with `nbytes` of memory.
std::shared_ptr<PackedWeight> make_packed(std::string family, std::string format, int64_t columns, int64_t depth,
                                          int64_t count, size_t nbytes);

}  // namespace engine_cpu
