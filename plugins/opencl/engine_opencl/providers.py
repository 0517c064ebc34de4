"""Which ops the device offers, with which features, and how each call becomes launches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import pyopencl as cl

from engine.backend.v1 import BoundCall, Call, Dims, Frame, Limits, Packed, Provider, Segment, StepFn, WeightRef

from .compile import Lowering, PerStep, Step
from .device import ROWS
from .formats import FORMATS
from .weights import PANEL, pack

if TYPE_CHECKING:
    from .device import OpenCLDevice

KINDS = ("silu", "gelu", "gelu_tanh", "relu", "clamped_swiglu")
MEMBERS = 3
"""Matrices that a launch takes."""
ITEMS = 64
"""Work-items of a group where none waits for another."""
CACHES = {"float32": {}, "float16": {"KV_F16": 1}, "uint16": {"KV_BF16": 1}, "int8": {"KV_INT8": 1}}


@dataclass(frozen=True)
class OpenCLProvider:
    """One op. ``lower`` appends its launches; rows share no reduction, so it is batch-invariant."""

    op: str
    device: OpenCLDevice
    lower: Callable[[Lowering], None]
    features: frozenset[str]
    layouts: frozenset[str]
    check: Callable[[Call, OpenCLDevice], str | None] | None = None
    packer: str = "opencl"
    batch_invariant: bool = True

    @property
    def name(self) -> str:
        return f"opencl/{self.op}"

    def supports(self, call: Call) -> str | None:
        return None if self.check is None else self.check(call, self.device)

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


def _embed(low: Lowering) -> None:
    call, [matrix], y = low.bound.call, low.weights("weight"), low.bound.call.outputs[0]
    args = (matrix.buffer, call.inputs["ids"], y, matrix.n, matrix.k, float(call.attr("scale")))
    width = -(-matrix.k // ITEMS) * ITEMS
    low.launch(matrix.program(low.device), "embed", lambda dims: (width, _rows(y, dims)), (ITEMS, 1), *args)


def _linear(low: Lowering) -> None:
    """A kernel for steps of one row, and one for all others: which computes a row makes no difference to it."""
    call, device, y = low.bound.call, low.device, low.bound.call.outputs[0]
    numbers = [f".{n}" for n in range(MEMBERS)] if call.op == "linear_group" else ["", ".1", ".2"]
    matrices = low.weights(*(f"weight{n}" for n in numbers))
    biases = low.weights(*(f"bias{n}" for n in numbers))
    absent = [device.nothing] * (MEMBERS - len(call.outputs))
    buffers = [getattr(one, "buffer", one) for one in matrices]
    widths = [getattr(one, "n", 0) for one in matrices]
    depth, total = matrices[0].k, sum(-(-n // PANEL) * PANEL for n in widths)
    added = sum((bias is not device.nothing) << 2 * m for m, bias in enumerate(biases)) + 2 * (
        "residual" in call.inputs
    )
    several = 4 if _local_bytes(call, 4) <= device.cl.local_mem_size else 1
    for rows in sorted({1, several}):

        def tiles(dims: Dims, rows: int = rows) -> int:
            count = _rows(y, dims)
            return -(-count // rows) if rows == (several if count > 1 else 1) else 0

        def columns(dims: Dims, tiles: PerStep = tiles) -> int:
            """For a group: on a processor so many that each core has a few groups, and that their part of the matrix stays
            in its cache while rows go by; elsewhere one a work-item."""
            panels = -(-total * (tiles(dims) or 1) // (PANEL * 8 * device.cl.max_compute_units))
            return PANEL * (panels if tiles(dims) <= 1 else min(panels, 32)) if device.group == 1 else device.group

        def grid(dims: Dims, tiles: PerStep = tiles, columns: PerStep = columns) -> tuple[int, int]:
            return device.group * tiles(dims), -(-total // columns(dims))

        area = rows * depth
        local = (area * (2 if matrices[0].macros["BITS"] == 4 else 4), area // 8 or 4, area // 8 or 4)
        values = (*low.inputs("x", "residual"), *buffers, *biases, *call.outputs, *absent, *map(cl.LocalMemory, local))
        sizes = (*widths, depth, added, float(call.attr("input_scale")), lambda dims: _rows(y, dims), columns)
        low.launch(matrices[0].program(device), f"linear_{rows}", grid, (device.group, 1), *values, *sizes)


def _rows(value: Any, dims: Dims) -> int:
    return dims.of(value.shape[:1])[0]


def _local_bytes(call: Call, rows: int) -> int:
    """Local memory for ``rows`` rows of activations, of 16 or 32 bits, with scales and sums."""
    fours = any(FORMATS[ref.format].bits == 4 for ref in call.weights.values() if ref.format in FORMATS)
    return rows * int(call.inputs["x"].shape[-1]) * (9 if fours else 17) // 4 + 8


def _linear_check(call: Call, device: OpenCLDevice) -> str | None:
    formats = {ref.format for name, ref in call.weights.items() if name.startswith("weight")}
    asked, quantized = call.attr("quantized_activation"), formats <= FORMATS.keys()
    if len(formats) > 1 or len(call.outputs) > MEMBERS:
        return f"a launch takes at most {MEMBERS} matrices of one format."
    if asked == ("forbidden" if quantized else "required"):
        return f"8-bit activations are {asked} here, and OpenCL's kernels for {min(formats)} do the contrary."
    if _local_bytes(call, 1) > device.cl.local_mem_size:
        return f"a row of {call.inputs['x'].shape[-1]} values is too long for this device's local memory."
    return None


def _norm(low: Lowering) -> None:
    call, device, width = low.bound.call, low.device, int(low.bound.call.outputs[0].shape[-1])
    layer, y = call.op == "layer_norm", call.outputs[-1]
    size = width if call.op == "add_rms_norm" else call.attr("head_dim") or width
    flags = ("residual" in call.inputs) | 2 * layer | 4 * ("bias" in call.weights) | 8 * layer
    values = (*low.inputs("x", "residual"), *low.weights("weight", "bias"), call.outputs[0], y)
    numbers = (size, width // size, flags, float(call.attr("eps")), 0.0 if layer else float(call.attr("weight_offset")))
    program = device.program("rows", LANES=device.lanes_for(size))
    grid: PerStep = lambda dims: (_rows(y, dims) * (width // size) * device.group,)  # noqa: E731
    low.launch(program, "norm", grid, (device.group,), *values, *numbers)


def _each(low: Lowering, *args: Any) -> None:
    """The kernel of the op's name, with a work-item for each LANES numbers of the output."""
    device, y = low.device, low.bound.call.outputs[0]
    lanes = device.lanes_for(int(y.shape[-1]))
    count: PerStep = lambda dims: prod(dims.of(y.shape)) // lanes  # noqa: E731
    grid: PerStep = lambda dims: (-(-count(dims) // ITEMS) * ITEMS,)  # noqa: E731
    low.launch(device.program("rows", LANES=lanes), low.bound.call.op, grid, (ITEMS,), y, count, *args)


def _gated_act(low: Lowering) -> None:
    call = low.bound.call
    numbers = (
        KINDS.index(call.attr("kind")),
        "up" in call.inputs,
        float(call.attr("alpha")),
        float(call.attr("limit")),
    )
    _each(low, *low.inputs("gate", "up"), *numbers)


def _scale_softcap(low: Lowering) -> None:
    _each(low, *low.inputs("x"), *(float(low.bound.call.attr(name)) for name in ("scale", "softcap")))


def _turn_and_write(low: Lowering) -> None:
    """rope, kv_write and rope_kv_write are one kernel: heads of q are turned, those of k and v turned and written."""
    call, device = low.bound.call, low.device
    width, nothing = call.attr("head_dim"), device.nothing
    turned: Any = call.outputs[0] if call.outputs else nothing
    heads = call.attr("heads") if call.outputs else 0
    kv_heads = call.attr("kv_heads") if call.states else 0
    count = heads + kv_heads * sum(name in call.inputs for name in ("new_k", "new_v"))
    tokens = call.inputs["positions" if call.outputs else "kv_slots"]
    rotary = (call.attr("rotary_dim") or width) if call.outputs else 0
    flags = ("q_norm" in call.weights) | 2 * bool(call.attr("interleaved"))
    lanes = 1 if flags & 2 else device.lanes_for(width, rotary // 2)
    [q] = low.inputs("q") if call.states else low.inputs("x")
    values = (q, *low.inputs("new_k", "new_v"), turned, *low.inputs("positions", "kv_slots"))
    floats = (float(call.attr(name) or 0) for name in ("scale", "eps", "weight_offset"))
    numbers = (cl.LocalMemory(4 * width), heads, kv_heads, width, rotary, flags, *floats)
    states = (*low.weights("inv_freq", "q_norm", "k_norm"), *low.caches())
    grid: PerStep = lambda dims: (count, _rows(tokens, dims))  # noqa: E731
    low.launch(_cache_program(low, lanes), "turn_and_write", grid, (1, 1), *values, *states, *numbers)


def _cache_program(low: Lowering, lanes: int) -> cl.Program:
    own = low.bound.call.states
    return low.device.program("cache", LANES=lanes, **CACHES[str(low.states[own["k"]].dtype) if own else "float32"])


def _kv_copy(low: Lowering) -> None:
    copies = low.bound.call.inputs["block_copies"]
    for name in low.bound.call.states.values():
        state = low.states[name]
        size = state.nbytes // state.shape[0]
        items = -(-size // ITEMS) * ITEMS
        grid = partial(lambda items, dims: (items * (_rows(copies, dims) > 0),), items)
        args = (state.buffer, copies, lambda dims: _rows(copies, dims), size)
        low.launch(low.device.program("rows"), "kv_copy", grid, (ITEMS,), *args)


def _attention(low: Lowering) -> None:
    call, device = low.bound.call, low.device
    numbers = [call.attr(name) for name in ("heads", "kv_heads", "head_dim", "block_size", "window")]
    heads, width, values = numbers[0], numbers[2], call.attr("v_head_dim") or numbers[2]
    local = (cl.LocalMemory(4 * size) for size in (width, values, 64, 64))
    inputs = low.inputs("q", "seq_starts", "query_offsets", "page_table")
    counts = (lambda dims: dims.S, lambda dims: dims.P)
    flags = ("sinks" in call.weights) | 2 * bool(call.attr("v_head_dim"))
    floats = (float(call.attr("scale")), float(call.attr("softcap")))
    args = (*inputs, *low.weights("sinks"), *low.caches(), call.outputs[0], *local, *counts, *numbers, values, flags)
    program = _cache_program(low, device.lanes_for(width, values))
    low.launch(program, "attention", lambda dims: (heads * device.group, dims.T), (device.group, 1), *args, *floats)


def _kind_check(call: Call, device: OpenCLDevice) -> str | None:
    return None if call.attr("kind") in KINDS else f"OpenCL does not know the activation {call.attr('kind')}."


def make_providers(device: OpenCLDevice) -> dict[str, tuple[Provider, ...]]:
    """The provider of each op."""
    linear = "bias quantized_activation input_scale"
    turn = "k_scale v_scale q_norm k_norm rotary_dim interleaved scale eps weight_offset"
    table: tuple[tuple[str, Callable[[Lowering], None], str, Any], ...] = (
        ("embed", _embed, "scale", None),
        ("linear", _linear, f"{linear} residual", _linear_check),
        ("linear_group", _linear, linear, _linear_check),
        ("rms_norm", _norm, "head_dim weight_offset", None),
        ("layer_norm", _norm, "bias head_dim", None),
        ("add_rms_norm", _norm, "weight_offset", None),
        ("gated_act", _gated_act, "up kind alpha limit", _kind_check),
        ("add", lambda low: _each(low, *low.inputs("a", "b")), "", None),
        ("scale_softcap", _scale_softcap, "scale softcap", None),
        ("gather_rows", lambda low: _each(low, *low.inputs("x", "rows"), _width(low)), "", None),
        ("gather_columns", lambda low: _each(low, *low.inputs("x"), *low.weights("columns"), _width(low)), "", None),
        ("rope", _turn_and_write, "rotary_dim interleaved scale", None),
        ("kv_write", _turn_and_write, "k_scale v_scale latent", None),
        ("rope_kv_write", _turn_and_write, turn, None),
        ("kv_copy", _kv_copy, "", None),
        ("attention", _attention, "k_scale v_scale window softcap v_head_dim sinks contiguous", None),
    )
    layout = {op: frozenset({ROWS.name} if "kv" in op or op == "attention" else ()) for op, *_ in table}
    return {
        op: (OpenCLProvider(op, device, how, frozenset(f.split()), layout[op], check),) for op, how, f, check in table
    }


def _width(low: Lowering) -> int:
    return int(low.bound.call.outputs[0].shape[-1])
