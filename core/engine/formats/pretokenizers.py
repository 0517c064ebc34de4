"""How byte-level BPE vocabularies of GGUF files split text before merging, by `tokenizer.ggml.pre`.

The expressions are those that the models' authors publish in their tokenizer.json; each is applied to the pieces
that the one before it left.  The names, and what a file leaves unsaid, are llama.cpp's, whose own expressions for tekken,
gpt-4o, tiny_aya, youtu and kimi-k2 come near these (they part combining marks, or do not part words at capitals).
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
_QWEN35 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _SPACES
_UFAKZEKA = _QWEN2.removeprefix(_CONTRACTIONS + "|")
_SEED = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|" + _SPACES
_EXAONE_MOE = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_JAIS2 = _LLAMA3.removesuffix(_SPACES) + r"\s*[\r\n]+|" + "".join(rf"\s{{{2**n}}}(?!\S)|" for n in range(9, 1, -1))
_JAIS2 += r"\s{1,2}(?!\S)|\s{1}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cased(contractions: str, digits: str, upper: str = _UPPER, lower: str = _LOWER) -> str:
    """Words cut where lower case turns to upper: `upper` and `lower` are what a capital and what follows it may be."""
    before = r"[^\r\n\p{L}\p{N}]?"
    words = f"{before}{upper}*{lower}+{contractions}|{before}{upper}+{lower}*{contractions}"
    return words + r"|\p{N}" + digits + r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES


_TEKKEN = _cased("", "")
_GPT4O = _cased(_CONTRACTIONS + "?", "{1,3}")
_YOUTU = (
    r"[\x{ac00}-\x{d7a3}\x{3131}-\x{318e}]+|[\x{ff01}\x{2026}\x{201c}\x{201d}\x{2018}\x{2019}\x{2014}\x{ff1a}"
    r"\x{ff1b}\x{ff0c}\x{3001}-\x{303f}\x{fe30}-\x{fe4f}]+|[\x{3105}-\x{312f}]+|[\x{4e00}-\x{9fa5}\x{3040}-\x{30ff}]+"
)
_NOT_HAN = "[{}&&[^\\p{{Han}}]]"
_KIMI = r"\p{Han}+|" + _cased(
    _CONTRACTIONS + "?", "{1,3}", _NOT_HAN.format(_UPPER[1:-1]), _NOT_HAN.format(_LOWER[1:-1])
).replace(r"[\r\n/]*", r"[\r\n]*")
_CJK = r"[\x{4e00}-\x{9fa5}\x{3040}-\x{30ff}]+"
_PUNCTUATED = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+"
)
_DEEPSEEK3 = _PUNCTUATED + r"[\r\n]*|" + _SPACES
_SPARK = _PUNCTUATED + r"|[\r\n]|\s+(?!\S)|\s+"
# the letters with case, and Armenian's and Georgian's, as far as DeepSeek's first tokenizers knew them
_DEEPSEEK_LETTERS = (
    r"A-Za-z\x{b5}\x{c0}-\x{d6}\x{d8}-\x{f6}\x{f8}-\x{1ba}\x{1bc}-\x{1bf}\x{1c4}-\x{293}\x{295}-\x{2af}\x{370}-\x{373}"
    r"\x{376}\x{377}\x{37b}-\x{37d}\x{37f}\x{386}\x{388}-\x{38a}\x{38c}\x{38e}-\x{3a1}\x{3a3}-\x{3f5}\x{3f7}-\x{481}"
    r"\x{48a}-\x{52f}\x{531}-\x{556}\x{10a0}-\x{10c5}\x{13a0}-\x{13f5}\x{13f8}-\x{13fd}\x{1c90}-\x{1cba}"
    r"\x{1cbd}-\x{1cbf}\x{1d00}-\x{1d2b}\x{1d6b}-\x{1d77}\x{1d79}-\x{1d9a}\x{1e00}-\x{1f15}\x{1f18}-\x{1f1d}"
    r"\x{1f20}-\x{1f45}\x{1f48}-\x{1f4d}\x{1f50}-\x{1f57}\x{1f59}\x{1f5b}\x{1f5d}\x{1f5f}-\x{1f7d}\x{1f80}-\x{1fb4}"
    r"\x{1fb6}-\x{1fbc}\x{1fbe}\x{1fc2}-\x{1fc4}\x{1fc6}-\x{1fcc}\x{1fd0}-\x{1fd3}\x{1fd6}-\x{1fdb}\x{1fe0}-\x{1fec}"
    r"\x{1ff2}-\x{1ff4}\x{1ff6}-\x{1ffc}\x{2102}\x{2107}\x{210a}-\x{2113}\x{2115}\x{2119}-\x{211d}\x{2124}\x{2126}"
    r"\x{2128}\x{212a}-\x{212d}\x{212f}-\x{2134}\x{2139}\x{213c}-\x{213f}\x{2145}-\x{2149}\x{214e}\x{2183}\x{2184}"
    r"\x{2c00}-\x{2c7b}\x{2c7e}-\x{2ce4}\x{2ceb}-\x{2cee}\x{2cf2}\x{2cf3}\x{a640}-\x{a66d}\x{a680}-\x{a69b}"
    r"\x{a722}-\x{a76f}\x{a771}-\x{a787}\x{a78b}-\x{a78e}\x{ab70}-\x{abbf}\x{fb00}-\x{fb06}\x{fb13}-\x{fb17}"
    r"\x{ff21}-\x{ff3a}\x{ff41}-\x{ff5a}\x{10400}-\x{1044f}\x{104b0}-\x{104d3}\x{104d8}-\x{104fb}\x{10c80}-\x{10cb2}"
    r"\x{10cc0}-\x{10cf2}\x{118a0}-\x{118df}\x{1e900}-\x{1e943}"
)
_DEEPSEEK_CJK = r"[\x{4e00}-\x{9fa5}\x{800}-\x{4e00}\x{ac00}-\x{d7ff}]+"
_DEEPSEEK_MARKS = r"\s?[!-/:-~\x{ff01}-\x{ff0f}\x{ff1a}-\x{ff5e}\x{2018}-\x{201f}\x{3000}-\x{3002}]+"
_BLOOM = r" ?[^(\s|.,!?\x{2026}\x{3002}\x{ff0c}\x{3001}\x{964}\x{6d4}\x{60c})]+"
_AFMOE_SCRIPTS = (
    r"[\x{4e00}-\x{9fff}\x{3400}-\x{4dbf}\x{f900}-\x{faff}\x{3040}-\x{30ff}\x{ff65}-\x{ff9f}\x{2f00}-\x{2fdf}"
    r"\x{e40}-\x{eff}\x{1780}-\x{17ff}\x{1000}-\x{109f}\x{aa60}-\x{aa7f}\x{a9e0}-\x{a9ff}\x{ac00}-\x{d7af}"
    r"\x{1100}-\x{11ff}]+"
)
_THREES = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"  # digits in threes, counted from the end


@dataclass(frozen=True)
class PreTokenizer:
    """Splitting expressions (Oniguruma syntax), and what else the family's tokenizers do by default.

    whole_words: a piece that is a token as it stands is not merged; add_bos, add_sep: unless the file says otherwise;
    spaced: the vocabulary is written as SentencePiece writes one (U+2581 for a space, <0xNN> for a byte).
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    add_bos: bool = False
    add_sep: bool = False
    spaced: bool = False


