"""What `engine serve` leaves of a fast device: streams of answers over a device that takes a given time a step, computes nothing,
and has two steps in flight, as a GPU has. What is missing to the device's own rate is the server's: the step loop, text, HTTP.

usage: serving_host.py --before FOLDER      (FOLDER: a checkout of another commit, measured in turn)
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import psutil

HERE = Path(__file__).parents[1]
CASES = ((32, 0.003), (64, 0.010), (256, 0.010))
"""Streams at a time, and seconds of a step."""
TOKENS, LETTER = 400, 70
"""Of an answer, and the token that it consists of: a letter of the tiny model."""
WARM = 32


def serve(step_s: float, options: list[str]) -> None:
    """The server's process: the null device sleeps in each step, has two of them in flight, and gives a letter each time."""
    from stages import emulate, overlap

    from engine.cli.main import main
    from engine.program.execute import StepSession

    results = StepSession._result

    def lettered(session: Any, *given: Any) -> Callable[[], Any]:
        result = results(session, *given)

        def give() -> Any:
            found = result()
            found.tokens[:] = LETTER
            return found

        return give

    emulate(step_s)
    overlap()
    StepSession._result = lettered  # type: ignore[method-assign, assignment]
    sys.argv = ["engine", "serve", *options]
    main()


class Stream(asyncio.Protocol):
    """One answer: how many events it had, and what the last of them says."""

    def __init__(self, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\nConnection: close\r\n"
        self._request = f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.events, self.last = 0, b""

    def connection_made(self, transport: Any) -> None:
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.events += data.count(b"data: ")
        self.last = (self.last + data)[-512:]

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set_result(None)


async def answers(port: int, streams: int, tokens: int) -> list[Stream]:
    """All at once; each must have all its tokens."""
    loop = asyncio.get_running_loop()
    body = {"model": "tiny", "max_tokens": tokens, "stream": True, "ignore_eos": True, "temperature": 0}
    body |= {"stream_options": {"include_usage": True}}
    made = []
    for number in range(streams):
        prompt = [100 + number % 100, 7, 120, 9]
        _, stream = await loop.create_connection(lambda ids=prompt: Stream({**body, "prompt": ids}), "127.0.0.1", port)  # type: ignore[misc]
        made.append(stream)
    await asyncio.gather(*(stream.ended for stream in made))
    if any(b'"completion_tokens":%d,' % tokens not in stream.last or b"[DONE]" not in stream.last for stream in made):
        raise SystemExit("An answer has not come whole.")
    return made


@contextmanager
def started(folder: Path, model: Path, streams: int, step_s: float) -> Any:
    """The process of a server from a checkout's folder, and its port."""
    parts = [folder / "core", *sorted((folder / "backends").iterdir())]
    options = [model, "--port", 0, "--name", "tiny", "--backend", "null", "--max-seqs", streams]
    options += ["--max-context", 1024, "--kv-tokens", streams * 1024]
    command = [sys.executable, __file__, "--serve", step_s, *options]
    server = subprocess.Popen(
        [str(part) for part in command],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, parts))},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert server.stderr is not None
    try:
        said = next((found for line in server.stderr if (found := re.search(r"http://[^:]+:(\d+)", line))), None)
        if said is None:
            raise SystemExit("The server has not started.")
        Thread(target=list, args=(server.stderr,), daemon=True).start()
        yield psutil.Process(server.pid), int(said[1])
    finally:
        server.terminate()
        server.wait()


def measure(folder: Path, model: Path, streams: int, step_s: float) -> dict[str, float]:
    """One round of a case."""
    with started(folder, model, streams, step_s) as (process, port):
        asyncio.run(answers(port, streams, WARM))
        cpu, begun = sum(process.cpu_times()[:2]), time.perf_counter()
        made = asyncio.run(answers(port, streams, TOKENS))
        seconds, cpu = time.perf_counter() - begun, sum(process.cpu_times()[:2]) - cpu
    tokens = streams * TOKENS
    rate = tokens / seconds
    return {
        "tok_s": rate,
        "share": rate * step_s / streams,
        "cpu_us": cpu / tokens * 1e6,
        "events": sum(stream.events for stream in made) / tokens,
    }


def main() -> None:
    from result import write

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    sides = {"now": HERE, "before": given.before.resolve()}
    cases: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        sys.path.insert(0, str(HERE / "tests"))
        import tiny_models

        model = tiny_models.write_talker(Path(folder))
        for streams, step_s in CASES:
            rounds = [
                {side: measure(path, model, streams, step_s) for side, path in sides.items()}
                for _ in range(given.rounds)
            ]
            found: dict[str, Any] = {"streams": streams, "step_ms": step_s * 1e3}
            for side in sides:
                names = rounds[0][side]
                found[side] = {name: statistics.median(one[side][name] for one in rounds) for name in names}
            cases.append(found)
            print(json.dumps(found), flush=True)
    print(write("serving-host", {"rounds": given.rounds, "tokens": TOKENS, "cases": cases}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(float(sys.argv[2]), sys.argv[3:])
    else:
        main()
