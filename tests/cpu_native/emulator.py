"""The variants of another architecture: the kernels cross-compiled into a program that runs under qemu-user."""

from __future__ import annotations

import atexit
import functools
import os
import platform
import shutil
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from filelock import FileLock

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "kernel_server_aarch64"
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
# Best first, each with a processor that has no more than it needs. Where they run by themselves nothing is emulated.
PROCESSORS = {"neon_dot": "cortex-a76", "neon": "cortex-a53"}
ISAS = [] if platform.machine() in ("aarch64", "arm64") else list(PROCESSORS)


@functools.cache
def missing() -> str | None:
    """What keeps the variants from being tested here."""
    absent = [tool for tool in (COMPILER, EMULATOR, "cmake", "ninja") if _tool(tool) is None]
    return f"to test the NEON variants, install what is not found here: {', '.join(absent)}" if absent else None


def _tool(name: str) -> str | None:
    return shutil.which(name, path=os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", ""))))


@functools.cache
def build() -> Path:
    """The program, built unless it is up to date. Skips the test where the tools are missing."""
    if missing():
        pytest.skip(str(missing()))
    configure = [
        "-S", str(ROOT), "-B", str(BUILD), "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={_tool('ninja')}",
        "-DENGINE_KERNEL_SERVER=ON", "-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64",
        f"-DCMAKE_CXX_COMPILER={COMPILER}", "-DCMAKE_BUILD_TYPE=None", "-DCMAKE_CXX_FLAGS=-O1",
        "-DCMAKE_EXE_LINKER_FLAGS=-static",
    ]  # fmt: skip
    BUILD.mkdir(parents=True, exist_ok=True)
    with FileLock(BUILD / "lock"):  # tests run in several processes
        for arguments in (configure, ["--build", str(BUILD)]):
            done = subprocess.run([str(_tool("cmake")), *arguments], capture_output=True, text=True, check=False)
            assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return BUILD / "kernel_server"


def command(isa: str) -> list[str]:
    """What starts the program on the processor of a variant."""
    return [EMULATOR, "-cpu", PROCESSORS[isa], str(build())]


@functools.cache
def _server(isa: str) -> subprocess.Popen[bytes]:
    server = subprocess.Popen(command(isa), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    atexit.register(server.kill)
    return server


def run(
    isa: str,
    kernel: str,
    dims: Sequence[int],
    inputs: Sequence[np.ndarray | None],
    results: Sequence[np.ndarray | None],
    weights: Sequence[Any],
    states: Sequence[np.ndarray],
    numbers: Mapping[str, float],
    threads: int,
    max_context: int,
) -> None:
    """Runs one kernel; fills the results and changes the states in place. ValueError as the library's."""
    server = _server(isa)
    request = [_text(isa), _text(kernel), struct.pack(f"<iq{len(dims)}i", threads, max_context, *dims)]
    request += [_count(inputs), *(struct.pack("<q", -1) if a is None else _array(a) for a in inputs)]
    request += [_count(results), *(struct.pack("<q", -1 if a is None else a.nbytes) for a in results)]
    request += [_count(states), *(_array(a) for a in states)]
    request.append(_count(weights))
    for weight in weights:
        shape = struct.pack("<3q", weight.columns, weight.depth, weight.count)
        request += [_text(weight.family), _text(weight.format), shape, _array(weight.data)]
    request.append(_count(numbers))
    request += [_text(name) + struct.pack("<d", value) for name, value in numbers.items()]
    assert server.stdin is not None and server.stdout is not None
    server.stdin.write(b"".join(request))
    server.stdin.flush()
    (size,) = struct.unpack("<I", _read(server, 4))
    if size:
        raise ValueError(_read(server, size).decode())
    for array in (*(a for a in results if a is not None), *states):
        array.reshape(-1).view(np.uint8)[:] = np.frombuffer(_read(server, array.nbytes), np.uint8)


def _count(things: Any) -> bytes:
    return struct.pack("<I", len(things))


def _text(text: str) -> bytes:
    return struct.pack("<I", len(text)) + text.encode()


def _array(array: np.ndarray) -> bytes:
    return struct.pack("<q", array.nbytes) + np.ascontiguousarray(array).tobytes()


def _read(server: subprocess.Popen[bytes], size: int) -> bytes:
    assert server.stdout is not None
    data = server.stdout.read(size)
    if len(data) != size:
        _server.cache_clear()
        raise RuntimeError(f"The emulated kernel ended the process with status {server.wait()}.")
    return data
