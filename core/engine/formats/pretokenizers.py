"""How byte-level BPE vocabularies of GGUF files split text before merging, by `tokenizer.ggml.pre`.

The expressions are those that the models' authors publish in their tokenizer.json; each is applied to the pieces
that the one before it left.  `default` is what llama.cpp does for a file that names none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from engine.errors import TokenizerError

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = r"[^\r\n\p{L}\p{N}]?{U}*{L}+{C}|[^\r\n\p{L}\p{N}]?{U}+{L}*{C}|\p{N}{D}| ?[^\s\p{L}\p{N}]+[\r\n/]*|".replace(
    "{U}", _UPPER
).replace("{L}", _LOWER)
_TEKKEN = _CASED.replace("{C}", "").replace("{D}", "") + _SPACES
_GPT4O = _CASED.replace("{C}", _CONTRACTIONS + "?").replace("{D}", "{1,3}") + _SPACES
_DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES
)


@dataclass(frozen=True)
class PreTokenizer:
    """Splitting expressions (Oniguruma syntax), and what else the family's tokenizers do by default.

    whole_words: a piece that is a token as it stands is not merged; add_bos: unless the file says otherwise.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    add_bos: bool = False


_DEFAULT = PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))
_PLAIN = PreTokenizer((_GPT2,))
_DIGITS = PreTokenizer((r"\p{N}", _GPT2))
_LLAMA = PreTokenizer((_LLAMA3,), whole_words=True, add_bos=True)
_QWEN = PreTokenizer((_QWEN2,))

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = MappingProxyType(
    {
        "default": _DEFAULT,
        "gpt-2": _PLAIN,
        "mpt": _PLAIN,
        "olmo": _PLAIN,
        "jais": _PLAIN,
        "phi-2": _PLAIN,
        "llama3": _LLAMA,
        "llama-v3": _LLAMA,
        "llama-bpe": _LLAMA,
        "falcon3": _LLAMA,
        "dbrx": PreTokenizer((_LLAMA3,)),
        "smaug-bpe": PreTokenizer((_LLAMA3,)),
        "chatglm-bpe": PreTokenizer((_LLAMA3,)),
        "glm4": PreTokenizer((_LLAMA3,)),
        "qwen2": _QWEN,
        "stablelm2": _QWEN,
        "deepseek-r1-qwen": _QWEN,
        "megrez": _QWEN,
        "starcoder": _DIGITS,
        "refact": _DIGITS,
        "command-r": _DIGITS,
        "smollm": _DIGITS,
        "codeshell": _DIGITS,
        "exaone": _DIGITS,
        "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
        "tekken": PreTokenizer((_TEKKEN,), whole_words=True, add_bos=True),
        "gpt-4o": PreTokenizer((_GPT4O,)),
        "llama4": PreTokenizer((_GPT4O,), add_bos=True),
        "deepseek-v3": PreTokenizer((r"\p{N}{1,3}", r"[\x{4e00}-\x{9fa5}\x{3040}-\x{30ff}]+", _DEEPSEEK3)),
    }
)


def pre_tokenizer(name: object) -> PreTokenizer:
    """The entry for a `tokenizer.ggml.pre`; TokenizerError naming the known ones if there is none."""
    entry = PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
    if entry is None:
        known = ", ".join(PRE_TOKENIZERS)
        raise TokenizerError(f"the pre-tokenizer {name!r} is not known; tokenizer.ggml.pre must be one of {known}.")
    return entry
