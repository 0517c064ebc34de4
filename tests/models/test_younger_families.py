"""What files of the families of 2025 say in other ways, and what is refused; their logits are held to transformers' in
test_more_families.py."""

from __future__ import annotations

import numpy as np
import pytest
from checkpoints import save_model
from family_ggufs import to_gguf
from safetensors.numpy import load_file, save_file
from session_logits import load_for_logits, logits
from test_more_families import GGUF_KEYS, assert_is, assert_refused, model_of, random_ids, rewrite, saved  # noqa: F401 - a fixture

from engine.formats import open_checkpoint
from engine.models import load_model


def test_a_pattern_in_letters_beside_layer_types(saved, tmp_path):  # noqa: F811
    """EXAONE 4 32B has both."""
    assert_is(rewrite(saved("exaone4"), tmp_path, lambda c: c.update(sliding_window_pattern="LLLG")), "exaone4")


def test_olmo3_of_old(saved, tmp_path):  # noqa: F811
    """One scaling, which holds for the layers without a window alone, beside the base of all."""

    def old(config):
        scaling = config.pop("rope_parameters")["full_attention"]
        config |= {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling}

    assert_is(rewrite(saved("olmo3 yarn"), tmp_path, old), "olmo3 yarn")


def test_minimax_as_its_makers_write_it(saved, tmp_path):  # noqa: F811
    """The width of the rotary part, and the base of it, are keys of their own."""

    def old(config):
        del config["rope_parameters"]
        config |= {"rope_theta": 10000.0, "rotary_dim": 16}

    assert_is(rewrite(saved("minimax_m2"), tmp_path, old), "minimax_m2")


def test_glm_flash_as_its_makers_write_it(saved, tmp_path):  # noqa: F811
    """One number says which layers have experts."""

    def old(config):
        del config["mlp_layer_types"]
        config |= {"first_k_dense_replace": 1}

    assert_is(rewrite(saved("glm4_moe_lite"), tmp_path, old), "glm4_moe_lite")


def test_k_exaone_as_its_makers_write_it(saved, tmp_path):  # noqa: F811
    """One number says which layers have experts, and behind them are some for multi-token prediction."""

    def old(config):
        del config["mlp_layer_types"]
        config |= {"first_k_dense_replace": 1, "num_nextn_predict_layers": 1}

    extra = {"mtp.layers.0.eh_proj.weight": np.ones((64, 128), np.float32)}
    folder = rewrite(saved("exaone_moe"), tmp_path, old, lambda tensors: tensors | extra)
    assert_is(folder, "exaone_moe")
    assert load_model(open_checkpoint(folder)).not_run == tuple(extra)


def test_trinity_that_counts_its_layers(saved, tmp_path):  # noqa: F811
    """One number says which of them see everything."""
    name = "afmoe every second layer, not scaled"
    assert_is(rewrite(saved(name), tmp_path, lambda c: c.pop("layer_types")), name)


def test_exaone_under_llamas_names(saved, tmp_path):  # noqa: F811
    """As they are where transformers has renamed them."""
    names = {
        "transformer.wte.": "model.embed_tokens.",
        "transformer.h.": "model.layers.",
        "transformer.ln_f.": "model.norm.",
    }
    names |= {".ln_1.": ".input_layernorm.", ".ln_2.": ".post_attention_layernorm.", ".c_proj.": ".down_proj."}
    names |= {".attn.attention.out_proj.": ".self_attn.o_proj.", ".attn.attention.": ".self_attn."}
    names |= {".c_fc_0.": ".gate_proj.", ".c_fc_1.": ".up_proj."}

    def usual(name):
        for old, new in names.items():
            name = name.replace(old, new)
        return name

    rename = lambda tensors: {usual(name): tensor for name, tensor in tensors.items()}  # noqa: E731
    path = rewrite(saved("exaone"), tmp_path, lambda c: c.update(num_layers=c.pop("num_hidden_layers")), rename)
    assert any("model.layers.0.self_attn.o_proj" in name for name in load_file(path / "model.safetensors"))
    assert_is(path, "exaone")


def test_a_folder_of_glm_with_a_layer_of_multi_token_prediction(saved, tmp_path):  # noqa: F811
    extra = {"model.layers.3.eh_proj.weight": np.ones((64, 128), np.float32)}
    folder = rewrite(
        saved("glm4_moe"), tmp_path, lambda c: c.update(num_nextn_predict_layers=1), lambda tensors: tensors | extra
    )
    assert_is(folder, "glm4_moe")
    [notice] = load_for_logits(folder, "reference").notices
    assert "model.layers.3.eh_proj.weight" in notice
    assert not load_for_logits(saved("glm4_moe"), "reference").notices


def test_a_gguf_of_glm_with_a_layer_of_multi_token_prediction(saved, tmp_path):  # noqa: F811
    """Its file counts that layer among the others."""
    keys = GGUF_KEYS["glm4_moe"] | {"block_count": 4, "nextn_predict_layers": 1}
    path = to_gguf(saved("glm4_moe"), tmp_path / "model.gguf", "glm4moe", model_of("glm4_moe").config, keys)
    assert load_model(open_checkpoint(path)).config.layers == 3
    ids = random_ids(40)
    want = logits(load_for_logits(saved("glm4_moe"), "reference"), ids, (40,))
    np.testing.assert_allclose(logits(load_for_logits(path, "reference"), ids, (40,)), want, rtol=0, atol=1e-5)


