// GGUF's K formats that have none.
#include "quantized.h"

namespace engine_cpu {
namespace ENGINE_ISA {

const FamilyOps kW3KOps = kQuantizedOps<W3K>;
const FamilyOps kW6Ops = kQuantizedOps<W6>;

}  // namespace ENGINE_ISA
}  // namespace engine_cpu
