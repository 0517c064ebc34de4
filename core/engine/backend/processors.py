"""Which of the machine's processors work that keeps all of a core busy should run on."""

from __future__ import annotations

import math
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from .cgroups import ROOT, cpu_limit, read_text

_FAST = 2 / 3  # of the fastest core's capacity


@dataclass(frozen=True)
class Processors:
    """``order``: the numbers of those that this process may use, one of each fast core first, then their siblings and slow cores.
    ``cores``: so many threads do no better with more, being as many as fast cores, or as the container's share of time is.
    ``share``: how many of them may be busy all the time, by the container's share."""

    order: tuple[int, ...]
    cores: int
    share: float = math.inf


def find_processors(root: Path = ROOT, allowed: Collection[int] | None = None) -> Processors:
    """Those of ``allowed``, which the system tells if not given. Two that share a core's units get little more from them than
    one, which is worth a thread on a single core alone; and where all wait for the last, slow cores hold up the fast ones. Linux
    alone says which are which (its documentation of sysfs: topology, cpu_capacity, and cpu_core of Intel's two kinds)."""
    if allowed is None:
        allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    numbers = sorted(allowed)
    system = root / "sys"
    fast = _fast(system, numbers)
    seen: set[int] = set()
    first = []
    for number in numbers:
        if number in fast and number not in seen:
            first.append(number)
            seen.update(_numbers(system / f"devices/system/cpu/cpu{number}/topology/thread_siblings_list"))
    rest = [number for number in numbers if number not in first]
    cores, share = len(first) if len(first) > 1 else len(fast), cpu_limit(root)
    return Processors((*first, *rest), cores if share >= cores else max(math.ceil(share), 1), share)


def _fast(system: Path, numbers: Collection[int]) -> Collection[int]:
    performance = set(numbers) & _numbers(system / "devices/cpu_core/cpus")
    if performance:
        return performance
    capacities = {}
    for number in numbers:
        text = read_text(system / f"devices/system/cpu/cpu{number}/cpu_capacity")
        capacities[number] = int(text) if text.isdecimal() else 0
    most = max(capacities.values(), default=0)
    return {number for number, capacity in capacities.items() if capacity >= _FAST * most}


def _numbers(path: Path) -> set[int]:
    """Those of a list such as 0-3,8; none where there is no such file."""
    found: set[int] = set()
    for part in read_text(path).split(","):
        first, _, last = part.partition("-")
        if first.isdecimal() and (last or first).isdecimal():
            found.update(range(int(first), int(last or first) + 1))
    return found
