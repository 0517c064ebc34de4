"""A Hugging Face folder's tokenizer as the keys tokenizer.* of a GGUF file.

A GGUF names the way to split text before merging (tokenizer.ggml.pre) where tokenizer.json spells it out. The name is found by
trial: the keys are read back as a GGUF's would be, and must cut a set of texts as the folder's own tokenizer cuts them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from engine.errors import EngineError, TokenizerError
from engine.formats import Checkpoint
from engine.formats.pretokenizers import PRE_TOKENIZERS
from engine.formats.tokenizer import CONTINUES, SPACE, Tokenizer
from engine.formats.tokenizer_files import sentencepiece_keys, tokenizer_settings
from engine.formats.tokenizer_gguf import build_tokenizer

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_PROBES = (
    "Hello world, it's 1234567 o'clock; they'LL SAY I'm HERE\tand\n\n  there's more...   \n",
    "naïve café Übung Straße 東京タワー 한국어 العربية עברית हिन्दी ไทย Ελληνικά русский",
    "🙂🚀👩‍👩‍👧 ∑∫√ x² ½ €5.00 #tag @name http://a.b/c?d=e&f=g user_name camelCase snake-case",
    "def f(x):\n    return x**2  # comment\n\n\n\tif (a != b) { c += 0x1F; }\r\n",
    " leading  double   triple    spaces and trailing ",
    "3.14159 1,000,000 2024-01-31 12:34:56 0001 IV Ⅳ ٣٤٥ 一二三",
)


def tokenizer_keys(checkpoint: Checkpoint, rows: int, pairs: bool = False) -> dict[str, Any]:
    """The keys, with as many tokens as the embedding table has rows; of a model that reads ``pairs`` of texts these are put
    together alike, too. TokenizerError if the tokenizer has no such form."""
    own = checkpoint.tokenizer()
    if own.vocab_size > rows:
        raise TokenizerError(
            f"The tokenizer of {checkpoint.path} has {own.vocab_size} tokens, but the embedding table {rows} rows; a GGUF needs"
            " a row for each."
        )
    for trial in _trials(checkpoint, own):
        keys = _padded(trial, rows)
        if _same(own, keys, pairs):
            return keys | _template(checkpoint)
    raise TokenizerError(
        f"The tokenizer of {checkpoint.path} cuts text in a way that no tokenizer of GGUF files does: neither SentencePiece's,"
        f" nor BERT's, nor byte-level BPE with any of the {len(PRE_TOKENIZERS)} names of pre-tokenizers."
    )


def _trials(checkpoint: Checkpoint, own: Tokenizer) -> Iterator[dict[str, Any]]:
    """Descriptions that may be the tokenizer's, the likeliest first."""
    settings = tokenizer_settings(checkpoint.path)
    marks = _marks(checkpoint, own, settings)
    sentencepiece = checkpoint.path / "tokenizer.model"
    if sentencepiece.is_file():
        yield sentencepiece_keys(sentencepiece, settings) | marks
    described = own.description()
    model = described["model"]
    if model.get("type") == "WordPiece":
        yield _wordpiece(_tokens(described, own) | marks, described, own, settings)
    if model.get("type") != "BPE":
        return
    keys = _tokens(described, own) | marks
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    if model.get("byte_fallback"):
        yield from _sentencepiece(keys, model["vocab"], merges)
    else:
        yield from _byte_level(keys, described, merges)


def _tokens(described: Mapping[str, Any], own: Tokenizer) -> dict[str, Any]:
    """Texts and types of all ids; ids without a token are unused."""
    model = described["model"]
    texts = [f"[PAD{token}]" for token in range(own.vocab_size)]
    types = np.full(own.vocab_size, _UNUSED, np.int32)
    for text, token in model["vocab"].items():
        bytewise = model.get("byte_fallback") and len(text) == 6 and text.startswith("<0x")
        texts[token], types[token] = text, _BYTE if bytewise else _NORMAL
    for entry in described["added_tokens"]:
        texts[entry["id"]] = entry["content"]
        types[entry["id"]] = _CONTROL if entry["special"] else _USER_DEFINED
    if model.get("unk_token") in model["vocab"]:
        types[model["vocab"][model["unk_token"]]] = _UNKNOWN
    return {"tokenizer.ggml.tokens": texts, "tokenizer.ggml.token_type": types}


def _padded(keys: dict[str, Any], rows: int) -> dict[str, Any]:
    """The keys with unused tokens for the rows of the embedding table beyond the last one."""
    texts: list[str] = keys["tokenizer.ggml.tokens"]
    missing = rows - len(texts)
    padded = keys | {"tokenizer.ggml.tokens": texts + [f"[PAD{token}]" for token in range(len(texts), rows)]}
    for name, value in (("token_type", _UNUSED), ("scores", 0)):
        column = keys.get(f"tokenizer.ggml.{name}")
        if column is not None:
            padded[f"tokenizer.ggml.{name}"] = np.concatenate([column, np.full(missing, value, column.dtype)])
    return padded


