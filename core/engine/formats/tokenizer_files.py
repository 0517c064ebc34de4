"""Tokenizers of Hugging Face folders without a tokenizer.json: a SentencePiece model, or a vocabulary and its merges."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from engine.errors import FormatError, TokenizerError
from engine.formats import tokenizer_gguf
from engine.formats.jsonfile import VOCABULARY, read_object, read_text
from engine.formats.pretokenizers import pre_tokenizer
from engine.formats.sentencepiece import read_sentencepiece
from engine.formats.tokenizer import Tokenizer, native_errors

MARKS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
"""What special tokens are for, in the keys of tokenizer_config.json and the variables of chat templates."""
_CONTROL, _USER_DEFINED = 3, 4
_MAX_ID = 1 << 24
# tokenizer class, or model type where the folder names none -> how it cuts, by its name in GGUF files
_CUTS = {
    **dict.fromkeys(("GPT2Tokenizer", "CodeGenTokenizer", "gpt2", "gpt_neo", "gpt_bigcode", "opt"), "gpt-2"),
    **dict.fromkeys(("Qwen2Tokenizer", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), "qwen2"),
}


def tokenizer_settings(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json with, as transformers reads folders of old, the marks that special_tokens_map.json has."""
    path, marks = folder / "tokenizer_config.json", folder / "special_tokens_map.json"
    settings = read_object(path) if path.is_file() else {}
    if "added_tokens_decoder" in settings or not marks.is_file():
        return settings
    return settings | read_object(marks)


def from_sentencepiece(path: Path, settings: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of a tokenizer.model; `settings` is tokenizer_config.json."""
    return tokenizer_gguf.build_tokenizer(sentencepiece_keys(path, settings))


def sentencepiece_keys(path: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The `tokenizer.ggml.*` keys that say the same as a tokenizer.model and the tokens added beside it."""
    keys = read_sentencepiece(path)
    texts: list[str] = keys["tokenizer.ggml.tokens"]
    types: list[int] = keys["tokenizer.ggml.token_type"].tolist()
    for token, entry in _added_tokens(path.parent, settings).items():
        if token > len(texts):
            raise TokenizerError(
                f"the added token {entry.content!r} has the id {token}, but the ids before it end at {len(texts)}."
            )
        if token == len(texts):
            texts.append(entry.content)
            types.append(0)
        texts[token], types[token] = entry.content, _CONTROL if entry.special else _USER_DEFINED
    scores = np.zeros(len(texts), np.float32)
    scores[: len(keys["tokenizer.ggml.scores"])] = keys["tokenizer.ggml.scores"]
    keys |= {"tokenizer.ggml.token_type": np.array(types, np.int32), "tokenizer.ggml.scores": scores}
    if keys["tokenizer.ggml.model"] == "t5":
        keys["tokenizer.ggml.add_eos_token"] = str(settings.get("tokenizer_class", "T5")).startswith("T5")
    for name in ("add_bos_token", "add_eos_token"):
        if isinstance(settings.get(name), bool):
            keys[f"tokenizer.ggml.{name}"] = settings[name]
    end = settings.get("eos_token")
    end = end.get("content") if isinstance(end, dict) else end
    if end in texts:
        keys["tokenizer.ggml.eot_token_id"] = texts.index(end)
    return keys


def byte_level_pipeline(folder: Path, settings: Mapping[str, Any], config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """The pipeline of vocab.json and merges.txt, which leave unsaid how text is cut: by the class of the tokenizer."""
    kind = str(settings.get("tokenizer_class") or config.get("model_type")).removesuffix("Fast")
    if kind not in _CUTS:
        raise TokenizerError(
            f"{folder} has vocab.json and merges.txt only, and how a {kind} cuts text is not known; bring its tokenizer.json."
        )
    ids = read_object(folder / "vocab.json", VOCABULARY)
    if not all(type(token) is int and 0 <= token < _MAX_ID for token in ids.values()):
        raise FormatError(f"{folder / 'vocab.json'} must map each token to its id.")
    with native_errors(f"reading {folder / 'vocab.json'}"):
        pipeline = tokenizers.Tokenizer(models.BPE(ids, _merges(folder / "merges.txt")))
        if _CUTS[kind] == "qwen2":
            pipeline.normalizer = normalizers.NFC()
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre_tokenizer(_CUTS[kind]).patterns]
        prefix = settings.get("add_prefix_space") is True
        letters = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=prefix)
        pipeline.pre_tokenizer = letters if prefix else pre_tokenizers.Sequence([*splits, letters])
        pipeline.decoder = decoders.ByteLevel()
        add_listed(pipeline, folder, settings)
    return pipeline


