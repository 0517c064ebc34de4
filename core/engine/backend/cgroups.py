"""How much of the machine Linux's control groups leave to this process: a container's limits, and a service's."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path("/")


def cpu_limit(root: Path = ROOT) -> float:
    """How many processors' time the process may use; infinity without a limit. Version 1 says it in two files."""
    limits = [math.inf]
    for group in _groups(root, "cpu"):
        quota, _, period = read_text(group / "cpu.max").partition(" ")
        quota = quota or read_text(group / "cpu.cfs_quota_us")
        period = period or read_text(group / "cpu.cfs_period_us")
        if quota.isdecimal() and period.isdecimal():
            limits.append(int(quota) / int(period))
    return min(limits)


def memory_limit(root: Path = ROOT) -> tuple[float, float]:
    """How many bytes the process may have, and how many are free of them; infinity without a limit."""
    total = free = math.inf
    for group in _groups(root, "memory"):
        limit = read_text(group / "memory.max") or read_text(group / "memory.limit_in_bytes")
        used = read_text(group / "memory.current") or read_text(group / "memory.usage_in_bytes")
        if limit.isdecimal() and used.isdecimal():
            total = min(total, int(limit))
            free = min(free, max(int(limit) - int(used) + _cached(group), 0))
    return total, free


def _cached(group: Path) -> int:
    """Bytes of files that were read, which the system gives up for other memory. Version 1 counts groups inside apart."""
    lines = (line.partition(" ") for line in read_text(group / "memory.stat").splitlines())
    stat = {name: int(value) for name, _, value in lines if value.isdecimal()}
    return sum(stat.get(f"total_{name}", stat.get(name, 0)) for name in ("active_file", "inactive_file"))


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of the groups that the process is in, innermost first, of version 2 and of the controller's version 1.
    A container may know its group by a path of the machine's that it does not see: then only the last ones are there."""
    paths = {"": "/", controller: "/"}  # version 2's hierarchy has no name
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        paths |= {name: path for name in names.split(",") if name in paths}
    for name, path in paths.items():
        group = PurePosixPath(path.lstrip("/"))
        for folder in (group, *group.parents):
            yield root / "sys/fs/cgroup" / name / folder


def read_text(path: Path) -> str:
    """A file of the system's without the spaces around it; nothing where there is none."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
