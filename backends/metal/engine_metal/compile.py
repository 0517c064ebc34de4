"""A segment as one function, evaluated once at its end."""

from __future__ import annotations

import mlx.core as mx

from engine.backend.v1 import Frame, Limits, Segment, StepFn


def compile_segment(segment: Segment, limits: Limits) -> StepFn:
    fns = [bound.provider.bind(bound, limits) for bound in segment.calls]
    states = {name for bound in segment.calls for name in bound.call.states.values()}

    def run(frame: Frame) -> None:
        for fn in fns:
            fn(frame)
        mx.eval([frame.values[value.id] for value in segment.outputs], [frame.states[name] for name in states])

    return run
