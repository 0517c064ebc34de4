"""The device: buffers as values, one queue in order, programs built once for each set of options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np
import pyopencl as cl

from engine.backend.v1 import (
    HOST_DTYPES,
    Array,
    DeviceInfo,
    Limits,
    MemoryInfo,
    Plan,
    Provider,
    Segment,
    Session,
    StepFn,
    StepSession,
    available_memory,
)

_PAGE = 4096
_GPU_GROUP = 64


@dataclass(frozen=True, eq=False)
class Tensor:
    """A value: a buffer, and what lies in it."""

    buffer: cl.Buffer
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * self.dtype.itemsize


class OpenCLDevice:
    """``lanes``: numbers that a work-item computes at a time, 16 or 1; None takes 16 on processors, whose groups then have
    one work-item, and 1 on everything else."""

    def __init__(self, device: cl.Device, lanes: int | None = None) -> None:
        from .providers import make_providers

        self.cl = device
        self.is_host = bool(device.type & cl.device_type.CPU)
        self.lanes = lanes or (16 if self.is_host else 1)
        self.group = 1 if self.lanes > 1 else _GPU_GROUP
        self.context = cl.Context([device])
        self.queue = cl.CommandQueue(self.context)
        self.nothing = self.buffer(4)
        self.program = cache(self._build)
        self._used = 0
        self._providers = make_providers(self)

    # -- the eight methods -----------------------------------------------------------------------------------------

    def alloc(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        tag = HOST_DTYPES[dtype]
        size = max(int(np.prod(shape)) * tag.itemsize, 1)
        self._used += size
        if self.is_host:  # untouched pages take no memory, so a large pool costs only what is used of it
            pages = np.zeros(size + _PAGE, np.uint8)
            first = -pages.ctypes.data % _PAGE
            flags = cl.mem_flags.READ_WRITE | cl.mem_flags.USE_HOST_PTR
            return Tensor(cl.Buffer(self.context, flags, hostbuf=pages[first : first + size]), shape, tag)
        tensor = Tensor(self.buffer(size), shape, tag)
        cl.enqueue_fill_buffer(self.queue, tensor.buffer, np.uint8(0), 0, size)
        return tensor

    def free(self, value: Tensor) -> None:
        self._used -= max(value.nbytes, 1)
        value.buffer.release()

    def copy_in(self, array: Array) -> Tensor:
        whole = np.array(array, order="C")
        self._used += max(whole.nbytes, 1)
        if not whole.size:
            return Tensor(self.buffer(1), whole.shape, whole.dtype)
        flags = cl.mem_flags.READ_WRITE | cl.mem_flags.COPY_HOST_PTR
        return Tensor(cl.Buffer(self.context, flags, hostbuf=whole), whole.shape, whole.dtype)

    def copy_out(self, value: Tensor) -> Array:
        array = np.empty(value.shape, value.dtype)
        if array.size:
            cl.enqueue_copy(self.queue, array, value.buffer)
        return array

    def fence(self) -> None:
        self.queue.finish()

    def memory_info(self) -> MemoryInfo:
        total = self.cl.global_mem_size
        free = total - self._used
        return MemoryInfo(total, max(min(free, available_memory().free) if self.is_host else free, 1))

    def describe(self) -> DeviceInfo:
        from .cache import ROWS

        name, driver = self.cl.name.strip(), self.cl.driver_version.strip()
        return DeviceInfo(
            name=f"{name} ({self.cl.max_compute_units} units)",
            backend="opencl",
            alignment=self.cl.mem_base_addr_align // 8,
            largest_allocation=self.cl.max_mem_alloc_size,
            kv_layouts=(ROWS,),
            details={"platform": self.cl.platform.name.strip(), "driver": driver, "lanes": str(self.lanes)},
        )

    def session(self, plan: Plan) -> Session:
        return StepSession(self, plan)

    # -- what makes it fast ----------------------------------------------------------------------------------------

    def providers(self) -> Mapping[str, Sequence[Provider]]:
        return self._providers

    def compile(self, segment: Segment, limits: Limits, states: Mapping[str, Any]) -> StepFn | None:
        from .compile import compile_segment
        from .providers import OpenCLProvider

        if not all(isinstance(bound.provider, OpenCLProvider) for bound in segment.calls):
            return None  # a forced trip through the device runs references on it
        return compile_segment(self, segment, limits, states)

    def export_blocks(self, state: Tensor, blocks: Array) -> Array:
        rows = np.empty((len(blocks), *state.shape[1:]), state.dtype)
        size = rows.nbytes // max(len(blocks), 1)
        for row, block in zip(rows, blocks, strict=True):
            cl.enqueue_copy(self.queue, row, state.buffer, src_offset=int(block) * size)
        return rows

    def import_blocks(self, state: Tensor, blocks: Array, rows: Array) -> Tensor:
        size = rows.nbytes // max(len(blocks), 1)
        for row, block in zip(np.ascontiguousarray(rows), blocks, strict=True):
            cl.enqueue_copy(self.queue, state.buffer, row, dst_offset=int(block) * size)
        return state

    def buffer(self, size: int) -> cl.Buffer:
        return cl.Buffer(self.context, cl.mem_flags.READ_WRITE, max(size, 1))

    def _build(self, names: tuple[str, ...], **numbers: int) -> cl.Program:
        """Kernel files as one program. ``numbers`` are macros; a file named again is built with the next of ROWS."""
        lanes = numbers.pop("LANES", self.lanes)
        folder = files("engine_opencl.kernels")
        source = (folder / "common.cl").read_text()
        for name in names:
            file, _, rows = name.partition(":")
            text = (folder / f"{file}.cl").read_text()
            source += f"#undef ROWS\n#define ROWS {rows}\n{text}" if rows else text
        options = [f"-D{name}={int(value)}" for name, value in numbers.items()]
        options += [f"-DLANES={lanes}", f"-DWG={self.group}"]
        if self.cl.single_fp_config & cl.device_fp_config.CORRECTLY_ROUNDED_DIVIDE_SQRT:
            options.append("-cl-fp32-correctly-rounded-divide-sqrt")
        return cl.Program(self.context, source).build(options, [self.cl])
