// The variants of the kernels, one an instruction set, and the choice between them.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "packed_weight.h"
#include "step.h"

namespace engine_cpu {

// What one variant offers. Each file of kernels/ and linear/, say norm.cpp, defines in the namespace
// engine_cpu::ENGINE_ISA one function `void register_norm(Table&)` that enters its kernels;
// the build collects the names of the files. Nothing in those files may run before it is called:
// no static initializers, since the machine may lack the instructions they were compiled to.
struct Table {
  std::map<std::string, KernelFactory> kernels;
  std::string base;  // the variant that kernels are taken from which this one has not
};

// Names of the variants that this machine can run, best first.
std::vector<std::string> isa_list();

// The variant used where none is named: ENGINE_CPU_ISA if set, else the best.
// Throws std::invalid_argument if ENGINE_CPU_ISA names none that works.
std::string default_isa();

// The table of a variant. Throws std::invalid_argument for a name that does not work here.
const Table& isa_table(const std::string& name);

// What kind of core this machine has, for what is fastest on it beside its instruction set.
enum class Core { kZen3, kZen5, kOther };
Core this_core();

// A kernel class's factory, for the tables.
template <class K>
std::unique_ptr<Kernel> make_kernel(const KernelArgs& args) {
  return std::unique_ptr<Kernel>(new K(args));
}

}  // namespace engine_cpu
