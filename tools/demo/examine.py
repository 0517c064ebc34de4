"""Whether the demo has learnt rather than memorized: questions and animals that no training text has, and new stories."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

RUN = 12  # words in a row that no story should have from the training text


@dataclass(frozen=True)
class HeldOut:
    """What the generator never reads: animals, ways to ask for a story, and paraphrases with what a right answer contains."""

    animals: tuple[str, ...]
    story_requests: tuple[str, ...]
    paraphrases: tuple[tuple[str, str], ...]

    @classmethod
    def read(cls) -> HeldOut:
        kept = json.loads(Path(__file__).with_name("held_out.json").read_text())
        pairs = tuple((question, needed) for question, needed in kept["paraphrases"])
        return cls(tuple(kept["animals"]), tuple(kept["story_requests"]), pairs)

    def questions(self) -> list[tuple[str, str]]:
        """All questions with what the answer must contain; the requests for stories in turn."""
        asked = list(self.paraphrases)
        for i, animal in enumerate(self.animals):
            request = self.story_requests[i % len(self.story_requests)]
            asked.append((request.format(a=("an " if animal[0] in "aeiou" else "a ") + animal), animal))
        return asked


class Answering(Protocol):
    """A model that answers each question alone; ``temperature`` 0 is greedy."""

    def __call__(self, questions: Sequence[str], temperature: float, seed: int) -> list[str]: ...


def words(text: str) -> list[str]:
    """Small letters and digits alone: what counts when texts are compared."""
    return re.findall(r"[a-z0-9]+", text.lower())


def runs(text: str) -> Iterator[tuple[str, ...]]:
    row = words(text)
    return (tuple(row[i : i + RUN]) for i in range(len(row) - RUN + 1))


def names_it(answer: str, needed: str) -> bool:
    """Whether the answer contains the words, as whole words; a dash or a slash of ``needed`` must be there, too."""
    return re.search(rf"(?<![a-z0-9]){re.escape(needed.lower())}(?:s|es)?(?![a-z0-9])", answer.lower()) is not None


def share_right(answering: Answering, held_out: HeldOut) -> tuple[float, list[dict[str, object]]]:
    """Share of the greedy answers that name the fact or the noun, and all answers."""
    asked = held_out.questions()
    answers = answering([question for question, _ in asked], 0.0, 0)
    told = [
        {"question": question, "needed": needed, "answer": answer, "right": names_it(answer, needed)}
        for (question, needed), answer in zip(asked, answers, strict=True)
    ]
    return sum(bool(one["right"]) for one in told) / len(told), told


def share_new(stories: Sequence[str], corpus: Iterable[str]) -> float:
    """Share of the stories none of whose runs of RUN words is in a text of the corpus."""
    wanted = [set(runs(story)) for story in stories]
    every = set().union(*wanted)
    seen: set[tuple[str, ...]] = set()
    for text in corpus:
        seen.update(run for run in runs(text) if run in every)
    return sum(not own & seen for own in wanted) / len(stories)


def found_in(corpus: Iterable[str], held_out: HeldOut) -> set[str]:
    """The held-out animals and paraphrases that a text of the corpus has, as they must not."""
    animals = {form for animal in held_out.animals for form in (animal, animal + "s", animal + "es")}
    questions = {" ".join(words(question)): question for question, _ in held_out.paraphrases}
    found: set[str] = set()
    for text in corpus:
        row = words(text)
        found.update(animals.intersection(row))
        line = f" {' '.join(row)} "
        found.update(question for form, question in questions.items() if f" {form} " in line)
    return found
