"""Kernels in HIP C++, built for the CPU with the sanitizers and run in lockstep."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from engine_rocm import sources

HERE = Path(__file__).parent
SANITIZED = ["-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


class Kernels:
    """The kernels of one source as a program: ``options`` are its macros, ``warp`` the threads of a warp."""

    def __init__(self, folder, source, names, warp, options):
        if shutil.which("g++") is None:
            pytest.skip("g++ is not installed")
        self.folder = Path(folder)
        self.program = self.folder / "kernels"
        macros = {"WARP": warp, "SOURCE": f'"{source}"', "KERNELS": "".join(f"X({name}) " for name in names), **options}
        subprocess.run(
            ["g++", "-std=c++17", "-Wall", "-Wextra", *SANITIZED, f"-I{HERE}", f"-I{sources.FOLDER}"]
            + [f"-D{name}={value}" for name, value in macros.items()]
            + [str(HERE / "run_kernel.cpp"), "-o", str(self.program)],
            check=True,
        )

    def start(self, name, grid, arguments, threads=None):
        """The finished process, with what it wrote to ``output``."""
        words = [*grid, *[1] * (3 - len(grid)), threads or sources.THREADS.get(name, 64)]
        blobs = [np.array(words, np.int64).tobytes()]
        for argument in arguments:
            raw = b"" if argument is None else np.ascontiguousarray(argument).tobytes()
            blobs += [np.int64(len(raw)).tobytes(), raw, bytes(-len(raw) % 8)]
        (self.folder / "input").write_bytes(b"".join(blobs))
        command = [str(self.program), name, str(self.folder / "input"), str(self.folder / "output")]
        return subprocess.run(
            command, capture_output=True, text=True, check=False, env={"ASAN_OPTIONS": "detect_leaks=0"}
        )

    def run(self, name, grid, *arguments):
        """Arrays are what pointers point to, None a null pointer, NumPy scalars numbers. Arrays are changed in place."""
        done = self.start(name, grid, arguments)
        assert done.returncode == 0, f"{name}: {done.stderr[-3000:]}"
        raw = (self.folder / "output").read_bytes()
        for argument in arguments:
            if isinstance(argument, np.ndarray):
                assert argument.flags.c_contiguous
                argument.reshape(-1).view(np.uint8)[:] = np.frombuffer(raw[: argument.nbytes], np.uint8)
                raw = raw[argument.nbytes :]
        assert not raw


def poisoned(shape, dtype):
    """Bytes that no kernel writes by chance."""
    return np.full(np.prod(shape) * np.dtype(dtype).itemsize, 0xA5, np.uint8).view(dtype).reshape(shape)
