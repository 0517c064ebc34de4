// Numbers of four bits or five with a minimum or a zero point.
#include "quantized.h"

namespace engine_cpu {
namespace ENGINE_ISA {

const FamilyOps kW4MOps = kQuantizedOps<W4M>;
const FamilyOps kW5MOps = kQuantizedOps<W5M>;
const FamilyOps kW4ZOps = kQuantizedOps<W4Z>;

}  // namespace ENGINE_ISA
}  // namespace engine_cpu
