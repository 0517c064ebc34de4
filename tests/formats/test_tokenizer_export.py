"""Tokenizers of Hugging Face folders as GGUF keys: the keys cut text as the folder does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from engine.errors import TokenizerError
from engine.formats import open_checkpoint
from engine.formats.pretokenizers import PRE_TOKENIZERS
from engine.formats.tokenizer import Tokenizer
from engine.formats.tokenizer_gguf import build_tokenizer
from engine.quantize.export_tokenizer import tokenizer_keys

from . import subwords
from .subwords import NORMAL
from .test_tokenizer_kinds import bpe_pieces, hf_folder, sentencepiece

NAMES = (
    "gpt-2",
    "llama-bpe",
    "qwen2",
    "starcoder",
    "falcon",
    "tekken",
    "gpt-4o",
    "deepseek-v3",
    "deepseek-llm",
    "bloom",
)


def byte_level_folder(folder: Path, pre: str, **settings: Any) -> Path:
    """A folder whose tokenizer.json splits by the expressions of a name that it does not tell."""
    tokens, merges = subwords.byte_level()
    entry = PRE_TOKENIZERS[pre]
    ids = {token: n for n, token in enumerate(tokens)}
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    pipeline = tokenizers.Tokenizer(models.BPE(ids, pairs, ignore_merges=entry.whole_words))
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in entry.patterns]
    pipeline.pre_tokenizer = pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(False, use_regex=False)])
    pipeline.decoder = decoders.ByteLevel()
    pipeline.add_special_tokens(["<|begin|>", "<|end|>"])
    pipeline.add_tokens([AddedToken("<tool>", normalized=False)])
    hf_folder(folder, tokenizer_config={"bos_token": "<|begin|>", "eos_token": "<|end|>", **settings})
    (folder / "tokenizer.json").write_text(pipeline.to_str())
    return folder


def assert_alike(ours: Tokenizer, theirs: Tokenizer) -> None:
    for text in [*subwords.texts(150, seed=7), "<|end|> and <tool>x", " <|begin|>"]:
        for special in (False, True):
            assert ours.encode(text, special, special) == theirs.encode(text, special, special)
        assert ours.decode(theirs.encode(text)) == theirs.decode(theirs.encode(text))
    assert (ours.bos_id, ours.eos_ids, ours.control_ids, ours.add_bos) == (
        theirs.bos_id,
        theirs.eos_ids,
        theirs.control_ids,
        theirs.add_bos,
    )


@pytest.mark.parametrize("pre", NAMES)
def test_the_way_of_splitting_is_found(tmp_path: Path, pre: str) -> None:
    checkpoint = open_checkpoint(byte_level_folder(tmp_path, pre, add_bos_token=pre == "qwen2"))
    theirs = checkpoint.tokenizer()
    keys = tokenizer_keys(checkpoint, theirs.vocab_size + 5)
    assert PRE_TOKENIZERS[keys["tokenizer.ggml.pre"]].patterns == PRE_TOKENIZERS[pre].patterns
    assert keys["tokenizer.ggml.tokens"][-1] == f"[PAD{theirs.vocab_size + 4}]"
    assert keys["tokenizer.ggml.token_type"][-5:].tolist() == [subwords.UNUSED] * 5
    assert_alike(build_tokenizer(keys), theirs)


def test_a_sentencepiece_file_keeps_its_scores(shared: Path, tmp_path: Path) -> None:
    source = open_checkpoint(shared / "vocab" / "llama-spm.gguf")
    pieces = bpe_pieces(source.metadata)
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece(pieces, 2))
    checkpoint = open_checkpoint(hf_folder(tmp_path))
    keys = tokenizer_keys(checkpoint, len(pieces) + 1)
    assert keys["tokenizer.ggml.scores"][:-1].tolist() == [score for _, score, _ in pieces]
    ours = build_tokenizer(keys)
    texts = (shared / "vocab" / "llama-spm.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    for text, line in zip(texts, (shared / "vocab" / "llama-spm.out").read_text().split("\n"), strict=True):
        assert ours.encode(text) == [int(number) for number in line.split()]


def test_a_unigram_goes_over(tmp_path: Path) -> None:
    marks = [("<unk>", 0.0, subwords.UNKNOWN), ("<s>", 0.0, subwords.CONTROL), ("</s>", 0.0, subwords.CONTROL)]
    pieces = [*marks, *((text, score, NORMAL) for text, score in subwords.unigram())]
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece(pieces, 1))
    checkpoint = open_checkpoint(hf_folder(tmp_path))
    assert_alike(build_tokenizer(tokenizer_keys(checkpoint, len(pieces))), checkpoint.tokenizer())


def test_chat_templates_come_along(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "a {{ messages }}"}, {"name": "tool_use", "template": "b"}]
    checkpoint = open_checkpoint(byte_level_folder(tmp_path, "qwen2", chat_template=named))
    keys = tokenizer_keys(checkpoint, checkpoint.tokenizer().vocab_size)
    assert keys["tokenizer.chat_template"] == "a {{ messages }}" and keys["tokenizer.chat_template.tool_use"] == "b"


def test_refuses_what_has_no_form(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(byte_level_folder(tmp_path, "gpt-2"))
    with pytest.raises(TokenizerError, match="a row for each"):
        tokenizer_keys(checkpoint, 100)
    described = json.loads((tmp_path / "tokenizer.json").read_text())
    described["normalizer"] = {"type": "Lowercase"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    with pytest.raises(TokenizerError, match="cuts text in a way"):
        tokenizer_keys(open_checkpoint(tmp_path), 10_000)
