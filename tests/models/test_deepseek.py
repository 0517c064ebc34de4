"""DeepSeek V2 and V3, and Mistral Small 4, against transformers, from both formats: latent attention absorbed, grouped routing,
YaRN."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import tiny_models
from checkpoints import SIZES, assert_logits, logits_of, saved_once
from family_ggufs import to_gguf
from safetensors.numpy import load_file, save_file
from session_logits import load_for_logits, logits

from engine import LLM, SamplingParams
from engine.errors import ModelError
from engine.formats import FORMATS, InputSpec, Tensor, open_checkpoint
from engine.models import load_model
from engine.program.weights import TransposedHeadWeight, of_heads, single

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
GROWING = YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 16}
GROWING |= {"llama_4_scaling_beta": 0.6}
WIDE = {"kv_lora_rank": 64, "q_lora_rank": 64, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}
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
    "v3 one group": ("DeepseekV3", V3 | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 0}),
    "mistral4": ("Mistral4", V3 | {"n_group": 1, "topk_group": 1, "rope_parameters": GROWING}),
    "mistral4 grouped, halves": ("Mistral4", V3 | {"rope_interleave": False, "rope_parameters": GROWING}),
    "v3 dense, wide": ("DeepseekV3", V3 | WIDE | {"first_k_dense_replace": 3}),  # of blocks, and no choice to tip over
}
WITHOUT_GGUF = ("v2 biases", "v3 halves, not renormalized", "mistral4 grouped, halves")
WITH_GGUF = [name for name in MODELS if name not in WITHOUT_GGUF]


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


@cache
def tipped(name):
    """The model twice more, its routers moved a little to either side."""
    models = deepcopy(model_of(name)), deepcopy(model_of(name))
    with torch.no_grad():
        for (parameter_name, up), down in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
            if parameter_name.endswith("mlp.gate.weight"):
                change = 1e-5 * torch.randn_like(up)
                up.copy_(up + change)
                down.copy_(down - change)
    return models


def is_clear(name, ids):
    """Whether no token's experts are so nearly tied that rounding chooses them, which changes its logits much."""
    want = logits_of(model_of(name), ids)
    return all(np.abs(logits_of(model, ids) - want).max() < 5e-3 for model in tipped(name))


saved = saved_once(model_of)


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
            "attention.temperature_scale": rope.get("llama_4_scaling_beta"),
        }
    return keys


def gguf_of(name, folder, path, absorbed, keys=None, raw_dtype="F32"):
    config = model_of(name).config

    def split(tensors):
        found = {n.replace("e_score_correction_bias", "e_score_correction.bias"): a for n, a in tensors.items()}
        for key in [n for n in found if n.endswith("_proj")]:  # of all experts
            found[f"{key}.weight"] = found.pop(key)
        for key in [n for n in found if absorbed and "kv_b_proj" in n]:
            both = found.pop(key).reshape(config.num_attention_heads, -1, config.kv_lora_rank)
            k, v = both[:, : config.qk_nope_head_dim], both[:, config.qk_nope_head_dim :]
            found |= {key.replace("kv_b", "k_b"): k.swapaxes(1, 2), key.replace("kv_b", "v_b"): v}
        return found

    arch = "mistral4" if config.model_type == "mistral4" else "deepseek2"
    return to_gguf(folder, path, arch, config, gguf_keys(config, absorbed) | (keys or {}), split, raw_dtype)


def random_ids(count):
    return np.random.default_rng().integers(3, tiny_models.VOCAB, count).tolist()


def clear_ids(name, count):
    return next(ids for ids in (random_ids(count) for _ in range(100)) if is_clear(name, ids))


