// Nibbles that are looked up in a table of the weight's own.
#include "quantized.h"

namespace engine_cpu {
namespace ENGINE_ISA {

const FamilyOps kW4XOps = kQuantizedOps<W4X>;
const FamilyOps kW4LOps = kQuantizedOps<W4L>;
const FamilyOps kW4L16Ops = kQuantizedOps<W4L16>;

}  // namespace ENGINE_ISA
}  // namespace engine_cpu
