"""Limits of control groups: of either version, with a namespace or without, of the process's own group or one around it."""

from __future__ import annotations

import math

import pytest

from engine.backend import host
from engine.backend.cgroups import cpu_limit, memory_limit

SERVICE = "0::/user.slice/app.slice/engine.service"
DOCKER = "5:memory:/docker/f00\n4:cpu,cpuacct:/docker/f00\n1:name=systemd:/docker/f00\n0::/docker/f00"


def group(path: str, **files: str) -> dict[str, str]:
    return {f"sys/fs/cgroup/{path}/{name.replace('__', '.')}": text for name, text in files.items()}


def quota(path: str, quota: str, period: str = "100000") -> dict[str, str]:
    return group(path, cpu__cfs_quota_us=quota, cpu__cfs_period_us=period)


@pytest.mark.parametrize(
    ("mine", "files", "wanted"),
    [
        (None, {}, math.inf),
        (None, group(".", cpu__max="150000 100000"), 1.5),
        ("0::/", group(".", cpu__max="150000 100000"), 1.5),
        ("0::/", group(".", cpu__max="max 100000"), math.inf),
        (SERVICE, group("user.slice/app.slice/engine.service", cpu__max="50000 20000"), 2.5),
        (SERVICE, group("user.slice/app.slice", cpu__max="200000 100000"), 2),
        (
            SERVICE,
            group("user.slice/app.slice/engine.service", cpu__max="400000 100000")
            | group("user.slice/app.slice", cpu__max="max 100000")
            | group("user.slice", cpu__max="300000 100000"),
            3,
        ),
        (SERVICE, group("user.slice/other.service", cpu__max="100000 100000"), math.inf),
        (DOCKER, quota("cpu", "200000"), 2),  # the container sees its group as the topmost
        (DOCKER, quota("cpu/docker/f00", "25000", "50000"), 0.5),
        (DOCKER, quota("cpu/docker/f00", "-1") | quota("cpu/docker", "300000"), 3),
        (DOCKER, quota("cpu/docker/f00", "-1"), math.inf),
        (DOCKER, quota("memory/docker/f00", "100000"), math.inf),
    ],
)
def test_the_least_share_of_the_processors_counts(root, mine, files, wanted):
    assert cpu_limit(root(files | ({"proc/self/cgroup": mine} if mine else {}))) == wanted


def bytes_v1(path: str, limit: int, used: int) -> dict[str, str]:
    return group(path, memory__limit_in_bytes=str(limit), memory__usage_in_bytes=str(used))


@pytest.mark.parametrize(
    ("mine", "files", "wanted"),
    [
        (None, {}, (math.inf, math.inf)),
        ("0::/", group(".", memory__max="1000", memory__current="300"), (1000, 700)),
        ("0::/", group(".", memory__max="1000", memory__current="1300"), (1000, 0)),
        ("0::/", group(".", memory__max="max", memory__current="300"), (math.inf, math.inf)),
        (
            SERVICE,
            group("user.slice/app.slice/engine.service", memory__max="1000", memory__current="100")
            | group("user.slice", memory__max="2000", memory__current="1500"),
            (1000, 500),
        ),
        (DOCKER, bytes_v1("memory", 1000, 300), (1000, 700)),
        (DOCKER, bytes_v1("memory/docker/f00", 1000, 300) | bytes_v1("memory", 1 << 62, 5000), (1000, 700)),
        (DOCKER, bytes_v1("cpu/docker/f00", 1000, 300), (math.inf, math.inf)),
    ],
)
def test_the_least_memory_counts(root, mine, files, wanted):
    assert memory_limit(root(files | ({"proc/self/cgroup": mine} if mine else {}))) == wanted


@pytest.mark.parametrize(
    ("mine", "files", "stat"),
    [
        ("0::/", group(".", memory__max="1000", memory__current="800"), "inactive_file 300\nactive_file 50"),
        (
            DOCKER,
            bytes_v1("memory", 1000, 800),
            "inactive_file 7\nactive_file 1\ntotal_inactive_file 300\ntotal_active_file 50",
        ),
    ],
)
def test_files_that_were_read_take_nothing_away(root, mine, files, stat):
    folder = next(iter(files)).rpartition("/")[0]
    assert memory_limit(root(files | {"proc/self/cgroup": mine, f"{folder}/memory.stat": stat})) == (1000, 550)


def test_the_host_s_memory_is_what_the_limit_leaves(monkeypatch):
    whole = host.available_memory()
    monkeypatch.setattr(host, "memory_limit", lambda: (math.inf, math.inf))
    assert host.available_memory().total >= whole.total
    monkeypatch.setattr(host, "memory_limit", lambda: (1000, 400))
    assert host.available_memory() == host.MemoryInfo(1000, 400)
