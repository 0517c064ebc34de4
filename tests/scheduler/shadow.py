"""A shadow device: integer KV memory, history rows, and a model that hashes all it reads; and the engine around it."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from shadow_beams import STOP, VOCABULARY, Beams, Row, candidates, search

from engine.kv import (
    BlockTable,
    CacheGroup,
    ContiguousAllocator,
    HostPool,
    KVAllocator,
    PagedAllocator,
    Remap,
    VirtualAllocator,
)
from engine.scheduler import (
    FROM_HISTORY,
    ScheduledSequence,
    ScheduledStep,
    Scheduler,
    SchedulerConfig,
    Sequence,
)
from engine.scheduler.sequence import NO_SLOT

POISON = None
Given = tuple[int, ...] | Row
"""What a step gives of a sequence: the token of each row, or a beam's candidates."""


def cache_value(token: int, salt: bytes, seen: Seq[Seq[int]]) -> int:
    """What the model keeps of a token: it depends on all that each group's attention sees before it."""
    return hash((token, salt, *map(tuple, seen)))


def next_token(value: int, history: list[int | None], branch: int) -> int:
    """Sampling: from the last token's value, the history (penalties) and the branch."""
    return hash((value, tuple(history), branch, 7)) % VOCABULARY


def evaluate(sequence: Sequence, groups: tuple[CacheGroup, ...]) -> list[int]:
    """The output of one sequence computed alone, token by token."""
    tokens, values = sequence.prompt_ids, list[int]()
    while len(tokens) < sequence.num_prompt + sequence.max_tokens:
        for position in range(len(values), len(tokens)):
            seen = [values[first_seen(group, position) :] for group in groups]
            values.append(cache_value(tokens[position], sequence.salt, seen))
        tokens.append(next_token(values[-1], [*tokens], sequence.branch))
        if tokens[-1] == STOP:
            break
    return tokens[sequence.num_prompt :]


def evaluate_beams(
    prompt: list[int], salt: bytes, groups: tuple[CacheGroup, ...], width: int, max_tokens: int
) -> list[tuple[int, ...]]:
    """The beams of one request searched alone."""

    def row_of(output: Iterable[int]) -> Row:
        tokens, values = [*prompt, *output], list[int]()
        for position, token in enumerate(tokens):
            values.append(cache_value(token, salt, [values[first_seen(group, position) :] for group in groups]))
        return candidates(values[-1], tokens, width)

    return search(row_of, width, max_tokens)


def first_seen(group: CacheGroup, position: int) -> int:
    """The first position that a query sees."""
    return 0 if group.window is None else max(0, position + 1 - group.window)


def readable(allocator: KVAllocator, group: int) -> set[int]:
    """The blocks whose contents somebody may read yet: all others may hold anything."""
    if isinstance(allocator, PagedAllocator):
        pool = allocator._groups[group].pool
        return {block for block, refs in enumerate(pool.refs) if refs or block in pool.index}
    assert isinstance(allocator, ContiguousAllocator)
    held = {block for seq_id in allocator._sequences for block in allocator.tables(seq_id)[group]}
    return held | set(allocator._groups[group].copies.values())


def agreed(part: ScheduledSequence, given: Given) -> int:
    """How many guesses hold; none does behind the end."""
    assert isinstance(given, tuple)
    held = 0
    for guess, token in zip(part.token_ids[-part.guessed :], given, strict=False):
        if guess != token or token == STOP:
            break
        held += 1
    return held


