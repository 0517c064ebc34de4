"""Small vocabularies of every kind, trained here, and GGUF keys that describe them."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, trainers

SPACE = "\u2581"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
PHRASES = (
    "Hello World, it's I'LL we'Ve HelloWorld's don't   CamelCaseWords lower UPPER MiXeD 'Twas Caf\u00e9s\u2019",
    'def f(x):\n    return x+1  # comment\n\n\tif a==b and c!=d: print("ok")\r\n',
    "0 12 123 1234 12345 1234567 3.14159 1,000,000 \u0663\u0664\u0665 x2y3 2024-11-20",
    "\u65e5\u672c\u8a9e\u306e\u6587\u7ae0\u3002\u4e2d\u6587\uff0c\u6c49\u5b57abc\u6df7\u5408123 \ud55c\uad6d"
    "\uc5b4 \u30ab\u30bf\u30ab\u30ca",
    "na\u00efve caf\u00e9 \u041f\u0440\u0438\u0432\u0435\u0442 \u039a\u03b1\u03bb\u03b7\u03bc\u03ad\u03c1\u03b1 "
    "\u0939\u093f\u0928\u094d\u0926\u0940 \u0645\u0631\u062d\u0628\u0627\u060c \u0e2a\u0e27\u0e31\u0e2a\u0e14"
    "\u0e35 \U0001f642\U0001f999 a\u0301e\u0308",
    "<<==>>!!??...,;:$^~|`()[]{}@#%&*_-+/\\ end   \n \n\n  trailing  ",
)


def texts(count: int, seed: int = 0) -> list[str]:
    """Phrases cut and joined at random, so that every kind of character meets every other."""
    choose = random.Random(seed)
    result = []
    for _ in range(count):
        parts = []
        for _ in range(choose.randrange(1, 6)):
            phrase = choose.choice(PHRASES)
            start = choose.randrange(len(phrase))
            parts.append(phrase[start : start + choose.randrange(1, 24)])
        result.append(choose.choice(["", " ", "\n"]).join(parts))
    return result


@cache
def byte_level() -> tuple[list[str], list[str]]:
    """Tokens and merges of a BPE trained on whole texts: without the right cuts it gives other ids."""
    pipeline = tokenizers.Tokenizer(models.BPE())
    pipeline.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=6000, initial_alphabet=alphabet, show_progress=False, max_token_length=12)
    pipeline.train_from_iterator(texts(3000), trainer)
    return _of(pipeline)


@cache
def spaced() -> tuple[list[str], list[str]]:
    """The same, written as SentencePiece does, without what has a newline within."""
    pipeline = tokenizers.Tokenizer(models.BPE())
    pipeline.normalizer = normalizers.Replace(" ", SPACE)
    pipeline.pre_tokenizer = pre_tokenizers.Split("\n", "isolated")
    trainer = trainers.BpeTrainer(vocab_size=3000, show_progress=False, max_token_length=12)
    pipeline.train_from_iterator(texts(3000), trainer)
    return _of(pipeline)


def _of(pipeline: tokenizers.Tokenizer) -> tuple[list[str], list[str]]:
    ids = pipeline.get_vocab()
    merges = [" ".join(pair) for pair in _state(pipeline)["merges"]]
    return sorted(ids, key=ids.__getitem__), merges


def _state(pipeline: tokenizers.Tokenizer) -> Any:
    import json

    return json.loads(pipeline.to_str())["model"]


@cache
def unigram() -> list[tuple[str, float]]:
    """Pieces and log-probabilities; no special ones."""
    pipeline = tokenizers.Tokenizer(models.Unigram())
    pipeline.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=800, show_progress=False, max_piece_length=8)
    lines = [line for text in texts(2000) for line in text.split("\n")]
    pipeline.train_from_iterator(lines, trainer)
    return [(piece, score) for piece, score in _state(pipeline)["vocab"] if piece not in ("<unk>", "<", "\u03b7")]


@cache
def wordpiece() -> list[str]:
    """Pieces as their authors write them, the special ones first."""
    pipeline = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    pipeline.normalizer = normalizers.BertNormalizer()
    pipeline.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=500, special_tokens=special, show_progress=False, limit_alphabet=90)
    pipeline.train_from_iterator(texts(2000), trainer)
    ids = pipeline.get_vocab()
    return sorted(ids, key=ids.__getitem__)


def keys(model: str, tokens: list[str], types: list[int] | None = None, **more: tuple[str, Any]) -> list[Any]:
    """GGUF keys of a vocabulary; `more` are (kind, value) by name."""
    given: dict[str, tuple[str, Any]] = {"model": ("str", model), "tokens": ("[str]", tokens)}
    given["token_type"] = ("[i32]", types or [NORMAL] * len(tokens))
    listed = [(f"tokenizer.ggml.{name}", *value) for name, value in (given | more).items()]
    return [("general.architecture", "str", "llama"), *listed]