def test_a_gguf_of_glm_with_q_k_and_v_in_one(saved, tmp_path):  # noqa: F811
    """As those of 2024 have them."""
    folder = tmp_path / "folder"
    save_model(model_of("glm"), folder)
    tensors = load_file(folder / "model.safetensors")
    for layer in range(2):
        for kind in ("weight", "bias"):
            parts = [tensors.pop(f"model.layers.{layer}.self_attn.{part}_proj.{kind}") for part in "qkv"]
            tensors[f"blk.{layer}.attn_qkv.{kind}"] = np.concatenate(parts)
    save_file(tensors, folder / "model.safetensors")
    path = to_gguf(folder, tmp_path / "model.gguf", "chatglm", model_of("glm").config, GGUF_KEYS["glm"])
    assert_is(path, "glm")


@pytest.mark.parametrize(
    ("family", "keys", "word"),
    [
        ("smollm3", {"no_rope_layers": [1, 1]}, "no_rope_layers"),
        ("smollm3", {"no_rope_layers": [1, 2, 1, 1, 0]}, "no_rope_layers"),
        ("smollm3", {"use_sliding_window": True, "sliding_window": 24}, "sliding window"),
        ("granite", {"residual_multiplier": 0}, "residual_multiplier"),
        ("granite 4", {"layer_types": ["mamba", "attention"]}, r"mamba\.in_proj"),
        ("granite 4", {"layer_types": ["mamba", "convolution"]}, "layer_types"),
        ("granite 4", {"num_local_experts": 4, "num_experts_per_tok": 2}, "ffn_gate_exps"),
        ("granite 4", {"num_local_experts": 0, "num_hidden_layers": 3}, "layer_types"),
        ("granite 4 states", {"mamba_n_groups": 3}, "3 groups"),
        ("granite 4 states", {"mamba_n_heads": 16}, "ssm_in"),
        ("granite 4 states", {"time_step_limit": [0.0, 0.1]}, "time_step_limit"),
        ("nemotron_h", {"layers_block_type": ["mlp", "convolution"]}, "layers_block_type"),
        ("nemotron_h", {"layers_block_type": [], "hybrid_override_pattern": "MX"}, "hybrid_override_pattern"),
        ("nemotron_h", {"mamba_head_dim": 24}, "ssm_in"),
        ("nemotron_h", {"mlp_hidden_act": "silu"}, "activation"),
        ("nemotron_h experts", {"n_routed_experts": 7}, "ffn_gate_inp"),
        ("granitemoe", {"num_local_experts": 3}, "ffn_gate_inp"),
        ("olmo3 yarn", {"rope_parameters": {"full_attention": {}}}, "sliding_attention"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv"),
        ("exaone4", {"sliding_window_pattern": "LLLG", "layer_types": None}, "sliding_window_pattern"),
        ("glm4_moe", {"num_experts_per_tok": 9}, "9 experts"),
        ("glm4_moe", {"n_group": 3}, "3 groups"),
        ("glm4_moe_lite", {"mlp_layer_types": ["sparse", "dense", "sparse"]}, "mlp_layer_types"),
        ("glm4_moe_lite", {"mlp_layer_types": "dense"}, "mlp_layer_types"),
        ("minimax_m2", {"rotary_dim": 64, "rope_parameters": None}, "rotary_dim"),
        ("glm4_moe", {"first_k_dense_replace": 0}, r"layers\.0\.mlp\.experts\.0\.gate_proj"),
        ("afmoe", {"sliding_window": None}, "sliding_window"),
        ("ernie4_5_moe", {"moe_layer_interval": 2}, "dense ones"),
        ("ernie4_5_moe", {"moe_layer_end_index": 1}, "dense ones"),
    ],
)
def test_configurations_that_are_refused(family, keys, word, saved, tmp_path):  # noqa: F811
    assert_refused(rewrite(saved(family), tmp_path, lambda config: config.update(keys)), word)


def test_nemotron_of_old(saved, tmp_path):  # noqa: F811
    """A letter for each layer, and the limits of steps as JSON has no number for."""

    def old(config):
        letters = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}
        kinds = config.pop("layers_block_type", None) or config.pop("layer_types")
        config |= {
            "hybrid_override_pattern": "".join(letters[kind] for kind in kinds),
            "time_step_limit": [0.0, np.inf],
        }

    assert_is(rewrite(saved("nemotron_h"), tmp_path, old), "nemotron_h")


def test_granite_4_as_published(saved, tmp_path):  # noqa: F811
    def old(config):
        config["layer_types"] = ["mamba" if "linear" in kind else "attention" for kind in config["layer_types"]]
        config |= {"mamba_d_head": "auto", "position_embedding_type": "nope"}

    assert_is(rewrite(saved("granite 4 states, experts"), tmp_path, old), "granite 4 states, experts")
