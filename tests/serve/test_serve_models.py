"""Several models in one server, and what becomes of requests when a model cannot run."""

from __future__ import annotations

import threading
import weakref

import numpy as np
import openai
import pytest
import tiny_models

from engine.serve.errors import without_folders

ASK = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
GREEDY = {"temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture
def several(start, tmp_path):
    other, broken = tmp_path / "other", tmp_path / "broken"
    for folder in (other, broken):
        folder.mkdir()
        tiny_models.write_llama(folder, np.random.default_rng())
    (broken / "model.safetensors").write_bytes(b"nothing")
    return start(further={"other": other, "broken": broken}, max_model_len=256)


def test_models_load_when_they_are_asked_for(several):
    client, served = several.openai, several.models.by_name
    assert [model.id for model in client.models.list()] == ["tiny", "other", "broken"]
    assert [model.loaded for model in served.values()] == [True, False, False]
    assert [model.loaded for model in client.models.list()] == [True, False, False]
    with several.http as http:
        assert http.get("/health").status_code == http.get("/metrics").status_code == 200
        assert [model["kv_blocks"] > 0 for model in http.get("/stats").json()["models"]] == [True, False, False]
        assert len(http.get("/api/tags").json()["models"]) == 3
    texts = []

    def ask() -> None:
        texts.append(client.completions.create(model="other", **ASK).choices[0].text)

    threads = [threading.Thread(target=ask) for _ in range(4)]  # together: it is loaded once
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(texts) == 4 and len(set(texts)) == 1
    assert texts[0] != client.completions.create(model="tiny", **ASK).choices[0].text
    assert served["other"].loaded and client.models.retrieve("other").max_model_len == 256
    assert not served["broken"].loaded


def test_no_model_is_loaded_while_the_server_shuts_down(several):
    other = several.models.known("other")
    other.admission.draining = True
    with several.http as http:
        refused = http.post("/v1/completions", json=ASK | {"model": "other"})
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "shutting_down"
    assert refused.headers["retry-after"] and not other.loaded


def test_a_model_that_cannot_load_ends_its_request_alone(several, capsys):
    for _ in range(2):
        with pytest.raises(openai.InternalServerError, match="broken cannot be loaded") as refused:
            several.openai.completions.create(model="broken", **ASK)
        assert refused.value.status_code == 503
        assert "/" not in refused.value.body["message"], "where the files lie is nobody's business"
        assert "model.safetensors is not a valid safetensors file" in refused.value.body["message"]
        assert "/broken/model.safetensors is not a valid" in capsys.readouterr().err
    assert several.openai.completions.create(model="tiny", **ASK).usage.completion_tokens == 8


@pytest.mark.parametrize(
    ("sentence", "told"),
    [
        ("/a/b/x.gguf is not a GGUF file; give another.", "x.gguf is not a GGUF file; give another."),
        ("'../my models/x' and (/c d/y.json) are missing: ENOENT.", "'x' and (y.json) are missing: ENOENT."),
        ("The architecture 'a' of /m/n is not supported.", "The architecture 'a' of n is not supported."),
    ],
)
def test_paths_are_told_by_their_last_parts(sentence, told):
    assert without_folders(sentence) == told


def test_a_model_that_has_stopped_is_told(start):
    running = start()
    assert running.http.get("/health/live").status_code == 200
    running.engine.close()
    with running.http as http:
        refused = http.post("/v1/completions", json=ASK)
        assert refused.status_code == 503 and refused.json()["error"]["type"] == "server_error"
        assert http.get("/health").status_code == http.get("/health/live").status_code == 503
        assert http.get("/version").status_code == 200
    running.wait_until(lambda: not running.models.known(None).admission.running)


def test_a_model_that_idles_is_unloaded_and_comes_back(start, tmp_path):
    other = tiny_models.write_talker(tmp_path)
    running = start(further={"other": other}, options={"idle_unload": 0.5}, max_model_len=30000, kv_cache_tokens=32768)
    client, served = running.openai, running.models.by_name
    first = client.completions.create(model="other", **ASK).choices[0].text
    with client.completions.create(model="tiny", prompt="a", max_tokens=29000, stream=True, **GREEDY) as stream:
        next(stream)
        running.wait_until(lambda: not served["other"].loaded)  # while a request keeps the first one
        assert served["tiny"].loaded and served["tiny"].users == 1
        engine = weakref.ref(served["tiny"].llm.engine)
    running.wait_until(lambda: not running.models.loaded)
    running.wait_until(lambda: engine() is None)  # and its memory is free
    with running.http as http:
        assert http.get("/health").status_code == 200
        assert [model["loaded"] for model in http.get("/v1/models").json()["data"]] == [False, False]
    assert client.completions.create(model="other", **ASK).choices[0].text == first


def test_models_make_room_for_each_other(start, talker):
    size = {"max_model_len": 30000, "kv_cache_tokens": 32768}
    each = start(**size).models.known(None).bytes
    budget = {"memory_budget": 2.5 * each / 2**30}  # two of them, and not three
    running = start(further={"second": talker, "third": talker}, options=budget, **size)
    client, served = running.openai, running.models.by_name

    def loaded() -> list[str]:
        return [name for name, model in served.items() if model.loaded]

    client.completions.create(model="second", **ASK)
    assert loaded() == ["tiny", "second"]
    client.completions.create(model="tiny", **ASK)
    client.completions.create(model="third", **ASK)
    assert loaded() == ["tiny", "third"], "the one last used longest ago has gone"
    long = {"max_tokens": 29000, "stream": True, **GREEDY}
    with (
        client.completions.create(model="tiny", prompt="a", **long) as one,
        client.completions.create(model="third", prompt="a", **long) as other,
    ):
        next(one), next(other)
        with pytest.raises(openai.InternalServerError, match=r"second takes .* no room now") as refused:
            client.completions.create(model="second", **ASK)
        assert refused.value.status_code == 503 and refused.value.response.headers["retry-after"]
        assert loaded() == ["tiny", "third"]
    running.wait_until(lambda: not any(model.users for model in served.values()))
    assert client.completions.create(model="second", **ASK).usage.completion_tokens == 8


def test_a_model_beyond_the_budget_turns_nobody_out(start, talker):
    """It is refused at once, for good: none is asked to come again."""
    running = start(further={"second": talker}, options={"memory_budget": 1.0})
    running.models.by_name["second"].bytes = 2 << 30  # as it was when it had been loaded once
    with running.http as http:
        refused = http.post("/v1/completions", json={"model": "second", "prompt": "a"})
        assert refused.status_code == 503 and "retry-after" not in refused.headers
        assert "more than the memory budget of 1 GiB" in refused.json()["error"]["message"]
        assert [model["name"] for model in http.get("/api/ps").json()["models"]] == ["tiny"]
