"""What the scheduler asks of an allocator: room for sequences in the KV cache, by integers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from .block_pool import PoolStats
from .cache_group import CacheGroup

BlockTable = tuple[int, ...]
BlockCopy = tuple[int, int]
Runs = tuple[tuple[int, int], ...]
"""Blocks one after the other: the first and how many, of each run."""


class Remap(NamedTuple):
    """Of a cache group, blocks that lose their memory, and then blocks that get some."""

    unmapped: Runs
    mapped: Runs


@dataclass(frozen=True)
class PrefixHit:
    """The first ``num_tokens`` tokens of a sequence, which need no computing, and where they lie: blocks, a tuple a group,
    with the null block for those that no later query sees.

    Cached blocks are good until the next call that changes the allocator. An empty tuple asks for fresh blocks, which
    will be filled with what was swapped out.
    """

    num_tokens: int
    blocks: tuple[BlockTable, ...]


class KVAllocator(Protocol):
    """Room in the KV cache for sequences, by integer ids. ``open`` comes first and ``close`` last.

    A step is built by ``allocate`` for each of its sequences and ended by ``take_copies``. The device applies a
    step's copies before its writes, and steps in order, so blocks freed here may be given out again at once.
    """

    groups: tuple[CacheGroup, ...]

    def open(self, seq_id: int, limit: int, salt: bytes = b"", prompt: int = 0) -> None:
        """A new sequence of at most ``limit`` tokens, ``prompt`` of them known, holding nothing yet. AdmissionError if it
        could never fit."""
        ...

    def match(self, seq_id: int, token_ids: list[int], limit: int) -> PrefixHit:
        """The longest cached prefix of ``token_ids[:limit]`` that leaves at least one of them to compute."""
        ...

    def can_fit(self, seq_id: int, count: int, hit: PrefixHit | None = None) -> bool:
        """Whether ``count`` more tokens, a step's share at a time, find room now, after ``hit`` is attached."""
        ...

    def allocate(self, seq_id: int, count: int, hit: PrefixHit | None = None) -> bool:
        """Room to write ``count`` more tokens in one step, after attaching ``hit`` to a sequence that holds nothing. All
        or nothing; True for a step's share of what ``can_fit`` answers True for."""
        ...

    def tables(self, seq_id: int) -> tuple[BlockTable, ...]:
        """A block table a group, over all tokens allocated, with the null block for what no later query sees. Immutable,
        and the same object until it changes."""
        ...

    def can_fork(self, parent: int, children: int) -> bool:
        """Whether the parent and ``children`` forks of it could each write one token more."""
        ...

    def fork(self, parent: int, child: int) -> None:
        """The child, open and holding nothing, gets all that the parent holds."""
        ...

    def take_copies(self) -> tuple[tuple[BlockCopy, ...], ...]:
        """Ends a step: its block copies a group, (source, destination). No destination is a source in the same step."""
        ...

    def commit(self, seq_id: int, token_ids: list[int], num_computed: int) -> None:
        """The first ``num_computed`` tokens are in the cache for sure: prefixes of them may now be hit."""
        ...

    def rewind(self, seq_id: int, num_tokens: int) -> None:
        """Of the tokens allocated last, in one step, only those up to ``num_tokens`` stay, at least the first of them."""
        ...

    def free(self, seq_id: int) -> None:
        """Gives back all that the sequence holds; it stays open."""
        ...

    def close(self, seq_id: int) -> None:
        """Frees the sequence and forgets it."""
        ...

    def forget(self) -> None:
        """The contents of the cache are lost, and it begins anew: no prefix can be hit until it is computed again."""
        ...

    def stats(self) -> tuple[PoolStats, ...]:
        """Block counts a group."""
        ...

    def check(self) -> None:
        """Raises AssertionError where an invariant is broken (tests)."""
        ...


@runtime_checkable
class MappingAllocator(Protocol):
    """An allocator whose blocks are addresses, to which memory is mapped; block 0 always has it."""

    def take_remaps(self) -> tuple[Remap, ...]:
        """Ends a step: what is to be mapped a group, once blocks are saved that leave for the host, and before any other is
        read or written; () if nothing is. After ``forget`` nothing but block 0 is mapped."""
        ...
