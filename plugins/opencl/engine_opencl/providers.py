"""Which ops the device offers, how each call becomes launches of kernels, and how a segment runs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import numpy as np
import pyopencl as cl

from engine.backend import v1

from .device import ROWS, OpenCLDevice, Tensor
from .weights import FORMATS, PANEL, pack

PerStep = Callable[[v1.Dims], Any]
Launch = tuple[cl.Kernel, PerStep, tuple[int, ...], tuple[Any, ...]]  # with its sizes, group, arguments
KINDS = ("silu", "gelu", "gelu_tanh", "relu", "clamped_swiglu", "sigmoid", "identity")
MEMBERS = 3  # matrices that a launch takes
ITEMS = 64  # work-items of a group where none waits for another
NUMBERS: dict[type, Any] = {bool: np.int32, int: np.int32, float: np.float32}  # as kernels take them
KV = {"float32": "float", "float16": "half", "uint16": "ushort", "int8": "char"}
FEATURES = {
    "embed": "scale",
    "linear": "bias residual quantized_activation input_scale",
    "linear_group": "bias quantized_activation input_scale",
    "rms_norm": "head_dim wide_weight weight_offset",
    "layer_norm": "bias head_dim",
    "add_rms_norm": "weight_offset",
    "gated_act": "up kind alpha limit",
    "rope": "rotary_dim interleaved scale",
    "kv_write": "k_scale v_scale latent",
    "rope_kv_write": "k_scale v_scale q_norm k_norm rotary_dim interleaved scale eps weight_offset",
    **dict.fromkeys(("add", "gather_rows", "kv_copy", "gated_delta", "ssm_scan"), ""),
    "causal_conv": "act bias",
    "attention": "k_scale v_scale window softcap v_head_dim sinks contiguous causal",
}


@dataclass(frozen=True)
class OpenCLProvider:
    """One op. Rows share no reduction, so it is batch-invariant."""

    op: str
    name: str
    device: OpenCLDevice
    features: frozenset[str]
    layouts: frozenset[str]
    packer: str = "opencl"
    batch_invariant: bool = True

    def supports(self, call: v1.Call) -> str | None:
        formats = {ref.format for name, ref in call.weights.items() if name.startswith("weight")}
        asked, quantized = call.attr("quantized_activation"), formats <= FORMATS.keys()
        if self.op.startswith("linear") and (len(formats) > 1 or len(call.outputs) > MEMBERS):
            return f"a launch takes at most {MEMBERS} matrices of one format."
        if asked == ("forbidden" if quantized else "required"):
            return f"8-bit activations are {asked} here, and OpenCL's kernels for {min(formats)} do the contrary."
        if self.op.startswith("linear") and _local_bytes(call, 1) > self.device.cl.local_mem_size:
            return f"a row of {call.inputs['x'].shape[-1]} values is too long for this device's local memory."
        if self.op == "gated_act" and call.attr("kind") not in KINDS:
            return f"OpenCL does not know the activation {call.attr('kind')}."
        return None

    def wants(self, call: v1.Call) -> Mapping[str, str]:
        return {}

    def pack(self, ref: v1.WeightRef, uses: Sequence[str], progress: Callable[[int], None]) -> v1.Packed:
        return pack(self.device, ref, uses, progress)

    def bind(self, bound: v1.BoundCall, limits: v1.Limits) -> v1.StepFn:
        """The call as a segment of its own, made when the states are first seen."""
        segment = v1.Segment(bound.call.op, "device", (bound,), tuple(bound.call.inputs.values()), bound.call.outputs)
        made: list[v1.StepFn] = []

        def run(frame: v1.Frame) -> None:
            if not made:
                made.append(Step(self.device, segment, limits, frame.states))
            made[0](frame)

        return run


def make_providers(device: OpenCLDevice) -> dict[str, tuple[OpenCLProvider, ...]]:
    layouts = {op: frozenset({ROWS.name} if "kv" in op or op == "attention" else ()) for op in FEATURES}
    words = {op: frozenset(features.split()) for op, features in FEATURES.items()}
    return {op: (OpenCLProvider(op, f"opencl/{op}", device, words[op], layouts[op]),) for op in FEATURES}


def _local_bytes(call: v1.Call, rows: int) -> int:
    """Local memory for ``rows`` rows of activations, of 16 or 32 bits, with scales and sums."""
    fours = any(FORMATS[ref.format].bits == 4 for ref in call.weights.values() if ref.format in FORMATS)
    return rows * int(call.inputs["x"].shape[-1]) * (9 if fours else 17) // 4 + 8


class Lowering:
    """One call's launches, made by the method of its op. What a call lacks is a buffer that nothing reads."""

    def __init__(self, device: OpenCLDevice, bound: v1.BoundCall, states: Mapping[str, Tensor]) -> None:
        self.device, self.bound, self.call, self.states = device, bound, bound.call, states
        self.launches: list[Launch] = []
        self.y: Any = (*bound.call.outputs, device.nothing)[0]
        getattr(self, bound.call.op)()

    def weights(self, *names: str) -> list[Any]:
        found = self.bound.weights
        return [found[name].handle if name in found else self.device.nothing for name in names]

    def inputs(self, *names: str) -> list[Any]:
        return [self.call.inputs.get(name, self.device.nothing) for name in names]

    def caches(self) -> list[Any]:
        names = [self.call.states.get(kind, "") for kind in ("k", "v", "k_scale", "v_scale")]
        return [self.states[name].buffer if name else self.device.nothing for name in names]

    def floats(self, *names: str) -> list[float]:
        return [float(self.call.attr(name) or 0) for name in names]

    def rows(self, value: v1.Value) -> PerStep:
        return lambda dims: dims.of(value.shape[:1])[0]

    def launch(self, program: cl.Program, name: str, sizes: PerStep, local: tuple[int, ...], *args: Any) -> None:
        self.launches.append((cl.Kernel(program, name), sizes, local, args))

    def embed(self) -> None:
        [matrix], rows, width = self.weights("weight"), self.rows(self.y), -(-int(self.y.shape[-1]) // ITEMS) * ITEMS
        args = (matrix.buffer, *self.inputs("ids"), self.y, matrix.n, matrix.k, *self.floats("scale"))
        self.launch(matrix.program(self.device), "embed", lambda dims: (width, rows(dims)), (ITEMS, 1), *args)

    def linear(self) -> None:
        """A kernel for steps of one row, and one for all others: which computes a row makes no difference to it."""
        names = ["", ".1", ".2"] if self.call.op == "linear" else [".0", ".1", ".2"]
        matrices, biases = ([*self.weights(*(kind + name for name in names))] for kind in ("weight", "bias"))
        outputs = [*self.call.outputs, *[self.device.nothing] * (MEMBERS - len(self.call.outputs))]
        buffers, widths = [getattr(one, "buffer", one) for one in matrices], [getattr(one, "n", 0) for one in matrices]
        matrix, given = matrices[0], [bias is not self.device.nothing for bias in biases]
        added = sum(one << 2 * m for m, one in enumerate(given)) + 2 * ("residual" in self.call.inputs)
        several = 4 if _local_bytes(self.call, 4) <= self.device.cl.local_mem_size else 1
        program, total = matrix.program(self.device), sum(-(-n // PANEL) * PANEL for n in widths)
        for rows in sorted({1, several}):
            how, area = (rows, several, total), rows * matrix.k
            sizes = (area * (2 if matrix.macros["BITS"] == 4 else 4), area // 8 or 4, area // 8 or 4)
            values = (*self.inputs("x", "residual"), *buffers, *biases, *outputs, *map(cl.LocalMemory, sizes))
            numbers = (*widths, matrix.k, added, *self.floats("input_scale"), self.rows(self.y))
            args = (*values, *numbers, partial(self._columns, *how))
            self.launch(program, f"linear_{rows}", partial(self._grid, *how), (self.device.group, 1), *args)

    linear_group = linear

    def _grid(self, rows: int, several: int, total: int, dims: v1.Dims) -> tuple[int, int]:
        """Groups by rows and by columns; none where the other kernel takes the step."""
        count = self.rows(self.y)(dims)
        tiles = -(-count // rows) if rows == (several if count > 1 else 1) else 0
        return self.device.group * tiles, -(-total // self._columns(rows, several, total, dims))

    def _columns(self, rows: int, several: int, total: int, dims: v1.Dims) -> int:
        """Of a group: on a processor so many that each core has a few groups, of which each has a part of the matrix that
        stays in its cache while rows go by; elsewhere one a work-item."""
        tiles, units = -(-self.rows(self.y)(dims) // rows), 8 * self.device.cl.max_compute_units
        panels = -(-total * (tiles or 1) // (PANEL * units))
        return PANEL * (panels if tiles <= 1 else min(panels, 32)) if self.device.group == 1 else self.device.group

    def norm(self) -> None:
        width, rows, layer = int(self.y.shape[-1]), self.rows(self.y), self.call.op == "layer_norm"
        size = width if self.call.op == "add_rms_norm" else self.call.attr("head_dim") or width
        slices, group = width // size, self.device.group
        wide = layer or (self.call.op == "rms_norm" and self.call.attr("wide_weight"))
        flags = ("residual" in self.call.inputs) | 2 * layer | 4 * ("bias" in self.call.weights) | 8 * wide
        values = (*self.inputs("x", "residual"), *self.weights("weight", "bias"), self.y, self.call.outputs[-1])
        numbers = (size, slices, flags, *self.floats("eps"), *([0.0] if layer else self.floats("weight_offset")))
        program = self.device.program("rows", LANES=self.device.lanes_for(size))
        self.launch(program, "norm", lambda dims: (rows(dims) * slices * group,), (group,), *values, *numbers)

    rms_norm = layer_norm = add_rms_norm = norm

    def each(self, *args: Any) -> None:
        """The kernel of the op's name, with a work-item for each LANES numbers of the output."""
        lanes, shape = self.device.lanes_for(int(self.y.shape[-1])), self.y.shape
        count: PerStep = lambda dims: prod(dims.of(shape)) // lanes  # noqa: E731
        grid: PerStep = lambda dims: (-(-count(dims) // ITEMS) * ITEMS,)  # noqa: E731
        self.launch(self.device.program("rows", LANES=lanes), self.call.op, grid, (ITEMS,), self.y, count, *args)

    def gated_act(self) -> None:
        numbers = (KINDS.index(self.call.attr("kind")), "up" in self.call.inputs, *self.floats("alpha", "limit"))
        self.each(*self.inputs("gate", "up"), *numbers)

    def add(self) -> None:
        self.each(*self.inputs("a", "b"))

    def gather_rows(self) -> None:
        self.each(*self.inputs("x", "rows"), int(self.y.shape[-1]))

    def rope_kv_write(self) -> None:
        """One kernel for three ops: heads of q are turned, those of k and v turned and written."""
        call, turns, writes = self.call, bool(self.call.outputs), bool(self.call.states)
        width, heads, kv_heads = call.attr("head_dim"), turns and call.attr("heads"), writes and call.attr("kv_heads")
        count = heads + kv_heads * sum(name in call.inputs for name in ("new_k", "new_v"))
        rows = self.rows(call.inputs["positions" if turns else "kv_slots"])
        rotary = turns and (call.attr("rotary_dim") or width)
        flags = ("q_norm" in call.weights) | 2 * bool(call.attr("interleaved"))
        lanes = 1 if flags & 2 else self.device.lanes_for(width, rotary // 2)
        values = (*self.inputs("q" if writes else "x", "new_k", "new_v"), self.y, *self.inputs("positions", "kv_slots"))
        states = (*self.weights("inv_freq", "q_norm", "k_norm"), *self.caches(), cl.LocalMemory(4 * width))
        numbers = (heads, kv_heads, width, rotary, flags, *self.floats("scale", "eps", "weight_offset"))
        grid: PerStep = lambda dims: (count, rows(dims))  # noqa: E731
        self.launch(self.cache_program(lanes), "turn_and_write", grid, (1, 1), *values, *states, *numbers)

    rope = kv_write = rope_kv_write

    def cache_program(self, lanes: int) -> Any:
        name = self.call.states.get("k")
        return self.device.program("cache", LANES=lanes, KV=KV[str(self.states[name].dtype)] if name else "float")

    def kv_copy(self) -> None:
        [copies], program = self.inputs("block_copies"), self.device.program("rows")
        count = self.rows(copies)
        for state in map(self.states.__getitem__, self.call.states.values()):
            size = state.nbytes // state.shape[0]
            items = -(-size // ITEMS) * ITEMS
            grid = partial(lambda items, dims: (items * (count(dims) > 0),), items)
            self.launch(program, "kv_copy", grid, (ITEMS,), state.buffer, copies, count, size)

    def attention(self) -> None:
        numbers = [self.call.attr(name) for name in ("heads", "kv_heads", "head_dim", "block_size", "window")]
        width, values = numbers[2], self.call.attr("v_head_dim") or numbers[2]
        flags = ("sinks" in self.call.weights) | 2 * bool(self.call.attr("v_head_dim"))
        flags |= 4 * (not self.call.attr("causal"))
        inputs = (*self.inputs("q", "seq_starts", "query_offsets", "page_table"), *self.weights("sinks"))
        local = (cl.LocalMemory(4 * size) for size in (width, values, 64, 64))
        counts = (lambda dims: dims.S, lambda dims: dims.P)
        numbers += [values, flags, *self.floats("scale", "softcap")]
        args = (*inputs, *self.caches(), self.y, *local, *counts, *numbers)
        group, heads = self.device.group, numbers[0]
        program = self.cache_program(self.device.lanes_for(width, values))
        self.launch(program, "attention", lambda dims: (heads * group, dims.T), (group, 1), *args)

    def causal_conv(self) -> None:
        columns, taps = self.call.weights["weight"].shape
        lanes = self.device.lanes_for(columns)
        items = -(-columns // lanes // ITEMS) * ITEMS
        program = self.device.program("recurrent", LANES=lanes, TAPS=taps)
        sizes = (columns, int(self.call.attr("act") == "silu"), int("bias" in self.call.weights))
        self.remembering(program, "tail", ("x",), ("weight", "bias"), (items,), (ITEMS, 1), *sizes)

    def gated_delta(self) -> None:
        names = ("key_heads", "value_heads", "key_dim", "value_dim")
        self.heads("value_heads", ("qkv", "decay", "beta"), ("rate", "bias"), *names)

    def ssm_scan(self) -> None:
        names = ("heads", "groups", "state_dim", "head_dim")
        self.heads("heads", ("xbc", "dt"), ("rate", "bias", "skip"), *names)

    def heads(self, count: str, inputs: tuple[str, ...], weights: tuple[str, ...], *names: str) -> None:
        """A group for each head of a sequence; the last of the sizes is that of a head's columns."""
        sizes, group = [self.call.attr(name) for name in names], self.device.group
        program = self.device.program("recurrent", LANES=self.device.lanes_for(sizes[-1]), TAPS=1)
        grid = (self.call.attr(count) * group,)
        self.remembering(program, "memory", inputs, weights, grid, (group, 1), *sizes)

    def remembering(
        self,
        program: cl.Program,
        state: str,
        inputs: tuple[str, ...],
        weights: tuple[str, ...],
        grid: tuple[int, ...],
        group: tuple[int, int],
        *sizes: int,
    ) -> None:
        """A kernel that goes along each sequence."""
        values = (*self.inputs(*inputs, "seq_starts", "query_offsets", "page_table"), *self.weights(*weights))
        memory, width = self.states[self.call.states[state]].buffer, lambda dims: dims.P
        args = (*values, memory, self.y, width, *sizes, self.call.attr("block_size"))
        self.launch(program, self.call.op, lambda dims: (*grid, dims.S), group, *args)


class Step:
    """The fn of a segment. Arguments that stay are set once; kernels hold no reference to them, so this does."""

    def __init__(self, device: OpenCLDevice, segment: v1.Segment, limits: v1.Limits, states: Mapping[str, Any]) -> None:
        self._queue = device.queue
        self._launches = [one for bound in segment.calls for one in Lowering(device, bound, states).launches]
        self._buffers = _plan(device, segment, limits)
        self._outputs = segment.outputs
        self._entering: list[tuple[cl.Kernel, int, int]] = []
        self._per_step: list[tuple[cl.Kernel, int, PerStep]] = []
        self._dims: v1.Dims | None = None
        self._ready: list[tuple[cl.Kernel, tuple[int, ...], tuple[int, ...]]] = []
        for kernel, _, _, args in self._launches:
            for n, arg in enumerate(args):
                if callable(arg):
                    self._per_step.append((kernel, n, arg))
                elif isinstance(arg, v1.Value) and arg.id not in self._buffers:
                    self._entering.append((kernel, n, arg.id))
                else:
                    own = self._buffers[arg.id] if isinstance(arg, v1.Value) else arg
                    kernel.set_arg(n, NUMBERS[type(own)](own) if type(own) in NUMBERS else own)

    def __call__(self, frame: v1.Frame) -> None:
        if frame.dims != self._dims:
            self._dims = frame.dims
            for kernel, n, number in self._per_step:
                kernel.set_arg(n, np.int32(number(frame.dims)))
            sized = [(kernel, sizes(frame.dims), local) for kernel, sizes, local, _ in self._launches]
            self._ready = [one for one in sized if all(one[1])]
        for kernel, n, key in self._entering:
            kernel.set_arg(n, frame.values[key].buffer)
        for kernel, sizes, local in self._ready:
            cl.enqueue_nd_range_kernel(self._queue, kernel, sizes, local)
        self._queue.flush()
        for value in self._outputs:
            shape, dtype = frame.dims.of(value.shape), v1.HOST_DTYPES[value.dtype]
            frame.values[value.id] = Tensor(self._buffers[value.id], shape, dtype)


def _plan(device: OpenCLDevice, segment: v1.Segment, limits: v1.Limits) -> dict[int, cl.Buffer]:
    """A buffer for each value that the segment makes, large enough for every step; those no longer read are used again."""
    used = [[value.id for value in (*b.call.inputs.values(), *b.call.outputs)] for b in segment.calls]
    last = {key: n for n, keys in enumerate(used) for key in keys}
    last |= {value.id: len(used) for value in segment.outputs}
    buffers: dict[int, cl.Buffer] = {}
    idle: list[cl.Buffer] = []
    for n, bound in enumerate(segment.calls):
        for value in bound.call.outputs:
            size = prod(limits.dims.of(value.shape)) * v1.HOST_DTYPES[value.dtype].itemsize
            fits = [buffer for buffer in idle if size <= buffer.size <= 4 * size]
            buffers[value.id] = min(fits, key=lambda one: one.size) if fits else device.buffer(size)
            idle = [buffer for buffer in idle if buffer is not buffers[value.id]]
        idle += [buffers[key] for key in set(used[n]) if key in buffers and last[key] == n]
    return buffers
