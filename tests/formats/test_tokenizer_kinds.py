"""Every kind of vocabulary against the libraries that define it: unigram, WordPiece, BPE, SentencePiece files."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from handmade import gguf_bytes, safetensors_bytes
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from engine.errors import EngineError, FormatError, TokenizerError
from engine.formats import open_checkpoint
from engine.formats.pretokenizers import PRE_TOKENIZERS
from engine.formats.tokenizer import Tokenizer
from engine.formats.tokenizer_gguf import build_tokenizer

from . import subwords
from .subwords import BYTE, CONTROL, NORMAL, SPACE, UNKNOWN, USER_DEFINED, keys

TEXT = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=40),
    st.builds(lambda seed: subwords.texts(1, seed)[0], st.integers(0, 2**32)),
    st.text(st.sampled_from(" \n\t\r'a1.<>/s\u0301\u4e2d\u2581"), max_size=30),
)
QUICK = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
Write = Callable[..., Path]


def gguf(write: Write, listed: list[Any]) -> Tokenizer:
    return open_checkpoint(write(data=gguf_bytes(listed))).tokenizer()


# -- BPE -------------------------------------------------------------------------------------------------------------


def byte_level(write: Write, pre: str, **more: tuple[str, Any]) -> Tokenizer:
    tokens, merges = subwords.byte_level()
    return gguf(write, keys("gpt2", tokens, merges=("[str]", merges), pre=("str", pre), **more))


@pytest.mark.parametrize(
    ("pre", "name"), [("gpt-2", "GPT2Tokenizer"), ("qwen2", "Qwen2Tokenizer"), ("qwen35", "Qwen3_5Tokenizer")]
)
def test_byte_level_ids_are_transformers(write_gguf: Write, pre: str, name: str) -> None:
    import transformers

    tokens, merges = subwords.byte_level()
    ids = {text: token for token, text in enumerate(tokens)}
    pairs = [tuple(merge.split(" ")) for merge in merges]
    theirs = getattr(transformers, name)(vocab=ids, merges=pairs)._tokenizer
    theirs.normalizer = normalizers.Sequence([])  # a GGUF says nothing of normalizing
    ours = byte_level(write_gguf, pre)
    for text in subwords.texts(300, seed=3):
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False).ids


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    """A tokenizer by each expression that there is."""
    path = tmp_path_factory.mktemp("every") / "vocab.gguf"
    found: dict[tuple[str, ...], tuple[str, Tokenizer]] = {}
    for pre, entry in PRE_TOKENIZERS.items():
        if entry.patterns not in found and not entry.spaced:
            tokens, merges = subwords.byte_level()
            listed = keys("gpt2", tokens, merges=("[str]", merges), pre=("str", pre), bos_token_id=("u32", 0))
            path.write_bytes(gguf_bytes([*listed, ("tokenizer.ggml.seperator_token_id", "u32", 1)]))
            found[entry.patterns] = pre, open_checkpoint(path).tokenizer()
    return dict(found.values())


@QUICK
@given(text=TEXT)
def test_byte_level_comes_back_by_every_expression(every: dict[str, Tokenizer], text: str) -> None:
    for tokenizer in every.values():
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        stream = tokenizer.detokenizer(continuation=False)
        assert "".join(map(stream.push, ids)) + stream.flush() == text


@pytest.mark.parametrize(
    ("pre", "prefix", "suffix"), [("gpt-2", [], []), ("llama-bpe", [7], []), ("roberta-bpe", [], [9])]
)
def test_what_a_name_adds(write_gguf: Write, pre: str, prefix: list[int], suffix: list[int]) -> None:
    marks = {"bos_token_id": ("u32", 7), "eos_token_id": ("u32", 8), "seperator_token_id": ("u32", 9)}
    tokenizer = byte_level(write_gguf, pre, **marks)
    assert tokenizer.encode("a", add_special=True) == [*prefix, *tokenizer.encode("a"), *suffix]


@pytest.mark.parametrize("model", ["gemma4", "gpt2"])
def test_spaced_bpe(write_gguf: Write, model: str) -> None:
    """Merges over a text with U+2581 for spaces, other characters as bytes, newlines apart."""
    tokens, merges = subwords.spaced()
    whole = [*tokens, *(f"<0x{byte:02X}>" for byte in range(256)), "<turn>"]
    types = [NORMAL] * len(tokens) + [BYTE] * 256 + [CONTROL]
    ours = gguf(write_gguf, keys(model, whole, types, merges=("[str]", merges), pre=("str", "gemma4")))
    pairs = [tuple(merge.split(" ")) for merge in merges]
    theirs = tokenizers.Tokenizer(models.BPE({t: n for n, t in enumerate(whole)}, pairs, byte_fallback=True))
    for text in [*subwords.texts(300, seed=5), "\U0001f984 \u0e4f<turn> x"]:
        split = pre_tokenizers.Split("\n", "contiguous").pre_tokenize_str(text.replace(" ", SPACE))
        assert ours.encode(text) == [i for piece, _ in split for i in theirs.encode(piece).ids]
        assert ours.decode(ours.encode(text)) == text.replace(SPACE, " ")
    assert ours.encode("a<turn>", parse_special=True)[-1] == len(whole) - 1


def test_spaced_bpe_drops_no_byte(write_gguf: Write) -> None:
    tokens, merges = subwords.spaced()
    ours = gguf(write_gguf, keys("gemma4", tokens, merges=("[str]", merges)))
    with pytest.raises(TokenizerError, match="which the vocabulary cannot express"):
        ours.encode("a \u0e4f")


# -- unigram ---------------------------------------------------------------------------------------------------------

MARKS = [("<pad>", 0.0, CONTROL), ("</s>", 0.0, CONTROL), ("<unk>", 0.0, UNKNOWN), ("<user>", 0.0, USER_DEFINED)]


def unigram(write: Write, fallback: bool = False, **more: tuple[str, Any]) -> Tokenizer:
    pieces = [*MARKS, *((text, score, NORMAL) for text, score in subwords.unigram())]
    if fallback:
        pieces += [(f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)]
    texts, scores, types = map(list, zip(*pieces, strict=True))
    return gguf(write, keys("t5", texts, types, **({"scores": ("[f32]", scores)} | more)))


def viterbi(text: str) -> list[int]:
    """The cut with the greatest sum of log-probabilities; one unknown token for characters that no piece has."""
    ids = {piece: (n, score) for n, (piece, score) in enumerate(subwords.unigram(), start=len(MARKS))}
    lowest = min(score for _, score in ids.values()) - 10
    best: list[tuple[float, int, int]] = [(0.0, 0, -1)]
    for end in range(1, len(text) + 1):
        ways = []
        for start in range(max(end - 12, 0), end):
            if text[start:end] in ids:
                token, score = ids[text[start:end]]
                ways.append((best[start][0] + float(np.float32(score)), start, token))
        if text[end - 1 : end] not in ids:
            ways.append((best[end - 1][0] + lowest, end - 1, 2))
        best.append(max(ways, key=lambda way: way[0]))
    tokens, at = [], len(text)
    while at:
        _, start, token = best[at]
        if not (token == 2 and tokens and tokens[-1] == 2):
            tokens.append(token)
        at = start
    return tokens[::-1]


@QUICK
@given(text=TEXT, before=st.booleans(), merge=st.booleans())
def test_unigram_is_the_likeliest_cut(write_gguf: Write, text: str, before: bool, merge: bool) -> None:
    ours = unigram(write_gguf, add_space_prefix=("bool", before), remove_extra_whitespaces=("bool", merge))
    text = text.replace("<user>", "")
    spaced = " ".join(part for part in text.split(" ") if part) if merge else text
    spaced = (SPACE if before and spaced else "") + spaced.replace(" ", SPACE)
    got, expected = ours.encode(text), viterbi(spaced)
    scores = dict(enumerate(score for _, score in subwords.unigram()))
    if got != expected:  # two cuts may be equally likely
        total = [sum(scores.get(token - len(MARKS), 0.0) for token in ids) for ids in (got, expected)]
        assert abs(total[0] - total[1]) < 1e-3 and got.count(2) == expected.count(2)
    if 2 not in got:
        assert ours.decode(got) == (spaced[1:] if before else spaced).replace(SPACE, " ")


def test_unigram_with_a_mark_between_two_texts(write_gguf: Write) -> None:
    """As files of XLM-RoBERTa have it: what ends a text parts two of them, twice."""
    marks = {"add_sep_token": ("bool", True), "seperator_token_id": ("u32", 1)}
    ours = unigram(write_gguf, **marks)
    assert ours.encode("Hello", add_special=True) == [*ours.encode("Hello"), 1]
    assert ours.encode_pair("Hello", "x") == ([*ours.encode("Hello"), 1, 1], [*ours.encode("x"), 1])


def test_unigram_marks_and_specials(write_gguf: Write) -> None:
    ours = unigram(write_gguf, add_space_prefix=("bool", True))
    assert ours.encode("Hello", add_special=True) == [*ours.encode("Hello"), 1]
    assert ours.encode("a</s>", parse_special=True)[-1] == 1
    plain = ours.encode("a</s><pad> <unk>")
    assert not {0, 1} & set(plain), "control tokens in a text are text"
    assert 3 in ours.encode("a<user>b")
    assert ours.eos_ids == {1} and ours.token_id("</s>") == 1


@QUICK
@given(text=TEXT)
def test_unigram_with_bytes_comes_back(write_gguf: Write, text: str) -> None:
    ours = unigram(write_gguf, fallback=True)
    for whole in (text, text + "<0x41> <pad>"):
        ids = ours.encode(whole)
        assert ours.decode(ids) == whole.replace(SPACE, " ")
        stream = ours.detokenizer(continuation=False)
        assert "".join(map(stream.push, ids)) + stream.flush() == whole.replace(SPACE, " ")


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"precompiled_charsmap": ("[u8]", [255, 255, 255, 255, 1])}, "building the tokenizer failed"),
        ({"precompiled_charsmap": ("[i32]", [1, 2])}, "must be an array of bytes"),
        ({"precompiled_charsmap": ("u32", 3)}, "must be an array of bytes"),
        ({"unknown_token_id": ("u32", 70000)}, "is 70000, but"),
        ({"scores": ("[f32]", [float("nan")] * (len(MARKS) + len(subwords.unigram())))}, "must be finite numbers"),
        ({"remove_extra_whitespaces": ("u8", 1)}, "must be true or false"),
    ],
)
def test_unigrams_that_are_wrong(write_gguf: Write, more: dict[str, tuple[str, Any]], reason: str) -> None:
    with pytest.raises(EngineError, match=reason):
        unigram(write_gguf, **more)


# -- WordPiece -------------------------------------------------------------------------------------------------------


def their_wordpiece(lowercase: bool) -> tokenizers.Tokenizer:
    ids = {text: token for token, text in enumerate(subwords.wordpiece())}
    theirs = tokenizers.Tokenizer(models.WordPiece(ids, unk_token="[UNK]"))
    theirs.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    theirs.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    theirs.decoder = decoders.WordPiece(cleanup=False)
    theirs.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    theirs.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])
    return theirs


def wordpiece(write: Write, **more: tuple[str, Any]) -> Tokenizer:
    """The pieces as llama.cpp's converter writes them."""
    pieces = subwords.wordpiece()
    texts = [t if n < 5 else t[2:] if t.startswith("##") else SPACE + t for n, t in enumerate(pieces)]
    types = [CONTROL] * 5 + [NORMAL] * (len(pieces) - 5)
    named = {"unknown_token_id": ("u32", 1), "bos_token_id": ("u32", 2), "seperator_token_id": ("u32", 3)}
    return gguf(write, keys("bert", texts, types, **(named | more)))


