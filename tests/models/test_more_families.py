"""Further families against transformers, from both formats; the GGUF files are written by gguf's own table of names."""

from __future__ import annotations

import json
from copy import deepcopy
from functools import cache

import gguf
import numpy as np
import pytest
import tiny_models
from checkpoints import SIZES, logits_of
from safetensors.numpy import load_file
from session_logits import load_for_logits, logits

from engine import LLM, SamplingParams
from engine.errors import ModelError
from engine.formats import open_checkpoint
from engine.models import load_model

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

WINDOW = 24
CHUNKS = ((1,), (15, 1, 1, 7), (40, 1, 9, 1))
NO_EXPERTS = {"mlp_only_layers": [0], "norm_topk_prob": False}
PLAIN_GEMMA3 = {"sliding_window": 512, "layer_types": ["full_attention"] * 2}
GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}
FALCON = {"ffn_hidden_size": 96, "tie_word_embeddings": True}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "head_dim": 16,
}
GEMMA = {"head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 24, "tie_word_embeddings": True}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 4.0,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 5.0, 8.0, 12.0, 20.0],
}
PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}

# name -> (transformers' class, GGUF's architecture or None, what differs from SIZES)
FAMILIES = {
    "mistral": ("Mistral", "llama", {"sliding_window": WINDOW}),
    "mistral without a window": ("Mistral", "llama", {"sliding_window": None, "head_dim": 32}),
    "mistral yarn": ("Mistral", "llama", {"sliding_window": None, "rope_parameters": YARN}),
    "qwen2 window above a layer": (
        "Qwen2",
        None,
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen3_moe": ("Qwen3Moe", "qwen3moe", EXPERTS),
    "qwen3_moe dense layer, not renormalized": ("Qwen3Moe", None, EXPERTS | NO_EXPERTS),
    "olmo2": ("Olmo2", "olmo2", {}),
    "gemma2": ("Gemma2", "gemma2", GEMMA | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0}),
    "gemma2 without caps": ("Gemma2", None, GEMMA | {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma3": ("Gemma3", "gemma3", GEMMA | {"num_hidden_layers": 7}),
    "gemma3 without windows": ("Gemma3", None, GEMMA | PLAIN_GEMMA3),
    "phi3": ("Phi3", "phi3", {"sliding_window": WINDOW}),
    "phi3 partial": ("Phi3", "phi3", {"rope_parameters": PARTIAL}),
    "phi3 longrope": ("Phi3", "phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 40}),
    "phi3 longrope, short": ("Phi3", "phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 256}),
    "gpt2": ("GPT2", "gpt2", GPT2),
    "gpt2 relu": ("GPT2", None, GPT2 | {"activation_function": "relu", "n_inner": 96}),
    "opt": ("OPT", None, {"ffn_dim": 96}),
    "opt norms after, projected": (
        "OPT",
        None,
        {"ffn_dim": 96, "do_layer_norm_before": False, "word_embed_proj_dim": 32, "activation_function": "gelu"},
    ),
    "gpt_neox": ("GPTNeoX", "gptneox", {"intermediate_size": 96}),
    "gpt_neox in sequence": ("GPTNeoX", "gptneox", {"intermediate_size": 96, "use_parallel_residual": False}),
    "cohere": ("Cohere", "command-r", {"logit_scale": 0.25, "tie_word_embeddings": True}),
    "falcon 7b": ("Falcon", "falcon", FALCON | {"multi_query": True}),
    "falcon 40b": ("Falcon", "falcon", FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon 11b": (
        "Falcon",
        "falcon",
        FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    "starcoder2": ("Starcoder2", "starcoder2", {"sliding_window": WINDOW}),
    "starcoder2 whole": ("Starcoder2", None, {"use_bias": False, "tie_word_embeddings": False}),
}
# Keys of GGUF beyond those that every file of a family has.
GGUF_KEYS = {
    "mistral yarn": {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 64,
        "rope.scaling.yarn_beta_fast": 4.0,
    },
    "phi3 partial": {"rope.dimension_count": 8},
    "phi3 longrope": {
        "rope.scaling.original_context_length": 40,
        "rope.scaling.attn_factor": float(np.sqrt(1 + np.log(256 / 40) / np.log(40))),
    },
    "phi3 longrope, short": {"rope.scaling.original_context_length": 256},
    "gpt_neox": {"rope.dimension_count": 4},
    "gpt_neox in sequence": {"rope.dimension_count": 4},
    "falcon 7b": {"attention.head_count_kv": 1},
}
WITH_GGUF = [name for name, (_, arch, _) in FAMILIES.items() if arch is not None]
# A cache longer than the original context chooses the long factors at load; transformers does at each call.
LONG_ONLY = {"phi3 longrope": 41}


@cache
def model_of(family):
    """transformers' model in f32 with every parameter random, norms and biases too."""
    name, _, changes = FAMILIES[family]
    torch.manual_seed(sum(family.encode()))
    kind = f"{name}TextConfig" if name == "Gemma3" else f"{name}Config"
    sizes = deepcopy(SIZES | {"pad_token_id": 0} | changes)  # a configuration writes into what it is given
    if name in ("OPT", "GPTNeoX"):
        del sizes["num_key_value_heads"]
    if name in ("GPT2", "Falcon"):
        sizes = {k: v for k, v in sizes.items() if k not in ("intermediate_size", "num_key_value_heads")}
    config = getattr(transformers, kind)(**sizes, attn_implementation="eager")
    head = "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM"
    model = getattr(transformers, head)(config).eval().float()
    minus_one = name in ("Gemma2", "Gemma3")
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            if parameter.ndim == 1 and parameter_name.endswith("weight"):
                parameter.copy_((0 if minus_one else 1) + 0.3 * noise)
            elif parameter_name.endswith("bias"):
                parameter.copy_(0.3 * noise)
            elif parameter.shape[0] == tiny_models.VOCAB and minus_one:
                parameter.copy_(0.2 * noise)  # the embeddings are scaled, and are the head
            else:
                parameter.copy_(1.3 * noise / 64**0.5)
    return model


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    made = {}

    def get(family):
        if family not in made:
            made[family] = tmp_path_factory.mktemp("more")
            model_of(family).save_pretrained(made[family])
            tiny_models.write_tokenizer(made[family])
        return made[family]

    return get


def random_ids(count):
    return np.random.default_rng().integers(3, tiny_models.VOCAB, count).tolist()


def assert_same_logits(path, backend, family):
    loaded = load_for_logits(path, backend)
    for chunks in CHUNKS:
        ids = random_ids(sum(chunks))
        if len(ids) < LONG_ONLY.get(family, 0):
            continue
        want = logits_of(model_of(family), ids)
        assert np.abs(want).max() > 1, "these logits are too small for the tolerance to mean anything"
        np.testing.assert_allclose(logits(loaded, ids, chunks), want, rtol=0, atol=2e-4, err_msg=f"{chunks} {ids}")


def assert_greedy(path, backend, family):
    """Each token is transformers' best after the tokens before it, or within 1e-3 of that."""
    prompts = [random_ids(n) for n in (1, 17, 60) if n >= LONG_ONLY.get(family, 0)]
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    with LLM(path, backend=backend, kv_cache_dtype="f32", threads=2, max_num_batched_tokens=32) as llm:
        outputs = llm.generate(prompts, params)
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = list(output.outputs[0].token_ids)
        steps = logits_of(model_of(family), prompt + tokens)[len(prompt) - 1 : -1]
        behind = steps.max(axis=1) - steps[np.arange(20), tokens]
        assert (behind <= 1e-3).all(), f"{prompt}: at token {int(np.argmax(behind > 1e-3))}"


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_tokens_are_those_of_transformers(family, saved, backend):
    assert_same_logits(saved(family), backend, family)
    assert_greedy(saved(family), backend, family)


@pytest.mark.parametrize("family", WITH_GGUF)
def test_a_gguf_gives_the_same_logits(family, tmp_path, saved, backend):
    path = to_gguf(family, saved(family), tmp_path / "model.gguf")
    assert_same_logits(path, backend, family)


# -- Hugging Face to GGUF ------------------------------------------------------------------------------------------------


def to_gguf(family, folder, path):
    """The family's checkpoint by the published keys and gguf's own table of tensor names."""
    arch = FAMILIES[family][1]
    config = model_of(family).config
    writer = gguf.GGUFWriter(path, arch)
    keys = published_keys(arch, config) | GGUF_KEYS.get(family, {})
    for key, value in keys.items():
        if value is not None:
            writer.add_key_value(f"{arch}.{key}", value, gguf.GGUFValueType.get_type(value))
    tiny_models._add_vocab(writer, json.loads((folder / "tokenizer.json").read_text()))
    tensors = load_file(folder / "model.safetensors")
    for name, array in {**converted(arch, config, tensors), **rope_factors(config)}.items():
        writer.add_tensor(name, np.ascontiguousarray(array, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def published_keys(arch, config):
    def first(*names):
        return next((getattr(config, name) for name in names if getattr(config, name, None) is not None), None)

    rope = getattr(config, "rope_parameters", None) or {}
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    normal = arch in ("gpt2", "gptneox", "falcon", "starcoder2", "command-r")
    keys = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": first("intermediate_size", "ffn_hidden_size", "n_inner") or 4 * config.hidden_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": first("num_key_value_heads", "num_kv_heads") or config.num_attention_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_epsilon" if normal else "attention.layer_norm_rms_epsilon": first(
            "rms_norm_eps", "layer_norm_epsilon", "norm_epsilon", "layer_norm_eps"
        ),
        "attention.sliding_window": first("sliding_window"),
        "rope.freq_base": rope.get("full_attention", rope).get("rope_theta"),
        "attn_logit_softcapping": first("attn_logit_softcapping"),
        "final_logit_softcapping": first("final_logit_softcapping"),
        "logit_scale": first("logit_scale"),
        "use_parallel_residual": first("use_parallel_residual"),
    }
    if arch == "qwen3moe":
        keys |= {
            "expert_count": config.num_local_experts,
            "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.moe_intermediate_size,
        }
    if arch in ("gemma2", "gemma3"):
        # A key that GGUF defines for any architecture; without it the size of the model tells the scale.
        keys["attention.scale"] = config.query_pre_attn_scalar**-0.5
    return keys


def rope_factors(config):
    rope = getattr(config, "rope_parameters", None) or {}
    names = [name for name in ("long", "short") if f"{name}_factor" in rope]
    return {f"rope_factors_{name}.weight": np.array(rope[f"{name}_factor"], np.float32) for name in names}


def converted(arch, config, tensors):
    names = gguf.get_tensor_name_map(
        next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == arch), config.num_hidden_layers
    )
    found, experts = {}, {}
    for name, array in tensors.items():
        plain, _, expert = name.partition(".experts.")
        if expert:
            number, rest = expert.split(".", 1)
            experts.setdefault(names.get_name(f"{plain}.experts.{rest}", (".weight",)), {})[int(number)] = array
            continue
        own = names.get_name(name, (".weight", ".bias"))
        assert own is not None, f"gguf knows no name for {name}"
        found[own] = rearranged(arch, config, name, array)
    return found | {name: np.stack([members[e] for e in sorted(members)]) for name, members in experts.items()}


def rearranged(arch, config, name, array):
    """What llama.cpp's converter does to the numbers."""
    if arch == "llama" and ".q_proj." in name:
        return tiny_models.interleave(array, config.num_attention_heads)
    if arch == "llama" and ".k_proj." in name:
        return tiny_models.interleave(array, config.num_key_value_heads)
    if arch in ("gemma2", "gemma3") and name.endswith("norm.weight"):
        return array + 1
    if "query_key_value" in name:
        head_dim = config.hidden_size // config.num_attention_heads
        kv_heads = len(array) // head_dim - config.num_attention_heads
        kv_heads = 1 if getattr(config, "multi_query", False) and not config.new_decoder_architecture else kv_heads // 2
        grouped = array.reshape(kv_heads, -1, head_dim, *array.shape[1:])
        parts = grouped[:, :-2], grouped[:, -2], grouped[:, -1]
        return np.concatenate([part.reshape(-1, *array.shape[1:]) for part in parts])
    if arch == "gpt2" and array.ndim == 2 and ".h." in name:
        return array.T
    return array
