"""Segments as their steps run them. A decode step of a size that steps are padded to is recorded when it is first met, which is
the session's warm-up, and launched again from then on: as one CUDA graph on a GPU, launch by launch in the interpreter. All
other steps are launched as they come."""

from __future__ import annotations

import gc
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from engine.backend.v1 import Dims, Frame, Limits, Segment

from .arrays import aligned
from .kernels.common import INTERPRETED
from .memory import WHOLE
from .recording import Arena, Launch, recorded

KEPT = 128
"""Recorded steps that are kept of a segment; the one that was not used for longest goes."""
_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)


Play = Callable[[], None]


@dataclass
class Graphs:
    """``sizes``: the decode steps that are recorded. ``off``: why none is, or why it has ended. ``capture`` makes what runs
    launches again, on a device; RuntimeError where it cannot be done."""

    capture: Callable[[tuple[Launch, ...], torch.device], Play]
    sizes: tuple[int, ...] = _SIZES
    off: str | None = None

    @property
    def told(self) -> str:
        if self.off is not None:
            return f"off: {self.off}"
        how = "launched again one by one" if INTERPRETED else "CUDA graphs"
        return f"decode steps of {', '.join(map(str, self.sizes))} sequences are {how}"


def graphs_of(options: Mapping[str, Any]) -> Graphs:
    """As the options "graphs" (0 or 1) and "graph_sizes" say, or ENGINE_CUDA_GRAPHS and ENGINE_CUDA_GRAPH_SIZES. ValueError for
    what these cannot be."""
    wanted = options.get("graphs", os.environ.get("ENGINE_CUDA_GRAPHS"))
    if wanted is not None and str(wanted).lower() not in ("0", "1", "false", "true"):
        raise ValueError(f"the option graphs is 0 or 1 and not {wanted!r}.")
    sizes = options.get("graph_sizes", os.environ.get("ENGINE_CUDA_GRAPH_SIZES", _SIZES))
    parts = [part for part in sizes.split(",") if part.strip()] if isinstance(sizes, str) else list(sizes)
    if not parts or not all(str(part).strip().isdigit() and int(part) for part in parts):
        raise ValueError(f"graph_sizes are sizes of at least 1, such as 1,8,64, and not {sizes!r}.")
    off = None
    if wanted is None and INTERPRETED:
        off = (
            "kernels run in Triton's interpreter, which has no graphs; ENGINE_CUDA_GRAPHS=1 records steps all the same."
        )
    elif wanted is not None and str(wanted).lower() in ("0", "false"):
        off = "the option graphs says so."
    return Graphs(one_by_one if INTERPRETED else captured, tuple(sorted({int(part) for part in parts})), off)


@dataclass(frozen=True)
class Recorded:
    """A step that can be run again: memory that is filled before, each by way of one input, and what the step leaves."""

    places: Mapping[int, torch.Tensor]
    outputs: Mapping[int, torch.Tensor]
    launches: tuple[Launch, ...]
    play: Play

    def run(self, frame: Frame) -> None:
        for key, place in self.places.items():
            place.copy_(_whole(frame.values[key], place))
        self.play()
        frame.values.update(self.outputs)


