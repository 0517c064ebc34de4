"""Stage 3: text out of pieces, stop strings wherever the borders of tokens lie, and a stream that takes nothing back."""

from __future__ import annotations

import sys

from hypothesis import given
from hypothesis import strategies as st

from engine import SamplingParams
from engine.runtime.detokenize import Continuation, StopReader

letters = st.text("abc", max_size=4)
pieces = st.lists(letters, min_size=1, max_size=12)
stops = st.lists(st.text("abc", min_size=1, max_size=4), max_size=3)
many_stops = st.lists(st.text("ab", min_size=1, max_size=7), max_size=8)


class Pieces:
    """A detokenizer of which token i is the i-th piece, and that holds a rest back to the end."""

    def __init__(self, texts, rest):
        self.texts, self.rest = texts, rest

    def push(self, token):
        return self.texts[token]

    def flush(self):
        return self.rest


def begun(texts, rest="", **params):
    params = SamplingParams(**params)
    return Continuation(0, params, StopReader(params, Pieces(texts, rest)))


def run(texts, rest="", **params):
    """The continuation after all pieces, ended by length; and what it showed on the way."""
    c = begun(texts, rest, **params)
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
    c = begun(texts, stop=stop)
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


class LookingAnew:
    """The same, found by looking at the whole text each time."""

    def __init__(self, stop, least, include):
        self.stop, self.least, self.include = stop, least, include
        self.text, self.tokens, self.stopped = "", 0, None

    def take(self, piece, look=True):
        before = len(self.text)
        self.text += piece
        if not look or self.tokens <= self.least:
            return
        places = [(at, s) for s in self.stop for at in range(len(self.text)) if self.text.startswith(s, at)]
        new = [(at, s) for at, s in places if at + len(s) > before]
        if new:
            at, self.stopped = min(new)
            self.text = self.text[: at + len(self.stopped) * self.include]

    @property
    def shown(self):
        beginnings = [s[:n] for s in self.stop for n in range(1, len(s))]
        held = max((len(b) for b in beginnings if self.text.endswith(b)), default=0)
        return self.text if self.stopped else self.text[: len(self.text) - held]


@given(
    st.lists(st.text("ab", max_size=5), max_size=12),
    st.text("ab", max_size=5),
    many_stops,
    st.integers(0, 8),
    st.booleans(),
    st.booleans(),
)
def test_each_step_is_as_if_the_whole_text_were_looked_at(texts, rest, stop, least, include, ends):
    """Also with a last token that ends the text, whose own text is looked at for the beginning of a stop string alone."""
    c = begun([*texts, "b"], rest, stop=stop, min_tokens=least, include_stop_str_in_output=include, max_tokens=None)
    naive = LookingAnew(stop, least, include)
    for token, piece in enumerate(texts):
        stopped = c.push(token, None, is_stop=False)
        naive.tokens += 1
        naive.take(piece)
        assert (c.text, c.shown, c.stop_reason, stopped) == (
            naive.text,
            naive.shown,
            naive.stopped,
            bool(naive.stopped),
        )
        if stopped:
            return
    if ends:
        assert not c.push(len(texts), None, is_stop=True)
        naive.tokens += 1
        naive.take("b" if include else "", look=False)
        assert (c.text, c.shown) == (naive.text, naive.shown)
    c.end("stop", 7)
    naive.take(rest)
    assert (c.text, c.stop_reason) == (naive.text, naive.stopped or 7)


def lines_run(stop, texts):
    """How many lines of Python it takes to push and show the pieces."""
    c, count = begun(texts, stop=stop), 0

    def trace(frame, event, argument):
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for token in range(len(texts)):
            c.push(token, None, is_stop=False)
            assert c.shown in c.text
    finally:
        sys.settrace(before)
    return count


def test_the_work_of_a_token_does_not_grow_with_the_stop_strings():
    texts = ["aa"] * 150 + ["c"] + ["aa"] * 150
    plain = lines_run(["b"], texts)
    assert lines_run(["a" * 1000 + "b"], texts) < 3 * plain
    assert lines_run(["a" * n + "b" for n in range(1, 120)], texts) < 3 * plain


def test_a_stop_string_over_three_tokens():
    c, shown = run(["one e", "n", "d of it"], stop=["end"])
    assert (c.text, c.stop_reason) == ("one ", "end")
    assert shown[:2] == ["one ", "one "]


def test_the_earliest_stop_string_wins_over_the_first_in_the_list():
    c, _ = run(["xaby"], stop=["b", "a"])
    assert (c.text, c.stop_reason) == ("x", "a")


def test_a_stop_token_adds_no_text_but_its_id():
    c = begun(["a", "</s>"], logprobs=0)
    c.push(0, {0: -0.5}, is_stop=False)
    assert not c.push(1, {1: -0.25}, is_stop=True)
    c.end("stop", 1)
    out = c.output()
    assert (out.text, out.token_ids, out.finish_reason, out.stop_reason) == ("a", (0, 1), "stop", 1)
    assert out.cumulative_logprob == -0.75 and len(out.logprobs) == 2