_ENTRIES: tuple[tuple[str, PreTokenizer], ...] = (
    ("default", PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))),
    (
        "gpt-2 mpt olmo jais phi-2 jina-es jina-de jina-v2-es jina-v2-de gigachat a.x-4.0 mellum modern-bert exaone4"
        " trillion granite-docling",
        PreTokenizer((_GPT2,)),
    ),
    ("jina-v1-en jina-v2-code roberta-bpe", PreTokenizer((_GPT2,), add_sep=True)),
    (
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        PreTokenizer((_LLAMA3,), whole_words=True, add_bos=True),
    ),
    ("dbrx smaug-bpe chatglm-bpe", PreTokenizer((_LLAMA3,))),
    ("glm4 glm5", PreTokenizer((_LLAMA3,), whole_words=True)),
    ("minicpm5", PreTokenizer((r"\p{N}{1,3}", _LLAMA3.replace("{1,3}", "+")), whole_words=True)),
    ("jais-2", PreTokenizer((_JAIS2,))),
    (
        "qwen2 stablelm2 deepseek-r1-qwen megrez kormo f2llmv2 hunyuan solar-open grok-2",
        PreTokenizer((_QWEN2,)),
    ),
    ("qwen35", PreTokenizer((_QWEN35,))),
    ("ufakzeka", PreTokenizer((_UFAKZEKA,))),
    ("laguna", PreTokenizer((r"[^\n]+|[\n]+", _QWEN2))),
    ("seed-coder", PreTokenizer((_SEED,))),
    ("exaone-moe", PreTokenizer((_EXAONE_MOE,))),
    ("bailingmoe bailingmoe2 llada-moe", PreTokenizer((_BAILING,))),
    (
        "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2",
        PreTokenizer((r"\p{N}", _GPT2)),
    ),
    ("falcon", PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]"))),
    ("tekken", PreTokenizer((_TEKKEN,), whole_words=True, add_bos=True)),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", PreTokenizer((_GPT4O,))),
    ("granite-embed-multi-97m", PreTokenizer((_GPT4O,), whole_words=True)),
    ("tiny_aya cohere2moe", PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O))),
    ("youtu", PreTokenizer((_YOUTU, _cased(_CONTRACTIONS + "?", "")), whole_words=True)),
    ("kimi-k2", PreTokenizer((_KIMI,))),
    ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", PreTokenizer((r"\p{N}{1,3}", _CJK, _DEEPSEEK3))),
    ("spark2_5", PreTokenizer((r"\p{N}{1,3}", _CJK, _SPARK, r"\p{N}"))),
    (
        "deepseek-llm",
        PreTokenizer(
            (r"[\r\n]", rf"\s?[{_DEEPSEEK_LETTERS}]+", _DEEPSEEK_MARKS, r"\s+$", _DEEPSEEK_CJK, r"\p{N}+"),
        ),
    ),
    ("deepseek-coder", PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, r"\p{N}"))),
    ("bloom poro-chat gpt3-finnish", PreTokenizer((_BLOOM,))),
    ("viking", PreTokenizer((_BLOOM, r"\p{N}"))),
    ("superbpe", PreTokenizer((r"\p{N}+", r"(?=(\d{3})+(?!\d))"))),
    ("afmoe", PreTokenizer((_THREES, _AFMOE_SCRIPTS, _DEEPSEEK3))),
    (
        "chameleon",
        PreTokenizer(
            (
                r"<sentinel:[0-9]+>",
                r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
                r"([\t\n]|    |  )",
                r"\p{N}",
                r"[\p{P}!-/:-@\[-`{-~]",
                _GPT2,
            ),
            add_bos=True,
        ),
    ),
    ("gemma4 sarvam-moe", PreTokenizer((r"[^\n]+|[\n]+",), spaced=True)),
)
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = MappingProxyType(
    {name: entry for names, entry in _ENTRIES for name in names.split()}
)


def pre_tokenizer(name: object) -> PreTokenizer:
    """The entry for a `tokenizer.ggml.pre`; TokenizerError naming the known ones if there is none."""
    entry = PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
    if entry is None:
        known = ", ".join(PRE_TOKENIZERS)
        raise TokenizerError(f"the pre-tokenizer {name!r} is not known; tokenizer.ggml.pre must be one of {known}.")
    return entry
