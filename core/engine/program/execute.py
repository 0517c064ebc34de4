"""Execution: a session walks the segments of a plan, transferring at their borders, and swaps blocks of the KV cache between
steps."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import numpy as np

from ..backend.v1 import (
    HOST_DTYPES,
    Array,
    BlockAccess,
    Device,
    Dims,
    Frame,
    Plan,
    Runs,
    Segment,
    StateSpec,
    StepFn,
    StepInputs,
    StepResult,
    Value,
    VirtualMemory,
    block_access_of,
    compile_of,
    copy_in_all_of,
    copy_out_all_of,
    populate_of,
    virtual_memory_of,
)
from ..errors import EngineStoppedError
from .bounds import Bounds
from .group import CollectiveProvider
from .lane import Lane
from .padding import Padding
from .population import Population, Room
from .transfers import Transfer, by_place, converted, transfers

_SWITCH_S = 0.001
"""After which the interpreter's lock goes from one thread to another. The thread of steps lets go of it in each call of a
driver, and would wait 5 ms for it, as Python has it, while others plan the next step and make text of the last."""
_SETTLED_S = 0.1  # after a step: then no other is likely to follow at once
RESULTS = ("tokens", "status", "logprob", "top_ids", "top_logprobs")
"""Outputs of the head that a step gives."""


@dataclass(frozen=True)
class StepTicket:
    """A submitted step. ``future`` gives what waits for its results, once the device has all of the step's work."""

    future: Future[Callable[[], StepResult]]

    def wait(self) -> StepResult:
        return self.future.result()()


@dataclass(frozen=True)
class BlockTicket:
    """Blocks that are being saved or filled."""

    future: Future[dict[str, Array]]

    def wait(self) -> dict[str, Array]:
        return self.future.result()


def swap_refusal(devices: Device | Mapping[str, Device], plan: Plan) -> str | None:
    """None where sessions of the plan can swap blocks, or a sentence that says why not. Without ``export_blocks`` and
    ``import_blocks`` only a state that goes through the host with every op anyway can be copied as a whole."""
    places = {plan.state_places[state.name] for state in plan.states if state.group is not None}
    for place, device in by_place(devices).items():
        if place in places - plan.round_trips and block_access_of(device) is None:
            return f"The device {device.describe().name} offers no export_blocks and import_blocks, so it cannot swap."
    return None


@dataclass(frozen=True)
class _Bound:
    """A segment, ready to run, and what is brought to its place before."""

    segment: Segment
    run: StepFn
    entering: tuple[Transfer, ...]


