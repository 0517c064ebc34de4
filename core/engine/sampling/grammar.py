"""Grammars: which tokens may come next so that a text keeps to its form. The parser is llguidance's."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..errors import RequestError, library_errors
from .bounds import with_exclusive_bounds
from .dates import with_real_dates
from .structured import StructuredOutputs
from .understood import as_understood

if TYPE_CHECKING:
    import llguidance

    from ..formats.tokenizer import Tokenizer

_CACHED = 32  # compiled grammars, and refusals, that are kept
_MARKER = "\x02"  # no vocabulary joins it with what follows
_WHITESPACE = r"(\x20|\r?\n[\x20\t]{0,32})"  # between JSON's parts; without a bound a model may never end it
_FUEL = 250_000  # for the first tokens' automaton, each step of which each sequence takes anew: about 0.1 s
_TRIAL_SECONDS = 10.0  # by the clock; by the processor's it is given less
_SECONDS, _SECONDS_A_TOKEN = 2.0, 0.005  # of this thread's time for a text; others wait for it


class GrammarCompiler:
    """Compiles grammars for one model; safe to share between threads. The vocabulary is read with the first of them.

    ``vocab``: number of logits; ``eos_ids``: what ends a text, allowed only where the grammar accepts.
    """

    def __init__(self, tokenizer: Tokenizer, vocab: int, eos_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab = vocab
        self._eos_ids = sorted(token for token in eos_ids if 0 <= token < vocab)
        self._lock = threading.Lock()
        self._vocabulary: llguidance.LLTokenizer | None = None
        self._compiled: OrderedDict[StructuredOutputs, llguidance.LLMatcher | str] = OrderedDict()  # or why not

    def matchers(self, wanted: StructuredOutputs, count: int, ignore_eos: bool) -> list[Matcher]:
        """A fresh state for each of ``count`` sequences, of a grammar that is compiled if it is not known. RequestError as
        ``compile`` raises it."""
        compiled = self.compile(wanted)
        with self._lock:
            return [self._matcher(compiled, ignore_eos) for _ in range(count)]

    def knows(self, wanted: StructuredOutputs) -> bool:
        """Whether ``compile`` takes no time for it; whatever is compiled meanwhile, this does not wait."""
        return wanted in self._compiled

    def compile(self, wanted: StructuredOutputs) -> llguidance.LLMatcher:
        """The grammar's first state, to be copied. RequestError if it is wrong, too large, or fits no text. Takes up to
        seconds for the largest grammars: for the caller's thread."""
        with self._lock:
            known = self._compiled.get(wanted)
            if self._vocabulary is None:
                self._vocabulary = self._read_vocabulary()
        if known is None:
            try:
                known = _compile(wanted, self._vocabulary)
            except _NotTriedError:
                raise
            except RequestError as error:
                known = str(error)
        with self._lock:
            self._compiled[wanted] = known
            self._compiled.move_to_end(wanted)
            while len(self._compiled) > _CACHED:
                self._compiled.popitem(last=False)
        if isinstance(known, str):
            raise RequestError(known)
        return known

    def _matcher(self, compiled: llguidance.LLMatcher, ignore_eos: bool) -> Matcher:
        ends = np.zeros((self._vocab + 31) // 32, np.uint32)
        for token in self._eos_ids:
            ends[token // 32] |= np.uint32(1 << token % 32)
        return Matcher(compiled.deep_copy(), ends, ignore_eos)

    def _read_vocabulary(self) -> llguidance.LLTokenizer:
        import llguidance

        if not self._eos_ids:
            raise RequestError("A grammar needs a model that has an end of sequence, and this one names none.")
        with library_errors(_unusable):
            vocabulary = llguidance.TokenizerWrapper(_Vocabulary(self._tokenizer, self._vocab, self._eos_ids))
            return llguidance.LLTokenizer(vocabulary, eos_token=self._eos_ids)


class _NotTriedError(RequestError):
    """A refusal for want of time, which another attempt may have."""


class Matcher:
    """How far one sequence has come in its grammar. ``ends``: the mask of the tokens that end a sequence, u32 [V/32];
    with ``ignore_eos`` they come only where nothing else may."""

    def __init__(self, state: llguidance.LLMatcher, ends: npt.NDArray[np.uint32], ignore_eos: bool) -> None:
        self._state = state
        self._mask = np.zeros_like(ends)
        self._ends = ends
        self._ignore_eos = ignore_eos
        self.only_ends = False
        self._seconds = 0.0
        self._tokens = 0

    def fill(self, mask: npt.NDArray[np.uint32]) -> None:
        """Set the bits of the tokens that may come next, in u32 [V/32]; none when the state is at fault, so that the
        row fails, and ``error`` says why. Then ``only_ends`` tells whether nothing but an end may follow."""
        with self._timed():
            self._state.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        mask[:] = 0 if self.error else self._mask
        rest = mask & ~self._ends
        self.only_ends = not rest.any()
        if self._ignore_eos and not self.only_ends:
            mask[:] = rest

    def advance(self, token: int) -> bool:
        """Take the token that was chosen; true when the text is complete and nothing can follow."""
        with self._timed():
            self._state.consume_token(token)
        self._tokens += 1
        return bool(self._state.is_stopped()) and not self._state.is_error()

    @property
    def error(self) -> str | None:
        """Why the state is at fault: the text has become too complex for the parser's limits, or too slow to parse."""
        if self._state.is_error():
            return f"The grammar has failed: {_reason(self._state)}."
        if self._seconds > _SECONDS + _SECONDS_A_TOKEN * self._tokens:
            return f"The grammar is too slow: {self._tokens} tokens took {self._seconds:.1f} s; make it less ambiguous."
        return None

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = time.thread_time()
        yield
        self._seconds += time.thread_time() - start


class _Vocabulary:
    """A tokenizer as llguidance asks for it: the bytes of each token, and a function that tokenizes."""

    def __init__(self, tokenizer: Tokenizer, vocab: int, eos_ids: list[int]) -> None:
        self.tokens = [self._bytes(tokenizer, token) for token in range(vocab)]
        self.special_token_ids = sorted(token for token in tokenizer.control_ids.union(eos_ids) if token < vocab)
        self.eos_token_id = eos_ids[0]
        self.bos_token_id = tokenizer.bos_id
        self._tokenizer = tokenizer
        self._vocab = vocab
        self._ids = {text: token for token, text in enumerate(self.tokens) if text}
        for token in self.special_token_ids:
            self._ids.pop(self.tokens[token], None)
        self._longest = max(map(len, self._ids), default=1)

    @staticmethod
    def _bytes(tokenizer: Tokenizer, token: int) -> bytes:
        return b"" if tokenizer.token_text(token) is None else tokenizer.token_bytes(token, skip_special=False)

    def __call__(self, data: bytes | str) -> list[int]:
        """Token ids that spell these bytes, the model's own where it has them: a vocabulary that puts a space before a
        text must not do so within one."""
        data = data.encode() if isinstance(data, str) else data
        text = data.decode("utf-8", "replace")
        for before in ("", _MARKER):
            ids = self._tokenizer.encode(before + text)
            cuts = range(len(ids)) if before else [0]
            for cut in cuts[:4]:
                if all(i < self._vocab for i in ids[cut:]) and b"".join(self.tokens[i] for i in ids[cut:]) == data:
                    return ids[cut:]
        return list(self._longest_matches(data))

    def _longest_matches(self, data: bytes) -> Iterator[int]:
        at = 0
        while at < len(data):
            ends = range(min(at + self._longest, len(data)), at, -1)
            end = next((end for end in ends if data[at:end] in self._ids), None)
            if end is None:
                return  # llguidance then chooses among single tokens
            yield self._ids[data[at:end]]
            at = end


def _compile(wanted: StructuredOutputs, vocabulary: llguidance.LLTokenizer) -> llguidance.LLMatcher:
    import llguidance

    with library_errors(_unusable):
        limits = llguidance.LLParserLimits(initial_lexer_fuel=_FUEL, verbose_errors=False)
        source = _source(wanted)
        if _may_have_conditions(wanted):
            _try(source)
        matcher = llguidance.LLMatcher(vocabulary, source, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # it tells whether there is any text
    if matcher.is_error() or (matcher.is_stopped() and not matcher.is_accepting()):
        raise RequestError(f"The grammar cannot be used: {_reason(matcher)}.")
    return matcher


def _may_have_conditions(wanted: StructuredOutputs) -> bool:
    if wanted.json is not None:
        return has_conditions(json.loads(str(wanted.json)))
    grammar = wanted.grammar or ""
    return "%json" in grammar and any(
        sign in grammar for sign in (*_CONDITIONS, "\\u")
    )  # keys may be written in escapes


def has_conditions(schema: Any) -> bool:
    """Whether a JSON schema may have conditions on a value that llguidance combines while it reads them: without a limit, in
    time and memory that may double with each."""
    left = [schema]
    while left:
        part = left.pop()
        if isinstance(part, dict):
            if not _CONDITIONS.isdisjoint(part):
                return True
            left += part.values()
        elif isinstance(part, list):
            left += part
    return False


_CONDITIONS = frozenset({"pattern", "multipleOf", "patternProperties", "propertyNames", "not"})


def _try(source: str) -> None:
    """RequestError for what takes too long, or too much memory, in a process of its own."""
    command = [sys.executable, str(Path(__file__).with_name("trial.py"))]
    sentence = (
        "The grammar cannot be used: its schema has more conditions on one value than can be combined; have fewer of"
        " pattern and multipleOf meet there."
    )
    try:
        done = subprocess.run(command, input=source.encode(), capture_output=True, timeout=_TRIAL_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise _NotTriedError(sentence) from error
    if done.returncode != 0:
        raise RequestError(sentence)


def _source(wanted: StructuredOutputs) -> str:
    """The grammar as llguidance takes it."""
    from llguidance import LLMatcher

    if wanted.json is not None or wanted.json_object:
        schema = json.dumps(_schema(wanted))
        return LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": _WHITESPACE})
    if wanted.regex is not None:
        return LLMatcher.grammar_from_regex(wanted.regex)
    if wanted.choice is not None:
        return LLMatcher.grammar_from_regex("|".join(map(_literal, wanted.choice)))
    return LLMatcher.grammar_from_lark(_lark(str(wanted.grammar)))


def _schema(wanted: StructuredOutputs) -> Any:
    if wanted.json is None:
        return {"type": "object"}
    return with_exclusive_bounds(with_real_dates(as_understood(json.loads(str(wanted.json)))))


def json_in_lark(form: StructuredOutputs) -> str:
    """A form in JSON as a part of a rule in Lark's syntax."""
    return "%json " + json.dumps({"x-guidance": {"whitespace_pattern": _WHITESPACE}, **_schema(form)})


def _literal(text: str) -> str:
    """An expression that matches this text."""
    return "".join(c if c.isalnum() and c.isascii() else f"\\u{{{ord(c):x}}}" for c in text)


def _lark(text: str) -> str:
    """A grammar in Lark's syntax, converted where it is in GBNF.

    The converter makes a terminal of each rule without recursion, and Lark matches a terminal as far as it goes. Where
    no rule has recursion the whole grammar is one terminal, and means what it means in GBNF.
    """
    from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

    if is_lark_syntax(text):
        return text
    try:
        converted = gbnf_to_lark(_UNICODE_ESCAPE.sub(_character, text))
    except Exception as error:  # of no class in particular
        raise RequestError(f"The grammar is neither Lark nor GBNF: {error}.") from error
    rules = re.findall(r"^(\w+)\s*:", converted, re.MULTILINE)
    if any(name != "start" and name.islower() for name in rules) or re.search(r"\bstart\b(?!\s*:)", converted):
        return converted
    return re.sub(r"^start(?=\s*:)", "ENTIRE_TEXT", converted, flags=re.MULTILINE) + "\nstart: ENTIRE_TEXT\n"


_UNICODE_ESCAPE = re.compile(r"(?<!\\)((?:\\\\)*)\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8}))")


def _character(escape: re.Match[str]) -> str:
    """The character of an escape that the converter would spoil, or itself where the character has a meaning."""
    number = int(escape[2] or escape[3], 16)
    if number < 0x80:
        return f"{escape[1]}\\x{number:02x}"
    return escape[1] + chr(number) if number <= 0x10FFFF and not 0xD800 <= number < 0xE000 else escape[0]


def _unusable(message: str) -> RequestError:
    return RequestError(f"The grammar cannot be used: {_line(message)}.")


def _reason(state: llguidance.LLMatcher) -> str:
    if not state.is_error() or state.get_error().startswith("NoExtension"):
        return "no text fits it"
    return _line(state.get_error())


def _line(text: str) -> str:
    """One line of a message of several: what is at fault, without the excerpt."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    wrong = next((line for line in lines if line.startswith("error: ")), lines[0] if lines else "it is not known why")
    return (wrong if len(wrong) <= 200 else wrong[:200] + "...").rstrip(".:")
