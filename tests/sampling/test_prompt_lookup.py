"""Guesses at what comes next, against a plain search of the text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.sampling.speculation import PromptLookup

TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def searched(tokens: list[int], count: int) -> tuple[int, ...]:
    """The tokens after the last earlier place of the last three tokens, or else of the last two; the text repeats behind its
    end."""
    for size in (3, 2):
        places = [at for at in range(size, len(tokens)) if tokens[at - size : at] == tokens[-size:]]
        if places and len(tokens) >= size:
            going = [*tokens]
            for n in range(count):
                going.append(going[places[-1] + n])
            return tuple(going[len(tokens) :])
    return ()


@given(text=TEXTS, cuts=st.lists(st.integers(1, 60), max_size=6), most=st.integers(1, 8))
def test_a_guess_is_what_followed_the_last_time(text: list[int], cuts: list[int], most: int) -> None:
    """However many tokens came since the guess before."""
    lookup = PromptLookup()
    for cut in sorted({*(cut for cut in cuts if cut < len(text)), len(text)}):
        assert lookup.guess(text[:cut], most) == searched(text[:cut], min(most, 3))


def test_guesses_grow_while_they_hold_and_shrink_to_what_held() -> None:
    lookup, text = PromptLookup(), [1, 2] * 20
    lengths = []
    for held in (3, 6, 12, 2, 3):
        guess = lookup.guess(text, 64)
        lengths.append(len(guess))
        lookup.learn(len(guess), held)
    assert lengths == [3, 6, 12, 24, 3]


def test_after_wrong_guesses_ever_more_steps_go_without() -> None:
    lookup, text, made = PromptLookup(), [1, 2] * 20, []
    for step in range(200):
        if guess := lookup.guess(text, 8):
            made.append(step)
            lookup.learn(len(guess), 0)
    assert made == [0, 2, 6, 14, 30, 62, 94, 126, 158, 190]
    lookup.learn(1, 1)
    while not lookup.guess(text, 8):
        pass
    lookup.learn(1, 1)
    assert lookup.guess(text, 8) == (1, 2)
