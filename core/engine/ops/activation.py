"""Element-wise ops: gated_act, add and scale_softcap."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from ..backend.v1 import Array, Dims
from ..errors import OpError
from .dense import and_packed
from .spec import Case, Generator, OpSpec, Tolerance

_erf = np.vectorize(math.erf, otypes=[np.float64])


def _silu(x: Array) -> Array:
    with np.errstate(over="ignore"):
        y: Array = x / (1 + np.exp(-x))
    return y


def _gelu(x: Array) -> Array:
    y: Array = 0.5 * x * (1 + _erf(x / math.sqrt(2)))
    return y


def _gelu_tanh(x: Array) -> Array:
    y: Array = 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return y


def _sigmoid(x: Array) -> Array:
    with np.errstate(over="ignore"):
        y: Array = 1 / (1 + np.exp(-x))
    return y


def _relu(x: Array) -> Array:
    y: Array = np.maximum(x, 0)
    return y


def _identity(x: Array) -> Array:
    return x


# Hendrycks and Gimpel, "Gaussian error linear units" (2016), for silu, gelu and its tanh form.
_KINDS: Mapping[str, Callable[[Array], Array]] = {
    "silu": _silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": _relu,
    "sigmoid": _sigmoid,
    "identity": _identity,
}
CLAMPED = "clamped_swiglu"


def gated_act(
    *,
    gate: Array,
    up: Array | None = None,
    kind: str = "silu",
    alpha: float = 1.702,
    limit: float = 7.0,
    packed: str = "",
) -> tuple[Array, ...]:
    """act(gate) * up, or act(gate) where up is absent: f32, gate's shape [rows, d]. OpError for an unknown kind.

    The kind clamped_swiglu is g * sigmoid(alpha * g) * (u + 1) with g = min(gate, limit) and u = up within -limit and
    limit, as gpt-oss has it (arXiv 2508.10925); it needs up, and alone reads ``alpha`` and ``limit``.
    Where ``packed`` names a layout, what ``quantize`` gives of the result is a further output.
    """
    wide = gate.astype(np.float64)
    if kind == CLAMPED:
        if up is None:
            raise OpError(f"gated_act of the kind {CLAMPED} needs up.")
        y = _clamped_swiglu(wide, up.astype(np.float64), alpha, limit)
    elif kind not in _KINDS:
        raise OpError(f"gated_act has the kinds {', '.join((*_KINDS, CLAMPED))} and not {kind}.")
    else:
        y = _KINDS[kind](wide) if up is None else _KINDS[kind](wide) * up
    return and_packed(y.astype(np.float32), packed)


def _clamped_swiglu(gate: Array, up: Array, alpha: float, limit: float) -> Array:
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    with np.errstate(over="ignore"):
        y: Array = gate / (1 + np.exp(-alpha * gate)) * (up + 1)
    return y


def add(*, a: Array, b: Array) -> tuple[Array]:
    """a + b in f32, element by element."""
    return (a.astype(np.float32) + b.astype(np.float32),)


def scale_softcap(*, x: Array, scale: float = 1.0, softcap: float = 0.0) -> tuple[Array]:
    """softcap * tanh(scale * x / softcap), or scale * x where softcap is 0: f32, x's shape [rows, d].

    Logits of large vocabularies come through it: of Cohere's models scaled, of Gemma 2 capped (arXiv 2408.00118). An
    infinity becomes softcap with its sign; a NaN stays.
    """
    y = x.astype(np.float64) * scale
    if softcap:
        y = softcap * np.tanh(y / softcap)
    return (y.astype(np.float32),)


def gated_act_cases(rng: Generator) -> Iterator[Case]:
    for rows, width, kind, gated in (
        (1, 64, "silu", True),
        (5, 172, "silu", True),
        (3, 40, "silu", False),
        (7, 64, "gelu", True),
        (2, 768, "gelu_tanh", False),
        (9, 33, "gelu_tanh", True),
        (4, 128, "relu", False),
        (5, 72, "sigmoid", True),
        (3, 88, "identity", True),
        (6, 90, CLAMPED, True),
    ):
        gate = rng.standard_normal((rows, width), np.float32) * np.float32(3)
        gate[0, :4] = 0, 30, -30, -100  # where exp over- or underflows
        inputs = {"gate": gate}
        if gated:
            inputs["up"] = rng.standard_normal((rows, width), np.float32)
        yield Case(f"{kind} {rows}x{width}{' gated' * gated}", Dims(T=rows), inputs, attrs={"kind": kind})
    for rows, width, kind, packed in (
        (1, 96, "silu", "q8g32"), (4, 192, "gelu_tanh", "q8g32"), (3, 384, "silu", "q8g128"),
    ):  # fmt: skip
        inputs = {name: rng.standard_normal((rows, width), np.float32) for name in ("gate", "up")}
        attrs: dict[str, Any] = {"kind": kind, "packed": packed}
        yield Case(f"{kind} {rows}x{width} {packed}", Dims(T=rows), inputs, attrs=attrs)
    inputs = {name: rng.standard_normal((5, 72), np.float32) * np.float32(3) for name in ("gate", "up")}
    attrs = {"kind": CLAMPED, "alpha": 1.3, "limit": 2.5}
    yield Case(f"{CLAMPED} 5x72, alpha 1.3, limit 2.5", Dims(T=5), inputs, attrs=attrs)


def add_cases(rng: Generator) -> Iterator[Case]:
    for rows, width in ((1, 64), (1, 1), (9, 33), (40, 288)):
        inputs = {name: rng.standard_normal((rows, width), np.float32) for name in ("a", "b")}
        yield Case(f"{rows}x{width}", Dims(T=rows), inputs)


def scale_softcap_cases(rng: Generator) -> Iterator[Case]:
    for rows, width, scale, softcap in (
        (1, 64, 1.0, 30.0),
        (5, 320, 0.0625, 0.0),
        (3, 33, 1.0, 0.0),
        (9, 1000, 2.5, 5.0),
        (2, 1, 1.0, 50.0),
    ):
        x = rng.standard_normal((rows, width), np.float32) * np.float32(20)
        x[0, :1] = 1e30  # beyond any cap
        attrs = {"scale": scale, "softcap": softcap}
        yield Case(f"{rows}x{width}, scale {scale}, softcap {softcap}", Dims(R=rows), {"x": x}, attrs=attrs)


SPECS = (
    OpSpec(
        "gated_act",
        inputs=("gate", "up?"),
        outputs=("y", "packed?"),
        attrs={"kind": "silu", "alpha": 1.702, "limit": 7.0, "packed": ""},
        reference=gated_act,
        tolerance=Tolerance(1e-5, 1e-5),
        cases=gated_act_cases,
    ),
    OpSpec(
        "add",
        inputs=("a", "b"),
        outputs=("y",),
        reference=add,
        tolerance=Tolerance(0.0, 0.0),
        cases=add_cases,
    ),
    OpSpec(
        "scale_softcap",
        inputs=("x",),
        outputs=("y",),
        attrs={"scale": 1.0, "softcap": 0.0},
        reference=scale_softcap,
        tolerance=Tolerance(1e-5, 1e-5),
        cases=scale_softcap_cases,
    ),
)
