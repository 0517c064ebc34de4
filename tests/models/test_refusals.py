"""What is not supported, or does not fit, is refused at load in one sentence."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tiny_models
from safetensors.numpy import load_file, save_file

from engine.errors import FormatError, ModelError
from engine.formats import open_checkpoint
from engine.models import load_model

torch = pytest.importorskip("torch")


def program(path):
    return load_model(open_checkpoint(path)).program(16, "f16")


def assert_refused(path, *words):
    with pytest.raises(ModelError) as caught:
        program(path)
    sentence = str(caught.value)
    assert "\n" not in sentence and sentence.endswith("."), sentence
    for word in words:
        assert word in sentence, sentence


@pytest.fixture
def folder(llama, tmp_path):
    """A copy of the tiny llama to damage."""
    for file in llama.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def configure(folder, **keys):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def change(folder, name, change_or_none):
    tensors = load_file(folder / "model.safetensors")
    array = tensors.pop(name)
    if change_or_none is not None:
        tensors[name] = np.ascontiguousarray(change_or_none(array))
    save_file(tensors, folder / "model.safetensors")


def test_the_tiny_llama_itself_is_good(folder, tmp_path):
    assert program(folder).vocab == tiny_models.VOCAB
    assert program(tiny_models.to_gguf(folder, tmp_path / "m.gguf")).vocab == tiny_models.VOCAB


def test_unknown_architecture_names_the_known(folder, tmp_path):
    configure(folder, model_type="mamba9")
    assert_refused(folder, "mamba9", "llama, internlm3, iquestcoder, mixtral, qwen2, qwen2_vl_text")


def test_unknown_architecture_in_gguf(tmp_path):
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "rwkv77")
    writer.add_tensor("token_embd.weight", np.zeros((8, 32), np.float32))
    tiny_models.finish(writer)
    assert_refused(tmp_path / "m.gguf", "rwkv77", "llama, qwen2, qwen2vl, qwen3")


def test_a_gguf_of_a_vocabulary_only(tmp_path):
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    tiny_models.finish(writer)
    assert_refused(tmp_path / "m.gguf", "vocabulary", "token_embd.weight")


def test_adapters(tmp_path):
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_type("adapter")
    writer.add_tensor("blk.0.attn_q.weight.lora_a", np.ones((8, 64), np.float32))
    tiny_models.finish(writer)
    assert_refused(tmp_path / "m.gguf", "adapter", "token_embd.weight")
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(FormatError, match="an adapter and no model; merge it"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("keys", [{"sliding_window": 128}, {"sliding_window": 255, "use_sliding_window": True}])
def test_sliding_windows(folder, keys):
    configure(folder, **keys)
    assert_refused(folder, "sliding window", str(keys["sliding_window"]), "256")


@pytest.mark.parametrize(
    "keys", [{"sliding_window": 256}, {"sliding_window": 64, "use_sliding_window": False}, {"sliding_window": None}]
)
def test_windows_that_change_nothing(folder, keys):
    configure(folder, **keys)
    assert program(folder).groups[0].kind == "full"


def test_sliding_window_in_gguf(folder, tmp_path):
    narrow = {"attention.sliding_window": 32}
    model = load_model(open_checkpoint(tiny_models.to_gguf(folder, tmp_path / "m.gguf", **narrow)))
    assert model.family == "mistral" and set(model.config.windows) == {32}
    wide = {"attention.sliding_window": 4096}
    assert program(tiny_models.to_gguf(folder, tmp_path / "w.gguf", **wide)).vocab == tiny_models.VOCAB


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.norm.weight",
        "model.layers.1.self_attn.k_proj.weight",
        "model.layers.0.mlp.down_proj.weight",
        "model.layers.0.input_layernorm.weight",
        "lm_head.weight",
    ],
)
def test_missing_tensors_are_named(folder, name):
    change(folder, name, None)
    assert_refused(folder, "lacks", name)


def test_attention_in_both_directions_of_unknown_kinds_is_named(folder):
    configure(folder, use_bidirectional_attention=False)
    assert program(folder).vocab == tiny_models.VOCAB
    configure(folder, use_bidirectional_attention=True)
    assert_refused(folder, "both directions", "use_bidirectional_attention")
    configure(folder, use_bidirectional_attention=False, is_causal=False, model_type="mistral", sliding_window=16)
    assert_refused(folder, "both directions", "window")


def test_a_head_may_be_missing_where_it_is_tied(folder):
    change(folder, "lm_head.weight", None)
    configure(folder, tie_word_embeddings=True)
    weights = program(folder).head[0].weights["weight"]
    assert weights.name == "token_embd.weight"


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("model.embed_tokens.weight", lambda a: a[:-1]),
        ("model.embed_tokens.weight", lambda a: a[:, :-32]),
        ("lm_head.weight", lambda a: a[:-1]),
        ("lm_head.weight", lambda a: a.T),
        ("model.norm.weight", lambda a: a[:-1]),
        ("model.norm.weight", lambda a: a[:, None]),
        ("model.layers.0.self_attn.q_proj.weight", lambda a: a[:32]),
        ("model.layers.0.self_attn.q_proj.weight", lambda a: a.reshape(2, 32, 64)),
        ("model.layers.1.self_attn.k_proj.weight", lambda a: np.concatenate([a, a])),
        ("model.layers.1.self_attn.v_proj.weight", lambda a: a[:-1]),
        ("model.layers.0.self_attn.o_proj.weight", lambda a: a[:32]),
        ("model.layers.0.mlp.gate_proj.weight", lambda a: a[:-32]),
        ("model.layers.0.mlp.down_proj.weight", lambda a: a[:-1]),
    ],
)
def test_wrong_shapes_are_refused(folder, name, changed):
    change(folder, name, changed)
    assert_refused(folder)


def test_a_bias_of_the_wrong_size(folder):
    change(folder, "model.norm.weight", lambda a: a)  # rewrite, so that one more can be added
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"model.layers.0.self_attn.q_proj.bias": np.ones(63, np.float32)}, folder / "model.safetensors")
    assert_refused(folder, "blk.0.attn_q.bias")


def test_tensors_that_nothing_uses_are_refused(folder):
    tensors = load_file(folder / "model.safetensors")
    extra = "model.layers.0.self_attn.q_norm.weight"
    save_file(tensors | {extra: np.ones(16, np.float32)}, folder / "model.safetensors")
    assert_refused(folder, extra)


def test_weights_of_a_dtype_of_scales(folder):
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = torch.ones(tensors[name].shape).to(torch.float8_e8m0fnu)
    save_file(tensors, folder / "model.safetensors")
    assert_refused(folder, "blk.0.ffn_up.weight is stored as F8_E8M0")


def test_frequencies_that_old_files_carry_are_passed_over(folder):
    tensors = load_file(folder / "model.safetensors")
    extra = "model.layers.0.self_attn.rotary_emb.inv_freq"
    save_file(tensors | {extra: np.ones(8, np.float32)}, folder / "model.safetensors")
    assert program(folder).vocab == tiny_models.VOCAB


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("keys", "word"),
    [
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"num_hidden_layers": 3}, "model.layers.2"),
        ({"num_attention_heads": 3}, "3 attention heads"),
        ({"vocab_size": 321}, "token_embd.weight"),
        ({"head_dim": 32}, "attn_q"),
        ({"rms_norm_eps": -1}, "rms_norm_eps"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": "2"}}, "factor"),
        ({"rope_scaling": [1]}, "rope scaling"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor"),
        ({"rope_scaling": {k: v for k, v in LLAMA3.items() if k != "low_freq_factor"}}, "low_freq_factor"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}}, "high_freq_factor"),
        ({"rope_theta": "big"}, "rope_theta"),
        ({"max_position_embeddings": -5}, "max_position_embeddings"),
    ],
)
def test_configurations_that_make_no_sense(folder, keys, word):
    configure(folder, **keys)
    assert_refused(folder, word)


@pytest.mark.parametrize(
    ("keys", "word"),
    [
        ({"attention.head_count": 0}, "head_count"),
        ({"attention.head_count": 3}, "3 attention heads"),
        ({"rope.dimension_count": 64}, "rotary"),
        ({"rope.scaling.type": "yarn"}, "yarn"),
        ({"rope.scaling.type": "linear"}, "scaling.factor"),
        ({"attention.sliding_window": 8, "attention.sliding_window_pattern": [True]}, "sliding_window_pattern"),
        ({"attention.sliding_window": 8, "attention.sliding_window_pattern": "all"}, "sliding_window_pattern"),
        ({"expert_count": 4, "expert_used_count": 5}, "5 experts"),
    ],
)
def test_gguf_keys_that_make_no_sense(folder, tmp_path, keys, word):
    path = tiny_models.to_gguf(folder, tmp_path / "m.gguf", **keys)
    assert_refused(path, word)


def test_mixtral_lacking_an_expert(tmp_path):
    pytest.importorskip("transformers")
    from checkpoints import save

    save("mixtral", tmp_path)
    change(tmp_path, "model.layers.1.block_sparse_moe.experts.3.w2.weight", None)
    assert_refused(tmp_path, "experts.3.w2")


def test_experts_that_differ_in_shape(tmp_path):
    pytest.importorskip("transformers")
    from checkpoints import save

    save("mixtral", tmp_path)
    change(tmp_path, "model.layers.1.block_sparse_moe.experts.3.w2.weight", lambda a: a[:32])
    assert_refused(tmp_path, "ffn_down_exps")
