"""What makes an op: its names, its NumPy reference, how near a provider must come to it, and random cases for both."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from ..backend.v1 import Array, Dims, KVSpec

if TYPE_CHECKING:
    import numpy as np

# A string, since numpy.random loads on first use and costs as much as the whole catalogue.
Generator: TypeAlias = "np.random.Generator"


@dataclass(frozen=True)
class Tolerance:
    """|got - want| <= absolute + relative * |want|, element by element; integers must be equal."""

    absolute: float = 1e-5
    relative: float = 1e-5


@dataclass(frozen=True)
class Case:
    """One random instance of an op: everything its reference takes, and the shapes of what it gives.

    Arguments of a family are named ``name.0, name.1, ...``. ``weights``: argument -> (format name, raw uint8 rows,
    shape). ``states``: argument -> contents: history as it is; k and v as f32 [blocks, block_size, kv_heads, head_dim],
    which ``kv.plain_states`` (or a provider's kv_write) stores in the dtype of ``kv``. NaN marks what no op may read.
    ``kv`` is None where an op has no KV state.
    """

    name: str
    dims: Dims
    inputs: Mapping[str, Array]
    weights: Mapping[str, tuple[str, Array, tuple[int, ...]]] = field(default_factory=dict)
    states: Mapping[str, Array] = field(default_factory=dict)
    attrs: Mapping[str, Any] = field(default_factory=dict)
    kv: KVSpec | None = None


@dataclass(frozen=True)
class OpSpec:
    """An op of the catalogue.

    ``inputs``, ``weights`` and ``states`` name its arguments; a trailing "?" marks one that may be absent, a trailing
    "*" a family ``name.0, name.1, ...`` (one a cache group, or one a fused linear) that the reference takes as a list;
    in a family marked "*?" any member may be absent: it is None in the list, or beyond its end. ``outputs`` names its
    results, where "?" marks one that is there only if an attribute of its name is set. ``attrs`` are defaults; REQUIRED marks
    one without.

    ``reference`` takes all of these as keyword arguments (weights as dense f32, states as mutable arrays that it writes
    in place; plain KV arrays tell their storage tag by their NumPy dtype) and returns a flat tuple of outputs, a
    family's members in its place. A reference that needs the step's counts has a further keyword ``dims``.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    reference: Callable[..., tuple[Array, ...]]
    weights: tuple[str, ...] = ()
    states: tuple[str, ...] = ()
    attrs: Mapping[str, Any] = field(default_factory=dict)
    tolerance: Tolerance = Tolerance()
    cases: Callable[[Generator], Iterator[Case]] | None = None

    @property
    def takes_dims(self) -> bool:
        """Whether the reference wants the step's Dims as keyword ``dims``."""
        return "dims" in inspect.signature(self.reference).parameters

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The reference's keywords of inputs, weights and states given by name: families become lists."""
        families = {name.rstrip("*?") for name in (*self.inputs, *self.weights, *self.states) if "*" in name}
        arguments: dict[str, Any] = {name: [] for name in families}
        for name, value in given.items():
            family, _, member = name.partition(".")
            if family not in families:
                arguments[name] = value
                continue
            members = arguments[family]
            members.extend([None] * (int(member) + 1 - len(members)))
            members[int(member)] = value
        return arguments


class _Required:
    def __repr__(self) -> str:
        return "REQUIRED"


REQUIRED = _Required()
