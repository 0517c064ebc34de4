"""Dense layers: embed, linear, linear_group, gather_columns, and quantize with its layouts "q8g32", "q8g128" and "bf16"."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest

import numpy as np

from ..backend.v1 import Array, Dims
from ..errors import OpError
from .cases import random_activation, random_weight
from .dtypes import from_f32
from .spec import REQUIRED, Case, Generator, OpSpec, Tolerance

GROUP = 32
SPANS = {"q8g32": 32, "q8g128": 128}
"""Layouts of packed activations in 8 bits: how many values have one scale."""


def embed(*, ids: Array, weight: Array, scale: float = 1.0) -> tuple[Array]:
    """Rows of the table [V, d] for ids i32 [T], times scale: f32 [T, d]."""
    return (weight[ids].astype(np.float32) * np.float32(scale),)


def linear(
    *,
    x: Array,
    weight: Array,
    bias: Array | None = None,
    residual: Array | None = None,
    quantized_activation: str = "allowed",
    input_scale: float = 0.0,
) -> tuple[Array]:
    """x [rows, K] times weight [N, K] transposed, plus bias [N], plus residual [rows, N]: f32 [rows, N].

    ``quantized_activation`` ("forbidden", "allowed", "fp8", "required") tells providers whether x may be packed to 8 bits, or
    must be. Where it must, this reference rounds it: to multiples of ``input_scale`` from -128 to 127, or if that is 0
    to those of 2 / 255 of the row's absmax; a provider may take a finer step than that, but not than ``input_scale``.
    "fp8" allows rounding to E4M3, too, with a scale a row, as the scheme of such a checkpoint asks for. Otherwise it
    computes in f32. One product a row, so that a row never depends on the others.

    Whatever it says, a provider may round x to bf16 where the weight is BF16, as a model that runs in bf16 does; with
    weights of every other format it may not.
    """
    if quantized_activation == "required":
        x = _rounded(x, input_scale)
    y = np.empty((len(x), len(weight)), np.float32)
    for row in range(len(x)):
        y[row] = weight @ x[row]
    if bias is not None:
        y += bias
    if residual is not None:
        y += residual
    return (y,)


def linear_group(
    *,
    x: Array,
    weight: Sequence[Array],
    bias: Sequence[Array | None] = (),
    quantized_activation: str = "allowed",
    input_scale: float = 0.0,
) -> tuple[Array, ...]:
    """Several linears on one x: an output [rows, N_i] a weight. A bias that is None or beyond the list is absent."""
    return tuple(
        linear(x=x, weight=w, bias=b, quantized_activation=quantized_activation, input_scale=input_scale)[0]
        for w, b in zip_longest(weight, bias)
    )


def _rounded(x: Array, scale: float) -> Array:
    """x to the nearest of 256 steps of ``scale``, or of the row's own; a row's NaN or infinity stays."""
    step: Array | np.float32 = np.float32(scale)
    if not scale:
        absmax = np.abs(x).max(axis=-1, keepdims=True)
        step = np.where((absmax > 0) & np.isfinite(absmax), absmax / np.float32(127.5), np.float32(1))
    return np.where(np.isfinite(x), np.clip(np.rint(x / step), -128, 127) * step, x).astype(np.float32)


def gather_columns(*, x: Array, columns: Array, chosen: bool = False) -> tuple[Array]:
    """x [rows, K] with its columns in the order of ``columns`` f32 [N], whole numbers: f32 [rows, N]. ``chosen``: these are
    some columns; otherwise all of them are there, once."""
    return (np.ascontiguousarray(x[:, columns.astype(np.intp)], np.float32),)


def quantize(*, x: Array, layout: str, scale: float = 0.0) -> tuple[Array]:
    """x f32 [rows, K] as a packed activation: q8g32 or q8g128, uint8 [rows, bytes of a row], or bf16 as uint16 [rows, K],
    to nearest, ties to even. OpError for another layout.

    ``scale`` is the one scale of 8-bit rows, where x saturates from -128 to 127; if it is 0 each span has its own.
    """
    if layout == "bf16":
        return (from_f32(x, "bf16"),)
    if layout not in SPANS:
        raise OpError(f"The reference of quantize knows the layouts bf16, q8g32 and q8g128 and not {layout}.")
    return (quantize_q8(x, layout, scale),)


def and_packed(y: Array, layout: str) -> tuple[Array, ...]:
    """y alone, or y and y as ``quantize`` packs it, where an op's attribute ``packed`` names a layout."""
    return (y, *quantize(x=y, layout=layout)) if layout else (y,)


