"""What files of other_families.py say in other ways, and what is refused; their logits are held to transformers' in
test_more_families.py."""

from __future__ import annotations

import numpy as np
import pytest
from checkpoints import save_model
from family_ggufs import to_gguf
from safetensors.numpy import load_file, save_file
from test_more_families import GGUF_KEYS, assert_is, assert_refused, model_of, rewrite, saved  # noqa: F401 - a fixture

from engine.errors import ModelError
from engine.formats import open_checkpoint
from engine.models import load_model


def test_hunyuan_with_a_number_for_each_layer(saved, tmp_path):  # noqa: F811
    """As its makers write it, with each expert's matrices in tensors of their own."""

    def old(config):
        config |= {"moe_topk": [2, 2], "num_experts": 8, "num_shared_expert": [1, 1], "moe_intermediate_size": [96, 96]}

    def alone(tensors):
        found = {}
        for name, array in tensors.items():
            stem, _, part = name.rpartition(".experts.")
            if part not in ("gate_up_proj", "down_proj"):
                found[name] = array
                continue
            for expert, matrix in enumerate(array):
                own = {"gate": matrix[:96], "up": matrix[96:]} if part == "gate_up_proj" else {"down": matrix}
                found |= {f"{stem}.experts.{expert}.{kind}_proj.weight": np.array(rows) for kind, rows in own.items()}
        return found

    path = rewrite(saved("hunyuan_moe"), tmp_path, old, alone)
    assert any(".experts.7.up_proj.weight" in name for name in load_file(path / "model.safetensors"))
    assert_is(path, "hunyuan_moe")


def test_the_scaling_of_hunyuan_of_old(saved, tmp_path):  # noqa: F811
    """With keys of YaRN that mean nothing."""

    def old(config):
        del config["rope_parameters"]
        scaling = {"type": "dynamic", "alpha": 50.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0}
        config |= {"rope_theta": 10000.0, "rope_scaling": scaling | {"mscale_all_dim": 1.0}}

    assert_is(rewrite(saved("hunyuan alpha"), tmp_path, old), "hunyuan alpha")


def test_a_gguf_of_phi_with_q_k_and_v_in_one(saved, tmp_path):  # noqa: F811
    """As its first ones have them."""
    folder = save_model(model_of("phi"), tmp_path / "folder")
    tensors = load_file(folder / "model.safetensors")
    for layer in range(2):
        for kind in ("weight", "bias"):
            parts = [tensors.pop(f"model.layers.{layer}.self_attn.{part}_proj.{kind}") for part in "qkv"]
            tensors[f"blk.{layer}.attn_qkv.{kind}"] = np.concatenate(parts)
    save_file(tensors, folder / "model.safetensors")
    path = to_gguf(folder, tmp_path / "model.gguf", "phi2", model_of("phi").config, GGUF_KEYS.get("phi", {}))
    assert_is(path, "phi")


def test_mellums_layer_of_multi_token_prediction_is_left_out(saved, tmp_path):  # noqa: F811
    extra = {"mtp.layers.0.eh_proj.weight": np.ones((64, 128), np.float32)}
    path = rewrite(saved("mellum"), tmp_path, rename=lambda tensors: tensors | extra)
    assert_is(path, "mellum")
    assert load_model(open_checkpoint(path)).not_run == tuple(extra)


@pytest.mark.parametrize(
    ("family", "keys", "word"),
    [
        ("olmo", {"clip_qkv": 8.0}, "clip_qkv"),
        ("iquestcoder", {"clip_qkv": 8.0}, "clip_qkv"),
        ("hunyuan_moe", {"moe_topk": [2, 1]}, "moe_topk"),
        ("hunyuan_moe", {"num_experts": [8, 4]}, "num_experts"),
        ("hunyuan alpha", {"rope_parameters": {"rope_type": "dynamic", "alpha": -1.0}}, "alpha"),
        ("mellum", {"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters"),
        ("cwm", {"layer_types": ["full_attention"] * 2}, "layer_types"),
        ("stablelm", {"hidden_act": "gelu"}, "activation"),
        ("iquestcoder", {"use_sliding_window": True, "sliding_window": 24}, "sliding window"),
    ],
)
def test_configurations_that_are_refused(family, keys, word, saved, tmp_path):  # noqa: F811
    assert_refused(rewrite(saved(family), tmp_path, lambda config: config.update(keys)), word)


def test_norms_of_single_heads_are_refused(saved, tmp_path):  # noqa: F811
    """StableLM 2 12B has them, each in a tensor of its own."""
    name = "model.layers.0.self_attn.q_layernorm.norms.0.weight"
    path = rewrite(saved("stablelm"), tmp_path, rename=lambda tensors: tensors | {name: np.ones(16, np.float32)})
    with pytest.raises(ModelError, match="q_layernorm"):
        load_model(open_checkpoint(path)).program(16, "f16")
