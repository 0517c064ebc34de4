"""What a plan copies between places at the borders of its segments, all of it through the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from ..backend.v1 import HOST_DTYPES, Array, Device, Dims, Segment, Value


@dataclass(frozen=True)
class Transfer:
    """A value of ``source`` that ``place`` needs, too, as ``value`` says. ``stored``: its storage tag at the source;
    ``step_input``: it comes with the step."""

    value: Value
    source: str
    place: str
    stored: str
    step_input: bool

    @property
    def bytes_a_token(self) -> int:
        """Bytes of it in a step of one token of one sequence, as stored at the source; packed values count as int8."""
        items = prod(Dims(T=1, S=1, R=1, P=1, K=1).of(self.value.shape))
        return items * (HOST_DTYPES[self.stored].itemsize if self.stored in HOST_DTYPES else 1)


def transfers(segments: Sequence[Segment]) -> tuple[tuple[Transfer, ...], ...]:
    """For each segment, in the order in which they run, what has to be brought to its place before: each value once a place.
    Step inputs are on the host at first."""
    made: dict[int, tuple[str, str]] = {}
    held: set[tuple[int, str]] = set()
    result = []
    for segment in segments:
        found = []
        for value in segment.inputs:
            source, stored = made.get(value.id, ("host", value.dtype))
            if source != segment.place and (value.id, segment.place) not in held:
                held.add((value.id, segment.place))
                found.append(Transfer(value, source, segment.place, stored, value.id not in made))
        made |= {v.id: (segment.place, v.dtype) for bound in segment.calls for v in bound.call.outputs}
        result.append(tuple(found))
    return tuple(result)


def converted(array: Array, stored: str, wanted: str) -> Array:
    """Numbers in another storage tag."""
    from ..ops.dtypes import from_f32, to_f32  # a backend that is only probed loads this module, but not the catalogue

    return from_f32(to_f32(array, stored), wanted)


def by_place(devices: Device | Mapping[str, Device]) -> Mapping[str, Device]:
    """Devices by the names of their places; the place of a single one is "device"."""
    return devices if isinstance(devices, Mapping) else {"device": devices}
