"""Packing: each weight once, in its provider's layout, with all the uses it serves; then its file mapping is let go."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..backend.v1 import Packed, Provider, WeightRef
from .place import Placement
from .weights import stored_bytes

Progress = Callable[[int, int], None]
"""(bytes packed so far, bytes in all)"""


@dataclass
class _Job:
    ref: WeightRef
    provider: Provider
    uses: list[str]


def pack(placement: Placement, progress: Progress | None = None) -> Mapping[tuple[str, str], Packed]:
    """(packer, weight name) -> packed weight."""
    jobs: dict[tuple[str, str], _Job] = {}
    for placed in placement.calls:
        for ref in placed.call.weights.values():
            job = jobs.setdefault((placed.provider.packer, ref.name), _Job(ref, placed.provider, []))
            job.uses.append(placed.call.op)
    total = sum(stored_bytes(job.ref) for job in jobs.values())
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

    packed = {}
    for key, job in jobs.items():
        packed[key] = job.provider.pack(job.ref, tuple(job.uses), advance)
        job.ref.release()
    return packed
