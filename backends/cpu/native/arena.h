// Where the values inside a segment live: offsets in one arena, from liveness at the largest dims.
#pragma once

#include <cstddef>
#include <vector>

namespace engine_cpu {

// A value's bytes, and the nodes between which it must keep them (both ends included).
struct Lifetime {
  size_t bytes;
  int first;
  int last;
  size_t offset = 0;  // set by plan_arena, a multiple of 64
};

// Sets the offsets so that no two values alive at one node overlap; returns the arena's size.
size_t plan_arena(std::vector<Lifetime>& values);

}  // namespace engine_cpu
