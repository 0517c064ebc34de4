"""Execution: a session walks the segments of a plan on one thread of its own, transferring at their borders, and swaps
blocks of the KV cache between steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..backend.v1 import (
    HOST_DTYPES,
    Array,
    Device,
    Frame,
    Plan,
    Segment,
    StepFn,
    StepInputs,
    StepResult,
    Value,
    block_access_of,
    compile_of,
)
from ..errors import EngineStoppedError

_RESULTS = ("tokens", "status", "logprob", "top_ids", "top_logprobs")


@dataclass(frozen=True)
class StepTicket:
    """A submitted step."""

    future: Future[StepResult]

    def wait(self) -> StepResult:
        return self.future.result()


@dataclass(frozen=True)
class BlockTicket:
    """Blocks that are being saved or filled."""

    future: Future[dict[str, Array]]

    def wait(self) -> dict[str, Array]:
        return self.future.result()


def swap_refusal(device: Device, plan: Plan) -> str | None:
    """None where sessions of the plan can swap blocks, or a sentence that says why not. Without ``export_blocks`` and
    ``import_blocks`` only a state that goes through the host with every op anyway can be copied as a whole."""
    on_device = any(state.group is not None and plan.state_places[state.name] == "device" for state in plan.states)
    if on_device and block_access_of(device) is None and not plan.round_trip:
        return f"The device {device.describe().name} offers no export_blocks and import_blocks, so it cannot swap."
    return None


class StepSession:
    """The default session: segments in order, a whole segment at once where the device compiles it."""

    def __init__(self, device: Device, plan: Plan) -> None:
        self._device = device
        self._plan = plan
        self._access = None if plan.round_trip else block_access_of(device)
        self._states: dict[str, dict[str, Any]] = {"device": {}, "host": {}}
        for state in plan.states:
            place = plan.state_places[state.name]
            on_host = place == "host"
            made = (
                np.zeros(state.shape, HOST_DTYPES[state.dtype]) if on_host else device.alloc(state.shape, state.dtype)
            )
            self._states[place][state.name] = made
        self._body = [(segment, self._bind(segment)) for segment in plan.body]
        self._head = [(segment, self._bind(segment)) for segment in plan.head]
        self._inputs = {v.name: v for segment in (*plan.body, *plan.head) for v in segment.inputs}
        self._thread: ThreadPoolExecutor | None = ThreadPoolExecutor(1, thread_name_prefix="engine-step")

    def submit(self, inputs: StepInputs) -> StepTicket:
        if self._thread is None:
            raise EngineStoppedError("The session is closed.")
        return StepTicket(self._thread.submit(self._run, inputs))

    def export_blocks(self, blocks: Sequence[Sequence[int]]) -> BlockTicket:
        return self._between_steps(self._export, blocks)

    def import_blocks(self, blocks: Sequence[Sequence[int]], contents: Mapping[str, Array]) -> BlockTicket:
        return self._between_steps(self._import, blocks, contents)

    def close(self) -> None:
        """Waits for submitted steps, then frees the states."""
        if self._thread is None:
            return
        self._thread.shutdown(wait=True)
        self._thread = None
        for state in self._states["device"].values():
            self._device.free(state)
        self._states = {"device": {}, "host": {}}

    # -- one step --------------------------------------------------------------------------------------------------

    def _bind(self, segment: Segment) -> StepFn:
        compiled = None if self._plan.round_trip else compile_of(self._device)
        if segment.place == "device" and compiled is not None:
            whole = compiled(segment, self._plan.limits, self._states["device"])
            if whole is not None:
                return whole
        fns = [bound.provider.bind(bound, self._plan.limits) for bound in segment.calls]

        def run(frame: Frame) -> None:
            for fn in fns:
                fn(frame)

        return run

    def _between_steps(self, action: Callable[..., dict[str, Array]], *given: Any) -> BlockTicket:
        if self._thread is None:
            raise EngineStoppedError("The session is closed.")
        return BlockTicket(self._thread.submit(action, *given))

    def _export(self, blocks: Sequence[Sequence[int]]) -> dict[str, Array]:
        found = {}
        for name, chosen, place in self._paged(blocks):
            state = self._states[place][name]
            if place == "device" and self._access is not None:
                found[name] = self._access.export_blocks(state, chosen)
            else:
                found[name] = (state if place == "host" else self._device.copy_out(state))[chosen]
        return found

    def _import(self, blocks: Sequence[Sequence[int]], contents: Mapping[str, Array]) -> dict[str, Array]:
        for name, chosen, place in self._paged(blocks):
            state = self._states[place][name]
            if place == "host":
                state[chosen] = contents[name]
            elif self._access is not None:
                self._states[place][name] = self._access.import_blocks(state, chosen, contents[name])
            else:
                whole = np.array(self._device.copy_out(state))
                whole[chosen] = contents[name]
                self._states[place][name] = self._device.copy_in(whole)
                self._device.free(state)
        return {}

    def _paged(self, blocks: Sequence[Sequence[int]]) -> Iterator[tuple[str, Array, str]]:
        """Each state that has blocks: its name, those chosen of it, and its place."""
        ids = [np.array(chosen, np.int32) for chosen in blocks]
        for state in self._plan.states:
            if state.group is not None:
                yield state.name, ids[state.group], self._plan.state_places[state.name]

    def _run(self, inputs: StepInputs) -> StepResult:
        frames = {place: Frame(inputs.dims, {}, states) for place, states in self._states.items()}
        copied: list[Any] = []
        try:
            return self._steps(inputs, frames, copied)
        finally:
            # What was copied in for this step; by references on the device, that is every value.
            for value in frames["device"].values.values() if self._plan.round_trip else copied:
                self._device.free(value)

    def _steps(self, inputs: StepInputs, frames: Mapping[str, Frame], copied: list[Any]) -> StepResult:
        for name, array in inputs.arrays.items():
            value = self._inputs.get(name)
            if value is not None:
                frames["host"].values[value.id] = array
        segments = self._body + self._head if inputs.dims.R else self._body
        for segment, run in segments:
            frame, other = frames[segment.place], frames["host" if segment.place == "device" else "device"]
            for value in segment.inputs:
                if value.id not in frame.values:
                    frame.values[value.id] = self._transfer(other.values[value.id], segment.place, copied)
            run(frame)
        return self._result(frames, bool(inputs.dims.R))

    def _transfer(self, value: Any, place: str, copied: list[Any]) -> Any:
        if place == "host":
            return self._device.copy_out(value)
        copied.append(self._device.copy_in(value))
        return copied[-1]

    def _result(self, frames: Mapping[str, Frame], sampled: bool) -> StepResult:
        kept = {v.name: self._fetch(frames, v) for v in self._outputs(sampled) if v.name in self._plan.keep}
        if not sampled:
            none = np.zeros(0, np.int32)
            empty = np.zeros((0, 0), np.float32)
            return StepResult(none, none, np.zeros(0, np.float32), empty.astype(np.int32), empty, kept)
        found = {v.name: self._fetch(frames, v) for v in self._outputs(sampled) if v.name in _RESULTS}
        return StepResult(**found, values=kept)

    def _outputs(self, sampled: bool) -> list[Value]:
        segments = (*self._plan.body, *self._plan.head) if sampled else self._plan.body
        return [value for segment in segments for value in segment.outputs]

    def _fetch(self, frames: Mapping[str, Frame], value: Value) -> Array:
        if value.id in frames["host"].values:
            return np.array(frames["host"].values[value.id])
        return self._device.copy_out(frames["device"].values[value.id])
