"""Embeddings: transformers' hidden states pooled, bitwise the same in any chunks, company and memory; what files say of them."""

from __future__ import annotations

import asyncio
import json
import queue
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import tiny_models
from safetensors.numpy import load_file, save_file

from engine import LLM, AsyncLLM, SamplingParams
from engine.errors import AdmissionError, EngineError, FormatError, RequestError
from engine.formats import open_checkpoint
from engine.runtime.load import Loaded
from engine.runtime.pooling import Pooler, PoolingParams, stacked
from engine.testing.checkpoints import VOCAB, write_checkpoint

KINDS = ("last", "mean", "cls")
LENGTHS = (1, 2, 17, 60, 127, 128)


def inputs(rng, lengths=LENGTHS):
    return [rng.integers(3, VOCAB, n).tolist() for n in lengths]


def pooled(states, pooling):
    return {"last": states[-1], "mean": states.mean(0), "cls": states[0]}[pooling]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2"])
def test_hidden_states_are_transformers(tmp_path, cpu, kind):
    """In chunks of 40 tokens. States are some units large; sums in f32 differ by 1e-5 of that."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    rng = np.random.default_rng()
    folder, given = write_checkpoint(kind, tmp_path / kind, rng), inputs(rng)
    peer = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        states = [peer(torch.tensor([ids])).last_hidden_state[0].numpy().astype(np.float64) for ids in given]
    settings = {"backend": cpu, "threads": 2, "kv_cache_dtype": "f32", "max_num_batched_tokens": 40}
    with LLM(folder, **settings) as llm:
        for pooling in KINDS:
            raw, unit = llm.embed(given, pooling, normalize=False), llm.embed(given, pooling)
            assert raw.dtype == unit.dtype == np.float32 and raw.shape == (len(given), states[0].shape[1])
            for got, normed, one in zip(raw, unit, states, strict=True):
                want = pooled(one, pooling)
                np.testing.assert_allclose(got, want, atol=1e-4 * np.abs(want).max())
                cosine = np.float64(normed) @ want / np.linalg.norm(want)
                assert cosine > 0.9999 and abs(np.linalg.norm(normed) - 1) < 1e-6


def test_alone_in_company_and_in_any_chunks(open_llm, backend, llm, idle):
    """Bitwise, beside generation, with a warm prefix cache, in steps of 16 tokens, and with too little memory."""
    rng = np.random.default_rng()
    given = [rng.integers(3, 300, n).tolist() for n in (1, 5, 16, 17, 48, 100)]
    given += [given[-1][:40], given[-1]]
    alone = {pooling: np.concatenate([llm.embed([ids], pooling) for ids in given]) for pooling in KINDS}
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    answers = [output.outputs for output in llm.generate(given[2:5], params)]
    few = {"max_num_seqs": 3, "max_num_batched_tokens": 16, "max_model_len": 128}
    little = {"kv_cache_tokens": 160, "max_model_len": 128}
    for settings in ({}, few, little, little | {"preemption": "swap"}):
        other = open_llm(backend, **settings)
        for pooling in KINDS:
            mixed, texts = together(other, given, pooling, given[2:5], params)
            assert (mixed == alone[pooling]).all()
            assert texts == answers
        idle(other)


def together(llm, given, pooling, prompts, params):
    """Embeddings and generations that are admitted at once: so f32 [given, hidden], and the outputs."""
    outputs = queue.SimpleQueue()
    wanted = PoolingParams(pooling)
    embeddings = [llm.engine.embedding(tuple(ids), wanted, outputs.put) for ids in given]
    others = [llm.engine.request(None, ids, params, outputs.put, stream=False) for ids in prompts]
    requests = [*embeddings[:3], *others, *embeddings[3:]]
    llm.engine.admit(*requests)
    found = {}
    while len(found) < len(requests):
        output = outputs.get(timeout=60)
        found[output.request_id] = output
    return stacked(found[r.request_id] for r in embeddings), [found[r.request_id].outputs for r in others]


def test_cached_tokens_help_where_they_can(llm):
    """Not the mean, which is of all tokens' states."""
    ids = np.random.default_rng().integers(3, 300, 100).tolist()
    llm.embed([ids])
    hits = {pooling: last_request(llm, ids, pooling).num_cached_tokens for pooling in KINDS}
    assert hits == {"last": 96, "mean": 0, "cls": 0}


