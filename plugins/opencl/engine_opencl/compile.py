"""A segment as a list of kernel launches: buffers planned once from liveness, arguments set once where they stay."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any, NamedTuple

import numpy as np
import pyopencl as cl

from engine.backend.v1 import HOST_DTYPES, Dims, Frame, Limits, Segment, Value

from .device import OpenCLDevice, Tensor

PerStep = Callable[[Dims], Any]


class Launch(NamedTuple):
    """A kernel with its arguments: values, buffers, local memory, numbers, and what gives a number of a step's counts. It
    is left out of steps whose sizes have a 0."""

    kernel: cl.Kernel
    sizes: PerStep
    local: tuple[int, ...]
    args: tuple[Any, ...]


class Step:
    """The fn of a segment: it enqueues the launches. Kernels hold no reference to their arguments, so this does."""

    def __init__(self, device: OpenCLDevice, segment: Segment, limits: Limits, states: Mapping[str, Any]) -> None:
        self._queue = device.queue
        self._launches: list[Launch] = []
        for bound in segment.calls:
            provider: Any = bound.provider
            self._launches += provider.lower(bound, states)
        self._buffers = _plan(device, segment, limits)
        self._outputs = segment.outputs
        self._entering: list[tuple[cl.Kernel, int, int]] = []
        self._per_step: list[tuple[cl.Kernel, int, PerStep]] = []
        self._dims: Dims | None = None
        self._ready: list[tuple[cl.Kernel, tuple[int, ...], tuple[int, ...]]] = []
        for launch in self._launches:
            for n, arg in enumerate(launch.args):
                if callable(arg):
                    self._per_step.append((launch.kernel, n, arg))
                elif isinstance(arg, Value) and arg.id not in self._buffers:
                    self._entering.append((launch.kernel, n, arg.id))
                else:
                    launch.kernel.set_arg(n, self._buffers[arg.id] if isinstance(arg, Value) else _number(arg))

    def __call__(self, frame: Frame) -> None:
        if frame.dims != self._dims:
            self._dims = frame.dims
            for kernel, n, number in self._per_step:
                kernel.set_arg(n, np.int32(number(frame.dims)))
            sized = [(one.kernel, one.sizes(frame.dims), one.local) for one in self._launches]
            self._ready = [one for one in sized if all(one[1])]
        for kernel, n, key in self._entering:
            kernel.set_arg(n, frame.values[key].buffer)
        for kernel, sizes, local in self._ready:
            cl.enqueue_nd_range_kernel(self._queue, kernel, sizes, local)
        self._queue.flush()
        for value in self._outputs:
            shape, dtype = frame.dims.of(value.shape), HOST_DTYPES[value.dtype]
            frame.values[value.id] = Tensor(self._buffers[value.id], shape, dtype)


def _number(arg: Any) -> Any:
    """Numbers as the kernels take them."""
    return np.int32(arg) if isinstance(arg, int) else np.float32(arg) if isinstance(arg, float) else arg


def _plan(device: OpenCLDevice, segment: Segment, limits: Limits) -> dict[int, cl.Buffer]:
    """A buffer for each value that the segment makes, large enough for every step; those no longer read are used again."""
    used = [[value.id for value in (*b.call.inputs.values(), *b.call.outputs)] for b in segment.calls]
    last = {key: n for n, keys in enumerate(used) for key in keys}
    last |= {value.id: len(used) for value in segment.outputs}
    buffers: dict[int, cl.Buffer] = {}
    idle: list[cl.Buffer] = []
    for n, bound in enumerate(segment.calls):
        for value in bound.call.outputs:
            size = prod(limits.dims.of(value.shape)) * HOST_DTYPES[value.dtype].itemsize
            fits = [buffer for buffer in idle if size <= buffer.size <= 4 * size]
            buffers[value.id] = min(fits, key=lambda one: one.size) if fits else device.buffer(size)
            idle = [buffer for buffer in idle if buffer is not buffers[value.id]]
        idle += [buffers[key] for key in set(used[n]) if key in buffers and last[key] == n]
    return buffers
