"""Tokenizers and chat templates out of a Hugging Face folder (tokenizer.json, tokenizer_config.json, ...)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from engine.errors import FormatError, TokenizerError
from engine.formats.chat_template import ChatTemplate
from engine.formats.jsonfile import read_bytes, read_object, read_text
from engine.formats.tokenizer import BYTE_CHARACTERS, CONTINUES, SPACE, Spelling, Tokenizer, Vocabulary, native_errors
from engine.formats.tokenizer_files import (
    MARKS,
    add_listed,
    byte_level_pipeline,
    from_sentencepiece,
    tokenizer_settings,
)


def build_tokenizer(folder: Path, config: Mapping[str, Any], eos_ids: frozenset[int]) -> Tokenizer:
    """The tokenizer of a folder: tokenizer.json with what is listed beside it, else tokenizer.model, else vocab.json and
    merges.txt. `config` is config.json, `eos_ids` the ends that the model's files list."""
    settings = tokenizer_settings(folder)
    if (folder / "tokenizer.json").is_file():
        pipeline = _pipeline(folder / "tokenizer.json")
        with native_errors("building the tokenizer"):
            add_listed(pipeline, folder, settings)
    elif (folder / "tokenizer.model").is_file():
        return from_sentencepiece(folder / "tokenizer.model", settings)
    elif (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        pipeline = byte_level_pipeline(folder, settings, config)
    else:
        raise TokenizerError(
            f"{folder} holds no tokenizer: neither tokenizer.json nor tokenizer.model nor vocab.json and merges.txt."
        )
    bos_id = _mark(pipeline, settings, config, "bos")
    eos_id = _mark(pipeline, settings, config, "eos")
    added = pipeline.get_added_tokens_decoder()
    prefix_ids, suffix_ids = _surroundings(pipeline)
    between_ids = _between(pipeline, prefix_ids, suffix_ids)
    spelling, strip_space = _spelling(pipeline)
    return Tokenizer(
        pipeline,
        Vocabulary(
            text=pipeline.id_to_token,
            id_of=pipeline.token_to_id,
            size=max(pipeline.get_vocab().values(), default=-1) + 1,
            spelling=spelling,
            literal=frozenset(
                token for token, entry in added.items() if _is_literal(entry, pipeline.id_to_token(token))
            ),
            control=frozenset(token for token, entry in added.items() if entry.special),
            bos_id=bos_id,
            eos_ids=eos_ids | ({eos_id} if eos_id is not None else frozenset()),
            prefix_ids=_overridden(settings, "add_bos_token", prefix_ids, bos_id),
            suffix_ids=_overridden(settings, "add_eos_token", suffix_ids, eos_id),
            between_ids=between_ids,
            strip_space=strip_space,
            missing_bytes=_missing_bytes(pipeline) if spelling is Spelling.BYTE_LEVEL else frozenset(),
        ),
    )


def _is_literal(entry: tokenizers.AddedToken, written: str | None) -> bool:
    """Not a token added with U+2581 in it, nor one that got it from the normalizer, as a text around it does: they are spelled
    like the others."""
    return SPACE not in (written or "") or (entry.special and SPACE in entry.content)


def _pipeline(path: Path) -> tokenizers.Tokenizer:
    data = read_bytes(path)
    with native_errors(f"reading {path}"):
        pipeline = tokenizers.Tokenizer.from_buffer(data)
        pipeline.no_truncation()  # a text is never cut silently
        pipeline.no_padding()
    return pipeline


def chat_template(folder: Path) -> ChatTemplate | None:
    """The template of chat_template.jinja with additional_chat_templates/tool_use.jinja, or of tokenizer_config.json (one, or
    several with names), or of chat_template.json, where older models that take images have it."""
    settings = tokenizer_settings(folder)
    texts = {f"{mark}_token": _token_text(settings, mark) for mark in MARKS}
    marks = {name: text for name, text in texts.items() if text is not None}
    file, tool_file = folder / "chat_template.jinja", folder / "additional_chat_templates" / "tool_use.jinja"
    if file.is_file():
        return ChatTemplate(read_text(file), marks, read_text(tool_file) if tool_file.is_file() else None)
    older = folder / "chat_template.json"
    template = settings.get("chat_template")
    if template is None and older.is_file():
        template = read_object(older).get("chat_template")
    if template is None:
        return None
    if isinstance(template, str):
        return ChatTemplate(template, marks)
    try:
        named = {entry["name"]: entry["template"] for entry in template}
    except (TypeError, KeyError) as error:
        raise FormatError(f"chat_template in {folder} must be a string or a list of name and template.") from error
    default, tools = named.get("default"), named.get("tool_use")
    if not isinstance(default, str) or not isinstance(tools, str | None):
        raise FormatError(f"chat_template in {folder} must have a template named default.")
    return ChatTemplate(default, marks, tools)


def _token_text(settings: Mapping[str, Any], mark: str) -> str | None:
    """The text of `bos_token` or another mark, which is a string or an object with a content."""
    token = settings.get(f"{mark}_token")
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str | None):
        raise FormatError(f"{mark}_token of tokenizer_config.json must be a string.")
    return text


