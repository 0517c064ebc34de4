#include "segment.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace engine_cpu {
namespace {

[[noreturn]] void refuse(const std::string& sentence) { throw std::invalid_argument(sentence); }

Dims dims_of(const std::vector<int32_t>& counts) {
  Dims dims;
  int32_t* const fields[kDims] = {&dims.T, &dims.S, &dims.R, &dims.P, &dims.C,
                                  &dims.H, &dims.F, &dims.B, &dims.M, &dims.K};
  for (int i = 0; i < kDims; ++i) *fields[i] = counts[i];
  return dims;
}

// Under the address sanitizer a kernel may touch no more of its thread's scratch, and of what threads share, than it has asked for.
void show_scratch([[maybe_unused]] const Pool& pool, [[maybe_unused]] const Team& team, [[maybe_unused]] const Kernel& kernel) {
#if defined(__SANITIZE_ADDRESS__)
  const auto show = [](uint8_t* memory, size_t shown, size_t size) {
    ASAN_UNPOISON_MEMORY_REGION(memory, shown);
    ASAN_POISON_MEMORY_REGION(memory + shown, size - shown);
  };
  show(team.scratch, kernel.scratch_bytes(), pool.scratch_bytes());
  show(team.shared, kernel.shared_bytes(), pool.shared_bytes());
#endif
}

// Scratch as another kernel may have left it: large numbers in every type.
void poison_scratch(const Kernel& kernel, const Team& team) {
  if (kernel.scratch_bytes() > 0) std::memset(team.scratch, 0x7f, kernel.scratch_bytes());
  if (kernel.shared_bytes() > 0 && team.index == 0) std::memset(team.shared, 0x7f, kernel.shared_bytes());
}

}  // namespace

double KernelArgs::number(const std::string& name) const {
  const auto found = numbers.find(name);
  if (found == numbers.end()) refuse("The kernel needs the number '" + name + "', which was not given.");
  return found->second;
}

int64_t KernelArgs::integer(const std::string& name) const { return static_cast<int64_t>(number(name)); }

double KernelArgs::number_or(const std::string& name, double fallback) const {
  const auto found = numbers.find(name);
  return found == numbers.end() ? fallback : found->second;
}

Rows::Rows(const std::string& text) {
  size_t at = 0;
  while (at <= text.size()) {
    const size_t end = std::min(text.find('*', at), text.size());
    const std::string factor = text.substr(at, end - at);
    const char* dim = factor.empty() ? nullptr : std::strchr(kDimNames, factor[0]);
    if (dim != nullptr && (factor.size() == 1 || factor.substr(1) == "+1")) {
      factors_.emplace_back(static_cast<int>(dim - kDimNames), factor.size() == 1 ? 0 : 1);
    } else if (factor != "1") {
      refuse("'" + text +
             "' is no number of rows; write a product of T, S, R, P, C, H, F, B, M, K or 1, such as S+1 or S*P.");
    }
    at = end + 1;
  }
}

size_t Rows::count(const int32_t* dims) const {
  size_t rows = 1;
  for (const auto& [dim, addend] : factors_) rows *= static_cast<size_t>(dims[dim] + addend);
  return rows;
}

Segment::Segment(std::shared_ptr<Pool> pool, const std::string& isa, const std::vector<int32_t>& maxima,
                 int64_t max_context, bool poison)
    : pool_(std::move(pool)), table_(isa_table(isa)), maxima_(maxima), max_context_(max_context), poison_(poison) {
  if (maxima.size() != kDims)
    refuse("A segment takes " + std::to_string(kDims) + " maxima, one a dimension of " + kDimNames + ".");
  for (int32_t most : maxima)
    if (most < 0) refuse("A segment's maxima are at least 0.");
}

void Segment::value(int32_t id, size_t row_bytes, const std::string& rows, const std::string& dtype) {
  if (finished_) refuse("The segment is finished and takes no more values.");
  if (id < 0 || id > 1 << 20) refuse("Value ids are between 0 and 2^20, not " + std::to_string(id) + ".");
  if (values_.size() <= static_cast<size_t>(id)) values_.resize(id + 1);
  Value& value = values_[id];
  if (value.declared) refuse("Value " + std::to_string(id) + " is declared twice.");
  value.row_bytes = row_bytes;
  value.rows = Rows(rows);
  value.dtype = dtype;
  value.declared = true;
}

