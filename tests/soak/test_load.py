"""A crowd of random requests, aborted and preempted at random: every survivor has the tokens that it has alone.

A short form runs always; `pytest -m soak` runs ten minutes and stores its figures under benchmarks/results.
"""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import pytest
import result

from engine import LLM, SamplingParams
from engine.errors import EngineError

KV_TOKENS = 512  # far less than the crowd wants, so that sequences are preempted
CROWD = 24


class Crowd:
    """Keeps requests in flight from several threads until the time is up, and remembers what each gave."""

    def __init__(self, llm: LLM, seconds: float) -> None:
        self.llm = llm
        self.end = time.monotonic() + seconds
        self.finished: list[tuple[tuple[int, ...], SamplingParams, tuple[int, ...]]] = []
        self.aborted = self.refused = self.tokens = 0
        self.faults: list[str] = []
        self._lock = threading.Lock()

    def run(self) -> None:
        threads = [threading.Thread(target=self._client, args=(n,)) for n in range(CROWD)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _client(self, n: int) -> None:
        rng = random.Random(time.time_ns() + n)
        while time.monotonic() < self.end and not self.faults:
            try:
                self._one(rng)
            except EngineError as error:
                if "context holds" not in str(error):
                    self.faults.append(f"{type(error).__name__}: {error}")
                with self._lock:
                    self.refused += 1

    def _one(self, rng: random.Random) -> None:
        shared = [1, 403, 407, 261, 378] * rng.randrange(4)
        prompt = [1, *shared, *(rng.randrange(3, 512) for _ in range(rng.choice((1, 3, 17, 60, 200))))]
        params = SamplingParams(
            max_tokens=rng.choice((1, 5, 40, 120, 400)),
            temperature=rng.choice((0.0, 0.0, 1.0)),
            seed=rng.randrange(1 << 32),
            top_k=rng.choice((0, 40)),
            repetition_penalty=rng.choice((1.0, 1.1)),
            ignore_eos=rng.random() < 0.5,
        )
        leave = rng.random() < 0.2
        last = None
        for output in self.llm.stream(prompt, params):
            last = output
            if leave and rng.random() < 0.1:
                break
        assert last is not None
        with self._lock:
            self.tokens += len(last.outputs[0].token_ids)
            if not last.finished:
                self.aborted += 1
            elif last.outputs[0].finish_reason == "error":
                self.faults.append(str(last.outputs[0].stop_reason))
            else:
                self.finished.append((tuple(prompt), params, last.outputs[0].token_ids))


MODES: dict[str, dict[str, object]] = {
    "recompute": {},
    "swap": {"preemption": "swap", "swap_space": 1e-3},
    "contiguous": {"kv_allocator": "contiguous"},
    "contiguous swap": {"kv_allocator": "contiguous", "preemption": "swap", "swap_space": 1e-3},
    "virtual": {"kv_allocator": "virtual"},
    "virtual swap": {"kv_allocator": "virtual", "preemption": "swap", "swap_space": 1e-3},
}


def crowd(stories: Path, backend: str, seconds: float, checks: int, mode: str = "recompute") -> dict[str, object]:
    path = stories / "stories260K-f32.gguf"
    sizes = {"max_num_seqs": 16, "kv_cache_tokens": KV_TOKENS, "max_num_batched_tokens": 64}
    with LLM(path, backend=backend, **sizes, **MODES[mode]) as llm:
        group = Crowd(llm, seconds)
        group.run()
        assert not group.faults, group.faults[0]
        for pool in llm.engine.scheduler_stats().pools:
            assert pool.used == 0, "blocks are still held after all requests have ended"
        stats = llm.engine.scheduler_stats()
        assert stats.host is None or stats.host.used == 0, "host memory is still held"
        sample = random.sample(group.finished, min(checks, len(group.finished)))
        for prompt, params, tokens in sample:
            alone = llm.generate([list(prompt)], params)[0].outputs[0].token_ids
            assert alone == tokens, f"{prompt} with {params} differs alone"
    return {
        "seconds": seconds,
        "finished": len(group.finished),
        "aborted": group.aborted,
        "refused": group.refused,
        "tokens": group.tokens,
        "preemptions": stats.preemptions,
        "swaps": stats.swaps,
        "checked": len(sample),
    }


@pytest.mark.parametrize("mode", MODES)
def test_a_crowd_of_requests(stories, cpu, mode):
    figures = crowd(stories, cpu, seconds=4, checks=40, mode=mode)
    assert figures["checked"] and figures["preemptions"]
    assert bool(figures["swaps"]) == ("swap" in mode)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_a_crowd_of_requests_for_ten_minutes(stories, cpu):
    figures = {mode: crowd(stories, cpu, seconds=600 / len(MODES), checks=500, mode=mode) for mode in MODES}
    result.write("soak-load", figures)
