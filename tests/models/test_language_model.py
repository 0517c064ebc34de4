"""Folders of models that see as well as read: their language model alone, by the tokens of transformers."""

import json

import numpy as np
import pytest
import tiny_models
import torch
import transformers
from safetensors.numpy import load_file, save_file
from session_logits import load_for_logits, logits

from engine.errors import FormatError
from engine.formats import open_checkpoint
from engine.models import gemma3

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
WITH_TOWERS = {
    "gemma3": (transformers.Gemma3ForConditionalGeneration, transformers.Gemma3Config, {"mm_tokens_per_image": 4}),
    "mistral3": (transformers.Mistral3ForConditionalGeneration, transformers.Mistral3Config, {}),
}
TOKENS = 40


@pytest.fixture(params=WITH_TOWERS)
def model(request):
    make, configuration, more = WITH_TOWERS[request.param]
    torch.manual_seed(np.random.default_rng().integers(1 << 30).item())
    text = SIZES | {"model_type": "gemma3_text" if request.param == "gemma3" else "mistral"}
    vision = VISION | {
        "patch_size": 14,
        "model_type": "siglip_vision_model" if request.param == "gemma3" else "pixtral",
    }
    return enlarged(make(configuration(text_config=text, vision_config=vision, **more)))


def enlarged(whole):
    """With logits some units apart, or nothing would show in them."""
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.mul_(3.0)
    return whole.eval()


@pytest.mark.parametrize("new_names", [False, True])
def test_the_language_model_alone(model, tmp_path, new_names):
    model.save_pretrained(tmp_path)
    names = ("model.language_model.", "language_model.model.")
    here, there = names if new_names else names[::-1]
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = {name.replace(there, here): tensor for name, tensor in tensors.items()}
    assert any(name.startswith(here) for name in tensors) and any("vision_tower." in name for name in tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    ids = np.random.default_rng().integers(3, tiny_models.VOCAB, TOKENS).tolist()
    with torch.no_grad():
        want = model(input_ids=torch.tensor([ids])).logits[0].numpy()
    assert np.abs(want).max() > 1
    got = logits(load_for_logits(tmp_path, "reference"), ids, (TOKENS,))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-3)


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
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-3)


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
