"""Further families against transformers, from both formats."""

from __future__ import annotations

import json
from copy import deepcopy
from functools import cache

import numpy as np
import pytest
import tiny_models
from checkpoints import SIZES, assert_logits, in_half, logits_of, saved_once
from family_ggufs import to_gguf
from other_families import OTHER, OTHER_GGUF_KEYS
from safetensors.numpy import load_file, save_file
from session_logits import load_for_logits, logits
from state_space_families import STATE_SPACE
from younger_families import YARN, YOUNGER, YOUNGER_GGUF_KEYS

from engine import LLM, SamplingParams
from engine.errors import ModelError
from engine.formats import open_checkpoint
from engine.models import load_model
from engine.models.rope import rope_from_hf

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
ROPE_INIT_FUNCTIONS = pytest.importorskip("transformers.modeling_rope_utils").ROPE_INIT_FUNCTIONS

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
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 5.0, 8.0, 12.0, 20.0],
}
GPT_OSS = {
    "intermediate_size": 32,
    "head_dim": 16,
    "sliding_window": WINDOW,
    "num_hidden_layers": 3,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "rope_parameters": YARN | {"truncate": False, "beta_fast": 8.0},
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
    "qwen3_moe with a window": (
        "Qwen3Moe",
        None,
        EXPERTS | {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen3_moe dense layer, not renormalized": ("Qwen3Moe", None, EXPERTS | NO_EXPERTS),
    "qwen2_moe": ("Qwen2Moe", "qwen2moe", EXPERTS | {"norm_topk_prob": False, "shared_expert_intermediate_size": 48}),
    "qwen2_moe renormalized, dense layer": (
        "Qwen2Moe",
        None,
        EXPERTS | {"shared_expert_intermediate_size": 48, "mlp_only_layers": [1]},
    ),
    "gemma": ("Gemma", "gemma", {"head_dim": 32, "tie_word_embeddings": True}),
    "gemma one KV head, biases": ("Gemma", None, {"head_dim": 16, "num_key_value_heads": 1, "attention_bias": True}),
    "olmo2": ("Olmo2", "olmo2", {}),
    "gemma2": ("Gemma2", "gemma2", GEMMA | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0}),
    "gemma2 without caps": ("Gemma2", None, GEMMA | {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma3": ("Gemma3", "gemma3", GEMMA | {"num_hidden_layers": 7}),
    "gemma3 capped": ("Gemma3", "gemma3", GEMMA | {"final_logit_softcapping": 5.0}),
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
    "opt norms without weights": ("OPT", None, {"ffn_dim": 96, "layer_norm_elementwise_affine": False}),
    "gpt_neox": ("GPTNeoX", "gptneox", {"intermediate_size": 96}),
    "gpt_neox in sequence": ("GPTNeoX", "gptneox", {"intermediate_size": 96, "use_parallel_residual": False}),
    "cohere": ("Cohere", "command-r", {"logit_scale": 1.5, "tie_word_embeddings": True}),
    "cohere norms of heads": ("Cohere", "command-r", {"use_qk_norm": True, "logit_scale": 0.7}),
    "cohere biases, untied": (
        "Cohere",
        None,
        {"attention_bias": True, "tie_word_embeddings": False, "logit_scale": 2.0},
    ),
    "cohere2": ("Cohere2", "cohere2", {"sliding_window": WINDOW, "num_hidden_layers": 5, "logit_scale": 1.5}),
    "cohere2 wider than its context": (
        "Cohere2",
        "cohere2",
        {"sliding_window": 512, "num_hidden_layers": 4, "logit_scale": 2.0},
    ),
    "gemma3 wider than its context": (
        "Gemma3",
        "gemma3",
        GEMMA | {"sliding_window": 512, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "falcon 7b": ("Falcon", "falcon", FALCON | {"multi_query": True}),
    "falcon 40b": ("Falcon", "falcon", FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon 11b": (
        "Falcon",
        "falcon",
        FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    "starcoder2": ("Starcoder2", "starcoder2", {"sliding_window": WINDOW}),
    "gpt_oss": ("GptOss", "gpt-oss", GPT_OSS),
    "gpt_oss without biases, tighter clamp": (
        "GptOss",
        None,
        GPT_OSS | {"attention_bias": False, "swiglu_limit": 0.7, "swiglu_alpha": 1.1, "tie_word_embeddings": True},
    ),
    "starcoder2 whole": ("Starcoder2", None, {"use_bias": False, "tie_word_embeddings": False}),
    **YOUNGER,
    **OTHER,
    **STATE_SPACE,
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
    "gemma3 wider than its context": {"attention.sliding_window_pattern": [True, False]},
    **YOUNGER_GGUF_KEYS,
    **OTHER_GGUF_KEYS,
}
WITH_GGUF = [name for name, (_, arch, _) in FAMILIES.items() if arch is not None]
# A cache longer than the original context chooses the long factors at load; transformers does at each call.
LONG_ONLY = {"phi3 longrope": 41}


@cache
def model_of(family):
    """transformers' model in f32 with every parameter random, norms and biases too."""
    name, _, changes = FAMILIES[family]
    torch.manual_seed(sum(family.encode()))
    kind = f"{name}TextConfig" if name in ("Gemma3", "Gemma4", "Qwen3_5", "Qwen3_5Moe") else f"{name}Config"
    sizes = deepcopy(SIZES | {"pad_token_id": 0} | changes)  # a configuration writes into what it is given
    if name in ("OPT", "GPTNeoX"):
        del sizes["num_key_value_heads"]
    if name in ("GPT2", "Falcon"):
        sizes = {k: v for k, v in sizes.items() if k not in ("intermediate_size", "num_key_value_heads")}
    config = getattr(transformers, kind)(**sizes, attn_implementation="eager")
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    minus_one = name in ("Gemma", "Gemma2", "Gemma3", "VaultGemma")
    norms_less_one = minus_one or name in ("Qwen3Next", "Qwen3_5", "Qwen3_5Moe", "Nemotron")
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            if parameter.ndim == 1 and parameter_name.endswith("weight"):
                parameter.copy_((0 if norms_less_one else 1) + 0.3 * noise)
            elif parameter_name.endswith("bias"):
                parameter.copy_(0.3 * noise)
            elif parameter_name.endswith("sinks"):
                parameter.copy_(2 * noise)
            elif parameter.shape[0] == tiny_models.VOCAB and minus_one:
                parameter.copy_(0.2 * noise)  # the embeddings are scaled, and are the head
            else:
                parameter.copy_(1.3 * noise / 64**0.5)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith(("correction_bias", "expert_bias")):
                buffer.copy_(0.2 * torch.randn_like(buffer))
            elif buffer_name.endswith("layer_scalar"):
                buffer.copy_(0.7 + 0.3 * torch.rand_like(buffer))
    return model


def gguf_of(family, folder, path):
    return to_gguf(folder, path, FAMILIES[family][1], model_of(family).config, GGUF_KEYS.get(family, {}))


saved = saved_once(model_of)


def random_ids(count):
    return np.random.default_rng().integers(3, tiny_models.VOCAB, count).tolist()


def assert_same_logits(path, backend, family):
    loaded = load_for_logits(path, backend)
    for chunks in CHUNKS:
        ids = random_ids(sum(chunks))
        if len(ids) < LONG_ONLY.get(family, 0):
            continue
        assert_logits(logits(loaded, ids, chunks), model_of(family), ids, f"{chunks}")


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
    path = gguf_of(family, saved(family), tmp_path / "model.gguf")
    assert_same_logits(path, backend, family)


@pytest.mark.parametrize("family", FAMILIES)
def test_everything_is_on_the_device(family, saved, cpu):
    loaded = load_for_logits(saved(family), cpu, strict=True)
    assert not loaded.placement.fallbacks()


# -- what files of other ages and precisions have ------------------------------------------------------------------------


def rewrite(folder, target, configure=lambda config: None, rename=lambda tensors: tensors):
    """A copy of a checkpoint with its configuration and tensors changed."""
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    configure(config)
    (target / "config.json").write_text(json.dumps(config))
    save_file(rename(load_file(folder / "model.safetensors")), target / "model.safetensors")
    return target


def assert_is(path, family):
    ids = random_ids(50)
    got = logits(load_for_logits(path, "reference"), ids, (50,))
    assert_logits(got, model_of(family), ids)


def assert_refused(path, word):
    with pytest.raises(ModelError, match=word) as caught:
        load_model(open_checkpoint(path)).program(16, "f16")
    assert str(caught.value).endswith(".") and "\n" not in str(caught.value)


def test_gpt2_without_prefix_and_with_masks(saved, tmp_path):
    def bare(tensors):
        mask = {"h.0.attn.bias": np.tril(np.ones((1, 1, 256, 256), np.float32))}
        return {name.removeprefix("transformer."): array for name, array in tensors.items()} | mask

    assert_is(rewrite(saved("gpt2"), tmp_path, rename=bare), "gpt2")


def test_gpt_neox_of_old(saved, tmp_path):
    def old(config):
        del config["rope_parameters"]
        config |= {"rotary_pct": 0.25, "rotary_emb_base": 10000}

    def head(tensors):
        kept = {name: array for name, array in tensors.items() if name not in ("lm_head.weight", "embed_out.weight")}
        return kept | {"embed_out.weight": model_of("gpt_neox").state_dict()["lm_head.weight"].numpy()}

    assert_is(rewrite(saved("gpt_neox"), tmp_path, old, head), "gpt_neox")


def test_gemma_of_old(saved, tmp_path):
    """Its first files say gelu, and mean the tanh form; later ones leave the newer key null."""
    for number, keys in enumerate(({"hidden_act": "gelu"}, {"hidden_act": "gelu", "hidden_activation": None})):
        target = tmp_path / str(number)
        target.mkdir()
        assert_is(rewrite(saved("gemma"), target, lambda config, keys=keys: config.update(keys)), "gemma")


def test_a_gguf_of_gemma2_of_old(saved, tmp_path):
    """The first files name no caps, and the models have theirs."""
    unsaid = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    path = to_gguf(saved("gemma2"), tmp_path / "model.gguf", "gemma2", model_of("gemma2").config, unsaid)
    config = load_model(open_checkpoint(path)).config
    assert (config.attention_softcap, config.logit_softcap) == (50.0, 30.0)


@pytest.mark.parametrize("family", ["mistral", "gemma2", "cohere2", "gpt_neox", "gpt_oss"])
def test_buffers_of_old(family, saved, tmp_path):
    """What earlier savings leave beside the weights; a weight that is not known is refused all the same."""
    layer = "gpt_neox.layers.0.attention." if family == "gpt_neox" else "model.layers.0.self_attn."
    extra = {
        layer + "rotary_emb.inv_freq": np.ones(8, np.float32),
        layer + "rotary_emb.cos_cached": np.ones((1, 1, 256, 16), np.float32),
        "model.rotary_emb.original_inv_freq": np.ones(8, np.float32),
        "gpt_neox.layers.1.attention.masked_bias": np.float32([-1e9]),
        "gpt_neox.layers.1.attention.bias": np.ones((1, 1, 256, 256), bool),
        "model.position_ids": np.arange(256)[None],
    }
    assert_is(rewrite(saved(family), tmp_path, rename=lambda tensors: tensors | extra), family)
    for name in (layer + "extra_proj.weight", "mtp.layers.0.norm.weight", "vision_tower.patch.bias"):
        path = rewrite(saved(family), tmp_path, rename=lambda t, name=name: t | {name: np.ones(8, np.float32)})
        with pytest.raises(ModelError, match=name):
            load_model(open_checkpoint(path)).program(16, "f16")


@pytest.mark.parametrize("equal", [True, False])
def test_a_head_beside_tied_embeddings(equal, saved, tmp_path):
    """It is used, as transformers does: one that equals the table is the table, and another is not tied."""
    table = model_of("cohere").get_input_embeddings().weight.detach().numpy()
    head = table if equal else table[::-1].copy()
    path = rewrite(saved("cohere"), tmp_path, rename=lambda tensors: tensors | {"lm_head.weight": head})
    ids = random_ids(20)
    theirs = transformers.CohereForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.float32)
    got = logits(load_for_logits(path, "reference"), ids, (20,))
    assert_logits(got, theirs.eval(), ids)


def test_gemma3_of_old(saved, tmp_path):
    def old(config):
        del config["rope_parameters"], config["layer_types"]
        config |= {"rope_theta": 1000000.0, "rope_local_base_freq": 10000.0, "sliding_window_pattern": 6}

    assert_is(rewrite(saved("gemma3"), tmp_path, old), "gemma3")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_without_its_head(family, tmp_path):
    """As AutoModel saves it, for embeddings."""
    model_of(family).base_model.save_pretrained(tmp_path)
    load_model(open_checkpoint(tmp_path)).program(16, "f16")


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "phi3"])
def test_in_f16(family, saved, tmp_path, backend):
    """Matrices that are turned, permuted and split stay in the format of the file."""
    path = rewrite(
        saved(family),
        tmp_path,
        rename=lambda tensors: {n: a.astype(np.float16) if a.ndim > 1 else a for n, a in tensors.items()},
    )
    ids = random_ids(50)
    got = logits(load_for_logits(path, backend), ids, (49, 1))
    assert_logits(got, in_half(model_of(family)), ids)


# -- rope scalings that depend on the length to come ---------------------------------------------------------------------


def hf_rope(kind, config, length):
    inv_freq, scale = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=length)
    return inv_freq.numpy(), scale


@pytest.mark.parametrize("length", [None, 40, 41, 200])
def test_longrope_goes_by_the_longest_sequence_to_come(length, saved, tmp_path):
    inv_freq, scale = hf_rope("longrope", model_of("phi3 longrope").config, length or 256)
    folder = saved("phi3 longrope")
    for path in (folder, gguf_of("phi3 longrope", folder, tmp_path / "model.gguf")):
        rope = load_model(open_checkpoint(path), length).config.rope
        np.testing.assert_allclose(rope.inv_freq, inv_freq, rtol=1e-6)
        assert rope.scale == pytest.approx(scale)


@pytest.mark.parametrize(("length", "context"), [(None, 256), (100, 256), (256, 256), (300, 300), (2000, 1024)])
def test_dynamic_scaling_goes_by_the_longest_sequence_to_come(length, context, saved, tmp_path):
    scaling = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    path = rewrite(saved("mistral without a window"), tmp_path, lambda config: config.update(rope_parameters=scaling))
    config = load_model(open_checkpoint(path), length).config
    assert config.max_context == context
    theirs = transformers.AutoConfig.from_pretrained(path)
    np.testing.assert_allclose(config.rope.inv_freq, hf_rope("dynamic", theirs, length or 256)[0], rtol=1e-6)


@pytest.mark.parametrize(("length", "context"), [(None, 256), (200, 256), (700, 700), (9000, 1200)])
def test_yarn_reaches_as_far_as_its_factor(length, context, saved, tmp_path):
    scaling = YARN | {"factor": 4.0, "original_max_position_embeddings": 300}
    path = rewrite(saved("mistral without a window"), tmp_path, lambda config: config.update(rope_parameters=scaling))
    assert load_model(open_checkpoint(path), length).config.max_context == context
    named = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 300}
    path = to_gguf(path, tmp_path / "model.gguf", "llama", model_of("mistral without a window").config, named)
    assert load_model(open_checkpoint(path), length).config.max_context == context


@pytest.mark.parametrize(("length", "windows"), [(None, ()), (256, ()), (257, (256, 256)), (9000, (256, 256))])
@pytest.mark.parametrize("kind", ["yarn", "dynamic"])
def test_a_window_as_long_as_the_context_counts_where_a_scaling_reaches_beyond(kind, length, windows, saved, tmp_path):
    scaling = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    path = rewrite(
        saved("mistral"), tmp_path, lambda config: config.update(rope_parameters=scaling, sliding_window=256)
    )
    assert load_model(open_checkpoint(path), length).config.windows == windows


@pytest.mark.parametrize("outside", [None, 50])
@pytest.mark.parametrize("kind", ["yarn", "llama3"])
def test_the_original_context_may_be_named_elsewhere(kind, outside):
    """Beside the scaling, or not at all: then it is the context."""
    scaling = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    keys = {} if outside is None else {"original_max_position_embeddings": outside}
    config = transformers.LlamaConfig(**deepcopy(SIZES | keys | {"rope_parameters": scaling}), head_dim=64)
    rope = rope_from_hf(keys | {"rope_parameters": scaling}, 64, 256, 256)
    np.testing.assert_allclose(rope.inv_freq, hf_rope(kind, config, None)[0], rtol=1e-5)


def test_yarn_is_that_of_transformers(saved, tmp_path):
    rng = np.random.default_rng()
    for number in range(20):
        scaling = {
            "rope_type": "yarn",
            "rope_theta": float(10 ** rng.uniform(2, 7)),
            "factor": float(rng.uniform(1, 40)),
            "original_max_position_embeddings": int(rng.integers(16, 9000)),
            "beta_fast": float(rng.uniform(2, 40)),
            "beta_slow": float(rng.uniform(0.5, 2)),
        }
        scaling |= {"truncate": False} if number % 3 == 0 else {}
        scaling |= {"mscale": 0.7, "mscale_all_dim": 1.2} if number % 4 == 0 else {}
        scaling |= {"attention_factor": 1.5} if number % 5 == 0 else {}
        config = transformers.LlamaConfig(**deepcopy(SIZES | {"rope_parameters": scaling}), head_dim=64)
        inv_freq, scale = hf_rope("yarn", config, None)
        rope = rope_from_hf({"rope_parameters": scaling}, 64, 256, 256)
        np.testing.assert_allclose(rope.inv_freq, inv_freq, rtol=1e-5, err_msg=str(scaling))
        assert rope.scale == pytest.approx(scale), scaling


# -- refusals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "keys", "word"),
    [
        ("falcon 7b", {"alibi": True}, "ALiBi"),
        ("falcon 7b", {"parallel_attn": False}, "sequence"),
        ("falcon 40b", {"num_kv_heads": 3}, "3 KV heads"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "inverse_layer_idx"),
        ("gpt2", {"activation_function": "mish"}, "mish"),
        ("gpt2", {"n_positions": 257}, "position_embd"),
        ("gpt2", {"n_head": 8, "n_embd": 32}, "inconsistent"),
        ("phi3", {"intermediate_size": 97}, "ffn_up"),
        ("phi3", {"num_attention_heads": 8, "head_dim": 16}, "attn_qkv"),
        ("phi3 longrope", {"rope_parameters": LONGROPE | {"long_factor": [1.0]}}, "long_factor"),
        ("phi3 longrope", {"rope_parameters": LONGROPE | {"long_factor": ["1"] * 8}}, "long_factor"),
        ("phi3 longrope", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 1}, "longrope"),
        ("mistral yarn", {"rope_parameters": YARN | {"rope_theta": 1.0}}, "base above 1"),
        ("gpt_neox", {"rope_parameters": {"partial_rotary_factor": 0.2}}, "even"),
        ("gemma2", {"layer_types": ["full_attention"]}, "layer_types"),
        ("gemma2", {"layer_types": ["full_attention", "chunked_attention"]}, "layer_types"),
        ("gemma3", {"rope_parameters": {"full_attention": {}}}, "sliding_attention"),
        ("gemma2", {"hidden_activation": "silu"}, "silu"),
        ("gpt_oss", {"num_experts_per_tok": 5}, "5 experts"),
        ("gpt_oss", {"num_local_experts": 3}, "ffn_gate_inp"),
        ("gpt_oss", {"intermediate_size": 16, "num_attention_heads": 8}, "attn_q"),
        ("gpt_oss", {"swiglu_limit": 0}, "swiglu_limit"),
        ("cohere", {"logit_scale": -1}, "logit_scale"),
    ],
)
def test_configurations_that_are_refused(family, keys, word, saved, tmp_path):
    path = rewrite(saved(family), tmp_path, lambda config: config.update(keys))
    with pytest.raises(ModelError, match=word) as caught:
        load_model(open_checkpoint(path)).program(16, "f16")
    assert str(caught.value).endswith(".") and "\n" not in str(caught.value)


def test_a_norm_of_q_without_one_of_k(saved, tmp_path):
    extra = {"model.layers.0.self_attn.q_norm.weight": np.ones((4, 16), np.float32)}
    path = rewrite(saved("cohere"), tmp_path, rename=lambda tensors: tensors | extra)
    with pytest.raises(ModelError, match="k_norm"):
        load_model(open_checkpoint(path)).program(16, "f16")