def assert_same_logits(path, backend, name):
    loaded = load_for_logits(path, backend)
    for chunks in (*CHUNKS, LONG) if backend == "cpu" else CHUNKS:
        ids = clear_ids(name, sum(chunks))
        assert_logits(logits(loaded, ids, chunks), model_of(name), ids, f"{chunks}")


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(name, saved, backend):
    assert_same_logits(saved(name), backend, name)


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_transformers(name, saved, cpu):
    """Each token is transformers' best after the tokens before it, or within 1e-3 of that."""
    prompts = [random_ids(n) for n in (1, 17, 60)]
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    with LLM(saved(name), backend=cpu, kv_cache_dtype="f32", threads=2, max_num_batched_tokens=32) as llm:
        outputs = llm.generate(prompts, params)
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = list(output.outputs[0].token_ids)
        steps = logits_of(model_of(name), prompt + tokens)[len(prompt) - 1 : -1]
        behind = steps.max(axis=1) - steps[np.arange(20), tokens]
        assert (behind <= 1e-3).all() or not is_clear(name, prompt + tokens), (
            f"{prompt}: at token {int(np.argmax(behind > 1e-3))}"
        )


@pytest.mark.parametrize("absorbed", [False, True], ids=["kv_b", "k_b and v_b"])
@pytest.mark.parametrize("name", WITH_GGUF)
def test_a_gguf_gives_the_same_logits(name, absorbed, tmp_path, saved, cpu):
    assert_same_logits(gguf_of(name, saved(name), tmp_path / "model.gguf", absorbed), cpu, name)


@pytest.mark.parametrize(("name", "score"), [("v3", "sigmoid"), ("v2 lite", "softmax")])
def test_a_gguf_that_does_not_name_its_scores(name, score, tmp_path, saved):
    """V2's first files, and GLM 4.7 Flash's, whose routers have a correction bias."""
    unsaid = {"expert_gating_func": None, "expert_weights_norm": None}
    config = load_model(open_checkpoint(gguf_of(name, saved(name), tmp_path / "m.gguf", True, unsaid))).config
    assert (config.routing["score"], config.renormalize) == (score, False)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "int16", "int8"])
def test_everything_is_on_the_device_and_chunks_change_no_bit(name, dtype, saved, cpu):
    loaded = load_for_logits(saved(name), cpu, strict=True, kv_cache_dtype=dtype)
    assert not loaded.placement.fallbacks()
    ids = random_ids(60)
    whole = logits(loaded, ids, (60,))
    for chunks in ((1, 15, 1, 40, 3), (17, *[1] * 43)):
        assert np.array_equal(logits(loaded, ids, chunks), whole)


@pytest.mark.parametrize("name", ["v2 lite", "v3"])
def test_alone_is_as_in_a_batch(name, saved, cpu):
    prompts = [random_ids(n) for n in (5, 33, 60, 2)]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=3)
    with LLM(saved(name), backend=cpu, threads=2, max_num_batched_tokens=40) as llm:
        together = llm.generate(prompts, params)
        for prompt, beside in zip(prompts, together, strict=True):
            [alone] = llm.generate([prompt], params)
            assert alone.outputs[0].token_ids == beside.outputs[0].token_ids
            assert alone.outputs[0].logprobs == beside.outputs[0].logprobs


@pytest.mark.parametrize(("dtype", "size"), [("f32", 4), ("f16", 2), ("bf16", 2), ("int8", 1)])
def test_a_token_takes_one_latent_and_one_rotary_key_a_layer(dtype, size, saved, backend):
    loaded = load_for_logits(saved("v3"), backend, kv_cache_dtype=dtype)
    assert [group.kind for group in loaded.program.groups] == ["latent"]
    width = HEADS["kv_lora_rank"] + HEADS["qk_rope_head_dim"]
    scales = 4 if dtype == "int8" else 0
    assert loaded.memory.groups[0].bytes_a_token == EXPERTS["num_hidden_layers"] * (width * size + scales)


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


def test_the_published_files_of_v3(saved, tmp_path, cpu):
    """rope_scaling of old, and a layer of multi-token prediction behind the others."""

    def old(config):
        rope = config.pop("rope_parameters")
        config |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope, "num_nextn_predict_layers": 1}
        rope["type"] = rope.pop("rope_type")

    extra = {"model.layers.3.eh_proj.weight": np.ones((64, 128), np.float32)}
    path = rewrite(saved("v3 yarn, plain q"), tmp_path, old, lambda tensors: tensors | extra)
    ids = clear_ids("v3 yarn, plain q", 50)
    got = logits(load_for_logits(path, cpu), ids, (50,))
    assert_logits(got, model_of("v3 yarn, plain q"), ids)


