"""Products with weights, and embeddings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from engine.backend.v1 import BoundCall

from ..cuts import Cuts, Shape
from ..kernels import few, matmul, moe, quantize, tiled
from ..kernels.common import INTERPRETED, launch, power_of_two
from ..operands import Op, Operands
from ..recording import empty
from ..repack import TILE, Form
from ..tiles import (
    FEW,
    FEW_OUTPUTS,
    FEW_STEP,
    PROGRAMS,
    Tiles,
    copies_tiles,
    dot_type,
    has_fp8,
    most_registers,
    parts_of,
    programs,
)  # fmt: skip
from ..weights import Coded, Dense, joinable, joined

ELEMENTS = 1024
ROWS_OF_EXPERT = 16
MOST_JOINED = 3
MOST_JOINED_BYTES = 256 << 20
"""What is joined needs as much again meanwhile."""
CALLED = 24 << 20
"""Bytes of a weight that are called for before the kernel begins: half of what the cache of a large GPU holds."""
FEW_CALLED = 64
IDLE_OUTPUTS = 64 * PROGRAMS
"""Of fewer, the programs of a few rows leave multiprocessors idle."""


@dataclass(frozen=True)
class Grouping:
    """Choices in the order of their experts: blocks of ``size``, which expert each block has, and how many blocks."""

    order: torch.Tensor
    experts: torch.Tensor
    size: int
    blocks: int


@dataclass(frozen=True)
class Product:
    """What a product is taken of. ``heads``: so many matrices, each with columns of its own. ``choices``: rows of y that share
    a row of x. ``cuts``: how it is cut. ``widths``: the outputs of matrices that are joined, each of which has its part of y,
    [rows, outputs], one after the other."""

    x: torch.Tensor
    weight: Dense | Coded
    y: torch.Tensor
    cuts: Cuts
    bias: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    heads: int = 1
    choices: int = 1
    grouping: Grouping | None = None
    widths: tuple[int, ...] = ()

    def run(self) -> None:
        outputs, depth = self.weight.shape[-2:]
        stored = self.weight.array.dtype if isinstance(self.weight, Dense) else None
        dot, precision = dot_type(self.x.dtype, stored)
        if self._tiled():
            self._launch_tiled(dot)
            return
        form = self.weight.form if isinstance(self.weight, Coded) else None
        codes = "few" if self._few_coded(dot.primitive_bitwidth) else "codes"
        kernel = f"dense.{dot.name}" if form is None else f"{codes}{form.bits}g{form.group}.{dot.name}"
        block = None if self.grouping is None else self.grouping.size
        shape = Shape(kernel, self.rows, outputs, depth, dot.primitive_bitwidth // 8, block)
        self.cuts.launch(shape, lambda tiles: self._launch(tiles, {"DOT": dot, "PRECISION": precision}))

    @property
    def rows(self) -> int:
        return len(self.x) * self.choices

    def _tiled(self) -> bool:
        """Whether ``kernels.tiled`` takes it: one matrix of 16-bit numbers like those of x."""
        alone = isinstance(self.weight, Dense) and self.grouping is None and self.heads == 1
        return alone and self.x.itemsize == 2 and in_tiles(self.x, self.weight.array)  # type: ignore[union-attr]

    def _launch_tiled(self, dot: tl.dtype) -> None:
        assert isinstance(self.weight, Dense)
        ends = (self.bias, self.residual, self.y)
        by_tiles(self.x, self.weight.array, None, ends, self.cuts, dot, self.widths)

    def _few_coded(self, bits: int) -> bool:
        """Whether ``kernels.few`` takes it, in numbers of so many bits."""
        weight, rows = self.weight, self.rows if self.grouping is None else self.grouping.size
        coded = isinstance(weight, Coded) and weight.together > 0
        return coded and rows <= FEW and self.heads == 1 and (bits == 16 or INTERPRETED)

    def _launch(self, tiles: Tiles, types: dict[str, Any]) -> None:
        outputs, depth = self.weight.shape[-2:]
        grouping, rows = self.grouping, self.rows
        plain = grouping is None and self.heads == 1 and isinstance(self.weight, Coded)
        few_rows = self._few_coded(types["DOT"].primitive_bitwidth)
        parts = parts_of(FEW_OUTPUTS if few_rows else max(tiles.bn, 64), rows, outputs, depth) if plain else 1
        blocks = -(-rows // tiles.bm) if grouping is None else grouping.blocks
        grid = (blocks, -(-outputs // tiles.bn), self.heads * parts)
        order, experts = (self.y, self.y) if grouping is None else (grouping.order, grouping.experts)
        biased, added = self.bias is not None, self.residual is not None
        y = self.y if parts == 1 else empty((parts, rows, outputs), torch.float32, self.y.device)
        first, second = self.widths[:2] if self.widths else (0, 0)
        bias, residual = (self.y if end is None else end for end in (self.bias, self.residual))
        ends = (bias, residual, y, order, experts, rows, outputs, depth, first, second)
        strides = (self.x.shape[1], outputs * self.heads, self.choices)
        meta: dict[str, Any] = {
            "BIASED": biased and parts == 1, "ADDED": added and parts == 1, "GROUPED": grouping is not None,
            "JOINED": bool(self.widths) and parts == 1, "BM": tiles.bm, "BN": tiles.bn, "BK": tiles.bk,
            "num_warps": tiles.warps, "num_stages": tiles.stages, **types,
        }  # fmt: skip
        if isinstance(self.weight, Dense):
            launch(matmul.dense, grid, self.x, self.weight.array, *ends, *strides, **meta, **most_registers(tiles))
            return
        arrays, sizes, form = coded_arguments(self.weight)
        step = FEW_STEP if few_rows else tiles.bk
        part = -(-depth // (parts * step)) * step
        kernel = few.few_coded if few_rows else matmul.quantized
        if few_rows:
            form |= {"GROUP": min(form["GROUP"], 32), **_decoding(self.weight.form, types["DOT"].name)}
            del form["NATIVE"]
        launch(kernel, grid, self.x, *arrays, *ends, part, *sizes, *strides, **meta, **form, PARTS=parts > 1)
        if parts > 1:
            launch(
                matmul.sum_parts, (rows, -(-outputs // ELEMENTS)), y, bias, residual, self.y, rows, outputs, first, second,
                PARTS=parts, BIASED=biased, ADDED=added, JOINED=bool(self.widths), BLOCK=ELEMENTS,
            )  # fmt: skip


def _decoding(form: Form, dtype: str) -> dict[str, Any]:
    """How ``kernels.few`` decodes a form as numbers of a type: by which instructions, and by how much they come out larger. The
    interpreter goes bf16's way."""
    dtype = "bf16" if INTERPRETED else dtype
    if form.table is not None:
        return {"MORE": 0, "DECODED_BY": few.looked_up(form.table.tobytes(), dtype)}
    if form.below > 128:
        return {"MORE": 0, "DECODED_BY": few.widened(form.zero, dtype)}
    return {"MORE": few.BEGUN[dtype] + form.zero, "DECODED_BY": few.added(form.bits, dtype)}