def _marks(checkpoint: Checkpoint, own: Tokenizer, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The ids of the marks of a sequence, and which of them are put around a text."""
    keys: dict[str, Any] = {"tokenizer.ggml.add_bos_token": own.add_bos}
    if own.bos_id is not None:
        keys["tokenizer.ggml.bos_token_id"] = own.bos_id
    for mark, name in (("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token = settings.get(f"{mark}_token")
        text = token.get("content") if isinstance(token, dict) else token
        found = own.token_id(text) if isinstance(text, str) else checkpoint.metadata.get(f"{mark}_token_id")
        if isinstance(found, list):
            found = found[0] if found else None
        if isinstance(found, int) and 0 <= found < own.vocab_size:
            keys[f"tokenizer.ggml.{name}_token_id"] = found
    last = own.encode("a", add_special=True)[-1]
    if last in own.eos_ids:
        keys.setdefault("tokenizer.ggml.eos_token_id", last)
    eos = keys.get("tokenizer.ggml.eos_token_id")
    keys["tokenizer.ggml.add_eos_token"] = last == eos
    if eos is not None and own.between_ids == (eos, eos):  # as RoBERTa's kind parts two texts
        keys |= {"tokenizer.ggml.seperator_token_id": eos, "tokenizer.ggml.add_sep_token": True}
    # a generation config often names a second end, that of a turn
    other = sorted(token for token in checkpoint.eos_ids if token != eos)
    if other:
        keys["tokenizer.ggml.eot_token_id"] = other[0]
    return keys


def _byte_level(keys: dict[str, Any], described: Mapping[str, Any], merges: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The same tokens with each way of splitting that there is, under one name each: first those whose expressions the
    description spells out."""
    whole = keys | {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": merges}
    spelled = set(_expressions(described["pre_tokenizer"]))
    names = {PRE_TOKENIZERS[name]: name for name in reversed(("gpt-2", "llama-bpe", "qwen2", *PRE_TOKENIZERS))}
    for entry in sorted(names, key=lambda entry: not spelled.issuperset(entry.patterns)):
        yield whole | {"tokenizer.ggml.pre": names[entry]}


def _wordpiece(
    keys: dict[str, Any], described: Mapping[str, Any], own: Tokenizer, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """What begins a word has U+2581 before it, and what goes on one has nothing."""
    types, texts = keys["tokenizer.ggml.token_type"], keys["tokenizer.ggml.tokens"]
    spelled = [_piece(text) if kind == _NORMAL else text for text, kind in zip(texts, types, strict=True)]
    normalizer = described.get("normalizer") or {}
    lowercase = bool(normalizer.get("lowercase"))
    strips = normalizer.get("strip_accents")
    found = keys | {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": False,  # what ends a text is [SEP]
        "tokenizer.ggml.tokens": spelled,
        "tokenizer.ggml.normalizer.lowercase": lowercase,
        "tokenizer.ggml.normalizer.strip_accents": lowercase if strips is None else bool(strips),
    }
    for mark, names in (("cls", ("bos", "cls")), ("sep", ("seperator",)), ("mask", ("mask",))):
        token = settings.get(f"{mark}_token")
        number = own.token_id(str(token.get("content") if isinstance(token, dict) else token))
        if number is not None:
            found |= {f"tokenizer.ggml.{name}_token_id": number for name in names}
    return found


def _piece(text: str) -> str:
    return text.removeprefix(CONTINUES) if text.startswith(CONTINUES) else SPACE + text


def _expressions(part: Any) -> Iterator[str]:
    """The splitting expressions of a serialized pre-tokenizer and what it is made of."""
    if isinstance(part, dict):
        pattern = part.get("pattern")
        if isinstance(pattern, dict) and "Regex" in pattern:
            yield pattern["Regex"]
        for inner in part.get("pretokenizers", ()):
            yield from _expressions(inner)


def _sentencepiece(
    keys: dict[str, Any], vocabulary: Mapping[str, int], merges: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Scores that put the merges in their order: the token of the first merge scores best."""
    scores = np.zeros(len(keys["tokenizer.ggml.tokens"]), np.float32)
    for rank, merge in reversed(list(enumerate(merges))):
        token = vocabulary.get(merge.replace(" ", ""))
        if token is not None:
            scores[token] = -rank - 1
    whole = keys | {"tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default", "tokenizer.ggml.scores": scores}
    for prefix in (True, False):
        yield whole | {"tokenizer.ggml.add_space_prefix": prefix}


def _same(own: Tokenizer, keys: dict[str, Any], pairs: bool) -> bool:
    """Whether the keys, read back, cut the probes as the folder's tokenizer does, with and without marks around them, and in
    ``pairs``."""
    try:
        other = build_tokenizer(keys)
        alike = not pairs or own.encode_pair(*_PROBES[:2]) == other.encode_pair(*_PROBES[:2])
        return alike and all(
            own.encode(text, add_special) == other.encode(text, add_special)
            for text in _PROBES
            for add_special in (False, True)
        )
    except EngineError:
        return False


def _template(checkpoint: Checkpoint) -> dict[str, Any]:
    template = checkpoint.chat_template()
    if template is None:
        return {}
    keys: dict[str, Any] = {"tokenizer.chat_template": template.source}
    if template.tool_source is not None:
        keys |= {"tokenizer.chat_template.tool_use": template.tool_source, "tokenizer.chat_templates": ["tool_use"]}
    return keys
