"""All allocators, by a state machine whose blocks hold real tokens."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.kv import NULL_BLOCK, CacheGroup, ContiguousAllocator, PagedAllocator, Remap, VirtualAllocator


class AllocatorMachine(RuleBasedStateMachine):
    """Blocks are lists of tokens, written as a device would. Every sequence must read its own tokens back, always. Blocks that
    are not mapped are None."""

    @initialize(
        sizes=st.lists(st.tuples(st.integers(1, 4), st.integers(3, 14)), min_size=1, max_size=2),
        windows=st.lists(st.none() | st.integers(1, 9), min_size=2, max_size=2),
        kind=st.sampled_from(["paged", "contiguous", "virtual"]),
        pages=st.lists(st.integers(1, 3), min_size=2, max_size=2),
        spaces=st.lists(st.integers(1, 4), min_size=2, max_size=2),
    )
    def start(
        self,
        sizes: list[tuple[int, int]],
        windows: list[int | None],
        kind: str,
        pages: list[int],
        spaces: list[int],
    ) -> None:
        limited = windows if kind == "paged" else [None, None]
        self.pages = pages[: len(sizes)] if kind == "virtual" else [1] * len(sizes)
        sizes = [(size, number * page) for (size, number), page in zip(sizes, self.pages, strict=True)]
        self.groups = tuple(
            CacheGroup(f"g{i}", "window" if window else "full", size, window)
            for i, ((size, _), window) in enumerate(zip(sizes, limited, strict=False))
        )
        self.kind = kind
        self.numbers = tuple(number for _, number in sizes)
        self.memory: list[list[list[int | None] | None]] = [
            [[None] * size for _ in range(number)] for size, number in sizes
        ]
        if kind == "virtual":
            spaces = [number * many for number, many in zip(self.numbers, spaces, strict=False)]
            self.allocator = VirtualAllocator(self.groups, self.numbers, tuple(self.pages), tuple(spaces))
            for memory, page, space, (size, _) in zip(self.memory, self.pages, spaces, sizes, strict=True):
                memory[:] = [[None] * size if block < page else None for block in range(space)]
        else:
            make = ContiguousAllocator if kind == "contiguous" else PagedAllocator
            self.allocator = make(self.groups, self.numbers)
        self.limit = min(size * (number - page) for (size, number), page in zip(sizes, self.pages, strict=True))
        self.begins: dict[int, list[int]] = {}  # where the tables of each sequence began when it had tokens first
        self.tokens: dict[int, list[int]] = {}  # what each sequence holds
        self.planned: dict[int, list[int]] = {}  # what one that holds nothing begins with: its tokens never change
        self.next_id = 0

    @rule()
    def open(self) -> None:
        self.allocator.open(self.next_id, self.limit)
        self.tokens[self.next_id] = []
        self.next_id += 1

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """Some sequences get tokens, new ones after a prefix hit; then copies, writes, commits."""
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.tokens)), unique=True, max_size=4))
        grown: list[tuple[int, int]] = []
        for seq_id in chosen:
            known = self.tokens[seq_id]
            new = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=5))
            if len(known) + len(new) > self.limit:
                continue
            hit = None
            if not known:
                new = self.planned.setdefault(seq_id, new)
                hit = self.allocator.match(seq_id, new, len(new))
            count = len(new) - (hit.num_tokens if hit else 0)
            fits = self.allocator.can_fit(seq_id, count, hit)
            done = self.allocator.allocate(seq_id, count, hit)
            assert done == fits or (self.kind == "contiguous" and done)  # it takes back what others only reserve
            if done:
                self.tokens[seq_id] = known + new
                grown.append((seq_id, count))
        self.apply()
        for seq_id, count in grown:
            self.write(seq_id, count)
        for seq_id, _ in grown:
            self.allocator.commit(seq_id, self.tokens[seq_id], len(self.tokens[seq_id]))

    def apply(self) -> None:
        copies = self.allocator.take_copies()
        if self.kind == "virtual":
            self.remap(self.allocator.take_remaps())
        for memory, pairs in zip(self.memory, copies, strict=True):
            assert not {source for source, _ in pairs} & {target for _, target in pairs}
            for source, target in pairs:
                memory[target] = list(memory[source])

    def remap(self, remaps: tuple[Remap, ...]) -> None:
        for memory, number, page, remap, group in zip(
            self.memory, self.numbers, self.pages, remaps, self.groups, strict=bool(remaps)
        ):
            for runs, now in ((remap.unmapped, None), (remap.mapped, [None] * group.block_size)):
                assert all(sum(one) < other[0] for one, other in pairwise(runs)), "a run is two"
                for first, count in runs:
                    assert first >= page and first % page == count % page == 0 < count
                    for block in range(first, first + count):
                        assert (memory[block] is None) != (now is None)
                        memory[block] = None if now is None else list(now)
            assert sum(block is not None for block in memory) <= number, "more is mapped than there is memory"

    def write(self, seq_id: int, count: int) -> None:
        tokens = self.tokens[seq_id]
        for memory, table in zip(self.memory, self.allocator.tables(seq_id), strict=True):
            size = len(memory[0])
            for position in range(len(tokens) - count, len(tokens)):
                memory[table[position // size]][position % size] = tokens[position]

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = data.draw(st.sampled_from(sorted(self.tokens)))
        if not self.allocator.can_fork(parent, 1):
            return
        child = self.next_id
        self.open()
        self.allocator.fork(parent, child)
        self.tokens[child] = list(self.tokens[parent])
        self.apply()
        if parent in self.planned:
            self.planned[child] = self.planned[parent]

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), close=st.booleans())
    def free(self, data: st.DataObject, close: bool) -> None:
        seq_id = data.draw(st.sampled_from(sorted(self.tokens)))
        if close:
            self.allocator.close(seq_id)
            del self.tokens[seq_id]
        else:
            self.allocator.free(seq_id)
            assert not any(self.allocator.tables(seq_id))
            if self.tokens[seq_id]:
                self.planned[seq_id] = self.tokens[seq_id]
            self.tokens[seq_id] = []

    @invariant()
    def reads_back(self) -> None:
        self.allocator.check()
        for seq_id, tokens in self.tokens.items():
            for group, memory, table in zip(self.groups, self.memory, self.allocator.tables(seq_id), strict=True):
                # What the next token sees; more may be there, but for the null block.
                first = group.behind(len(tokens)) * group.block_size
                assert all(memory[block] is not None for block in table), "a block without memory"
                read = [token for block in table for token in memory[block]]
                assert read[first : len(tokens)] == tokens[first:]
                assert NULL_BLOCK not in table[group.behind(len(tokens)) :]
                if self.kind != "paged":
                    assert table == tuple(range(table[0], table[0] + len(table))) if table else True

    @invariant()
    def has_its_own_pages_and_never_moves(self) -> None:
        if self.kind != "virtual":
            return
        for number, page in enumerate(self.pages):
            tables = [self.allocator.tables(seq_id)[number] for seq_id in self.tokens]
            pages = [page_of for table in tables for page_of in {block // page for block in table}]
            assert len(pages) == len(set(pages)) and 0 not in pages, "a page has two owners"
        for seq_id, tokens in self.tokens.items():
            begin = [table[0] for table in self.allocator.tables(seq_id) if table]
            assert not tokens or self.begins.setdefault(seq_id, begin) == begin, "a sequence has moved"
            if not tokens:
                self.begins.pop(seq_id, None)

    @precondition(lambda self: self.kind == "virtual")
    @rule()
    def lose(self) -> None:
        """The device lost its state: all that ran is computed again, in memory that is mapped anew."""
        for seq_id, tokens in self.tokens.items():
            if tokens:
                self.allocator.free(seq_id)
                self.planned[seq_id] = tokens
            self.tokens[seq_id] = []
        self.allocator.forget()
        for memory, page, group in zip(self.memory, self.pages, self.groups, strict=True):
            memory[:] = [[None] * group.block_size if block < page else None for block in range(len(memory))]

    def teardown(self) -> None:
        for seq_id in sorted(self.tokens):
            self.allocator.close(seq_id)
        if self.tokens:
            self.allocator.check()
            assert all(pool.used == 0 for pool in self.allocator.stats())


AllocatorMachine.TestCase.settings = settings(max_examples=90, stateful_step_count=30, deadline=None)
TestAllocatorMachine = AllocatorMachine.TestCase
