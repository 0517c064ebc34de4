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
from engine.formats.jsonfile import read_object
from engine.formats.pretokenizers import PRE_TOKENIZERS
from engine.formats.tokenizer import Tokenizer
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


def tokenizer_keys(checkpoint: Checkpoint, rows: int) -> dict[str, Any]:
    """The keys, with as many tokens as the embedding table has rows. TokenizerError if the tokenizer has no such form."""
    path = checkpoint.path / "tokenizer.json"
    own = checkpoint.tokenizer()
    described = read_object(path)
    model = described.get("model", {})
    if model.get("type", "BPE") != "BPE" or not isinstance(model.get("vocab"), dict):
        raise TokenizerError(f"{path} is a {model.get('type')} tokenizer; only BPE can be written to a GGUF.")
    texts, types = _tokens(described, own, rows)
    keys: dict[str, Any] = {"tokenizer.ggml.tokens": texts, "tokenizer.ggml.token_type": types}
    keys |= _marks(checkpoint, own)
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    trials = _sentencepiece(keys, described, merges) if model.get("byte_fallback") else _byte_level(keys, merges)
    for trial in trials:
        if _same(own, trial):
            return trial | _template(checkpoint)
    raise TokenizerError(
        f"{path} cuts text in a way that no tokenizer of GGUF files does (the pre-tokenizers tried: {', '.join(PRE_TOKENIZERS)})."
    )


def _tokens(described: Mapping[str, Any], own: Tokenizer, rows: int) -> tuple[list[str], np.ndarray[Any, Any]]:
    """Texts and types of all ids. Ids without a token, and rows of the embedding table beyond the ids, are unused."""
    count = max(rows, own.vocab_size)
    texts = [f"[PAD{token}]" for token in range(count)]
    types = np.full(count, _UNUSED, np.int32)
    for text, token in described["model"]["vocab"].items():
        texts[token] = text
        bytewise = described["model"].get("byte_fallback") and len(text) == 6 and text.startswith("<0x")
        types[token] = _BYTE if bytewise else _NORMAL
    for entry in described.get("added_tokens", []):
        texts[entry["id"]] = entry["content"]
        types[entry["id"]] = _CONTROL if entry["special"] else _USER_DEFINED
    unknown = described["model"].get("unk_token")
    if unknown in described["model"]["vocab"]:
        types[described["model"]["vocab"][unknown]] = _UNKNOWN
    return texts, types


def _marks(checkpoint: Checkpoint, own: Tokenizer) -> dict[str, Any]:
    """The ids of the marks of a sequence, and which of them are put around a text."""
    settings_path = checkpoint.path / "tokenizer_config.json"
    settings = read_object(settings_path) if settings_path.is_file() else {}
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
    eos = keys.get("tokenizer.ggml.eos_token_id")
    around = own.encode("a", add_special=True)
    keys["tokenizer.ggml.add_eos_token"] = eos is not None and around[-1] == eos
    # a generation config often names a second end, that of a turn
    other = sorted(token for token in checkpoint.eos_ids if token != eos)
    if other:
        keys["tokenizer.ggml.eot_token_id"] = other[0]
    return keys


def _byte_level(keys: dict[str, Any], merges: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The same tokens with each way of splitting that there is, one name for each."""
    whole = keys | {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": merges}
    tried = []
    for name in ("llama-bpe", "qwen2", "gpt-2", *PRE_TOKENIZERS):
        if PRE_TOKENIZERS[name] not in tried:
            tried.append(PRE_TOKENIZERS[name])
            yield whole | {"tokenizer.ggml.pre": name}


def _sentencepiece(
    keys: dict[str, Any], described: Mapping[str, Any], merges: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Scores that put the merges in their order: the token of the first merge scores best."""
    scores = np.zeros(len(keys["tokenizer.ggml.tokens"]), np.float32)
    vocabulary = described["model"]["vocab"]
    for rank, merge in reversed(list(enumerate(merges))):
        token = vocabulary.get(merge.replace(" ", ""))
        if token is not None:
            scores[token] = -rank - 1
    whole = keys | {"tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default", "tokenizer.ggml.scores": scores}
    for prefix in (True, False):
        yield whole | {"tokenizer.ggml.add_space_prefix": prefix}


def _same(own: Tokenizer, keys: dict[str, Any]) -> bool:
    """Whether the keys, read back, cut the probes as the folder's tokenizer does, with and without marks around them."""
    try:
        other = build_tokenizer(keys)
        return all(
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
