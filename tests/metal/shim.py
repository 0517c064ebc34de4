"""Metal kernels on the CPU: a launch's body is compiled with the shim of Metal's types, under sanitizers, and run."""

from __future__ import annotations

import hashlib
import struct
import subprocess
from math import prod
from pathlib import Path

import mlx.core as mx
import numpy as np
from engine_metal.arrays import from_host, to_host
from engine_metal.kernels import Launch

from engine.backend.v1 import HOST_DTYPES

HERE = Path(__file__).parent
TYPES = {
    mx.float32: ("float", "f32"),
    mx.float16: ("half", "f16"),
    mx.bfloat16: ("bfloat16_t", "bf16"),
    mx.int8: ("int8_t", "int8"),
    mx.int32: ("int", "i32"),
}
FLAGS = ("-std=c++17", "-O1", "-g1", "-Wall", "-Werror", "-Wno-unused-variable", "-Wno-maybe-uninitialized")
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
POISON = 0xA5


def constants(launch: Launch) -> list[str]:
    """The template's arguments, as MLX puts them before the function."""
    lines = []
    for name, value in launch.template:
        if isinstance(value, mx.Dtype):
            lines.append(f"using {name} = {TYPES[value][0]};")
        else:
            lines.append(f"constexpr {'bool' if isinstance(value, bool) else 'int'} {name} = {int(value)};")
    return lines


def program(launch: Launch, source: str) -> str:
    """A C++ program that runs the body for each thread of each threadgroup."""
    kernel = launch.kernel
    lines = ['#include "metal_shim.h"', *constants(launch)]
    arguments = [(f"const {TYPES[array.dtype][0]}*", name) for name, array in zip(kernel.inputs, launch.inputs, strict=True)]
    arguments += [(f"{TYPES[dtype][0]}*", name) for name, (_, dtype) in zip(kernel.outputs, launch.outputs, strict=True)]
    shapes = [name for name in kernel.inputs if f"{name}_shape" in source]
    arguments += [("const int*", f"{name}_shape") for name in shapes]
    lines += [f"static {type_} {name};" for type_, name in arguments]
    lines += ["static void kernel_body() {", f'#line 1 "{kernel.name}.metal"', source, "}", "int main(int, char** argv) {"]
    lines += ["std::vector<size_t> sizes;", "auto arrays = shim::read_arrays(argv[1], sizes);", "size_t n = 0;"]
    lines += [f"{name} = ({type_})arrays[n++];" for type_, name in (arguments[len(kernel.inputs) + len(kernel.outputs) :])]
    lines += [f"{name} = ({type_})arrays[n++];" for type_, name in arguments[: len(kernel.inputs) + len(kernel.outputs)]]
    lines += ["shim::body = kernel_body;", "std::mt19937 random(std::atoi(argv[3]));"]
    lines += ["const int *grid = (const int*)arrays[n], *group = grid + 3;"]
    lines += ["for (int z = 0; z < grid[2] / group[2]; ++z) for (int y = 0; y < grid[1] / group[1]; ++y)"]
    lines += ["for (int x = 0; x < grid[0] / group[0]; ++x) { shim::threadgroup_position = {x, y, z};"]
    lines += ["shim::run_threadgroup(group[0] * group[1] * group[2], random); }"]
    lines += [f"shim::write_arrays(argv[2], arrays, sizes, {len(shapes) + len(kernel.inputs)});", "}"]
    return "\n".join(lines) + "\n"


class Shim:
    """Runs launches, with programs that are kept in ``folder``. ``change`` is done to each body before it is compiled."""

    def __init__(self, folder: Path, change=lambda name, source: source) -> None:
        self.folder, self.change = folder, change
        self.launched: set[str] = set()

    def __call__(self, launch: Launch) -> list[mx.array]:
        self.launched.add(launch.kernel.name)
        source = self.change(launch.kernel.name, launch.kernel.source)
        arrays = [to_host(mx.contiguous(array)) for array in launch.inputs]
        shapes = [np.array(a.shape, np.int32) for name, a in zip(launch.kernel.inputs, arrays, strict=True) if f"{name}_shape" in source]
        outputs = [(shape, HOST_DTYPES[TYPES[dtype][1]]) for shape, dtype in launch.outputs]
        poisoned = [np.full(prod(shape) * dtype.itemsize, POISON, np.uint8) for shape, dtype in outputs]
        sizes = np.array([*launch.grid, *launch.threadgroup], np.int32)
        given, made = self.folder / "given", self.folder / "made"
        with given.open("wb") as file:
            for array in (*shapes, *arrays, *poisoned, sizes):
                file.write(struct.pack("<Q", array.nbytes) + array.tobytes())
        seed = str(np.random.default_rng().integers(1 << 30))
        ran = subprocess.run([self._built(program(launch, source)), given, made, seed], capture_output=True, text=True, check=False)
        assert ran.returncode == 0, f"{launch.kernel.name}: {ran.stderr}"
        raw = made.read_bytes()
        found = []
        for shape, dtype in outputs:
            size = prod(shape) * dtype.itemsize
            found.append(from_host(np.frombuffer(raw[:size], dtype).reshape(shape)))
            raw = raw[size:]
        return found

    def _built(self, text: str) -> Path:
        path = self.folder / hashlib.sha256(text.encode()).hexdigest()[:16]
        if not path.exists():
            source = path.with_suffix(".cpp")
            source.write_text(text)
            subprocess.run(["g++", *FLAGS, *SANITIZERS, f"-I{HERE}", source, "-o", path], check=True)
        return path
