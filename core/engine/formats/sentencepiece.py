"""SentencePiece's `tokenizer.model`: a protocol buffer (sentencepiece_model.proto), read without its library.

Only the fields that tokenizing needs are taken, and given under the keys that a GGUF has for them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from engine.errors import TokenizerError
from engine.formats.jsonfile import read_bytes

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_MODELS = {1: "t5", 2: "llama"}  # unigram and BPE, as a GGUF names them
_MAX_PIECES = 1 << 20  # the largest vocabularies have a quarter of it
_ABSENT = (1 << 64) - 1  # -1, as an enumeration or an int32 is written


def read_sentencepiece(path: Path) -> dict[str, Any]:
    """The `tokenizer.ggml.*` keys that say the same as the file; TokenizerError if it is damaged or of another kind."""
    data = read_bytes(path)
    try:
        return _model(memoryview(data))
    except (ValueError, struct.error) as error:  # not UTF-8, too short
        raise TokenizerError(f"{path} is no SentencePiece model: {error}.") from error


def _model(data: memoryview) -> dict[str, Any]:
    texts: list[str] = []
    scores: list[float] = []
    types: list[int] = []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    for field, value in _fields(data):
        if field == _PIECES:
            if len(texts) == _MAX_PIECES:
                raise ValueError(f"it has more than {_MAX_PIECES} pieces")
            piece = dict(_fields(_message(value)))
            texts.append(bytes(_message(piece.get(1, b""))).decode())
            scores.append(struct.unpack("<f", _message(piece[2]))[0] if 2 in piece else 0.0)
            types.append(_number(piece.get(3, 1)))
        elif field == _TRAINER:
            trainer = dict(_fields(_message(value)))
        elif field == _NORMALIZER:
            normalizer = dict(_fields(_message(value)))
    if not texts:
        raise ValueError("it has no pieces")
    model = _MODELS.get(_number(trainer.get(3, 1)))
    if model is None:
        raise ValueError(f"its model type is {trainer.get(3)}; unigram (1) and BPE (2) are supported")
    if any(not 1 <= kind <= 6 for kind in types):
        raise ValueError("a piece has an unknown type")
    keys = {
        "model": model,
        "tokens": texts,
        "scores": np.array(scores, np.float32),
        "token_type": np.array(types, np.int32),
        "add_space_prefix": bool(_number(normalizer.get(3, 1))),
        "remove_extra_whitespaces": bool(_number(normalizer.get(4, 1))),
        "precompiled_charsmap": np.frombuffer(bytes(_message(normalizer.get(2, b""))), np.uint8),
    }
    for field, name, default in ((40, "unknown", 0), (41, "bos", 1), (42, "eos", 2)):
        token = _number(trainer.get(field, default))
        if token != _ABSENT:
            keys[f"{name}_token_id"] = token
    return {f"tokenizer.ggml.{name}": value for name, value in keys.items()}


def _fields(data: memoryview) -> Iterator[tuple[int, Any]]:
    """Field numbers and values of a message: an int, a view of the bytes, or 4 or 8 bytes of a number."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == _VARINT:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if kind == _BYTES:
            size, at = _varint(data, at)
        elif kind in (_FIXED32, _FIXED64):
            size = 4 if kind == _FIXED32 else 8
        else:
            raise ValueError(f"a field has the wire type {kind}")
        if size > len(data) - at:
            raise ValueError("it ends within a field")
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise ValueError("it ends within a number")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("a number is longer than 64 bits")


def _message(value: Any) -> memoryview:
    if isinstance(value, int):
        raise ValueError("a number stands where bytes belong")
    return memoryview(value)


def _number(value: Any) -> int:
    if not isinstance(value, int):
        raise ValueError("bytes stand where a number belongs")
    return value
