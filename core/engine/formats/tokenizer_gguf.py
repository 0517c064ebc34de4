"""Tokenizers and chat templates out of a GGUF's metadata (keys `tokenizer.*`).

What the file leaves unsaid is as in llama.cpp, for whose loader such files are written: defaults by kind of
vocabulary, ends of turn known by their text, tokens of Phi-3 that swallow the space after them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from engine.errors import FormatError, TokenizerError
from engine.formats.chat_template import ChatTemplate
from engine.formats.pretokenizers import PreTokenizer, pre_tokenizer
from engine.formats.tokenizer import BYTE_CHARACTERS, CONTINUES, SPACE, Spelling, Tokenizer, Vocabulary, native_errors

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_END_TEXTS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<turn|>",
    "<|tool_response>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eom_id|>",
    "<|return|>",
    "<|call|>",
    "<eos>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "<end_of_utterance>",
)
_MARKS = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "sep_token": "seperator",  # as the key is spelled
    "pad_token": "padding",
    "cls_token": "cls",
    "mask_token": "mask",
}
"""What chat templates call special tokens, and what the keys of their ids do."""
_PHI3_NOT_STRIPPING = ("<unk>", "<s>", "<|endoftext|>")


_MAX_TOKENS = 1 << 20  # the largest vocabularies have a quarter of it
_MAX_PIECE = 1024  # characters of a SentencePiece token; real ones have a few dozen
_MAX_MERGES = 1 << 21  # of such tokens; those of 262,144 have some 600,000
_MAX_MERGED = 1 << 24  # characters in all that such merges make; of the same tokens some 5,000,000
_MAX_WORD = 100  # characters of a word that WordPiece looks at, as in its authors' code


@dataclass(frozen=True)
class _Tokens:
    """The vocabulary's columns: texts [n], types i32 [n], scores f32 [n]; ids: text -> id."""

    metadata: Mapping[str, Any]
    texts: Sequence[str]
    ids: dict[str, int]
    types: npt.NDArray[np.int32]
    scores: npt.NDArray[np.float32]

    def flag(self, name: str, default: bool) -> bool:
        value = self.metadata.get(f"tokenizer.ggml.{name}", default)
        if not isinstance(value, bool):
            raise TokenizerError(f"tokenizer.ggml.{name} must be true or false.")
        return value

    def token(self, name: str, default: int | None = None) -> int | None:
        value = _id(self.metadata, name)
        if value is None:
            return default if default is not None and default < len(self.texts) else None
        if value >= len(self.texts):
            raise TokenizerError(f"tokenizer.ggml.{name} is {value}, but the vocabulary has {len(self.texts)} tokens.")
        return value

    def mark(self, name: str, default: bool, token: int | None) -> tuple[int, ...]:
        """`token` if the flag `name` says to add it; a default adds it only where there is one."""
        if not self.flag(name, default and token is not None):
            return ()
        if token is None:
            raise TokenizerError(f"tokenizer.ggml.{name} is true, but the file does not say which token to add.")
        return (token,)

    def of_type(self, *kinds: int) -> list[int]:
        found: list[int] = np.flatnonzero(np.isin(self.types, kinds)).tolist()
        return found


def _id(metadata: Mapping[str, Any], name: str) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{name}")
    if value is None or (isinstance(value, int) and value in (-1, 0xFFFFFFFF)):  # how writers say that there is none
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise FormatError(f"tokenizer.ggml.{name} must be a token id.")
    return value


