// What the families do in a product. Each file of this folder has some of them, since all of them take long to compile.
#pragma once

#include "../product.h"

namespace engine_cpu {
namespace ENGINE_ISA {

extern const FamilyOps kF32Ops, kF16Ops, kBF16Ops, kF8Ops, kNF4Ops, kFP4Ops;
extern const FamilyOps kW4Ops, kW5Ops;
extern const FamilyOps kW4MOps, kW5MOps, kW4ZOps;
extern const FamilyOps kW4KOps, kW5KOps, kW2KOps;
extern const FamilyOps kW3KOps, kW6Ops;
extern const FamilyOps kW4NLOps, kW4EOps, kW4E16Ops;
extern const FamilyOps kW4XOps, kW4LOps, kW4L16Ops;
extern const FamilyOps kW8Ops, kW8SOps, kW8MOps;

}  // namespace ENGINE_ISA
}  // namespace engine_cpu
