"""Where packed weights lie: small ones beside each other, in memory that goes back when the last of them is gone."""

import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest

from engine_cpu import _native

pytest.importorskip("psutil")
MIB = 1 << 20


def address(weight):
    return np.asarray(weight.data).__array_interface__["data"][0]


def test_small_weights_lie_beside_each_other():
    weights = [_native.alloc("Q8_0", 64, 1024) for _ in range(40)] + [_native.alloc("F32", 65, 31) for _ in range(5)]
    places = sorted((address(weight), weight.nbytes) for weight in weights)
    assert all(begin % 64 == 0 for begin, _ in places)
    gaps = [after - (begin + size) for (begin, size), (after, _) in pairwise(places)]
    assert min(gaps) >= 0
    assert sorted(gaps)[-2] < 64  # one may have begun another piece


def test_a_weight_fills_no_memory_of_its_neighbours():
    weights = [_native.alloc("F32", columns, 3) for columns in (1, 64, 65, 100)]
    rows = [np.random.default_rng(i).standard_normal((w.columns, 3), np.float32) for i, w in enumerate(weights)]
    for weight, given in zip(weights, rows, strict=True):
        _native.pack_into(weight, given.view(np.uint8))
    for weight, given in zip(weights, rows, strict=True):
        for column in (0, weight.columns - 1):
            np.testing.assert_array_equal(_native.unpack(weight, column, 1)[0], given[column])


# In a process of its own: a heap that has been used before may have the memory already.
GOES_BACK = """
import gc, numpy as np, psutil
from engine_cpu import _native
def resident():
    gc.collect()
    return psutil.Process().memory_info().rss >> 20
raw, before = np.zeros((1024, 1088), np.uint8), resident()
weights = [_native.alloc("Q8_0", 1024, 1024) for _ in range(120)]
for weight in weights:
    _native.pack_into(weight, raw)
full, kept = resident() - before, weights[-1]
del weights, weight
assert not _native.unpack(kept, 0, 1024).any()
print(full, resident() - before)
"""


def test_memory_goes_back_with_the_last_weight():
    done = subprocess.run([sys.executable, "-c", GOES_BACK], capture_output=True, text=True, check=True)
    full, left = map(int, done.stdout.split())
    assert full > 120
    assert left < 60  # the last piece, and what was unpacked


def test_a_large_weight_has_memory_of_its_own():
    weight = _native.alloc("Q8_0", 16384, 1024)
    small = _native.alloc("Q8_0", 64, 1024)
    assert not address(weight) <= address(small) < address(weight) + weight.nbytes
    assert address(weight) % (2 * MIB) == 0