def eos_ids(metadata: Mapping[str, Any]) -> frozenset[int]:
    """The ids that the file names as ends of sequence, turn or message."""
    return frozenset(token for name in _EOS_KEYS if (token := _id(metadata, name)) is not None)


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that the metadata describes."""
    model = metadata.get("tokenizer.ggml.model")
    if not isinstance(model, str | None):
        raise TokenizerError("tokenizer.ggml.model must be a string.")
    if model is None:
        raise TokenizerError("the GGUF holds no tokenizer (no key tokenizer.ggml.model).")
    if model not in _MODELS:
        raise TokenizerError(
            f"the tokenizer.ggml.model {model!r} is not supported; it must be one of {', '.join(_MODELS)}."
        )
    return _MODELS[model](_read_tokens(metadata))


def chat_template(metadata: Mapping[str, Any]) -> ChatTemplate | None:
    """The template of `tokenizer.chat_template`, with the texts of the special tokens that the file names."""
    source = metadata.get("tokenizer.chat_template")
    if source is None:
        return None
    tool_source = metadata.get("tokenizer.chat_template.tool_use")
    if not isinstance(source, str) or not isinstance(tool_source, str | None):
        raise FormatError("tokenizer.chat_template must be a string.")
    texts = _strings(metadata, "tokens")
    ids = {mark: _id(metadata, f"{name}_token_id") for mark, name in _MARKS.items()}
    known = {mark: token for mark, token in ids.items() if token is not None and token < len(texts)}
    return ChatTemplate(source, {mark: texts[token] for mark, token in known.items()}, tool_source)


def _strings(metadata: Mapping[str, Any], name: str) -> list[str]:
    value = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(value, list) or not (value and isinstance(value[0], str)):
        raise TokenizerError(f"tokenizer.ggml.{name} must be an array of strings, and not empty.")
    return value


def _numbers(metadata: Mapping[str, Any], name: str, count: int, dtype: type[np.generic]) -> npt.NDArray[Any] | None:
    value = metadata.get(f"tokenizer.ggml.{name}")
    if value is None:
        return None
    if not isinstance(value, np.ndarray) or len(value) != count:
        raise TokenizerError(f"tokenizer.ggml.{name} must be an array of {count} numbers, one a token.")
    with np.errstate(all="ignore"):  # a number that does not fit is damage, and does no harm
        return value.astype(dtype)


def _read_tokens(metadata: Mapping[str, Any]) -> _Tokens:
    texts = _strings(metadata, "tokens")
    if len(texts) > _MAX_TOKENS:
        raise TokenizerError(f"the vocabulary has {len(texts)} tokens, where {_MAX_TOKENS} are the most.")
    ids = dict(zip(texts, range(len(texts)), strict=True))
    if "" in ids:
        texts = [text or f"[EMPTY_{token}]" for token, text in enumerate(texts)]
        ids = dict(zip(texts, range(len(texts)), strict=True))
    types = _numbers(metadata, "token_type", len(texts), np.int32)
    if types is None:
        types = np.full(len(texts), _NORMAL, np.int32)
    scores = _numbers(metadata, "scores", len(texts), np.float32)
    if scores is None:
        scores = np.zeros(len(texts), np.float32)
    # an end of turn that the file's writer did not mark as control still is one
    types[[ids[text] for text in _END_TEXTS if text in ids]] = _CONTROL
    return _Tokens(metadata, texts, ids, types, scores)


def _pairs(tokens: _Tokens) -> list[tuple[str, str]]:
    """The merges that the file lists, first come first."""
    parts = (merge.partition(" ") for merge in _strings(tokens.metadata, "merges"))
    return [(left, right) for left, _, right in parts]


def _byte_pairs(tokens: _Tokens) -> Tokenizer:
    splitting = pre_tokenizer(tokens.metadata.get("tokenizer.ggml.pre", "default"))
    return _spaced(tokens, splitting) if splitting.spaced else _byte_level(tokens, splitting)


def _byte_level(tokens: _Tokens, splitting: PreTokenizer) -> Tokenizer:
    merges = _pairs(tokens)
    with native_errors("building the tokenizer"):
        pipeline = tokenizers.Tokenizer(models.BPE(tokens.ids, merges, ignore_merges=splitting.whole_words))
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in splitting.patterns]
        bytes_to_characters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        pipeline.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytes_to_characters])
    missing = frozenset(byte for byte, character in BYTE_CHARACTERS.items() if character not in tokens.ids)
    bos, eos = tokens.token("bos_token_id"), tokens.token("eos_token_id")
    sep = tokens.token("seperator_token_id")  # as the key is spelled
    marks = _Marks(bos, eos, sep, add_bos=splitting.add_bos, add_sep=splitting.add_sep)
    return _finish(pipeline, tokens, Spelling.BYTE_LEVEL, marks, missing_bytes=missing)


def _spaced(tokens: _Tokens, splitting: PreTokenizer) -> Tokenizer:
    """BPE by the file's merges over a text written as SentencePiece writes it."""
    unknown = tokens.token("unknown_token_id")
    with native_errors("building the tokenizer"):
        pipeline = tokenizers.Tokenizer(
            models.BPE(
                tokens.ids,
                _pairs(tokens),
                unk_token=None if unknown is None else tokens.texts[unknown],
                fuse_unk=True,
                byte_fallback=True,
            )
        )
        pipeline.normalizer = normalizers.Replace(" ", SPACE)
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in splitting.patterns]
        pipeline.pre_tokenizer = pre_tokenizers.Sequence(splits)
    missing = frozenset[int]()
    if unknown is None:
        missing = frozenset(byte for byte in range(256) if f"<0x{byte:02X}>" not in tokens.ids)
    marks = _Marks(tokens.token("bos_token_id"), tokens.token("eos_token_id"), add_bos=splitting.add_bos)
    return _finish(pipeline, tokens, Spelling.SENTENCEPIECE, marks, missing_bytes=missing)


