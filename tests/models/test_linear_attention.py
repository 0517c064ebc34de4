"""Models with layers of linear attention, whose memory does not grow: how their files differ, and what is refused. What becomes
of such a memory, or that of state-space layers, when prompts begin alike, sequences fork, or one is put off. Their logits are
held to transformers' in test_more_families.py."""

from __future__ import annotations

import numpy as np
import pytest
from checkpoints import save_model
from family_ggufs import to_gguf
from session_logits import load_for_logits, logits
from test_gguf_export import written
from test_imatrix import TEXT
from test_more_families import assert_is, assert_same_logits, model_of, rewrite, saved  # noqa: F401 - a fixture

from engine import LLM, SamplingParams
from engine.errors import ConfigError, ModelError
from engine.formats import open_checkpoint
from engine.models import registry
from engine.quantize.collect import collect
from engine.quantize.mix import quant_type
from engine.quantize.to_folder import quantize_to_folder
from engine.quantize.to_gguf import quantize_to_gguf

transformers = pytest.importorskip("transformers")
DELTA = ("qwen3_next", "qwen3_5")
KINDS = (*DELTA, "nemotron_h experts", "falcon_h1")
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def _llm(folder, backend, **settings):
    return LLM(folder, backend=backend, **{"threads": 2, "kv_cache_dtype": "f32"} | settings)


def _one(llm, prompt, params=GREEDY):
    [found] = llm.generate([prompt], params)
    return found


def _ids(rng, count):
    return rng.integers(3, 300, count).tolist()


@pytest.fixture
def small_blocks(monkeypatch):
    """The memory is kept after every 32 tokens, so that short prompts share some."""
    monkeypatch.setattr(registry, "RECURRENT_BLOCK", 32)


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_that_begin_alike_share_what_was_remembered(kind, saved, backend, small_blocks):  # noqa: F811
    rng = np.random.default_rng()
    begin = _ids(rng, 70)
    prompts = [begin + _ids(rng, n) for n in (3, 40, 1)]
    with _llm(saved(kind), backend) as llm:
        alone = [_one(llm, prompt).outputs[0].token_ids for prompt in prompts]
        again = _one(llm, prompts[1])
        assert again.num_cached_tokens == 96 and again.outputs[0].token_ids == alone[1]
        other = _one(llm, begin + prompts[0][:1])
        assert other.num_cached_tokens == 64
    with _llm(saved(kind), backend, max_num_batched_tokens=24) as llm:
        together = llm.generate(prompts, GREEDY)
        assert [one.outputs[0].token_ids for one in together] == alone


@pytest.mark.parametrize("kind", KINDS)
def test_several_answers_of_one_prompt(kind, saved, backend, small_blocks):  # noqa: F811
    """They share a block that is not full until each goes its own way, and then each is as if it had been a prompt."""
    prompt = _ids(np.random.default_rng(), 41)
    several = SamplingParams(temperature=1.0, seed=7, n=3, max_tokens=40, ignore_eos=True, logprobs=0)
    with _llm(saved(kind), backend) as llm:
        found = _one(llm, prompt, several).outputs
    assert len({tuple(one.token_ids) for one in found}) == 3
    for one in found:
        tokens = list(one.token_ids)
        with _llm(saved(kind), backend) as llm:
            scored = _one(llm, prompt + tokens, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0))
        want = [scored.prompt_logprobs[len(prompt) + n][token] for n, token in enumerate(tokens)]
        got = [step[token] for step, token in zip(one.logprobs, tokens, strict=True)]
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_one_that_is_put_off_goes_on_as_before(preemption, saved, backend, small_blocks):  # noqa: F811
    rng = np.random.default_rng()
    prompts = [_ids(rng, 30) for _ in range(4)]
    long = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
    with _llm(saved("qwen3_5"), backend) as llm:
        alone = [_one(llm, prompt, long).outputs[0].token_ids for prompt in prompts]
    tight = {"kv_cache_tokens": 160, "max_model_len": 128, "max_num_seqs": 4, "preemption": preemption}
    with _llm(saved("qwen3_5"), backend, swap_space=0.01, **tight) as llm:
        together = [one.outputs[0].token_ids for one in llm.generate(prompts, long)]
        assert llm.engine.scheduler_stats().preemptions > 0
    assert together == alone


