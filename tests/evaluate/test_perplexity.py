"""Perplexity and divergence against transformers, by the same windows."""

from __future__ import annotations

import json
from functools import cache

import numpy as np
import pytest
import tiny_models

from engine.errors import EngineError
from engine.evaluate.forward import Forward
from engine.evaluate.perplexity import compare, log_softmax, perplexity
from engine.evaluate.windows import Window, choose_context, load_for_logits, read_tokens, windows
from engine.runtime.config import EngineConfig
from engine.runtime.load import load

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


@cache
def log_probabilities(folder, ids, context, stride):
    """transformers' log-softmax, f64 [predicted, V], and the ids that came: windows as its documentation has them."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rows, targets, previous_end = [], [], 0
    for begin in range(0, len(ids), stride):
        end = min(begin + context, len(ids))
        fresh = end - previous_end  # those before are context only
        with torch.no_grad():
            logits = model(torch.tensor([ids[begin:end]])).logits[0, :-1]
        labels = ids[begin + 1 : end]
        count = min(fresh, len(labels))
        if count:
            rows.append(torch.log_softmax(logits[-count:].double(), -1).numpy())
            targets += labels[-count:]
        previous_end = end
        if end == len(ids):
            break
    return np.concatenate(rows), np.array(targets)


def loss(log, targets):
    return -log[np.arange(len(targets)), targets]


@pytest.mark.shared
@pytest.mark.parametrize(("context", "stride", "size"), [(512, 512, 12_000), (128, 48, 3_000), (300, 299, 3_000)])
@pytest.mark.parametrize("file", ["hf", "stories260K-f32.gguf"])
def test_stories_on_wikitext_is_transformers(stories, cpu, context, stride, size, file):
    text = (stories.parents[1] / "data" / "wikitext2-test.txt").read_bytes()[:size].decode("utf-8", "ignore")
    loaded = load_for_logits(stories / file, context, None, backend=cpu, threads=2, kv_cache_dtype="f32")
    ids = read_tokens(loaded, text)
    assert ids == transformers.AutoTokenizer.from_pretrained(stories / "hf")(text).input_ids
    want = loss(*log_probabilities(stories / "hf", tuple(ids), context, stride))
    found = perplexity(loaded, ids, context, stride)
    assert found.tokens == len(want)
    assert found.perplexity == pytest.approx(np.exp(want.mean()), rel=2e-5)
    assert found.error == pytest.approx(np.exp(want.mean()) * want.std(ddof=1) / len(want) ** 0.5, rel=1e-3)


def test_divergence_is_that_of_the_distributions(tmp_path, backend):
    rng, folders = np.random.default_rng(), (tmp_path / "base", tmp_path / "model")
    tensors = tiny_models.llama_tensors(rng, tiny_models.CONFIG)
    for folder, noise in zip(folders, (0, 0.02), strict=True):
        folder.mkdir()
        moved = {k: v + noise * rng.standard_normal(v.shape, np.float32) for k, v in tensors.items()}
        tiny_models.write_llama(folder, rng, moved)
    ids = rng.integers(3, tiny_models.VOCAB, 90).tolist()
    loaded = [load_for_logits(f, 32, None, backend=backend, threads=2, kv_cache_dtype="f32") for f in folders]
    logs = [log_probabilities(folder, tuple(ids), 32, 20) for folder in folders]
    kl = (np.exp(logs[0][0]) * (logs[0][0] - logs[1][0])).sum(axis=1)
    steps = []
    base, model, found = compare(*loaded, ids, 32, 20, lambda *step: steps.append(step))
    assert found.mean == pytest.approx(kl.mean(), rel=1e-3) and found.largest == pytest.approx(kl.max(), rel=1e-3)
    assert found.error == pytest.approx(kl.std(ddof=1) / len(kl) ** 0.5, rel=2e-3)
    assert found.p99 == pytest.approx(np.quantile(kl, 0.99), rel=1e-3)
    assert found.same_top == (logs[0][0].argmax(1) == logs[1][0].argmax(1)).mean()
    for each, (log, targets) in zip((base, model), logs, strict=True):
        assert each.perplexity == pytest.approx(np.exp(loss(log, targets).mean()), rel=1e-4)
    assert steps[-1] == ("Comparing", 90, 90)
    _, _, none = compare(loaded[0], loaded[0], ids, 32, 20)
    assert none.largest == 0 and none.same_top == 1


def test_one_row_a_chunk_changes_nothing(llama, cpu):
    ids = np.random.default_rng().integers(3, tiny_models.VOCAB, 70).tolist()
    few, many = (
        load_for_logits(llama, 32, None, backend=cpu, threads=2, max_num_batched_tokens=rows) for rows in (3, 512)
    )
    assert perplexity(few, ids, 32, 24) == perplexity(many, ids, 32, 24)


@pytest.mark.parametrize("allocator", ["paged", "contiguous"])
def test_a_window_that_is_shorter_than_the_context(tmp_path, backend, allocator):
    tiny_models.write_llama(tmp_path, np.random.default_rng(), model_type="mistral", sliding_window=24)
    sizes = {"max_model_len": 256, "kv_cache_tokens": 256, "max_num_seqs": 1, "max_num_batched_tokens": 16}
    settings = {"threads": 2, "kv_cache_dtype": "f32", "block_size": 4, "kv_allocator": allocator, "keep": ("logits",)}
    loaded = load(EngineConfig(model=tmp_path, backend=backend, **sizes, **settings))
    blocks = 10 + 1 if allocator == "paged" else 256 // 4  # 38 positions at a time, wherever they begin in a block
    assert loaded.memory.num_blocks == (blocks + 1,)
    with Forward(loaded) as forward:
        for ids in np.random.default_rng().integers(3, tiny_models.VOCAB, (2, 256)).tolist():
            want, _ = log_probabilities(tmp_path, tuple(ids), 256, 256)
            chunks = [ids[start : start + 16] for start in range(0, 256, 16)]
            rows = np.arange(16, dtype=np.int32)
            found = [forward.run(chunk, 16 * n, rows)["logits"] for n, chunk in enumerate(chunks)]
            np.testing.assert_allclose(log_softmax(np.concatenate(found))[:-1], want, rtol=0, atol=2e-4)
        with pytest.raises(EngineError, match="follow"):
            forward.run(ids[:4], 8, rows[:4])


@pytest.mark.parametrize(
    ("count", "context", "stride"), [(100, 32, 32), (97, 32, 8), (32, 32, 32), (33, 32, 32), (2, 9, 4)]
)
def test_windows_predict_each_token_once(count, context, stride):
    found = list(windows(count, context, stride))
    assert found[0] == Window(0, min(count, context), 1) and found[-1].end == count
    predicted = [token for window in found for token in range(window.first, window.end)]
    assert predicted == sorted(set(predicted))
    alone = {window.begin for window in found} if stride == context else {0}
    assert set(predicted) == set(range(count)) - alone
    assert all(window.end - window.begin <= context and window.first > window.begin for window in found)


def test_refuses_in_a_sentence(llama, tmp_path, cpu):
    with pytest.raises(EngineError, match="2 to 256"):
        choose_context(llama, 257)
    assert choose_context(llama, None) == 256
    loaded = load_for_logits(llama, 16, None, backend=cpu)
    with pytest.raises(EngineError, match="at least 2"):
        read_tokens(loaded, "")
    other = dict(tiny_models.llama_tensors(np.random.default_rng(), tiny_models.CONFIG))
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        other[name] = other[name][:300]
    tiny_models.write_llama(tmp_path, np.random.default_rng(), other, vocab_size=300)
    with pytest.raises(EngineError, match="different vocabularies"):
        compare(loaded, load_for_logits(tmp_path, 16, None, backend=cpu), [3, 4, 5], 16, 16)
    tiny_models.write_llama(tmp_path, np.random.default_rng())
    swapped = json.loads((tmp_path / "tokenizer.json").read_text())
    vocab = swapped["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(swapped))
    with pytest.raises(EngineError, match="different vocabularies"):
        compare(loaded, load_for_logits(tmp_path, 16, None, backend=cpu), [3, 4, 5], 16, 16)
    broken = {k: v * np.float32(np.nan) for k, v in other.items()}
    tiny_models.write_llama(tmp_path, np.random.default_rng(), broken, vocab_size=300)
    with pytest.raises(EngineError, match="not finite"):
        perplexity(load_for_logits(tmp_path, 16, None, backend=cpu), [3, 4, 5], 16, 16)