def _mark(
    pipeline: tokenizers.Tokenizer, settings: Mapping[str, Any], config: Mapping[str, Any], mark: str
) -> int | None:
    """The id of a sequence mark, by tokenizer_config.json or else by config.json."""
    text = _token_text(settings, mark)
    if text is not None:
        with native_errors("looking a token up"):
            found: int | None = pipeline.token_to_id(text)
        if found is not None:
            return found
    token = config.get(f"{mark}_token_id")
    return token if type(token) is int else None


def _missing_bytes(pipeline: tokenizers.Tokenizer) -> frozenset[int]:
    """The bytes that the model would drop: those without a token, if there is no unknown token either."""
    if getattr(pipeline.model, "unk_token", None) is not None:
        return frozenset()
    characters = BYTE_CHARACTERS.items()
    return frozenset(byte for byte, character in characters if pipeline.token_to_id(character) is None)


def _surroundings(pipeline: tokenizers.Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the pipeline's post-processor puts before and after a text, seen on one."""
    _check_template(pipeline)
    with native_errors("tokenizing"):
        plain = pipeline.encode("a", add_special_tokens=False).ids
        whole = pipeline.encode("a", add_special_tokens=True).ids
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            return tuple(whole[:start]), tuple(whole[start + len(plain) :])
    raise TokenizerError("the post-processor of tokenizer.json changes the text's tokens, which is not supported.")


def _between(
    pipeline: tokenizers.Tokenizer, prefix: tuple[int, ...], suffix: tuple[int, ...]
) -> tuple[int, ...] | None:
    """What the post-processor puts between two texts, seen on one pair; None where it does not surround them as it does one."""
    with native_errors("tokenizing"):
        plain = tuple(pipeline.encode("a", add_special_tokens=False).ids)
        whole = tuple(pipeline.encode("a", "a", add_special_tokens=True).ids)
    before, after = prefix + plain, plain + suffix
    if len(whole) < len(before + after) or whole[: len(before)] != before or whole[len(whole) - len(after) :] != after:
        return None
    return whole[len(before) : len(whole) - len(after)]


def _check_template(pipeline: tokenizers.Tokenizer) -> None:
    """A template names special tokens, and says beside it what they are: the native library panics, aloud, where one is
    missing."""
    if pipeline.post_processor is None:
        return
    state = json.loads(pipeline.post_processor.__getstate__())
    for part in state.get("processors", [state]):
        pieces = [*part.get("single", ()), *part.get("pair", ())] if part["type"] == "TemplateProcessing" else []
        for piece in pieces:
            name = piece.get("SpecialToken", {}).get("id")
            if name is not None and name not in part["special_tokens"]:
                raise TokenizerError(
                    f"the post-processor of tokenizer.json names the token {name!r} and does not describe it."
                )


def _overridden(settings: Mapping[str, Any], name: str, found: tuple[int, ...], token: int | None) -> tuple[int, ...]:
    """What tokenizer_config.json says of a mark, where it says anything."""
    wanted = settings.get(name)
    if wanted is True and token is not None and token not in found:
        return (*found, token)
    return tuple(other for other in found if other != token) if wanted is False else found


def _parts(part: Any) -> Iterator[dict[str, Any]]:
    """A serialized decoder and what it is made of."""
    if isinstance(part, dict):
        yield part
        for inner in part.get("decoders", ()):
            yield from _parts(inner)


def _spelling(pipeline: tokenizers.Tokenizer) -> tuple[Spelling, bool]:
    """How the vocabulary writes bytes, and whether decoding takes a first space away: both as its decoder says."""
    if pipeline.decoder is None:
        return Spelling.SENTENCEPIECE, False
    parts = list(_parts(json.loads(pipeline.decoder.__getstate__())))
    kinds = {part["type"] for part in parts}
    if kinds == {"WordPiece"} and parts[0].get("prefix", CONTINUES) == CONTINUES:
        return Spelling.WORDPIECE, True
    if "ByteLevel" in kinds:
        return Spelling.BYTE_LEVEL, False
    unknown = kinds - {"Sequence", "Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
    replaced = [part["pattern"].get("String") for part in parts if part["type"] == "Replace"]
    if unknown or any(text != SPACE for text in replaced):
        named = ", ".join(sorted(unknown)) or "Replace"
        raise TokenizerError(f"the decoder {named} of tokenizer.json is not supported.")
    strips = any(
        (part["type"] == "Strip" and part["start"] > 0)
        or (part["type"] == "Metaspace" and part.get("prepend_scheme", "always") != "never")
        for part in parts
    )
    return Spelling.SENTENCEPIECE, strips
