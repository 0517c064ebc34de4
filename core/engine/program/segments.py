"""Maximal runs of calls on one place, with what enters and leaves each: the borders where values are transferred. What ranks
exchange by collectives is a run of its own, which no device compiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from ..backend.v1 import BoundCall, Packed, Segment, Value
from .execute import RESULTS
from .group import CollectiveProvider
from .place import PlacedCall, Placement


def segments(
    placement: Placement, packed: Mapping[tuple[str, str, str], Packed], keep: Sequence[str]
) -> tuple[tuple[Segment, ...], tuple[Segment, ...], tuple[Segment, ...]]:
    """Segments of the body, the head and the embedding. Values named in ``keep`` count as used outside."""
    parts = {"body": placement.body, "head": placement.head, "embedding": placement.embedding}
    runs = [(part, tuple(run)) for part, calls in parts.items() for _, run in groupby(calls, key=_where)]
    readers = [_reads(run) for _, run in runs]
    built: list[Segment] = []
    for n, (part, run) in enumerate(runs):
        made = _writes(run)
        later = {v for other in readers[n + 1 :] for v in other}
        results = {v for v in made.values() if v.name in keep or v.name in _RESULTS}
        inputs = tuple(v for i, v in readers[n].items() if i not in made)
        outputs = tuple(v for i, v in made.items() if i in later or v in results)
        calls = tuple(_bound(placed, packed) for placed in run)
        built.append(Segment(f"{part}.{n}", run[0].place, calls, inputs, outputs))
    body, head, embedding = (tuple(s for s in built if s.name.startswith(f"{part}.")) for part in parts)
    return body, head, embedding


def _where(placed: PlacedCall) -> tuple[str, bool]:
    return placed.place, isinstance(placed.provider, CollectiveProvider)


_RESULTS = (*RESULTS, "embeddings")


def _reads(run: Sequence[PlacedCall]) -> dict[int, Value]:
    return {v.id: v for placed in run for v in placed.call.inputs.values()}


def _writes(run: Sequence[PlacedCall]) -> dict[int, Value]:
    return {v.id: v for placed in run for v in placed.call.outputs}


def _bound(placed: PlacedCall, packed: Mapping[tuple[str, str, str], Packed]) -> BoundCall:
    weights = {
        name: packed[placed.place, placed.provider.packer, ref.name] for name, ref in placed.call.weights.items()
    }
    return BoundCall(placed.call, placed.provider, weights, placed.layout)