class ShadowDevice:
    """Runs steps as a backend would, in submission order, reading the cache through the block tables only. ``pages``: blocks of
    each group that are mapped at a time; only the null block's page is at first. ``budget``: blocks that may be."""

    def __init__(
        self,
        allocator: KVAllocator,
        num_blocks: tuple[int, ...],
        slots: int,
        max_len: int,
        pages: tuple[int, ...] = (),
        budget: tuple[int, ...] = (),
    ) -> None:
        self.groups = allocator.groups
        self.memory: list[list[list[int | None]]] = [
            [[POISON] * group.block_size for _ in range(number)]
            for group, number in zip(self.groups, num_blocks, strict=True)
        ]
        self.history: list[list[int | None]] = [[POISON] * max_len for _ in range(slots)]
        self.pages, self.budget = pages, budget
        self.mapped = [set(range(page)) for page in pages]

    def remap(self, remaps: tuple[Remap, ...]) -> None:
        for mapped, memory, page, budget, remap in zip(
            self.mapped, self.memory, self.pages, self.budget, remaps, strict=bool(remaps)
        ):
            lost, got = (
                {block for first, count in runs for block in range(first, first + count)}
                for runs in (remap.unmapped, remap.mapped)
            )
            assert lost <= mapped and not got & (mapped - lost) and min(lost | got, default=page) >= page
            mapped.difference_update(lost)
            mapped.update(got)
            assert len(mapped) <= budget, "more is mapped than there is memory"
            for block in lost | got:
                memory[block] = [POISON] * len(memory[block])

    def save(self, tables: tuple[BlockTable, ...]) -> list[list[list[int | None]]]:
        self.check_mapped(tables)
        return [[list(memory[b]) for b in table] for memory, table in zip(self.memory, tables, strict=True)]

    def check_mapped(self, blocks: Iterable[Iterable[int]]) -> None:
        assert all(set(some) <= mapped for some, mapped in zip(blocks, self.mapped, strict=False)), "no memory is there"

    def fill(self, tables: tuple[BlockTable, ...], saved: list[list[list[int | None]]]) -> None:
        self.check_mapped(tables)
        for memory, table, blocks in zip(self.memory, tables, saved, strict=True):
            for block, contents in zip(table, blocks, strict=True):
                memory[block] = list(contents)

    def submit(self, step: ScheduledStep, sequences: dict[int, Sequence]) -> dict[int, Given]:
        self.check_mapped([{block for pair in copies for block in pair} for copies in step.block_copies])
        for memory, copies in zip(self.memory, step.block_copies, strict=True):
            assert not {source for source, _ in copies} & {target for _, target in copies}
            for source, target in copies:
                memory[target] = list(memory[source])
        rows = {source: list(self.history[source]) for source, _ in step.history_copies}
        for source, target in step.history_copies:
            self.history[target] = list(rows[source])
        for slot, tokens in step.history_fills:
            self.history[slot][: len(tokens)] = tokens
        self.check(step, sequences)
        return {
            part.seq_id: token
            for part in step.sequences
            if (token := self.run(part, sequences[part.seq_id])) is not None
        }

    def run(self, part: ScheduledSequence, sequence: Sequence) -> Given | None:
        history, end = self.history[part.slot], part.start + part.num_tokens
        tokens: list[int] = []  # of the last known token, and of each guess
        for position, known in enumerate(part.token_ids, start=part.start):
            assert known != FROM_HISTORY or not sequence.synchronous
            token = history[position] if known == FROM_HISTORY else known
            assert token is not POISON and token >= 0
            history[position] = token
            value = cache_value(token, sequence.salt, [self.read(part, g, position) for g in range(len(self.groups))])
            for memory, table, group in zip(self.memory, part.tables, self.groups, strict=True):
                memory[table[position // group.block_size]][position % group.block_size] = value
            if position >= end - part.guessed - 1:
                tokens.append(next_token(value, history[: position + 1], sequence.branch))
        if not part.emits:
            return None
        if sequence.beam:  # what it would have sampled is in the history, and is wrong there
            history[end] = -2
            return candidates(value, history[:end], 3)
        history[end] = tokens[-1]
        return tuple(tokens)

    def read(self, part: ScheduledSequence, number: int, position: int) -> list[int]:
        """What the query at a position sees of a group, but for its own value."""
        group, table, memory = self.groups[number], part.tables[number], self.memory[number]
        values: list[int] = []
        for before in range(first_seen(group, position), position):
            block = table[before // group.block_size]
            value = memory[block][before % group.block_size]
            assert block and value is not POISON, "a read of what was not written for this sequence"
            values.append(value)
        return values

    def check(self, step: ScheduledStep, sequences: dict[int, Sequence]) -> None:
        """The promises about a step that hold for each one."""
        parts = step.sequences
        for part in parts:
            self.check_mapped(part.tables)
        assert parts and step.num_tokens == sum(part.num_tokens for part in parts)
        assert [part.num_tokens == 1 for part in parts] == [i < step.decode_count for i in range(len(parts))]
        assert len({part.slot for part in parts}) == len(parts) == len({part.seq_id for part in parts})
        for number, group in enumerate(self.groups):
            for part in parts:
                end, table, behind = part.start + part.num_tokens, part.tables[number], group.behind(part.start)
                assert len(part.token_ids) == part.num_tokens and len(table) == group.blocks(end)
                assert not any(table[:behind]) and all(table[behind:]), (
                    "blocks behind the window, and no others, are null"
                )
                written = set(table[part.start // group.block_size :])
                others = {block for other in parts if other is not part for block in other.tables[number]}
                assert not written & others, "a block is written by one sequence and seen by another"

    def poison(self, scheduler: Scheduler, allocator: KVAllocator) -> None:
        """Overwrites all that nobody may read again: free blocks without a prefix, rows of free slots."""
        for number, memory in enumerate(self.memory):
            leaving = {block for swap in scheduler.swapper._leaving.values() for block in swap.blocks[number]}
            wanted = readable(allocator, number) | leaving
            for block in range(len(memory)):
                if block not in wanted:
                    memory[block] = [POISON] * len(memory[block])
        held = {sequence.slot for sequence in scheduler.sequences.values()}
        for slot, row in enumerate(self.history):
            if slot not in held:
                row[:] = [POISON] * len(row)

    def lose(self) -> None:
        """The device's state is gone."""
        self.mapped = [set(range(page)) for page in self.pages]
        for memory in self.memory:
            memory[:] = [[POISON] * len(block) for block in memory]
        for row in self.history:
            row[:] = [POISON] * len(row)


@dataclass
class Engine:
    """A scheduler, its shadow device, and the steps between them."""

    config: SchedulerConfig
    groups: tuple[tuple[int, int], ...]
    """(block size, blocks) of each."""
    depth: int = 1
    windows: tuple[int | None, ...] = ()
    kind: str = "paged"
    host: int | None = None
    """Tokens that the host tier holds; None: preemption by recomputation."""
    in_flight: deque[tuple[ScheduledStep, dict[int, Given], dict[int, Any]]] = field(default_factory=deque)
    saved: dict[int, Any] = field(default_factory=dict)
    sequences: dict[int, Sequence] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    """Aborted or failed: they owe no output."""
    beams: dict[str, Beams] = field(default_factory=dict)
    searched: set[str] = field(default_factory=set)
    """Beam requests that have come to their end."""
    scored: dict[int, set[int]] = field(default_factory=dict)
    """Sequence -> prompt positions whose rows have come."""
    guessing: dict[int, list[int]] = field(default_factory=dict)
    """Sequences with guesses -> the output that will come of them."""
    random: random.Random = field(default_factory=lambda: random.Random(0))
    seen: Counter[str] = field(default_factory=Counter)
    """What the steps had in them."""

    def __post_init__(self) -> None:
        blocks = tuple(number for _, number in self.groups)
        windows = self.windows or (None,) * len(blocks)
        specs = tuple(
            CacheGroup(f"g{i}", "full" if window is None else "window", size, window)
            for i, ((size, _), window) in enumerate(zip(self.groups, windows, strict=True))
        )
        self.allocator: PagedAllocator | ContiguousAllocator
        pages: tuple[int, ...] = ()
        budget = blocks
        if self.kind == "virtual":
            pages = tuple(2 if number % 2 else 1 for number in blocks)
            budget = tuple(number - 1 + page for number, page in zip(blocks, pages, strict=True))
            blocks = tuple(2 * number for number in budget)
            self.allocator = VirtualAllocator(specs, budget, pages, blocks)
        elif self.kind == "contiguous":
            self.allocator = ContiguousAllocator(specs, blocks)
        else:
            self.allocator = PagedAllocator(specs, blocks, self.config.max_batch_tokens)
        host = None if self.host is None else HostPool(self.host, tuple(size for size, _ in self.groups))
        self.scheduler = Scheduler(self.config, self.allocator, host)
        config = self.config
        self.device = ShadowDevice(self.allocator, blocks, config.max_sequences, config.max_model_len, pages, budget)

    def add(
        self,
        prompt: list[int],
        max_tokens: int,
        n: int = 1,
        priority: int = 0,
        salt: bytes = b"",
        kind: str = "plain",
    ) -> None:
        seq_id = len(self.sequences)
        sequence = Sequence(seq_id, f"r{seq_id}", prompt, max_tokens, priority, salt)
        sequence.beam, sequence.scores_prompt = kind == "beams", kind == "scores"
        sequence.synchronous = kind in ("synchronous", "beams", "guesses")
        for branch in self.scheduler.add(sequence, 1 if sequence.beam else n):
            self.sequences[branch.seq_id] = branch
            if kind == "guesses":
                self.guessing[branch.seq_id] = evaluate(branch, self.allocator.groups)
        if sequence.beam:
            self.beams[sequence.request_id] = Beams(3, max_tokens, [seq_id])
        if sequence.scores_prompt:
            self.scored[seq_id] = set()

    def schedule(self, only: str | None = None, joining: int | None = None) -> bool:
        running = [s for s in self.scheduler.sequences.values() if s.slot != NO_SLOT]
        decodes = {s.seq_id for s in running if s.wanted == 1 or (s.unforked and s.wanted == 0)}  # or forks now
        guesses = {i: self.guess(self.sequences[i]) for i in sorted(decodes & self.guessing.keys())}
        step = self.scheduler.schedule(only, joining, guesses)
        if step is None:
            return False
        forks = {slot for _, slot in step.history_copies}
        others = sum(
            part.num_tokens for part in step.sequences if part.seq_id not in decodes and part.slot not in forks
        )
        if joining is not None and others < step.num_tokens:
            assert others <= joining
            self.seen["steps in which few tokens join"] += others == joining > 0
        assert only in (None, *(self.sequences[part.seq_id].request_id for part in step.sequences))
        assert step.num_tokens <= self.config.max_batch_tokens
        rows = sum(part.emits + part.guessed + part.scored[1] - part.scored[0] for part in step.sequences)
        assert rows <= self.config.rows
        self.seen["scored"] += sum(part.scored[1] - part.scored[0] for part in step.sequences)
        self.seen["block copies"] += sum(map(len, step.block_copies))
        self.seen["history copies"] += len(step.history_copies)
        self.seen["prefix hits"] += len(step.history_fills)
        self.seen["tokens from history"] += sum(FROM_HISTORY in part.token_ids for part in step.sequences)
        self.seen["chunks"] += sum(part.num_tokens > 1 and not part.emits for part in step.sequences)
        self.seen["swaps"] += len(step.swap_ins)
        self.seen["guesses"] += sum(part.guessed for part in step.sequences)
        self.seen["blocks behind a window"] += sum(0 in table for part in step.sequences for table in part.tables)
        exported = {swap.seq_id: self.device.save(swap.blocks) for swap in step.swap_outs}
        self.device.remap(step.remaps)
        self.seen["pages that lose their memory"] += sum(len(remap.unmapped) for remap in step.remaps)
        for swap in step.swap_ins:
            self.device.fill(swap.blocks, self.saved.pop(swap.seq_id))
        self.in_flight.append((step, self.device.submit(step, self.sequences), exported))
        return True

    def guess(self, sequence: Sequence) -> tuple[int, ...]:
        """Some of the tokens that will come, most often with a wrong one among them."""
        known = sequence.num_output
        right = self.guessing[sequence.seq_id][known : known + self.random.randrange(7)]
        return tuple(token if self.random.random() < 0.8 else VOCABULARY + 1 for token in right)

    def complete(self, failing: int | None = None) -> None:
        step, tokens, exported = self.in_flight.popleft()
        self.saved |= exported  # only now: a step that fails saves nothing
        alive = {part.seq_id for part in step.sequences} & set(self.scheduler.sequences)
        failed = {failing: "it is broken"} if failing in alive else {}
        emitted = {i for i in tokens if i in alive and i not in failed}
        for part in step.sequences:
            if part.scored[0] < part.scored[1]:
                assert part.start <= part.scored[0] and part.scored[1] <= part.start + part.num_tokens
                self.scored[part.seq_id].update(range(*part.scored))
        held = {part.seq_id: agreed(part, tokens[part.seq_id]) for part in step.sequences if part.guessed}
        flat = {i: token[held.get(i, 0)] if isinstance(token, tuple) else 0 for i, token in tokens.items()}
        updates = self.scheduler.complete(step, flat, failed, held)
        assert {update.sequence.seq_id for update in updates} == emitted | set(failed)
        news = Counter(update.sequence.seq_id for update in updates)
        assert all(news[i] == 1 + (0 if i in failed else held.get(i, 0)) for i in news)
        self.seen["guesses that held"] += sum(held.values())
        for update in updates:
            request_id = update.sequence.request_id
            if update.error:
                self.ended.add(update.sequence.seq_id)
                if update.sequence.beam:
                    self.abort(request_id)
            elif update.sequence.beam:
                row = tokens[update.sequence.seq_id]
                assert isinstance(row, list)
                self.advance(request_id, update.sequence.seq_id, row)
            elif update.token_id == STOP and not update.finished:
                self.scheduler.finish(update.sequence.seq_id)

    def advance(self, request_id: str, seq_id: int, row: Row) -> None:
        """A beam's row has come; with the last one of its round the beams go on."""
        beams = self.beams.get(request_id)
        if beams is None:  # aborted by a sibling's failure in the same step
            return
        beams.rows[seq_id] = row
        if len(beams.rows) < len(beams.ids):
            return
        old = beams.ids
        going = beams.choose()
        if not going:
            self.scheduler.abort(request_id)
            self.searched.add(request_id)
            return
        choices = [(old[index], token) for index, token in going]
        going_on = self.scheduler.continue_beams(request_id, choices, len(self.sequences))
        self.seen["forked beams"] += sum(beam.seq_id not in self.sequences for beam in going_on)
        beams.ids = [beam.seq_id for beam in going_on]
        self.sequences |= {beam.seq_id: beam for beam in going_on}
        assert [tuple(beam.output_ids) for beam in going_on] == beams.outputs

    def abort(self, request_id: str) -> None:
        self.beams.pop(request_id, None)
        ended = self.scheduler.abort(request_id)
        assert not any(sequence.request_id == request_id for sequence in self.scheduler.sequences.values())
        self.ended.update(ended)

    def lose(self) -> None:
        self.in_flight.clear()
        self.device.lose()
        self.scheduler.reset()

    def settle(self) -> None:
        self.scheduler.check()
        self.saved = {seq_id: saved for seq_id, saved in self.saved.items() if seq_id in self.scheduler.swapper.held}
        self.device.poison(self.scheduler, self.allocator)

    def drain(self) -> None:
        """Runs until all is done: nothing may stall, and all sequences must have their own tokens."""
        while self.scheduler.sequences or self.in_flight:
            while len(self.in_flight) < self.depth and self.schedule():
                self.settle()
            self.complete()
            self.settle()
        stats = self.scheduler.stats()
        assert all(pool.used == 0 for pool in stats.pools)
        assert stats.host is None or stats.host.used == 0
        first: dict[str, Sequence] = {}
        for sequence in self.sequences.values():
            first.setdefault(sequence.request_id, sequence)
            if sequence.seq_id not in self.ended and not sequence.beam:
                assert sequence.output_ids == evaluate(sequence, self.allocator.groups)
                if sequence.seq_id in self.scored:
                    assert self.scored[sequence.seq_id] == set(range(sequence.num_prompt - 1))
        for request_id, beams in self.beams.items():
            assert request_id in self.searched
            one = first[request_id]
            assert beams.outputs == evaluate_beams(
                one.prompt_ids, one.salt, self.allocator.groups, beams.width, one.max_tokens
            )