def test_an_end_that_is_the_separator_comes_once(write_gguf: Write) -> None:
    """As files of ModernBERT have it."""
    tokenizer = wordpiece(write_gguf, eos_token_id=("u32", 3), add_eos_token=("bool", True))
    assert tuple(tokenizer.encode("a", add_special=True)[-2:]) == (tokenizer.encode("a")[-1], 3)
    tokenizer = wordpiece(write_gguf, eos_token_id=("u32", 4), add_eos_token=("bool", True))
    assert tuple(tokenizer.encode("a", add_special=True)[-2:]) == (3, 4)


@QUICK
@given(text=TEXT, lowercase=st.booleans())
def test_wordpiece_ids_are_its_authors(write_gguf: Write, text: str, lowercase: bool) -> None:
    ours, theirs = wordpiece(write_gguf, **{"normalizer.lowercase": ("bool", lowercase)}), their_wordpiece(lowercase)
    theirs.encode_special_tokens = True
    assert ours.encode(text) == theirs.encode(text, add_special_tokens=False).ids
    assert ours.encode(text, add_special=True) == theirs.encode(text).ids
    assert ours.decode(ours.encode(text)) == theirs.decode(ours.encode(text))


def test_wordpiece_of_a_folder(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path)
    their_wordpiece(True).save(str(folder / "tokenizer.json"))
    ours = open_checkpoint(folder).tokenizer()
    ids = ours.encode("Hello worlds, camelcase!", add_special=True)
    assert ids[0] == 2 and ids[-1] == 3
    assert ours.decode(ids) == their_wordpiece(True).decode(ids)


