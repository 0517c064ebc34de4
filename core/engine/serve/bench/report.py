"""What a run's answers amount to, in the figures of vLLM's bench serve."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from engine.errors import UsageError

from .client import Answer

PERCENTILES = (50, 90, 99)
TIMES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "between pieces",
    "e2el": "whole request",
}
DEFAULT_GOALS = {"ttft": 2000.0, "tpot": 50.0}


def goals(texts: Sequence[str]) -> dict[str, float]:
    """``ttft:2000`` and the like as milliseconds by name."""
    if not texts:
        return dict(DEFAULT_GOALS)
    found = {}
    for text in texts:
        name, _, value = text.partition(":")
        try:
            found[name] = float(value)
        except ValueError:
            found[name] = -1.0
        if name not in ("ttft", "tpot", "e2el") or not found[name] > 0:
            raise UsageError(
                f"--goodput is {text!r}; it must be ttft, tpot or e2el and milliseconds, such as ttft:2000."
            )
    return found


def summary(answers: Sequence[Answer], seconds: float, wanted: Mapping[str, float]) -> dict[str, Any]:
    """Rates a second of ``seconds``, times in milliseconds; ``goodput`` counts requests that meet all of ``wanted``."""
    done = [answer for answer in answers if answer.completed]
    times = [_times(answer) for answer in done]
    prompt, output = sum(a.prompt_tokens for a in done), sum(a.output_tokens for a in done)
    good = sum(all(t.get(name, 0.0) <= most for name, most in wanted.items()) for t in times)
    gaps = [gap for a in done for gap in np.diff(a.times) * 1e3]
    pooled = {name: [t[name] for t in times if name in t] for name in ("ttft", "tpot", "e2el")} | {"itl": gaps}
    failures = Counter(str(a.status) if a.status not in (0, 200) else a.error for a in answers if not a.completed)
    return {
        "completed": len(done),
        "failed": len(answers) - len(done),
        "failures": dict(failures.most_common(5)),
        "duration_s": seconds,
        "prompt_tokens": prompt,
        "cached_tokens": sum(answer.cached_tokens for answer in done),
        "output_tokens": output,
        "request_throughput": len(done) / seconds,
        "output_throughput": output / seconds,
        "total_token_throughput": (prompt + output) / seconds,
        "peak_concurrency": _peak(answers),
        "goodput": good / seconds,
        "goodput_goals_ms": dict(wanted),
        **{f"{name}_ms": _statistics(pooled[name]) for name in TIMES},
    }


def _times(answer: Answer) -> dict[str, float]:
    """Of one request in milliseconds; no time per output token where there is one token alone."""
    first, last = answer.times[0] - answer.sent, answer.times[-1] - answer.sent
    found = {"ttft": first * 1e3, "e2el": last * 1e3}
    if answer.output_tokens > 1:
        found["tpot"] = (last - first) * 1e3 / (answer.output_tokens - 1)
    return found


def _statistics(values: Sequence[float]) -> dict[str, float] | None:
    if not len(values):
        return None
    points = np.percentile(values, PERCENTILES).tolist()
    return {"mean": float(np.mean(values))} | {f"p{p}": point for p, point in zip(PERCENTILES, points, strict=True)}


def _peak(answers: Sequence[Answer]) -> int:
    """The most requests that were under way at a time."""
    changes = sorted([(a.sent, 1) for a in answers] + [(a.ended, -1) for a in answers])
    return int(max(np.cumsum([change for _, change in changes]), default=0))
