"""/v1/embeddings by the official client, and Ollama's two forms of it."""

from __future__ import annotations

import asyncio
import base64
import json
import threading

import numpy as np
import openai
import pytest
import tiny_models

from engine.runtime.async_llm import AsyncLLM

TEXTS = ["A small engine.", "x", "numbers like 0 1 2 3 4 5 6 7 8 9 too, " * 40]


@pytest.fixture(scope="module")
def local(running):
    """local(inputs, ...): by the engine itself, one text at a time."""
    llm = AsyncLLM(running.engine)
    return lambda inputs, *settings, **more: np.concatenate(
        [asyncio.run(llm.embed([given], *settings, **more)) for given in inputs]
    )


def vectors(answer):
    assert [item.index for item in answer.data] == list(range(len(answer.data)))
    return np.array([item.embedding for item in answer.data], np.float32)


@pytest.mark.parametrize("form", [None, "float", "base64"])
def test_all_forms_of_input_give_what_the_engine_gives(running, local, form):
    client = running.openai
    ids = [list(running.engine.encode(text)) for text in TEXTS]
    given = {} if form is None else {"encoding_format": form}
    for inputs, want in ((TEXTS, TEXTS), (TEXTS[0], TEXTS[:1]), (ids, TEXTS), (ids[2], TEXTS[2:])):
        answer = client.embeddings.create(model="tiny", input=inputs, user="somebody", **given)
        got = answer.data
        if form == "base64":  # the client leaves alone what it was asked for
            for item in got:
                item.embedding = np.frombuffer(base64.b64decode(item.embedding), "<f4")
        assert (vectors(answer) == local(want)).all()
        tokens = sum(len(running.engine.encode(text)) for text in want)
        assert (answer.usage.prompt_tokens, answer.usage.total_tokens, answer.model) == (tokens, tokens, "tiny")
    np.testing.assert_allclose(np.linalg.norm(vectors(answer), axis=1), 1, rtol=1e-6)


@pytest.mark.parametrize("pooling", ["last", "mean", "cls"])
def test_vllm_s_and_openai_s_settings(running, local, pooling):
    extra = {"pooling": pooling, "normalize": False}
    answer = running.openai.embeddings.create(model="tiny", input=TEXTS, dimensions=24, extra_body=extra)
    assert (vectors(answer) == local(TEXTS, pooling, False, 24)).all()
    answer = running.openai.embeddings.create(model="tiny", input=TEXTS, dimensions=24, extra_body={"pooling": pooling})
    np.testing.assert_allclose(np.linalg.norm(vectors(answer), axis=1), 1, rtol=1e-6)


def test_the_same_beside_generation(running, local):
    """Bitwise, and a chat that streams meanwhile says what it says alone."""
    ask = {"model": "tiny", "messages": [{"role": "user", "content": "Go on."}], "temperature": 0.0, "max_tokens": 150}
    alone = running.openai.chat.completions.create(**ask).choices[0].message.content
    want = local(TEXTS, "mean")
    begun = threading.Event()
    pieces = []

    def chat():
        for chunk in running.openai.chat.completions.create(**ask, stream=True):
            pieces.append(chunk.choices[0].delta.content or "")
            begun.set()

    thread = threading.Thread(target=chat)
    thread.start()
    assert begun.wait(30)
    answer = running.openai.embeddings.create(model="tiny", input=TEXTS * 5, extra_body={"pooling": "mean"})
    thread.join()
    assert (vectors(answer) == np.tile(want, (5, 1))).all()
    assert "".join(pieces) == alone


def test_more_inputs_than_places(running, local):
    """They take half of the places, and run in turn."""
    rng = np.random.default_rng()
    inputs = [rng.integers(3, 300, n).tolist() for n in rng.integers(1, 9, 150)]
    answer = running.openai.embeddings.create(model="tiny", input=inputs)
    assert (vectors(answer) == local(inputs)).all()
    running.wait_until_free()


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({"input": ""}, "input", "empty"),
        ({"input": []}, "input", "empty"),
        ({"input": ["a", ""]}, "input", "empty"),
        ({"input": [[5], []]}, "input", "empty"),
        ({"input": "a", "dimensions": 0}, "dimensions", "at least 1"),
        ({"input": "a", "dimensions": 65}, "dimensions", "have 64"),
        ({"input": "a", "pooling": "max"}, "pooling", "wrong"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "wrong"),
        ({"input": "a", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "not supported"),
        ({"input": [7] * 1025}, "input", "1025 tokens, and the context holds 1024"),
        ({"input": [320]}, "input", "token id 320"),
        ({"input": ["a"] * 2049}, "input", "at most 2048"),
        ({"input": "a", "priority": 3}, "priority", "--policy priority"),
        ({}, "input", "missing"),
    ],
)
def test_refusals_name_the_field(running, body, param, said):
    with pytest.raises(openai.BadRequestError) as refused:
        running.openai.post("/embeddings", body={"model": "tiny", **body}, cast_to=object)
    error = refused.value.body
    assert error["param"] == param or (param is not None and error["param"].startswith(param)), error
    assert said in error["message"]
    if "context holds" in said:
        assert error["code"] == "context_length_exceeded"
    running.wait_until_free()


