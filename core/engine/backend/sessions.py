"""What a session does: steps, and where it can, saving, filling and moving the blocks of its cache between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from .v1 import Array, StepInputs, StepResult


class Ticket(Protocol):
    """A submitted step. ``wait`` blocks, and raises what the step raised."""

    def wait(self) -> StepResult: ...


class Session(Protocol):
    """A placed program with its states. Steps take effect in submission order; inputs are borrowed until ``wait``."""

    def submit(self, inputs: StepInputs) -> Ticket: ...
    def close(self) -> None: ...


class SwapTicket(Protocol):
    """Blocks on their way to the host. ``wait`` gives state name -> the blocks' contents, [blocks, ...] as ``copy_out``
    gives them, and raises what the step before has raised."""

    def wait(self) -> Mapping[str, Array]: ...


@runtime_checkable
class SwapSession(Protocol):
    """Optional on a session: cache blocks are saved in host memory and filled from there, for preemption by swapping.
    ``blocks`` are ids, a sequence a cache group. Both take effect in submission order with the steps."""

    def export_blocks(self, blocks: Sequence[Sequence[int]]) -> SwapTicket:
        """Saves blocks as the steps submitted before leave them; those submitted later may overwrite them."""
        ...

    def import_blocks(self, blocks: Sequence[Sequence[int]], contents: Mapping[str, Array]) -> SwapTicket:
        """Fills blocks, for the steps submitted later, with what as many were saved with, in this order. ``contents`` is
        borrowed until ``wait``, which gives nothing."""
        ...


Runs = Sequence[tuple[int, int]]
"""Blocks one after the other: the first and how many, of each run."""


@runtime_checkable
class RemapSession(Protocol):
    """Optional on a session: cache blocks of a plan with ``pages`` lose and get their memory."""

    def remap(self, unmapped: Sequence[Runs], mapped: Sequence[Runs]) -> None:
        """Takes the memory of runs of blocks away, a sequence a cache group, and then gives it to others. Takes effect in
        submission order with the steps; where it fails, what is submitted next raises that."""
        ...
