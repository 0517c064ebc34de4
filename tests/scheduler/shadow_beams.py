"""Beam search over the shadow device's model: the same choices for a scheduler's run and for a direct one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

VOCABULARY = 23
STOP = 0

Row = list[tuple[int, int]]
"""Tokens with their scores, best first."""


def candidates(context: int, history: list[int | None], width: int) -> Row:
    """Of one beam, as the head gives them: from the context and the history."""
    scored = [(token, hash((context, tuple(history), token, 5)) % 1000) for token in range(VOCABULARY)]
    return sorted(scored, key=lambda pair: (-pair[1], pair[0]))[: 2 * width]


@dataclass
class Beams:
    """One request's beams with their sums, best first, and the rows that have come of them."""

    width: int
    max_tokens: int
    ids: list[int]
    outputs: list[tuple[int, ...]] = field(default_factory=lambda: [()])
    sums: list[int] = field(default_factory=lambda: [0])
    rows: dict[int, Row] = field(default_factory=dict)

    def choose(self) -> list[tuple[int, int]]:
        """The beams that go on, as (index of the old one, token); [] at the end. STOP tokens go nowhere."""
        rows = [self.rows[i] for i in self.ids]
        ranked = sorted(
            (-(total + score), index, token)
            for index, (total, row) in enumerate(zip(self.sums, rows, strict=True))
            for token, score in row
            if token != STOP
        )[: self.width]
        self.outputs = [(*self.outputs[index], token) for _, index, token in ranked]
        self.sums = [-negated for negated, _, _ in ranked]
        self.rows = {}
        return [(index, token) for _, index, token in ranked] if len(self.outputs[0]) < self.max_tokens else []


def search(row_of: Callable[[Sequence[int]], Row], width: int, max_tokens: int) -> list[tuple[int, ...]]:
    """The final beams of a search run directly; ``row_of`` gives the candidates after output tokens."""
    beams = Beams(width, max_tokens, [0])
    going = True
    while going:
        beams.rows = {number: row_of(output) for number, output in zip(beams.ids, beams.outputs, strict=True)}
        going = bool(beams.choose())
        beams.ids = list(range(len(beams.outputs)))
    return beams.outputs
