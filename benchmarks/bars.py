"""What the CPU is measured on beside its peers, each case with the bars that it must reach; and how they are judged."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

LLAMA, VLLM = "llama.cpp", "vLLM"


@dataclass(frozen=True)
class Bar:
    """The least value of a ratio to a peer, or of the fraction of one of the machine's limits."""

    against: str
    least: float


@dataclass(frozen=True)
class Work:
    """What every side does: ``batch`` sequences, each with ``depth`` tokens in the cache, take ``prompt`` tokens, or give
    ``decode``; the other is 0. The names are those of `engine bench --case`."""

    batch: int
    depth: int
    prompt: int
    decode: int


@dataclass(frozen=True)
class Case:
    """Work on a model with a KV cache of ``kv``, "auto" being what the engine takes unasked, beside llama.cpp with one of f16.

    beside: llama.cpp once more, with this cache; vllm: beside vLLM, too, which runs the model's shape in bf16.
    """

    model: str
    work: Work
    bars: tuple[Bar, ...] = ()
    kv: str = "auto"
    beside: str | None = None
    vllm: bool = False

    @property
    def what(self) -> str:
        work, kv = self.work, "default" if self.kv == "auto" else self.kv
        if work.prompt:
            return f"prompt of {work.prompt}" + (f", {kv} KV" if work.prompt >= 1024 else "")
        count = f"decode, {work.batch} sequence{'s' if work.batch > 1 else ''}"
        return f"{count}, {kv} KV after {work.depth}" if work.depth >= 1024 else count

    @property
    def key(self) -> str:
        """A name without spaces: MODEL/prompt-512, MODEL/prompt-4096-int8, MODEL/decode-8, MODEL/decode-1-at-4096-int8."""
        work = self.work
        if work.prompt:
            return f"{self.model}/prompt-{work.prompt}" + (f"-{self.kv}" if work.prompt >= 1024 else "")
        return f"{self.model}/decode-{work.batch}" + (f"-at-{work.depth}-{self.kv}" if work.depth >= 1024 else "")


@dataclass(frozen=True)
class Job:
    """Cases of a model that are measured in turn with the peers, in processes of their own each round."""

    name: str
    cases: tuple[Case, ...]

    @property
    def model(self) -> str:
        return self.cases[0].model


def _single(model: str, prompt: Sequence[Bar], decode: Sequence[Bar], vllm: bool = False) -> Job:
    works = ((Work(1, 0, 512, 0), prompt), (Work(1, 0, 0, 64), decode))
    return Job(f"{model}, one sequence", tuple(Case(model, work, tuple(bars), vllm=vllm) for work, bars in works))


def _batches(model: str, bars: dict[int, tuple[Bar, ...]]) -> Job:
    cases = tuple(Case(model, Work(n, 64, 0, 32), own, vllm=n == max(bars)) for n, own in bars.items())
    return Job(f"{model}, several sequences", cases)


def _long(model: str, tokens: int, prompt: Bar, f16: Bar, int8: Bar) -> Job:
    whole, decode = Work(1, 0, tokens, 0), Work(1, tokens, 0, 32)
    cases = (
        Case(model, whole, (prompt,)),
        Case(model, whole, (prompt,), kv="f16"),
        Case(model, whole, (prompt,), kv="int8", beside="q8_0"),
        Case(model, decode, (f16,)),
        Case(model, decode, (f16,), kv="f16"),
        Case(model, decode, (int8,), kv="int8", beside="q8_0"),
    )
    return Job(f"{model}, {tokens} tokens of context", cases)


def _llama(least: float) -> Bar:
    return Bar(LLAMA, least)


_MAIN = "qwen3-0.6b-q4_k_m"
JOBS = (
    _single(_MAIN, [_llama(3.5), Bar(VLLM, 1.6)], [_llama(1.3), Bar("bandwidth", 0.8)], vllm=True),
    _batches(_MAIN, {4: (), 8: (_llama(4),), 16: (), 32: (_llama(5), Bar(VLLM, 2.5))}),
    _long(_MAIN, 4096, _llama(4), _llama(3.3), _llama(4)),
    _single("qwen3-0.6b-q8_0", [_llama(4.5)], [_llama(1.2)]),
    _single("qwen3-0.6b-q4_0", [_llama(3)], [_llama(1.2)]),
    _single("llama3.2-1b-q4_k_m", [_llama(3.5)], [_llama(1.2)]),
    _single("llama3.2-1b-q8_0", [_llama(4.5)], [_llama(1.0), Bar("bandwidth", 0.92)]),
    _single("qwen3-0.6b-bf16", [Bar("bf16", 0.6)], [Bar("bandwidth", 0.85)]),
    _single("qwen3-0.6b-f16", [Bar("f32", 0.6)], [Bar("bandwidth", 0.85)]),
    _single("qwen3moe-tiny-q4_k_m", [_llama(1)], [_llama(1)]),
    *(_single(f"qwen3-0.6b-{name}", [], []) for name in ("q5_k_m", "iq4_xs", "q3_k_m", "q2_k")),  # no bar is set
)
QUICK = (f"{_MAIN}/prompt-512", f"{_MAIN}/decode-1", f"{_MAIN}/decode-8")


def select(jobs: Sequence[Job], wanted: Callable[[Case], bool]) -> list[Job]:
    """The jobs that still have cases when those not wanted are left out."""
    kept = [Job(job.name, tuple(case for case in job.cases if wanted(case))) for job in jobs]
    return [job for job in kept if job.cases]


@dataclass(frozen=True)
class Round:
    """One round's figures of a case: tokens a second of each side, and what part of a limit measured beside it the engine
    reached."""

    rates: dict[str, float]
    fractions: dict[str, float]


def summary(case: Case, rounds: Sequence[Round]) -> dict[str, Any]:
    """Medians over the rounds; a ratio is the median of the ratios in each round, not the ratio of medians."""
    ours = [one.rates["engine"] for one in rounds]
    found: dict[str, Any] = {"model": case.model, "what": case.what, "key": case.key, "kv": case.kv}
    found["engine"] = statistics.median(ours)
    for peer in (LLAMA, VLLM):
        pairs = [(one.rates["engine"], one.rates[peer]) for one in rounds if peer in one.rates]
        if pairs:
            ratio = statistics.median(a / b for a, b in pairs)
            found[peer] = {"rate": statistics.median(b for _, b in pairs), "ratio": ratio}
    limits = {name for one in rounds for name in one.fractions}
    found["of"] = {name: statistics.median(one.fractions[name] for one in rounds) for name in sorted(limits)}
    found["bars"] = [judged(bar, found) for bar in case.bars]
    found["rounds"] = [{"rates": one.rates, "of": one.fractions} for one in rounds]
    return found


def judged(bar: Bar, found: dict[str, Any]) -> dict[str, Any]:
    """A bar beside the value that there is; met is None where the peer or the limit is not there."""
    value = found.get(bar.against, {}).get("ratio") if bar.against in (LLAMA, VLLM) else found["of"].get(bar.against)
    return {
        "against": bar.against,
        "least": bar.least,
        "value": value,
        "met": None if value is None else value >= bar.least,
    }
