"""MLX's ring between two processes, beside NumPy; ranks that differ, and one that is lost."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from types import SimpleNamespace

import numpy as np

RANK = """
import json, sys
from types import SimpleNamespace
import numpy as np
from engine_metal.device import MetalDevice

rank, addresses, seed, timeout = int(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
device = MetalDevice({})
ring = device.collectives(SimpleNamespace(rank=rank, addresses=tuple(addresses), timeout=timeout))
rng = np.random.default_rng(seed)
"""
VALUES = """
assert (ring.rank, ring.size, ring.fixed_order) == (rank, 2, True)
for shape in ((2,), (6, 5), (4, 3, 7), (128, 33)):
    for dtype in (np.float32, np.float16, np.int32):
        values = [(rng.standard_normal(shape) * 100).astype(dtype) for _ in range(2)]
        mine = device.copy_in(values[rank])
        total = values[0] + values[1]
        wanted = {
            "all_reduce": total,
            "all_gather": np.concatenate(values),
            "reduce_scatter": np.split(total, 2)[rank],
            "all_to_all": np.concatenate([np.split(value, 2)[rank] for value in values]),
        }
        for op, want in wanted.items():
            got = device.copy_out(getattr(ring, op)(mine))
            assert got.dtype == want.dtype and np.array_equal(got, want), (op, shape, dtype)
        gathered = device.copy_out(ring.all_gather(mine, len(shape) - 1))
        assert np.array_equal(gathered, np.concatenate(values, axis=-1))
        assert np.array_equal(device.copy_out(mine), values[rank])
ring.close()
"""
DIFFERENT = """
try:
    ring.all_reduce(device.copy_in(np.ones((4, 2 + rank), np.float32)))
except RuntimeError as error:
    print(error)
"""
LOST = """
import os, time
if rank == 1:
    sys.stdin.readline()
    os._exit(0)
for _ in range(2):
    try:
        ring.all_reduce(device.copy_in(np.ones(4, np.float32)))
    except RuntimeError as error:
        print(error, flush=True)
"""


def free_addresses(count: int) -> list[str]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    found = [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]
    for one in sockets:
        one.close()
    return found


def start(what: str, timeout: float) -> list[subprocess.Popen[str]]:
    addresses, seed = json.dumps(free_addresses(2)), str(np.random.default_rng().integers(1 << 30))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return [
        subprocess.Popen([sys.executable, "-c", RANK + what, str(rank), addresses, seed, str(timeout)], **pipes)
        for rank in range(2)
    ]


def ended(process: subprocess.Popen[str]) -> SimpleNamespace:
    out, err = process.communicate(timeout=120)
    return SimpleNamespace(code=process.returncode, out=out, err=err)


def test_operations_are_numpy_s():
    for one in map(ended, start(VALUES, 60)):
        assert one.code == 0, one.err


def test_ranks_that_differ_are_told_so():
    for one in map(ended, start(DIFFERENT, 60)):
        assert "differ" in one.out and "[4, 2]" in one.out and "[4, 3]" in one.out, one.err


def test_a_silent_rank_is_given_up_after_the_timeout():
    waiting, silent = start(LOST, 2.0)
    said = [waiting.stdout.readline() for _ in range(2)]
    assert all("one is lost or silent" in line for line in said)
    silent.stdin.write("\n")
    silent.stdin.close()
    for process in (silent, waiting):
        process.wait(60)
        process.stdout.close(), process.stderr.close()
    waiting.stdin.close()


def test_a_rank_that_ends_is_noticed():
    waiting, silent = start(LOST, 60.0)
    silent.communicate("\n", timeout=60)
    one = ended(waiting)
    assert "connection" in one.out and len(one.out.splitlines()) == 2, one.err
