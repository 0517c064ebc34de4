// Nibbles that are looked up in the format's table.
#include "quantized.h"

namespace engine_cpu {
namespace ENGINE_ISA {

const FamilyOps kW4NLOps = kQuantizedOps<W4NL>;
const FamilyOps kW4EOps = kQuantizedOps<W4E>;
const FamilyOps kW4E16Ops = kQuantizedOps<W4E16>;

}  // namespace ENGINE_ISA
}  // namespace engine_cpu