# -- files of Hugging Face folders -----------------------------------------------------------------------------------


def hf_folder(folder: Path, **more: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / "model.safetensors").write_bytes(safetensors_bytes({}))
    for name, value in more.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def field(number: int, value: int | float | bytes | str) -> bytes:
    """A field of a protocol buffer."""
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    if isinstance(value, int):
        return varint(number << 3) + varint(value & (1 << 64) - 1)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def sentencepiece(
    pieces: list[tuple[str, float, int]], kind: int, *, prefix: bool = True, merge: bool = False
) -> bytes:
    """A tokenizer.model, with fields that a reader must pass over."""
    listed = b"".join(
        field(1, field(1, text) + field(2, score) + (field(3, type_) if type_ != NORMAL else b""))
        for text, score, type_ in pieces
    )
    trainer = field(1, "corpus.txt") + field(3, kind) + field(10, 0.5) + field(40, 0) + field(41, 1) + field(42, 2)
    normalizer = field(1, "identity") + field(3, int(prefix)) + field(4, int(merge))
    return listed + field(2, trainer + field(43, -1)) + field(3, normalizer) + field(4, b"self test")


def bpe_pieces(metadata: Any) -> list[tuple[str, float, int]]:
    columns = (metadata[f"tokenizer.ggml.{name}"] for name in ("tokens", "scores", "token_type"))
    return [(text, float(score), int(kind)) for text, score, kind in zip(*columns, strict=True)]


