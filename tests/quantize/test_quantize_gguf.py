"""engine quantize to GGUF: what is kept, what is chosen, what is refused; streaming in little memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import tiny_models

from engine.errors import EngineError, FormatError, UsageError
from engine.formats import open_checkpoint
from engine.quantize.mix import TYPES, VALUES, Model, choose, fitting, layers_with, quant_type, quantizable
from engine.quantize.to_gguf import quantize_to_gguf


def write_gguf(path: Path, tensors: dict[str, np.ndarray], split: int = 0) -> Path:
    """A llama of no use but with every type of key."""
    writer = gguf.GGUFWriter(path, "llama", split_max_tensors=split)
    writer.add_block_count(2)
    writer.add_head_count(4)
    writer.add_head_count_kv(4)
    writer.add_file_type(0)
    writer.add_custom_alignment(64)
    for kind in ("INT8", "UINT8", "INT16", "UINT16", "INT32", "UINT32", "INT64", "UINT64"):
        writer.add_key_value(f"any.{kind}", 7, gguf.GGUFValueType[kind])
    writer.add_key_value("any.f64", 0.1, gguf.GGUFValueType.FLOAT64)
    writer.add_key_value("any.f32", 0.1, gguf.GGUFValueType.FLOAT32)
    writer.add_key_value("any.bool", True, gguf.GGUFValueType.BOOL)
    writer.add_key_value("any.text", "naïve", gguf.GGUFValueType.STRING)
    writer.add_array("any.texts", ["a", "", "東京"])
    writer.add_key_value("any.bytes", [1, 2], gguf.GGUFValueType.ARRAY, sub_type=gguf.GGUFValueType.UINT8)
    writer.add_key_value("any.nested", [[1, 2], [3]], gguf.GGUFValueType.ARRAY)
    for name, array in tensors.items():
        writer.add_tensor(name, array)
    tiny_models.finish(writer)
    return path


def tensors_of(rng, rows=64, cols=256):
    return {
        "token_embd.weight": rng.standard_normal((rows, cols), np.float32),
        "output_norm.weight": rng.standard_normal(cols, np.float32),
        "blk.0.attn_v.weight": rng.standard_normal((rows, cols), np.float32).astype(np.float16),
        "blk.0.ffn_gate_inp.weight": rng.standard_normal((4, cols), np.float32),
        "blk.1.ffn_down_exps.weight": rng.standard_normal((3, rows, cols), np.float32),
    }


def quantized(source: Path, out: Path, kind: str, **others):
    result = quantize_to_gguf(open_checkpoint(source), out, quant_type(kind), **others)
    return open_checkpoint(out), result


@pytest.mark.parametrize("split", [0, 2])
def test_keys_and_small_tensors_stay_as_they_were(tmp_path, split):
    made = tensors_of(np.random.default_rng())
    write_gguf(tmp_path / "in.gguf", made, split)
    source = tmp_path / ("in-00001-of-00003.gguf" if split else "in.gguf")
    before = open_checkpoint(source)
    after, _ = quantized(source, tmp_path / "out.gguf", "Q8_0")
    for key in before.metadata:
        if not key.startswith("split.") and key != "general.file_type":
            assert after.metadata.encoded(key) == before.metadata.encoded(key)
    assert after.metadata["general.file_type"] == 7 and after.metadata["general.quantization_version"] == 2
    assert not [key for key in after.metadata if key.startswith("split.")]
    assert list(after.tensors) == list(before.tensors)
    for name in ("output_norm.weight", "blk.0.ffn_gate_inp.weight"):
        np.testing.assert_array_equal(after.tensors[name].dense(), made[name])
    for name in ("token_embd.weight", "blk.0.attn_v.weight", "blk.1.ffn_down_exps.weight"):
        assert after.tensors[name].format.name == "Q8_0"
        np.testing.assert_allclose(after.tensors[name].dense(), made[name], atol=0.03)
    reader = gguf.GGUFReader(tmp_path / "out.gguf")  # the library's own reading
    assert reader.alignment == 64 and len(reader.tensors) == len(made)


@pytest.mark.parametrize("kind", TYPES)
def test_every_type_can_be_read_and_is_near(tmp_path, kind):
    made = tensors_of(np.random.default_rng())
    after, result = quantized(write_gguf(tmp_path / "in.gguf", made), tmp_path / "out.gguf", kind)
    assert after.metadata["general.file_type"] == TYPES[kind].file_type and result.notices == ()
    worst = {"Q2": 0.12, "Q3": 0.03, "F1": 1e-6, "F3": 0, "BF": 1e-5}.get(kind[:2], 0.02)
    for name, array in made.items():
        error = np.mean((after.tensors[name].dense() - array) ** 2) / np.mean(array.astype(np.float32) ** 2)
        assert error <= worst, name
    assert result.after == sum(tensor.data.nbytes for tensor in after.tensors.values())


def test_rows_that_are_no_superblocks_are_said_to_be_otherwise(tmp_path):
    rng = np.random.default_rng()
    made = {
        "token_embd.weight": rng.standard_normal((8, 96), np.float32),
        "blk.0.attn_q.weight": rng.standard_normal((8, 96), np.float32),
        "blk.1.attn_q.weight": rng.standard_normal((8, 20), np.float32),
    }
    after, result = quantized(write_gguf(tmp_path / "in.gguf", made), tmp_path / "out.gguf", "Q4_K_M")
    assert [t.format.name for t in after.tensors.values()] == ["Q8_0", "Q5_0", "F16"]
    said = " ".join(result.notices)
    assert "96, no whole number of Q4_K blocks, became Q5_0" in said and "20, no whole number" in said
    assert "1 tensor with rows of 20" in said


def test_what_is_already_so_is_copied_and_a_second_loss_is_said(tmp_path):
    made = tensors_of(np.random.default_rng())
    first, _ = quantized(write_gguf(tmp_path / "in.gguf", made), tmp_path / "q8.gguf", "Q8_0")
    same, result = quantized(first.path, tmp_path / "again.gguf", "Q8_0")
    assert result.notices == ()
    for name, tensor in first.tensors.items():
        np.testing.assert_array_equal(same.tensors[name].data, tensor.data)
    _, result = quantized(first.path, tmp_path / "q4.gguf", "Q4_0")
    assert any("had been quantized before" in notice for notice in result.notices)


def test_scales_beside_nvfp4_are_in_the_new_numbers(tmp_path):
    """Of matrices that are quantized anew, and of a router, which is kept as it was."""
    rng = np.random.default_rng()
    names = ("blk.0.attn_v", "blk.0.ffn_gate_inp")
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_block_count(1)
    for name in names:
        blocks = rng.integers(0, 100, (8, 128 // 64 * 36), np.uint8)
        writer.add_tensor(f"{name}.weight", blocks, raw_dtype=gguf.GGMLQuantizationType.NVFP4)
        writer.add_tensor(f"{name}.scale", np.array([1e-3], np.float32))
    tiny_models.finish(writer)
    found, _ = quantized(tmp_path / "a.gguf", tmp_path / "b.gguf", "Q8_0")
    source = open_checkpoint(tmp_path / "a.gguf").tensors
    assert sorted(found.tensors) == sorted(source)
    for name, tensor in found.tensors.items():
        want = source[name].dense()
        np.testing.assert_allclose(tensor.dense(), want, rtol=0, atol=np.abs(want).max() / 200)
    assert found.tensors["blk.0.ffn_gate_inp.weight"].format.name == "F32"


def test_nothing_is_overwritten_or_left_behind(tmp_path, monkeypatch):
    made = tensors_of(np.random.default_rng())
    source, out = write_gguf(tmp_path / "in.gguf", made), tmp_path / "out.gguf"
    out.write_bytes(b"mine")
    with pytest.raises(UsageError, match="--force"):
        quantized(source, out, "Q8_0")
    assert out.read_bytes() == b"mine"
    with pytest.raises(UsageError, match="is the input"):
        quantized(source, source, "Q8_0", force=True)
    quantized(source, out, "Q8_0", force=True)
    with pytest.raises(UsageError, match="no folder"):
        quantized(source, tmp_path / "none" / "out.gguf", "Q8_0")
    made["token_embd.weight"][3, 5] = np.nan
    broken = write_gguf(tmp_path / "nan.gguf", made)
    kept = out.read_bytes()
    with pytest.raises(FormatError, match=r"token_embd\.weight holds a NaN"):
        quantized(broken, out, "Q8_0", force=True)
    assert out.read_bytes() == kept
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.gguf", "nan.gguf", "out.gguf"]
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(UsageError, match="MB left"):
        quantized(source, tmp_path / "full.gguf", "Q8_0")


def test_beyond_f16_is_refused(tmp_path):
    made = {"blk.0.attn_q.weight": np.full((2, 32), 1e5, np.float32)}
    source = write_gguf(tmp_path / "in.gguf", made)
    with pytest.raises(EngineError, match="BF16"):
        quantized(source, tmp_path / "out.gguf", "F16")
    quantized(source, tmp_path / "out.gguf", "BF16")


def test_unknown_types_list_those_there_are():
    with pytest.raises(UsageError, match=r"Q4_K_M.*NF4"):
        quant_type("Q9")
    assert quant_type("q4_k") is TYPES["Q4_K_M"]


# what llama-quantize chose for these tensors of a model of 16 layers (its log)
@pytest.mark.parametrize(
    ("kind", "name", "want"),
    [
        ("Q4_K_M", "output.weight", "Q6_K"),
        ("Q4_K_M", "token_embd.weight", "Q4_K"),
        ("Q4_K_M", "blk.0.attn_v.weight", "Q6_K"),
        ("Q4_K_M", "blk.2.attn_v.weight", "Q4_K"),
        ("Q4_K_M", "blk.4.ffn_down.weight", "Q6_K"),
        ("Q4_K_M", "blk.15.ffn_down.weight", "Q6_K"),
        ("Q4_K_M", "blk.15.ffn_up.weight", "Q4_K"),
        ("Q4_K_S", "blk.3.attn_v.weight", "Q5_K"),
        ("Q3_K_M", "blk.1.attn_v.weight", "Q5_K"),
        ("Q3_K_M", "blk.9.attn_output.weight", "Q4_K"),
        ("Q3_K_L", "blk.9.ffn_down.weight", "Q5_K"),
        ("Q2_K", "blk.9.ffn_down.weight", "Q3_K"),
        ("Q2_K", "blk.9.attn_v.weight", "Q4_K"),
        ("Q5_K_M", "blk.8.ffn_down.weight", "Q5_K"),
        ("Q8_0", "output.weight", "Q8_0"),
        ("Q4_0", "output.weight", "Q6_K"),
        ("Q4_0", "blk.0.ffn_down.weight", "Q4_0"),
        ("MXFP4", "blk.0.ffn_down.weight", "Q8_0"),
    ],
)
def test_mixes(kind, name, want):
    model = Model("llama", 16, shared=4)
    assert choose(quant_type(kind), name, (4096, 4096), model) == want


def test_more_bits_go_to_the_ends_and_to_every_third_layer_between():
    found = [choose(quant_type("Q4_K_M"), f"blk.{i}.ffn_down.weight", (9, 256), Model("llama", 32)) for i in range(32)]
    more = {*range(4), *range(6, 28, 3), *range(28, 32)}
    assert found == ["Q6_K" if i in more else "Q4_K" for i in range(32)]
    model = Model("falcon", 32)
    found = [choose(quant_type("Q4_K_M"), f"blk.{i}.ffn_down.weight", (9, 256), model) for i in range(32)]
    assert found == ["Q6_K" if i < 2 else "Q5_K" if i in more else "Q4_K" for i in range(32)]


def test_layers_that_have_a_matrix_are_counted_where_not_all_have_it():
    """As llama-quantize counts: value projections always, second projections unless there are experts."""
    own = tuple(range(1, 24, 2))
    assert layers_with([f"blk.{i}.attn_v.{kind}" for i in own for kind in ("weight", "bias")], VALUES) == own
    for name, field in (("attn_v", "values"), ("ffn_down", "downs")):
        forms = {
            experts: [
                choose(
                    quant_type("Q4_K_M"), f"blk.{i}.{name}.weight", (9, 256), Model("x", 24, 1, experts, **{field: own})
                )
                for i in own
            ]
            for experts in (0, 4)
        }
        count = len(own) if name == "attn_v" else 24
        whole = [choose(quant_type("Q4_K_M"), f"blk.{i}.{name}.weight", (9, 256), Model("x", count)) for i in range(24)]
        assert forms[0] == whole[: len(own)]
        assert (forms[4] == forms[0]) == (name == "attn_v")


def test_tied_tables_are_outputs_and_few_are_kept():
    assert choose(quant_type("Q4_K_M"), "token_embd.weight", (9, 256), Model("llama", 2, tied=True)) == "Q6_K"
    assert choose(quant_type("MXFP4"), "blk.0.ffn_up_exps.weight", (8, 64, 256), Model("llama", 2)) == "MXFP4"
    assert fitting("Q6_K", 64) == "Q8_0" and fitting("Q4_K", 20) == "F16" and fitting("Q3_K", 512) == "Q3_K"
    for name in ("blk.0.attn_norm.weight", "blk.0.ffn_gate_inp.weight", "position_embd.weight", "blk.0.attn_q.bias"):
        assert not quantizable(name, (4, 256))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_stays_bounded(tmp_path):
    """A model of 400 MB passes through a process that may hold far less."""
    rng = np.random.default_rng()
    block = rng.standard_normal((1024, 1024), np.float32)
    made = {f"blk.{i}.attn_q.weight": np.tile(block, (48, 1)) for i in range(2)}
    source = write_gguf(tmp_path / "in.gguf", made)
    assert source.stat().st_size > 400e6
    code = (
        "import sys\nfrom pathlib import Path\nfrom engine.formats import open_checkpoint\n"
        "from engine.quantize.mix import quant_type\nfrom engine.quantize.to_gguf import quantize_to_gguf\n"
        "quantize_to_gguf(open_checkpoint(sys.argv[1]), Path(sys.argv[2]), quant_type('Q8_0'))\n"
        "print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])"  # getrusage counts the parent's, too
    )
    command = [sys.executable, "-c", code, source, tmp_path / "out.gguf"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=dict(os.environ))
    assert int(done.stdout) < 180 << 10, "KiB"


def test_progress_reaches_the_end(tmp_path):
    source = write_gguf(tmp_path / "in.gguf", tensors_of(np.random.default_rng()))
    seen = []
    quantized(source, tmp_path / "out.gguf", "Q4_K_M", progress=lambda *step: seen.append(step))
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    assert seen[-1][1] == seen[-1][2]


def test_the_model_still_speaks(tmp_path, stories, cpu):
    from engine import LLM, SamplingParams

    out = tmp_path / "q8.gguf"
    quantize_to_gguf(open_checkpoint(stories / "hf"), out, quant_type("Q8_0"))
    with LLM(out, backend=cpu, threads=2) as llm:
        told = llm.generate("Once upon a time", SamplingParams(temperature=0.0, max_tokens=20))[0].outputs[0].text
    assert told.startswith(", there was a little girl named Lily.")
