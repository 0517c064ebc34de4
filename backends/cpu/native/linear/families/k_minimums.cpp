// GGUF's K formats that have minimums.
#include "quantized.h"

namespace engine_cpu {
namespace ENGINE_ISA {

const FamilyOps kW4KOps = kQuantizedOps<W4K>;
const FamilyOps kW5KOps = kQuantizedOps<W5K>;
const FamilyOps kW2KOps = kQuantizedOps<W2K>;

}  // namespace ENGINE_ISA
}  // namespace engine_cpu