def test_kimi_k2_is_made_like_v3(saved, tmp_path):
    path = rewrite(saved("v3"), tmp_path, lambda config: config.update(model_type="kimi_k2"))
    ids = clear_ids("v3", 40)
    assert_logits(logits(load_for_logits(path, "reference"), ids, (40,)), model_of("v3"), ids)


def test_queries_of_deepseeks_files_that_grow(saved, tmp_path):
    """As Mistral Large 3's, whose span has a key of its own there."""
    keys = {"attention.temperature_scale": 0.6, "attention.temperature_length": 16}
    path = gguf_of("v3", saved("v3"), tmp_path / "m.gguf", absorbed=True, keys=keys)
    config = load_model(open_checkpoint(path)).config
    assert (config.query_growth, config.query_span) == (pytest.approx(0.6), 16)
    none = gguf_of("v3", saved("v3"), tmp_path / "none.gguf", absorbed=True, keys={"attention.temperature_scale": 0.0})
    assert load_model(open_checkpoint(none)).config.query_growth == 0
    ids = random_ids(40)
    grown, plain = (logits(load_for_logits(p, "reference"), ids, (40,)) for p in (path, saved("v3")))
    np.testing.assert_allclose(grown[:16], plain[:16], rtol=0, atol=1e-3)
    assert np.abs(grown[16:] - plain[16:]).max() > 0.1


def test_a_gguf_with_a_layer_of_multi_token_prediction(saved, tmp_path):
    """Its block_count counts that layer."""
    keys = {"block_count": 4, "nextn_predict_layers": 1}
    checkpoint = open_checkpoint(gguf_of("v3", saved("v3"), tmp_path / "m.gguf", absorbed=True, keys=keys))
    extra = {"blk.3.nextn.eh_proj.weight": checkpoint.tensors["blk.2.attn_output.weight"]}
    for tensors in (checkpoint.tensors, checkpoint.tensors | extra):
        model = load_model(replace(checkpoint, tensors=tensors))
        model.program(16, "f32")
        assert model.config.layers == 3


@pytest.mark.parametrize("precision", ["f16", "q8_0, kv_b", "q8_0, k_b and v_b"])
def test_in_fewer_bits(precision, saved, tmp_path, cpu):
    """kv_b is taken apart in the format of the file, and W_UK decoded where that is in blocks."""
    name, folder = "v3 dense, wide", saved("v3 dense, wide")
    if precision == "f16":
        path = rewrite(folder, tmp_path, rename=lambda tensors: {n: in_f16(a) for n, a in tensors.items()})
        tolerance = 2e-4
    else:
        path = gguf_of(name, folder, tmp_path / "m.gguf", absorbed="k_b" in precision, raw_dtype="Q8_0")
        tolerance = 0.1
    ids = random_ids(50)
    want = logits(load_for_logits(path, "reference"), ids, (50,))
    got = logits(load_for_logits(path, cpu, strict=True), ids, (49, 1))
    error = np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2))
    assert error < tolerance
    theirs = logits_of(model_of(name), ids)
    assert np.sqrt(np.mean((want - theirs) ** 2) / np.mean(theirs**2)) < 0.1, "the file is another model"


def in_f16(array):
    return array.astype(np.float16) if array.ndim > 1 else array