def last_request(llm, ids, pooling):
    outputs = queue.SimpleQueue()
    llm.engine.admit(llm.engine.embedding(tuple(ids), PoolingParams(pooling), outputs.put))
    return outputs.get(timeout=60)


def test_texts_ids_and_dimensions(llm):
    texts = ["Once upon a time", "naïve café"]
    ids = [list(llm.engine.encode(text)) for text in texts]
    whole = llm.embed(texts)
    assert (whole == llm.embed(ids)).all() and (whole[:1] == llm.embed(texts[0])).all()
    assert (whole == llm.embed([{"prompt": texts[0]}, {"prompt_token_ids": ids[1]}])).all()
    assert (llm.embed(texts, normalize=False, dimensions=10) == llm.embed(texts, normalize=False)[:, :10]).all()
    cut = llm.embed(texts, dimensions=10)
    np.testing.assert_allclose(cut, whole[:, :10] / np.linalg.norm(whole[:, :10], axis=1, keepdims=True), atol=1e-6)
    assert llm.embed([]).shape == (0, 0)


def test_for_an_event_loop(llm):
    texts = ["Once", "upon a time"]

    async def both():
        return await AsyncLLM(llm.engine).embed(texts, "mean")

    assert (asyncio.run(both()) == llm.embed(texts, "mean")).all()


@pytest.mark.parametrize(
    ("given", "settings", "error", "said"),
    [
        ("", {}, RequestError, "empty"),
        ([[]], {}, RequestError, "empty"),
        ([[5] * 257], {}, AdmissionError, "257 tokens, and the context holds 256"),
        ([[5] * 257], {"pooling": "cls"}, AdmissionError, "257 tokens"),
        ("a", {"pooling": "max"}, RequestError, "one of last, mean, cls"),
        ("a", {"dimensions": 0}, RequestError, "at least 1"),
        ("a", {"dimensions": 65}, RequestError, "have 64"),
        ([[5], [400]], {}, RequestError, "token id 400"),
    ],
)
def test_refusals(llm, given, settings, error, said):
    with pytest.raises(error, match=said):
        llm.embed(given, **settings)


def test_states_that_are_not_finite_fail_alone(tmp_path, cpu):
    """Token 7 has no finite embedding."""
    tensors = tiny_models.llama_tensors(np.random.default_rng(), tiny_models.CONFIG)
    tensors["model.embed_tokens.weight"][7] = np.nan
    tiny_models.write_llama(tmp_path, np.random.default_rng(), tensors)
    with LLM(tmp_path, backend=cpu, threads=2) as llm:
        good = llm.embed([[5, 6]])
        for pooling in KINDS:
            with pytest.raises(EngineError, match="not finite"):
                llm.embed([[7, 5, 6], [5, 6]], pooling)
        assert (llm.embed([[5, 6]]) == good).all()


@dataclass
class OlderSession:
    """A device's own, written before there were embeddings."""

    session: Any

    def submit(self, inputs):
        return OlderTicket(self.session.submit(inputs))

    def close(self):
        self.session.close()


@dataclass
class OlderTicket:
    ticket: Any

    def wait(self):
        return replace(self.ticket.wait(), embeddings=None)


def test_a_session_that_gives_no_states_fails_embeddings_alone(llama, cpu, monkeypatch):
    make = Loaded.session
    monkeypatch.setattr(Loaded, "session", lambda self: OlderSession(make(self)))
    with LLM(llama, backend=cpu, threads=2, max_num_batched_tokens=40) as llm:
        for pooling in KINDS:
            with pytest.raises(EngineError, match="gives no hidden states"):
                llm.embed([[5] * 100, [6]], pooling)
        assert len(llm.generate([[5, 6]], SamplingParams(max_tokens=3, ignore_eos=True))[0].outputs[0].token_ids) == 3


def test_two_ranks_give_what_one_gives(install, llama):
    """Sums over two halves differ in their last bits."""
    install("engine.backends", "threaded", "thread_group:threaded")
    rng = np.random.default_rng()
    given = [rng.integers(3, 300, n).tolist() for n in (1, 30, 100)]
    settings = {"kv_cache_dtype": "f32", "max_num_batched_tokens": 40}
    for pooling in KINDS:
        with LLM(llama, backend="threaded", tensor_parallel_size=2, **settings) as two:
            got = two.embed(given, pooling)
        with LLM(llama, backend="reference", **settings) as one:
            np.testing.assert_allclose(got, one.embed(given, pooling), atol=1e-5)


