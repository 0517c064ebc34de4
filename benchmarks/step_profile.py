"""Where a step of the CPU backend spends its time, kernel by kernel, for docs/performance.md.

usage: step_profile.py MODEL.gguf [--threads 2] [--rounds 5] [--context 4096]
Works: decode (one token) after 16 tokens and after --context, chunks of 8, 32 and 512 tokens at the beginning of a sequence,
and the last 512 of --context. As many tokens go through the head as sequences would: all of 1, 8 and 32, one of 512. Medians
over the rounds of each kernel's time on the slowest thread, barriers included; two of each before are not timed. Writes
results/step-profile.json.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from result import write

from engine.evaluate.forward import Forward
from engine.runtime.config import EngineConfig
from engine.runtime.load import Loaded, load

CHUNK = 512


def recorded(loaded: Loaded) -> list[Any]:
    """The native segments of the session that is made next, as they come."""
    segments: list[Any] = []
    device: Any = loaded.device
    compile_ = device.compile

    def keep(*given: Any) -> Any:
        step = compile_(*given)
        segments.append(step.native)
        return step

    device.compile = keep
    return segments


class Profile:
    """Times one work after another on a sequence of random tokens."""

    def __init__(self, model: Path, threads: int, rounds: int, context: int) -> None:
        loaded = load(
            EngineConfig(
                model=model, backend="cpu", threads=threads, max_model_len=context + 64, max_num_batched_tokens=CHUNK
            )
        )
        self._segments = recorded(loaded)
        self._forward = Forward(loaded)
        self._rounds = rounds
        self._ids = np.random.default_rng(0).integers(1000, 30000, context + 64).tolist()

    def measure(self, tokens: int, before: int, rows: int) -> dict[str, Any]:
        """One work: a decode goes on where the last one ended, anything else begins anew."""
        walls: list[float] = []
        kernels: dict[str, list[float]] = defaultdict(list)
        again = tokens > 1
        self._fill(before)
        for number in range(2 + self._rounds):
            start = before if again else before + number
            if again and before and number:
                self._fill(before)
            for segment in self._segments:
                segment.set_profiling(True)  # from zero
            begun = time.perf_counter()
            self._step(tokens, start, rows)
            wall = time.perf_counter() - begun
            if number >= 2:
                walls.append(wall)
                for name, seconds in self._seconds().items():
                    kernels[name].append(seconds)
        parts = {name: round(statistics.median(found) * 1e3, 3) for name, found in kernels.items()}
        parts = {name: ms for name, ms in sorted(parts.items(), key=lambda item: -item[1]) if ms}
        work = {"tokens": tokens, "before": before, "rows_of_head": rows}
        return {**work, "step_ms": round(statistics.median(walls) * 1e3, 2), "kernels_ms": parts}

    def _seconds(self) -> dict[str, float]:
        """By kernel; the products of the head, which is the second segment, apart."""
        found: dict[str, float] = defaultdict(float)
        for number, segment in enumerate(self._segments):
            for name, _, seconds in segment.profile():
                found[f"{name} of the head" if number and name == "linear" else name] += seconds
        return found

    def _fill(self, before: int) -> None:
        for start in range(0, before, CHUNK):
            count = min(CHUNK, before - start)
            self._forward.run(self._ids[start : start + count], start, np.zeros(0, np.int32))

    def _step(self, tokens: int, before: int, rows: int) -> None:
        ids = self._ids[before : before + tokens]
        self._forward.run(ids, before, np.arange(tokens - rows, tokens, dtype=np.int32))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--context", type=int, default=4096)
    args = parser.parse_args()
    profile = Profile(args.model, args.threads, args.rounds, args.context)
    works = [(1, 16, 1), (8, 0, 8), (32, 0, 32), (CHUNK, 0, 1), (1, args.context, 1), (CHUNK, args.context - CHUNK, 1)]
    found = [profile.measure(*work) for work in works]
    print(write("step-profile", {"model": args.model.stem, "threads": args.threads, "works": found}))


if __name__ == "__main__":
    main()