const Segment::Value& Segment::used(const std::string& kernel, int32_t id) const {
  if (id < 0 || static_cast<size_t>(id) >= values_.size() || !values_[id].declared)
    refuse("Kernel '" + kernel + "' uses value " + std::to_string(id) + ", which is not declared.");
  return values_[id];
}

void Segment::add(const std::string& name, KernelArgs args) {
  if (finished_) refuse("The segment is finished and takes no more kernels.");
  const auto found = table_.kernels.find(name);
  if (found == table_.kernels.end()) refuse("There is no kernel '" + name + "' in this variant.");
  for (int32_t id : args.inputs)
    if (id != -1) used(name, id);
  for (int32_t id : args.outputs) {
    if (id == -1) continue;
    used(name, id);
    if (values_[id].producer >= 0 || std::count(args.outputs.begin(), args.outputs.end(), id) > 1)
      refuse("Value " + std::to_string(id) + " is written twice.");
  }
  args.numbers["threads"] = pool_->size();
  args.numbers["max_tokens"] = maxima_[0];
  args.numbers["max_sequences"] = maxima_[1];
  args.numbers["max_rows"] = maxima_[2];
  args.numbers["max_context"] = static_cast<double>(max_context_);
  std::unique_ptr<Kernel> kernel;
  try {
    kernel = found->second(args);
  } catch (const std::out_of_range&) {
    refuse("Kernel '" + name + "' was given too few inputs, outputs, weights or states.");
  } catch (const std::invalid_argument& error) {
    refuse("Kernel '" + name + "': " + error.what());
  }
  pool_->reserve(kernel->scratch_bytes(), kernel->shared_bytes());
  for (int32_t id : args.outputs)
    if (id != -1) values_[id].producer = static_cast<int>(nodes_.size());
  nodes_.push_back(Node{name, std::move(kernel), std::move(args)});
}

void Segment::finish(const std::vector<int32_t>& inputs, const std::vector<int32_t>& outputs) {
  if (finished_) refuse("The segment is finished already.");
  for (int32_t id : inputs) {
    if (used("boundary", id).producer >= 0)
      refuse("Value " + std::to_string(id) + " is an input and also written inside.");
    values_[id].external = true;
  }
  for (int32_t id : outputs) {
    if (used("boundary", id).producer < 0)
      refuse("Value " + std::to_string(id) + " is an output that no kernel writes.");
    values_[id].external = true;
  }
  inputs_ = inputs;
  outputs_ = outputs;
  plan();
  for (const Node& node : nodes_) times_.push_back(NodeTime{node.name});
  finished_ = true;
}

// Internal values live from the node that writes them to the last that reads them.
void Segment::plan() {
  std::vector<Lifetime> lifetimes(values_.size(), Lifetime{0, 0, -1});
  for (size_t i = 0; i < nodes_.size(); ++i) {
    const int node = static_cast<int>(i);
    for (int32_t id : nodes_[i].args.inputs) {
      if (id == -1 || values_[id].external) continue;
      if (values_[id].producer < 0 || values_[id].producer >= node)
        refuse("Kernel '" + nodes_[i].name + "' reads value " + std::to_string(id) +
               " before anything has written it.");
      lifetimes[id].last = node;
    }
    for (int32_t id : nodes_[i].args.outputs)
      if (id != -1)
        lifetimes[id] = Lifetime{values_[id].row_bytes * values_[id].rows.count(maxima_.data()), node, node};
  }
  std::vector<int32_t> ids;
  std::vector<Lifetime> internal;
  for (size_t id = 0; id < values_.size(); ++id) {
    if (values_[id].external || values_[id].producer < 0) continue;
    ids.push_back(static_cast<int32_t>(id));
    internal.push_back(lifetimes[id]);
  }
  arena_ = Buffer(plan_arena(internal));
  pointers_.assign(values_.size(), nullptr);
  for (size_t i = 0; i < ids.size(); ++i) pointers_[ids[i]] = arena_.data() + internal[i].offset;
  frame_.values = pointers_.data();
}