def test_each_sequence_has_a_memory(saved):  # noqa: F811
    """As many run at a time as may, however short they are."""
    with _llm(saved("qwen3_5"), "reference", max_num_seqs=6, max_model_len=96) as llm:
        recurrent = llm.loaded.memory.groups[-1]
        assert recurrent.name == "recurrent" and recurrent.blocks > 6


def fused_experts(tensors):
    found = {name: array for name, array in tensors.items() if ".experts." not in name}
    for layer in range(4):
        p = f"model.layers.{layer}.mlp.experts."
        gate, up, down = (
            np.stack([tensors[f"{p}{e}.{part}_proj.weight"] for e in range(8)]) for part in ("gate", "up", "down")
        )
        found |= {p + "gate_up_proj": np.concatenate((gate, up), axis=1), p + "down_proj": down}
    return found


def test_experts_in_one_tensor(saved, tmp_path):  # noqa: F811
    """As the published files of Qwen 3.5 have them."""

    assert_is(rewrite(saved("qwen3_5_moe"), tmp_path, rename=fused_experts), "qwen3_5_moe")


def test_a_layer_of_multi_token_prediction_is_left_out(saved, tmp_path):  # noqa: F811
    extra = {"mtp.fc.weight": np.ones((64, 128), np.float32)}
    assert_is(rewrite(saved("qwen3_next"), tmp_path, rename=lambda tensors: tensors | extra), "qwen3_next")


def test_layers_without_names(saved, tmp_path):  # noqa: F811
    """All but each fourth are of linear attention."""
    assert_is(rewrite(saved("qwen3_5"), tmp_path, lambda config: config.pop("layer_types")), "qwen3_5")


@pytest.mark.parametrize(
    ("keys", "word"),
    [
        ({"linear_num_key_heads": 3}, "3 key heads"),
        ({"linear_num_value_heads": 0}, "linear_num_value_heads"),
        ({"linear_key_head_dim": 17}, "inconsistent"),
        ({"layer_types": ["linear_attention"]}, "layer_types"),
        ({"layer_types": ["sliding_attention"] * 5}, "layer_types"),
    ],
)
@pytest.mark.parametrize("kind", DELTA)
def test_configurations_that_are_refused(kind, keys, word, saved, tmp_path):  # noqa: F811
    path = rewrite(saved(kind), tmp_path, lambda config: config.update(keys))
    with pytest.raises(ModelError, match=word) as caught:
        _llm(path, "reference")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "kind", "words"),
    [
        ({"speculate": 2}, ConfigError, "cannot take back guessed tokens"),
        ({"kv_allocator": "contiguous"}, ModelError, "KV allocator paged"),
        ({"kv_allocator": "virtual"}, ModelError, "KV allocator paged"),
    ],
)
def test_settings_that_are_refused(settings, kind, words, saved):  # noqa: F811
    with pytest.raises(kind, match=words):
        _llm(saved("qwen3_5"), "reference", **settings)


ALL_EXPERTS = "qwen3_next experts in all layers"
ARCHITECTURES = {ALL_EXPERTS: "qwen3next", "qwen3_5": "qwen35", "qwen3_5_moe": "qwen35moe"}


def as_published(config, tensors, in_one=False):
    """What the converter of GGUF files does: weights of norms are whole, rates instead of their logarithms, and the projections
    of Qwen3-Next apart (not in the first files, ``in_one``); of Qwen 3.5 the first value heads of all key heads come first."""
    found = {}
    key_heads, heads = config.linear_num_key_heads, config.linear_num_value_heads
    keys, width, share = key_heads * config.linear_key_head_dim, config.linear_value_head_dim, heads // key_heads

    def tiled(array, width):
        return array.reshape(key_heads, share, width, -1).swapaxes(0, 1).reshape(array.shape)

    def whole(array, width):
        return np.concatenate((array[: 2 * keys], tiled(array[2 * keys :], width)))

    for name, array in tensors.items():
        stem, _, own = name.rpartition("linear_attn.")
        stem += "linear_attn."
        again = "qwen3_5" in config.model_type
        if name.endswith("norm.weight") and own != "norm.weight":
            found[name] = array + 1
        elif own == "A_log":
            found[name] = -np.exp(tiled(array, 1) if again else array)
        elif own == "dt_bias":
            found[stem + "dt_proj.bias"] = tiled(array, 1) if again else array
        elif own == "conv1d.weight":
            found[name] = whole(array[:, 0], width) if again else array[:, 0]
        elif own == "in_proj_qkvz.weight" and not in_one:
            sizes = np.cumsum([config.linear_key_head_dim] * 2 + [share * width])
            parts = np.split(array.reshape(key_heads, -1, array.shape[1]), sizes, axis=1)
            q, k, v, z = (part.reshape(-1, array.shape[1]) for part in parts)
            found[stem + "in_proj_qkv.weight"], found[stem + "in_proj_z.weight"] = np.concatenate((q, k, v)), z
        elif again and own == "in_proj_qkv.weight":
            found[name] = whole(array, width)
        elif again and own in ("in_proj_z.weight", "in_proj_a.weight", "in_proj_b.weight"):
            found[name] = tiled(array, width if own == "in_proj_z.weight" else 1)
        elif again and own == "out_proj.weight":
            found[name] = np.ascontiguousarray(tiled(np.ascontiguousarray(array.T), width).T)
        else:
            found[name] = array
    return found


