"""What the host takes of a step, and what it gains that text is made beside the step loop and not in it.

usage: stages.py MODEL...      (bar: 5 % of a step at 0.6 B weights and 32 sequences)

Streams of random prompts run with stage 3 in a thread of its own, and with its work done in the loop's thread, in turn: on the
processor, which has all its cores busy in a step, and on an emulated device, which leaves them to the host while a step runs,
with one step at a time, and with the next before that one ends, as GPUs have it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from result import write

from engine import LLM, SamplingParams
from engine.backend.v1 import Frame, Limits, Segment, StepFn
from engine.program.execute import StepSession
from engine.runtime.outputs import RequestOutput
from engine.testing.devices import NullDevice

STREAMS, PROMPT, TOKENS = 32, 16, 64
BAR = 0.05
STEP_S = 0.003
"""Of the emulated device: a decode step of a small model on a GPU."""


class Watch:
    """When the device was at work: seconds of each step's beginning and end."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, float]] = []
        run: Callable[..., Any] = StepSession._run

        def watched(session: StepSession, *given: Any) -> Any:
            begun = time.perf_counter()
            try:
                return run(session, *given)
            finally:
                self.steps.append((begun, time.perf_counter()))

        StepSession._run = watched  # type: ignore[method-assign, assignment]

    def between(self) -> float:
        """The part of the time from the first step to the last in which no step ran."""
        ran = sum(end - begun for begun, end in self.steps)
        return 1 - ran / (self.steps[-1][1] - self.steps[0][0])


def streamed(llm: LLM, rng: np.random.Generator) -> float:
    """Tokens a second of streams that are all sent at once."""
    params = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    done: list[RequestOutput] = []
    requests = [
        llm.engine.request(None, ids, params, lambda out: done.append(out) if out.finished else None)
        for ids in rng.integers(100, llm.loaded.program.vocab, (STREAMS, PROMPT)).tolist()
    ]
    begun = time.perf_counter()
    llm.engine.admit(*requests)
    while len(done) < STREAMS:
        time.sleep(0.001)
    return STREAMS * TOKENS / (time.perf_counter() - begun)


def emulate(seconds: float) -> None:
    """Steps of the null device take so long, in which the thread sleeps, as it waits for a device."""
    plain = NullDevice.compile

    def compile_(device: NullDevice, segment: Segment, limits: Limits, states: Mapping[str, Any]) -> StepFn:
        run = plain(device, segment, limits, states)

        def slowed(frame: Frame) -> None:
            if segment.name.startswith("body"):
                time.sleep(seconds)
            run(frame)

        return slowed

    NullDevice.compile = compile_  # type: ignore[method-assign, assignment]


def overlap() -> None:
    """The null device takes the next step before the last one has ended."""
    described = NullDevice.describe
    NullDevice.describe = lambda device: replace(described(device), max_in_flight=2)  # type: ignore[method-assign, assignment]


def measure(model: Path, backend: str, name: str, threads: int, rounds: int, watch: Watch) -> dict[str, Any]:
    rng = np.random.default_rng()
    rates: dict[bool, list[float]] = {True: [], False: []}
    between: dict[bool, list[float]] = {True: [], False: []}
    with LLM(model, backend=backend, threads=threads, max_num_seqs=STREAMS, max_model_len=PROMPT + TOKENS) as llm:
        core, processor = llm.engine._core, llm.engine._output_processor
        for number in range(rounds + 1):
            for beside in (True, False) if number % 2 else (False, True):
                core._emit = processor.put if beside else processor.process
                watch.steps.clear()
                rate = streamed(llm, rng)
                if number:  # the first round warms up
                    rates[beside].append(rate)
                    between[beside].append(watch.between())
    ratios = [a / b for a, b in zip(rates[True], rates[False], strict=True)]
    found: dict[str, Any] = {
        "model": model.name,
        "backend": name,
        "host_share": statistics.median(between[True]),
        "host_share_in_the_loop": statistics.median(between[False]),
        "tok_s": statistics.median(rates[True]),
        "gain": statistics.median(ratios),
    }
    print(", ".join(f"{name} {value:.3f}" if isinstance(value, float) else value for name, value in found.items()))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    given = parser.parse_args()
    watch = Watch()
    found = [measure(model, "cpu", "cpu", given.threads, given.rounds, watch) for model in given.models]
    emulate(STEP_S)
    name = f"a device that takes {STEP_S * 1e3:g} ms a step"
    found.append(measure(given.models[0], "null", name, given.threads, given.rounds, watch))
    overlap()
    found.append(measure(given.models[0], "null", f"{name}, two in flight", given.threads, given.rounds, watch))
    print(write("stages", {"threads": given.threads, "streams": STREAMS, "bar": BAR, "models": found}))


if __name__ == "__main__":
    main()
