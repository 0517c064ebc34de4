"""A segment as one function, evaluated once at its end. Steps in which every sequence has one token come with few different
sizes, so they are traced with mx.compile."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace

import mlx.core as mx

from engine.backend.v1 import Dims, Frame, Limits, Segment, StepFn

TRACES = 32
"""Traces that are kept of a segment; the one that was not used for longest goes."""
EAGER = frozenset({"process_logits", "sample", "causal_conv", "gated_delta", "ssm_scan"})
"""Ops that look at what comes with the step to see what they can leave out, or evaluate what they read of a state before they
write to it."""

Traced = Callable[[list[mx.array]], list[mx.array]]


def compile_segment(segment: Segment, limits: Limits, traced: bool) -> StepFn:
    """``traced``: whether decode steps go through mx.compile."""
    return _Segment(segment, limits, traced)


class _Traces(threading.local):
    """What a thread has traced. MLX keeps traces a thread, too, and frees them after Python's part of the thread has ended; the
    process aborts when the interpreter is ending by then. So they go first, with this."""

    def __init__(self) -> None:
        self.traces: OrderedDict[Dims, Traced] = OrderedDict()


class _Segment:
    def __init__(self, segment: Segment, limits: Limits, traced: bool) -> None:
        self._fns = [bound.provider.bind(bound, limits) for bound in segment.calls]
        self._inputs = [value.id for value in segment.inputs]
        self._tables = [value.id for value in segment.inputs if value.name.startswith("page_table.")]
        self._outputs = [value.id for value in segment.outputs]
        self._states = sorted({name for bound in segment.calls for name in bound.call.states.values()})
        self._traced = traced and not any(bound.call.op in EAGER for bound in segment.calls)
        self._kept = _Traces()

    def __call__(self, frame: Frame) -> None:
        dims = frame.dims
        if self._traced and dims.T == dims.S and not dims.C + dims.H + dims.F:
            self._run_trace(frame)
        else:
            for fn in self._fns:
                fn(frame)
        mx.eval([frame.values[key] for key in self._outputs], [frame.states[name] for name in self._states])

    def _run_trace(self, frame: Frame) -> None:
        width = 1 << (frame.dims.P - 1).bit_length() if frame.dims.P else 0
        values = frame.values | {key: _widened(frame.values[key], width) for key in self._tables}
        trace = self._trace(replace(frame.dims, P=width))
        # No list may outlive the call: a state that something else refers to would be copied, and not written in place.
        made = trace([values[key] for key in self._inputs] + [frame.states[name] for name in self._states])
        frame.values.update(zip(self._outputs, made, strict=False))
        frame.states.update(zip(self._states, made[len(self._outputs) :], strict=True))

    def _trace(self, dims: Dims) -> Traced:
        """The trace for steps of one size, which is made when it is called first."""
        traces = self._kept.traces
        if dims not in traces:
            traces[dims] = mx.compile(lambda arrays: self._whole(dims, arrays))
            if len(traces) > TRACES:
                traces.popitem(last=False)
        traces.move_to_end(dims)
        return traces[dims]

    def _whole(self, dims: Dims, arrays: Sequence[mx.array]) -> list[mx.array]:
        values = dict(zip(self._inputs, arrays, strict=False))
        states = dict(zip(self._states, arrays[len(self._inputs) :], strict=True))
        frame = Frame(dims, values, states)
        for fn in self._fns:
            fn(frame)
        return [frame.values[key] for key in self._outputs] + [frame.states[name] for name in self._states]


def _widened(table: mx.array, width: int) -> mx.array:
    """A page table with null blocks behind, which no query sees: a power of two of columns, so that there are few sizes."""
    return mx.pad(table, [(0, 0), (0, width - table.shape[1])])
