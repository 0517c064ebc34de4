"""Answers keep the ids that were generated for them, and nothing else changes."""

from __future__ import annotations

import numpy as np
import pytest

from engine.formats import open_checkpoint
from engine.runtime.turns import Turns


@pytest.fixture(scope="module", params=["llama-bpe", "llama-spm", "phi-3", "qwen2"])
def tokenizer(request, shared):
    return open_checkpoint(shared / "vocab" / f"{request.param}.gguf").tokenizer()


@pytest.fixture
def writer(tokenizer):
    return Writer(tokenizer)


class Writer:
    """A model that writes any tokens that are text, and a template that ends each turn with a control token."""

    def __init__(self, tokenizer) -> None:
        self._tokenizer = tokenizer
        self._rng = np.random.default_rng()
        self._end = tokenizer.token_text(min(tokenizer.eos_ids))

    def asked(self) -> str:
        words = self._rng.choice(["why", "is", " the sky", "blue?", "東京", "\n", "1,2"], self._rng.integers(1, 60))
        return "user: " + " ".join(words) + self._end + "answer:"

    def answer(self, least: int = 1) -> tuple[tuple[int, ...], str]:
        tokenizer, found, wanted = self._tokenizer, [], least + self._rng.integers(0, 80)
        while len(found) < wanted:
            token = int(self._rng.integers(tokenizer.vocab_size))
            data = tokenizer.token_bytes(token)
            if token not in tokenizer.control_ids and self._is_text(data) and self._adds_no_space(data.decode()):
                found.append(token)
        return tuple(found), b"".join(map(tokenizer.token_bytes, found)).decode()

    @staticmethod
    def _is_text(data: bytes) -> bool:
        return bool(data) and b"\xef\xbf\xbd" not in data and data.decode("utf-8", "ignore").encode() == data

    def _adds_no_space(self, text: str) -> bool:
        """Not such as phi-3's ``</s>``, which is no control token, and after which tokenizing begins a text with a space."""
        return self._tokenizer.decode(plain(self._tokenizer, text + "x"), False).endswith(text + "x")

    def ended(self, answer: str) -> str:
        return answer + self._end


def plain(tokenizer, text):
    return tuple(tokenizer.encode(text, parse_special=True))


def test_each_turn_goes_on_from_the_ids_of_the_one_before(tokenizer, writer):
    """What the cache has after an answer is how the next prompt begins, turn by turn, by whoever else asks between."""
    others = 0
    for scope in (b"", b"somebody"):
        turns, text = Turns(tokenizer), ""
        for _ in range(8):
            text += writer.asked()
            ids = turns.encode(text, scope)
            answer, said = writer.answer()
            turns.remember(text, said, (*answer, min(tokenizer.eos_ids)), scope)
            turns.remember(text, *reversed(writer.answer()), scope)  # another answer to the same
            text += writer.ended(said)
            after = turns.encode(text, scope)
            assert after[: len(ids) + len(answer)] == ids + answer
            assert tokenizer.decode(after, False) == tokenizer.decode(plain(tokenizer, text), False)
            others += after != plain(tokenizer, text)
            assert turns.encode(text, b"else") == plain(tokenizer, text)
    assert others  # random tokens are seldom those that tokenizing gives


def test_nothing_changes_where_the_text_is_another(tokenizer, writer):
    turns = Turns(tokenizer)
    for _ in range(20):
        asked, (answer, said) = writer.asked(), writer.answer(2)
        assert turns.encode(asked) == plain(tokenizer, asked)
        turns.remember(asked, said, answer)
        for text in (f"x{asked}{said}", asked + "x" + said, asked + said[:-1][:15], said, asked, ""):
            assert turns.encode(text) == plain(tokenizer, text)


def test_what_the_text_is_without_stays_out(tokenizer, writer):
    """A stop string, or half a character, at the end of the ids: those that are whole stand for their part of the text."""
    for _ in range(20):
        turns, asked, (answer, said) = Turns(tokenizer), writer.asked(), writer.answer(3)
        kept = b"".join(tokenizer.token_bytes(token) for token in answer[:-1]).decode()
        shown = said[: max(len(kept), len(said) - 1)]
        turns.remember(asked, shown, answer)
        text = asked + writer.ended(shown)
        before = plain(tokenizer, asked) + answer[:-1]
        begins = turns.encode(text)[: len(before)] == before
        assert begins or tokenizer.encode("a")[0] != tokenizer.token_id("a")  # a space would come before what is left
        assert tokenizer.decode(turns.encode(text), False) == tokenizer.decode(plain(tokenizer, text), False)
        wrong, other = Turns(tokenizer), ("!" if said.startswith("?") else "?") + said
        wrong.remember(asked, other, answer)
        assert wrong.encode(asked + writer.ended(other)) == plain(tokenizer, asked + writer.ended(other))


@pytest.mark.parametrize("further", ["", "other words"])
def test_a_part_of_an_answer_has_its_ids(tokenizer, writer, further):
    """Of one that somebody has left or changed: where it is worth a block of the cache."""
    for _ in range(20):
        turns, asked, (answer, said) = Turns(tokenizer), writer.asked(), writer.answer(3)
        turns.remember(asked, said, answer)
        turns.remember(asked, *reversed(writer.answer(3)))
        count = int(np.random.default_rng().integers(1, len(answer)))
        text = asked + writer.ended(b"".join(map(tokenizer.token_bytes, answer[:count])).decode() + further)
        ids = turns.encode(text)
        before = plain(tokenizer, asked) + answer[:count]
        # a space would come before what is left
        spaced = further and tokenizer.encode("a")[0] != tokenizer.token_id("a")
        if count >= 16 and not spaced:
            assert ids[: len(before)] == before
        assert tokenizer.decode(ids, False) == tokenizer.decode(plain(tokenizer, text), False)


def test_an_answer_takes_nothing_of_the_mark_behind_it(tokenizer, writer):
    """Which begins as the answer goes on, or as another answer to the same prompt ends. It is one control token."""
    for whole in (True, False):
        turns, asked, (answer, said) = Turns(tokenizer), writer.asked(), writer.answer(20)
        goes_on = (tokenizer.token_id(writer.ended("")[0]),)
        if not whole:
            goes_on += writer.answer()[0]
        turns.remember(asked, said + b"".join(map(tokenizer.token_bytes, goes_on)).decode(), answer + goes_on)
        text = asked + writer.ended(said)
        ids = turns.encode(text)
        assert ids[: -1 - len(answer)] == plain(tokenizer, asked) and ids[-1 - len(answer) : -1] == answer
        assert ids[-1] == min(tokenizer.eos_ids)


def test_the_oldest_answers_make_room(tokenizer, writer):
    turns, talks = Turns(tokenizer, most=600), []
    for _ in range(40):
        asked, (answer, said) = writer.asked(), writer.answer(30)
        turns.remember(asked, said, answer)
        talks.append((asked + writer.ended(said), plain(tokenizer, asked) + answer))
        assert turns.encode(talks[0][0])[: len(talks[0][1])] == talks[0][1], "what is used stays"
    known = [turns.encode(text)[: len(ids)] == ids for text, ids in talks]
    assert known[-1] and 2 <= sum(known) <= 20


def test_texts_that_are_no_unicode(tokenizer):
    turns = Turns(tokenizer)
    turns.remember("a\ud800", "b\ud800", plain(tokenizer, "b"))
    with pytest.raises(Exception, match="not Unicode"):
        turns.encode("a\ud800b\ud800")