def _sentencepiece(tokens: _Tokens) -> Tokenizer:
    unknown = tokens.token("unknown_token_id") or 0
    space_before = tokens.flag("add_space_prefix", True)
    with native_errors("building the tokenizer"):
        pipeline = tokenizers.Tokenizer(
            models.BPE(tokens.ids, _merges(tokens), unk_token=tokens.texts[unknown], fuse_unk=True, byte_fallback=True)
        )
        pipeline.normalizer = _normalizer(tokens, space_before)
    marks = _Marks(tokens.token("bos_token_id", 1), tokens.token("eos_token_id", 2), add_bos=True)
    return _finish(pipeline, tokens, Spelling.SENTENCEPIECE, marks, strip_space=space_before)


def _unigram(tokens: _Tokens) -> Tokenizer:
    """The likeliest of all ways to cut a text (Kudo 2018, arXiv 1804.10959), unknown characters as bytes or one unknown."""
    unknown = tokens.token("unknown_token_id", 2)
    if unknown is None:
        raise TokenizerError("tokenizer.ggml.unknown_token_id must name the unknown token of a t5 vocabulary.")
    if not np.isfinite(tokens.scores).all():
        raise TokenizerError("tokenizer.ggml.scores must be finite numbers.")
    space_before = tokens.flag("add_space_prefix", False)
    hidden = set(tokens.of_type(_UNKNOWN, _CONTROL))
    fallback = bool(tokens.of_type(_BYTE))
    # noncharacters stand in for control tokens, so that no text is taken for one
    plain = [f"\ufdd0{token}" if token in hidden else text for token, text in enumerate(tokens.texts)]
    with native_errors("building the tokenizer"):
        parsing_model, plain_model = (
            models.Unigram(list(zip(texts, tokens.scores.tolist(), strict=True)), unknown, fallback)
            for texts in (tokens.texts, plain)
        )
        pipeline = tokenizers.Tokenizer(parsing_model)
        pipeline.normalizer = _normalizer(tokens, space_before)
        if fallback:  # a text that looks like a byte's token is cut, and so not taken for it
            pipeline.pre_tokenizer = pre_tokenizers.Split(Regex("<(?=0x[0-9A-F]{2}>)"), "merged_with_previous")
    sep = tokens.token("seperator_token_id")
    marks = _Marks(tokens.token("bos_token_id"), tokens.token("eos_token_id", 1), sep, add_eos=True)
    return _finish(pipeline, tokens, Spelling.SENTENCEPIECE, marks, strip_space=space_before, plain_model=plain_model)


def _normalizer(tokens: _Tokens, space_before: bool) -> normalizers.Normalizer:
    """What SentencePiece does to a text first, by the file's flags."""
    steps: list[normalizers.Normalizer] = []
    charsmap = tokens.metadata.get("tokenizer.ggml.precompiled_charsmap")
    if charsmap is not None and not (isinstance(charsmap, np.ndarray) and charsmap.dtype.itemsize == 1):
        raise TokenizerError("tokenizer.ggml.precompiled_charsmap must be an array of bytes.")
    if charsmap is not None and len(charsmap):
        steps.append(normalizers.Precompiled(charsmap.tobytes()))
    if tokens.flag("remove_extra_whitespaces", False):
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if space_before:
        steps.append(normalizers.Prepend(SPACE))
    return normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])


def _wordpiece(tokens: _Tokens) -> Tokenizer:
    """Words cut into the longest pieces from the left (Devlin et al. 2019, arXiv 1810.04805).

    The file writes U+2581 before what begins a word, and nothing before what goes on one; the library has it the other
    way round.
    """
    normal = set(tokens.of_type(_NORMAL))
    ids = {_begins_or_goes_on(text) if n in normal else text: n for n, text in enumerate(tokens.texts)}
    unknown = tokens.token("unknown_token_id", 100)
    if unknown is None:
        raise TokenizerError("tokenizer.ggml.unknown_token_id must name the unknown token of a bert vocabulary.")
    lowercase = tokens.flag("normalizer.lowercase", True)
    with native_errors("building the tokenizer"):
        pipeline = tokenizers.Tokenizer(
            models.WordPiece(
                ids,
                unk_token=tokens.texts[unknown],
                continuing_subword_prefix=CONTINUES,
                max_input_chars_per_word=_MAX_WORD,
            )
        )
        pipeline.normalizer = normalizers.BertNormalizer(
            strip_accents=tokens.flag("normalizer.strip_accents", lowercase), lowercase=lowercase
        )
        pipeline.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    bos, sep = tokens.token("bos_token_id", 101), tokens.token("seperator_token_id", 102)
    marks = _Marks(bos, tokens.token("eos_token_id"), sep, add_bos=True, add_sep=True)
    return _finish(pipeline, tokens, Spelling.SENTENCEPIECE, marks, strip_space=True)


