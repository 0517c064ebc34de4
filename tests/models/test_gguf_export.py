"""Hugging Face folders written as GGUF: the tensors and keys that the published converter's names and the tests' own writers
give, and a sentence where a GGUF would mean another model."""

from __future__ import annotations

import json
from pathlib import Path

import checkpoints
import numpy as np
import pytest
import test_more_families as more
import tiny_models
from family_ggufs import apart, converted, published_keys, rope_factors
from safetensors.numpy import load_file
from session_logits import load_for_logits, logits
from test_more_families import saved  # noqa: F401 - a fixture

from engine.errors import EngineError, ModelError
from engine.formats import open_checkpoint
from engine.quantize.mix import quant_type
from engine.quantize.to_gguf import quantize_to_gguf

# what a file has instead of rope.scaling.attn_factor, which means the same in all families
YARN_SCALES = ("rope.scaling.yarn_attn_factor", "rope.scaling.yarn_log_multiplier")
REFUSED = {
    "qwen2 window above a layer": "windows",
    "qwen3_moe dense layer, not renormalized": "renormalize",
    "gpt2 relu": "act",
    "opt": "opt cannot be written",
    "youtu": "deepseek cannot be written",
    "cwm": "windows",
}


def written(folder: Path, path: Path):
    quantize_to_gguf(open_checkpoint(folder), path, quant_type("F32"))
    return open_checkpoint(path)


@pytest.mark.parametrize("family", [family for family in more.WITH_GGUF if family not in REFUSED])
def test_tensors_and_keys_are_the_published_ones(family, saved, tmp_path):  # noqa: F811
    arch, config = more.FAMILIES[family][1], more.model_of(family).config
    found = written(saved(family), tmp_path / "model.gguf")
    want = converted(arch, config, apart(arch, load_file(saved(family) / "model.safetensors"))) | rope_factors(config)
    assert set(found.tensors) == set(want)
    for name, array in want.items():
        np.testing.assert_array_equal(found.tensors[name].dense(), array, err_msg=name)
    assert found.architecture == arch
    for key, value in (published_keys(arch, config) | more.GGUF_KEYS.get(family, {})).items():
        if value is not None and key not in ("attention.sliding_window", "attention.scale", *YARN_SCALES):
            have = found.metadata.get(f"{arch}.{key}")
            if isinstance(value, list):
                np.testing.assert_array_equal(have, value, err_msg=key)
            else:
                assert have == value or have == pytest.approx(value, rel=1e-6), key
    windowed = any(type_ == "sliding_attention" for type_ in getattr(config, "layer_types", None) or ())
    if windowed:
        assert found.metadata[f"{arch}.attention.sliding_window"] == config.sliding_window


_PARTS = {"gate_proj": 0, "w1": 0, "up_proj": 1, "w3": 1, "down_proj": 2, "w2": 2}