def _merges(path: Path) -> list[tuple[str, str]]:
    merges = []
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        parts = tuple(line.removesuffix("\r").split(" "))
        if line.startswith("#version") or parts == ("",):
            continue
        if len(parts) != 2 or not all(parts):
            raise FormatError(f"line {number} of {path} must be two tokens with a space between.")
        merges.append((parts[0], parts[1]))
    return merges


def add_listed(pipeline: tokenizers.Tokenizer, folder: Path, settings: Mapping[str, Any]) -> None:
    """Adds the tokens that are listed or named beside a tokenizer's own file, and are not added there."""
    known = {entry.content for entry in pipeline.get_added_tokens_decoder().values()}
    new = {token: entry for token, entry in _added_tokens(folder, settings).items() if entry.content not in known}
    pipeline.add_tokens(list(new.values()))
    for token, entry in new.items():
        if pipeline.token_to_id(entry.content) != token:
            raise TokenizerError(
                f"the added token {entry.content!r} has the id {token}, which leaves a gap or is taken."
            )
    known |= {entry.content for entry in new.values()}
    named = [entry for entry in _named_tokens(settings) if entry.content not in known]
    pipeline.add_special_tokens([entry for entry in named if pipeline.token_to_id(entry.content) is not None])


def _named_tokens(settings: Mapping[str, Any]) -> list[AddedToken]:
    """The special tokens that tokenizer_config.json names by what they are for, and those that it names beside them."""
    named = [settings.get(f"{mark}_token") for mark in MARKS]
    for key in ("additional_special_tokens", "extra_special_tokens"):
        more = settings.get(key) or []
        named += more.values() if isinstance(more, dict) else more if isinstance(more, list) else []
    entries = [{"content": token} if isinstance(token, str) else token for token in named]
    texts = [entry for entry in entries if isinstance(entry, dict) and isinstance(entry.get("content"), str)]
    return [_added_token(entry | {"special": True}) for entry in texts]


def _added_tokens(folder: Path, settings: Mapping[str, Any]) -> dict[int, AddedToken]:
    """By their ids, and in the order of these: of tokenizer_config.json, else of added_tokens.json."""
    listed = settings.get("added_tokens_decoder")
    found: dict[int, AddedToken] = {}
    try:
        if listed is not None:
            found = {int(token): _added_token(entry) for token, entry in listed.items()}
        elif (folder / "added_tokens.json").is_file():
            ids = read_object(folder / "added_tokens.json")
            marks = {text: text.startswith("<") and text.endswith(">") for text in ids}
            found = {int(ids[text]): AddedToken(text, special=mark, normalized=False) for text, mark in marks.items()}
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise FormatError(f"the added tokens of {folder} must be ids with texts.") from error
    if any(not 0 <= token < _MAX_ID or not entry.content for token, entry in found.items()):
        raise FormatError(f"the added tokens of {folder} must be ids with texts.")
    return dict(sorted(found.items()))


def _added_token(entry: Mapping[str, Any]) -> AddedToken:
    flags = {name: entry.get(name) is True for name in ("lstrip", "rstrip", "single_word", "normalized", "special")}
    return AddedToken(entry["content"], **flags)
