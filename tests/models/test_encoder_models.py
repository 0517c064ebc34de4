"""Encoders against transformers: the states of each token, which see what comes later, and vectors made of them."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tiny_models
from checkpoints import save_model
from encoder_models import ENCODERS, as_published, encoder_gguf, encoder_of, states_of
from safetensors.numpy import load_file, save_file

from engine import LLM, SamplingParams
from engine.errors import AdmissionError, ConfigError, EngineError, ModelError, RequestError
from engine.formats import open_checkpoint
from engine.models import load_model

LENGTHS = (1, 2, 17, 60, 200)
SHORT = (1, 17, 60)
GGUFS = [name for name, (_, arch, _) in ENCODERS.items() if arch]


def inputs(rng, lengths=LENGTHS):
    return [rng.integers(6, tiny_models.VOCAB, n).tolist() for n in lengths]  # no padding among them


def assert_is(path, name, lengths=LENGTHS, **settings):
    """The states, by means of all, those of the first token and those of the last."""
    given = inputs(np.random.default_rng(), lengths)
    states = [states_of(name, ids) for ids in given]
    with LLM(path, kv_cache_dtype="f32", threads=2, **settings) as llm:
        for pooling, chosen in (("mean", lambda s: s.mean(0)), ("cls", lambda s: s[0]), ("last", lambda s: s[-1])):
            for got, whole in zip(llm.embed(given, pooling, normalize=False), states, strict=True):
                want = chosen(whole)
                np.testing.assert_allclose(got, want, atol=2e-4 * max(np.abs(want).max(), 0.2))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("name", ENCODERS)
def test_states_are_transformers(tmp_path, name, backend):
    lengths = LENGTHS if backend == "cpu" else SHORT
    assert_is(save_model(encoder_of(name), tmp_path / "folder"), name, lengths, backend=backend)


@pytest.mark.parametrize("name", GGUFS)
def test_states_of_a_gguf(tmp_path, name):
    path = encoder_gguf(name, tmp_path / "model.gguf")
    assert_is(path, name, backend="cpu")
    with LLM(path, backend="cpu") as llm:  # as its key says
        ids = inputs(np.random.default_rng(), (30,))
        assert (llm.embed(ids) == llm.embed(ids, "cls")).all()


@pytest.mark.parametrize(
    ("name", "backend"),
    [("bert", "metal"), ("bert", "opencl"), ("modernbert", "metal"), ("modernbert", "opencl"), ("modernbert", "jax")],
)
def test_other_devices(tmp_path, name, backend):
    assert_is(save_model(encoder_of(name), tmp_path / "folder"), name, SHORT, backend=backend)


def test_the_same_bits_in_any_company(tmp_path):
    """Of few places, of a step that holds one of them and no more, and with caches of whole numbers."""
    path, given = (
        save_model(encoder_of("modernbert"), tmp_path / "folder"),
        inputs(np.random.default_rng(), (5, 199, 64, 1, 64, 200)),
    )
    given += [given[1][:40], given[1]]
    for dtype in ("auto", "int8"):
        with LLM(path, backend="cpu", kv_cache_dtype=dtype) as llm:
            alone = np.concatenate([llm.embed([ids], "mean") for ids in given])
            assert (llm.embed(given, "mean") == alone).all()
            assert np.abs(alone - alone[0]).max() > 0.01
        for settings in (
            {"threads": 1},
            {"max_num_seqs": 2, "max_model_len": 200},
            {"kv_cache_tokens": 272},
            {"max_num_batched_tokens": 256},
        ):
            with LLM(path, backend="cpu", kv_cache_dtype=dtype, **settings) as llm:
                assert (llm.embed(given, "mean") == alone).all()


def test_what_embedding_gemma_makes_of_its_states(tmp_path):
    """In a GGUF two matrices behind the pooled vector."""
    rng, ids = np.random.default_rng(), inputs(np.random.default_rng(), (9, 100))
    wide, back = rng.standard_normal((128, 64), np.float32) / 8, rng.standard_normal((48, 128), np.float32) / 8
    matrices = {"dense_2.weight": wide, "dense_3.weight": back}
    with LLM(
        encoder_gguf("embedding gemma", tmp_path / "model.gguf", matrices), backend="cpu", kv_cache_dtype="f32"
    ) as llm:
        got = llm.embed(ids, "mean", normalize=False)
    for one, given in zip(got, ids, strict=True):
        want = back.astype(np.float64) @ (wide @ states_of("embedding gemma", given).mean(0))
        np.testing.assert_allclose(one, want, atol=2e-4 * np.abs(want).max())


def test_two_ranks(tmp_path):
    path = save_model(encoder_of("bert"), tmp_path / "folder")
    assert_is(path, "bert", backend="cpu", tensor_parallel_size=2)


def test_nothing_is_generated(tmp_path):
    path = save_model(encoder_of("bert"), tmp_path / "folder")
    with (
        LLM(path, backend="cpu") as llm,
        pytest.raises(RequestError, match="is an encoder; it can embed texts, and not generate"),
    ):
        llm.generate([[5, 6]], SamplingParams(max_tokens=1))


def test_what_is_too_long_is_refused(tmp_path):
    """RoBERTa's positions begin behind the padding's id, so 250 of 256 are left."""
    path = save_model(encoder_of("camembert"), tmp_path / "folder")
    with LLM(path, backend="cpu") as llm:
        assert llm.embed([[7] * 250]).shape == (1, 64)
        with pytest.raises(AdmissionError, match="251 tokens, and the context holds 250"):
            llm.embed([[7] * 251])
    with pytest.raises(
        ConfigError, match=r"max_num_batched_tokens is 64, .* allow 250, or set max_model_len to at most 64"
    ):
        LLM(path, backend="cpu", max_num_batched_tokens=64)
    with LLM(path, backend="cpu", max_num_batched_tokens=64, max_model_len=64) as llm:
        assert llm.embed([[7] * 64]).shape == (1, 64)


def changed(path, config=lambda data: {}, tensors=lambda held: held):
    data = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(data | config(data)))
    save_file(tensors(load_file(path / "model.safetensors")), path / "model.safetensors")
    return path


@pytest.mark.parametrize(
    ("name", "prefix", "head"),
    [
        ("bert", "bert.", "cls.predictions.bias"),
        ("roberta", "roberta.", "lm_head.bias"),
        ("distilbert", "distilbert.", "vocab_projector.bias"),
        ("nomic_bert", "nomic_bert.", "cls.predictions.bias"),
        ("modernbert", "model.", "decoder.bias"),
        ("eurobert", "model.", "lm_head.weight"),
    ],
)
def test_files_of_models_for_masked_tokens(tmp_path, name, prefix, head):
    """Prefixed, with a head that is left out; BERT's first files call what norms have gamma and beta."""
    path, vocab = save_model(encoder_of(name), tmp_path / "folder"), tiny_models.VOCAB

    def whole(held):
        of_old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"} if name == "bert" else {}
        found = {head: np.zeros((vocab, 64) if head.endswith("weight") else vocab, np.float32)}
        for own, array in held.items():
            end = next((end for end in of_old if own.endswith(end)), None)
            found[prefix + (own if end is None else own.removesuffix(end) + of_old[end])] = array
        return found

    assert_is(changed(path, tensors=whole), name, backend="cpu")
    extra = {"adapter.weight": np.zeros((2, 64), np.float32)}
    with pytest.raises(ModelError, match=r"adapter\.weight"):
        LLM(changed(path, tensors=lambda held: held | extra), backend="cpu")


