"""What the builder of programs records into: op calls in their order, the values between them, and the step inputs that they
read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..backend.v1 import Call, Value, WeightRef
from ..errors import ModelError
from ..kv import CacheGroup
from ..ops import OPS, STEP_INPUTS
from ..ops.spec import REQUIRED
from .weights import ConstantWeight


class Recorder:
    """One instance records one program; ``groups`` are the session's."""

    def __init__(self, groups: Sequence[CacheGroup], vocab: int) -> None:
        self._groups = tuple(groups)
        self._vocab = vocab
        self._calls: list[Call] = []
        self._count = 0
        self._inputs: dict[str, Value] = {}
        self._axes: dict[str, tuple[str | None, ...]] = {}
        self._scope = "embed"

    def _value(self, name: str, shape: tuple[int | str, ...], dtype: str) -> Value:
        self._count += 1
        return Value(self._count - 1, name, shape, dtype)

    def input(self, name: str) -> Value:
        """A step input by its name; families such as ``page_table.0`` by their member."""
        if name not in self._inputs:
            family, dot, member = name.partition(".")
            shape, dtype = STEP_INPUTS[f"{family}.*" if dot else name]
            sizes = tuple((self._vocab + 31) // 32 if size == "V/32" else size for size in shape)
            self._inputs[name] = self._value(name, sizes, dtype)
        return self._inputs[name]

    def call(
        self,
        op: str,
        inputs: Mapping[str, Value | None],
        outputs: Sequence[tuple[str, tuple[int | str, ...], str]],
        weights: Mapping[str, WeightRef | None] | None = None,
        states: Mapping[str, str] | None = None,
        **attrs: Any,
    ) -> tuple[Value, ...]:
        """Record one call; attributes equal to the op's default are left out."""
        spec = OPS[op]
        unknown = set(attrs) - set(spec.attrs)
        if unknown:
            raise ModelError(f"The op {op} has no attribute {sorted(unknown)[0]!r}; it has {sorted(spec.attrs)}.")
        missing = [name for name, default in spec.attrs.items() if default is REQUIRED and name not in attrs]
        if missing:
            raise ModelError(f"The op {op} needs the attribute {missing[0]!r}.")
        kept = {k: v for k, v in attrs.items() if spec.attrs[k] is REQUIRED or v != spec.attrs[k]}
        results = tuple(self._value(name, shape, dtype) for name, shape, dtype in outputs)
        self._calls.append(
            Call(
                op,
                {k: v for k, v in inputs.items() if v is not None},
                results,
                {k: v for k, v in (weights or {}).items() if v is not None},
                states or {},
                kept,
                scope=self._scope,
            )
        )
        return results

    def layers(self, count: int) -> Iterator[int]:
        """The numbers of so many layers; what is recorded meanwhile belongs to the layer."""
        for i in range(count):
            self._scope = f"layers.{i}"
            yield i
        self._scope = ""

    def name_axes(self, weight: WeightRef, *axes: str | None) -> WeightRef:
        """Name the logical axes of a weight (embed, heads, kv_heads, mlp, experts, vocab), for sharding."""
        self._axes[weight.name] = axes
        return weight

    def _needs(self, weight: WeightRef, shape: tuple[int | str, ...]) -> None:
        if weight.shape != shape:
            have, need = list(weight.shape), list(shape)
            raise ModelError(
                f"{weight.name} has the shape {have}, but this model needs {need}; the checkpoint is inconsistent."
            )

    def constant(self, name: str, array: Any) -> ConstantWeight:
        return ConstantWeight(name, np.asarray(array, np.float32))

    def _group_of(self, layer: int) -> int:
        for number, group in enumerate(self._groups):
            if layer in group.layers:
                return number
        raise ModelError(f"Layer {layer} is in none of the model's cache groups.")

    def _place(self, group: int) -> dict[str, Value]:
        """Where the sequences of a step lie in the memory of a group."""
        names = (f"page_table.{group}", "seq_starts", "query_offsets")
        return {name.partition(".")[0]: self.input(name) for name in names}
