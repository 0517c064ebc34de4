"""NF4 and INT8 folders: the published layouts, decoded here by their definition."""

from __future__ import annotations

import json
from pathlib import Path

import checkpoints
import numpy as np
import pytest
import test_more_families as more
import tiny_models
from safetensors.numpy import load_file, save_file
from session_logits import load_for_logits, logits

from engine.errors import EngineError, UsageError
from engine.formats import open_checkpoint
from engine.formats.chat_template import ChatTemplate
from engine.formats.hfblocks import NF4_TABLE as LEVELS
from engine.quantize.mix import quant_type
from engine.quantize.nf4 import dynamic_map
from engine.quantize.to_folder import quantize_to_folder
from engine.quantize.to_gguf import quantize_to_gguf

WIDE = {"intermediate_size": 128}


def source_of(tmp_path: Path) -> tuple[Path, dict[str, np.ndarray]]:
    folder = tmp_path / "source"
    folder.mkdir()
    tensors = tiny_models.llama_tensors(np.random.default_rng(), tiny_models.CONFIG | WIDE)
    tiny_models.write_llama(folder, np.random.default_rng(), tensors, **WIDE)
    return folder, tensors


def quantized(folder: Path, out: Path, kind, **others):
    quantize_to_folder(open_checkpoint(folder), out, kind, **others)
    found = {k: v for file in sorted(out.glob("*.safetensors")) for k, v in load_file(file).items()}
    return found, json.loads((out / "config.json").read_text())


def linears(tensors):
    return [name for name in tensors if "_proj." in name]


def nf4_of(found, name):
    """The weight by bitsandbytes' own description of it."""
    state = json.loads(found[f"{name}.quant_state.bitsandbytes__nf4"].tobytes())
    assert (state["quant_type"], state["blocksize"], state["dtype"]) == ("nf4", 64, "float32")
    absmax = found[f"{name}.absmax"]
    if absmax.dtype == np.uint8:
        assert state["nested_blocksize"] == 256
        outer = np.repeat(found[f"{name}.nested_absmax"], 256)[: absmax.size]
        absmax = found[f"{name}.nested_quant_map"][absmax] * outer + np.float32(state["nested_offset"])
    packed = found[name].reshape(-1)
    index = np.stack([packed >> 4, packed & 15], axis=1).reshape(-1)
    values = found[f"{name}.quant_map"][index] * np.repeat(absmax, 64)[: index.size]
    return values[: np.prod(state["shape"])].reshape(state["shape"])


@pytest.mark.parametrize(("kind", "inputs"), [("NF4", 96), ("NF4", 72), ("INT8", 72)])
def test_layers_of_an_odd_width_keep_their_form_and_the_folder_loads(tmp_path, kind, inputs):
    from engine import LLM, SamplingParams

    folder = tmp_path / "source"
    folder.mkdir()
    wide = {"intermediate_size": inputs}
    tensors = tiny_models.llama_tensors(np.random.default_rng(), tiny_models.CONFIG | wide)
    tiny_models.write_llama(folder, np.random.default_rng(), tensors, **wide)
    result = quantize_to_folder(open_checkpoint(folder), tmp_path / "out", kind)
    assert len(result.notices) == 1 and "down_proj.weight" in result.notices[0]
    found = load_file(tmp_path / "out" / "model.safetensors")
    for name in linears(tensors):
        assert (found[name].dtype == tensors[name].dtype) == ("down_proj" in name)
    with LLM(tmp_path / "out", backend="reference") as llm:
        assert llm.generate("abc", SamplingParams(max_tokens=2))[0].outputs[0].token_ids


