"""Hugging Face folders: single files and shards; what is wrong gets a sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from handmade import safetensors_bytes, safetensors_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from engine.errors import EngineError, FormatError, TokenizerError
from engine.formats import open_checkpoint

Write = Callable[[dict[str, Any]], Path]
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def _arrays() -> dict[str, np.ndarray[Any, Any]]:
    random = np.random.default_rng()
    return {
        "a": random.standard_normal((3, 4, 5)).astype(np.float32),
        "b": random.standard_normal((2, 8)).astype(np.float16),
        "c": random.integers(0, 0x7F00, (6,), np.uint16),  # as bf16
        "position_ids": np.arange(4),
        "scalar": np.array(2.5, np.float32),
        "none": np.zeros((0, 3), np.float32),
    }


def test_single_file(write_folder: Write) -> None:
    arrays = _arrays()
    checkpoint = open_checkpoint(write_folder({SINGLE: safetensors_of(arrays), "config.json": {"model_type": "qwen2"}}))
    assert (checkpoint.kind, checkpoint.architecture) == ("hf", "qwen2")
    assert checkpoint.tensors.keys() == arrays.keys()
    for name, array in arrays.items():
        tensor = checkpoint.tensors[name]
        assert tensor.shape == array.shape
        assert not tensor.data.flags.writeable
        values = (array.astype(np.uint32) << 16).view(np.float32) if name == "c" else array.astype(np.float32)
        np.testing.assert_array_equal(tensor.dense(), values)
    assert {name: tensor.format.name for name, tensor in checkpoint.tensors.items()} == {
        "a": "F32", "b": "F16", "c": "BF16", "position_ids": "I64", "scalar": "F32", "none": "F32",
    }  # fmt: skip


def test_what_the_safetensors_package_writes(write_folder: Write) -> None:
    array = np.random.default_rng().standard_normal((7, 3)).astype(np.float32)
    checkpoint = open_checkpoint(write_folder({SINGLE: save({"w": array, "v": array[:2]}, {"format": "pt"})}))
    np.testing.assert_array_equal(checkpoint.tensors["w"].dense(), array)
    np.testing.assert_array_equal(checkpoint.tensors["v"].rows().view("<f4"), array[:2])


def test_shards(write_folder: Write) -> None:
    arrays = _arrays()
    first = {name: arrays[name] for name in ("a", "b")}
    second = {name: arrays[name] for name in arrays if name not in first}
    weight_map = dict.fromkeys(first, "one.safetensors") | dict.fromkeys(second, "two.safetensors")
    files = {
        INDEX: {"metadata": {"total_size": 1}, "weight_map": weight_map},
        "one.safetensors": safetensors_of(first),
        "two.safetensors": safetensors_of(second),
    }
    tensors = open_checkpoint(write_folder(files)).tensors
    assert tensors.keys() == arrays.keys()
    np.testing.assert_array_equal(tensors["a"].dense(), arrays["a"])
    np.testing.assert_array_equal(tensors["b"].dense(), arrays["b"].astype(np.float32))


def test_an_index_of_shards_that_are_gone(write_folder: Write) -> None:
    """As transformers leaves it: where a save of one file follows one of several, these are deleted and their index is not."""
    files = {INDEX: {"weight_map": {"z": "one.safetensors"}}, SINGLE: safetensors_of(_arrays())}
    assert open_checkpoint(write_folder(files)).tensors.keys() == _arrays().keys()


def test_an_index_of_more_than_the_one_file(write_folder: Write) -> None:
    files = {
        INDEX: {"weight_map": {"a": SINGLE, "z": "one.safetensors"}},
        SINGLE: safetensors_of(_arrays()),
    }
    folder = write_folder(files)
    with pytest.raises(FormatError, match=r"one\.safetensors is missing"):
        open_checkpoint(folder)
    (folder / "one.safetensors").write_bytes(safetensors_of({"z": np.zeros(3, np.float32)}))
    assert open_checkpoint(folder).tensors.keys() == {*_arrays(), "z"}


@pytest.mark.parametrize("file", [SINGLE, "config.json", "model.gguf"])
def test_what_git_leaves_without_lfs_is_told(write_folder: Write, file: str) -> None:
    folder = write_folder({SINGLE: safetensors_of(_arrays()), "config.json": {"model_type": "qwen2"}})
    (folder / file).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0a\nsize 9\n")
    with pytest.raises(FormatError, match=rf"{file} is a pointer of Git LFS in place of the file; git lfs pull gets"):
        open_checkpoint(folder / file if file.endswith(".gguf") else folder)


def test_ends_of_generation(write_folder: Write) -> None:
    files = {
        SINGLE: safetensors_of({}),
        "config.json": {"model_type": "llama", "eos_token_id": 2},
        "generation_config.json": {"eos_token_id": [7, 9]},
    }
    assert open_checkpoint(write_folder(files)).eos_ids == {2, 7, 9}


def _entry(dtype: Any = "F32", shape: Any = (4,), offsets: Any = (0, 16)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


BODY = bytes(16)
TENSOR = safetensors_of({"a": np.zeros(4, np.float32)})
HOSTILE_FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "seven bytes": (bytes(7), "fewer than a header's length"),
    "header past the end": (safetensors_bytes({}, length=1 << 62), "claims 4611686018427387904 bytes"),
    "header too long": (safetensors_bytes({}, length=200_000_000), "claims 200000000 bytes"),
    "header no JSON": (safetensors_bytes(b"{"), "not valid JSON"),
    "header no object": (safetensors_bytes([1]), "must be a JSON object"),
    "header no UTF-8": (safetensors_bytes(b'{"\xff":1}'), "not valid UTF-8"),
    "header nested": (safetensors_bytes(b'{"a":' * 100_000), "nested too deep"),
    "name twice": (safetensors_bytes(b'{"a":1,"a":2}'), "'a' is there twice"),
    "entry no object": (safetensors_bytes({"a": 1}), "not an object"),
    "dtype absent": (safetensors_bytes({"a": {}}), "has the dtype None"),
    "dtype unknown": (safetensors_bytes({"a": _entry("F7")}, BODY), "has the dtype 'F7'"),
    "dtype of GGUF": (safetensors_bytes({"a": _entry("Q8_0")}, BODY), "has the dtype 'Q8_0'"),
    "dtype a list": (safetensors_bytes({"a": _entry(["F32"])}, BODY), "has the dtype"),
    "shape negative": (safetensors_bytes({"a": _entry(shape=[-2, -2])}, BODY), "no shape"),
    "shape fractional": (safetensors_bytes({"a": _entry(shape=[4.0])}, BODY), "no shape"),
    "shape true": (safetensors_bytes({"a": _entry(shape=[True, 4])}, BODY), "no shape"),
    "shape too deep": (safetensors_bytes({"a": _entry(shape=[1] * 17 + [4])}, BODY), "at most 16"),
    "shape wraps": (safetensors_bytes({"a": _entry(shape=[1 << 62, 16])}, BODY), "is not F32 of the shape"),
    "size wrong": (safetensors_bytes({"a": _entry(shape=[3])}, BODY), "is not F32 of the shape"),
    "offsets reversed": (safetensors_bytes({"a": _entry(offsets=[16, 0])}, BODY), "is not F32 of the shape"),
    "offsets absent": (safetensors_bytes({"a": _entry(offsets=None)}, BODY), "no two data_offsets"),
    "one offset": (safetensors_bytes({"a": _entry(offsets=[16])}, BODY), "no two data_offsets"),
    "a gap": (safetensors_bytes({"a": _entry(offsets=[4, 20])}, bytes(20)), "begins at 4 where 0 is next"),
    "overlap": (
        safetensors_bytes({"a": _entry(), "b": _entry(offsets=[8, 24])}, bytes(24)), "begins at 8 where 16 is next"
    ),
    "cut short": (TENSOR[:-1], "cut short"),
    "bytes left": (TENSOR + b"\0", "1 bytes at its end belong to no tensor"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE_FILES)
def test_hostile_safetensors_get_a_sentence(name: str, write_folder: Write) -> None:
    data, reason = HOSTILE_FILES[name]
    with pytest.raises(FormatError, match=reason) as caught:
        open_checkpoint(write_folder({SINGLE: data}))
    assert str(caught.value).endswith(".")


HOSTILE_FOLDERS: dict[str, tuple[dict[str, Any], str]] = {
    "config no JSON": ({"config.json": b"{'a': 1}"}, "not valid JSON"),
    "config no object": ({"config.json": [1]}, "must be a JSON object"),
    "config nested": ({"config.json": b"[" * 100_000}, "nested too deep"),
    "config too large": ({"config.json": b" " * (65 << 20)}, "larger than 64 MiB"),
    "architecture absent": ({"config.json": {}}, "must name the architecture"),
    "architecture no string": ({"config.json": {"model_type": 5}}, "must name the architecture"),
    "no weights": ({}, "neither model.safetensors nor"),
    "pickles": ({"pytorch_model.bin": b"\x80\x04"}, "PyTorch pickles only"),
    "eos no id": ({SINGLE: TENSOR, "generation_config.json": {"eos_token_id": ["x"]}}, "must be a token id"),
    "eos negative": (
        {SINGLE: TENSOR, "config.json": {"model_type": "llama", "eos_token_id": -1}},
        "must be a token id",
    ),
    "index without map": ({INDEX: {}}, "must map tensors to files"),
    "index lists files": ({INDEX: {"weight_map": ["one.safetensors"]}}, "must map tensors to files"),
    "index leads out": ({INDEX: {"weight_map": {"a": "../one.safetensors"}}}, "not a plain name"),
    "index is absolute": ({INDEX: {"weight_map": {"a": "/etc/one.safetensors"}}}, "not a plain name"),
    "index with backslash": ({INDEX: {"weight_map": {"a": "..\\one.safetensors"}}}, "not a plain name"),
    "index names no safetensors": ({INDEX: {"weight_map": {"a": "config.json"}}}, "not a plain name"),
    "index names a number": ({INDEX: {"weight_map": {"a": 1}}}, "not a plain name"),
    "index with NUL": ({INDEX: {"weight_map": {"a": "a\0.safetensors"}}}, "not a plain name"),
    "shard missing": ({INDEX: {"weight_map": {"a": "one.safetensors"}}}, "one.safetensors is missing"),
    "tensor missing": (
        {INDEX: {"weight_map": {"a": "1.safetensors", "b": "1.safetensors"}}, "1.safetensors": TENSOR},
        "lacks the tensor 'b'",
    ),
    "tensor in two shards": (
        {
            INDEX: {"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}},
            "1.safetensors": TENSOR,
            "2.safetensors": TENSOR,
        },
        "holds the tensor 'a' that an earlier file holds too",
    ),
}


@pytest.mark.parametrize("name", HOSTILE_FOLDERS)
def test_hostile_folders_get_a_sentence(name: str, write_folder: Write) -> None:
    files, reason = HOSTILE_FOLDERS[name]
    with pytest.raises(FormatError, match=reason) as caught:
        open_checkpoint(write_folder(files))
    assert str(caught.value).endswith(".")


TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]},
}


CTC = {"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True}


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({}, "holds no tokenizer: neither"),
        ({"tokenizer.json": b"{"}, "reading .* failed"),
        ({"tokenizer.json": {"model": None}}, "reading .* failed"),
        ({"tokenizer.json": b"\xff"}, "reading .* failed"),
        ({"tokenizer.json": TOKENIZER | {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}}}, "failed"),
        (
            {"tokenizer.json": TOKENIZER | {"decoder": CTC}},
            "CTC",
        ),
    ],
)
def test_tokenizers_that_cannot_be_built(files: dict[str, Any], reason: str, write_folder: Write) -> None:
    checkpoint = open_checkpoint(write_folder({SINGLE: TENSOR} | files))
    with pytest.raises(TokenizerError, match=reason):
        checkpoint.tokenizer()


@pytest.mark.parametrize(
    ("settings_", "reason"),
    [
        ({"chat_template": 5}, "a string or a list"),
        ({"chat_template": [{"name": "default"}]}, "a string or a list"),
        ({"chat_template": [{"name": "rag", "template": "x"}]}, "a template named default"),
        ({"chat_template": "x", "bos_token": 5}, "bos_token of tokenizer_config.json must be a string"),
        ([], "must be a JSON object"),
    ],
)
def test_settings_that_are_wrong(settings_: Any, reason: str, write_folder: Write) -> None:
    checkpoint = open_checkpoint(write_folder({SINGLE: TENSOR, "tokenizer_config.json": settings_}))
    with pytest.raises(FormatError, match=reason):
        checkpoint.chat_template()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(file=st.sampled_from([SINGLE, "tokenizer.json", "tokenizer_config.json"]), data=st.data())
def test_mutated_folders_raise_nothing_but_sentences(file: str, data: st.DataObject, tmp_path: Path) -> None:
    contents = {
        "config.json": b'{"model_type": "llama"}',
        SINGLE: TENSOR,
        "tokenizer.json": json.dumps(TOKENIZER).encode(),
        "tokenizer_config.json": b'{"chat_template": "{{ messages }}", "bos_token": "a", "add_bos_token": true}',
    }
    content = bytearray(contents[file])
    at = data.draw(st.integers(0, len(content)))
    content[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    for name, text in (contents | {file: bytes(content)}).items():
        (tmp_path / name).write_bytes(text)
    try:
        checkpoint = open_checkpoint(tmp_path)
        for tensor in checkpoint.tensors.values():
            tensor.dense()
        template = checkpoint.chat_template()
        if template is not None:
            template.render([])
        tokenizer = checkpoint.tokenizer()
        tokenizer.decode(tokenizer.encode("ab", add_special=True))
    except EngineError as error:
        assert str(error).endswith(".")