def test_the_longest_input_there_may_be(running, local):
    ids = np.random.default_rng().integers(3, 300, 1024).tolist()
    answer = running.openai.embeddings.create(model="tiny", input=ids)
    assert (vectors(answer) == local([ids])).all()


def test_ollama_s_forms(running, local):
    with running.http as http:
        body = {"model": "tiny:latest", "input": TEXTS, "dimensions": 10, "keep_alive": "5m"}
        answer = http.post("/api/embed", json=body).json()
        assert (np.array(answer["embeddings"], np.float32) == local(TEXTS, dimensions=10)).all()
        assert answer["prompt_eval_count"] == sum(len(running.engine.encode(text)) for text in TEXTS)
        assert answer["total_duration"] > 0 and answer["model"] == "tiny"
        one = http.post("/api/embeddings", json={"model": "tiny", "prompt": TEXTS[2]}).json()
        assert (np.array([one["embedding"]], np.float32) == local(TEXTS[2:])).all()
        usual = {"model": "tiny", "input": "a", "truncate": True, "options": {"num_ctx": 512, "mirostat": None}}
        assert http.post("/api/embed", json=usual).status_code == 200
        for wrong, said in (
            ({"input": "a", "options": {"num_ctx": 1025}}, "num_ctx is 1025"),
            ({"input": "a", "options": {"temperature": 1}}, "options.temperature"),
            ({"input": "word " * 2000, "truncate": True}, "context holds 1024"),
            ({"input": ""}, "empty"),
            ({"input": "word " * 2000}, "context holds 1024"),
        ):
            refused = http.post("/api/embed", json={"model": "tiny", **wrong})
            assert refused.status_code == 400 and said in refused.json()["error"]
        assert http.post("/api/embed", json={"model": "other", "input": "a"}).status_code == 404


def test_the_model_s_files_choose_the_pooling(start, tmp_path):
    folder = tiny_models.write_talker(tmp_path)
    modules = [{"type": f"sentence_transformers.models.{name}", "path": path} for name, path in (
        ("Transformer", ""), ("Pooling", "1_Pooling"))]  # fmt: skip
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    switches = {"word_embedding_dimension": 64, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(switches))
    client = start(model=folder).openai
    asked = client.embeddings.create(
        model="tiny", input=TEXTS, extra_body={"pooling": "mean", "normalize": False}, encoding_format="float"
    )
    assert (vectors(client.embeddings.create(model="tiny", input=TEXTS)) == vectors(asked)).all()
    (folder / "modules.json").write_text(json.dumps([*modules, {"type": "sentence_transformers.models.LSTM"}]))
    with pytest.raises(openai.BadRequestError, match="LSTM") as refused:
        start(model=folder).openai.embeddings.create(model="tiny", input="a")
    assert refused.value.body["message"].startswith("modules.json has"), "where the files lie is nobody's business"


def test_an_encoder(start, tmp_path):
    """Its vectors are transformers', of a text with what its tokenizer puts around it; a chat with it is refused."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    peer = transformers.BertModel(transformers.BertConfig(vocab_size=tiny_models.VOCAB, **sizes)).eval()
    peer.save_pretrained(tmp_path)
    tiny_models.write_tokenizer(tmp_path)
    running = start(model=tmp_path, max_model_len=None, max_num_seqs=8)
    texts = [*TEXTS[:2], "word " * 60]
    answer = running.openai.embeddings.create(model="tiny", input=texts * 9)
    want = []
    for text in texts:
        with torch.no_grad():
            mean = peer(torch.tensor([list(running.engine.encode(text))])).last_hidden_state[0].numpy().mean(0)
        want.append(mean / np.linalg.norm(mean))
    np.testing.assert_allclose(vectors(answer), np.tile(want, (9, 1)), atol=2e-3)
    with pytest.raises(openai.BadRequestError, match="is an encoder; it can embed texts"):
        running.openai.completions.create(model="tiny", prompt="a")
    with running.http as http:
        assert http.post("/api/show", json={"model": "tiny"}).json()["capabilities"] == ["embedding"]
    running.wait_until_free()
