// Numbers of four bits or five from an offset on.
#include "quantized.h"

namespace engine_cpu {
namespace ENGINE_ISA {

const FamilyOps kW4Ops = kQuantizedOps<W4>;
const FamilyOps kW5Ops = kQuantizedOps<W5>;

}  // namespace ENGINE_ISA
}  // namespace engine_cpu