def test_a_model_of_odd_widths_alone_is_refused_before_a_file_is_written(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    odd = {"hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 3, "num_key_value_heads": 1}
    tensors = tiny_models.llama_tensors(np.random.default_rng(), tiny_models.CONFIG | odd)
    for name, tensor in tensors.items():  # made for four heads, and two of keys and values
        rows = {"q_proj": 48, "k_proj": 16, "v_proj": 16}.get(name.split(".")[-2], len(tensor))
        tensors[name] = tensor[:rows, :48] if "o_proj" in name else tensor[:rows]
    tiny_models.write_llama(folder, np.random.default_rng(), tensors, **odd)
    with pytest.raises(EngineError, match="multiple of 64 inputs"):
        quantize_to_folder(open_checkpoint(folder), tmp_path / "out", "NF4")
    assert not (tmp_path / "out").exists()


def test_templates_and_pooling_come_along(tmp_path):
    folder, _ = source_of(tmp_path)
    for name, text in (
        ("chat_template.jinja", "a"),
        ("additional_chat_templates/tool_use.jinja", "b"),
        ("modules.json", '[{"type": "a.Pooling", "path": "1_Pooling"}, {"type": "a.Dense", "path": "2_Dense"}]'),
        ("1_Pooling/config.json", '{"pooling_mode_mean_tokens": true}'),
        ("2_Dense/config.json", "{}"),
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    save_file({"linear.weight": np.ones((2, 64), np.float32)}, folder / "2_Dense" / "model.safetensors")
    quantized(folder, tmp_path / "out", "NF4")
    found = open_checkpoint(tmp_path / "out")
    assert found.embedding().pooling == "mean" and found.embedding().layers[0].weight.shape == (2, 64)
    assert found.chat_template() == ChatTemplate("a", {"bos_token": "<s>", "eos_token": "</s>"}, "b")


@pytest.mark.parametrize("nested", [False, True])
def test_nf4(tmp_path, nested):
    folder, tensors = source_of(tmp_path)
    found, config = quantized(folder, tmp_path / "out", "NF4", nested=nested)
    settings = config["quantization_config"]
    assert settings["quant_method"] == "bitsandbytes" and settings["load_in_4bit"] is True
    assert settings["bnb_4bit_quant_type"] == "nf4" and settings["bnb_4bit_use_double_quant"] is nested
    assert settings["llm_int8_skip_modules"] == ["lm_head"]
    assert {k: v for k, v in config.items() if k != "quantization_config"} == json.loads(
        (folder / "config.json").read_text()
    )
    middles = (LEVELS[1:] + LEVELS[:-1]) / 2
    for name, array in tensors.items():
        if name not in linears(tensors):
            np.testing.assert_array_equal(found[name], array)
            continue
        assert found[name].dtype == np.uint8 and found[name].shape == (array.size // 2, 1)
        decoded = nf4_of(found, name)
        blocks, wrong = array.reshape(-1, 64), np.abs(decoded - array).reshape(-1, 64)
        largest = np.abs(blocks).max(axis=1, keepdims=True)
        allowed = np.diff(LEVELS).max() / 2 + (0.08 if nested else 1e-6)
        assert (wrong <= allowed * largest).all()
        if not nested:
            want = LEVELS[np.searchsorted(middles, blocks / largest)] * largest
            np.testing.assert_allclose(decoded.reshape(-1, 64), want, rtol=1e-5)


def test_int8(tmp_path):
    folder, tensors = source_of(tmp_path)
    found, config = quantized(folder, tmp_path / "out", "INT8")
    settings = config["quantization_config"]
    group = settings["config_groups"]["group_0"]
    assert (settings["quant_method"], settings["format"], settings["ignore"]) == (
        "compressed-tensors",
        "int-quantized",
        ["lm_head"],
    )
    assert group["weights"]["strategy"] == "channel" and group["input_activations"]["dynamic"] is True
    for name, array in tensors.items():
        if name not in linears(tensors):
            np.testing.assert_array_equal(found[name], array)
            continue
        scale = found[f"{name}_scale"]
        assert found[name].dtype == np.int8 and found[name].shape == array.shape and scale.shape == (len(array), 1)
        assert (np.abs(found[name] * scale - array) <= 0.501 * scale).all()
        assert (np.abs(found[name]).max(axis=1) == 127).all()


@pytest.mark.parametrize("kind", ["NF4", "INT8"])
def test_routers_stay_and_experts_do_not(tmp_path, kind):
    folder = checkpoints.save("mixtral", tmp_path / "source")
    found, config = quantized(folder, tmp_path / "out", kind)
    settings = config["quantization_config"]
    skipped = settings.get("ignore") or settings["llm_int8_skip_modules"]
    assert any(name.endswith(".gate") for name in skipped) and "lm_head" in skipped
    experts = [name for name in found if ".experts." in name and name.endswith("weight")]
    assert len(experts) == 2 * 4 * 3
    for name in experts:  # NF4 leaves those of 96 inputs
        assert (found[name].dtype in (np.uint8, np.int8)) != (kind == "NF4" and ".w2." in name)


@pytest.mark.parametrize("kind", ["NF4", "INT8"])
@pytest.mark.parametrize("family", ["granitemoe", "gpt_oss"])
def test_experts_in_one_tensor_keep_their_form_and_the_folder_loads(tmp_path, family, kind):
    """Neither form has several matrices; the folder was none that could be read."""
    folder = checkpoints.save_model(more.model_of(family), tmp_path / "source")
    result = quantize_to_folder(open_checkpoint(folder), tmp_path / "out", kind)
    assert "experts in one tensor" in result.notices[-1]
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "out"))
    kept = {name for name, array in before.items() if array.ndim == 3}
    assert kept and all(after[name].tobytes() == before[name].tobytes() for name in kept)
    models = [load_for_logits(path, "reference") for path in (folder, tmp_path / "out")]
    errors = []  # of tokens: where experts are nearly tied, others may be taken, which changes a prompt's last ones much
    for _ in range(5):
        ids = more.random_ids(30)
        want, got = (logits(model, ids, (30,)) for model in models)
        errors += list(np.sqrt(np.mean((got - want) ** 2, axis=1) / np.mean(want**2, axis=1)))
    assert np.median(errors) < (0.7 if kind == "NF4" else 0.2)


@pytest.mark.parametrize(("kind", "nested"), [("NF4", False), ("NF4", True), ("INT8", False)])
def test_the_loader_reads_the_same_weights(tmp_path, kind, nested):
    folder, tensors = source_of(tmp_path)
    found, _ = quantized(folder, tmp_path / "out", kind, nested=nested)
    opened = open_checkpoint(tmp_path / "out").tensors
    assert set(opened) == set(tensors)
    for name in linears(tensors):
        want = nf4_of(found, name) if kind == "NF4" else found[name] * found[f"{name}_scale"]
        np.testing.assert_allclose(opened[name].dense(), want, rtol=1e-6)


def test_a_folder_becomes_a_gguf_and_says_that_it_was_quantized(tmp_path):
    folder, _ = source_of(tmp_path)
    quantized(folder, tmp_path / "out", "INT8")
    source = open_checkpoint(tmp_path / "out")
    result = quantize_to_gguf(source, tmp_path / "model.gguf", quant_type("Q8_0"))
    assert any("14 tensors had been quantized before" in notice for notice in result.notices)
    after = open_checkpoint(tmp_path / "model.gguf").tensors["blk.1.ffn_down.weight"]
    want = source.tensors["model.layers.1.mlp.down_proj.weight"].dense()
    np.testing.assert_allclose(after.dense(), want, atol=np.abs(want).max() / 200)


def test_shards_have_an_index(tmp_path):
    folder, _ = source_of(tmp_path)
    whole, _ = quantized(folder, tmp_path / "whole", "NF4", nested=True)
    parts, _ = quantized(folder, tmp_path / "parts", "NF4", nested=True, shard_bytes=60_000)
    files = sorted((tmp_path / "parts").glob("model-*-of-*.safetensors"))
    assert len(files) > 2 and all(file.stat().st_size < 100_000 for file in files)
    index = json.loads((tmp_path / "parts" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(whole) == set(parts)
    for file in files:
        assert {name for name, place in index["weight_map"].items() if place == file.name} == set(load_file(file))
    for name, array in whole.items():
        np.testing.assert_array_equal(parts[name], array)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["parts", "source", "whole"]
    assert (tmp_path / "parts" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


def test_the_dynamic_map_is_256_numbers_in_order():
    numbers = dynamic_map()
    assert numbers.shape == (256,) and (np.diff(numbers) > 0).all()
    assert numbers[[0, 127, 255]] == pytest.approx([-0.99296875, 0, 1])


def test_refuses_and_leaves_nothing(tmp_path):
    folder, _ = source_of(tmp_path)
    out = tmp_path / "out"
    quantized(folder, out, "INT8")
    with pytest.raises(UsageError, match="--force"):
        quantized(folder, out, "NF4")
    quantized(folder, out, "NF4", force=True)
    assert "bitsandbytes" in (out / "config.json").read_text()
    with pytest.raises(EngineError, match="unquantized"):
        quantize_to_folder(open_checkpoint(out), tmp_path / "twice", "INT8")
    with pytest.raises(EngineError, match="Hugging Face folder"):
        gguf_path = tiny_models.to_gguf(folder, tmp_path / "model.gguf")
        quantize_to_folder(open_checkpoint(gguf_path), tmp_path / "twice", "INT8")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter").write_text("dear")
    with pytest.raises(UsageError, match="not replaced"):
        quantized(folder, tmp_path / "mine", "NF4", force=True)
    with pytest.raises(UsageError, match="is the input"):
        quantized(folder, folder, "NF4", force=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "model.gguf", "out", "source"]
