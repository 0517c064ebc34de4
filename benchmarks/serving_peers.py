"""`engine serve` beside llama-server and vLLM: the same conversations asked by the same client, servers in turn, one at a time.

usage: serving_peers.py MODEL --dataset SHAREGPT.json [--llama DIR] [--vllm VENV]      (needs the extra serve)

DIR is of build_llama_cpp.sh, VENV as in cpu_peers.py with gguf. Measured are: all requests at once, against llama-server's
best number of slots and vLLM; the engine and llama-server at one rate that both hold; continuous batching against static
batches; and decodes while a long prompt arrives. Each server has answered other prompts, about as many tokens, before, and
then rested, so that what it does in the background once it has started (ours takes its cache's memory) is over.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from result import write
from servers import Server, ServerError, engine_server, llama_server, vllm_server

from engine.formats import open_checkpoint
from engine.serve.bench.client import Answer, Target
from engine.serve.bench.load import Ask, arrivals, conversation_asks, random_asks
from engine.serve.bench.report import DEFAULT_GOALS, summary
from engine.serve.bench.run import How, run

SLOTS = (8, 16, 32)
CONTEXT = 1024  # tokens of a conversation, with its answer
SHARE_OF_CAPACITY = 0.7  # of llama-server's: the rate at which both are asked
BATCH = 16
LONG_PROMPT, STREAM = 4096, 512
WARM = (16, 384)  # prompts, tokens of each
REST_S = 20.0
BARS = {"requests": 4.0, "vllm": 3.0, "static": 2.0, "itl": 3.0}
_TIMEOUT_S = 1800.0


def how(url: str, server: Server, concurrency: int | None = None) -> How:
    options = {"temperature": 0.0, "ignore_eos": True}
    target = Target(url, "/v1/completions")
    return How(target=target, model=server.model, options=options, concurrency=concurrency, timeout_s=_TIMEOUT_S)


def measured(server: Server, work: Callable[[str], Any]) -> Any:
    """What ``work`` gives for the server's URL, once it is warm and at rest."""
    count, tokens = WARM
    asks = random_asks(np.random.default_rng(), count, (tokens, 4), 0.0, 1000)
    with server.started() as url:
        asyncio.run(run(how(url, server), asks, [0.0] * count))  # whether all were answered matters of the work alone
        time.sleep(REST_S)
        return work(url)


def load(server: Server, asks: Sequence[Ask], times: Sequence[float], concurrency: int | None = None) -> dict[str, Any]:
    """The figures of one run. Raises ServerError if a request failed or was cut short."""

    def work(url: str) -> dict[str, Any]:
        return checked(server, asks, *asyncio.run(run(how(url, server, concurrency), asks, times)))

    found: dict[str, Any] = measured(server, work)
    print(
        f"  {server.name}: {found['request_throughput']:.2f} requests/s, {found['output_throughput']:.1f} tok/s,"
        f" p99 TTFT {found['ttft_ms']['p99']:.0f} ms, p99 TPOT {found['tpot_ms']['p99']:.0f} ms",
        flush=True,
    )
    return found


def checked(server: Server, asks: Sequence[Ask], answers: Sequence[Answer], seconds: float) -> dict[str, Any]:
    wrong = [a.error or f"status {a.status}" for a in answers if not a.completed]
    short = [(a.output_tokens, b.output_tokens) for a, b in zip(answers, asks, strict=True)]
    if wrong or any(got != wanted for got, wanted in short):
        raise ServerError(f"{server.name} failed {len(wrong)} of {len(asks)} requests: {wrong[:1] or short}")
    return summary(answers, seconds, DEFAULT_GOALS)


def at_once(
    engine: Server, peers: Sequence[Server], vllm: Server | None, asks: Sequence[Ask], rounds: int
) -> tuple[dict[str, Any], Server]:
    """Rates with all requests sent at once: the first round tries each peer, the others the one that was best."""
    times = [0.0] * len(asks)
    first = {peer.name: load(peer, asks, times) for peer in peers}
    best = max(peers, key=lambda peer: float(first[peer.name]["request_throughput"]))
    ours, theirs, others = [load(engine, asks, times)], [first[best.name]], []
    for number in range(rounds):
        if number:
            theirs.append(load(best, asks, times))
            ours.append(load(engine, asks, times))
        if vllm is not None:
            others.append(load(vllm, asks, times))
    figures = {
        "engine": middle(ours),
        "peer": middle(theirs),
        "peer_name": best.name,
        "tried": {name: found["request_throughput"] for name, found in first.items()},
        "times_requests": times_requests(ours, theirs),
    }
    if others:
        figures |= {"vllm": middle(others), "times_vllm": times_requests(ours, others)}
    return figures, best


def times_requests(ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]]) -> float:
    return statistics.median(
        a["request_throughput"] / b["request_throughput"] for a, b in zip(ours, theirs, strict=True)
    )


