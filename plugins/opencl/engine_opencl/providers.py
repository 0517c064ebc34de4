"""Which ops the device offers, with which features, and how each call becomes launches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyopencl as cl

from engine.backend.v1 import BoundCall, Call, Dims, Frame, Limits, Packed, Provider, Segment, StepFn, Value, WeightRef

from .cache import KV_MACROS, ROWS
from .compile import Lowering, PerStep, compile_segment
from .formats import FORMATS
from .weights import PANEL, is_matrix, linear_program, pack_matrix, pack_vector

if TYPE_CHECKING:
    from .device import OpenCLDevice

KINDS = ("silu", "gelu", "gelu_tanh", "relu", "clamped_swiglu")
ROWS_AT_ONCE = 4
MEMBERS = 3
"""Matrices that a launch takes."""
ITEMS = 64
"""Work-items of a group where each makes one number."""


@dataclass(frozen=True)
class OpenCLProvider:
    """One op. ``lower`` appends its launches; no reduction is shared by rows, so it is batch-invariant."""

    op: str
    device: OpenCLDevice
    lower: Callable[[Lowering], None]
    features: frozenset[str]
    layouts: frozenset[str]
    check: Callable[[Call], str | None] | None = None
    packer: str = "opencl"
    batch_invariant: bool = True

    @property
    def name(self) -> str:
        return f"opencl/{self.op}"

    def supports(self, call: Call) -> str | None:
        return None if self.check is None else self.check(call)

    def wants(self, call: Call) -> Mapping[str, str]:
        return {}

    def pack(self, ref: WeightRef, uses: Sequence[str], progress: Callable[[int], None]) -> Packed:
        return (pack_matrix if is_matrix(ref, uses) else pack_vector)(self.device, ref, progress)

    def bind(self, bound: BoundCall, limits: Limits) -> StepFn:
        """The call as a segment of its own, made when the states are first seen."""
        inputs = tuple({v.id: v for v in bound.call.inputs.values()}.values())
        segment = Segment(bound.call.op, "device", (bound,), inputs, bound.call.outputs)
        made: list[StepFn] = []

        def run(frame: Frame) -> None:
            if not made:
                made.append(compile_segment(self.device, segment, limits, frame.states))
            made[0](frame)

        return run


# -- linear and embed --------------------------------------------------------------------------------------------------


def _embed(low: Lowering) -> None:
    call, matrix = low.bound.call, low.weight("weight")
    count = low.rows(call.outputs[0])
    args = (matrix.buffer, call.inputs["ids"], call.outputs[0], matrix.n, matrix.k, float(call.attr("scale")))
    program = linear_program(low.device, matrix.macros)
    width = -(-matrix.k // ITEMS) * ITEMS
    low.launch(program, "embed", lambda dims: (width, count(dims)), (ITEMS, 1), *args)


def _linear(low: Lowering) -> None:
    """Matrices of one format on one input, three at a time, in one launch."""
    call = low.bound.call
    names = sorted((name for name in call.weights if name.startswith("weight")), key=lambda name: name.split(".")[-1:])
    members = [(low.weight(name), low.weight(name.replace("weight", "bias")), y) for name, y in zip(names, call.outputs, strict=True)]
    kinds = list(dict.fromkeys(str(matrix.macros) for matrix, _, _ in members))
    for kind in kinds:
        own = [member for member in members if str(member[0].macros) == kind]
        for first in range(0, len(own), MEMBERS):
            _products(low, own[first : first + MEMBERS])


def _products(low: Lowering, members: Sequence[tuple[Any, Any, Value]]) -> None:
    call, device, matrix = low.bound.call, low.device, members[0][0]
    program, rows = linear_program(device, matrix.macros), low.rows(call.outputs[0])
    absent = MEMBERS - len(members)
    handles = [one.buffer for one, _, _ in members] + [device.nothing] * absent
    biases = [bias for _, bias, _ in members] + [device.nothing] * absent
    outputs = [y for _, _, y in members] + [device.nothing] * absent
    sizes = [one.n for one, _, _ in members] + [0] * absent
    total = sum(-(-n // PANEL) * PANEL for n in sizes)
    added = sum((bias is not device.nothing) << 2 * m for m, bias in enumerate(biases))
    added += 2 * ("residual" in call.inputs)
    fixed = float(call.attr("input_scale"))
    several = ROWS_AT_ONCE if _local_bytes(call, ROWS_AT_ONCE) <= device.cl.local_mem_size else 1
    for size in sorted({1, several}):

        def tiles(dims: Dims, size: int = size) -> int:
            """Row tiles for this kernel: a single row goes to that of one row, more to the other."""
            count = rows(dims)
            return -(-count // size) if size == (several if count > 1 else 1) else 0

        def columns(dims: Dims, tiles: Callable[[Dims], int] = tiles) -> int:
            return _columns(device, total, tiles(dims))

        def grid(dims: Dims, tiles: Callable[[Dims], int] = tiles) -> tuple[int, int]:
            count = tiles(dims)
            return device.group * count, -(-total // _columns(device, total, count))

        area = size * matrix.k
        local = (area * (2 if matrix.macros["BITS"] <= 8 else 4), area // 8 or 4, area // 8 or 4)
        values = (call.inputs["x"], low.input("residual"), *handles, *biases, *outputs, *map(cl.LocalMemory, local))
        numbers = (*sizes, matrix.k, added, fixed, PerStep(rows), PerStep(columns))
        low.launch(program, f"linear_{size}", grid, (device.group, 1), *values, *numbers)


def _columns(device: OpenCLDevice, n: int, tiles: int) -> int:
    """Columns that a group computes: on a processor so many that each core has a few groups, and their part of the matrix
    stays in its cache while rows go by; elsewhere one a work-item."""
    if device.lanes == 1:
        return device.group
    panels, groups = n // PANEL, 8 * device.cl.max_compute_units
    count = -(-panels // max(1, groups // max(tiles, 1)))
    return PANEL * (count if tiles <= 1 else min(count, 32))


def _local_bytes(call: Call, rows: int) -> int:
    """Local memory for ``rows`` rows of activations, of 8 bits with scales and sums or of 32."""
    quantized = any(ref.format in FORMATS for name, ref in call.weights.items() if name.startswith("weight"))
    return rows * int(call.inputs["x"].shape[-1]) * (9 if quantized else 16) // 4 + 8


def _linear_check(call: Call, device: OpenCLDevice) -> str | None:
    found = {ref.format in FORMATS for name, ref in call.weights.items() if name.startswith("weight")}
    asked = call.attr("quantized_activation")
    if asked == "forbidden" and True in found:
        return "8-bit activations are forbidden here, and OpenCL's quantized kernels need them."
    if asked == "required" and False in found:
        return "8-bit activations are required here, and OpenCL's dense kernels do not take them."
    if _local_bytes(call, 1) > device.cl.local_mem_size:
        return f"a row of {call.inputs['x'].shape[-1]} values is too long for this device's local memory."
    return None


# -- rows --------------------------------------------------------------------------------------------------------------


def _norm(low: Lowering) -> None:
    call, width = low.bound.call, int(low.bound.call.outputs[0].shape[-1])
    slice_ = width if call.op == "add_rms_norm" else call.attr("head_dim") or width
    layer, count, slices = call.op == "layer_norm", low.rows(call.outputs[0]), width // slice_
    added = "residual" in call.inputs
    flags = added | 2 * layer | 4 * ("bias" in call.weights) | 8 * layer
    total, y = call.outputs[0], call.outputs[-1]
    values = (call.inputs["x"], low.input("residual"), low.weight("weight"), low.weight("bias"), total, y)
    offset = 0.0 if layer else float(call.attr("weight_offset"))
    group = low.device.group
    program = low.device.program(("rows",))
    numbers = (slice_, slices, flags, float(call.attr("eps")), offset)
    low.launch(program, "norm", lambda dims: (count(dims) * slices * group,), (group,), *values, *numbers)


def _each(low: Lowering, name: str, *args: Any, numbers: tuple[Any, ...] = ()) -> None:
    """A kernel with a work-item for each number of the output."""
    y = low.bound.call.outputs[0]

    def count(dims: Dims) -> int:
        rows, width = dims.of(y.shape)
        return rows * width

    program = low.device.program(("rows",))
    lanes = low.device.lanes if name == "gated_act" else 1
    sizes = lambda dims: (-(-count(dims) // (ITEMS * lanes)) * ITEMS,)  # noqa: E731
    low.launch(program, name, sizes, (ITEMS,), *args, y, PerStep(count), *numbers)


def _gated_act(low: Lowering) -> None:
    call = low.bound.call
    numbers = (KINDS.index(call.attr("kind")), "up" in call.inputs, float(call.attr("alpha")), float(call.attr("limit")))
    _each(low, "gated_act", call.inputs["gate"], low.input("up"), numbers=numbers)


def _add(low: Lowering) -> None:
    _each(low, "add", low.input("a"), low.input("b"))


def _scale_softcap(low: Lowering) -> None:
    call = low.bound.call
    _each(low, "scale_softcap", low.input("x"), numbers=(float(call.attr("scale")), float(call.attr("softcap"))))


def _gather_rows(low: Lowering) -> None:
    _each(low, "gather_rows", low.input("x"), low.input("rows"), numbers=(int(low.bound.call.outputs[0].shape[-1]),))


def _gather_columns(low: Lowering) -> None:
    width = int(low.bound.call.outputs[0].shape[-1])
    _each(low, "gather_columns", low.input("x"), low.weight("columns"), numbers=(width,))


# -- the cache ---------------------------------------------------------------------------------------------------------


def _kv_program(low: Lowering, lanes: int) -> cl.Program:
    dtypes = {"float32": "f32", "float16": "f16", "uint16": "bf16", "int8": "int8"}
    call = low.bound.call
    tag = dtypes[str(low.states[call.states["k"]].dtype)] if call.states else "f32"
    return low.device.program(("cache",), LANES=lanes, **KV_MACROS[tag])


def _turn_and_write(low: Lowering) -> None:
    """rope, kv_write and rope_kv_write are one kernel: heads of q are turned, those of k and v written."""
    call = low.bound.call
    turns, writes = call.op != "kv_write", call.op != "rope"
    width, heads = call.attr("head_dim"), call.attr("heads") if turns else 0
    kv_heads = call.attr("kv_heads") if writes else 0
    kinds = sum(name in call.inputs for name in ("new_k", "new_v"))
    tokens = low.rows(call.inputs["positions" if turns else "kv_slots"])
    q = call.inputs["q" if writes else "x"] if turns else low.device.nothing
    y = call.outputs[0] if turns else low.device.nothing
    inputs = (q, low.input("new_k"), low.input("new_v"), y, low.input("positions"), low.input("kv_slots"))
    weights = tuple(low.weight(name) for name in ("inv_freq", "q_norm", "k_norm"))
    states = tuple(low.state(name) for name in ("k", "v", "k_scale", "v_scale"))
    flags = ("q_norm" in call.weights) | 2 * turns
    rotary, scale, eps, offset = 0, 1.0, 0.0, 0.0
    if turns:
        flags |= 4 * call.attr("interleaved")
        rotary, scale = call.attr("rotary_dim") or width, float(call.attr("scale"))
    if turns and writes:
        eps, offset = float(call.attr("eps")), float(call.attr("weight_offset"))
    numbers = (cl.LocalMemory(4 * width), heads, kv_heads, width, rotary, flags, scale, eps, offset)
    count = heads + kinds * kv_heads
    device = low.device
    wide = width % device.lanes == 0 and rotary // 2 % device.lanes == 0 and not flags & 4
    program = _kv_program(low, device.lanes if wide else 1)
    low.launch(
        program, "turn_and_write", lambda dims: (count, tokens(dims)), (1, 1), *inputs, *weights, *states, *numbers
    )


def _kv_copy(low: Lowering) -> None:
    call = low.bound.call
    copies = call.inputs["block_copies"]
    count = low.rows(copies)
    program = low.device.program(("rows",))
    for state in call.states.values():
        tensor = low.states[state]
        size = tensor.nbytes // tensor.shape[0]
        items = -(-size // ITEMS) * ITEMS
        sizes = lambda dims, items=items: (items * (count(dims) > 0),)  # noqa: E731
        low.launch(program, "kv_copy", sizes, (ITEMS,), tensor.buffer, copies, PerStep(count), size)


def _attention(low: Lowering) -> None:
    call, device = low.bound.call, low.device
    heads, kv_heads, width = (call.attr(name) for name in ("heads", "kv_heads", "head_dim"))
    values = call.attr("v_head_dim") or width
    lanes = 1 if width % device.lanes or values % device.lanes else device.lanes
    inputs = tuple(call.inputs[name] for name in ("q", "seq_starts", "query_offsets", "page_table"))
    states = tuple(low.state(name) for name in ("k", "v", "k_scale", "v_scale"))
    local = tuple(cl.LocalMemory(4 * size) for size in (width, values, 64, 64))
    flags = ("sinks" in call.weights) | 2 * bool(call.attr("v_head_dim"))
    table: Value = call.inputs["page_table"]
    per_step = (PerStep(low.rows(table)), PerStep(lambda dims: dims.of(table.shape)[1]))
    numbers = (heads, kv_heads, width, values, call.attr("block_size"), call.attr("window"), flags)
    low.launch(
        _kv_program(low, lanes),
        "attention",
        lambda dims: (heads * device.group, dims.T),
        (device.group, 1),
        *(*inputs, low.weight("sinks"), *states, call.outputs[0], *local, *per_step, *numbers),
        float(call.attr("scale")),
        float(call.attr("softcap")),
    )


def make_providers(device: OpenCLDevice) -> dict[str, tuple[Provider, ...]]:
    """The provider of each op."""
    offered: dict[str, tuple[Provider, ...]] = {}

    def one(op: str, lower: Callable[[Lowering], None], features: str = "", check: Any = None, kv: bool = False) -> None:
        layouts = frozenset({ROWS.name} if kv else ())
        offered[op] = (OpenCLProvider(op, device, lower, frozenset(features.split()), layouts, check),)

    one("embed", _embed, "scale")
    one(
        "linear",
        _linear,
        "bias residual quantized_activation input_scale",
        lambda call: _linear_check(call, device),
    )
    one("linear_group", _linear, "bias quantized_activation input_scale", lambda call: _linear_check(call, device))
    one("rms_norm", _norm, "head_dim weight_offset")
    one("layer_norm", _norm, "bias head_dim")
    one("add_rms_norm", _norm, "weight_offset")
    one("gated_act", _gated_act, "up kind alpha limit", _kind_check)
    one("add", _add)
    one("scale_softcap", _scale_softcap, "scale softcap")
    one("gather_rows", _gather_rows)
    one("gather_columns", _gather_columns)
    one("rope", _turn_and_write, "rotary_dim interleaved scale")
    one("kv_write", _turn_and_write, "k_scale v_scale latent", kv=True)
    features = "k_scale v_scale q_norm k_norm rotary_dim interleaved scale eps weight_offset"
    one("rope_kv_write", _turn_and_write, features, kv=True)
    one("kv_copy", _kv_copy, kv=True)
    one("attention", _attention, "k_scale v_scale window softcap v_head_dim sinks contiguous", kv=True)
    return offered


def _kind_check(call: Call) -> str | None:
    kind = call.attr("kind")
    return None if kind in KINDS else f"OpenCL does not know the activation {kind}."
