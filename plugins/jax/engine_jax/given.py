"""What an op's function gets, and what the modules of ops are: a name, the features honoured, and a maker of functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from engine.backend.v1 import Call, StepFn

from .sharing import Sharing
from .weights import Weight

DTYPES: Mapping[str, Any] = {
    "f32": jnp.float32,
    "f16": jnp.float16,
    "bf16": jnp.bfloat16,
    "int8": jnp.int8,
    "i32": jnp.int32,
    "u32": jnp.uint32,
    "u8": jnp.uint8,
}
EXACT = jax.lax.Precision.HIGHEST


@dataclass
class Given:
    """An op's arguments, traced: inputs and weights by name, and the states, which the function replaces in place."""

    inputs: Mapping[str, jax.Array]
    weights: Mapping[str, Weight]
    states: dict[str, jax.Array]

    def wide(self, name: str) -> jax.Array:
        """An input in f32, whatever it is kept in."""
        return self.inputs[name].astype(jnp.float32)

    def vector(self, name: str) -> jax.Array:
        """A weight in f32."""
        return self.weights[name].as_dtype(jnp.float32)

    def optional(self, name: str) -> jax.Array | None:
        """A weight in f32, or None where there is none of that name."""
        return self.vector(name) if name in self.weights else None


@dataclass(frozen=True)
class Site:
    """Where functions will run. ``sharing``: on which devices; ``pallas``: decode attention is the Pallas kernel, which
    Python runs where XLA cannot (``interpret``)."""

    sharing: Sharing
    pallas: bool = False
    interpret: bool = True


Function = Callable[[Given], tuple[jax.Array, ...]]
"""From the arguments to the outputs, as a part of any compiled function."""


@dataclass(frozen=True)
class Op:
    """``make(call, site)`` gives a function to trace, ``bind(call)`` one that runs by itself, as compiled functions of its own;
    an op has one of the two. ``refuse`` says why a call cannot be taken."""

    features: frozenset[str] = frozenset()
    make: Callable[[Call, Site], Function] | None = None
    bind: Callable[[Call], StepFn] | None = None
    refuse: Callable[[Call], str | None] = lambda call: None
    cached: bool = False
    """It reads or writes the KV cache."""
    writes: bool = False
    """Of ``make``: its function replaces the call's states."""


def dot(x: jax.Array, matrix: jax.Array) -> jax.Array:
    """x [rows, K] times matrix [N, K] transposed, f32: exactly in f32, or in bf16 where x is bf16."""
    kind: DTypeLike = jnp.bfloat16 if x.dtype == jnp.bfloat16 else jnp.float32
    precision = None if kind == jnp.bfloat16 else EXACT
    dims = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(
        x.astype(kind), matrix.astype(kind), dims, precision=precision, preferred_element_type=jnp.float32
    )
