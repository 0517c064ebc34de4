"""What ops do to the device while a step is recorded: launches of kernels, and the memory that they work in."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

ALIGNMENT = 512


@dataclass(frozen=True)
class Launch:
    """A kernel as it was launched: ``run(*args, **meta)`` launches it again."""

    run: Callable[..., Any]
    name: str
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    meta: Mapping[str, Any]

    def again(self) -> None:
        self.run(*self.args, **self.meta)


class Arena:
    """Memory at fixed addresses, which the recorded steps of a segment use in turn. A block belongs to a value, or to several
    beside each other, until all of these die, and stays when a step has ended, so that what was recorded with it can be launched
    again."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.blocks: list[torch.Tensor] = []
        self._free: list[torch.Tensor] = []
        self._taken: dict[int, torch.Tensor] = {}

    @property
    def nbytes(self) -> int:
        return sum(len(block) for block in self.blocks)

    def begin(self) -> None:
        """For another step: nothing is taken."""
        self._free, self._taken = list(self.blocks), {}

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The smallest free block that is large enough, or a new one."""
        nbytes = prod(shape) * dtype.itemsize
        fitting = [n for n, block in enumerate(self._free) if len(block) >= nbytes]
        block = self._free.pop(min(fitting, key=lambda n: len(self._free[n]))) if fitting else self._new(nbytes)
        self._taken[block.data_ptr()] = block
        return block[:nbytes].view(dtype).view(shape)

    def keep(self, values: Iterable[torch.Tensor]) -> None:
        """All blocks have died but those in which these values lie."""
        kept = {value.untyped_storage().data_ptr() for value in values}
        for key in self._taken.keys() - kept:
            self._free.append(self._taken.pop(key))

    def _new(self, nbytes: int) -> torch.Tensor:
        size = max(-(-nbytes // ALIGNMENT), 1) * ALIGNMENT
        self.blocks.append(torch.empty(size, dtype=torch.uint8, device=self.device))
        return self.blocks[-1]


@dataclass
class Recording:
    """The launches of one step."""

    arena: Arena
    launches: list[Launch] = field(default_factory=list)


class _Current(threading.local):
    recording: Recording | None = None


_current = _Current()


@contextmanager
def recorded(arena: Arena) -> Iterator[Recording]:
    """Within it this thread's launches are kept, and its memory is the arena's."""
    arena.begin()
    _current.recording = recording = Recording(arena)
    try:
        yield recording
    finally:
        _current.recording = None


def submit(one: Launch) -> None:
    """Launches it."""
    one.again()
    if _current.recording is not None:
        _current.recording.launches.append(one)


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory that nobody has written to."""
    if _current.recording is not None:
        return _current.recording.arena.empty(shape, dtype)
    return torch.empty(shape, dtype=dtype, device=device)
