#pragma once

#include <nanobind/nanobind.h>

namespace engine_cpu {

// Adds alloc, pack_into, PackQueue and unpack to the module.
void bind_linear(nanobind::module_& m);

}  // namespace engine_cpu
