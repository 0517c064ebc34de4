"""A device that is lost: what has begun is told, what waits is kept, and the server says how it is."""

from __future__ import annotations

import json
import re
import threading

import httpx
import openai
import pytest
from failing import Switch

from engine.runtime import restarts

ASK = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 900, "ignore_eos": True}


@pytest.fixture
def losable(start, install, monkeypatch):
    monkeypatch.setattr(Switch, "lost", False)
    monkeypatch.setattr(Switch, "refusals", 0)
    install("engine.backends", "failing", "failing:manifest")
    running = start(backend="failing", max_num_seqs=2, kv_cache_tokens=4096)
    yield running
    Switch.lost = False


def lose(running, refusals: int) -> tuple[list[str], list[httpx.Response]]:
    """The device is lost under two streams, with three requests behind them: the streams' last events, and the answers."""
    answers: list[httpx.Response] = []

    def ask() -> None:
        answers.append(running.http.post("/v1/completions", json=ASK | {"max_tokens": 3, "temperature": 0}))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    body = ASK | {"stream": True}
    with (
        running.http as http,
        http.stream("POST", "/v1/completions", json=body) as one,
        http.stream("POST", "/v1/completions", json=body) as other,
    ):
        streams = [one.iter_lines(), other.iter_lines()]
        for lines in streams:
            next(lines)
        for thread in threads:
            thread.start()
        admission = running.models.known(None).admission
        running.wait_until(lambda: admission.waiting + running.engine.health().waiting == 3)
        Switch.refusals, Switch.lost = refusals, True
        last = [[line for line in lines if line][-1] for lines in streams]
    for thread in threads:
        thread.join(60)
    return last, answers


def ends(http) -> dict[str, int]:
    """How many sequences have ended, by their reasons."""
    found = re.findall(
        r'^vllm:request_success_total\{finished_reason="(\w+)",.*\} (\d+)\.0$', http.get("/metrics").text, re.M
    )
    return {reason: int(count) for reason, count in found}


def test_what_waits_is_served_by_a_new_session(losable):
    with losable.http as http:
        alone = http.post("/v1/completions", json=ASK | {"max_tokens": 3, "temperature": 0}).json()["choices"]
        for count in (1, 2):
            last, answers = lose(losable, refusals=1)
            for event in last:
                assert '"type":"server_error"' in event and "The step loop failed, and has begun anew" in event
            assert [answer.status_code for answer in answers] == [200] * 3
            assert all(answer.json()["choices"] == alone for answer in answers)
            health = http.get("/health")
            assert health.status_code == 200 and health.json()["restarts"] == count
            assert f'engine:restarts_total{{model_name="tiny"}} {count}.0' in http.get("/metrics").text
            assert ends(http) == {"stop": 0, "length": 1 + 3 * count, "abort": 0, "error": 2 * count}
    losable.wait_until_free()


def test_a_fault_in_the_midst_of_numbered_events_has_a_number(losable):
    body = {"model": "tiny", "input": "Hello?", "max_output_tokens": 900, "stream": True}
    with losable.http as http, http.stream("POST", "/v1/responses", json=body) as answer:
        events = (json.loads(line.removeprefix("data: ")) for line in answer.iter_lines() if line.startswith("data: "))
        found = [next(events)]
        while found[-1]["type"] != "response.output_text.delta":
            found.append(next(events))
        Switch.refusals, Switch.lost = 1, True
        found += events
    assert found[-1]["type"] == "error" and "the device is lost" in found[-1]["message"]
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    losable.wait_until_free()


def test_a_device_that_stays_lost_is_given_up(losable):
    last, answers = lose(losable, refusals=1000)
    assert all('"type":"server_error"' in event for event in last)
    assert {answer.status_code for answer in answers} <= {500, 503}
    with losable.http as http:
        health = http.get("/health/live")
        assert health.status_code == 503 and health.json()["restarts"] == restarts.MOST
        assert http.get("/version").status_code == 200
    with pytest.raises(openai.InternalServerError, match="the device does not answer") as refused:
        losable.openai.completions.create(model="tiny", prompt="x")
    assert refused.value.status_code == 503
    with losable.http as http:
        assert ends(http) == {"stop": 0, "length": 0, "abort": 0, "error": 6}
