// Runs single kernels for tests on another architecture, under an emulator: requests on stdin, answers on stdout, in the
// byte order and layout that emulator.py writes and reads. With the argument "isa" it prints the variant in use and all
// that this machine can run.
#include <cstdio>
#include <cstring>
#include <exception>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "isa.h"
#include "packed_weight.h"
#include "pool.h"
#include "segment.h"

using namespace engine_cpu;

namespace {

void read(void* target, size_t bytes) {
  if (std::fread(target, 1, bytes, stdin) != bytes) std::exit(0);  // the tests have ended
}

template <class T>
T read_as() {
  T value;
  read(&value, sizeof(T));
  return value;
}

std::string read_string() {
  std::string text(read_as<uint32_t>(), ' ');
  read(text.data(), text.size());
  return text;
}

// Arrays have their size before them; -1: absent.
struct Array {
  bool present = false;
  Buffer memory;
};

Array read_array(bool with_data) {
  const auto size = read_as<int64_t>();
  if (size < 0) return {};
  Array array{true, Buffer(static_cast<size_t>(size))};
  if (with_data)
    read(array.memory.data(), array.memory.size());
  else
    std::memset(array.memory.data(), 0xff, array.memory.size());
  return array;
}

std::vector<Array> read_arrays(bool with_data) {
  std::vector<Array> arrays(read_as<uint32_t>());
  for (Array& array : arrays) array = read_array(with_data);
  return arrays;
}

struct Request {
  std::string isa, kernel;
  int threads = 1;
  int64_t max_context = 0;
  std::vector<int32_t> dims;
  std::vector<Array> inputs, outputs, states;
  KernelArgs args;
};

Request read_request() {
  Request request;
  request.isa = read_string();
  request.kernel = read_string();
  request.threads = read_as<int32_t>();
  request.max_context = read_as<int64_t>();
  for (int i = 0; i < kDims; ++i) request.dims.push_back(read_as<int32_t>());
  request.inputs = read_arrays(true);
  request.outputs = read_arrays(false);
  request.states = read_arrays(true);
  for (auto count = read_as<uint32_t>(); count > 0; --count) {
    auto weight = std::make_shared<PackedWeight>();
    weight->family = read_string();
    weight->format = read_string();
    weight->columns = read_as<int64_t>();
    weight->depth = read_as<int64_t>();
    weight->count = read_as<int64_t>();
    weight->memory = read_array(true).memory;
    weight->data = weight->memory.data();
    weight->nbytes = weight->memory.size();
    request.args.weights.push_back(weight);
  }
  for (auto count = read_as<uint32_t>(); count > 0; --count) {
    const std::string name = read_string();
    request.args.numbers[name] = read_as<double>();
  }
  return request;
}

void run(Request& request) {
  static std::map<int, std::shared_ptr<Pool>> pools;
  std::shared_ptr<Pool>& pool = pools[request.threads];
  if (pool == nullptr) pool = std::make_shared<Pool>(request.threads);
  Segment segment(pool, request.isa, request.dims, request.max_context, true);
  std::vector<int32_t> inputs;
  std::vector<Binding> given, wanted;
  int32_t id = 0;
  for (const Array& array : request.inputs) {
    request.args.inputs.push_back(array.present ? id : -1);
    if (array.present) {
      segment.value(id, array.memory.size(), "1", "");
      inputs.push_back(id);
      given.push_back(Binding{array.memory.data(), array.memory.size()});
    }
    ++id;
  }
  std::vector<int32_t> outputs;
  for (const Array& array : request.outputs) {
    request.args.outputs.push_back(array.present ? id : -1);
    if (array.present) {
      segment.value(id, array.memory.size(), "1", "");
      outputs.push_back(id);
      wanted.push_back(Binding{array.memory.data(), array.memory.size()});
    }
    ++id;
  }
  for (const Array& array : request.states) request.args.states.push_back(array.memory.data());
  segment.add(request.kernel, std::move(request.args));
  segment.finish(inputs, outputs);
  segment.run(request.dims, given, wanted);
}

void answer(const std::string& error) {
  const auto size = static_cast<uint32_t>(error.size());
  std::fwrite(&size, sizeof(size), 1, stdout);
  std::fwrite(error.data(), 1, size, stdout);
}

void serve_one() {
  Request request = read_request();
  try {
    run(request);
  } catch (const std::exception& error) {
    answer(error.what());
    std::fflush(stdout);
    return;
  }
  answer("");
  for (const std::vector<Array>* arrays : {&request.outputs, &request.states})
    for (const Array& array : *arrays) std::fwrite(array.memory.data(), 1, array.memory.size(), stdout);
  std::fflush(stdout);
}

}  // namespace

int main(int count, char** words) {
  if (count == 2 && std::strcmp(words[1], "isa") == 0) {
    try {
      std::printf("%s:", default_isa().c_str());
      for (const std::string& name : isa_list()) std::printf(" %s", name.c_str());
    } catch (const std::exception& error) {
      std::printf("refused: %s", error.what());
    }
    return 0;
  }
  while (true) serve_one();
}
