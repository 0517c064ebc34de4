"""The catalogue of ops: what a program may call, each with its NumPy reference, tolerance and random cases."""

from collections.abc import Mapping

from . import (
    activation,
    attention,
    collective,
    dense,
    head,
    heads,
    kv,
    moe,
    norm,
    position,
    recurrent,
    rope_kv_write,
    step,
)
from .cases import evaluate
from .inputs import FROM_HISTORY, STEP_INPUTS
from .spec import REQUIRED, Case, OpSpec, Tolerance

OPS: Mapping[str, OpSpec] = {
    spec.name: spec
    for group in (
        step,
        dense,
        heads,
        norm,
        position,
        activation,
        kv,
        rope_kv_write,
        attention,
        recurrent,
        moe,
        head,
        collective,
    )
    for spec in group.SPECS
}

__all__ = [
    "FROM_HISTORY",
    "OPS",
    "REQUIRED",
    "STEP_INPUTS",
    "Case",
    "OpSpec",
    "Tolerance",
    "evaluate",
]