def test_sentencepiece_file_is_its_gguf(shared: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(shared / "vocab" / "llama-spm.gguf")
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece(bpe_pieces(checkpoint.metadata), 2))
    ours = open_checkpoint(hf_folder(tmp_path)).tokenizer()
    texts = (shared / "vocab" / "llama-spm.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    for text, line in zip(texts, (shared / "vocab" / "llama-spm.out").read_text().split("\n"), strict=True):
        assert ours.encode(text) == [int(number) for number in line.split()]
        assert ours.decode(ours.encode(text)) == text
    theirs = checkpoint.tokenizer()
    assert (ours.bos_id, ours.eos_ids, ours.add_bos) == (theirs.bos_id, theirs.eos_ids, True)


def test_sentencepiece_file_of_a_unigram_with_added_tokens(tmp_path: Path, write_gguf: Write) -> None:
    marks = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)]
    pieces = [*marks, *((text, score, NORMAL) for text, score in subwords.unigram())]
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece(pieces, 1, merge=True))
    count = len(pieces)
    added = {str(count): {"content": "<turn>", "special": True}, str(count + 1): {"content": "<b>"}}
    config = {"added_tokens_decoder": added, "add_bos_token": True, "add_eos_token": False, "eos_token": "<turn>"}
    ours = open_checkpoint(hf_folder(tmp_path, tokenizer_config=config)).tokenizer()
    assert ours.vocab_size == count + 2 and ours.eos_ids == {2, count}
    assert ours.encode("a<turn>", add_special=True, parse_special=True)[:: len(ours.encode("a")) + 1] == [1, count]
    assert count not in ours.encode("a<turn>") and count + 1 in ours.encode("a<b>")
    ids = ours.encode("  Hello   World  ")
    assert ours.decode(ids) == "Hello World"
    assert ids == [i - 1 for i in viterbi(SPACE + "Hello" + SPACE + "World")]