@pytest.mark.parametrize("place", ["gather_rows: reference; rest: cpu", "layers 1: cpu; rest: reference"])
def test_over_several_devices(llama, cpu, place):
    rng = np.random.default_rng()
    given = [rng.integers(3, 300, n).tolist() for n in (1, 30, 100)]
    settings = {"kv_cache_dtype": "f32", "max_num_batched_tokens": 40, "threads": 2}
    with LLM(llama, place=place, **settings) as several, LLM(llama, backend=cpu, **settings) as one:
        for pooling in KINDS:
            np.testing.assert_allclose(several.embed(given, pooling), one.embed(given, pooling), atol=1e-5)


def test_a_sum_does_not_depend_on_its_parts():
    rng = np.random.default_rng()
    states = (rng.standard_normal((200, 33)) * np.exp(5 * rng.standard_normal((200, 1)))).astype(np.float32)
    whole = Pooler("mean", False, 33)
    whole.take(states)
    for _ in range(20):
        parts = Pooler("mean", False, 33)
        for part in np.split(states, np.sort(rng.integers(0, 200, 5))):
            parts.take(part)
        assert (parts.vector() == whole.vector()).all()
    assert parts.begin((4, 5)) == (4, 5)
    parts.take(states)
    assert (parts.vector() == whole.vector()).all(), "what it had before is forgotten"
    np.testing.assert_allclose(whole.vector(), states.astype(np.float64).mean(0), rtol=1e-6)


@pytest.mark.parametrize("tied", [True, False])
def test_checkpoints_without_a_head(llama, tmp_path, cpu, tied):
    """As transformers' AutoModel saves them."""
    tensors = load_file(llama / "model.safetensors")
    whole, base = tmp_path / "whole", tmp_path / "base"
    for folder in (whole, base):
        folder.mkdir()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] if tied else tensors["lm_head.weight"]
    tiny_models.write_llama(whole, np.random.default_rng(), tensors)
    below = {name.removeprefix("model."): array for name, array in tensors.items() if name != "lm_head.weight"}
    tiny_models.write_llama(base, np.random.default_rng(), below, tie_word_embeddings=tied)
    params = SamplingParams(temperature=0.0, max_tokens=5)
    with LLM(whole, backend=cpu, threads=2) as one, LLM(base, backend=cpu, threads=2) as other:
        assert (one.embed("a text", "mean") == other.embed("a text", "mean")).all()
        if tied:
            assert one.generate("a text", params)[0].outputs == other.generate("a text", params)[0].outputs
        else:
            with pytest.raises(RequestError, match="no head"):
                other.generate("a text", params)


# -- what files say ----------------------------------------------------------------------------------------------------


def modules(*names):
    paths = {"Pooling": "1_Pooling"}
    return [{"type": f"sentence_transformers.models.{name}", "path": paths.get(name, "")} for name in names]


POOLED = modules("Transformer", "Pooling")


@pytest.mark.parametrize(
    ("listed", "settings", "want"),
    [
        (None, {}, (None, True)),
        (modules("Transformer", "Pooling", "Normalize"), {"pooling_mode_lasttoken": True}, ("last", True)),
        (
            POOLED,
            {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": False},
            ("mean", False),
        ),
        (POOLED, {"pooling_mode": "cls"}, ("cls", False)),
        (POOLED, {"pooling_mode_max_tokens": True}, "pools by pooling_mode_max_tokens"),
        (
            POOLED,
            {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True},
            "pools by",
        ),
        (POOLED, {}, "pools by nothing"),
        (modules("Transformer", "Dense"), {}, "in this order"),
        (modules("Transformer", "LSTM"), {}, "LSTM"),
        ([{"type": "a.Pooling", "path": "../elsewhere"}], {}, "plain name"),
        ([5], {}, "module None"),
        ({}, {}, "must be a JSON list"),
    ],
)
def test_folders(llama, tmp_path, listed, settings, want):
    for file in llama.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(settings))
    if listed is not None:
        (tmp_path / "modules.json").write_text(json.dumps(listed))
    found = open_checkpoint(tmp_path)
    if isinstance(want, str):
        with pytest.raises(FormatError, match=want):
            found.embedding()
    else:
        assert (found.embedding().pooling, found.embedding().normalize) == want


