// Floats, and tables of them.
#include "dense.h"

namespace engine_cpu {
namespace ENGINE_ISA {

const FamilyOps kF32Ops = kDenseOps<DenseF32>;
const FamilyOps kF16Ops = kDenseOps<DenseF16>;
const FamilyOps kF8Ops = kDenseOps<DenseF8>;
const FamilyOps kNF4Ops = kDenseOps<DenseNF4>;
const FamilyOps kFP4Ops = kDenseOps<DenseFP4>;
const FamilyOps kBF16Ops{point_to_rows, multiply_bf16, bf16_strip_bytes, Activation::bf16};

}  // namespace ENGINE_ISA
}  // namespace engine_cpu
