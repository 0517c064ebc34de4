"""A segment as a list of kernel launches: buffers planned once from liveness, arguments set once where they stay."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import pyopencl as cl

from engine.backend.v1 import HOST_DTYPES, BoundCall, Dims, Frame, Limits, Segment, StepFn, Value

from .device import Tensor

if TYPE_CHECKING:
    from .device import OpenCLDevice

Sizes = Callable[[Dims], tuple[int, ...]]


@dataclass(frozen=True)
class PerStep:
    """A number that follows from the step's counts."""

    of: Callable[[Dims], int]


@dataclass
class Launch:
    """A kernel with its arguments: values, buffers, local memory, numbers, and numbers of the step. It is left out of steps
    whose ``sizes`` have a 0."""

    kernel: cl.Kernel
    sizes: Sizes
    local: tuple[int, ...] | None
    args: tuple[Any, ...]


@dataclass
class Lowering:
    """One call on its way into launches."""

    device: OpenCLDevice
    bound: BoundCall
    states: Mapping[str, Tensor]
    launches: list[Launch] = field(default_factory=list)

    def weight(self, name: str) -> Any:
        """The handle of a weight, or a buffer that nothing reads where the call has none of that name."""
        return self.bound.weights[name].handle if name in self.bound.weights else self.device.nothing

    def input(self, name: str) -> Any:
        return self.bound.call.inputs.get(name, self.device.nothing)

    def state(self, name: str) -> Any:
        states = self.bound.call.states
        return self.states[states[name]].buffer if name in states else self.device.nothing

    def launch(self, program: cl.Program, name: str, sizes: Sizes, local: tuple[int, ...] | None, *args: Any) -> None:
        self.launches.append(Launch(cl.Kernel(program, name), sizes, local, args))

    def rows(self, value: Value) -> Callable[[Dims], int]:
        """How many rows a value has in a step."""
        return lambda dims: dims.of(value.shape[:1])[0]


def compile_segment(
    device: OpenCLDevice, segment: Segment, limits: Limits, states: Mapping[str, Any]
) -> StepFn:
    """An fn that enqueues the segment's launches."""
    calls: list[tuple[BoundCall, list[Launch]]] = []
    for bound in segment.calls:
        low = Lowering(device, bound, states)
        provider: Any = bound.provider
        provider.lower(low)
        calls.append((bound, low.launches))
    buffers = _plan(device, segment, limits)
    return _Step(device, segment, [launch for _, launches in calls for launch in launches], buffers)


def _plan(device: OpenCLDevice, segment: Segment, limits: Limits) -> dict[int, cl.Buffer]:
    """A buffer for each value that the segment makes, large enough for every step; those no longer read are used again."""
    kept = {value.id for value in segment.outputs}
    last: dict[int, int] = {}
    for n, bound in enumerate(segment.calls):
        last |= {value.id: n for value in (*bound.call.inputs.values(), *bound.call.outputs)}
    buffers: dict[int, cl.Buffer] = {}
    idle: list[cl.Buffer] = []
    for n, bound in enumerate(segment.calls):
        for value in bound.call.outputs:
            size = prod(limits.dims.of(value.shape)) * HOST_DTYPES[value.dtype].itemsize
            fits = [buffer for buffer in idle if size <= buffer.size <= 4 * size]
            buffer = min(fits, key=lambda one: one.size) if fits else device.buffer(size)
            if fits:
                idle.remove(buffer)
            buffers[value.id] = buffer
        used = {value.id for value in (*bound.call.inputs.values(), *bound.call.outputs)}
        idle += [buffers[key] for key in used if key in buffers and last[key] == n and key not in kept]
    return buffers


class _Step:
    """The fn of a compiled segment."""

    def __init__(
        self, device: OpenCLDevice, segment: Segment, launches: list[Launch], buffers: Mapping[int, cl.Buffer]
    ) -> None:
        self._queue = device.queue
        self._buffers = buffers  # kernels hold no reference to their arguments
        self._launches = launches
        self._outputs = [(v.id, buffers[v.id], v.shape, HOST_DTYPES[v.dtype]) for v in segment.outputs]
        self._entering: list[tuple[cl.Kernel, int, int]] = []
        self._per_step: list[tuple[cl.Kernel, int, PerStep]] = []
        self._dims: Dims | None = None
        self._ready: list[tuple[cl.Kernel, tuple[int, ...], tuple[int, ...] | None]] = []
        for launch in launches:
            for n, arg in enumerate(launch.args):
                if isinstance(arg, PerStep):
                    self._per_step.append((launch.kernel, n, arg))
                elif isinstance(arg, Value) and arg.id not in buffers:
                    self._entering.append((launch.kernel, n, arg.id))
                else:
                    launch.kernel.set_arg(n, buffers[arg.id] if isinstance(arg, Value) else _argument(arg))

    def __call__(self, frame: Frame) -> None:
        if frame.dims != self._dims:
            self._fit(frame.dims)
        for kernel, n, key in self._entering:
            kernel.set_arg(n, frame.values[key].buffer)
        for kernel, sizes, local in self._ready:
            cl.enqueue_nd_range_kernel(self._queue, kernel, sizes, local)
        self._queue.flush()
        for key, buffer, shape, dtype in self._outputs:
            frame.values[key] = Tensor(buffer, frame.dims.of(shape), dtype)

    def _fit(self, dims: Dims) -> None:
        """Numbers and sizes of steps with these counts."""
        for kernel, n, number in self._per_step:
            kernel.set_arg(n, np.int32(number.of(dims)))
        sized = [(one.kernel, one.sizes(dims), one.local) for one in self._launches]
        self._ready = [one for one in sized if all(one[1])]
        self._dims = dims


def _argument(arg: Any) -> Any:
    """Numbers as the kernels take them."""
    if isinstance(arg, bool | int):
        return np.int32(arg)
    return np.float32(arg) if isinstance(arg, float) else arg