void Segment::bind(const std::vector<int32_t>& ids, const std::vector<Binding>& bindings, const char* what) {
  if (ids.size() != bindings.size())
    refuse("The segment has " + std::to_string(ids.size()) + " " + what + ", and " + std::to_string(bindings.size()) +
           " were given.");
  int32_t dims[kDims];
  std::memcpy(dims, &frame_.dims, sizeof(dims));
  for (size_t i = 0; i < ids.size(); ++i) {
    const Value& value = values_[ids[i]];
    const size_t needed = value.row_bytes * value.rows.count(dims);
    if (bindings[i].nbytes < needed)
      refuse("Value " + std::to_string(ids[i]) + " needs " + std::to_string(needed) +
             " bytes in this step, and the array has " + std::to_string(bindings[i].nbytes) + ".");
    pointers_[ids[i]] = bindings[i].data;
  }
}

void Segment::run(const std::vector<int32_t>& dims, const std::vector<Binding>& inputs,
                  const std::vector<Binding>& outputs) {
  std::lock_guard<std::mutex> lock(running_);
  if (!finished_) refuse("Call finish before run.");
  if (dims.size() != kDims) refuse("A step has " + std::to_string(kDims) + " dims, in the order " + kDimNames + ".");
  for (int i = 0; i < kDims; ++i)
    if (dims[i] < 0 || dims[i] > maxima_[i])
      refuse(std::string("The step's ") + kDimNames[i] + " is " + std::to_string(dims[i]) + ", outside 0.." +
             std::to_string(maxima_[i]) + ".");
  frame_.dims = dims_of(dims);
  bind(inputs_, inputs, "inputs");
  bind(outputs_, outputs, "outputs");
  for (Node& node : nodes_) node.serial = node.kernel->serial(frame_.dims);
  pool_->run(&Segment::job, this);
}

void Segment::job(void* self, Pool& pool, const Team& team) { static_cast<Segment*>(self)->work(pool, team); }

// Nodes in order. What is serial in this step runs within the barrier before it, by the last thread to come; at the
// beginning by the caller, while the others wake.
void Segment::work(Pool& pool, const Team& team) {
  if (team.index == 0) run_serial(0, team);
  size_t i = after_serial(0);
  if (i > 0) pool.barrier();
  while (i < nodes_.size()) {
    Kernel& kernel = *nodes_[i].kernel;
    show_scratch(pool, team, kernel);
    if (poison_) {
      if (team.index == 0) poison_outputs(nodes_[i]);
      poison_scratch(kernel, team);
      pool.barrier();
    }
    const Clock::time_point start = now();
    const int phases = kernel.phases();
    for (int phase = 0; phase < phases; ++phase) {
      kernel.run(frame_, team, phase);
      if (phase + 1 < phases) pool.barrier();
    }
    pool.barrier([&] {
      book(i, start);
      run_serial(i + 1, team);
    });
    i = after_serial(i + 1);
  }
}

size_t Segment::after_serial(size_t first) const {
  while (first < nodes_.size() && nodes_[first].serial) ++first;
  return first;
}

void Segment::run_serial(size_t first, const Team& team) {
  const size_t end = after_serial(first);
  for (size_t i = first; i < end; ++i) {
    Kernel& kernel = *nodes_[i].kernel;
    TaskCounter counter;
    const Team alone{0, 1, &counter, team.scratch, team.shared};
    show_scratch(*pool_, alone, kernel);
    if (poison_) {
      poison_outputs(nodes_[i]);
      poison_scratch(kernel, alone);
    }
    const Clock::time_point start = now();
    for (int phase = 0; phase < kernel.phases(); ++phase) {
      counter.taken.store(0, std::memory_order_relaxed);
      kernel.run(frame_, alone, phase);
    }
    book(i, start);
  }
}

// Where times are taken, a node's calls and seconds as seen by the thread that ended it.
void Segment::book(size_t node, Clock::time_point start) {
  if (!profiling_) return;
  times_[node].calls += 1;
  times_[node].seconds += std::chrono::duration<double>(now() - start).count();
}

void Segment::poison_outputs(const Node& node) {
  int32_t dims[kDims];
  std::memcpy(dims, &frame_.dims, sizeof(dims));
  for (int32_t id : node.args.outputs) {
    if (id == -1) continue;
    const Value& value = values_[id];
    const size_t bytes = value.row_bytes * value.rows.count(value.external ? dims : maxima_.data());
    if (bytes > 0) std::memset(pointers_[id], 0xff, bytes);
  }
}

void Segment::set_profiling(bool on) {
  std::lock_guard<std::mutex> lock(running_);
  profiling_ = on;
  for (NodeTime& time : times_) time = NodeTime{time.name};
}

}  // namespace engine_cpu
