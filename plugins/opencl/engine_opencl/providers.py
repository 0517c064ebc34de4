"""Which ops the device offers, with which features, and how each call becomes launches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import pyopencl as cl

from engine.backend.v1 import BoundCall, Call, Dims, Frame, Limits, Packed, Segment, StepFn, Value, WeightRef

from .compile import Launch, PerStep, Step
from .device import ROWS, OpenCLDevice, Tensor
from .formats import FORMATS
from .weights import PANEL, pack

KINDS = ("silu", "gelu", "gelu_tanh", "relu", "clamped_swiglu")
MEMBERS = 3
"""Matrices that a launch takes."""
ITEMS = 64
"""Work-items of a group where none waits for another."""
KV = {"float32": "float", "float16": "half", "uint16": "ushort", "int8": "char"}
FEATURES = {
    "embed": "scale",
    "linear": "bias residual quantized_activation input_scale",
    "linear_group": "bias quantized_activation input_scale",
    "rms_norm": "head_dim weight_offset",
    "layer_norm": "bias head_dim",
    "add_rms_norm": "weight_offset",
    "gated_act": "up kind alpha limit",
    "add": "",
    "gather_rows": "",
    "rope": "rotary_dim interleaved scale",
    "kv_write": "k_scale v_scale latent",
    "rope_kv_write": "k_scale v_scale q_norm k_norm rotary_dim interleaved scale eps weight_offset",
    "kv_copy": "",
    "attention": "k_scale v_scale window softcap v_head_dim sinks contiguous",
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

    def supports(self, call: Call) -> str | None:
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

    def wants(self, call: Call) -> Mapping[str, str]:
        return {}

    def pack(self, ref: WeightRef, uses: Sequence[str], progress: Callable[[int], None]) -> Packed:
        return pack(self.device, ref, uses, progress)

    def bind(self, bound: BoundCall, limits: Limits) -> StepFn:
        """The call as a segment of its own, made when the states are first seen."""
        inputs = tuple({value.id: value for value in bound.call.inputs.values()}.values())
        segment = Segment(bound.call.op, "device", (bound,), inputs, bound.call.outputs)
        made: list[StepFn] = []

        def run(frame: Frame) -> None:
            if not made:
                made.append(Step(self.device, segment, limits, frame.states))
            made[0](frame)

        return run

    def lower(self, bound: BoundCall, states: Mapping[str, Tensor]) -> list[Launch]:
        low = Lowering(self.device, bound, states)
        getattr(low, self.op)()
        return low.launches


def make_providers(device: OpenCLDevice) -> dict[str, tuple[OpenCLProvider, ...]]:
    layouts = {op: frozenset({ROWS.name} if "kv" in op or op == "attention" else ()) for op in FEATURES}
    words = {op: frozenset(features.split()) for op, features in FEATURES.items()}
    return {op: (OpenCLProvider(op, f"opencl/{op}", device, words[op], layouts[op]),) for op in FEATURES}


def _local_bytes(call: Call, rows: int) -> int:
    """Local memory for ``rows`` rows of activations, of 16 or 32 bits, with scales and sums."""
    fours = any(FORMATS[ref.format].bits == 4 for ref in call.weights.values() if ref.format in FORMATS)
    return rows * int(call.inputs["x"].shape[-1]) * (9 if fours else 17) // 4 + 8


class Lowering:
    """One call on its way into launches, by the method of its op. What a call lacks is a buffer that nothing reads."""

    def __init__(self, device: OpenCLDevice, bound: BoundCall, states: Mapping[str, Tensor]) -> None:
        self.device, self.bound, self.call, self.states = device, bound, bound.call, states
        self.launches: list[Launch] = []
        self.y: Any = (*bound.call.outputs, device.nothing)[0]

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

    def rows(self, value: Value) -> PerStep:
        return lambda dims: dims.of(value.shape[:1])[0]

    def launch(self, program: cl.Program, name: str, sizes: PerStep, local: tuple[int, ...], *args: Any) -> None:
        self.launches.append(Launch(cl.Kernel(program, name), sizes, local, args))

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

    def _grid(self, rows: int, several: int, total: int, dims: Dims) -> tuple[int, int]:
        """Groups by rows and by columns; none where the other kernel takes the step."""
        count = self.rows(self.y)(dims)
        tiles = -(-count // rows) if rows == (several if count > 1 else 1) else 0
        return self.device.group * tiles, -(-total // self._columns(rows, several, total, dims))

    def _columns(self, rows: int, several: int, total: int, dims: Dims) -> int:
        """Of a group: on a processor so many that each core has a few groups, of which each has a part of the matrix that
        stays in its cache while rows go by; elsewhere one a work-item."""
        tiles, units = -(-self.rows(self.y)(dims) // rows), 8 * self.device.cl.max_compute_units
        panels = -(-total * (tiles or 1) // (PANEL * units))
        return PANEL * (panels if tiles <= 1 else min(panels, 32)) if self.device.group == 1 else self.device.group

    def norm(self) -> None:
        width, rows, layer = int(self.y.shape[-1]), self.rows(self.y), self.call.op == "layer_norm"
        size = width if self.call.op == "add_rms_norm" else self.call.attr("head_dim") or width
        slices, group = width // size, self.device.group
        flags = ("residual" in self.call.inputs) | 2 * layer | 4 * ("bias" in self.call.weights) | 8 * layer
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
        inputs = (
            *self.inputs("q", "seq_starts", "query_offsets", "page_table"),
            *self.weights("sinks"),
            *self.caches(),
        )
        local = (cl.LocalMemory(4 * size) for size in (width, values, 64, 64))
        counts = (lambda dims: dims.S, lambda dims: dims.P)
        args = (*inputs, self.y, *local, *counts, *numbers, values, flags, *self.floats("scale", "softcap"))
        group, heads = self.device.group, numbers[0]
        program = self.cache_program(self.device.lanes_for(width, values))
        self.launch(program, "attention", lambda dims: (heads * group, dims.T), (group, 1), *args)