def _begins_or_goes_on(text: str) -> str:
    return text[1:] if text.startswith(SPACE) else CONTINUES + text


def _merges(tokens: _Tokens) -> list[tuple[str, str]]:
    """The merges that SentencePiece's BPE makes (Kudo and Richardson 2018): always the pair whose result scores best.

    A token comes from each pair of tokens that spell it, and tokens merge in the order of their scores.
    """
    pieces = {text: text for text in map(tokens.texts.__getitem__, tokens.of_type(_NORMAL))}  # shared by all merges
    merges: list[tuple[str, str]] = []
    merged = 0
    for token in np.argsort(-tokens.scores, kind="stable").tolist():
        text = tokens.texts[token]
        if text not in pieces:
            continue
        if len(text) > _MAX_PIECE:
            raise TokenizerError(f"token {token} has {len(text)} characters, where {_MAX_PIECE} are the most.")
        for cut in range(1, len(text)):
            if (left := pieces.get(text[:cut])) and (right := pieces.get(text[cut:])):
                merges.append((left, right))
                merged += len(text)
        if len(merges) > _MAX_MERGES or merged > _MAX_MERGED:
            raise TokenizerError(
                f"the vocabulary's tokens come from {len(merges)} merges of {merged} characters and more, where {_MAX_MERGES} of"
                f" {_MAX_MERGED} are the most."
            )
    return merges


@dataclass(frozen=True)
class _Marks:
    """A kind's marks of a sequence, and which of them are put around a text unless the file says otherwise."""

    bos_id: int | None
    eos_id: int | None
    sep_id: int | None = None
    add_bos: bool = False
    add_eos: bool = False
    add_sep: bool = False


def _finish(
    pipeline: tokenizers.Tokenizer,
    tokens: _Tokens,
    spelling: Spelling,
    marks: _Marks,
    *,
    strip_space: bool = False,
    missing_bytes: frozenset[int] = frozenset(),
    plain_model: tokenizers.models.Model | None = None,
) -> Tokenizer:
    """Adds the tokens that are found in text as they stand, and the marks of a sequence."""
    added = tokens.of_type(_UNKNOWN, _CONTROL, _USER_DEFINED)
    control = frozenset(tokens.of_type(_UNKNOWN, _CONTROL))
    name = str(tokens.metadata.get("general.name", "")).lower()
    stripping = "phi-3" in name or "phi3" in name
    with native_errors("building the tokenizer"):
        pipeline.add_tokens(
            [
                AddedToken(
                    tokens.texts[token],
                    rstrip=stripping and tokens.texts[token] not in _PHI3_NOT_STRIPPING,
                    normalized=False,
                    special=token in control,
                )
                for token in added
            ]
        )
    sep = tokens.mark("add_sep_token", marks.add_sep, marks.sep_id)
    eos = tokens.mark("add_eos_token", marks.add_eos, marks.eos_id)
    vocabulary = Vocabulary(
        text=tokens.texts.__getitem__,
        id_of=tokens.ids.get,
        size=len(tokens.texts),
        spelling=spelling,
        literal=frozenset(added),
        control=control,
        bos_id=marks.bos_id,
        eos_ids=_ends(tokens, marks.eos_id),
        prefix_ids=tokens.mark("add_bos_token", marks.add_bos, marks.bos_id),
        suffix_ids=tuple(dict.fromkeys(sep + eos)),  # ModernBERT's files call one token both
        between_ids=eos + sep,
        strip_space=strip_space,
        missing_bytes=missing_bytes,
    )
    return Tokenizer(pipeline, vocabulary, plain_model)


_MODELS: Mapping[str, Callable[[_Tokens], Tokenizer]] = {
    "gpt2": _byte_pairs,
    "gemma4": lambda tokens: _spaced(tokens, pre_tokenizer("gemma4")),
    "llama": _sentencepiece,
    "t5": _unigram,
    "bert": _wordpiece,
}


def _ends(tokens: _Tokens, eos_id: int | None) -> frozenset[int]:
    named = (eos_id, tokens.token("eot_token_id"), tokens.token("eom_token_id"))
    texts = set(_END_TEXTS)
    if "<|return|>" in tokens.ids and "<|call|>" in tokens.ids:
        texts.remove("<|end|>")  # in OpenAI's harmony format it ends a message, and more may follow
    known = {tokens.ids[text] for text in texts if text in tokens.ids}
    return frozenset(known.union(token for token in named if token is not None))