def gguf_of(kind, folder, path, split=None, **keys):
    config = model_of(kind).config
    keys |= {
        "rope.dimension_count": config.head_dim // 4,
        "full_attention_interval": 4,
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
    }
    if kind != "qwen3_5":
        keys |= {
            "expert_count": config.num_experts,
            "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.moe_intermediate_size,
            "expert_shared_feed_forward_length": config.shared_expert_intermediate_size,
        }
    return to_gguf(
        folder, path, ARCHITECTURES[kind], config, keys, split or (lambda tensors: as_published(config, tensors))
    )


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_a_gguf_gives_the_same_logits(kind, saved, tmp_path, backend):  # noqa: F811
    assert_same_logits(gguf_of(kind, saved(kind), tmp_path / "model.gguf"), backend, kind)


def test_a_gguf_of_the_first_files(saved, tmp_path):  # noqa: F811
    """Each key head has its query, key, values and gates together, as in the folder."""
    config = model_of(ALL_EXPERTS).config
    path = gguf_of(
        ALL_EXPERTS,
        saved(ALL_EXPERTS),
        tmp_path / "model.gguf",
        lambda found: as_published(config, found, in_one=True),
    )
    assert any(name.endswith("ssm_in.weight") for name in open_checkpoint(path).tensors)
    assert_is(path, ALL_EXPERTS)


def test_a_gguf_with_a_layer_of_multi_token_prediction(saved, tmp_path):  # noqa: F811
    """Its file counts that layer among the others. One with experts in all layers may name no other width."""
    keys = {"block_count": 5, "nextn_predict_layers": 1, "feed_forward_length": None}
    path = gguf_of("qwen3_5_moe", saved("qwen3_5_moe"), tmp_path / "model.gguf", **keys)
    assert_is(path, "qwen3_5_moe")


@pytest.mark.parametrize(
    ("keys", "word"),
    [
        ({"ssm.group_count": 3}, "3 key heads"),
        ({"ssm.inner_size": 72}, "inconsistent"),
        ({"ssm.state_size": None}, "ssm.state_size"),
    ],
)
def test_a_gguf_that_is_refused(keys, word, saved, tmp_path):  # noqa: F811
    config = model_of("qwen3_5").config
    path = to_gguf(
        saved("qwen3_5"),
        tmp_path / "model.gguf",
        "qwen35",
        config,
        {"ssm.state_size": 16, "ssm.group_count": 2, "ssm.time_step_rank": 4, "ssm.inner_size": 96} | keys,
        lambda tensors: as_published(config, tensors),
    )
    with pytest.raises(ModelError, match=word):
        _llm(path, "reference")


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_a_written_gguf_is_the_published_one(kind, saved, tmp_path):  # noqa: F811
    found = written(saved(kind), tmp_path / "found.gguf")
    want = open_checkpoint(gguf_of(kind, saved(kind), tmp_path / "want.gguf"))
    assert set(found.tensors) == set(want.tensors)
    for name, tensor in want.tensors.items():
        np.testing.assert_allclose(found.tensors[name].dense(), tensor.dense(), rtol=3e-7, err_msg=name)
    arch = ARCHITECTURES[kind]
    for key in (key for key in want.metadata if key.startswith(arch)):
        value = want.metadata[key]
        assert found.metadata[key] == (pytest.approx(value, rel=1e-6) if isinstance(value, float) else value), key
    np.testing.assert_array_equal(
        found.metadata[f"{arch}.attention.recurrent_layers"],
        [kind == "linear_attention" for kind in model_of(kind).config.layer_types],
    )
    if arch != "qwen3next":
        np.testing.assert_array_equal(found.metadata[f"{arch}.rope.dimension_sections"], [11, 11, 10, 0])


