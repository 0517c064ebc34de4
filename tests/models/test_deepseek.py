"""DeepSeek V2 and V3 against transformers, from both formats: latent attention absorbed, grouped routing, YaRN."""

from __future__ import annotations

from copy import deepcopy
from functools import cache

import numpy as np
import pytest
import tiny_models
from checkpoints import SIZES, logits_of
from family_ggufs import to_gguf
from session_logits import load_for_logits, logits

from engine import LLM, SamplingParams

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

CHUNKS = ((1,), (15, 1, 1, 7), (40, 1, 9, 1))
LONG = (64, 64, 64, 64, 44)
HEADS = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 40,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "num_hidden_layers": 3,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 4.0,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}
V2 = HEADS | EXPERTS | {"n_group": 1, "topk_group": 1}
V3 = HEADS | EXPERTS | {"n_group": 4, "topk_group": 2, "norm_topk_prob": True, "num_nextn_predict_layers": 0}
WIDE = {"kv_lora_rank": 64, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}
# name -> (transformers' class, what differs from SIZES)
MODELS = {
    "v2 lite": ("DeepseekV2", V2 | {"q_lora_rank": None}),
    "v2 grouped, yarn": (
        "DeepseekV2",
        V2 | {"n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy", "rope_parameters": YARN},
    ),
    "v2 biases": ("DeepseekV2", V2 | {"attention_bias": True, "mlp_bias": True, "first_k_dense_replace": 0}),
    "v3": ("DeepseekV3", V3),
    "v3 yarn, plain q": (
        "DeepseekV3",
        V3 | {"q_lora_rank": None, "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "v3 halves, not renormalized": ("DeepseekV3", V3 | {"rope_interleave": False, "norm_topk_prob": False}),
    "v3 one group, wide": ("DeepseekV3", V3 | WIDE | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 0}),
}
WITH_GGUF = [name for name in MODELS if name not in ("v2 biases", "v3 halves, not renormalized")]


@cache
def model_of(name):
    """transformers' model in f32 with every parameter random, norms and biases too."""
    kind, changes = MODELS[name]
    torch.manual_seed(sum(name.encode()))
    config = getattr(transformers, f"{kind}Config")(**deepcopy(SIZES | changes), attn_implementation="eager")
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval().float()
    with torch.no_grad():
        for parameter_name, parameter in [*model.named_parameters(), *model.named_buffers()]:
            noise = torch.randn_like(parameter)
            if "norm" in parameter_name:
                parameter.copy_(1 + 0.3 * noise)
            elif parameter_name.endswith("bias"):
                parameter.copy_(0.3 * noise)
            elif parameter.ndim > 1:
                parameter.copy_(1.3 * noise / parameter.shape[-1] ** 0.5)
    return model


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    made = {}

    def get(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp("deepseek")
            model_of(name).save_pretrained(made[name])
            tiny_models.write_tokenizer(made[name])
        return made[name]

    return get


def gguf_keys(config, absorbed):
    """What llama.cpp's converter writes for this architecture beyond the keys of all."""
    v3 = config.model_type == "deepseek_v3"
    key, value = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    cache = config.kv_lora_rank + config.qk_rope_head_dim
    keys = {
        "attention.head_count_kv": 1 if absorbed else config.num_attention_heads,
        "attention.key_length": cache if absorbed else key,
        "attention.value_length": config.kv_lora_rank if absorbed else value,
        "attention.key_length_mla": key if absorbed else None,
        "attention.value_length_mla": value if absorbed else None,
        "attention.kv_lora_rank": config.kv_lora_rank,
        "attention.q_lora_rank": config.q_lora_rank,
        "rope.dimension_count": config.qk_rope_head_dim,
        "leading_dense_block_count": config.first_k_dense_replace,
        "expert_count": config.n_routed_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_shared_count": config.n_shared_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_weights_scale": config.routed_scaling_factor,
        "expert_weights_norm": bool(config.norm_topk_prob),
        "expert_gating_func": 2 if v3 else None,
        "expert_group_count": config.n_group if config.n_group > 1 else None,
        "expert_group_used_count": config.topk_group if config.n_group > 1 else None,
    }
    rope = config.rope_parameters
    if rope["rope_type"] == "yarn":
        keys |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": rope["factor"],
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            "rope.scaling.yarn_beta_fast": rope["beta_fast"],
            "rope.scaling.yarn_log_multiplier": 0.1 * rope["mscale_all_dim"],
        }
    return keys


def gguf_of(name, folder, path, absorbed):
    config = model_of(name).config

    def split(tensors):
        found = {n.replace("e_score_correction_bias", "e_score_correction.bias"): a for n, a in tensors.items()}
        for key in [n for n in found if absorbed and "kv_b_proj" in n]:
            both = found.pop(key).reshape(config.num_attention_heads, -1, config.kv_lora_rank)
            k, v = both[:, : config.qk_nope_head_dim], both[:, config.qk_nope_head_dim :]
            found |= {key.replace("kv_b", "k_b"): k.swapaxes(1, 2), key.replace("kv_b", "v_b"): v}
        return found

    return to_gguf(folder, path, "deepseek2", config, gguf_keys(config, absorbed), split)


def random_ids(count):
    return np.random.default_rng().integers(3, tiny_models.VOCAB, count).tolist()


def assert_same_logits(path, backend, name):
    loaded = load_for_logits(path, backend)
    for chunks in (*CHUNKS, LONG) if backend == "cpu" else CHUNKS:
        ids = random_ids(sum(chunks))
        want = logits_of(model_of(name), ids)
        assert np.abs(want).max() > 1, "these logits are too small for the tolerance to mean anything"
        np.testing.assert_allclose(logits(loaded, ids, chunks), want, rtol=0, atol=2e-4, err_msg=f"{chunks} {ids}")


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(name, saved, backend):
    assert_same_logits(saved(name), backend, name)


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_transformers(name, saved, backend):
    """Each token is transformers' best after the tokens before it, or within 1e-3 of that."""
    prompts = [random_ids(n) for n in (1, 17, 60)]
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    with LLM(saved(name), backend=backend, kv_cache_dtype="f32", threads=2, max_num_batched_tokens=32) as llm:
        outputs = llm.generate(prompts, params)
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = list(output.outputs[0].token_ids)
        steps = logits_of(model_of(name), prompt + tokens)[len(prompt) - 1 : -1]
        behind = steps.max(axis=1) - steps[np.arange(20), tokens]
        assert (behind <= 1e-3).all(), f"{prompt}: at token {int(np.argmax(behind > 1e-3))}"


@pytest.mark.parametrize("absorbed", [False, True], ids=["kv_b", "k_b and v_b"])
@pytest.mark.parametrize("name", WITH_GGUF)
def test_a_gguf_gives_the_same_logits(name, absorbed, tmp_path, saved, backend):
    assert_same_logits(gguf_of(name, saved(name), tmp_path / "model.gguf", absorbed), backend, name)
