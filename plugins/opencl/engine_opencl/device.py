"""The device: buffers as values, one queue in order, programs built once for each set of options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from math import prod
from typing import Any, NamedTuple

import numpy as np
import pyopencl as cl

from engine.backend import v1

_WRITABLE = cl.mem_flags.READ_WRITE


class Tensor(NamedTuple):
    """A value: a buffer, and what lies in it."""

    buffer: cl.Buffer
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def _shapes(spec: v1.KVSpec) -> Mapping[str, tuple[tuple[int, ...], str]]:
    tokens, kinds = (spec.blocks, spec.block_size, spec.kv_heads), ("k",) if spec.latent else ("k", "v")
    shapes: dict[str, tuple[tuple[int, ...], str]] = {kind: ((*tokens, spec.head_dim), spec.dtype) for kind in kinds}
    return shapes | ({f"{kind}_scale": (tokens, "f32") for kind in kinds} if spec.dtype == "int8" else {})


ROWS = v1.KVLayout("opencl.rows", ("f32", "f16", "bf16", "int8"), _shapes)


class OpenCLDevice:
    """``lanes``: numbers that a work-item computes at a time. None: 16 on processors, in groups of one work-item, else 1."""

    def __init__(self, device: cl.Device, lanes: int | None = None) -> None:
        from .providers import make_providers

        self.cl = device
        self.is_host = bool(device.type & cl.device_type.CPU)
        self.lanes = lanes or (16 if self.is_host else 1)
        self.group = 1 if self.lanes > 1 else 64
        self.context = cl.Context([device])
        self.queue = cl.CommandQueue(self.context)
        self.nothing = self.buffer(4)
        self.program = cache(self._build)
        self.used = 0  # bytes of values and weights
        self._providers = make_providers(self)

    def alloc(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        tag = v1.HOST_DTYPES[dtype]
        size = max(prod(shape) * tag.itemsize, 1)
        self.used += size
        if self.is_host:  # untouched pages take no memory, so a large pool costs only what is used of it
            pages = np.zeros(size + 64, np.uint8)
            own = pages[-pages.ctypes.data % 64 :][:size]
            return Tensor(cl.Buffer(self.context, _WRITABLE | cl.mem_flags.USE_HOST_PTR, hostbuf=own), shape, tag)
        tensor = Tensor(self.buffer(size), shape, tag)
        cl.enqueue_fill_buffer(self.queue, tensor.buffer, np.zeros(1, np.uint8), 0, size)
        return tensor

    def free(self, value: Tensor) -> None:
        self.used -= max(value.nbytes, 1)
        value.buffer.release()

    def copy_in(self, array: v1.Array) -> Tensor:
        whole = np.array(array, order="C")
        self.used += max(whole.nbytes, 1)
        flags = _WRITABLE | cl.mem_flags.COPY_HOST_PTR
        buffer = cl.Buffer(self.context, flags, hostbuf=whole) if whole.size else self.buffer(1)
        return Tensor(buffer, whole.shape, whole.dtype)

    def copy_out(self, value: Tensor) -> v1.Array:
        array = np.empty(value.shape, value.dtype)
        if array.size:
            cl.enqueue_copy(self.queue, array, value.buffer)
        return array

    def fence(self) -> None:
        self.queue.finish()

    def memory_info(self) -> v1.MemoryInfo:
        total = self.cl.global_mem_size
        free = min(total - self.used, v1.available_memory().free if self.is_host else total)
        return v1.MemoryInfo(total, max(free, 1))

    def describe(self) -> v1.DeviceInfo:
        return v1.DeviceInfo(
            name=f"{self.cl.name.strip()} ({self.cl.max_compute_units} units)",
            backend="opencl",
            alignment=self.cl.mem_base_addr_align // 8,
            largest_allocation=self.cl.max_mem_alloc_size,
            kv_layouts=(ROWS,),
            details={"platform": self.cl.platform.name.strip(), "driver": self.cl.driver_version.strip()},
        )

    def session(self, plan: v1.Plan) -> v1.Session:
        return v1.StepSession(self, plan)

    def providers(self) -> Mapping[str, Sequence[v1.Provider]]:
        return self._providers

    def compile(self, segment: v1.Segment, limits: v1.Limits, states: Mapping[str, Any]) -> v1.StepFn | None:
        from .providers import Step

        # References that are forced through the device are left to it.
        ours = all(bound.provider.packer == "opencl" for bound in segment.calls)
        return Step(self, segment, limits, states) if ours else None

    def export_blocks(self, state: Tensor, blocks: v1.Array) -> v1.Array:
        rows = np.empty((len(blocks), *state.shape[1:]), state.dtype)
        for row, block in zip(rows, blocks, strict=True):
            cl.enqueue_copy(self.queue, row, state.buffer, src_offset=int(block) * row.nbytes)
        return rows

    def import_blocks(self, state: Tensor, blocks: v1.Array, rows: v1.Array) -> Tensor:
        for row, block in zip(np.ascontiguousarray(rows), blocks, strict=True):
            cl.enqueue_copy(self.queue, state.buffer, row, dst_offset=int(block) * row.nbytes)
        return state

    def buffer(self, size: int) -> cl.Buffer:
        if size > self.cl.max_mem_alloc_size:
            raise MemoryError(f"{size} bytes in one piece are more than this device allocates.")
        return cl.Buffer(self.context, _WRITABLE, max(size, 1))

    def lanes_for(self, *widths: int) -> int:
        """The device's lanes where all widths are multiples of them, or 1."""
        return 1 if any(width % self.lanes for width in widths) else self.lanes

    def _build(self, *names: str, **macros: int | str) -> Any:
        """Kernel files as one program; FILE:N is a file with N for ROWS."""
        source = ""
        for name in ("common", *names):
            file, _, rows = name.partition(":")
            text = (files("engine_opencl") / "kernels" / f"{file}.cl").read_text()
            source += f"#undef ROWS\n#define ROWS {rows}\n{text}" if rows else text
        options = [f"-D{name}={value}" for name, value in {"LANES": self.lanes, **macros, "WG": self.group}.items()]
        if self.cl.single_fp_config & cl.device_fp_config.CORRECTLY_ROUNDED_DIVIDE_SQRT:
            options.append("-cl-fp32-correctly-rounded-divide-sqrt")
        return cl.Program(self.context, source).build(options, [self.cl])
