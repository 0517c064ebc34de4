"""All at once that strangers do: the server answers the next request within a second, and every KV block is free again."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from contextlib import suppress

import httpx
import numpy as np
import psutil
import pytest

MIB = 1 << 20
JSON = {"content-type": "application/json"}
ASK = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 30000, "ignore_eos": True, "stream": True}
SHORT = {"model": "tiny", "prompt": "x", "max_tokens": 1}
BOMBS = [
    {"regex": "(a{1000}){1000}"},
    {"regex": "((((a{100}){100}){100}){100}){100}"},
    {"regex": "(a?){5000}a{5000}"},
    {"choice": [f"{n:x}" for n in range(20000)]},
    {"json": {"anyOf": [{"properties": {f"a{n}": {}, f"b{n}": {}}, "type": "object"} for n in range(900)]}},
    {"json": {"allOf": [{"anyOf": [{"properties": {f"k{i}": {"const": j}}} for j in range(3)]} for i in range(12)]}},
    {"json": {"allOf": [{"type": "string", "pattern": f"^.*a.{{{n}}}$"} for n in range(5, 40)]}},
    {"json": {"type": "integer", "multipleOf": 99991, "minimum": 1, "maximum": 10**17}},
    {"grammar": 'start: e\ne: e e e | e e | /[a-z]*/ | "a"'},
    {
        "grammar": "start: "
        + " | ".join(f"T{n}" for n in range(900))
        + "".join(f"\nT{n}: /[a-z]*{n}/" for n in range(900))
    },
]


def repeated(head: bytes, item: bytes, tail: bytes) -> bytes:
    """A body of nearly 8 MiB, the most that is taken. Those below that are "near" have nearly as many parts as are taken."""
    return head + item * ((8 * MIB - 1000) // len(item)) + tail


LARGE = {
    "numbers": ("/v1/completions", repeated(b'{"prompt": [', b"1.5,", b"1]}")),
    "lists": ("/v1/completions", repeated(b'{"prompt": [', b"[],", b"[]]}")),
    "kinds": ("/v1/completions", repeated(b'{"prompt": [', b'"",1,[],', b"1]}")),
    "ids": ("/v1/completions", repeated(b'{"prompt": [', b"5,", b"5]}")),
    "text": ("/v1/completions", repeated(b'{"prompt": "', b"Hello there ", b'"}')),
    "stop_ids": ("/v1/completions", repeated(b'{"prompt": "x", "stop_token_ids": [', b"5,", b"5]}")),
    "messages": ("/v1/chat/completions", repeated(b'{"messages": [', b'{"role":"user","content":"x"},', b"{}]}")),
    "objects": ("/v1/responses", repeated(b'{"input": [', b"{},", b"{}]}")),
    "tools": ("/v1/chat/completions", repeated(b'{"messages": [], "tools": [', b'{"type":"function"},', b"{}]}")),
    "near_numbers": ("/v1/completions", b'{"prompt": [' + b"1.5," * 500_000 + b"1]}"),
    "near_ids": ("/v1/completions", b'{"prompt": [' + b"5," * 500_000 + b"5]}"),
    "near_lists": ("/v1/completions", b'{"prompt": [' + b"[]," * 131_000 + b"[]]}"),
    "near_messages": (
        "/v1/chat/completions",
        b'{"messages": [' + b'{"role":"user","content":"x"},' * 65_000 + b"{}]}",
    ),
    "near_fields": ("/v1/completions", b'{"prompt": "x"' + b"".join(b',"k%d":1' % n for n in range(131_000)) + b"}"),
    "fields": ("/v1/completions", b'{"prompt": "x"' + b"".join(b',"k%d":1' % n for n in range(600_000)) + b"}"),
    "biases": (
        "/v1/completions",
        b'{"prompt": "x", "logit_bias": {"0": 1' + b"".join(b',"%d":""' % n for n in range(600_000)) + b"}}",
    ),
}


@pytest.fixture(scope="module")
def running(start):
    return start(max_model_len=32768, kv_cache_tokens=140000)


class Visitor:
    """A connection that a test has in its hands."""

    def __init__(self, running, path: str, body: bytes, length: int | None = None) -> None:
        self._address = running.url.removeprefix("http://").split(":")
        length = len(body) if length is None else length
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
        self._request = head.encode() + body

    async def __aenter__(self) -> asyncio.StreamReader:
        reader, self._writer = await asyncio.open_connection(*self._address, limit=4096)
        self._writer.write(self._request)
        with suppress(ConnectionError):  # it may be refused before it is read
            await self._writer.drain()
        return reader

    async def __aexit__(self, *_) -> None:
        self._writer.transport.abort()


async def status(running, path: str, body: bytes, length: int | None = None) -> int:
    async with Visitor(running, path, body, length) as reader:
        return int((await reader.readline()).split()[1])


async def answered_soon(running) -> None:
    """Within a second of two cores' work, since others may hold the machine up."""
    start = time.process_time()
    assert await status(running, "/v1/completions", json.dumps(SHORT).encode()) == 200
    assert time.process_time() - start < 2.0


