#!/usr/bin/env bash
# Builds the peer: llama.cpp's own benchmarks and library, from the source inside llama-cpp-python's source distribution.
# usage: benchmarks/build_llama_cpp.sh DIR      (about 8 minutes; afterwards DIR/bin and DIR/venv hold the peer)
set -euo pipefail
version=0.3.36
dir=$(mkdir -p "$1" && cd "$1" && pwd)
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q scikit-build-core cmake ninja
cd "$dir"
[ -f "llama_cpp_python-$version.tar.gz" ] ||
  venv/bin/pip download -q --no-deps --no-binary :all: --no-build-isolation "llama-cpp-python==$version"
tar xzf "llama_cpp_python-$version.tar.gz"
# On a virtual machine whose processor announces AMX, llama.cpp was seen to die in its AMX kernels.
flags="-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
grep -q '^flags.*avx' /proc/cpuinfo || flags=""
PATH="$dir/venv/bin:$PATH" cmake -B build -G Ninja -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_CURL=OFF \
  -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_SERVER=OFF "-DCMAKE_C_FLAGS=$flags" "-DCMAKE_CXX_FLAGS=$flags" \
  "llama_cpp_python-$version/vendor/llama.cpp" > build.log
PATH="$dir/venv/bin:$PATH" cmake --build build --target llama-bench llama-batched-bench llama-quantize >> build.log
ln -sfn build/bin bin
# The binding, for logits, over the same library.
CMAKE_ARGS="-DLLAMA_BUILD=OFF" venv/bin/pip install -q "./llama_cpp_python-$version.tar.gz"
LLAMA_CPP_LIB_PATH="$dir/bin" venv/bin/python -c "import llama_cpp; print('llama-cpp-python', llama_cpp.__version__)"
