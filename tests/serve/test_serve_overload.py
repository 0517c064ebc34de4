"""More than the server can take, and clients that leave: refusals are honest, and nothing is left behind."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial

import httpx
import numpy as np
import openai
import pytest

from engine.errors import ConfigError
from engine.serve.admission import Admission
from engine.serve.errors import ApiError
from engine.serve.keys import Keys, load_keys

ASK = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 30000, "ignore_eos": True, "stream": True}
SHORT = ASK | {"max_tokens": 2, "stream": False}
LONG = {"max_model_len": 32768, "kv_cache_tokens": 140000}


@pytest.fixture(scope="module")
def running(start):
    """One server whose context is long enough for answers that do not end while a test looks on."""
    return start(**LONG)


class Begun:
    """A long stream of which the first event has come; ``leave`` breaks it off."""

    def __init__(self, http: httpx.Client, **fields) -> None:
        self._stream = http.stream("POST", "/v1/completions", json=ASK | fields)
        response = self._stream.__enter__()
        assert response.status_code == 200
        self._lines = response.iter_lines()  # kept: a response closes with its iterator
        next(self._lines)

    def leave(self) -> None:
        self._stream.__exit__(None, None, None)


def test_a_client_that_leaves_frees_all_blocks(running):
    with running.http as http:
        stream = Begun(http)
        assert running.used_blocks()
        stream.leave()
    running.wait_until_free()
    running.wait_until_logged(gone=True)


def test_a_client_that_leaves_before_a_whole_answer(running):
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{running.url}/v1/completions", json=ASK | {"stream": False, "n": 4}, timeout=0.5)
    running.wait_until_free()
    running.wait_until_logged(gone=True, status=499)


def test_a_storm_of_aborts(running):
    """Clients leave at any moment, before and after the first token; the server goes on and holds nothing."""
    delays = np.random.default_rng().uniform(0, 0.08, 120)

    async def visit(client: httpx.AsyncClient, delay: float) -> None:
        with suppress(TimeoutError, httpx.TransportError):
            async with asyncio.timeout(delay), client.stream("POST", "/v1/completions", json=ASK) as response:
                async for _ in response.aiter_lines():
                    pass

    async def storm() -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=running.url, limits=limits, timeout=60) as client:
            await asyncio.gather(*(visit(client, delay) for delay in delays))

    asyncio.run(storm())
    running.wait_until_free()
    with running.http as http:
        assert http.post("/v1/completions", json=SHORT).status_code == 200
        assert http.get("/health").status_code == 200


def test_a_full_server_refuses_with_a_time_to_come_again(start):
    running = start(**LONG, max_num_seqs=1, options={"max_queue": 0})
    with running.http as http:
        stream = Begun(http)
        refused = http.post("/v1/completions", json=SHORT)
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert 'engine:requests_refused_total{model_name="tiny"} 1.0' in http.get("/metrics").text
        stream.leave()
        running.wait_until_free()
        assert http.post("/v1/completions", json=SHORT).status_code == 200


def test_waiting_requests_begin_when_others_end(start):
    running = start(**LONG, max_num_seqs=1, options={"max_queue": 8})
    answers = []

    def ask() -> None:
        answers.append(httpx.post(f"{running.url}/v1/completions", json=SHORT, timeout=60).status_code)

    with running.http as http:
        stream = Begun(http)
        threads = [threading.Thread(target=ask) for _ in range(5)]
        for thread in threads:
            thread.start()
        admission = running.models.known(None).admission
        running.wait_until(lambda: admission.waiting == 5)
        stream.leave()
        for thread in threads:
            thread.join(60)
    assert answers == [200] * 5
    running.wait_until_free()


def test_a_deadline_ends_a_request(start):
    running = start(**LONG, options={"deadline": 0.2})
    with running.http as http:
        late = http.post("/v1/completions", json=ASK | {"stream": False})
        assert late.status_code == 504 and late.json()["error"]["code"] == "deadline"
        with http.stream("POST", "/v1/completions", json=ASK) as response:
            events = [line for line in response.iter_lines() if line]
        assert '"code":"deadline"' in events[-1] and "[DONE]" not in events
    running.wait_until_free()


def test_keys(start, tmp_path):
    digest = hashlib.sha256(b"sesame").hexdigest()
    file = tmp_path / "keys"
    file.write_text(f"# who may ask\n{digest} ali\n\n")
    running = start(**LONG, keys=load_keys(file, {"ENGINE_SERVE_KEYS": "alpha, beta"}), options={"max_per_key": 1})
    with running.http as http:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": digest}):
            refused = http.post("/v1/completions", json=SHORT, headers=headers)
            assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key"
            assert refused.headers["www-authenticate"] == "Bearer"  # RFC 9110, 15.5.2
        assert http.get("/metrics").status_code == http.get("/v1/models").status_code == 401
        assert http.get("/health/live").status_code == 200
    ali, alpha = (running.openai.with_options(api_key=key) for key in ("sesame", "alpha"))
    prompt = "x" * 100
    fields = {"model": "tiny", "prompt": prompt, "max_tokens": 2}
    assert ali.completions.create(**fields).usage.prompt_tokens_details.cached_tokens == 0
    assert ali.completions.create(**fields).usage.prompt_tokens_details.cached_tokens > 0
    assert alpha.completions.create(**fields).usage.prompt_tokens_details.cached_tokens == 0, "one key reads another's"
    on = {"ignore_eos": True}
    stream = ali.completions.create(model="tiny", prompt=prompt, max_tokens=30000, stream=True, extra_body=on)
    events = iter(stream)
    next(events)
    with pytest.raises(openai.RateLimitError):
        ali.completions.create(**fields)
    alpha.completions.create(**fields)
    stream.close()
    running.wait_until_free()
    for _ in range(5):  # one after the other is not two at a time
        assert list(ali.completions.create(**fields, stream=True))
    assert {entry["caller"] for entry in running.logs if entry["status"] == 200} >= {"ali", alpha_name("alpha")}
    assert "sesame" not in str(running.logs) and prompt not in str(running.logs)


def alpha_name(key: str) -> str:
    return f"key-{hashlib.sha256(key.encode()).hexdigest()[:8]}"


def test_files_of_keys_that_are_wrong(tmp_path):
    file = tmp_path / "keys"
    for text in ("abc", "0" * 64 + " two names", "0" * 63 + "g"):
        file.write_text(text)
        with pytest.raises(ConfigError, match="Line 1"):
            load_keys(file, {})
    with pytest.raises(ConfigError):
        load_keys(tmp_path / "none", {})
    assert Keys({}).caller(None) == "-"


def test_callers_take_turns():
    """One who sends many requests does not keep another waiting behind all of them."""

    async def order() -> list[str]:
        admission = Admission(capacity=1, max_queue=100)
        first = admission.enter("busy", 1)
        places = [admission.enter("busy", 1) for _ in range(4)] + [admission.enter("rare", 1)]
        begun = []
        first.leave()
        while len(begun) < len(places):
            place = next(p for p in places if p.begun is not None and p not in begun)
            begun.append(place)
            place.leave()
        assert admission.idle.is_set() and admission.running == admission.waiting == 0
        return [place.caller for place in begun]

    assert asyncio.run(order()).index("rare") <= 1


def test_a_queue_that_one_caller_fills_has_room_for_others():
    """As much as an even share of it; the one who fills it is refused, and without any keys all callers are one."""

    async def refused() -> list[bool]:
        admission = Admission(capacity=1, max_queue=4)
        found = []
        for caller in ["busy"] * 6 + ["rare"] * 3 + ["other"] * 2 + ["busy"]:
            try:
                admission.enter(caller, 1)
                found.append(False)
            except ApiError as error:
                found.append(error.status == 429)
        return found

    assert asyncio.run(refused()) == [False] * 5 + [True] + [False] * 2 + [True] + [False, True] + [True]


def test_the_lowest_priority_begins_first():
    """Of all callers, in the order in which they came where it is the same, and before what waits already."""

    async def order() -> list[int]:
        admission = Admission(capacity=1, max_queue=100)
        first = admission.enter("a", 1)
        places = [
            admission.enter(caller, 1, priority)
            for caller, priority in zip("abbaba", (5, 5, -1, 0, 5, -1), strict=True)
        ]
        begun = []
        first.leave()
        while len(begun) < len(places):
            place = next(p for p in places if p.begun is not None and p not in begun)
            begun.append(place)
            place.leave()
        return [place.priority for place in begun]

    assert asyncio.run(order()) == [-1, -1, 0, 5, 5, 5]


def test_admission_counts_what_enters_and_leaves():
    """Random places come and go in any order: never more than the capacity run, and in the end nothing is held."""
    rng = np.random.default_rng()

    async def play() -> None:
        admission = Admission(capacity=5, max_queue=6, max_per_key=4)
        places = []
        for _ in range(500):
            if places and rng.random() < 0.5:
                place = places.pop(rng.integers(len(places)))
                place.leave()
                place.leave()
            else:
                with suppress(ApiError):
                    places.append(admission.enter(str(rng.integers(4)), int(rng.integers(1, 6))))
            running = sum(p.weight for p in places if p.begun is not None)
            assert running == admission.running <= 5
            assert sum(p.weight for p in places if p.begun is None) == admission.waiting <= 6 + 3 + 2 + 1
            assert admission.idle.is_set() == (not places)
        for place in places:
            place.leave()
        assert admission.running == admission.waiting == 0

    asyncio.run(play())


@contextmanager
def served_apart(model, *options):
    """A server in a process of its own, the lines that it writes, and its address."""
    command = [sys.executable, "-m", "engine.cli.main", "serve", str(model), "--port", "0", "--name", "tiny"]
    command += ["--max-context", "16384", "--backend", "cpu", *options]
    environment = {name: value for name, value in os.environ.items() if name != "ENGINE_SERVE_KEYS"}
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        lines = iter(server.stderr.readline, "")
        yield server, lines, next(found[0] for line in lines if (found := re.search(r"http://\S+", line)))
    finally:
        server.kill()
        server.wait()
        server.stderr.close()


def test_sigterm_lets_running_requests_finish(talker, tmp_path):
    """In a process of its own: the stream goes on to its end, what is new gets 503, and the exit is clean."""
    with served_apart(talker, "--drain", "300") as (server, lines, url):
        with httpx.Client(base_url=url, timeout=60) as http, httpx.Client(base_url=url, timeout=60) as other:
            assert other.get("/health/ready").status_code == 200
            with http.stream("POST", "/v1/completions", json=ASK | {"max_tokens": 2500}) as response:
                events = response.iter_lines()
                next(events)
                server.send_signal(signal.SIGTERM)
                next(line for line in lines if '"draining"' in line)
                refused = other.post("/v1/completions", json=SHORT)
                assert refused.status_code == 503 and refused.headers["retry-after"]
                assert other.get("/health/ready").status_code == 503
                assert other.get("/health/live").status_code == 200
                left = [line for line in events if line]
            assert left[-1] == "data: [DONE]" and '"finish_reason":"length"' in left[-2]
        assert server.wait(60) == 0


def test_what_outlasts_the_drain_ends_with_a_reason(talker):
    """A stream by an event, a whole answer by 503, and one that waits for its turn, too; a body that does not come holds
    nobody up."""
    asked, room = ASK | {"max_tokens": 16000}, ("--drain", "1", "--max-seqs", "2")
    with served_apart(talker, *room) as (server, lines, url), httpx.Client(base_url=url, timeout=60) as http:
        address = httpx.URL(url)
        with socket.create_connection((address.host, address.port)) as half, ThreadPoolExecutor(2) as pool:
            half.sendall(b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"prompt')
            with http.stream("POST", "/v1/completions", json=asked) as response:
                events = response.iter_lines()
                next(events)
                ask = partial(httpx.post, f"{url}/v1/completions", json=asked | {"stream": False}, timeout=60)
                others = [pool.submit(ask) for _ in range(2)]
                while 'waiting{model_name="tiny"} 1.0' not in httpx.get(f"{url}/metrics").text:
                    time.sleep(0.01)
                begun = time.monotonic()
                server.send_signal(signal.SIGTERM)
                left = [line for line in events if line]
            ended = json.loads(left[-1].removeprefix("data: "))
            assert ended["error"]["code"] == "shutting_down", left[-1]
            for whole in (other.result() for other in others):
                assert whole.status_code == 503 and whole.json()["error"]["code"] == "shutting_down", whole.text
            assert server.wait(30) == 0 and time.monotonic() - begun < 10
        assert {json.loads(line)["event"] for line in lines} >= {"request", "library"}, "nothing but lines of the log"


@pytest.mark.clock
def test_readers_that_stop_reading_hold_no_places(start, talker):
    """What they asked for is done, and waits for them; the places are others'."""
    running = start(model=talker, max_num_seqs=2, max_model_len=16384, kv_cache_tokens=20000)
    asked = json.dumps(ASK | {"max_tokens": 3000, "logprobs": 32}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(asked)}\r\n\r\n"
    address = httpx.URL(running.url)
    with ExitStack() as stack:
        for _ in range(3):
            reader = stack.enter_context(socket.socket())
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.connect((address.host, address.port))
            reader.sendall(head.encode() + asked)
        with running.http as http:
            begun = time.monotonic()
            running.wait_until(lambda: running.models.known(None).admission.running)
            assert http.post("/v1/completions", json=SHORT).status_code == 200
            assert time.monotonic() - begun < 60
            running.wait_until(lambda: not running.models.known(None).admission.running)