def in_one(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A folder's tensors with all experts of a layer in two, as transformers has them in memory."""
    found, experts = {}, {}
    for name, array in tensors.items():
        stem, _, rest = name.rpartition(".experts.")
        if stem:
            number, part, _ = rest.split(".")
            experts.setdefault(f"{stem}.experts.", [{}, {}, {}])[_PARTS[part]][int(number)] = array
        else:
            found[name] = array
    for stem, parts in experts.items():
        gate, up, down = (np.stack([part[e] for e in range(len(part))]) for part in parts)
        found |= {f"{stem}gate_up_proj": np.concatenate([gate, up], axis=1), f"{stem}down_proj": down}
    return found


@pytest.mark.parametrize("family", ["lfm2_moe", "hunyuan_moe", "glm4_moe", "exaone_moe", "qwen2_moe", "ernie4_5_moe"])
def test_experts_that_lie_in_one_tensor_are_taken_apart(family, saved, tmp_path):  # noqa: F811
    folder = tmp_path / "folder"
    folder.mkdir()
    more.rewrite(saved(family), folder, rename=in_one)
    assert any(name.endswith("experts.gate_up_proj") for name in load_file(folder / "model.safetensors"))
    want = written(saved(family), tmp_path / "want.gguf").tensors
    found = written(folder, tmp_path / "model.gguf").tensors
    assert set(found) == set(want)
    for name, tensor in want.items():
        np.testing.assert_array_equal(found[name].dense(), tensor.dense(), err_msg=name)


@pytest.mark.parametrize(("family", "factor"), {"olmo3 yarn": 1.3, "ministral3": 1.0}.items())
def test_a_scale_of_yarns_own(family, factor, saved, tmp_path):  # noqa: F811
    """As a factor of the usual one, which llama.cpp reads of every family."""
    found = written(saved(family), tmp_path / "model.gguf")
    rope = f"{found.architecture}.rope.scaling."
    usual = 0.1 * np.log(found.metadata[rope + "factor"]) + 1
    assert found.metadata[rope + "attn_factor"] * usual == pytest.approx(factor, rel=1e-6)
    assert rope + "yarn_attn_factor" not in found.metadata


@pytest.mark.parametrize("family", checkpoints.FAMILIES)
def test_llamas_and_qwens_are_as_the_tests_write_them(family, tmp_path):
    folder = checkpoints.save(family, tmp_path)
    if "linear" in family:
        want = open_checkpoint(
            tiny_models.to_gguf(
                folder, tmp_path / "want.gguf", **{"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
            )
        )
    else:
        want = open_checkpoint(tiny_models.to_gguf(folder, tmp_path / "want.gguf"))
    found = written(folder, tmp_path / "model.gguf")
    assert set(found.tensors) == set(want.tensors)
    for name, tensor in want.tensors.items():
        np.testing.assert_allclose(found.tensors[name].dense(), tensor.dense(), rtol=3e-7, err_msg=name)
    for key in set(want.metadata) - {"tokenizer.ggml.pre"}:
        value, have = want.metadata[key], found.metadata[key]
        if isinstance(value, float):
            assert have == pytest.approx(value, rel=1e-6), key
        else:
            np.testing.assert_array_equal(have, value, err_msg=key)


def test_factors_of_falcon_h1_are_in_its_weights(saved, tmp_path, cpu):  # noqa: F811
    """Those of biases and of a head that is tied, too. A gate behind the norm has no form there."""
    found = written(saved("falcon_h1 tied, biases"), tmp_path / "model.gguf")
    more.assert_is(found.path, "falcon_h1 tied, biases")
    assert "blk.0.ffn_norm" in found.tensors and "output.weight" in found.tensors
    with pytest.raises(ModelError, match="sets mamba in a way that GGUF files of falcon-h1 have no key for"):
        written(saved("falcon_h1 norms before gates"), tmp_path / "other.gguf")


@pytest.mark.parametrize("family", ["llama biases", "llama 3 rope, tied", "qwen3", "mixtral"])
def test_the_gguf_is_the_same_model(family, tmp_path, cpu):
    found = written(checkpoints.save(family, tmp_path), tmp_path / "model.gguf")
    ids = np.random.default_rng().integers(3, tiny_models.VOCAB, 50).tolist()
    got = logits(load_for_logits(found.path, cpu), ids, (50,))
    checkpoints.assert_logits(got, checkpoints.model_of(family), ids)


@pytest.mark.parametrize(("family", "said"), REFUSED.items())
def test_what_gguf_cannot_say_is_refused(family, said, saved, tmp_path):  # noqa: F811
    with pytest.raises(EngineError, match=said):
        written(saved(family), tmp_path / "model.gguf")
    assert list(tmp_path.iterdir()) == []


def test_the_tokenizer_cuts_and_decodes_alike(tmp_path, llama):
    ours, theirs = written(llama, tmp_path / "model.gguf").tokenizer(), open_checkpoint(llama).tokenizer()
    for text in ("<s> naïve  café\t東京 🙂 </s>", "", "x" * 100):
        for special in (False, True):
            assert ours.encode(text, special, special) == theirs.encode(text, special, special)
    assert (ours.bos_id, ours.eos_ids, ours.control_ids) == (theirs.bos_id, theirs.eos_ids, theirs.control_ids)


def test_a_tokenizer_of_no_known_kind_is_refused(tmp_path):
    tiny_models.write_llama(tmp_path, np.random.default_rng())
    path = tmp_path / "tokenizer.json"
    described = json.loads(path.read_text())
    described["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Split", "pattern": {"String": "e"}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        ],
    }
    path.write_text(json.dumps(described))
    with pytest.raises(EngineError, match="cuts text in a way"):
        written(tmp_path, tmp_path / "model.gguf")


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_a_scaling_that_is_added(family, tmp_path):
    """A rope_scaling beside rope_parameters is the one that holds."""
    folder = checkpoints.save_model((checkpoints if family == "qwen3" else more).model_of(family), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    (folder / "config.json").write_text(json.dumps(config | {"rope_scaling": scaling}))
    found = written(folder, tmp_path / "model.gguf").metadata
    assert found[f"{family}.rope.scaling.type"] == "yarn" and found[f"{family}.rope.scaling.factor"] == 4.0