class SegmentRunner:
    """The function of a segment's steps."""

    def __init__(self, segment: Segment, limits: Limits, graphs: Graphs, device: torch.device) -> None:
        self._calls = _with_last_uses(segment, limits)
        self._segment, self._device, self._graphs = segment, device, graphs
        # Embeddings come in any number, so their steps have no few sizes.
        self._sizes = frozenset() if segment.name.startswith("embedding") else frozenset(limits.decode_buckets)
        values = (*segment.inputs, *segment.outputs)
        self._counts = {size[0] for value in values for size in value.shape if isinstance(size, str)}
        self.arena = Arena(device)
        self.recorded: OrderedDict[Dims, Recorded] = OrderedDict()

    def __call__(self, frame: Frame) -> None:
        if self._graphs.off is not None or not self.takes(frame.dims):
            self._run(frame)
            return
        key = self.key(frame.dims)
        if key in self.recorded:
            self.recorded.move_to_end(key)
            self.recorded[key].run(frame)
            return
        try:
            self.recorded[key] = self.record(frame)
        except CaptureError as error:
            self._graphs.off = f"a step could not be captured ({error})."
        if len(self.recorded) > KEPT:
            self.recorded.popitem(last=False)

    def takes(self, dims: Dims) -> bool:
        """Whether each sequence has one token, nothing is copied, and there are few steps of other sizes."""
        return dims.T == dims.S and dims.T in self._sizes and not dims.C + dims.H + dims.F

    def key(self, dims: Dims) -> Dims:
        """The counts that this segment's values have; it runs alike whatever the others are."""
        return replace(Dims(), **{name: getattr(dims, name) for name in self._counts})

    def _run(self, frame: Frame, after: Callable[[], None] = lambda: None) -> None:
        for fn, dead in self._calls:
            fn(frame)
            for key in dead:
                del frame.values[key]
            after()

    def record(self, frame: Frame) -> Recorded:
        """Runs the step, and keeps what it did. CaptureError where only that was not possible."""
        with recorded(self.arena) as recording:
            inputs, places = self._placed({value.id: frame.values[value.id] for value in self._segment.inputs})
            own = Frame(frame.dims, inputs, frame.states)
            self._run(own, lambda: self.arena.keep([*own.values.values(), *places.values()]))
        outputs = {value.id: own.values[value.id] for value in self._segment.outputs}
        frame.values.update(outputs)
        launches = tuple(recording.launches)
        try:
            return Recorded(places, outputs, launches, self._graphs.capture(launches, self._device))
        except RuntimeError as error:
            raise CaptureError(str(error).strip()) from error

    def _placed(self, given: Mapping[int, torch.Tensor]) -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]:
        """The inputs in memory of the arena, and that memory: values that came together lie there as they came, so that all of
        them are one copy. Where others came with them, whose sizes the key does not tell, each has a place of its own."""
        together: dict[int, list[int]] = {}
        for key, value in given.items():
            together.setdefault(value.untyped_storage().data_ptr(), []).append(key)
        inputs, places = {}, {}
        for keys in together.values():
            nbytes = given[keys[0]].untyped_storage().nbytes()
            alone = len(keys) == 1 or sum(aligned(given[key].nbytes) for key in keys) != nbytes
            for key in keys:
                value = given[key]
                if alone or key == keys[0]:
                    place = places[key] = self.arena.empty((value.nbytes if alone else nbytes,), torch.uint8)
                    place.copy_(_whole(value, place))
                start = 0 if alone else value.storage_offset() * value.itemsize
                inputs[key] = place[start : start + value.nbytes].view(value.dtype).view(value.shape)
        return inputs, places


def _whole(value: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """The bytes that belong in a place: a value's, or those of all that it came with."""
    if value.nbytes == len(place):
        return value.reshape(-1).view(torch.uint8)
    return torch.empty(0, dtype=torch.uint8, device=value.device).set_(value.untyped_storage())


class CaptureError(Exception):
    """A step has run, but cannot be run again from what was recorded of it."""


def _with_last_uses(segment: Segment, limits: Limits) -> list[tuple[Callable[[Frame], None], list[int]]]:
    """Each call's function, and the values that nobody reads after it."""
    last: dict[int, int] = {}
    for n, bound in enumerate(segment.calls):
        last |= {value.id: n for value in bound.call.outputs}
        last |= {value.id: n for value in bound.call.inputs.values() if value.id in last}
    left = {value.id for value in segment.outputs}
    return [
        (bound.provider.bind(bound, limits), [key for key, at in last.items() if at == n and key not in left])
        for n, bound in enumerate(segment.calls)
    ]


def one_by_one(launches: tuple[Launch, ...], device: torch.device) -> Play:
    """Each launch by itself."""

    def play() -> None:
        for one in launches:
            one.again()

    return play


def captured(launches: tuple[Launch, ...], device: torch.device) -> Play:
    """The launches as one CUDA graph. All kernels have been launched before, since none can be loaded meanwhile, and all memory
    is there. Other threads may go on using the GPU, but not wait for all of it."""
    graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(device)
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    side.wait_stream(current)
    with WHOLE, torch.cuda.stream(side), _without_collection():
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            one_by_one(launches, device)()
        finally:
            graph.capture_end()
    current.wait_stream(side)
    play: Play = graph.replay
    return play


@contextmanager
def _without_collection() -> Iterator[None]:
    """Without Python's collector of cycles: what it collects may unload a kernel, which ends a capture."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()
