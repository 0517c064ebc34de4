// Numbers of eight bits.
#include "quantized.h"

namespace engine_cpu {
namespace ENGINE_ISA {

const FamilyOps kW8Ops = kQuantizedOps<W8>;
const FamilyOps kW8SOps = kQuantizedOps<W8S>;
const FamilyOps kW8MOps = kQuantizedOps<W8M>;

}  // namespace ENGINE_ISA
}  // namespace engine_cpu
