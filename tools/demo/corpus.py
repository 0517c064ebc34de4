"""The training text: a stream of conversations without end, each given by the seed and its number alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
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


@dataclass(frozen=True)
class Mixture:
    """What a part of the training reads: the shares of stories, topics, fixed small talk and questions without an answer
    (the rest takes up words of the message), how many turns a conversation may have, and whether stories are brief."""

    shares: tuple[float, float, float, float]
    turns: tuple[int, ...]
    brief: bool = True


OPENING = Mixture((0.3, 0.4, 0.07, 0.07), (1, 1, 1, 2, 2, 3), brief=False)
MAIN = Mixture((0.28, 0.44, 0.05, 0.06), (1, 1, 1, 1, 2))
LONG = Mixture(MAIN.shares, tuple(range(4, 13)))
CLOSING = Mixture((0.34, 0.4, 0.12, 0.04), (1, 1, 1, 1, 2))


def conversation(seed: int, number: int, mixture: Mixture = MAIN) -> Conversation:
    """The conversation of this number."""
    rng = random.Random(f"{seed}:{number}")
    kind = rng.random()
    if kind < 0.04:
        return Conversation((("", stories.story(stories.Cast(rng), rng, mixture.brief)),), raw=True)
    if kind < 0.08:
        return Conversation((_any_turns(rng, mixture)[0],), raw=True)
    count = rng.choice(mixture.turns)
    turns: list[Turn] = []
    while len(turns) < count:
        turns += _any_turns(rng, mixture)
    system = rng.choice(SYSTEMS) if rng.random() < 0.08 else None
    return Conversation(tuple(turns[:count]), system)


def _any_turns(rng: random.Random, mixture: Mixture) -> list[Turn]:
    kinds = (
        _story_turns,
        _one(talk.topic_pair),
        _one(talk.fixed_pair),
        _one(talk.unknown_pair),
        _one(talk.copying_pair),
    )
    kind, total = rng.random(), 0.0
    for share, turns in zip(mixture.shares, kinds, strict=False):
        total += share
        if kind < total:
            return turns(rng, mixture)
    return kinds[-1](rng, mixture)


def _one(pair: Callable[[random.Random], Turn]) -> Callable[[random.Random, Mixture], list[Turn]]:
    return lambda rng, mixture: [pair(rng)]


def _story_turns(rng: random.Random, mixture: Mixture) -> list[Turn]:
    cast = stories.Cast(rng)
    if rng.random() < 0.12:
        question = stories.spin(rng.choice(stories.OPEN_REQUESTS), rng)
    else:
        question = stories.request(cast, rng)
    asked = talk.roughened(question, rng, slips=False) if rng.random() < 0.5 else question
    turns = [(asked, stories.story(cast, rng, mixture.brief))]
    if rng.random() < 0.2:
        turns.append(stories.follow_up(cast, rng))
    return turns


@dataclass(frozen=True)
class Course:
    """Which conversations each step of a training reads: ``each`` new ones, in the last tenth of the steps a quarter as many
    of the long ones; ``closing`` steps more have small talk in larger part."""

    seed: int
    steps: int
    each: int
    opening: int = 300  # steps
    closing: int = 400

    @property
    def total(self) -> int:
        return self.steps + self.closing

    def step(self, step: int) -> list[Conversation]:
        long = self.steps * 9 // 10 <= step < self.steps
        mixture = OPENING if step < self.opening else LONG if long else MAIN if step < self.steps else CLOSING
        first = step * self.each
        return [conversation(self.seed, n, mixture) for n in range(first, first + self.each // (4 if long else 1))]

    def texts(self) -> Iterator[str]:
        """All that the model reads in its training, in its order."""
        return (one.text for step in range(self.total) for one in self.step(step))