def coded_arguments(weight: Coded) -> tuple[tuple[torch.Tensor, ...], tuple[int, int, int], dict[str, Any]]:
    """A coded weight as the kernels take it: its arrays, the lengths of rows (or tiles) of codes, how many groups and supers a
    row has, and its form."""
    form, depth = weight.form, weight.shape[-1]
    some = weight.scale  # in the place of what the form does not have
    arrays = [weight.scale, weight.fine_scale, weight.least, weight.fine_least]
    sizes = (
        weight.codes.shape[1],
        max(1, depth // form.group),
        weight.scale.shape[1] // (TILE if weight.together else 1),
    )
    meta = {
        "BITS": form.bits, "TOGETHER": weight.together, "MEANING": form.meaning, "TABLE": form.constant, "NATIVE": has_fp8(),
        "ZERO": form.zero, "LEAST": weight.least is not None, "GROUP": form.group, "SUPER": form.super,
        "FINE": weight.fine_scale is not None,
    }  # fmt: skip
    return (weight.codes, *(some if a is None else a for a in arrays)), sizes, meta


def _rounded(x: torch.Tensor, o: Operands) -> torch.Tensor:
    """x as numbers of 8 bits, f32."""
    y = o.new(*x.shape)
    launch(quantize.rounded, (len(x),), x, y, x.shape[1], o.attr("input_scale"), BLOCK=power_of_two(x.shape[1]))
    return y


def _as_bytes(x: torch.Tensor, o: Operands) -> tuple[torch.Tensor, torch.Tensor]:
    """x as int8 with a scale a row."""
    codes, scales = o.new(*x.shape, dtype=torch.int8), o.new(len(x))
    block = power_of_two(x.shape[1])
    launch(quantize.to_bytes, (len(x),), x, codes, scales, x.shape[1], o.attr("input_scale"), BLOCK=block)
    return codes, scales


def _as_fp8(x: torch.Tensor, o: Operands) -> tuple[torch.Tensor, torch.Tensor]:
    """x as E4M3 with a scale a row."""
    codes, scales = o.new(*x.shape, dtype=torch.uint8), o.new(len(x))
    launch(quantize.to_fp8, (len(x),), x, codes, scales, x.shape[1], BLOCK=power_of_two(x.shape[1]))
    return codes, scales


Ends = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor]
"""The bias, the residual and y of a product."""


