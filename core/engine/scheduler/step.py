"""What the scheduler gives: one step of the device, and afterwards what it meant for each sequence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ..kv import BlockCopy, BlockTable, Remap
from .sequence import Sequence

FROM_HISTORY = -1
"""A token id that the device reads from history[slot, position], since a step in flight samples it."""


class ScheduledSequence(NamedTuple):
    """One sequence's part of a step: ``num_tokens`` tokens at positions ``start`` and on.

    ``token_ids``: so many ids or FROM_HISTORY. ``emits``: the chunk reaches the last token, so its last row is
    sampled. ``guessed``: how many of the last ids are guesses at what is sampled; then each of their rows and the one before
    them is sampled. ``tables``: a block table a cache group, over all tokens to the last of these. ``scored``: positions
    (from, to) whose rows are wanted for the logprobs of the prompt tokens after them. ``embedded``: those whose hidden state is
    wanted on the host.
    """

    seq_id: int
    slot: int
    start: int
    num_tokens: int
    token_ids: tuple[int, ...]
    emits: bool
    tables: tuple[BlockTable, ...]
    scored: tuple[int, int] = (0, 0)
    embedded: tuple[int, int] = (0, 0)
    guessed: int = 0


@dataclass(frozen=True, slots=True)
class Swap:
    """Blocks of a sequence, a tuple a cache group, to be saved in host memory or filled from there. What was saved last
    under the sequence's id is what is filled in: as many blocks, in the same order."""

    seq_id: int
    blocks: tuple[BlockTable, ...]


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """One step. The first ``decode_count`` sequences have one token each, the others more. ``plain``: each sequence has one
    token, whose row gives its next, and none has guesses or anything else that is asked of it.

    The device applies, in this order: ``swap_outs``, ``remaps`` (one a cache group, or none at all), ``swap_ins``,
    ``block_copies`` (a tuple a cache group, (source, destination) blocks), ``history_copies`` ((source, destination) slots),
    ``history_fills`` ((slot, token ids from position 0 on): tokens that a prefix hit skips, or that were swapped in), the
    tokens themselves, and the sampled ones.
    """

    number: int
    sequences: tuple[ScheduledSequence, ...]
    decode_count: int
    num_tokens: int
    block_copies: tuple[tuple[BlockCopy, ...], ...]
    history_copies: tuple[tuple[int, int], ...]
    history_fills: tuple[tuple[int, tuple[int, ...]], ...]
    swap_outs: tuple[Swap, ...] = ()
    swap_ins: tuple[Swap, ...] = ()
    remaps: tuple[Remap, ...] = ()
    plain: bool = False


class Update(NamedTuple):
    """A completed step's news of one sequence: its next token (of a beam the device's, which means nothing), or why it
    failed. ``nth``: which of the step's tokens for the sequence it is. ``finished``: it has left the scheduler, with its last
    token (max_tokens; of an embedding there is none) or by ``error``."""

    sequence: Sequence
    token_id: int | None
    finished: bool = False
    error: str | None = None
    nth: int = 0


@dataclass
class StepDraft:
    """A step being built. ``budget``: tokens that may still come, ``rows``: rows that may still reach the head, ``spare``:
    how many of both are left for guesses, ``plain``: how many sequences are as in a plain step."""

    budget: int
    rows: int
    spare: int = 0
    plain: int = 0
    sequences: dict[int, ScheduledSequence] = field(default_factory=dict)
    history_copies: list[tuple[int, int]] = field(default_factory=list)
    history_fills: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    swap_ins: list[Swap] = field(default_factory=list)
    out_of_blocks: bool = False

    def ordered(self) -> tuple[tuple[ScheduledSequence, ...], int]:
        """The sequences, those with one token first, and the number of these."""
        single = [s for s in self.sequences.values() if s.num_tokens == 1]
        longer = [s for s in self.sequences.values() if s.num_tokens > 1]
        return (*single, *longer), len(single)


Tokens = Mapping[int, int]
Guesses = Mapping[int, tuple[int, ...]]
Failures = Mapping[int, str]
