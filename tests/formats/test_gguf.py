"""GGUF files: what gguf's own writer writes is read back; what is wrong gets a sentence, and never anything else."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tiny_models
from handmade import gguf_bytes, gguf_string
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.errors import EngineError, FormatError
from engine.formats import FORMATS, Checkpoint, open_checkpoint

Write = Callable[..., Path]
ARCH = ("general.architecture", "str", "llama")


def test_every_format_comes_back(tmp_path: Path) -> None:
    random = np.random.default_rng()
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    written = {}
    for form in FORMATS.values():
        if form.ggml_type is None or form.name == "NVFP4":  # whose scale lies beside it (test_nvfp4_gguf.py)
            continue
        raw = random.integers(0, 256, (3, 5, form.row_bytes(2 * form.block)), np.uint8)
        written[form.name] = raw
        kind = gguf.GGMLQuantizationType(form.ggml_type)
        # gguf's writer wants plain numbers as such, and blocks as bytes
        plain = {"F32": "f4", "F16": "f2", "F64": "f8", "I8": "i1", "I16": "i2", "I32": "i4", "I64": "i8"}.get(
            form.name
        )
        writer.add_tensor(form.name, raw.view(plain) if plain else raw, raw_dtype=None if plain else kind)
    tiny_models.finish(writer)
    tensors = open_checkpoint(tmp_path / "m.gguf").tensors
    assert list(tensors) == list(written)
    for name, raw in written.items():
        form = FORMATS[name]
        tensor = tensors[name]
        assert tensor.format is form
        assert tensor.shape == (3, 5, 2 * form.block)
        assert tensor.rows().shape == (15, form.row_bytes(2 * form.block))
        np.testing.assert_array_equal(tensor.rows(), raw.reshape(15, -1))
        np.testing.assert_array_equal(tensor.dense(), form.decode(raw).reshape(tensor.shape))


def test_metadata_of_every_type(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen2")
    values: dict[str, Any] = {
        "uint8": 200, "int8": -100, "uint16": 60000, "int16": -30000, "uint32": 1 << 31, "int32": -(1 << 31),
        "uint64": 1 << 63, "int64": -(1 << 63), "float32": 0.5, "float64": 0.1, "bool": True, "string": "žluť 🦙",
    }  # fmt: skip
    for kind, value in values.items():
        getattr(writer, f"add_{kind}")(f"k.{kind}", value)
    arrays: dict[str, list[Any]] = {
        "a.int": [1, -2, 3],
        "a.float": [0.5, 1.5],
        "a.str": ["", "é", "x" * 1000],
        "a.bool": [True, False],
    }
    for key, array in arrays.items():
        writer.add_array(key, array)
    tiny_models.finish(writer)
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    assert (checkpoint.kind, checkpoint.architecture, len(checkpoint.tensors)) == ("gguf", "qwen2", 0)
    for kind, value in values.items():
        found = checkpoint.metadata[f"k.{kind}"]
        assert found == value
        assert type(found) is type(value)
    for key, array in arrays.items():
        assert list(checkpoint.metadata[key]) == array
    assert isinstance(checkpoint.metadata["a.int"], np.ndarray)
    assert isinstance(checkpoint.metadata["a.str"], list)
    assert set(checkpoint.metadata) >= arrays.keys()
    assert "absent" not in checkpoint.metadata
    with pytest.raises(KeyError):
        checkpoint.metadata["absent"]


def test_nested_arrays_and_version_2(write_gguf: Write) -> None:
    path = write_gguf([ARCH, ("n", "[[u16]]", [[1, 2], [], [3]])], version=2)
    assert [list(inner) for inner in open_checkpoint(path).metadata["n"]] == [[1, 2], [], [3]]


def test_nothing_is_copied_and_nothing_can_be_written(write_gguf: Write) -> None:
    data = np.arange(8, dtype=np.float32)
    path = write_gguf([ARCH], [{"dims": [8], "data": data.tobytes()}])
    tensor = open_checkpoint(path).tensors["t0"]
    assert not tensor.data.flags.owndata
    assert np.shares_memory(tensor.rows(), tensor.data)
    with pytest.raises(ValueError, match="read-only"):
        tensor.data[0] = 1
    np.testing.assert_array_equal(tensor.dense(), data)
    with path.open("r+b") as file:  # the mapping sees the file
        file.seek(-32, 2)
        file.write(struct.pack("<f", 7.0))
    assert tensor.dense()[0] == 7.0


def test_alignment(write_gguf: Write) -> None:
    keys = [ARCH, ("general.alignment", "u32", 8)]
    tensors = [{"dims": [3], "data": np.array([1, 2, 3], np.float32).tobytes()}, {"dims": [1, 2], "data": bytes(8)}]
    found = open_checkpoint(write_gguf(keys, tensors, alignment=8)).tensors
    assert found["t0"].dense().tolist() == [1, 2, 3]
    assert found["t1"].shape == (2, 1)


def _split(tmp_path: Path) -> tuple[list[Path], dict[str, np.ndarray[Any, Any]]]:
    random = np.random.default_rng()
    arrays = {f"t{i}": random.standard_normal((4, 8), np.float32) for i in range(5)}
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama", split_max_tensors=2)
    writer.add_block_count(7)
    for name, array in arrays.items():
        writer.add_tensor(name, array)
    tiny_models.finish(writer)
    return sorted(tmp_path.glob("m-*.gguf")), arrays


def test_split_files_open_from_any_part(tmp_path: Path) -> None:
    parts, arrays = _split(tmp_path)
    assert len(parts) == 3
    for part in parts:
        checkpoint = open_checkpoint(part)
        assert checkpoint.metadata["llama.block_count"] == 7
        assert checkpoint.tensors.keys() == arrays.keys()
        for name, array in arrays.items():
            np.testing.assert_array_equal(checkpoint.tensors[name].dense(), array)


def test_split_faults(tmp_path: Path) -> None:
    parts, _ = _split(tmp_path)
    second = parts[1].read_bytes()
    parts[1].unlink()
    with pytest.raises(FormatError, match=r"m-00002-of-00003\.gguf is missing"):
        open_checkpoint(parts[0])
    parts[1].write_bytes(parts[2].read_bytes())
    with pytest.raises(FormatError, match="not part 2 of 3"):
        open_checkpoint(parts[0])
    parts[1].write_bytes(second.replace(gguf_string("t2"), gguf_string("t0")))
    with pytest.raises(FormatError, match="holds the tensor 't0' that an earlier part holds"):
        open_checkpoint(parts[0])
    count = gguf_string("split.count") + struct.pack("<IH", 2, 3)
    assert count in second
    parts[1].write_bytes(second.replace(count, count[:-2] + struct.pack("<H", 4)))
    with pytest.raises(FormatError, match="not part 2 of 3"):
        open_checkpoint(parts[0])
    parts[1].write_bytes(second)
    first = parts[0].read_bytes()
    promised = gguf_string("split.tensors.count") + struct.pack("<Ii", 5, 5)
    assert promised in first
    parts[0].write_bytes(first.replace(promised, promised[:-4] + struct.pack("<i", 6)))
    with pytest.raises(FormatError, match="hold 5 tensors where 6 are promised"):
        open_checkpoint(parts[0])
    renamed = parts[0].rename(tmp_path / "first.gguf")
    with pytest.raises(FormatError, match="one of 3 parts of a split GGUF"):
        open_checkpoint(renamed)


F4: dict[str, Any] = {"dims": [4], "data": bytes(16)}
STRINGS = struct.pack("<II", 9, 8)  # the types of an array of strings
HOSTILE: dict[str, tuple[bytes, str]] = {
    "header cut": (gguf_bytes()[:20], "fewer than a header"),
    "version 1": (gguf_bytes(version=1), "version is 1"),
    "big-endian": (gguf_bytes(version=3 << 24), "big-endian"),
    "too many keys": (gguf_bytes(key_count=1 << 60), "claims 1152921504606846976 keys"),
    "too many tensors": (gguf_bytes(tensor_count=1 << 63), "claims 9223372036854775808 tensors"),
    "more keys than there are": (gguf_bytes(key_count=2), "inside its header"),
    "more tensors than there are": (gguf_bytes(tensor_count=1, tail=0), "inside its header"),
    "key longer than the file": (
        gguf_bytes([("k", "raw", b"")])[:24] + struct.pack("<Q", 1 << 62) + bytes(16), "claims 4611686018427387904",
    ),
    "key too long": (gguf_bytes([ARCH, ("k" * 65536, "u8", 1)]), "65536 bytes, where 1 to 65535"),
    "key empty": (gguf_bytes([("", "u8", 1), ARCH]), "0 bytes, where 1 to 65535"),
    "key no UTF-8": (gguf_bytes([(b"\xff\xfe", "u8", 1), ARCH]), "not valid UTF-8"),
    "key twice": (gguf_bytes([ARCH, ARCH]), "'general.architecture' is there twice"),
    "type unknown": (gguf_bytes([ARCH, ("k", "raw", struct.pack("<II", 13, 0))]), "unknown type 13"),
    "string past the end": (gguf_bytes([ARCH, ("k", "raw", struct.pack("<IQ", 8, 1 << 40))]), "past the end"),
    "number past the end": (gguf_bytes([ARCH, ("k", "raw", struct.pack("<II", 12, 0))]), "past the end"),
    "array of unknown": (gguf_bytes([ARCH, ("k", "raw", struct.pack("<IIQ", 9, 99, 1))]), "unknown element type 99"),
    "array too long": (gguf_bytes([ARCH, ("k", "raw", struct.pack("<IIQ", 9, 4, 1 << 61))]), "claims 2305"),
    "strings too many": (gguf_bytes([ARCH, ("k", "raw", STRINGS + struct.pack("<QQ", 2, 0))]), "more than the file"),
    "string of array past the end": (
        gguf_bytes([ARCH, ("k", "raw", STRINGS + struct.pack("<QQQ", 2, (1 << 64) - 9, 0))]), "past the end",
    ),
    "nested too deep": (
        gguf_bytes([ARCH, ("k", "[[[[[u8]]]]]", [[[[[1]]]]])]), "nested more than 4 deep",
    ),
    "nested without end": (
        gguf_bytes([ARCH, ("k", "raw", struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000)]), "more than 4 deep",
    ),
    "architecture no string": (gguf_bytes([("general.architecture", "u32", 1)]), "must hold a string"),
    "architecture absent": (gguf_bytes([]), "does not name its architecture"),
    "architecture no UTF-8": (gguf_bytes([("general.architecture", "str", b"\xc3(")]), "not valid UTF-8"),
    "alignment 0": (gguf_bytes([ARCH, ("general.alignment", "u32", 0)], [F4]), "alignment is 0"),
    "alignment 24": (gguf_bytes([ARCH, ("general.alignment", "u32", 24)], [F4]), "alignment is 24"),
    "alignment huge": (gguf_bytes([ARCH, ("general.alignment", "u64", 1 << 40)], [F4]), "not a power of two up to"),
    "alignment no number": (gguf_bytes([ARCH, ("general.alignment", "str", "32")], [F4]), "must hold a whole number"),
    "no dimension": (gguf_bytes([ARCH], [{"dims": [], "data": bytes(16)}]), "0 dimensions"),
    "five dimensions": (gguf_bytes([ARCH], [{"dims": [1] * 5, "data": bytes(16)}]), "5 dimensions"),
    "dimension 0": (gguf_bytes([ARCH], [{"dims": [4, 0], "data": bytes(16)}]), "a dimension of 0"),
    "dimension huge": (gguf_bytes([ARCH], [{"dims": [1 << 62, 1 << 62], "data": bytes(16)}]), "may be cut short"),
    "product wraps": (gguf_bytes([ARCH], [{"dims": [1 << 32, 1 << 32], "data": bytes(16)}]), "may be cut short"),
    "format unknown": (gguf_bytes([ARCH], [F4 | {"type": 4}]), "has the type 4"),
    "block divided": (gguf_bytes([ARCH], [{"dims": [48], "type": 8, "data": bytes(64)}]), "Q8_0 blocks of 32"),
    "offset past the end": (gguf_bytes([ARCH], [F4 | {"offset": 1 << 20}]), "may be cut short"),
    "offset wraps": (gguf_bytes([ARCH], [F4 | {"offset": (1 << 64) - 32}]), "may be cut short"),
    "offset unaligned": (gguf_bytes([ARCH], [F4 | {"offset": 4}], tail=64), "not a multiple of the alignment"),
    "data cut": (gguf_bytes([ARCH], [F4])[:-17], "may be cut short"),
    "tensor twice": (gguf_bytes([ARCH], [F4 | {"name": "a"}, F4 | {"name": "a"}]), "'a' is there twice"),
    "tensors overlap": (gguf_bytes([ARCH], [{"dims": [16], "data": bytes(64)}, F4 | {"offset": 32}]), "overlaps"),
    "a gap": (gguf_bytes([ARCH], [F4, F4 | {"offset": 64}], tail=64), "32 bytes before tensor 't1' belong to no"),
    "tensors on each other": (gguf_bytes([ARCH], [F4, F4 | {"offset": 0}]), "overlaps"),
    "tensor's name too long": (gguf_bytes([ARCH], [F4 | {"name": "n" * 300}]), "300 bytes, where 1 to 256"),
    "tensor's name no UTF-8": (gguf_bytes([ARCH], [F4 | {"name": b"\xff"}]), "not valid UTF-8"),
    "split count no number": (gguf_bytes([ARCH, ("split.count", "f32", 2.0)]), "must hold a whole number"),
    "eos no id": (gguf_bytes([ARCH, ("tokenizer.ggml.eos_token_id", "str", "2")]), "must be a token id"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_get_a_sentence(name: str, write_gguf: Write) -> None:
    data, reason = HOSTILE[name]
    with pytest.raises(FormatError, match=reason) as caught:
        open_checkpoint(write_gguf(data=data))
    assert str(caught.value).endswith(".")
    assert "\n" not in str(caught.value)


def test_string_array_without_utf8_is_told_when_read(write_gguf: Write) -> None:
    checkpoint = open_checkpoint(write_gguf([ARCH, ("k", "[str]", ["a", b"\xff"])]))
    with pytest.raises(FormatError, match="string 1 of the array is not valid UTF-8"):
        checkpoint.metadata["k"]


def test_paths_that_are_no_model(tmp_path: Path) -> None:
    for path, reason in [
        (tmp_path / "absent", "neither a file nor a folder"),
        (tmp_path / ("x" * 5000), "File name too long"),
        (tmp_path, "no config.json"),
    ]:
        with pytest.raises(FormatError, match=reason):
            open_checkpoint(path)
    for content, reason in [(b"", "not a GGUF"), (b"PK\x03\x04" + bytes(40), "not a GGUF"), (b"GGUF", "fewer than")]:
        (tmp_path / "file").write_bytes(content)
        with pytest.raises(FormatError, match=reason):
            open_checkpoint(str(tmp_path / "file"))


def test_a_large_vocabulary_opens_fast(write_gguf: Write) -> None:
    texts = [f"token{i}" for i in range(150_000)]
    merges = [f"a{i} b{i}" for i in range(150_000)]
    strings = []
    for name, array in (("tokens", texts), ("merges", merges)):
        data = struct.pack("<Q", len(array)) + b"".join(map(gguf_string, array))
        strings.append((f"tokenizer.ggml.{name}", "raw", STRINGS + data))
    path = write_gguf([ARCH, *strings])
    best = min(_seconds(open_checkpoint, path) for _ in range(3))
    assert best < 0.3
    assert open_checkpoint(path).metadata["tokenizer.ggml.tokens"] == texts


def _seconds(call: Callable[..., object], *args: object) -> float:
    start = time.process_time()
    call(*args)
    return time.process_time() - start


def _small(model: str) -> bytes:
    characters = [chr(c) for c in range(33, 127)]
    spm = [f"<0x{byte:02X}>" for byte in range(256)] + ["\u2581", "\u2581a"]
    texts = ["<unk>", "<s>", "</s>", *(spm if model == "llama" else ["\u0120", "ab"]), *characters]
    types = [2, 3, 3] + [6 if text.startswith("<0x") else 1 for text in texts[3:]]
    keys = [
        ARCH,
        ("tokenizer.ggml.model", "str", model),
        ("tokenizer.ggml.pre", "str", "qwen2"),
        ("tokenizer.ggml.tokens", "[str]", texts),
        ("tokenizer.ggml.token_type", "[i32]", types),
        ("tokenizer.ggml.scores", "[f32]", [-float(i) for i in range(len(texts))]),
        ("tokenizer.ggml.merges", "[str]", ["a b"]),
        ("tokenizer.ggml.bos_token_id", "u32", 1),
        ("tokenizer.ggml.eos_token_id", "u32", 2),
        ("tokenizer.ggml.add_bos_token", "bool", True),
        ("tokenizer.chat_template", "str", "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"),
    ]
    tensors: list[dict[str, Any]] = [{"dims": [32, 2], "type": 8, "data": bytes(68)}, {"dims": [3], "data": bytes(12)}]
    return gguf_bytes(keys, tensors)


SMALL = {model: _small(model) for model in ("gpt2", "llama")}


def _use_everything(checkpoint: Checkpoint) -> None:
    for key in checkpoint.metadata:
        checkpoint.metadata[key]
    for tensor in checkpoint.tensors.values():
        tensor.dense()
    template = checkpoint.chat_template()
    if template is not None:
        template.render([{"role": "user", "content": "ab"}])
    tokenizer = checkpoint.tokenizer()
    ids = tokenizer.encode("ab </s> é", add_special=True, parse_special=True)
    tokenizer.decode([*ids, 5, 10**6], skip_special=False)


@pytest.mark.parametrize("model", SMALL)
def test_the_small_file_is_valid(model: str, write_gguf: Write) -> None:
    checkpoint = open_checkpoint(write_gguf(data=SMALL[model]))
    tokenizer = checkpoint.tokenizer()
    assert tokenizer.decode(tokenizer.encode("ab a")) == "ab a"
    checkpoint.chat_template().render([{"role": "user", "content": "ab"}])  # type: ignore[union-attr]


MUTATION = st.tuples(st.integers(0, 1 << 16), st.binary(min_size=1, max_size=9), st.sampled_from(["over", "in", "cut"]))


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(model=st.sampled_from(list(SMALL)), mutations=st.lists(MUTATION, min_size=1, max_size=4))
def test_mutated_files_raise_nothing_but_sentences(
    model: str, mutations: list[tuple[int, bytes, str]], tmp_path: Path
) -> None:
    data = bytearray(SMALL[model])
    for place, patch, how in mutations:
        at = place % (len(data) + 1)
        if how == "cut":
            del data[at : at + len(patch)]
        else:
            data[at : at + (len(patch) if how == "over" else 0)] = patch
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    try:
        _use_everything(open_checkpoint(path))
    except EngineError as error:
        assert str(error).endswith(".")
