"""Norms, activations, sums and gathered rows."""

from __future__ import annotations

from ..kernels import position, rows
from ..kernels.common import launch, power_of_two
from ..operands import Operands

ELEMENTS = 1024
KINDS = ("silu", "gelu", "gelu_tanh", "relu", "sigmoid", "identity", "clamped_swiglu")


def _blocks(count: int, block: int) -> int:
    return -(-count // block)


def _warps(width: int) -> int:
    return max(1, min(8, width // 256))


def rms_norm(o: Operands) -> None:
    x, weight = o["x"], o.vector("weight")
    y = o.result(0, *x.shape)
    width = o.attr("head_dim") or x.shape[1]
    block, weights = power_of_two(width), x.shape[1] // width if o.attr("wide_weight") else 1
    launch(
        rows.rms_norm, (x.numel() // width,), x, x, x, weight, y, width, weights, o.attr("eps"), o.attr("weight_offset"),
        ADDED=False, WIDTH=block, num_warps=_warps(block),
    )  # fmt: skip


def add_rms_norm(o: Operands) -> None:
    x, residual, weight = o["x"], o["residual"], o.vector("weight")
    total, y = (o.result(n, *x.shape) for n in range(2))
    block = power_of_two(x.shape[1])
    launch(
        rows.rms_norm, (len(x),), x, residual, total, weight, y, x.shape[1], 1, o.attr("eps"), o.attr("weight_offset"),
        ADDED=True, WIDTH=block, num_warps=_warps(block),
    )  # fmt: skip


def layer_norm(o: Operands) -> None:
    x, weight, bias = o["x"], o.vector("weight"), o.vector("bias")
    y = o.result(0, *x.shape)
    width = o.attr("head_dim") or x.shape[1]
    block, slices = power_of_two(width), x.shape[1] // width
    launch(
        rows.layer_norm, (len(x) * slices,), x, weight, weight if bias is None else bias, y, width, slices,
        o.attr("eps"), BIASED=bias is not None, WIDTH=block, num_warps=_warps(block),
    )  # fmt: skip


def gated_act(o: Operands) -> None:
    gate, up = o["gate"], o.get("up")
    y = o.result(0, *gate.shape)
    launch(
        rows.gated_act, (_blocks(gate.numel(), ELEMENTS),), gate, gate if up is None else up, y, gate.numel(),
        o.attr("alpha"), o.attr("limit"), KIND=o.attr("kind"), GATED=up is not None, BLOCK=ELEMENTS,
    )  # fmt: skip


def add(o: Operands) -> None:
    a, b = o["a"], o["b"]
    y = o.result(0, *a.shape)
    launch(rows.add, (_blocks(a.numel(), ELEMENTS),), a, b, y, a.numel(), BLOCK=ELEMENTS)


def scale_softcap(o: Operands) -> None:
    x, softcap = o["x"], o.attr("softcap")
    y = o.result(0, *x.shape)
    launch(
        rows.scale_softcap, (_blocks(x.numel(), ELEMENTS),), x, y, x.numel(), o.attr("scale"), softcap,
        CAPPED=softcap != 0, BLOCK=ELEMENTS,
    )  # fmt: skip


def gather_rows(o: Operands) -> None:
    x, chosen = o["x"], o["rows"]
    y = o.result(0, len(chosen), x.shape[1])
    launch(
        rows.gather_rows, (len(chosen), _blocks(x.shape[1], ELEMENTS)), x, chosen, y, x.shape[1], BLOCK=ELEMENTS
    )  # fmt: skip


def gather_columns(o: Operands) -> None:
    x, columns = o["x"], o.vector("columns")
    assert columns is not None
    y = o.result(0, len(x), len(columns))
    grid = (len(x), _blocks(len(columns), ELEMENTS))
    launch(rows.gather_columns, grid, x, columns, y, x.shape[1], len(columns), BLOCK=ELEMENTS)


def concat_heads(o: Operands) -> None:
    a, b, heads = o["a"], o["b"], o.attr("heads")
    y = o.result(0, len(a), a.shape[1] + b.shape[1])
    widths = a.shape[1] // heads, b.shape[1] // heads
    launch(rows.concat_heads, (len(a) * heads,), a, b, y, *widths, BLOCK=power_of_two(sum(widths)))


def rope(o: Operands) -> None:
    x, heads, width = o["x"], o.attr("heads"), o.attr("head_dim")
    y = o.result(0, *x.shape)
    launch(
        position.rope, (len(x),), x, o["positions"], o.vector("inv_freq"), y, heads, width,
        o.attr("rotary_dim") or width, o.attr("scale"), INTERLEAVED=o.attr("interleaved"),
        HEADS=power_of_two(heads), WIDTH=power_of_two(width),
    )  # fmt: skip
