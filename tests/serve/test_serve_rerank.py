"""/v1/rerank: the documents that answer a query, the best first."""

from __future__ import annotations

import asyncio
import shutil
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
import tiny_models
import tokenizers
from safetensors.numpy import load_file, save_file
from tokenizers import processors

from engine.errors import EngineError
from engine.runtime.async_llm import AsyncLLM

QUERY = "Which engine is small?"
DOCUMENTS = ["A small engine.", "x", "numbers like 0 1 2 3 4 5 " * 8, "x", "naïve café", "z " * 20, "How?"]


@pytest.fixture(scope="module")
def ranker(start, tmp_path_factory):
    """A server of a random BERT with one score, what it answers, and what transformers and the engine itself say."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("ranker")
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_labels": 1,
    }
    config = transformers.BertConfig(vocab_size=tiny_models.VOCAB, initializer_range=0.3, **sizes)
    peer = transformers.BertForSequenceClassification(config).eval()
    peer.save_pretrained(folder)
    tiny_models.write_tokenizer(folder)
    pipeline = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    marks = [("<s>", 1), ("</s>", 2)]
    pipeline.post_processor = processors.TemplateProcessing(
        "<s> $A </s>", "<s> $A </s> $B:1 </s>:1", special_tokens=marks
    )
    pipeline.save(str(folder / "tokenizer.json"))
    want = []
    for document in DOCUMENTS:
        pair = pipeline.encode(QUERY, document)
        with torch.no_grad():
            found = peer(torch.tensor([pair.ids]), token_type_ids=torch.tensor([pair.type_ids])).logits
        want.append(torch.sigmoid(found)[0, 0].item())
    running = start(model=folder, max_model_len=None, max_num_seqs=8)
    tokens = sum(len(pipeline.encode(QUERY, document).ids) for document in DOCUMENTS)
    local = asyncio.run(AsyncLLM(running.engine).score(QUERY, DOCUMENTS))

    def ask(path="/v1/rerank", **body):
        with running.http as http:
            return http.post(path, json={"query": QUERY, "documents": DOCUMENTS} | body)

    return SimpleNamespace(folder=folder, running=running, ask=ask, want=np.array(want), tokens=tokens, local=local)


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank"])
def test_the_best_come_first(ranker, path):
    answer = ranker.ask(path, model="tiny").json()
    assert answer["model"] == "tiny" and answer["usage"] == dict.fromkeys(
        ("prompt_tokens", "total_tokens"), ranker.tokens
    )
    assert answer["id"].startswith("rerank-")
    places, scores = ([item[key] for item in answer["results"]] for key in ("index", "relevance_score"))
    assert sorted(places) == list(range(len(DOCUMENTS))) and scores == sorted(scores, reverse=True)
    assert places.index(1) + 1 == places.index(3)  # of equal ones the first
    assert scores == ranker.local[places].tolist()
    np.testing.assert_allclose(scores, ranker.want[places], atol=0.02)
    assert np.ptp(scores) > 0.01
    assert [item["document"] for item in answer["results"]] == [{"text": DOCUMENTS[place]} for place in places]
    ranker.running.wait_until_free()


def test_few_of_them_and_without_their_texts(ranker):
    whole = ranker.ask().json()["results"]
    few = ranker.ask(top_n=2, return_documents=False, documents=[{"text": text} for text in DOCUMENTS]).json()[
        "results"
    ]
    assert few == [{key: item[key] for key in ("index", "relevance_score")} for item in whole[:2]]
    assert ranker.ask(top_n=100).json()["results"] == whole


@pytest.mark.parametrize(
    ("changed", "message", "field"),
    [
        ({"documents": []}, "documents", "documents"),
        ({"documents": ["a", 3]}, "documents", "documents"),
        ({"documents": ["a"] * 2049}, "There are 2049 documents; at most 2048 are taken.", "documents"),
        ({"documents": ["a", "b" * 600]}, "tokens, and the context holds 512", "documents"),
        ({"top_n": 0}, "top_n", "top_n"),
        ({"query": None}, "query", "query"),
        ({"max_tokens_per_doc": 5}, "max_tokens_per_doc", "max_tokens_per_doc"),
    ],
)
def test_what_is_wrong_is_named(ranker, changed, message, field):
    refused = ranker.ask(**changed)
    error = refused.json()["error"]
    assert refused.status_code == 400 and message in error["message"], error
    assert (error["param"] or "").startswith(field), error
    ranker.running.wait_until_free()


def test_other_models_rank_nothing(running):
    with running.http as http:
        refused = http.post("/v1/rerank", json={"query": "a", "documents": ["b"]})
    assert refused.status_code == 400 and "no layer that scores a query" in refused.json()["error"]["message"]
    assert "/" not in refused.json()["error"]["message"], "where the files lie is nobody's business"
    with pytest.raises(EngineError, match="no layer that scores a query"):
        asyncio.run(AsyncLLM(running.engine).score("a", ["b"]))


def test_files_at_fault_keep_their_place_to_themselves(start, ranker, tmp_path):
    shutil.copytree(ranker.folder, tmp_path / "other")
    path = tmp_path / "other" / "model.safetensors"
    three = {"classifier.weight": np.ones((3, 64), np.float32), "classifier.bias": np.ones(3, np.float32)}
    save_file(load_file(path) | three, path)
    with start(model=tmp_path / "other", max_model_len=None, max_num_seqs=8).http as http:
        refused = http.post("/v1/rerank", json={"query": "a", "documents": ["b"]})
    error = refused.json()["error"]
    assert (
        refused.status_code == 400
        and "a layer of 3 scores" in error["message"]
        and str(tmp_path) not in error["message"]
    )


def test_a_client_that_leaves(ranker):
    with pytest.raises(httpx.ReadTimeout), ranker.running.http as http:
        http.post("/v1/rerank", json={"query": QUERY, "documents": ["y " * 200] * 1500}, timeout=0.2)
    ranker.running.wait_until_free()