BROKEN = {
    "empty": (b"", "it has no pieces"),
    "cut": (sentencepiece([("a", 0.0, NORMAL)], 2)[:-3], "it ends within a field"),
    "endless number": (b"\x80" * 40, "longer than 64 bits"),
    "cut number": (b"\x80", "ends within a number"),
    "huge size": (b"\x0a" + varint(1 << 60), "it ends within a field"),
    "wire type": (b"\x0b", "wire type 3"),
    "number for bytes": (field(1, 5), "a number stands where bytes belong"),
    "number for a score": (field(1, field(2, 5)), "a number stands where bytes belong"),
    "bytes for a kind": (field(1, field(3, b"abcd")), "bytes stand where a number belongs"),
    "bytes for a token": (
        sentencepiece([("a", 0.0, NORMAL)], 2) + field(2, field(41, b"abcd")),
        "bytes stand where a number",
    ),
    "bytes for a flag": (
        sentencepiece([("a", 0.0, NORMAL)], 2) + field(3, field(3, b"")),
        "bytes stand where a number",
    ),
    "not UTF-8": (field(1, field(1, b"\xff")), "codec can't decode"),
    "word model": (sentencepiece([("a", 0.0, NORMAL)], 3), "its model type is 3"),
    "kind of piece": (sentencepiece([("a", 0.0, 9)], 2), "a piece has an unknown type"),
    "endless pieces": (b"\x0a\x00" * ((1 << 20) + 1), "more than 1048576 pieces"),
    "no number": (field(1, field(2, b"abcd")), "bos_token_id is 1, but the vocabulary has 1"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_sentencepiece_files_that_are_broken(tmp_path: Path, name: str) -> None:
    data, reason = BROKEN[name]
    (tmp_path / "tokenizer.model").write_bytes(data)
    with pytest.raises(EngineError, match=reason) as caught:
        open_checkpoint(hf_folder(tmp_path)).tokenizer()
    assert str(caught.value).endswith(".") and "\n" not in str(caught.value)


UNBOUNDED = {
    "tokens": ([""] * ((1 << 20) + 1), "the vocabulary has 1048577 tokens, where 1048576 are the most"),
    "characters": (["a" * n for n in range(1, 1025)], r"of 16[78]\d{5} characters and more, where 2097152 of 16777216"),
    "merges": ([*("a" * n for n in range(1, 5)), *["aaaaa"] * 600_000], "come from 209715[3-6] merges of "),
}


@pytest.mark.parametrize("name", UNBOUNDED)
def test_vocabularies_without_bounds(name: str) -> None:
    """A small file must not take memory without end."""
    tokens, reason = UNBOUNDED[name]
    with pytest.raises(TokenizerError, match=reason) as caught:
        build_tokenizer({"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens})
    assert str(caught.value).endswith(".") and "\n" not in str(caught.value)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_sentencepiece_files_of_noise(tmp_path: Path, data: st.DataObject) -> None:
    """Whatever the bytes, a tokenizer or a sentence."""
    whole = bytearray(sentencepiece([("<unk>", 0.0, UNKNOWN), ("a", -1.0, NORMAL), ("b", -2.0, NORMAL)], 1))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    noise = data.draw(st.one_of(st.binary(max_size=60), st.just(bytes(whole))))
    (tmp_path / "tokenizer.model").write_bytes(noise)
    try:
        open_checkpoint(hf_folder(tmp_path)).tokenizer().encode("ab")
    except EngineError as error:
        assert str(error).endswith(".") and "\n" not in str(error)


def write_merges(folder: Path, **more: Any) -> Path:
    tokens, merges = subwords.byte_level()
    hf_folder(folder, vocab={text: token for token, text in enumerate(tokens)}, **more)
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    return folder


@pytest.mark.parametrize("name", ["GPT2Tokenizer", "Qwen2Tokenizer"])
def test_vocabulary_and_merges(tmp_path: Path, name: str) -> None:
    import transformers

    count = len(subwords.byte_level()[0])
    added = {str(count): {"content": "<|end|>", "special": True}, str(count + 1): {"content": "<b>"}}
    config = {"tokenizer_class": name, "added_tokens_decoder": added, "eos_token": "<|end|>", "add_prefix_space": False}
    ours = open_checkpoint(write_merges(tmp_path, tokenizer_config=config)).tokenizer()
    tokens, merges = subwords.byte_level()
    pairs = [tuple(merge.split(" ")) for merge in merges]
    ids = {text: token for token, text in enumerate(tokens)}
    theirs = getattr(transformers, name)(vocab=ids, merges=pairs)._tokenizer
    theirs.add_special_tokens([AddedToken("<|end|>")])
    for text in [*subwords.texts(200, seed=6), "a\u0301 e\u0308"]:
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False).ids
    assert ours.eos_ids == {ours.token_id("<|end|>")} and ours.vocab_size >= count + 2
    assert ours.encode("a<|end|>", parse_special=True)[-1] == count and count not in ours.encode("a<|end|>")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tokenizer_config": {"tokenizer_class": "OddTokenizer"}}, "how a OddTokenizer cuts text is not known"),
        ({"vocab": {"a": -1}}, "must map each token to its id"),
        ({"vocab": {"a": "1"}}, "must map each token to its id"),
        ({"merges": b"a b c"}, "line 1 of .* must be two tokens"),
        ({"merges": b"\xff"}, "not valid UTF-8"),
        ({"merges": b"a \xd0\x96"}, "failed"),
        (
            {"tokenizer_config": {"tokenizer_class": "GPT2Tokenizer", "added_tokens_decoder": [1]}},
            "must be ids with texts",
        ),
        (
            {
                "tokenizer_config": {
                    "tokenizer_class": "GPT2Tokenizer",
                    "added_tokens_decoder": {"90000": {"content": "<x>"}},
                }
            },
            "leaves a gap",
        ),
        ({"added_tokens": {"<x>": "one"}}, "must be ids with texts"),
    ],
)
def test_vocabularies_that_are_wrong(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    folder = write_merges(tmp_path, tokenizer_config={"tokenizer_class": "GPT2Tokenizer"})
    for name, value in change.items():
        if isinstance(value, bytes):
            (folder / f"{name}.txt").write_bytes(value)
        else:
            (folder / f"{name}.json").write_text(json.dumps(value))
    with pytest.raises((TokenizerError, FormatError), match=reason) as caught:
        open_checkpoint(folder).tokenizer()
    assert str(caught.value).endswith(".")
