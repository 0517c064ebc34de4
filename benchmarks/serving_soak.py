"""A server at twice what it takes, for minutes: 1,000 connections that ask again as soon as they are answered.

It passes if nothing but 429 is refused; if the server's memory has not grown (the most of the run's last quarter is at most 5 %
and 16 MiB above the most of its second quarter, the first being the warm-up); if no request and no KV block is left at the end;
and if greedy requests among the others get the tokens that they got alone.

    python benchmarks/serving_soak.py --seconds 600
"""

from __future__ import annotations

import argparse
import asyncio
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import result

from engine.serve.bench.client import Target
from engine.serve.bench.load import random_asks

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import tiny_models

RUNNING, WAITING = 64, 420  # a quarter more than run are the scheduler's: 500 in all
SAMPLES = 8
GROWTH, SPARE = 1.05, 16 << 20


def started(folder: Path) -> tuple[subprocess.Popen[str], str]:
    """The server's process, and its URL."""
    command = [sys.executable, "-m", "engine.cli.main", "serve", str(tiny_models.write_talker(folder)), "--port", "0"]
    command += ["--name", "tiny", "--backend", "cpu", "--max-context", "1024", "--max-queue", str(WAITING)]
    command += ["--max-seqs", str(RUNNING)]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    for line in server.stderr:
        if found := re.search(r"http://\S+", line):
            return server, found[0]
    raise SystemExit("The server has not started.")


async def load(url: str, connections: int, seconds: float, answers: Counter[str]) -> None:
    """Keeps so many connections busy, counting how their requests end."""
    end, target = time.monotonic() + seconds, Target(url, "/v1/completions")
    rng = np.random.default_rng()

    async def visit() -> None:
        while time.monotonic() < end:
            [ask] = random_asks(rng, 1, (32, 48), 0.5, tiny_models.VOCAB)
            body = {"model": "tiny", "prompt": ask.prompt, "max_tokens": ask.output_tokens, "stream": True}
            answer = await target.ask(body | {"ignore_eos": True}, 120.0)
            answers["completed" if answer.completed else str(answer.status or answer.error)] += 1
            if answer.status == 429:
                await asyncio.sleep(rng.uniform(0.5, 1.5))

    await asyncio.gather(*(visit() for _ in range(connections)))


async def sampled(http: httpx.AsyncClient, number: int) -> str | None:
    """The tokens of a greedy request, None where it is refused."""
    body = {"model": "tiny", "prompt": [100 + number, 7, 120 + number], "max_tokens": 32, "temperature": 0}
    answer = await http.post("/v1/completions", json=body | {"logprobs": 0})
    return None if answer.status_code == 429 else str(answer.json()["choices"][0]["logprobs"]["tokens"])


async def watch(process: psutil.Process, memory: list[int]) -> None:
    """Notes the process's resident memory."""
    while True:
        memory.append(process.memory_info().rss)
        await asyncio.sleep(0.2)


async def soak(url: str, process: psutil.Process, connections: int, seconds: float) -> dict[str, Any]:
    """The run's figures."""
    answers: Counter[str] = Counter()
    memory: list[int] = []
    same = different = 0
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        alone = [await sampled(http, number) for number in range(SAMPLES)]
        running = asyncio.create_task(load(url, connections, seconds, answers))
        watching = asyncio.create_task(watch(process, memory))
        asked = 0
        while not running.done():
            number = (asked := asked + 1) % SAMPLES
            if (tokens := await sampled(http, number)) is not None:
                same, different = same + (tokens == alone[number]), different + (tokens != alone[number])
            await asyncio.wait([running], timeout=0.2)
        await running
        watching.cancel()
        model = (await http.get("/stats")).json()["models"][0]
    quarter = len(memory) // 4
    before, after = max(memory[quarter : 2 * quarter]), max(memory[-quarter:])
    passed = {
        "nothing_but_429": set(answers) <= {"completed", "429"} and answers["completed"] > 0,
        "memory": after <= before * GROWTH + SPARE,
        "all_free": not (model["kv_used"] or model["running"] or model["waiting"]),
        "same_tokens": same > 0 and not different,
    }
    figures = {"seconds": seconds, "connections": connections, "answers": dict(answers), "memory_before": before}
    return figures | {"memory_after": after, "same": same, "different": different, "stats": model, "passed": passed}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--connections", type=int, default=1000)
    parser.add_argument("--no-write", action="store_true", help="leave no file under benchmarks/results")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        server, url = started(Path(folder))
        try:
            log = subprocess.DEVNULL
            drain = subprocess.Popen(["cat"], stdin=server.stderr, stdout=log)  # or its log would fill the pipe
            figures = asyncio.run(soak(url, psutil.Process(server.pid), given.connections, given.seconds))
        finally:
            server.terminate()
            server.wait(60)
            drain.wait(60)
    print({name: figures[name] for name in ("answers", "memory_before", "memory_after", "same", "different", "passed")})
    if not given.no_write:
        result.write("serving-soak", figures)
    return 0 if all(figures["passed"].values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
