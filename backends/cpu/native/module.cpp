// engine_cpu._native: the Python face of the native library.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <limits>

#ifdef __GLIBC__
#include <malloc.h>
#endif
#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>
#endif

#include "isa.h"
#include "linear/pack/bindings.h"
#include "packed_weight.h"
#include "pool.h"
#include "segment.h"

namespace nb = nanobind;
using namespace engine_cpu;

namespace {

// A C-contiguous array in CPU memory; `writable` arrays must not be read-only.
using ReadArray = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;
using WriteArray = nb::ndarray<nb::c_contig, nb::device::cpu>;

std::string dtype_name(nb::dlpack::dtype dtype) {
  const char* kind = nullptr;
  switch (static_cast<nb::dlpack::dtype_code>(dtype.code)) {
    case nb::dlpack::dtype_code::Int:
      kind = "i";
      break;
    case nb::dlpack::dtype_code::UInt:
      kind = "u";
      break;
    case nb::dlpack::dtype_code::Float:
      kind = "f";
      break;
    case nb::dlpack::dtype_code::Bfloat:
      kind = "bf";
      break;
    default:
      return "another type";
  }
  return kind + std::to_string(dtype.bits);
}

template <class Array>
Array as_array(nb::handle object, const std::string& what) {
  Array array;
  if (!nb::try_cast<Array>(object, array, false))
    throw nb::type_error(
        (what + " must be a C-contiguous array in host memory, and writable if it is written.").c_str());
  return array;
}

// Arrays of a run, in the order of the ids. The caller's list keeps them alive.
template <class Array>
void collect(const Segment& segment, const std::vector<int32_t>& ids, nb::list objects, const char* what,
             std::vector<Binding>& bindings) {
  bindings.clear();
  for (size_t i = 0; i < objects.size(); ++i) {
    const std::string name = std::string(what) + " " + std::to_string(i);
    const Array array = as_array<Array>(objects[i], name);
    if (i < ids.size()) {
      const std::string& wanted = segment.dtype(ids[i]);
      if (!wanted.empty() && wanted != dtype_name(array.dtype()))
        throw nb::type_error((name + " must be " + wanted + ", not " + dtype_name(array.dtype()) + ".").c_str());
    }
    bindings.push_back(
        Binding{static_cast<uint8_t*>(const_cast<void*>(static_cast<const void*>(array.data()))), array.nbytes()});
  }
}

void run_segment(Segment& segment, const std::vector<int32_t>& dims, nb::list inputs, nb::list outputs) {
  std::vector<Binding> in, out;
  collect<ReadArray>(segment, segment.inputs(), inputs, "Input", in);
  collect<WriteArray>(segment, segment.outputs(), outputs, "Output", out);
  nb::gil_scoped_release unlocked;
  segment.run(dims, in, out);
}

void add_kernel(Segment& segment, const std::string& kernel, std::vector<int32_t> inputs, std::vector<int32_t> outputs,
                std::vector<std::shared_ptr<PackedWeight>> weights, nb::list states,
                std::map<std::string, double> numbers) {
  KernelArgs args;
  args.inputs = std::move(inputs);
  args.outputs = std::move(outputs);
  args.weights = std::move(weights);
  args.numbers = std::move(numbers);
  for (size_t i = 0; i < states.size(); ++i) {
    const std::string name = "State " + std::to_string(i) + " of kernel '" + kernel + "'";
    auto array = std::make_shared<WriteArray>(as_array<WriteArray>(states[i], name));
    args.states.push_back(static_cast<uint8_t*>(array->data()));
    segment.keep(std::move(array));
  }
  segment.add(kernel, std::move(args));
}

std::shared_ptr<PackedWeight> plain(nb::ndarray<const float, nb::c_contig, nb::device::cpu> array) {
  auto weight = make_packed("plain", "f32", static_cast<int64_t>(array.size()), 1, 1, array.nbytes());
  std::memcpy(weight->data, array.data(), array.nbytes());
  return weight;
}

// Asks the system for all pages of an array; what they hold stays. A hint: an older system gives each when it is written to.
void populate(WriteArray array) {
#ifdef __linux__
  constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE, which older headers lack
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<uintptr_t>(array.data()) / page * page;
  const auto end = reinterpret_cast<uintptr_t>(array.data()) + array.nbytes();
  nb::gil_scoped_release unlocked;
  madvise(reinterpret_cast<void*>(begin), end - begin, kPopulateWrite);
#else
  (void)array;
#endif
}

constexpr double kUnlimited = std::numeric_limits<double>::infinity();

std::shared_ptr<Pool> make_pool(int threads, const std::vector<int>& pin, double share) {
  return {new Pool(threads, pin, share), DeleteAtHome()};
}

void trim_heap() {
#ifdef __GLIBC__
  malloc_trim(0);  // other C libraries do it by themselves
#endif
}

// A variant's kernels, and the variant whose code each is: another's where it has none of its own.
std::map<std::string, std::string> kernels_of(const std::string& isa) {
  std::map<std::string, std::string> owners;
  for (const auto& [kernel, factory] : isa_table(isa).kernels) {
    std::string& owner = owners[kernel] = isa;
    for (const std::string& other : isa_list()) {
      const Table& table = isa_table(other);
      const bool has_it = table.base != isa && table.kernels.at(kernel) == factory;
      if (has_it && (owner == isa || table.base.empty())) owner = other;
    }
  }
  return owners;
}

std::vector<nb::tuple> profile_of(const Segment& segment) {
  std::vector<nb::tuple> rows;
  for (const NodeTime& time : segment.profile()) rows.push_back(nb::make_tuple(time.name, time.calls, time.seconds));
  return rows;
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "Kernels of the CPU backend.";
  // What still lives when the interpreter ends is freed with the process; a user's terminal is no place to say so.
  nb::set_leak_warnings(false);
  m.attr("DIMS") = kDimNames;
  m.def("isa_list", &isa_list, "Instruction-set variants that this machine can run, best first.");
  m.def("isa", &default_isa,
        "The variant used where none is named: ENGINE_CPU_ISA, else the best. ValueError if it cannot run.");
  m.def("trim_heap", &trim_heap, "Gives memory that has been freed back to the system.");
  m.def("populate", &populate, nb::arg("array").noconvert(),
        "Asks the system for the memory of an array, whose contents stay. Releases the GIL.");
  m.def("kernels", &kernels_of, nb::arg("isa"),
        "The kernels of a variant by name, and the variant whose code each is: another's where it has none of its own.");

  nb::class_<PackedWeight>(m, "PackedWeight", "A weight in a kernel family's packed layout.")
      .def_ro("family", &PackedWeight::family)
      .def_ro("format", &PackedWeight::format)
      .def_ro("columns", &PackedWeight::columns)
      .def_ro("depth", &PackedWeight::depth)
      .def_ro("count", &PackedWeight::count)
      .def_ro("nbytes", &PackedWeight::nbytes)
      .def_prop_ro(
          "data",
          [](nb::handle_t<PackedWeight> self) {
            const auto& weight = nb::cast<const PackedWeight&>(self);
            return nb::ndarray<nb::numpy, const uint8_t, nb::ndim<1>>(weight.data, {weight.nbytes}, self);
          },
          "The packed bytes, u8 [nbytes], read-only.");
  m.def("plain", &plain, nb::arg("array").noconvert(), "A copy of an f32 array as a weight of family 'plain'.");
  bind_linear(m);

  nb::class_<Pool>(m, "Pool", "A team of threads; the thread that runs a segment is one of them.")
      .def(nb::new_(&make_pool), nb::arg("threads"), nb::arg("pin") = std::vector<int>(), nb::arg("share") = kUnlimited,
           "pin: the processors that threads stay on, one each, but for the first: the caller goes where it likes; share: how\n"
           "many processors' time the system gives the process. Threads beyond it sleep sooner while they wait.")
      .def_prop_ro("size", &Pool::size);

  nb::class_<Segment>(m, "Segment", "Kernels bound to values, run in order in one call.")
      .def(
          "__init__",
          [](Segment* self, std::shared_ptr<Pool> pool, const std::vector<int32_t>& maxima, int64_t max_context,
             const std::string& isa, bool poison) {
            new (self) Segment(std::move(pool), isa.empty() ? default_isa() : isa, maxima, max_context, poison);
          },
          nb::arg("pool"), nb::arg("maxima"), nb::arg("max_context"), nb::arg("isa") = "", nb::arg("poison") = false,
          "maxima: the largest counts a step may have, in the order of DIMS; max_context: tokens of the longest "
          "sequence.")
      .def("value", &Segment::value, nb::arg("id"), nb::arg("row_bytes"), nb::arg("rows"), nb::arg("dtype") = "",
           "Declares a value of rows ('T', 'S+1', 'S*P', '1', ...) x row_bytes; dtype ('f32', 'i32', ...) is checked "
           "at run.")
      .def("add", &add_kernel, nb::arg("kernel"), nb::arg("inputs"), nb::arg("outputs"),
           nb::arg("weights") = nb::list(), nb::arg("states") = nb::list(),
           nb::arg("numbers") = std::map<std::string, double>(),
           "Appends a kernel. Absent inputs are -1. The states' memory must not move while the segment lives.")
      .def("finish", &Segment::finish, nb::arg("inputs"), nb::arg("outputs"),
           "Plans the arena. What is listed is bound at each run; every other value lives inside.")
      .def("run", &run_segment, nb::arg("dims"), nb::arg("inputs"), nb::arg("outputs"),
           "Runs one step: dims in the order of DIMS, arrays in the order given to finish. Releases the GIL.")
      .def("set_profiling", &Segment::set_profiling, nb::arg("on"), "Starts timing from zero, or stops.")
      .def("profile", &profile_of, "(kernel, calls, seconds) a node, in order.")
      .def_prop_ro("arena_bytes", &Segment::arena_bytes);
}
