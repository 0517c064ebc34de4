"""Where a backend stands: the share of a step's time that each kind of op takes, and what of it is still on references."""

from __future__ import annotations

import queue
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..backend.v1 import BoundCall, Device, Frame, Limits, Plan, Segment, Session, StepFn, StepSession
from ..program.reference import ReferenceProvider
from ..runtime.config import EngineConfig
from ..runtime.engine import Engine
from ..runtime.load import load
from ..runtime.outputs import RequestOutput
from ..sampling import SamplingParams

_TOKENS = 16
RUNGS: tuple[tuple[str, frozenset[str]], ...] = (
    ("linear: most time on the device", frozenset({"linear", "linear_group", "moe_linear", "quantize"})),
    ("kv_write and attention: the cache stays on the device", frozenset({"kv_write", "attention", "kv_copy"})),
    (
        "norms, rope, activations: no way through the host",
        frozenset({"rms_norm", "layer_norm", "rope", "gated_act", "add"}),
    ),
)


@dataclass(frozen=True)
class Spent:
    """Seconds of a run by op, and those ops that ran on references."""

    seconds: Mapping[str, float]
    on_host: frozenset[str]

    def lines(self) -> list[str]:
        """A line a rung, and the share that references take."""
        total = sum(self.seconds.values()) or 1.0
        found = []
        for what, ops in RUNGS:
            missing = sorted(ops & self.on_host)
            share = sum(self.seconds.get(op, 0.0) for op in ops) / total
            found.append(f"{share:6.1%} of the time  {what}: {'missing ' + ', '.join(missing) if missing else 'there'}")
        spent = sum(self.seconds[op] for op in self.on_host) / total
        return [*found, f"{spent:6.1%} of the time is spent on references"]


def climb(model: Path, backend: str, prompt: Sequence[int]) -> Spent:
    """One greedy answer, op by op with a fence after each."""
    loaded = load(EngineConfig(model=model, backend=backend))
    seconds: defaultdict[str, float] = defaultdict(float)
    device = _OpByOp(loaded.device)
    plan = replace(
        loaded.plan, body=_timed(loaded.plan.body, device, seconds), head=_timed(loaded.plan.head, device, seconds)
    )
    engine = Engine(replace(loaded, devices={"device": device}, plan=plan))
    outputs: queue.SimpleQueue[RequestOutput] = queue.SimpleQueue()
    try:
        engine.submit(
            None, list(prompt), SamplingParams(temperature=0.0, max_tokens=_TOKENS, ignore_eos=True), outputs.put
        )
        output = outputs.get()
        while not output.finished:
            output = outputs.get()
    finally:
        engine.close()
    completion = output.outputs[0]
    assert completion.finish_reason == "length", (
        f"the answer ended by {completion.finish_reason}: {completion.stop_reason}"
    )
    calls = [bound for segment in (*loaded.plan.body, *loaded.plan.head) for bound in segment.calls]
    on_host = {bound.call.op for bound in calls if isinstance(bound.provider, ReferenceProvider)}
    return Spent(seconds, frozenset(on_host))


class _OpByOp:
    """A device that compiles nothing, so that each op can be timed."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def __getattr__(self, name: str) -> Any:
        if name == "compile":
            raise AttributeError(name)
        return getattr(self._device, name)

    def session(self, plan: Plan) -> Session:
        return StepSession(self, plan)


@dataclass(frozen=True)
class _Timed:
    """A provider whose functions note how long they take."""

    provider: Any
    device: Any
    seconds: defaultdict[str, float]

    def bind(self, bound: BoundCall, limits: Limits) -> StepFn:
        fn = self.provider.bind(replace(bound, provider=self.provider), limits)

        def run(frame: Frame) -> None:
            start = time.perf_counter()
            fn(frame)
            self.device.fence()
            self.seconds[bound.call.op] += time.perf_counter() - start

        return run


def _timed(segments: Sequence[Segment], device: Any, seconds: defaultdict[str, float]) -> tuple[Segment, ...]:
    def timed(bound: BoundCall) -> BoundCall:
        return replace(bound, provider=_Timed(bound.provider, device, seconds))  # type: ignore[arg-type]

    return tuple(replace(s, calls=tuple(map(timed, s.calls))) for s in segments)
