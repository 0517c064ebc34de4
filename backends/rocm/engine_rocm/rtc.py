"""Kernels compiled from C++ when they are needed: hipRTC with HIP's driver interface, or NVRTC with CUDA's, whose functions
differ in their prefixes alone."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import torch

from engine_cuda.recording import Launch, submit

from .sources import HEADER, THREADS, Options, text

Argument = torch.Tensor | int | float | None
"""A pointer to a tensor's memory or null, i32, f32."""


class Kernels(Protocol):
    """The compiled kernels of one source."""

    def launch(self, name: str, grid: Sequence[int], *arguments: Argument) -> None: ...


def launch(kernels: Kernels, name: str, grid: tuple[int, ...], *arguments: Argument) -> None:
    """A kernel on a grid, which is kept where the step is recorded."""
    submit(Launch(partial(kernels.launch, name, grid), name, grid, arguments, {}))


class Runtime(Protocol):
    """What makes kernels of sources."""

    def kernels(self, source: str, options: Options) -> Kernels:
        """The kernels of a file in ``hip/``, compiled with these macros; the same ones when asked again."""
        ...


@dataclass(frozen=True)
class Vendor:
    """Libraries by the names to try, prefixes of their functions, and how the compiler is told an architecture."""

    compilers: tuple[str, ...]
    compile: str
    code: str
    drivers: tuple[str, ...]
    driver: str
    launch: str
    architecture: str


HIP = Vendor(
    ("libhiprtc.so", "libhiprtc.so.7", "libhiprtc.so.6"), "hiprtc", "Code",
    ("libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6"), "hip", "hipModuleLaunchKernel", "--offload-arch=",
)  # fmt: skip
CUDA = Vendor(
    ("libnvrtc.so.13", "libnvrtc.so.12"), "nvrtc", "CUBIN", ("libcuda.so.1",), "cu", "cuLaunchKernel", "-arch=",
)  # fmt: skip


def find_library(names: Sequence[str]) -> ctypes.CDLL | None:
    """The first of these that a package brings, or that the system has. Torch's own go first: streams are those of the library
    that it has loaded, and another one of the system's knows nothing of them."""
    for place in (*(path for name in names for path in _packaged(name)), *names):
        try:
            if isinstance(place, Path):
                for beside in place.parent.glob("libnvrtc-builtins.so.*"):  # which NVRTC looks for by name alone
                    ctypes.CDLL(str(beside))
            return ctypes.CDLL(str(place))
        except OSError:
            continue
    return None


def _packaged(name: str) -> list[Path]:
    found: list[Path] = []
    for package, pattern in (("torch", "lib"), ("nvidia", "*/lib")):
        spec = find_spec(package)
        for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
            found += sorted(path for path in Path(folder).glob(f"{pattern}/{name}"))
    return found


class Compiler:
    """One vendor's compiler. ValueError where its library is not there."""

    def __init__(self, vendor: Vendor) -> None:
        library = find_library(vendor.compilers)
        if library is None:
            raise ValueError(f"{vendor.compilers[0]} is not found.")
        self._vendor, self._library = vendor, library

    def compile(self, source: str, options: Options, architecture: str) -> bytes:
        """Machine code of a file in ``hip/``. ValueError gives the compiler's words."""
        program, header = ctypes.c_void_p(), ctypes.c_char_p(text(HEADER).encode())
        name = ctypes.c_char_p(HEADER.encode())
        self._call("CreateProgram", ctypes.byref(program), text(source).encode(), source.encode(), 1,
                   ctypes.byref(header), ctypes.byref(name))  # fmt: skip
        flags = [f"{self._vendor.architecture}{architecture}", "-std=c++17"]
        flags += [f"-D{macro}={value}" for macro, value in options.items()]
        given = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
        try:
            if self._function("CompileProgram")(program, len(flags), given):
                raise ValueError(f"{source} does not compile for {architecture}: {self._text(program, 'ProgramLog')}")
            return self._bytes(program, self._vendor.code)
        finally:
            self._call("DestroyProgram", ctypes.byref(program))

    def _bytes(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"Get{what}Size", program, ctypes.byref(size))
        taken = ctypes.create_string_buffer(size.value)
        self._call(f"Get{what}", program, taken)
        return taken.raw

    def _text(self, program: ctypes.c_void_p, what: str) -> str:
        return " ".join(self._bytes(program, what).rstrip(b"\0").decode(errors="replace").split())

    def _function(self, name: str) -> Any:
        return getattr(self._library, self._vendor.compile + name)

    def _call(self, name: str, *arguments: Any) -> None:
        if status := self._function(name)(*arguments):
            raise ValueError(f"{self._vendor.compile}{name} fails with status {status}.")


@dataclass
class GpuRuntime:
    """Kernels on one GPU. ValueError where the compiler's or the driver's library is not there."""

    vendor: Vendor
    architecture: str
    _made: dict[tuple[str, tuple[tuple[str, str | int], ...]], GpuKernels] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._compiler = Compiler(self.vendor)
        driver = find_library(self.vendor.drivers)
        if driver is None:
            raise ValueError(f"{self.vendor.drivers[0]} is not found.")
        self._driver = driver

    def kernels(self, source: str, options: Options) -> Kernels:
        key = source, tuple(sorted(options.items()))
        if key not in self._made:
            code = self._compiler.compile(source, options, self.architecture)
            self._made[key] = GpuKernels(self.vendor, self._driver, code)
        return self._made[key]


class GpuKernels:
    """Loaded machine code; launches go to torch's current stream."""

    def __init__(self, vendor: Vendor, driver: ctypes.CDLL, code: bytes) -> None:
        self._vendor, self._driver = vendor, driver
        self._module = ctypes.c_void_p()
        self._functions: dict[str, ctypes.c_void_p] = {}
        self._call(f"{vendor.driver}ModuleLoadData", ctypes.byref(self._module), code)

    def launch(self, name: str, grid: Sequence[int], *arguments: Argument) -> None:
        if name not in self._functions:
            function = ctypes.c_void_p()
            self._call(f"{self._vendor.driver}ModuleGetFunction", ctypes.byref(function), self._module, name.encode())
            self._functions[name] = function
        values = [_as_c(argument) for argument in arguments]
        places = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        sizes = [*grid, *[1] * (3 - len(grid)), THREADS[name], 1, 1, 0]
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        self._call(self._vendor.launch, self._functions[name], *map(ctypes.c_uint, sizes), stream, places, None)

    def _call(self, name: str, *arguments: Any) -> None:
        if status := getattr(self._driver, name)(*arguments):
            raise RuntimeError(f"{name} fails with status {status}.")


def _as_c(argument: Argument) -> Any:
    if argument is None or isinstance(argument, torch.Tensor):
        return ctypes.c_void_p(None if argument is None else argument.data_ptr())
    return ctypes.c_int(argument) if isinstance(argument, int) else ctypes.c_float(argument)
