// The Python face of the packers.
#include "bindings.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <deque>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "../layout.h"
#include "queue.h"

namespace nb = nanobind;

namespace engine_cpu {
namespace {

using RawRows = nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void check_rows(const PackedWeight& weight, const RawRows& raw, int64_t first, int64_t index) {
  const auto count = static_cast<int64_t>(raw.shape(0));
  const int64_t wanted = row_bytes(layout_of(weight), weight.depth);
  if (static_cast<int64_t>(raw.shape(1)) != wanted)
    throw std::invalid_argument("A row of this weight is " + std::to_string(wanted) + " bytes, not " +
                                std::to_string(raw.shape(1)) + ".");
  if (first < 0 || first > weight.columns - count || index < 0 || index >= weight.count)
    throw std::invalid_argument("The rows do not fit in the weight: it has " + std::to_string(weight.columns) +
                                " columns and " + std::to_string(weight.count) + " matrices.");
}

void pack_into(PackedWeight& weight, const RawRows& raw, int64_t first, int64_t index) {
  check_rows(weight, raw, first, index);
  nb::gil_scoped_release unlocked;
  pack_columns(weight, raw.data(), static_cast<int64_t>(raw.shape(0)), first, index);
}

// The queue with what its jobs use: let go by the interpreter's threads, since its lock is needed for that.
class PackThreads {
 public:
  explicit PackThreads(int threads) : queue_(new PackQueue(threads)) {}
  ~PackThreads() { queue_.reset(); }  // before what it uses

  int64_t add(std::shared_ptr<PackedWeight> weight, RawRows raw, int64_t first, int64_t index) {
    check_rows(*weight, raw, first, index);
    used_.emplace_back(weight, raw);
    return added_ = queue_->add(*weight, raw.data(), static_cast<int64_t>(raw.shape(0)), first, index);
  }

  void wait(int64_t number) {
    if (number > added_) throw std::invalid_argument("Only " + std::to_string(added_) + " jobs have been added.");
    {
      nb::gil_scoped_release unlocked;
      queue_->wait(number);
    }
    for (; released_ < number; ++released_) used_.pop_front();
  }

 private:
  std::deque<std::pair<std::shared_ptr<PackedWeight>, RawRows>> used_;
  int64_t added_ = 0, released_ = 0;
  std::unique_ptr<PackQueue, DeleteAtHome> queue_;
};

nb::ndarray<nb::numpy, float, nb::ndim<2>> unpack(const PackedWeight& weight, int64_t first, int64_t count, int64_t index) {
  layout_of(weight);
  if (first < 0 || count < 0 || count > weight.columns || first > weight.columns - count || index < 0 || index >= weight.count)
    throw std::invalid_argument("The weight has " + std::to_string(weight.columns) + " columns and " +
                                std::to_string(weight.count) + " matrices.");
  auto* out = new float[static_cast<size_t>(count * weight.depth)];
  nb::capsule owner(out, [](void* p) noexcept { delete[] static_cast<float*>(p); });
  {
    nb::gil_scoped_release unlocked;
    for (int64_t i = 0; i < count; ++i) unpack_column(weight, first + i, index, out + i * weight.depth);
  }
  return nb::ndarray<nb::numpy, float, nb::ndim<2>>(
      out, {static_cast<size_t>(count), static_cast<size_t>(weight.depth)}, owner);
}

}  // namespace

void bind_linear(nb::module_& m) {
  m.def("alloc", &alloc_weight, nb::arg("format"), nb::arg("columns"), nb::arg("depth"), nb::arg("count") = 1,
        nb::arg("grid") = std::vector<uint32_t>(),
        "Room for `count` matrices of columns (N) x depth (K) in a GGUF format; `grid` is what the indices of IQ1, IQ2 and IQ3 mean\n"
        "(layout.h). ValueError names what does not fit.");
  m.def("pack_into", &pack_into, nb::arg("weight"), nb::arg("raw").noconvert(), nb::arg("first") = 0, nb::arg("index") = 0,
        "Packs raw rows, u8 [rows, row bytes], as columns first.. of matrix `index`. Releases the GIL; disjoint columns may be\n"
        "packed by several threads at once.");
  nb::class_<PackThreads>(m, "PackQueue", "Threads that pack weights while the interpreter does something else.")
      .def(nb::init<int>(), nb::arg("threads"))
      .def("add", &PackThreads::add, nb::arg("weight"), nb::arg("raw").noconvert(), nb::arg("first") = 0,
           nb::arg("index") = 0, "As pack_into, later: gives the number to wait for. The array is kept until then.")
      .def("wait", &PackThreads::wait, nb::arg("number"),
           "Returns when everything up to that number has been packed. Releases the GIL.");
  m.def("unpack", &unpack, nb::arg("weight"), nb::arg("first"), nb::arg("count"), nb::arg("index") = 0,
        "Columns first.. of a packed weight as f32 [count, depth], exactly the format's values.");
}

}  // namespace engine_cpu
