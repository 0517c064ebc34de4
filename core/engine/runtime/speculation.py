"""Tokens that are guessed for a step, and which of them hold.

A guess is checked by the sequence's own rows: the step computes it behind the last token, and each row gives the token that is
chosen there. As long as these are the guessed ones, the next row's token is what would have come without a guess, whatever the
way of choosing, since its noise depends on the position alone. (Leviathan et al. 2023, arXiv 2211.17192, accept guesses by
chance, to keep the distribution; here the very tokens stay.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..backend.v1 import StepResult
from ..scheduler import ScheduledStep, Sequence
from .member import Member

_ROWS = 8
"""Rows of decodes and guesses together up to which guesses are made, or one sequence's: more take a step much longer."""


@dataclass
class Speculation:
    """``most``: tokens guessed for a sequence in a step, 0 for none. Counts since the start: tokens guessed, and held."""

    most: int
    guessed: int = 0
    held: int = 0

    def guesses(self, decoding: Iterable[Sequence], members: Mapping[int, Member]) -> dict[int, tuple[int, ...]]:
        """What may come after the last token of sequences that want one step of one token."""
        if not self.most:
            return {}
        decoding = list(decoding)
        room, found = max(_ROWS, self.most + 1) - len(decoding), {}
        for sequence in decoding:
            member = members.get(sequence.seq_id)
            if room > 0 and member is not None and member.lookup is not None:
                guess = member.lookup.guess(sequence.token_ids, min(self.most, room))
                if guess:
                    found[sequence.seq_id] = guess
                    room -= len(guess)
        return found

    def check(
        self, step: ScheduledStep, first: Mapping[int, int], result: StepResult, members: Mapping[int, Member]
    ) -> dict[int, int]:
        """How many guessed tokens hold, by sequence; ``first`` is the row of each one's last known token. None holds behind a
        token that ends the text, or a row that has failed."""
        found = {}
        for part in step.sequences:
            member = members.get(part.seq_id)
            if not part.guessed or member is None:
                continue
            row, held = first[part.seq_id], 0
            for token in part.token_ids[-part.guessed :]:
                ends = token in member.request.stop_ids
                if result.tokens[row + held] != token or result.status[row + held : row + held + 2].any() or ends:
                    break
                held += 1
            found[part.seq_id] = held
            self.guessed += part.guessed
            self.held += held
            if member.lookup is not None:
                member.lookup.learn(part.guessed, held)
        return found
