"""What an op's function sees of a step: its arguments by name, as MLX arrays and packed weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from engine.backend.v1 import Array, BoundCall, Dims, Frame

from .kernels import Run


@dataclass(frozen=True)
class Operands:
    """One call in one step. Weights are ``weights.Affine`` or ``weights.Dense``."""

    bound: BoundCall
    frame: Frame
    kernels: Run | None
    """What launches Metal kernels, where there are any."""

    @property
    def dims(self) -> Dims:
        return self.frame.dims

    def __getitem__(self, name: str) -> mx.array:
        """An input."""
        value: mx.array = self.frame.values[self.bound.call.inputs[name].id]
        return value

    def get(self, name: str) -> mx.array | None:
        """An input that may be absent."""
        return self[name] if name in self.bound.call.inputs else None

    def wide(self, name: str) -> mx.array:
        """An input of numbers, as f32."""
        return self[name].astype(mx.float32)

    def on_host(self, name: str) -> Array:
        """A step input as a host array. Only for what comes with the step: it was written by the host, so that looking at it
        waits for nothing."""
        return np.array(self[name])

    def weight(self, name: str) -> Any:
        """A packed weight."""
        return self.bound.weights[name].handle

    def vector(self, name: str) -> mx.array:
        """A weight that is no matrix, f32."""
        dense: mx.array = self.weight(name).array
        return dense.astype(mx.float32)

    def has(self, name: str) -> bool:
        call = self.bound.call
        return name in call.inputs or name in call.weights or name in call.states

    def family(self, name: str) -> list[Any]:
        """The packed weights ``name.0``, ``name.1``, ..., None for those that are absent; as many as there are outputs."""
        return [self.weight(f"{name}.{n}") if self.has(f"{name}.{n}") else None for n in range(self.outputs)]

    @property
    def outputs(self) -> int:
        return len(self.bound.call.outputs)

    def attr(self, name: str) -> Any:
        return self.bound.call.attr(name)

    def state(self, name: str) -> mx.array:
        state: mx.array = self.frame.states[self.bound.call.states[name]]
        return state

    def put_state(self, name: str, state: mx.array) -> None:
        """The state's next version; nothing else may keep the old one, or it would be copied."""
        self.frame.states[self.bound.call.states[name]] = state


Op = Callable[[Operands], tuple[mx.array, ...]]
Rules = Mapping[str, Op]
