"""Which processors work is given to, by what a machine's system says of them."""

from __future__ import annotations

import math
import os

import pytest

import engine_cpu.device
from engine.backend.processors import Processors, find_processors
from engine.runtime import config


def siblings(*cores: str) -> dict[str, str]:
    """Each core's processors, as in 0,4 or 0-1."""
    found = {}
    for text in cores:
        low, _, high = text.replace(",", "-").partition("-")
        for number in (low, high or low):
            found[f"sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list"] = text
    return found


def capacities(*values: int) -> dict[str, str]:
    return {f"sys/devices/system/cpu/cpu{number}/cpu_capacity": str(value) for number, value in enumerate(values)}


HYBRID = siblings("0-1", "2-3", "4", "5", "6", "7") | {
    "sys/devices/cpu_core/cpus": "0-3",
    "sys/devices/cpu_atom/cpus": "4-7",
}


@pytest.mark.parametrize(
    ("files", "allowed", "wanted"),
    [
        ({}, range(3), Processors((0, 1, 2), 3)),
        (siblings("0", "1"), range(2), Processors((0, 1), 2)),
        (siblings("0,2", "1,3"), range(4), Processors((0, 1, 2, 3), 2)),
        (siblings("0-1", "2-3"), range(4), Processors((0, 2, 1, 3), 2)),
        (siblings("0-1", "2-3"), {1, 2, 3}, Processors((1, 2, 3), 2)),
        (siblings("0-1"), range(2), Processors((0, 1), 2)),
        (HYBRID, range(8), Processors((0, 2, 1, 3, 4, 5, 6, 7), 2)),
        (HYBRID, {3, 4, 5}, Processors((3, 4, 5), 1)),
        (HYBRID, {2, 3, 4}, Processors((2, 3, 4), 2)),
        (HYBRID, {4, 5, 6}, Processors((4, 5, 6), 3)),
        (capacities(400, 400, 1024, 1024), range(4), Processors((2, 3, 0, 1), 2)),
        (capacities(870, 1024, 520), range(3), Processors((0, 1, 2), 2)),
        (capacities(1024, 1024), range(2), Processors((0, 1), 2)),
    ],
)
def test_one_of_each_fast_core_comes_first(root, files, allowed, wanted):
    assert find_processors(root(files), allowed) == wanted


@pytest.mark.parametrize(
    ("limit", "cores", "share"),
    [
        ("max 100000", 8, math.inf),
        ("200000 100000", 2, 2),
        ("150000 100000", 2, 1.5),
        ("20000 100000", 1, 0.2),
        ("1600000 100000", 8, 16),
        ("?", 8, math.inf),
    ],
)
def test_no_more_threads_than_the_container_may_have_time_for(root, limit, cores, share):
    found = find_processors(root({"sys/fs/cgroup/cpu.max": limit}), range(8))
    assert found == Processors(tuple(range(8)), cores, share)


def test_this_machine():
    found = find_processors()
    if hasattr(os, "sched_getaffinity"):
        assert set(found.order) == os.sched_getaffinity(0)
    assert len(set(found.order)) == len(found.order) >= found.cores >= 1


def test_the_cpu_has_a_thread_for_each_fast_core_and_keeps_it_there(monkeypatch):
    allowed = sorted(find_processors().order)
    monkeypatch.setattr(engine_cpu.device, "find_processors", lambda: Processors(tuple(allowed[::-1]), 1))
    assert engine_cpu.device.CpuDevice().pool.size == 1
    if not hasattr(os, "sched_getaffinity") or len(allowed) < 2:
        return
    others = set(os.listdir("/proc/self/task"))
    device = engine_cpu.device.CpuDevice(threads=2, pin_threads=True)
    places = [os.sched_getaffinity(int(thread)) for thread in set(os.listdir("/proc/self/task")) - others]
    assert {allowed[-2]} in places and device.pool.size == 2


def test_the_cpu_s_pool_knows_the_container_s_share(monkeypatch):
    made = []
    pool = engine_cpu.device._native.Pool
    monkeypatch.setattr(engine_cpu.device, "find_processors", lambda: Processors((0, 1, 2), 2, 1.5))
    monkeypatch.setattr(engine_cpu.device._native, "Pool", lambda *given: made.append(given) or pool(1))
    engine_cpu.device.CpuDevice(threads=3)
    assert made == [(3, (), 1.5)]


def test_ranks_share_the_fast_cores(monkeypatch):
    monkeypatch.setattr(config, "find_processors", lambda: Processors(tuple(range(16)), 6))
    for ranks, threads in ((1, None), (2, 3), (3, 2), (8, 1)):
        assert config.EngineConfig(model="m", tensor_parallel_size=ranks).threads_a_rank == threads