def middle(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The run of the median rate; the slower one of two."""
    return sorted(runs, key=lambda found: float(found["request_throughput"]))[(len(runs) - 1) // 2]


def same_rate(engine: Server, peer: Server, asks: Sequence[Ask], rate: float, seed: int) -> dict[str, Any]:
    times = arrivals(np.random.default_rng([seed, 1]), len(asks), rate, 1.0)
    return {"rate": rate, "engine": load(engine, asks, times), "peer": load(peer, asks, times)}


def static(engine: Server, asks: Sequence[Ask], rounds: int) -> dict[str, Any]:
    """So many requests at a time: the next sent when one ends; or, static, when all of a batch have, where an answer that has
    ended is computed on with the others until the longest ends (Orca's request-level scheduling), or leaves its batch."""

    def in_batches(url: str, padded: bool) -> float:
        seconds = 0.0
        for start in range(0, len(asks), BATCH):
            batch = asks[start : start + BATCH]
            longest = max(ask.output_tokens for ask in batch)
            batch = [replace(ask, output_tokens=longest) for ask in batch] if padded else batch
            answers, taken = asyncio.run(run(how(url, engine), batch, [0.0] * len(batch)))
            checked(engine, batch, answers, taken)
            seconds += taken
        return len(asks) / seconds

    found = []
    for _ in range(rounds):
        continuous = load(engine, asks, [0.0] * len(asks), BATCH)["request_throughput"]
        rates = [measured(engine, partial(in_batches, padded=padded)) for padded in (True, False)]
        print(
            "  in static batches of {}: {:.2f} requests/s; {:.2f} where ended ones leave".format(BATCH, *rates),
            flush=True,
        )
        found.append((continuous, *rates))
    middles = [statistics.median(column) for column in zip(*found, strict=True)]
    return {
        "batch": BATCH,
        **dict(zip(("continuous", "static", "leaving"), middles, strict=True)),
        "times": statistics.median(rate / padded for rate, padded, _ in found),
        "times_leaving": statistics.median(rate / leaving for rate, _, leaving in found),
    }


def long_prompt(engine: Server, seed: int) -> dict[str, Any]:
    """Times between the tokens of decodes while a long prompt arrives among them."""
    rng = np.random.default_rng([seed, 2])
    decodes = random_asks(rng, BATCH, (16, STREAM), 0.0, 1000)
    prompt = random_asks(rng, 1, (LONG_PROMPT, 8), 0.0, 1000)

    def work(url: str) -> dict[str, Any]:
        times = [0.0] * BATCH + [4.0]
        answers, _ = asyncio.run(run(how(url, engine), [*decodes, *prompt], times))
        checked(engine, [*decodes, *prompt], answers, 1.0)
        gaps = np.concatenate([np.diff(answer.times) for answer in answers[:BATCH]]) * 1e3
        p50, p99, worst = np.percentile(gaps, (50, 99, 100)).tolist()
        ttft = (answers[-1].times[0] - answers[-1].sent) * 1e3
        return {"itl_p50_ms": p50, "itl_p99_ms": p99, "itl_max_ms": worst, "times": p99 / p50, "ttft_ms": ttft}

    found: dict[str, Any] = measured(engine, work)
    print(
        f"  ITL p50 {found['itl_p50_ms']:.0f} ms, p99 {found['itl_p99_ms']:.0f} ms, worst {found['itl_max_ms']:.0f} ms"
    )
    return {"decodes": BATCH, "prompt": LONG_PROMPT, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--dataset", type=Path, required=True)
    parser.add_argument("--llama", type=Path)
    parser.add_argument("--vllm", type=Path)
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--scale", type=float, default=0.25, help="of the answers' length")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    tokenizer = open_checkpoint(given.model).tokenizer()
    asks = conversation_asks(
        np.random.default_rng([given.seed, 0]), given.requests, given.dataset, tokenizer, given.scale, CONTEXT
    )
    engine = engine_server(given.model, given.threads)
    figures: dict[str, Any] = {
        "model": given.model.name,
        "threads": given.threads,
        "requests": given.requests,
        "scale": given.scale,
        "rounds": given.rounds,
        "bars": BARS,
    }
    if given.llama:
        peers = [llama_server(given.llama, given.model, given.threads, slots, CONTEXT) for slots in SLOTS]
        vllm = vllm_server(given.vllm, given.model, given.threads, CONTEXT) if given.vllm else None
        print("All at once", flush=True)
        figures["at_once"], best = at_once(engine, peers, vllm, asks, given.rounds)
        rate = SHARE_OF_CAPACITY * figures["at_once"]["peer"]["request_throughput"]
        print(f"At {rate:.2f} requests/s", flush=True)
        figures["same_rate"] = same_rate(engine, best, asks, rate, given.seed)
    print(f"{BATCH} at a time", flush=True)
    figures["static"] = static(engine, asks, given.rounds)
    print("A long prompt among decodes", flush=True)
    figures["long_prompt"] = long_prompt(engine, given.seed)
    print(write("serving-peers", figures))


if __name__ == "__main__":
    main()