class StepSession:
    """The default session: segments in order, a whole segment at once where the device compiles it. ``devices``: one, or
    those of a mixed plan by the names of their places. Steps of a plan with buckets are padded, and their results cut. Steps run
    on a thread of the session's where a device takes several at a time, else on that of whoever waits for them."""

    def __init__(self, devices: Device | Mapping[str, Device], plan: Plan) -> None:
        self._devices = by_place(devices)
        self._plan = plan
        self._bounds = Bounds(plan)
        self._padding = Padding(plan) if plan.buckets or plan.limits.decode_buckets else None
        self._access = {place: self._access_of(place) for place in self._devices}
        self._lost: Exception | None = None
        self._states: dict[str, dict[str, Any]] = {place: {} for place in (*self._devices, "host")}
        for state in plan.states:
            place = plan.state_places[state.name]
            self._states[place][state.name] = self._made(state, place)
        segments = (*plan.body, *plan.head)
        bound = self._bound(segments)
        self._body, self._head = bound[: len(plan.body)], bound[len(plan.body) :]
        self._embedding = self._bound((*plan.body, *plan.embedding), len(plan.body))
        self._inputs = {v.name: v for segment in (*segments, *plan.embedding) for v in segment.inputs}
        ahead = any(device.describe().max_in_flight > 1 for device in self._devices.values())
        self._lane: Executor | None = ThreadPoolExecutor(1, thread_name_prefix="engine-step") if ahead else Lane()
        if ahead:
            sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_S))
        self._population: Population | None = None
        self._idle_since: float | None = -inf

    def submit(self, inputs: StepInputs) -> StepTicket:
        lane = self._open_lane()
        self._bounds.check(inputs)
        return StepTicket(lane.submit(self._unless_lost, self._run, inputs))

    def warm_up(self) -> None:
        """Runs steps of nothing but padding, one of each size, so that devices compile now what they would compile later.
        Without buckets there is nothing to do."""
        self._run_each(() if self._padding is None else self._padding.empty_steps())

    def run_largest(self) -> None:
        """Runs the steps that take the most memory, of nothing but padding: for a session that no sequence will use."""
        self._run_each(Padding(self._plan).largest_steps())

    def populate(self) -> Population:
        """Asks for the memory of all states while no steps run, where devices would give it step by step."""
        self._open_lane()
        rooms = []
        for spec in self._plan.states:
            place = self._plan.state_places[spec.name]
            if spec.group in self._plan.pages:
                continue  # its memory comes with the steps that need it
            if place != "host" and (populate := populate_of(self._devices[place])) is not None:
                entry = int(np.prod(spec.shape[1:])) * HOST_DTYPES[spec.dtype].itemsize
                rooms.append(Room(populate, self._states[place][spec.name], spec.shape[0], entry))
        self._population = Population(rooms, self._busy)
        return self._population

    def _busy(self) -> bool:
        """Whether a step runs, or has just ended, so that the next is likely to follow."""
        since = self._idle_since
        return since is None or time.monotonic() - since < _SETTLED_S

    def export_blocks(self, blocks: Sequence[Sequence[int]]) -> BlockTicket:
        self._bounds.check_blocks(blocks)
        return self._between_steps(self._export, blocks)

    def import_blocks(self, blocks: Sequence[Sequence[int]], contents: Mapping[str, Array]) -> BlockTicket:
        self._bounds.check_blocks(blocks)
        return self._between_steps(self._import, blocks, contents)

    def remap(self, unmapped: Sequence[Runs], mapped: Sequence[Runs]) -> None:
        lane = self._open_lane()
        self._bounds.remap(unmapped, mapped)
        lane.submit(self._remap, unmapped, mapped)

    def close(self) -> None:
        """Waits for submitted steps, then frees the states."""
        if self._lane is None:
            return
        if self._population is not None:
            self._population.stop()
        self._lane.shutdown(wait=True)
        self._lane = None
        for place, device in self._devices.items():
            for state in self._states[place].values():
                device.free(state)
        # What refers to a session, or to a frame of a step that has failed, keeps no memory.
        for states in self._states.values():
            states.clear()
        self._body, self._head, self._embedding = [], [], []

    def _open_lane(self) -> Executor:
        """What runs steps. EngineStoppedError once the session is closed."""
        if self._lane is None:
            raise EngineStoppedError("The session is closed.")
        return self._lane

    def _run_each(self, steps: Iterable[StepInputs]) -> None:
        """Steps of nothing but padding, one after the other."""
        lane = self._open_lane()
        for inputs in steps:
            lane.submit(self._run_exactly, inputs, True).result()()

    def _made(self, state: StateSpec, place: str) -> Any:
        """A state's memory, or its addresses, with memory for the null block's page."""
        if place == "host":
            return np.zeros(state.shape, HOST_DTYPES[state.dtype])
        if state.group is None or state.group not in self._plan.pages:
            return self._devices[place].alloc(state.shape, state.dtype)
        memory = self._virtual(place)
        value = memory.reserve(state.shape, state.dtype)
        memory.map(value, 0, self._plan.pages[state.group])
        return value

    def _virtual(self, place: str) -> VirtualMemory:
        memory = virtual_memory_of(self._devices[place])
        assert memory is not None, "the plan has pages on a device without virtual memory"
        return memory

    # -- one step --------------------------------------------------------------------------------------------------

    def _bound(self, segments: Sequence[Segment], first: int = 0) -> list[_Bound]:
        """Segments from ``first`` on, bound to run after those before them."""
        pairs = list(zip(segments, transfers(segments), strict=True))[first:]
        return [_Bound(segment, self._bind(segment), entering) for segment, entering in pairs]

    def _access_of(self, place: str) -> BlockAccess | None:
        return None if place in self._plan.round_trips else block_access_of(self._devices[place])

    def _bind(self, segment: Segment) -> StepFn:
        exchange = isinstance(segment.calls[0].provider, CollectiveProvider)
        own = segment.place != "host" and segment.place not in self._plan.round_trips and not exchange
        compiled = compile_of(self._devices[segment.place]) if own else None
        if compiled is not None:
            whole = compiled(segment, self._plan.limits, self._states[segment.place])
            if whole is not None:
                return whole
        fns = [bound.provider.bind(bound, self._plan.limits) for bound in segment.calls]

        def run(frame: Frame) -> None:
            for fn in fns:
                fn(frame)

        return run

    def _between_steps(self, action: Callable[..., dict[str, Array]], *given: Any) -> BlockTicket:
        return BlockTicket(self._open_lane().submit(self._unless_lost, action, *given))

    def _unless_lost(self, action: Callable[..., Any], *given: Any) -> Any:
        """Nothing runs any more once memory could not be mapped: it would be written to."""
        if self._lost is not None:
            raise self._lost
        return action(*given)

    def _remap(self, unmapped: Sequence[Runs], mapped: Sequence[Runs]) -> None:
        try:
            self._unless_lost(self._remap_states, unmapped, mapped)
        except Exception as error:
            self._lost = error

    def _remap_states(self, unmapped: Sequence[Runs], mapped: Sequence[Runs]) -> None:
        states = [state for state in self._plan.states if state.group in self._plan.pages]
        places = {state.name: self._plan.state_places[state.name] for state in states}
        if any(unmapped):
            for place in set(places.values()):
                self._devices[place].fence()  # steps submitted before may be reading yet
        for runs, unmapping in ((unmapped, True), (mapped, False)):
            for state in states:
                assert state.group is not None
                memory = self._virtual(places[state.name])
                change = memory.unmap if unmapping else memory.map
                for first, count in runs[state.group]:
                    change(self._states[places[state.name]][state.name], first, count)

    def _export(self, blocks: Sequence[Sequence[int]]) -> dict[str, Array]:
        found = {}
        for name, chosen, place in self._paged(blocks):
            state, access = self._states[place][name], self._access.get(place)
            if access is not None:
                found[name] = access.export_blocks(state, chosen)
            else:
                found[name] = (state if place == "host" else self._devices[place].copy_out(state))[chosen]
        return found

    def _import(self, blocks: Sequence[Sequence[int]], contents: Mapping[str, Array]) -> dict[str, Array]:
        for name, chosen, place in self._paged(blocks):
            state, access = self._states[place][name], self._access.get(place)
            if place == "host":
                state[chosen] = contents[name]
            elif access is not None:
                self._states[place][name] = access.import_blocks(state, chosen, contents[name])
            else:
                device = self._devices[place]
                whole = np.array(device.copy_out(state))
                whole[chosen] = contents[name]
                self._states[place][name] = device.copy_in(whole)
                device.free(state)
        return {}

    def _paged(self, blocks: Sequence[Sequence[int]]) -> Iterator[tuple[str, Array, str]]:
        """Each state that has blocks: its name, those chosen of it, and its place."""
        ids = [np.array(chosen, np.int32) for chosen in blocks]
        for state in self._plan.states:
            if state.group is not None:
                yield state.name, ids[state.group], self._plan.state_places[state.name]

    def _run(self, inputs: StepInputs) -> Callable[[], StepResult]:
        self._idle_since = None
        try:
            sampled, padding = bool(inputs.dims.R), self._padding
            if padding is None:
                return self._run_exactly(inputs, sampled)
            padded = self._run_exactly(padding.pad(inputs), sampled)
            return lambda: padding.cut(padded(), inputs.dims)
        finally:
            self._idle_since = time.monotonic()

    def _run_exactly(self, inputs: StepInputs, sampled: bool) -> Callable[[], StepResult]:
        """Runs the step, or where a device computes by itself, gives it all of the step's work. What comes of it waits for the
        results: the next step need not."""
        frames = {place: Frame(inputs.dims, {}, states) for place, states in self._states.items()}
        copied: list[tuple[str, Any]] = []
        try:
            return self._steps(inputs, sampled, frames, copied)
        finally:
            # What was copied in for this step; by references on the device, that is every value.
            for place, value in copied:
                if place not in self._plan.round_trips:
                    self._devices[place].free(value)
            for place in self._plan.round_trips:
                for value in frames[place].values.values():
                    self._devices[place].free(value)

    def _steps(
        self, inputs: StepInputs, sampled: bool, frames: Mapping[str, Frame], copied: list[tuple[str, Any]]
    ) -> Callable[[], StepResult]:
        for name, array in inputs.arrays.items():
            value = self._inputs.get(name)
            if value is not None:
                frames["host"].values[value.id] = array
        for bound in self._body + self._head if sampled else self._body:
            self._enter(bound, frames, copied)
            bound.run(frames[bound.segment.place])
        result = self._result(frames, sampled)
        rows = inputs.arrays.get("embedding_rows")
        if rows is None or not self._embedding:
            return result
        embeddings = self._embed(rows, inputs.dims, frames, copied)
        return lambda: replace(result(), embeddings=embeddings())

    def _embed(
        self, rows: Array, dims: Dims, frames: Mapping[str, Frame], copied: list[tuple[str, Any]]
    ) -> Callable[[], Array]:
        """The hidden rows f32 [rows, hidden]: as many at a time as the head may have, with buckets exactly as many."""
        fixed = bool(self._plan.buckets)
        most = dims.R if fixed else self._plan.limits.dims.R
        output = self._plan.embedding[-1].outputs[-1]
        parts = []
        for start in range(0, len(rows), most):
            chosen = rows[start : start + most]
            if fixed:
                chosen = np.pad(chosen, (0, most - len(chosen)))
            counts = replace(dims, R=len(chosen))
            own = {place: Frame(counts, dict(frame.values), frame.states) for place, frame in frames.items()}
            own["host"].values[self._inputs["embedding_rows"].id] = chosen
            for bound in self._embedding:
                self._enter(bound, own, copied)
                bound.run(own[bound.segment.place])
            parts.append(self._fetched(own, [output]))
            for place in self._plan.round_trips:
                for key in own[place].values.keys() - frames[place].values.keys():
                    self._devices[place].free(own[place].values[key])

        def embeddings() -> Array:
            found = [converted(part()[output.name], output.dtype, "f32") for part in parts]
            return np.concatenate(found)[: len(rows)]

        return embeddings

    def _enter(self, bound: _Bound, frames: Mapping[str, Frame], copied: list[tuple[str, Any]]) -> None:
        """Brings to a segment's place what it needs there."""
        place = bound.segment.place
        arrays = [self._on_host(one, frames[one.source].values[one.value.id]) for one in bound.entering]
        together = None if place == "host" else copy_in_all_of(self._devices[place])
        values = arrays if together is None else together(arrays)
        for one, value in zip(bound.entering, values, strict=True):
            there = value if place == "host" or together is not None else self._devices[place].copy_in(value)
            if place != "host":
                copied.append((place, there))
            frames[place].values[one.value.id] = there

    def _on_host(self, one: Transfer, value: Any) -> Array:
        """As the reader stores it, whatever the source does."""
        array = value if one.source == "host" else self._devices[one.source].copy_out(value)
        return array if one.stored == one.value.dtype else converted(array, one.stored, one.value.dtype)

    def _result(self, frames: Mapping[str, Frame], sampled: bool) -> Callable[[], StepResult]:
        wanted = [value for value in self._outputs(sampled) if value.name in self._plan.keep or value.name in RESULTS]
        fetched = self._fetched(frames, wanted)

        def result() -> StepResult:
            found = fetched()
            kept = {name: array for name, array in found.items() if name in self._plan.keep}
            if sampled:
                return StepResult(**{name: found[name] for name in RESULTS}, values=kept)
            none = np.zeros(0, np.int32)
            empty = np.zeros((0, 0), np.float32)
            return StepResult(none, none, np.zeros(0, np.float32), empty.astype(np.int32), empty, kept)

        return result

    def _outputs(self, sampled: bool) -> list[Value]:
        segments = (*self._plan.body, *self._plan.head) if sampled else self._plan.body
        return [value for segment in segments for value in segment.outputs]

    def _fetched(self, frames: Mapping[str, Frame], values: Sequence[Value]) -> Callable[[], dict[str, Array]]:
        """Begins to bring values to the host, and gives what waits for them."""
        there: dict[str, list[Value]] = {}
        for value in values:
            place = next(place for place in ("host", *self._devices) if value.id in frames[place].values)
            there.setdefault(place, []).append(value)
        begun = [
            (names, self._copied(place, [frames[place].values[value.id] for value in names]))
            for place, names in there.items()
        ]
        return lambda: {
            value.name: array for names, arrays in begun for value, array in zip(names, arrays(), strict=True)
        }

    def _copied(self, place: str, values: Sequence[Any]) -> Callable[[], Sequence[Array]]:
        later = None if place == "host" else copy_out_all_of(self._devices[place])
        if later is not None:
            return later(values)
        arrays = [np.array(value) if place == "host" else self._devices[place].copy_out(value) for value in values]
        return lambda: arrays
