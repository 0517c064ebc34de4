#!/usr/bin/env bash
# Builds the peer: llama.cpp's own benchmarks, server and library, from the source inside llama-cpp-python's source distribution.
# usage: benchmarks/build_llama_cpp.sh DIR      (about 12 minutes; afterwards DIR/bin and DIR/venv hold the peer)
set -euo pipefail
version=0.3.36
dir=$(mkdir -p "$1" && cd "$1" && pwd)
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q scikit-build-core cmake ninja
cd "$dir"
[ -f "llama_cpp_python-$version.tar.gz" ] ||
  venv/bin/pip download -q --no-deps --no-binary :all: --no-build-isolation "llama-cpp-python==$version"
tar xzf "llama_cpp_python-$version.tar.gz"
# g++ 12 drops stores that a tile configuration needs (its ldtilecfg intrinsic names eight bytes of it), and llama.cpp then
# dies in its AMX kernels; a barrier that reads the whole configuration keeps them.
sed -i 's|^    _tile_loadconfig(&tc);|    asm volatile("" : : "m"(tc)); _tile_loadconfig(\&tc);|' \
  "llama_cpp_python-$version/vendor/llama.cpp/ggml/src/ggml-cpu/amx/mmq.cpp"
compile() {  # compile FOLDER FLAGS TARGET...
  PATH="$dir/venv/bin:$PATH" cmake -B "$1" -G Ninja -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_CURL=OFF \
    -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_SERVER=ON -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF "-DCMAKE_C_FLAGS=$2" "-DCMAKE_CXX_FLAGS=$2" \
    "llama_cpp_python-$version/vendor/llama.cpp" >> build.log
  PATH="$dir/venv/bin:$PATH" cmake --build "$1" --target "${@:3}" >> build.log
}
tools="llama-bench llama-batched-bench llama-quantize llama-server"
# Which kernels are faster, those of AMX or the others, depends on the work: cpu_peers.py tries every CPU library there is.
if grep -q '^flags.* amx_tile' /proc/cpuinfo; then
  compile build "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16" $tools
  compile build-amx "" ggml-cpu
  ln -sfn build-amx/bin cpu-amx
else
  compile build "" $tools
fi
ln -sfn build/bin bin
# The binding, for logits, over the same library.
CMAKE_ARGS="-DLLAMA_BUILD=OFF" venv/bin/pip install -q "./llama_cpp_python-$version.tar.gz"
LLAMA_CPP_LIB_PATH="$dir/bin" venv/bin/python -c "import llama_cpp; print('llama-cpp-python', llama_cpp.__version__)"