# -- refusals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "keys", "word"),
    [
        ("v2 lite", {"norm_topk_prob": True}, "norm_topk_prob"),
        ("v2 lite", {"topk_method": "noaux_tc"}, "topk_method"),
        ("v2 lite", {"moe_layer_freq": 2}, "moe_layer_freq"),
        ("v2 lite", {"v_head_dim": 13}, "attn_kv_b"),
        ("v2 lite", {"qk_nope_head_dim": 15}, "attn_q"),
        ("v3", {"kv_lora_rank": 23}, "attn_kv_a_mqa"),
        ("v3", {"kv_lora_rank": None}, "kv_lora_rank"),
        ("v3", {"kv_lora_rank": 1 << 20}, "attn_kv_a_mqa"),
        ("v3", {"q_lora_rank": None}, "q_proj"),
        ("v3", {"q_lora_rank": 41}, "attn_q_a"),
        ("v3", {"n_group": 3}, "3 groups"),
        ("v3", {"n_group": 8}, "8 groups"),
        ("v3", {"topk_group": 5}, "5 of 4 groups"),
        ("v3", {"topk_group": 1}, "1 of 4 groups"),
        ("v3", {"n_routed_experts": 16}, "experts"),
        ("v3", {"n_shared_experts": 0}, "shared_experts"),
        ("v3", {"n_shared_experts": 1}, "32 wide"),
        ("v3", {"norm_topk_prob": "yes"}, "norm_topk_prob"),
        ("v3", {"routed_scaling_factor": "2"}, "routed_scaling_factor"),
    ],
)
def test_configurations_that_are_refused(name, keys, word, saved, tmp_path):
    path = rewrite(saved(name), tmp_path, lambda config: config.update(keys))
    with pytest.raises(ModelError, match=word) as caught:
        load_model(open_checkpoint(path)).program(16, "f16")
    assert str(caught.value).endswith(".") and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "word"),
    [
        ({"attention.key_length_mla": 8}, "rotary"),
        ({"expert_gating_func": 3}, "expert_gating_func"),
        ({"nextn_predict_layers": 3}, "nextn_predict_layers"),
        ({"expert_count": 16}, "has 16"),
        ({"expert_used_count": 9}, "9 experts"),
        ({"attention.kv_lora_rank": 25}, "attn_kv_a_mqa"),
        ({"attention.value_length_mla": 11}, "attn_v_b"),
        ({"attention.key_length_mla": 25, "attention.kv_lora_rank": 24}, "attn_q_b"),
    ],
)
def test_gguf_keys_that_are_refused(keys, word, saved, tmp_path):
    path = gguf_of("v3", saved("v3"), tmp_path / "m.gguf", absorbed=True, keys=keys)
    with pytest.raises(ModelError, match=word) as caught:
        load_model(open_checkpoint(path)).program(16, "f16")
    assert str(caught.value).endswith(".") and "\n" not in str(caught.value)


# -- parts of weights ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "Q8_0"])
def test_rows_of_heads_and_their_transposition(name):
    encoded = FORMATS[name].encode(np.random.default_rng().standard_normal((3 * 10, 64), np.float32))
    tensor = Tensor("w", (30, 64), FORMATS[name], encoded.reshape(-1))
    part = of_heads("part", single("w", tensor), 3, 10, slice(4, 9))
    values = tensor.dense().reshape(3, 10, 64)[:, 4:9]
    turned = TransposedHeadWeight("turned", part)
    for weight, want in ((part, values), (turned, values.swapaxes(1, 2))):
        assert weight.shape == want.shape
        np.testing.assert_array_equal(weight.dense(), want)
        rows = FORMATS[weight.format].decode(weight.rows())
        np.testing.assert_array_equal(rows, want.reshape(len(rows), -1))
        for start, stop in ((0, 3), (2, 7), (5, 15), (6, None)):
            np.testing.assert_array_equal(weight.rows(start, stop), weight.rows()[start:stop])
    assert part.format == name and turned.format == ("F32" if name == "Q8_0" else name)
    with pytest.raises(ModelError, match="heads"):
        of_heads("part", single("w", tensor), 4, 10, slice(0, 5))
    for asked in (InputSpec(columns=np.arange(64, dtype=np.int32)), InputSpec(quantized="required", scale=0.1)):
        with pytest.raises(ModelError, match="act-order"):
            of_heads("part", single("w", replace(tensor, input=asked)), 3, 10, slice(0, 5))
