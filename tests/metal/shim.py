"""Metal kernels on the CPU: a launch's body is compiled with the shim of Metal's types, under sanitizers, and run."""

from __future__ import annotations

import hashlib
import struct
import subprocess
from math import prod
from pathlib import Path

import mlx.core as mx
import numpy as np

from engine.backend.v1 import HOST_DTYPES
from engine_metal.arrays import from_host, to_host
from engine_metal.kernels import Launch

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
    """The body as C++, with its arguments bound to the arrays that ``runtime.cpp`` reads: shapes, inputs, outputs."""
    kernel = launch.kernel
    arguments = [("const int*", f"{name}_shape") for name in shaped(launch, source)]
    arguments += [(f"const {TYPES[a.dtype][0]}*", name) for name, a in zip(kernel.inputs, launch.inputs, strict=True)]
    first = len(arguments)
    arguments += [(f"{TYPES[t][0]}*", name) for name, (_, t) in zip(kernel.outputs, launch.outputs, strict=True)]
    lines = ['#include "metal_shim.h"', *constants(launch)]
    lines += [f"const int shim_arrays = {len(arguments)}, shim_first_output = {first};"]
    lines += [f"static {kind} {name};" for kind, name in arguments]
    lines += ["void shim_bind(void** arrays) {"]
    lines += [f"    {name} = ({kind})arrays[{n}];" for n, (kind, name) in enumerate(arguments)]
    lines += ["}", "void shim_body() {", f'#line 1 "{kernel.name}.metal"', source, "}"]
    return "\n".join(lines) + "\n"


def shaped(launch: Launch, source: str) -> list[str]:
    """The inputs whose shape the body reads, too."""
    return [name for name in launch.kernel.inputs if f"{name}_shape" in source]


class Shim:
    """Runs launches, with programs that are kept in ``folder``. ``change`` is done to each body before it is compiled."""

    def __init__(self, folder: Path, change=lambda name, source: source) -> None:
        self.folder, self.change = folder, change
        self.launched: set[str] = set()

    def __call__(self, launch: Launch) -> list[mx.array]:
        self.launched.add(launch.kernel.name)
        source = self.change(launch.kernel.name, launch.kernel.source)
        arrays = [to_host(mx.contiguous(array)) for array in launch.inputs]
        by_name = dict(zip(launch.kernel.inputs, launch.inputs, strict=True))
        shapes = [np.array(by_name[name].shape, np.int32) for name in shaped(launch, source)]
        outputs = [(shape, HOST_DTYPES[TYPES[dtype][1]]) for shape, dtype in launch.outputs]
        poisoned = [np.full(prod(shape) * dtype.itemsize, POISON, np.uint8) for shape, dtype in outputs]
        sizes = np.array([*launch.grid, *launch.threadgroup], np.int32)
        given, made = self.folder / "given", self.folder / "made"
        with given.open("wb") as file:
            for array in (*shapes, *arrays, *poisoned, sizes):
                file.write(struct.pack("<Q", array.nbytes) + array.tobytes())
        seed = str(np.random.default_rng().integers(1 << 30))
        command = [self._built(program(launch, source)), given, made, seed]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, f"{launch.kernel.name}: {ran.stderr}"
        raw = made.read_bytes()
        found = []
        for shape, dtype in outputs:
            size = prod(shape) * dtype.itemsize
            found.append(from_host(np.frombuffer(raw[:size], dtype).reshape(shape)))
            raw = raw[size:]
        return found

    def _built(self, text: str) -> Path:
        runtime = self.folder / "runtime.o"
        if not runtime.exists():
            _compile("-c", HERE / "runtime.cpp", "-o", runtime)
        path = self.folder / hashlib.sha256(text.encode()).hexdigest()[:16]
        if not path.exists():
            source = path.with_suffix(".cpp")
            source.write_text(text)
            _compile(source, runtime, "-o", path)
        return path


def _compile(*arguments: str | Path) -> None:
    subprocess.run(["g++", *FLAGS, *SANITIZERS, f"-I{HERE}", *arguments], check=True)
