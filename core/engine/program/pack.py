"""Packing: each weight once, in its provider's layout, with all the uses it serves; then its file mapping is let go. A
device that packs beside the interpreter is given weights ahead, so that a tokenizer can be built meanwhile."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from ..backend.optional import packed_bytes_of
from ..backend.v1 import Packed, Provider, WeightRef
from .place import Placement
from .weights import stored_bytes

Progress = Callable[[int, int], None]
"""(bytes packed so far, bytes in all)"""
AHEAD = 1 << 29
"""Bytes of weights, as stored, that a device may be packing at a time: their files' pages, or copies, are in memory too."""


@dataclass
class _Job:
    ref: WeightRef
    provider: Provider
    uses: list[str]


class Packing:
    """Weights on their way into providers' layouts. ``weights``: (place, packer, weight name) -> packed weight, of which those
    that the device has not finished are not to be read before ``finish``."""

    def __init__(self, placement: Placement, progress: Progress | None = None) -> None:
        jobs = _jobs(placement)
        self.weights: dict[tuple[str, str, str], Packed] = {}
        self._begun: deque[tuple[Packed, WeightRef]] = deque()
        ahead, advance = 0, _advance(progress, sum(stored_bytes(job.ref) for job in jobs.values()))
        for key, job in jobs.items():
            self.weights[key] = packed = job.provider.pack(job.ref, tuple(job.uses), advance)
            self._begun.append((packed, job.ref))
            ahead += stored_bytes(job.ref)
            while ahead > AHEAD:
                ahead -= stored_bytes(self._begun[0][1])
                self._finish_one()

    def finish(self) -> None:
        """Waits until every weight is packed, and lets the file's pages go; at once from the second time on."""
        while self._begun:
            self._finish_one()

    def _finish_one(self) -> None:
        packed, ref = self._begun.popleft()
        packed.ready()
        ref.release()


def _advance(progress: Progress | None, total: int) -> Callable[[int], None]:
    """Counts bytes. It may be kept by packed weights, and so must not refer to them: only Python's search for such things would
    free them."""
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

    return advance


def _jobs(placement: Placement) -> dict[tuple[str, str, str], _Job]:
    jobs: dict[tuple[str, str, str], _Job] = {}
    for placed in placement.calls:
        for ref in placed.call.weights.values():
            job = jobs.setdefault((placed.place, placed.provider.packer, ref.name), _Job(ref, placed.provider, []))
            job.uses.append(placed.call.op)
    return jobs


def packed_bytes(placement: Placement) -> Counter[str]:
    """Bytes of the weights of each place, as its providers tell that they pack them."""
    found: Counter[str] = Counter()
    for (place, _, _), job in _jobs(placement).items():
        told = packed_bytes_of(job.provider) or stored_bytes
        found[place] += told(job.ref)
    return found
