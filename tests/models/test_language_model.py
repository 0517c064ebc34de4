"""Folders of models that see as well as read: their language model alone, by the tokens of transformers."""

import json
import re

import numpy as np
import pytest
import tiny_models
import torch
import transformers
from family_ggufs import to_gguf
from safetensors.numpy import load_file, save_file
from session_logits import load_for_logits, logits

from engine.errors import FormatError
from engine.formats import open_checkpoint
from engine.models import gemma3
from engine.quantize.mix import quant_type
from engine.quantize.to_gguf import quantize_to_gguf

SIZES = {
    "vocab_size": tiny_models.VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "sliding_window": 16,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
}
PATCHES = VISION | {"patch_size": 14}
QWEN_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "patch_size": 4}
# transformers' class without its end, its text's model_type, the configuration of its vision, what else it has
WITH_TOWERS = {
    "gemma3": ("Gemma3", "gemma3_text", PATCHES | {"model_type": "siglip_vision_model"}, {"mm_tokens_per_image": 4}),
    "mistral3": ("Mistral3", "mistral", PATCHES | {"model_type": "pixtral"}, {}),
    "kimi_k25": ("Kimi_K25", "deepseek_v3", VISION, {"tie_word_embeddings": False}),
    "qwen2_vl": ("Qwen2VL", "qwen2_vl_text", QWEN_VISION | {"embed_dim": 32, "hidden_size": 64}, {}),
    "qwen2_5_vl": ("Qwen2_5_VL", "qwen2_5_vl_text", QWEN_VISION | {"out_hidden_size": 64}, {}),
    "qwen3_vl": (
        "Qwen3VL",
        "qwen3_vl_text",
        QWEN_VISION | {"out_hidden_size": 64, "deepstack_visual_indexes": [0]},
        {},
    ),
    "qwen3_vl_moe": (
        "Qwen3VLMoe",
        "qwen3_vl_moe_text",
        QWEN_VISION | {"out_hidden_size": 64, "deepstack_visual_indexes": [0]},
        {},
    ),
    "qwen3_5": ("Qwen3_5", "qwen3_5_text", QWEN_VISION | {"out_hidden_size": 64}, {}),
    "qwen3_5_moe": ("Qwen3_5Moe", "qwen3_5_moe_text", QWEN_VISION | {"out_hidden_size": 64}, {}),
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
LINEAR = EXPERTS | {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "shared_expert_intermediate_size": 48,
}
LATENT = {
    "head_dim": None,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "sliding_window": None,
}
SECTIONS = {
    "head_dim": 16,
    "sliding_window": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
}
TOKENS = 40
CLOSE = 5e-3
"""Of logits of some units: sums in another order came to 9e-4 in sixty draws, and another model would be units away."""
NEW_NAMES = "model.language_model."
OLD_NAMES = {
    "gemma3": "language_model.model.",
    "mistral3": "language_model.model.",
    "kimi_k25": "language_model.model.",
}
OLD_NAMES |= {"qwen2_vl": "model.", "qwen2_5_vl": "model.", "qwen3_vl": NEW_NAMES, "qwen3_5": NEW_NAMES}
OLD_NAMES |= {"qwen3_5_moe": NEW_NAMES, "qwen3_vl_moe": NEW_NAMES}


@pytest.fixture(params=WITH_TOWERS)
def model(request):
    name, kind, vision, more = WITH_TOWERS[request.param]
    torch.manual_seed(np.random.default_rng().integers(1 << 30).item())
    text = SIZES | {"model_type": kind} | (SECTIONS if kind.startswith("qwen") else {})
    text |= LATENT if kind.startswith("deepseek") else {}
    text |= LINEAR if kind.startswith("qwen3_5") else EXPERTS if "moe" in kind else {}
    config = getattr(transformers, f"{name}Config")(text_config=text, vision_config=vision, **more)
    return enlarged(getattr(transformers, f"{name}ForConditionalGeneration")(config))


def enlarged(whole):
    """With logits some units apart, or nothing would show in them."""
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.mul_(3.0)
    return whole.eval()


@pytest.mark.parametrize("new_names", [False, True])
def test_the_language_model_alone(model, tmp_path, new_names):
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = {
        n.replace("language_model.model.blocks.", "language_model.model.layers."): t for n, t in tensors.items()
    }  # Kimi's
    plain = {
        re.sub(r"^(model\.language_model|language_model\.model|model)\.(?!vis|m[mu])", "@", n): t
        for n, t in tensors.items()
    }
    here = NEW_NAMES if new_names else OLD_NAMES[model.config.model_type]
    tensors = {name.replace("@", here): tensor for name, tensor in plain.items()}
    assert any(name.startswith(here) for name in tensors) and any("vis" in name for name in tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    ids = np.random.default_rng().integers(3, tiny_models.VOCAB, TOKENS).tolist()
    with torch.no_grad():
        want = model(input_ids=torch.tensor([ids])).logits[0].numpy()
    assert np.abs(want).max() > 1
    got = logits(load_for_logits(tmp_path, "reference"), ids, (TOKENS,))
    np.testing.assert_allclose(got, want, rtol=0, atol=CLOSE)


@pytest.mark.parametrize("model", ["qwen2_vl", "qwen2_5_vl"], indirect=True)
def test_a_configuration_from_before_text_config(model, tmp_path):
    """As those on the hub, with the first name of a rope of three sections."""
    model.save_pretrained(tmp_path)
    described = json.loads((tmp_path / "config.json").read_text())
    text = described.pop("text_config")
    rope = {"rope_theta": text.pop("rope_parameters")["rope_theta"]}
    rope["rope_scaling"] = {"type": "mrope", "mrope_section": [2, 3, 3]}
    (tmp_path / "config.json").write_text(json.dumps(text | rope | described))
    ids = np.random.default_rng().integers(3, tiny_models.VOCAB, TOKENS).tolist()
    with torch.no_grad():
        want = model(input_ids=torch.tensor([ids])).logits[0].numpy()
    got = logits(load_for_logits(tmp_path, "reference"), ids, (TOKENS,))
    np.testing.assert_allclose(got, want, rtol=0, atol=CLOSE)


@pytest.mark.parametrize("model", ["qwen2_vl", "qwen3_vl"], indirect=True)
def test_a_gguf_of_the_language_model(model, tmp_path):
    """Its vision lies in a file of its own."""
    model.save_pretrained(tmp_path)
    tiny_models.write_tokenizer(tmp_path)
    tensors = {
        "model." + name.removeprefix(NEW_NAMES).removeprefix("model.") if name != "lm_head.weight" else name: tensor
        for name, tensor in load_file(tmp_path / "model.safetensors").items()
        if "visual." not in name
    }
    save_file(tensors, tmp_path / "model.safetensors")
    arch = model.config.model_type.replace("_", "")
    sections = {"rope.dimension_sections": [2, 3, 3, 0]}
    path = to_gguf(tmp_path, tmp_path / "model.gguf", arch, model.config.text_config, sections)
    ids = np.random.default_rng().integers(3, tiny_models.VOCAB, TOKENS).tolist()
    with torch.no_grad():
        want = model(input_ids=torch.tensor([ids])).logits[0].numpy()
    got = logits(load_for_logits(path, "reference"), ids, (TOKENS,))
    np.testing.assert_allclose(got, want, rtol=0, atol=CLOSE)


@pytest.mark.parametrize("model", ["qwen3_vl_moe"], indirect=True)
def test_experts_lie_either_way(model, tmp_path):
    """As transformers saves them, and turned, as in the files on the hub; and a GGUF has them in rows."""
    model.save_pretrained(tmp_path)
    tiny_models.write_tokenizer(tmp_path)
    ids = np.random.default_rng().integers(3, tiny_models.VOCAB, TOKENS).tolist()
    want = logits(load_for_logits(tmp_path, "reference"), ids, (TOKENS,))
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors[f"{NEW_NAMES}layers.0.mlp.experts.down_proj"].shape == (4, 64, EXPERTS["moe_intermediate_size"])
    for path in (tmp_path / "stored.gguf", tmp_path / "turned.gguf"):
        quantize_to_gguf(open_checkpoint(tmp_path), path, quant_type("F32"))
        assert open_checkpoint(path).tensors["blk.0.ffn_up_exps.weight"].shape == (
            4,
            EXPERTS["moe_intermediate_size"],
            64,
        )
        np.testing.assert_allclose(logits(load_for_logits(path, "reference"), ids, (TOKENS,)), want, rtol=0, atol=CLOSE)
        turned = {n: np.ascontiguousarray(t.swapaxes(1, 2)) if ".experts." in n else t for n, t in tensors.items()}
        save_file(turned, tmp_path / "model.safetensors")
        np.testing.assert_array_equal(logits(load_for_logits(tmp_path, "reference"), ids, (TOKENS,)), want)


def test_a_text_config_that_leaves_out_what_is_usual(tmp_path):
    """As those on the hub."""
    usual = {key: gemma3.HF_DEFAULTS[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim")}
    text = SIZES | usual | {"max_position_embeddings": 131072, "layer_types": None}
    config = transformers.Gemma3Config(
        text_config=text, vision_config=VISION | {"patch_size": 14}, mm_tokens_per_image=4
    )
    whole = enlarged(transformers.Gemma3ForConditionalGeneration(config))
    whole.save_pretrained(tmp_path)
    described = json.loads((tmp_path / "config.json").read_text())
    for key in (*gemma3.HF_DEFAULTS, "rope_parameters", "layer_types", "model_type"):
        if key != "sliding_window":
            described["text_config"].pop(key, None)
    (tmp_path / "config.json").write_text(json.dumps(described))
    ids = np.random.default_rng().integers(3, tiny_models.VOCAB, TOKENS).tolist()
    with torch.no_grad():
        want = whole(input_ids=torch.tensor([ids])).logits[0].numpy()
    got = logits(load_for_logits(tmp_path, "reference", max_model_len=64), ids, (TOKENS,))
    assert np.abs(want).max() > 1
    np.testing.assert_allclose(got, want, rtol=0, atol=CLOSE)


def test_what_a_text_config_leaves_out_is_as_in_transformers():
    config = transformers.Gemma3TextConfig().to_dict()
    ropes = config["rope_parameters"]["full_attention"]
    for key, value in gemma3.HF_DEFAULTS.items():
        assert (ropes if key == "rope_theta" else config)[key] == value, key


def test_a_tensor_under_two_names_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": {}}))
    one = np.ones(4, np.float32)
    save_file({"language_model.model.norm.weight": one, "model.norm.weight": one}, tmp_path / "model.safetensors")
    with pytest.raises(FormatError, match="under two names"):
        open_checkpoint(tmp_path)