def quantize_q8(x: Array, layout: str, fixed_scale: float = 0.0) -> Array:
    """x f32 [rows, K], K whole spans of the layout, as rows of [int8 q[K]][f32 scale[K/32]][i32 nsum16[K/16]].

    scale = absmax / 127 over each span, which each 32 of it have in their places; q = x * (127 / absmax) to nearest, ties
    to even (x / scale where scale is subnormal, 0 where it is 0); nsum16 = minus the sum of each 16 q. A span with a NaN or
    an infinity has that scale and q 0, so that it stays non-finite. With ``fixed_scale`` every other span has that scale,
    and q = x / scale is from -128 to 127.
    """
    rows, width = x.shape
    span = SPANS[layout]
    if width % span:
        raise OpError(f"The layout {layout} needs rows of a multiple of {span} values and not of {width}.")
    groups = x.astype(np.float32).reshape(rows, width // span, span)
    absmax = np.abs(groups).max(axis=-1)
    scale = absmax / np.float32(127)
    if fixed_scale:
        scale = np.where(np.isfinite(scale), np.float32(fixed_scale), scale)
    usable = np.isfinite(scale) & (scale > 0)
    steps = np.divide(groups, scale[..., None], out=np.zeros_like(groups), where=usable[..., None])
    if not fixed_scale:
        normal = usable & (scale >= np.finfo(np.float32).tiny)
        factor = np.divide(np.float32(127), absmax, out=np.zeros_like(absmax), where=normal)
        steps = np.where(normal[..., None], groups * factor[..., None], steps)
    q = np.clip(np.rint(steps), -128 if fixed_scale else -127, 127).astype(np.int8)
    nsum16 = -q.reshape(rows, width // 16, 16).sum(axis=-1, dtype=np.int32)
    return np.concatenate(
        [q.reshape(rows, width).view(np.uint8), _bytes(scale.repeat(span // GROUP, axis=1)), _bytes(nsum16)],
        axis=1,
        dtype=np.uint8,
    )


def dequantize_q8(packed: Array) -> Array:
    """The f32 values [rows, K] of 8-bit rows."""
    rows, size = packed.shape
    width = size * 8 // 11  # K + K/8 + K/4 bytes
    q = packed[:, :width].view(np.int8).astype(np.float32).reshape(rows, width // GROUP, GROUP)
    scale = np.ascontiguousarray(packed[:, width : width + width // 8]).view(np.float32)
    with np.errstate(invalid="ignore"):  # 0 * inf is NaN, as it should be
        return (q * scale[..., None]).reshape(rows, width)


def _bytes(array: Array) -> Array:
    return np.ascontiguousarray(array).view(np.uint8)


def embed_cases(rng: Generator) -> Iterator[Case]:
    for format_, vocabulary, width, tokens, scale in (
        ("F32", 100, 64, 1, 1.0),
        ("F32", 512, 288, 19, 1.0),
        ("F16", 300, 96, 7, 16.0),
        ("BF16", 50, 32, 40, 0.5),
        ("F32", 3, 8, 5, 1.0),
        ("F32", 300, 1, 21, 1.0),
    ):
        yield Case(
            f"{format_} {vocabulary}x{width}, {tokens} tokens, scale {scale}",
            Dims(T=tokens),
            {"ids": rng.integers(0, vocabulary, tokens, dtype=np.int32)},
            weights={"weight": random_weight(rng, format_, (vocabulary, width), 1.0)},
            attrs={"scale": scale},
        )


def linear_cases(rng: Generator) -> Iterator[Case]:
    for format_, rows, outputs, width, biased, added in (
        ("F32", 1, 64, 64, False, False),
        ("F32", 5, 33, 96, True, False),
        ("F16", 16, 288, 128, False, True),
        ("BF16", 7, 100, 256, True, True),
        ("F32", 3, 1, 32, False, False),
        ("F32", 40, 512, 288, False, False),
    ):
        weights = {"weight": random_weight(rng, format_, (outputs, width))}
        if biased:
            weights["bias"] = random_weight(rng, "F32", (outputs,), 1.0)
        inputs = {"x": random_activation(rng, format_, (rows, width))}
        if added:
            inputs["residual"] = rng.standard_normal((rows, outputs), np.float32)
        name = f"{format_} {rows}x{width} to {outputs}{' bias' * biased}{' residual' * added}"
        yield Case(name, Dims(T=rows), inputs, weights)
    yield from (_rounding_case(rng, scale) for scale in (0.0, 0.02))


def _rounding_case(rng: Generator, scale: float) -> Case:
    """Activations that must be rounded to 8 bits; with a scale, some saturate."""
    x = rng.standard_normal((6, 64), np.float32)
    x[2] = 0
    if scale:  # halfway between two steps it is a matter of the last bit, as of a compiler that multiplies by 1 / scale
        whole = np.rint(x / np.float32(scale))
        x = ((whole + np.clip(x / np.float32(scale) - whole, -0.49, 0.49)) * scale).astype(np.float32)
    # Each output shows one activation, so that no sum hides how it was rounded.
    identity = np.eye(64, dtype=np.float32)
    attrs = {"quantized_activation": "required", "input_scale": scale}
    name = f"8-bit activations{f' of scale {scale}' if scale else ''}"
    return Case(name, Dims(T=6), {"x": x}, {"weight": ("F32", identity.view(np.uint8), (64, 64))}, attrs=attrs)


def linear_group_cases(rng: Generator) -> Iterator[Case]:
    for rows, width, members in (
        (1, 64, (("F32", 64, False), ("F32", 32, False), ("F32", 32, False))),
        (9, 96, (("F32", 96, True), ("F16", 48, False))),
        (4, 32, (("BF16", 17, True),)),
        (13, 80, (("BF16", 64, False), ("BF16", 130, True))),
        (21, 128, (("F32", 256, False), ("F16", 256, True), ("F16", 1, False))),
    ):
        weights = {f"weight.{i}": random_weight(rng, f, (n, width)) for i, (f, n, _) in enumerate(members)}
        weights |= {f"bias.{i}": random_weight(rng, "F32", (n,), 1.0) for i, (_, n, b) in enumerate(members) if b}
        inputs = {"x": random_activation(rng, members[0][0], (rows, width))}
        yield Case(f"{rows} rows, {len(members)} linears", Dims(T=rows), inputs, weights)
    for scale in (0.0, 0.02):
        case = _rounding_case(rng, scale)
        yield replace(case, weights={"weight.0": case.weights["weight"]})


def gather_columns_cases(rng: Generator) -> Iterator[Case]:
    for rows, width in ((1, 64), (19, 96), (3, 1), (2, 4099)):
        columns = rng.permutation(width).astype(np.float32)
        weights = {"columns": ("F32", columns.view(np.uint8).reshape(1, -1), (width,))}
        yield Case(f"{rows}x{width}", Dims(T=rows), {"x": rng.standard_normal((rows, width), np.float32)}, weights)
    for rows, width, low, high in ((1, 64, 32, 64), (19, 33, 0, 16), (2, 300, 7, 8)):
        weights = {
            "columns": ("F32", np.arange(low, high, dtype=np.float32).view(np.uint8).reshape(1, -1), (high - low,))
        }
        x = rng.standard_normal((rows, width), np.float32)
        yield Case(f"{rows}x{width}, {low} to {high}", Dims(T=rows), {"x": x}, weights, attrs={"chosen": True})


def quantize_cases(rng: Generator) -> Iterator[Case]:
    for rows, width, scale, layout in (
        (1, 64, 0.0, "q8g32"),
        (3, 32, 0.0, "q8g32"),
        (17, 288, 0.0, "q8g32"),
        (2, 1024, 0.02, "q8g32"),
        (5, 96, 0.5, "q8g32"),
        (5, 96, 0.0, "q8g32"),
        (1, 256, 0.0, "q8g128"),
        (17, 384, 0.0, "q8g128"),
        (2, 1024, 0.02, "q8g128"),
    ):
        x = rng.standard_normal((rows, width), np.float32) * rng.lognormal(0, 3, (rows, 1)).astype(np.float32)
        x[rng.random(x.shape) < 0.01] *= 100  # outliers
        x[0, : SPANS[layout]] = 0
        if scale:
            x[-1, :2] = 1e3, -1e3  # saturates
        yield Case(f"{rows}x{width} {layout} {scale}", Dims(T=rows), {"x": x}, attrs={"layout": layout, "scale": scale})
    for rows, width in ((1, 64), (19, 33), (4, 1024)):
        x = rng.standard_normal((rows, width), np.float32)
        yield Case(f"{rows}x{width} bf16", Dims(T=rows), {"x": x}, attrs={"layout": "bf16"})


SPECS = (
    OpSpec(
        "embed",
        inputs=("ids",),
        weights=("weight",),
        outputs=("y",),
        attrs={"scale": 1.0},
        reference=embed,
        cases=embed_cases,
    ),
    OpSpec(
        "linear",
        inputs=("x", "residual?"),
        weights=("weight", "bias?"),
        outputs=("y",),
        attrs={"quantized_activation": "allowed", "input_scale": 0.0},
        reference=linear,
        tolerance=Tolerance(2e-5, 2e-5),
        cases=linear_cases,
    ),
    OpSpec(
        "linear_group",
        inputs=("x",),
        weights=("weight*", "bias*?"),
        outputs=("y*",),
        attrs={"quantized_activation": "allowed", "input_scale": 0.0},
        reference=linear_group,
        tolerance=Tolerance(2e-5, 2e-5),
        cases=linear_group_cases,
    ),
    OpSpec(
        "gather_columns",
        inputs=("x",),
        weights=("columns",),
        outputs=("y",),
        attrs={"chosen": False},
        reference=gather_columns,
        cases=gather_columns_cases,
    ),
    OpSpec(
        "quantize",
        inputs=("x",),
        outputs=("packed",),
        attrs={"layout": REQUIRED, "scale": 0.0},
        reference=quantize,
        cases=quantize_cases,
    ),
)
