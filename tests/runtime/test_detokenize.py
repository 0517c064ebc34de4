"""Stage 3: text out of pieces, stop strings wherever the borders of tokens lie, and a stream that takes nothing back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine import SamplingParams
from engine.runtime.detokenize import Continuation

letters = st.text("abc", max_size=4)
pieces = st.lists(letters, min_size=1, max_size=12)
stops = st.lists(st.text("abc", min_size=1, max_size=4), max_size=3)


class Pieces:
    """A detokenizer of which token i is the i-th piece, and that holds a rest back to the end."""

    def __init__(self, texts, rest):
        self.texts, self.rest = texts, rest

    def push(self, token):
        return self.texts[token]

    def flush(self):
        return self.rest


def run(texts, rest="", **params):
    """The continuation after all pieces, ended by length; and what it showed on the way."""
    c = Continuation(0, SamplingParams(**params), Pieces(texts, rest))
    shown = []
    for token in range(len(texts)):
        stopped = c.push(token, None, is_stop=False)
        shown.append(c.shown)
        if stopped:
            return c, shown
    c.end("length", None)
    return c, [*shown, c.shown]


def first_stop(text, stop):
    """(where, which) of the stop string that comes first, or None."""
    return min(((text.find(s), s) for s in stop if s in text), default=None)


@given(pieces, letters, stops, st.booleans())
def test_the_text_ends_at_the_first_stop_string(texts, rest, stop, include):
    c, _ = run(texts, rest, stop=stop, include_stop_str_in_output=include)
    # Text comes in pieces, and a stop string ends it as soon as one is whole. What is cut leaves out what is not.
    parts = texts
    so_far = next((t for n in range(len(parts) + 1) if first_stop(t := "".join(parts[:n]), stop)), None)
    if so_far is None:
        assert (c.text, c.finish_reason, c.stop_reason) == ("".join(parts), "length", None)
        assert len(c.token_ids) == len(texts)
        return
    at, which = first_stop(so_far, stop)
    assert c.text == (so_far[: at + len(which)] if include else so_far[:at])
    assert (c.finish_reason, c.stop_reason) == ("stop", which)


@given(pieces, letters, stops, st.booleans())
def test_what_is_shown_is_never_taken_back(texts, rest, stop, include):
    c, shown = run(texts, rest, stop=stop, include_stop_str_in_output=include)
    for earlier, later in zip(shown, [*shown[1:], c.text], strict=True):
        assert later.startswith(earlier)
    assert shown[-1] == c.text


@given(pieces, stops)
def test_no_more_is_held_back_than_a_stop_string_could_need(texts, stop):
    c = Continuation(0, SamplingParams(stop=stop), Pieces(texts, ""))
    for token in range(len(texts)):
        if c.push(token, None, is_stop=False):
            return
        held = c.text[len(c.shown) :]
        assert not held or any(s.startswith(held) and s != held for s in stop)


@given(pieces, stops, st.integers(0, 12))
def test_stop_strings_wait_for_min_tokens(texts, stop, least):
    c, _ = run(texts, stop=stop, min_tokens=least, max_tokens=None)
    if c.finish_reason == "stop":
        assert len(c.token_ids) > least
    else:
        assert len(c.token_ids) == len(texts)


def test_a_stop_string_over_three_tokens():
    c, shown = run(["one e", "n", "d of it"], stop=["end"])
    assert (c.text, c.stop_reason) == ("one ", "end")
    assert shown[:2] == ["one ", "one "]


def test_the_earliest_stop_string_wins_over_the_first_in_the_list():
    c, _ = run(["xaby"], stop=["b", "a"])
    assert (c.text, c.stop_reason) == ("x", "a")


def test_a_stop_token_adds_no_text_but_its_id():
    c = Continuation(0, SamplingParams(logprobs=0), Pieces(["a", "</s>"], ""))
    c.push(0, {0: -0.5}, is_stop=False)
    assert not c.push(1, {1: -0.25}, is_stop=True)
    c.end("stop", 1)
    out = c.output()
    assert (out.text, out.token_ids, out.finish_reason, out.stop_reason) == ("a", (0, 1), "stop", 1)
    assert out.cumulative_logprob == -0.75 and len(out.logprobs) == 2