def in_tiles(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the GPU's copy engine brings tiles of both, of one type: it wants rows that begin at multiples of 16 bytes."""
    whole = all(array.data_ptr() % 16 == 0 and array.shape[-1] * array.itemsize % 16 == 0 for array in (x, weight))
    return copies_tiles() and x.dtype == weight.dtype and whole


def by_tiles(
    x: torch.Tensor, weight: torch.Tensor, scales: tuple[torch.Tensor, torch.Tensor] | None, ends: Ends, cuts: Cuts,
    dot: tl.dtype, widths: tuple[int, ...] = (),
) -> None:  # fmt: skip
    """``kernels.tiled``. ``scales``: a factor a row of x and of the weight, where these have 8 bits."""
    bias, residual, y = ends
    rows, (outputs, depth) = len(x), weight.shape
    if not rows:
        return  # of nothing there is no descriptor
    first, second = widths[:2] if widths else (0, 0)
    kind = {torch.int8: "int8", torch.float8_e4m3fn: "e4m3"}.get(x.dtype, dot.name)

    # More than the cache holds would drive out what comes first; 512 bytes of a row at a time.
    called = (
        min(depth, CALLED // (outputs * x.itemsize)) * x.itemsize // 512 * 512 // x.itemsize
        if rows <= FEW_CALLED
        else 0
    )

    def start(cut: Tiles) -> None:
        operands = (_descriptor(x, cut.bm, cut.bk), _descriptor(weight, cut.bn, cut.bk))
        given = (*(scales or (y, y)), *(y if end is None else end for end in ends))
        grid, sizes = (programs(cut, rows, outputs, x.itemsize),), (rows, outputs, depth, called, first, second)
        meta: dict[str, Any] = {"SCALED": scales is not None, "BIASED": bias is not None, "ADDED": residual is not None}
        meta |= {"JOINED": bool(widths), "DOT": dot, "BM": cut.bm, "BN": cut.bn, "BK": cut.bk}
        meta |= {"num_warps": cut.warps, "num_stages": cut.stages}
        launch(tiled.tiled, grid, *operands, weight, *given, *sizes, **meta)

    cuts.launch(Shape(f"tiled.{kind}", rows, outputs, depth, x.itemsize), start)


def _descriptor(array: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor(array, list(array.shape), list(array.stride()), [rows, columns])


def by_codes(
    packed: tuple[torch.Tensor, torch.Tensor], weight: Coded, y: torch.Tensor,
    bias: torch.Tensor | None, residual: torch.Tensor | None, cuts: Cuts,
) -> None:  # fmt: skip
    """Products of codes of 8 bits, int8 by int8 or E4M3 by E4M3: ``packed`` are those of x [rows, depth], E4M3 as u8, with a
    factor a row."""
    (x, x_scale), (outputs, depth), codes = packed, weight.shape, weight.codes
    e4m3 = x.dtype != torch.int8
    if weight.one_scale and in_tiles(x, codes):
        dot = tl.float32 if e4m3 else tl.int32
        x, codes = (array.view(torch.float8_e4m3fn) if e4m3 else array for array in (x, codes))
        by_tiles(x, codes, (x_scale, weight.scale), (bias, residual, y), cuts, dot)
        return

    def start(tiles: Tiles) -> None:
        given = (x, x_scale, codes, weight.scale, y if bias is None else bias, y if residual is None else residual, y)
        grid, sizes = (-(-len(y) // tiles.bm), -(-outputs // tiles.bn)), (len(y), outputs, depth)
        meta = {"BIASED": bias is not None, "ADDED": residual is not None, "BM": tiles.bm, "BN": tiles.bn}
        meta |= {"BK": tiles.bk, "num_warps": tiles.warps, "num_stages": tiles.stages}
        if e4m3:
            launch(matmul.fp8_by_fp8, grid, *given, *sizes, weight.scale.shape[1], **meta)
        else:
            launch(matmul.bytes_by_bytes, grid, *given, *sizes, **meta)

    cuts.launch(Shape("e4m3" if e4m3 else "int8", len(y), outputs, depth, 1), start)


Multiply = Callable[[Product], None]


def _linears(o: Operands, members: list[tuple[str, str]], multiply: Multiply) -> None:
    """An output for each of these weights and biases, on one x."""
    x, residual = o["x"], o.get("residual")
    asked = o.attr("quantized_activation")
    required = asked == "required"
    weights = [o.weight(name) for name, _ in members]
    by_bytes = [required and isinstance(weight, Coded) and weight.one_scale for weight in weights]
    by_fp8 = [asked == "fp8" and isinstance(weight, Coded) and weight.multiplies_fp8 for weight in weights]
    packed = _as_bytes(x, o) if any(by_bytes) else _as_fp8(x, o) if any(by_fp8) else None
    if required and not all(by_bytes):
        x = _rounded(x, o)
    for n, (weight, (_, bias)) in enumerate(zip(weights, members, strict=True)):
        y = o.result(n, len(x), weight.shape[-2])
        if packed is not None and (by_bytes[n] or by_fp8[n]):
            by_codes(packed, weight, y, o.vector(bias), residual, o.cuts)
        else:
            multiply(Product(x, weight, y, o.cuts, o.vector(bias), residual))


def linear(o: Operands, multiply: Multiply = Product.run) -> None:
    _linears(o, [("weight", "bias")], multiply)


def linear_group(o: Operands, multiply: Multiply = Product.run) -> None:
    _linears(o, _members(o.bound), multiply)


def _members(bound: BoundCall) -> list[tuple[str, str]]:
    return [(f"weight.{n}", f"bias.{n}") for n in range(len(bound.call.outputs))]


@dataclass(frozen=True)
class Run:
    """Members of a group from ``first`` on as one matrix [outputs of all, K]: ``widths`` are those of each."""

    first: int
    weight: Dense | Coded
    bias: torch.Tensor | None
    widths: tuple[int, ...]


def joined_group(bound: BoundCall) -> Op:
    """``linear_group`` for this call, with members beside each other in one product where one alone would leave
    multiprocessors idle. Their memory becomes parts of one."""
    if bound.call.attr("quantized_activation") in ("required", "fp8"):
        return linear_group
    members = [(bound.weights[name].handle, bound.weights[bias].handle.array if bias in bound.weights else None)
               for name, bias in _members(bound)]  # fmt: skip
    runs, n = [], 0
    while n < len(members):
        count = next(c for c in range(min(MOST_JOINED, len(members) - n), 0, -1) if _joinable(members[n : n + c]))
        weights, biases = zip(*members[n : n + count], strict=True)
        runs.append(Run(n, *_one(weights, biases), tuple(weight.shape[0] for weight in weights)))
        n += count

    def run(o: Operands) -> None:
        x = o["x"]
        for one in runs:
            y = o.results(one.first, len(x), one.widths)
            widths = one.widths if len(one.widths) > 1 else ()
            Product(x, one.weight, y, o.cuts, one.bias, widths=widths).run()

    return run


def _joinable(members: list[tuple[Dense | Coded, torch.Tensor | None]]) -> bool:
    weights, biases = zip(*members, strict=True)
    small = sum(weight.nbytes for weight in weights) <= MOST_JOINED_BYTES
    idle = any(weight.shape[0] < IDLE_OUTPUTS for weight in weights)
    alike = len({bias is None for bias in biases}) == 1
    return len(members) == 1 or (small and idle and alike and joinable(weights))


def _one(
    weights: Sequence[Dense | Coded], biases: Sequence[torch.Tensor | None]
) -> tuple[Dense | Coded, torch.Tensor | None]:
    if len(weights) == 1:
        return weights[0], biases[0]
    given = [bias for bias in biases if bias is not None]
    return joined(weights), torch.cat(given) if given else None


def head_linear(o: Operands) -> None:
    x, weight = o["x"], o.weight("weight")
    heads, outputs, _ = weight.shape
    Product(x, weight, o.result(0, len(x), heads * outputs), o.cuts, heads=heads).run()


def embed(o: Operands) -> None:
    ids, weight = o["ids"], o.weight("weight")
    width = weight.shape[-1]
    y = o.result(0, len(ids), width)
    if isinstance(weight, Dense):
        grid = (len(ids), -(-width // ELEMENTS))
        launch(matmul.embed_dense, grid, ids, weight.array, y, width, o.attr("scale"), BLOCK=ELEMENTS)
        return
    arrays, sizes, form = coded_arguments(weight)
    launch(matmul.embed_quantized, (len(ids), -(-width // 32)), ids, *arrays, y, width, *sizes, o.attr("scale"), **form)


# -- experts -----------------------------------------------------------------------------------------------------------


def moe_route(o: Operands) -> None:
    logits, k, groups = o["logits"], o.attr("k"), o.attr("groups")
    bias, own = o.vector("correction_bias"), o.vector("expert_scale")
    tokens, experts = logits.shape
    ids, weights = o.result(0, tokens, k), o.result(1, tokens, k)
    launch(
        moe.route, (tokens,), logits, logits if bias is None else bias, logits if own is None else own, ids, weights,
        experts, k, o.attr("scale"),
        groups, o.attr("groups_kept"), o.attr("group_best"), SIGMOID=o.attr("score") == "sigmoid",
        BIASED=bias is not None, SCALED=own is not None, GROUPED=groups > 1, RENORMALIZED=o.attr("renormalize"),
        GROUPS=power_of_two(groups), SIZE=power_of_two(experts), num_warps=1,
    )  # fmt: skip


def _grouped(o: Operands, experts: int) -> Grouping:
    ids = o["ids"]
    total = ids.numel()
    size = power_of_two(min(128, -(-total // experts)), ROWS_OF_EXPERT)
    blocks = total // size + min(total, experts)
    order = o.new(blocks * size, dtype=torch.int32)
    counts, block_experts = o.new(experts, dtype=torch.int32), o.new(blocks, dtype=torch.int32)
    launch(moe.count_choices, (experts,), ids, counts, total, BLOCK=ELEMENTS)
    launch(
        moe.order_choices, (experts + 1,), ids, counts, order, block_experts, total, experts, blocks,
        BM=size, BLOCK=ELEMENTS, EXPERTS=power_of_two(experts),
    )  # fmt: skip
    return Grouping(order, block_experts, size, blocks)


def _experts(o: Operands, members: list[tuple[str, str]]) -> None:
    x, choices = o["x"], o["ids"].shape[1]
    grouping = _grouped(o, o.weight(members[0][0]).shape[0])
    for n, (name, bias) in enumerate(members):
        weight = o.weight(name)
        y = o.result(n, o["ids"].numel(), weight.shape[-2])
        shared = 1 if o.attr("per_choice") else choices
        Product(x, weight, y, o.cuts, o.vector(bias), None, 1, shared, grouping).run()


def moe_linear(o: Operands) -> None:
    _experts(o, [("weight", "bias")])


def moe_linear_group(o: Operands) -> None:
    _experts(o, [(f"weight.{n}", f"bias.{n}") for n in range(len(o.bound.call.outputs))])


def moe_combine(o: Operands) -> None:
    y, weights = o["y"], o["weights"]
    tokens, k = weights.shape
    total = o.result(0, tokens, y.shape[1])
    grid = (tokens, -(-y.shape[1] // ELEMENTS))
    launch(moe.combine, grid, y, weights, total, k, y.shape[1], BLOCK=ELEMENTS)
