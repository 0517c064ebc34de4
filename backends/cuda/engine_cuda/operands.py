"""What an op's function sees of a step: its arguments by name, as tensors and packed weights, and where results go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine.backend.v1 import BoundCall, Dims, Frame

from . import recording
from .arrays import DTYPES
from .cuts import Cuts


@dataclass(frozen=True)
class Operands:
    """One call in one step. Weights are ``weights.Coded`` or ``weights.Dense``. ``device`` is where results are made,
    ``cuts`` how products are cut there."""

    bound: BoundCall
    frame: Frame
    device: torch.device
    cuts: Cuts

    @property
    def dims(self) -> Dims:
        return self.frame.dims

    def __getitem__(self, name: str) -> torch.Tensor:
        """An input."""
        value: torch.Tensor = self.frame.values[self.bound.call.inputs[name].id]
        return value

    def get(self, name: str) -> torch.Tensor | None:
        """An input that may be absent."""
        return self[name] if name in self.bound.call.inputs else None

    def inputs(self, family: str) -> list[torch.Tensor]:
        """The inputs ``family.0``, ``family.1``, ..."""
        names = [name for name in self.bound.call.inputs if name.partition(".")[0] == family]
        return [self[name] for name in sorted(names, key=lambda name: int(name.partition(".")[2]))]

    def weight(self, name: str) -> Any:
        """A packed weight."""
        return self.bound.weights[name].handle

    def vector(self, name: str) -> torch.Tensor | None:
        """A weight that is no matrix, or None where it is absent."""
        return self.weight(name).array if name in self.bound.call.weights else None

    def attr(self, name: str) -> Any:
        return self.bound.call.attr(name)

    def state(self, name: str) -> torch.Tensor | None:
        """A state that may be absent."""
        names = self.bound.call.states
        return self.frame.states[names[name]] if name in names else None

    def states(self) -> list[torch.Tensor]:
        return [self.frame.states[name] for name in self.bound.call.states.values()]

    def new(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Memory that nobody has written to."""
        return recording.empty(shape, dtype, self.device)

    def result(self, output: int, *shape: int) -> torch.Tensor:
        """An output of the call, to be written: registered under its id."""
        value = self.bound.call.outputs[output]
        made = self.new(*shape, dtype=DTYPES[value.dtype])
        self.frame.values[value.id] = made
        return made

    def results(self, first: int, rows: int, widths: Sequence[int]) -> torch.Tensor:
        """Outputs from number ``first`` on, [rows, width] each, one after the other in the memory that is given."""
        values = self.bound.call.outputs[first : first + len(widths)]
        whole = self.new(rows * sum(widths), dtype=DTYPES[values[0].dtype])
        start = 0
        for value, width in zip(values, widths, strict=True):
            self.frame.values[value.id] = whole[start : start + rows * width].view(rows, width)
            start += rows * width
        return whole


Op = Callable[[Operands], None]
