// Runs a kernel on the CPU: compiled with SOURCE, its file, and KERNELS, X(name) for each kernel in it.
//
// usage: run_kernel NAME INPUT OUTPUT. INPUT: i64 grid[3], threads; then each argument as i64 bytes and its bytes, padded to 8. A pointer
// of no bytes is null. OUTPUT: the bytes behind all pointers, in their order.
#include SOURCE

#include <tuple>
#include <type_traits>

namespace {

struct Buffer {
  char* start;
  size_t size;
};

struct Input {
  std::FILE* file;
  std::vector<Buffer> buffers;

  void read(void* to, size_t size) {
    if (size && std::fread(to, 1, size, file) != size) lockstep::fail("the input is cut off");
  }
  long integer() {
    long value;
    read(&value, sizeof value);
    return value;
  }
  // Memory of its own, so that the sanitizer sees every access beyond it.
  char* bytes() {
    const size_t size = integer();
    char* start = static_cast<char*>(std::malloc(size ? size : 1));
    read(start, size);
    char padding[8];
    read(padding, -size % 8);
    buffers.push_back({start, size});
    return start;
  }
  template <class T> T take() {
    char* start = bytes();
    if constexpr (std::is_pointer_v<T>) {
      return buffers.back().size ? reinterpret_cast<T>(start) : nullptr;
    } else {
      if (buffers.back().size != sizeof(T)) lockstep::fail("a number has another size than its argument");
      buffers.pop_back();
      T value;
      std::memcpy(&value, start, sizeof value);
      return value;
    }
  }
};

template <class... A> void run(void (*kernel)(A...), Input& input) {
  const int grid[3] = {int(input.integer()), int(input.integer()), int(input.integer())};
  const int threads = input.integer();
  std::tuple<A...> arguments{input.take<A>()...};
  std::apply([&](A... values) { lockstep::launch(kernel, grid, threads, values...); }, arguments);
}

}  // namespace

int main(int, char** paths) {
  Input input{std::fopen(paths[2], "rb"), {}};
#define X(kernel) \
  if (!std::strcmp(paths[1], #kernel)) run(kernel, input);
  KERNELS
#undef X
  std::FILE* output = std::fopen(paths[3], "wb");
  for (const Buffer& buffer : input.buffers) std::fwrite(buffer.start, 1, buffer.size, output);
  return std::fclose(output);
}