@pytest.mark.parametrize("aborts", [200, pytest.param(2000, marks=pytest.mark.slow)])
def test_a_storm(running, aborts):
    rng = np.random.default_rng()
    ask = json.dumps(ASK).encode()
    at_a_time = asyncio.Semaphore(100)

    async def leave(delay: float, events: int) -> None:
        """Leaves after some events, or while it waits for them."""
        async with at_a_time, Visitor(running, "/v1/completions", ask) as reader:
            with suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    while events and await reader.readline():
                        events -= 1

    async def read_slowly(seconds: float) -> None:
        async with Visitor(running, "/v1/completions", ask) as reader:
            await reader.read(10)
            await asyncio.sleep(seconds)

    async def stay_half_open(seconds: float) -> None:
        async with Visitor(running, "/v1/completions", b'{"prompt', 100):
            await asyncio.sleep(seconds)

    async def refused(body: bytes, length: int | None = None) -> None:
        assert 400 <= await status(running, "/v1/completions", body, length) < 500

    async def storm() -> None:
        visits = [leave(*visit) for visit in zip(rng.uniform(0, 0.5, aborts), rng.integers(0, 20, aborts), strict=True)]
        visits += [read_slowly(1.0) for _ in range(20)] + [stay_half_open(1.0) for _ in range(20)]
        visits += [refused(b"x" * MIB, 100 * MIB) for _ in range(5)]
        bad = (
            b'{"prompt": "\xff"}',
            b'{"prompt": "x", "top_p": NaN}',
            b'{"prompt": "x", "min_p": -Infinity}',
            b"{",
            b"",
        )
        visits += [refused(body) for body in bad * 10]
        visits += [
            status(running, "/v1/completions", json.dumps(SHORT | {"structured_outputs": b}).encode()) for b in BOMBS
        ]
        rng.shuffle(visits)
        await asyncio.gather(*visits)
        await answered_soon(running)

    asyncio.run(storm())
    running.wait_until_free()
    with running.http as http:
        assert http.get("/health").status_code == 200
        model = http.get("/stats").json()["models"][0]
    assert (model["running"], model["waiting"], model["kv_used"]) == (0, 0, 0)
    [pool] = running.engine.scheduler_stats().pools
    assert pool.free + pool.cached == pool.total


@pytest.fixture(scope="module")
def alone(talker):
    """A server in a process of its own, whose work is not this one's: its process and address."""
    command = [sys.executable, "-c", "from engine.cli.main import main; main()", "serve", str(talker), "--port", "0"]
    settings = ["--name", "tiny", "--backend", "cpu", "--threads", "2", "--kv-tokens", "40000"]
    with subprocess.Popen([*command, *settings], stderr=subprocess.PIPE, text=True) as process:
        url = next(line.split()[-1] for line in process.stderr if "Serving " in line)
        reading = threading.Thread(target=process.stderr.read)
        reading.start()
        yield psutil.Process(process.pid), url
        process.terminate()
        reading.join()


@pytest.mark.parametrize("name", LARGE)
def test_large_bodies_hold_up_nobody(alone, name):
    """Whatever three bodies are full of, they are refused, and each request that comes meanwhile is answered when the server has
    worked for less than a second. One text of that size is enough: it is tokenized beside all else, for seconds."""
    process, url = alone

    def worked() -> float:
        times = process.cpu_times()
        return times.user + times.system

    path, body = LARGE[name]
    found = []

    def send() -> None:
        found.append(httpx.post(url + path, content=body, headers=JSON, timeout=120))

    senders = [threading.Thread(target=send) for _ in range(1 if name == "text" else 3)]
    with httpx.Client(base_url=url, timeout=120) as http:
        assert http.post("/v1/completions", json=SHORT).status_code == 200  # the connection is there
        for sender in senders:
            sender.start()
        while len(found) < len(senders):
            before = worked()
            assert http.post("/v1/completions", json=SHORT).status_code == 200
            assert worked() - before < 0.75
    for sender in senders:
        sender.join()
    assert [answer.status_code for answer in found] == [400] * len(senders)
    assert all(answer.json()["error"]["message"].endswith(".") for answer in found)


@pytest.mark.parametrize("bomb", BOMBS, ids=lambda bomb: next(iter(bomb)))
def test_grammars_hold_up_nobody(running, bomb):
    """Several at a time, and again while the grammar is known."""
    body = json.dumps(SHORT | {"max_tokens": 20, "structured_outputs": bomb}).encode()

    async def visit() -> None:
        for _ in range(2):
            asked = [asyncio.create_task(status(running, "/v1/completions", body)) for _ in range(3)]
            await asyncio.sleep(0.02)
            await answered_soon(running)
            assert set(await asyncio.gather(*asked)) <= {200, 400}

    asyncio.run(visit())
    running.wait_until_free()