def test_modernbert_s_first_files(tmp_path):
    """Which layers see all is told by one number, and the bases of their rotary embeddings have keys of their own."""
    path = save_model(encoder_of("modernbert"), tmp_path / "folder")
    data = json.loads((path / "config.json").read_text())
    del data["layer_types"], data["rope_parameters"]
    old = {"global_attn_every_n_layers": 3, "global_rope_theta": 5000.0, "local_rope_theta": 100.0}
    (path / "config.json").write_text(json.dumps(data | old))
    assert_is(path, "modernbert", backend="cpu")
    (path / "config.json").write_text(json.dumps(data | old | {"global_attn_every_n_layers": 2}))
    assert [bool(window) for window in load_model(open_checkpoint(path)).config.windows] == [False, True, False]


def test_nomics_own_files(tmp_path):
    """By its makers' names and keys."""
    path = save_model(encoder_of("nomic_bert"), tmp_path / "folder")
    own = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_inner": 96, "n_positions": 256, "rotary_emb_base": 700}
    own |= {"activation_function": "swiglu", "layer_norm_epsilon": 0.05, "rotary_emb_fraction": 1.0, "prenorm": False}
    own |= {"model_type": "nomic_bert", "vocab_size": tiny_models.VOCAB, "rotary_scaling_factor": None}
    (path / "config.json").write_text(json.dumps(own))
    held = as_published("NomicBert", load_file(path / "model.safetensors"))
    assert any("Wqkv" in name for name in held)
    save_file(held, path / "model.safetensors")
    assert_is(path, "nomic_bert", backend="cpu")


@pytest.mark.parametrize(
    ("name", "keys", "word"),
    [
        ("bert", {"is_decoder": True}, "is_decoder"),
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ("roberta", {"max_position_embeddings": 2}, "positions"),
        ("roberta", {"max_position_embeddings": 300}, "position"),
        ("nomic_bert", {"prenorm": True}, "prenorm"),
        ("nomic_bert", {"activation_function": "gelu"}, "activation_function"),
        ("modernbert", {"layer_types": ["full_attention"]}, "layer_types"),
    ],
)
def test_variants_are_refused(tmp_path, name, keys, word):
    path = changed(save_model(encoder_of(name), tmp_path / "folder"), lambda data: keys)
    with pytest.raises(ModelError, match=word):
        load_model(open_checkpoint(path)).program(16, "f32")


@pytest.mark.parametrize("name", ["embeddings.position_embeddings.weight", "embeddings.token_type_embeddings.weight"])
def test_tables_of_another_width_are_refused(tmp_path, name):
    path = changed(
        save_model(encoder_of("bert"), tmp_path / "folder"),
        tensors=lambda held: held | {name: np.ascontiguousarray(held[name][:, :32])},
    )
    with pytest.raises(ModelError, match="rows of 64"):
        load_model(open_checkpoint(path)).program(16, "f32")


def test_predictions_are_not_measured(tmp_path):
    from engine.evaluate.forward import Forward
    from engine.runtime.config import EngineConfig
    from engine.runtime.load import load

    loaded = load(EngineConfig(model=str(save_model(encoder_of("bert"), tmp_path / "folder")), backend="cpu"))
    with pytest.raises(EngineError, match="is an encoder, which predicts no tokens"):
        Forward(loaded)
    loaded.close()