def with_dense(llama, folder, *layers):
    """The folder with a module Dense for each (weight, bias or None, activation or None, which is a tanh)."""
    for file in llama.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    listed = modules("Transformer", "Pooling")
    for number, (weight, bias, act) in enumerate(layers, 2):
        own = folder / f"{number}_Dense"
        own.mkdir()
        named = {} if act is None else {"activation_function": f"torch.nn.modules.{act}"}
        (own / "config.json").write_text(json.dumps({"in_features": 64, **named}))
        held = {"linear.weight": weight} | ({} if bias is None else {"linear.bias": bias})
        save_file(held, own / "model.safetensors")
        listed.append({"type": "sentence_transformers.models.Dense", "path": own.name})
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    (folder / "modules.json").write_text(json.dumps([*listed, *modules("Normalize")]))
    return folder


@pytest.mark.parametrize("tanh", ["activation.Tanh", None])
def test_modules_behind_the_pooling(llama, tmp_path, cpu, tanh):
    rng, given = np.random.default_rng(), inputs(np.random.default_rng(), (3, 50))
    wide, back = rng.standard_normal((96, 64), np.float32) / 8, rng.standard_normal((24, 96), np.float32) / 8
    bias = rng.standard_normal(96, np.float32)
    with LLM(llama, backend=cpu) as llm:
        plain = llm.embed(given, "mean", normalize=False).astype(np.float64)
    folder = with_dense(llama, tmp_path, (wide, bias, tanh), (back, None, "linear.Identity"))
    want = np.tanh(plain @ wide.T + bias) @ back.T
    with LLM(folder, backend=cpu) as llm:
        np.testing.assert_allclose(llm.embed(given, normalize=False), want, rtol=1e-4, atol=1e-5)
        cut = want[:, :10] / np.linalg.norm(want[:, :10], axis=1, keepdims=True)
        np.testing.assert_allclose(llm.embed(given, dimensions=10), cut, rtol=1e-4, atol=1e-5)
        with pytest.raises(RequestError, match="dimensions is 25; embeddings of this model have 24"):
            llm.embed(given, dimensions=25)


ONES = np.ones((8, 64), np.float32)


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ([(ONES, None, "activation.ReLU")], "activation 'torch.nn.modules.activation.ReLU'"),
        ([(ONES, np.ones(9, np.float32), "linear.Identity")], "shape"),
        ([(ONES * np.inf, None, "linear.Identity")], "not finite"),
        ([(np.ones(8, np.float32), None, "linear.Identity")], "shape"),
        ([(ONES, None, "linear.Identity")] * 2, "gives 8 numbers, and the next takes 64"),
        ([(ONES[:, :32], None, "linear.Identity")], "takes 32 numbers, and states have 64"),
    ],
)
def test_modules_that_do_not_fit(llama, tmp_path, cpu, layers, said):
    with LLM(with_dense(llama, tmp_path, *layers), backend=cpu) as llm, pytest.raises(EngineError, match=said):
        llm.embed("a text")


def test_modules_without_their_files(llama, tmp_path):
    folder = with_dense(llama, tmp_path, (ONES, None, "linear.Identity"))
    save_file({"weight": ONES}, folder / "2_Dense" / "model.safetensors")
    with pytest.raises(FormatError, match=r"must hold linear\.weight"):
        open_checkpoint(folder).embedding()
    (folder / "2_Dense" / "config.json").write_text('{"activation_function": ["a"]}')
    with pytest.raises(FormatError, match="has the activation"):
        open_checkpoint(folder).embedding()
    (folder / "2_Dense" / "config.json").write_text("{}")
    (folder / "2_Dense" / "model.safetensors").unlink()
    with pytest.raises(FormatError, match="is missing; a module Dense keeps its matrix there"):
        open_checkpoint(folder).embedding()


@pytest.mark.parametrize(
    ("value", "want"), [(None, "last"), (0, "last"), (1, "mean"), (2, "cls"), (3, "last"), (4, "last"), (5, None)]
)
def test_gguf_files(llama, tmp_path, cpu, value, want):
    keys = {} if value is None else {"pooling_type": value}
    path = tiny_models.to_gguf(llama, tmp_path / "model.gguf", **keys)
    with LLM(path, backend=cpu, threads=2) as llm:
        if want is None:
            with pytest.raises(RequestError, match="pooling_type is 5"):
                llm.embed("a text")
        else:
            assert (llm.embed("a text") == llm.embed("a text", want, True)).all()