@pytest.mark.parametrize("kind", ("qwen3_next", "qwen3_5", "qwen3_5_moe"))
def test_a_written_gguf_gives_the_same_logits(kind, saved, tmp_path, cpu):  # noqa: F811
    """The first has a layer without experts."""
    assert_same_logits(written(saved(kind), tmp_path / "model.gguf").path, cpu, kind)


def test_experts_in_one_tensor_are_written_apart(saved, tmp_path):  # noqa: F811
    folder = rewrite(saved("qwen3_5_moe"), tmp_path, rename=fused_experts)
    assert_is(written(folder, tmp_path / "model.gguf").path, "qwen3_5_moe")


def test_a_folder_in_blocks_is_written(saved, tmp_path):  # noqa: F811
    """The columns of its output projections are put in order, too, which blocks do not allow."""
    quantize_to_folder(open_checkpoint(saved("qwen3_5")), tmp_path / "folder", "NF4")
    found = written(tmp_path / "folder", tmp_path / "model.gguf")
    ids = _ids(np.random.default_rng(), 50)
    got, want = (logits(load_for_logits(path, "reference"), ids, (50,)) for path in (found.path, tmp_path / "folder"))
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-4)


def test_layers_in_no_interval_are_written(saved, tmp_path):  # noqa: F811
    kinds = ["linear_attention", "full_attention", "linear_attention", "linear_attention", "full_attention"]
    config = model_of("qwen3_5").config
    config = type(config)(**{**config.to_dict(), "layer_types": kinds})
    (tmp_path / "folder").mkdir()
    folder = save_model(transformers.Qwen3_5ForCausalLM(config).float(), tmp_path / "folder")
    found = written(folder, tmp_path / "model.gguf")
    assert "qwen35.full_attention_interval" not in found.metadata
    assert found.metadata["qwen35.attention.recurrent_layers"].tolist() == [k == "linear_attention" for k in kinds]
    ids = _ids(np.random.default_rng(), 40)
    with _llm(folder, "cpu") as llm:
        want = _one(llm, ids).outputs[0].token_ids
    with _llm(found.path, "cpu") as llm:
        assert _one(llm, ids).outputs[0].token_ids == want


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_a_quantized_one_answers_and_keeps_small_tensors_whole(kind, saved, tmp_path):  # noqa: F811
    """By its folder's importance matrix, which has an entry for each matrix that the file has in blocks."""
    folder = saved(kind)
    importance = collect(folder, TEXT, "text", 24, tmp_path / "i.gguf", backend="cpu", threads=2, kv_cache_dtype="f32")
    result = quantize_to_gguf(
        open_checkpoint(folder), tmp_path / "model.gguf", quant_type("Q8_0"), importance=importance
    )
    embeddings = 1 if model_of(kind).config.tie_word_embeddings else 2
    assert [notice for notice in result.notices if "no entry" in notice] == [
        f"{embeddings} tensor{'s' * (embeddings > 1)} had no entry in the importance matrix, such as token_embd.weight."
    ]
    small = ("norm.weight", "ssm_conv1d.weight", "ssm_a", "ssm_dt.bias", "ffn_gate_inp.weight", "gate_inp_shexp.weight")
    for name, tensor in open_checkpoint(tmp_path / "model.gguf").tensors.items():
        assert (tensor.format.name == "F32") == name.endswith(small), name
    with _llm(tmp_path / "model.gguf", "cpu") as llm:
        assert len(_one(llm, _ids(np.random.default_rng(), 20)).outputs[0].token_ids) == GREEDY.max_tokens


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_the_importance_of_a_folder_is_that_of_its_gguf(kind, saved, tmp_path):  # noqa: F811
    """By the same names, in the same order of columns."""
    settings = {"backend": "cpu", "threads": 2, "kv_cache_dtype": "f32"}
    found = collect(saved(kind), TEXT, "text", 24, tmp_path / "i.gguf", **settings)
    want = collect(
        written(saved(kind), tmp_path / "model.gguf").path, TEXT, "text", 24, tmp_path / "j.gguf", **settings
    )
    assert set(found.entries) == set(want.entries)
    for name, entry in want.entries.items():
        np.testing.assert_allclose(found.entries[name].sums, entry.sums, rtol=1e-2, atol=1e-4, err_msg=name)
