"""The training text: a stream of conversations without end, each given by the seed and its number alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from . import stories, talk

Turn = tuple[str, str]

SYSTEMS = (
    "You are a helpful assistant.",
    "You are a friendly chatbot.",
    "Answer in short sentences.",
    "Be brief.",
    "You tell stories.",
    "You are engine's demo.",
    "Be polite and helpful.",
)


@dataclass(frozen=True)
class Conversation:
    """Turns of question and answer, after a system message or none. ``raw`` has no marks of roles: its one answer follows
    its question, which may be empty, as text that is to be completed."""

    turns: tuple[Turn, ...]
    system: str | None = None
    raw: bool = False

    @property
    def text(self) -> str:
        """All that the model reads of it, without marks."""
        return "\n".join(part for turn in self.turns for part in turn if part)


def conversation(seed: int, number: int, long: bool = False) -> Conversation:
    """The conversation of this number. ``long`` ones have four to twelve turns, for positions far from the start."""
    rng = random.Random(f"{seed}:{number}")
    kind = rng.random()
    if kind < 0.04:
        return Conversation((("", stories.story(stories.Cast(rng), rng)),), raw=True)
    if kind < 0.08:
        return Conversation((_any_turns(rng)[0],), raw=True)
    count = rng.randint(4, 12) if long else rng.choice((1, 1, 1, 2, 2, 3))
    turns: list[Turn] = []
    while len(turns) < count:
        turns += _any_turns(rng)
    system = rng.choice(SYSTEMS) if rng.random() < 0.08 else None
    return Conversation(tuple(turns[:count]), system)


def _any_turns(rng: random.Random) -> list[Turn]:
    kind = rng.random()
    if kind < 0.3:
        return _story_turns(rng)
    if kind < 0.7:
        return [talk.topic_pair(rng)]
    if kind < 0.77:
        return [talk.fixed_pair(rng)]
    return [talk.unknown_pair(rng) if kind < 0.84 else talk.copying_pair(rng)]


def _story_turns(rng: random.Random) -> list[Turn]:
    cast = stories.Cast(rng)
    if rng.random() < 0.12:
        question = stories.spin(rng.choice(stories.OPEN_REQUESTS), rng)
    else:
        question = stories.request(cast, rng)
    turns = [(talk.roughened(question, rng, slips=False) if rng.random() < 0.5 else question, stories.story(cast, rng))]
    if rng.random() < 0.2:
        turns.append(stories.follow_up(cast, rng))
    return turns


@dataclass(frozen=True)
class Course:
    """Which conversations each step of a training reads: ``each`` new ones, and in the last fifth of the steps a quarter as
    many of the long ones."""

    seed: int
    steps: int
    each: int

    def step(self, step: int) -> list[Conversation]:
        long = step >= self.steps * 4 // 5
        first = step * self.each
        return [conversation(self.seed, n, long) for n in range(first, first + self.each // (4 if long else 1))]

    def texts(self) -> Iterator[str]:
        """All that the model reads in its training, in its order."""
        return (one.text for step in range(self.steps) for one in self.step(step))
