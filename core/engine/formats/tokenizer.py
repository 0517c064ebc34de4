"""The tokenizer: text to token ids and back, over the `tokenizers` library.

Ids come from that library.  Text comes from the bytes of the tokens, joined and read as UTF-8 with U+FFFD for what is
no UTF-8, so that a stream of tokens gives the very text that decoding them together gives.
"""

from __future__ import annotations

import codecs
import copy
import json
import re
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from typing import Any

import tokenizers

from engine.errors import TokenizerError, library_errors

SPACE = "\u2581"  # how SentencePiece writes a space inside a token
CONTINUES = "##"  # how WordPiece writes that a token goes on a word
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_LONG = 1 << 15  # characters
_NO_TOKEN = "\ufffd".encode()


def _byte_characters() -> dict[int, str]:
    """Byte -> the character that stands for it in byte-level BPE (GPT-2): itself if printable, else U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + n) for n, byte in enumerate(others)}


BYTE_CHARACTERS = _byte_characters()
_CHARACTER_BYTES = {character: byte for byte, character in BYTE_CHARACTERS.items()}


class Spelling(Enum):
    """How a vocabulary writes bytes."""

    BYTE_LEVEL = "byte-level"  # one character a byte
    SENTENCEPIECE = "sentencepiece"  # U+2581 for a space, <0xNN> for a byte
    WORDPIECE = "wordpiece"  # ## for what goes on a word, a space before all else


@dataclass(frozen=True)
class Vocabulary:
    """What a tokenizer must know of its tokens besides how to cut text.

    text: id -> the token as the vocabulary writes it, or None; id_of: the reverse; size: number of ids.
    literal: tokens that are written as they stand, in no spelling; control: those of them that carry no text.
    bos_id: beginning of sequence; eos_ids: ids that end a generation.
    prefix_ids, suffix_ids: what `add_special` puts around a text.
    between_ids: what stands between two texts that are read together, or None where no file says it.
    strip_space: encoding put a space before the text, which decoding takes away again.
    missing_bytes: bytes that no token of a byte-level vocabulary expresses.
    """

    text: Callable[[int], str | None]
    id_of: Callable[[str], int | None]
    size: int
    spelling: Spelling
    literal: frozenset[int]
    control: frozenset[int]
    bos_id: int | None
    eos_ids: frozenset[int]
    prefix_ids: tuple[int, ...] = ()
    suffix_ids: tuple[int, ...] = ()
    between_ids: tuple[int, ...] | None = ()
    strip_space: bool = False
    missing_bytes: frozenset[int] = frozenset()


def native_errors(doing: str) -> AbstractContextManager[None]:
    """Turns whatever the native library raises into a TokenizerError."""
    return library_errors(lambda message: TokenizerError(f"{doing} failed: {message.rstrip('.')}."))


class Tokenizer:
    """Tokenizes and detokenizes; safe to share between threads.

    `pipeline` cuts text. A second pipeline takes control tokens in text for plain text; its model is the same, or
    `plain_model` where the first one's would find them by itself.
    """

    def __init__(
        self,
        pipeline: tokenizers.Tokenizer,
        vocabulary: Vocabulary,
        plain_model: tokenizers.models.Model | None = None,
    ) -> None:
        self._vocabulary = vocabulary
        self._parsing = pipeline
        self._plain = _without_specials(pipeline, plain_model)
        self._bytes: dict[int, bytes] = {}

    @property
    def vocab_size(self) -> int:
        """Number of ids; a model's embedding may have more rows."""
        return self._vocabulary.size

    @property
    def bos_id(self) -> int | None:
        return self._vocabulary.bos_id

    @property
    def eos_ids(self) -> frozenset[int]:
        """Ids that end a generation: end of sequence, of turn, of message."""
        return self._vocabulary.eos_ids

    @property
    def control_ids(self) -> frozenset[int]:
        """Ids that carry no text."""
        return self._vocabulary.control

    @property
    def literal_ids(self) -> frozenset[int]:
        """Ids of tokens that are found in a text before all others, as they stand: control tokens, and such as ``<think>``."""
        return self._vocabulary.literal

    @property
    def add_bos(self) -> bool:
        """Whether `add_special` puts a beginning of sequence before a text."""
        return self.bos_id is not None and self.bos_id in self._vocabulary.prefix_ids

    def encode(self, text: str, add_special: bool = False, parse_special: bool = False) -> list[int]:
        """Token ids of a text.

        add_special: put around it what the model's files say (mostly a beginning of sequence), but not a second time before
        a text that begins with it, where that is read.
        parse_special: take control tokens written in the text for tokens, as a chat template's output needs; otherwise
        they are plain text.
        """
        if missing := self._vocabulary.missing_bytes.intersection(_utf8(text)):
            raise TokenizerError(f"the text has the byte {min(missing):#04x}, which the vocabulary cannot express.")
        with native_errors("tokenizing"):
            pipeline = self._parsing if parse_special else self._plain
            if len(text) <= _LONG:
                ids: list[int] = pipeline.encode(text, add_special_tokens=False).ids
            else:  # other threads may run meanwhile
                [encoding] = pipeline.encode_batch_fast([text], add_special_tokens=False)
                ids = encoding.ids
        if not add_special:
            return ids
        prefix = [*self._vocabulary.prefix_ids]
        begun = parse_special and ids[: len(prefix)] == prefix
        return [*([] if begun else prefix), *ids, *self._vocabulary.suffix_ids]

    @property
    def between_ids(self) -> tuple[int, ...] | None:
        """What stands between two texts that are read together, or None where no file says it."""
        return self._vocabulary.between_ids

    def encode_pair(self, first: str, second: str) -> tuple[list[int], list[int]]:
        """The ids of two texts that are read together: those up to the second, and those of it, with what the model's files say
        around and between them. Control tokens in the texts are plain text."""
        between = self._vocabulary.between_ids
        if between is None:
            raise TokenizerError(
                "the post-processor of tokenizer.json changes the tokens of two texts, which is not supported."
            )
        before = [*self._vocabulary.prefix_ids, *self.encode(first), *between]
        return before, [*self.encode(second), *self._vocabulary.suffix_ids]

    @property
    def suffix_text(self) -> str:
        """What ``add_special`` puts after a text, as control tokens are written."""
        return self.decode(self._vocabulary.suffix_ids, skip_special=False)

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of token ids; what is no UTF-8 becomes U+FFFD, and so does an id that is no token."""
        text = b"".join(self.token_bytes(token, skip_special) for token in ids)
        return self._stripped(text).decode("utf-8", "replace")

    def token_text(self, token: int) -> str | None:
        """The token as the vocabulary writes it, or None if the id is no token."""
        return self._vocabulary.text(token) if 0 <= token < self.vocab_size else None

    def token_id(self, text: str) -> int | None:
        """The id of a token as the vocabulary writes it, or None."""
        with native_errors("looking a token up"):
            return self._vocabulary.id_of(text)

    def token_bytes(self, token: int, skip_special: bool = True) -> bytes:
        """The bytes that a token adds to the text; none for a control token, unless it is to be shown."""
        if skip_special and token in self._vocabulary.control:
            return b""
        known = self._bytes.get(token)
        if known is None:
            known = self._bytes[token] = self._spelled(token)
        return known

    def description(self) -> dict[str, Any]:
        """The parts that text is cut with, as tokenizer.json describes them."""
        with native_errors("describing the tokenizer"):
            described: dict[str, Any] = json.loads(self._parsing.to_str())
        return described

    def detokenizer(self, continuation: bool = True, skip_special: bool = True) -> Detokenizer:
        """A stream of text; `continuation` keeps the space before its first word, since text comes before it."""
        return Detokenizer(self, continuation, skip_special)

    def _stripped(self, text: bytes) -> bytes:
        return text.removeprefix(b" ") if self._vocabulary.strip_space else text

    def _spelled(self, token: int) -> bytes:
        text = self.token_text(token)
        if text is None:
            return _NO_TOKEN
        if token in self._vocabulary.literal:
            return text.encode()
        if self._vocabulary.spelling is Spelling.SENTENCEPIECE:
            byte = _BYTE_TOKEN.fullmatch(text)
            return bytes.fromhex(byte[1]) if byte else text.replace(SPACE, " ").encode()
        if self._vocabulary.spelling is Spelling.WORDPIECE:
            return (text[2:] if text.startswith(CONTINUES) else f" {text}").encode()
        try:
            return bytes([_CHARACTER_BYTES[character] for character in text])
        except KeyError:
            return text.encode()


class Detokenizer:
    """Turns tokens into text as they come; never gives out a part of a character.

    All `push` results and `flush` joined are `Tokenizer.decode` of the ids (with the first space kept in a
    continuation).
    """

    def __init__(self, tokenizer: Tokenizer, continuation: bool, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._at_start = not continuation
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that is complete with this token, perhaps none."""
        data = self._tokenizer.token_bytes(token, self._skip_special)
        if self._at_start and data:
            self._at_start = False
            data = self._tokenizer._stripped(data)
        return self._utf8.decode(data)

    def copy(self) -> Detokenizer:
        """Another stream, which goes on from here by itself."""
        other = copy.copy(self)
        other._utf8 = copy.copy(self._utf8)
        return other

    def flush(self) -> str:
        """What is left at the end: U+FFFD for an unfinished character."""
        return self._utf8.decode(b"", final=True)


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise TokenizerError(f"The text is not Unicode: a lone surrogate is at position {error.start}.") from error


def _without_specials(pipeline: tokenizers.Tokenizer, model: tokenizers.models.Model | None) -> tokenizers.Tokenizer:
    """A pipeline to which control tokens are plain text, over the same model or one of its own."""
    with native_errors("building the tokenizer"):
        plain = tokenizers.Tokenizer(pipeline.model if model is None else model)
        # an absent part reads as None, which cannot be set
        if pipeline.normalizer is not None:
            plain.normalizer = pipeline.normalizer
        if pipeline.pre_tokenizer is not None:
            plain.pre_tokenizer = pipeline.pre_tokenizer
        added = pipeline.get_added_tokens_decoder()
        if model is not None:  # a model of its own has other texts in the control tokens' places
            added = {token: entry for token, entry in added.items() if not entry.special}
        plain.add_tokens([added[token] for token in sorted(added)])
        plain.encode_special_tokens = True
        if plain.get_added_tokens_decoder().keys() != added.keys():
            raise TokenizerError("the ids of the added tokens have gaps; they must follow the vocabulary's.")
        return plain
