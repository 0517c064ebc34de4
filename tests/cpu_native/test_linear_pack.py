"""Packed weights hold exactly what the file says."""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
from one_kernel import native
from own_process import FORK, ran
from weight_cases import DENSE, FORMATS, LARGE_BLOCKS, alloc, dequantized, random_rows

EXTREMES = np.array([0, -0.0, 6e-8, -6.1e-5, 65504, -65504, 1, 0.3], np.float16)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and np.array_equal(a.view(np.uint32), b.view(np.uint32))


@pytest.mark.parametrize("name", FORMATS)
def test_unpack_is_the_formats_dequantization(name):
    rng = np.random.default_rng()
    depths = [256, 1280] + [96] * (name not in LARGE_BLOCKS) + [1, 77] * (name in DENSE)
    for depth in depths:
        for columns in (1, 15, 64, 72, 200):
            raw = random_rows(rng, name, columns, depth, EXTREMES)
            weight = alloc(name, columns, depth)
            native.pack_into(weight, raw)
            want = dequantized(name, raw)
            assert same_bits(native.unpack(weight, 0, columns), want)
            first = int(rng.integers(0, columns))
            assert same_bits(native.unpack(weight, first, columns - first), want[first:])


@pytest.mark.parametrize("name", FORMATS)
def test_ranges_of_columns_and_experts_are_packed_one_by_one(name):
    rng = np.random.default_rng()
    columns, depth, experts = 150, 256, 3
    raw = random_rows(rng, name, columns * experts, depth).reshape(experts, columns, -1)
    weight = alloc(name, columns, depth, experts)
    cuts = [0, *sorted(rng.choice(np.arange(1, columns), 5, replace=False)), columns]
    places = [(e, a, b) for e in range(experts) for a, b in pairwise(cuts)]
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda p: native.pack_into(weight, raw[p[0], p[1] : p[2]], int(p[1]), p[0]), places))
    for e in range(experts):
        assert same_bits(native.unpack(weight, 0, columns, e), dequantized(name, raw[e]))


@pytest.mark.parametrize("threads", [1, 3])
def test_a_queue_packs_what_pack_into_does(threads):
    rng = np.random.default_rng()
    queue = native.PackQueue(threads)
    pairs = []
    for n in range(40):  # more than the threads finish meanwhile; nothing else keeps the rows
        name = str(rng.choice(FORMATS))
        columns, depth, experts = int(rng.integers(1, 700)), 256 * int(rng.integers(1, 9)), int(rng.integers(1, 3))
        wanted, got = alloc(name, columns, depth, experts), alloc(name, columns, depth, experts)
        for e in range(experts):
            first = int(rng.integers(0, columns))
            raw = random_rows(rng, name, columns, depth)
            native.pack_into(wanted, raw, 0, e)
            for a, b in pairwise([0, first, columns] if first else [0, columns]):
                last = queue.add(got, raw[a:b].copy(), a, e)
        pairs.append((wanted, got))
        if n % 10 == 5:
            queue.wait(last)
    queue.wait(last)
    assert all(np.array_equal(wanted.data, got.data) for wanted, got in pairs)
    with pytest.raises(ValueError, match="jobs"):
        queue.wait(last + 1)


def test_a_queue_that_is_dropped_leaves_its_work():
    rng = np.random.default_rng()
    queue = native.PackQueue(2)
    for _ in range(20):
        queue.add(native.alloc("Q8_0", 640, 1024), random_rows(rng, "Q8_0", 640, 1024))
    del queue


@pytest.mark.skipif(sys.platform != "linux", reason="bounds its memory by RLIMIT_AS")
@pytest.mark.parametrize("extra", [1 << 20, 1 << 28])
def test_more_threads_than_the_system_gives_to_a_queue(extra):
    program = f"""
import resource
import numpy as np
from engine_cpu import _native
raw = np.random.default_rng().integers(0, 99, (64, 34), np.uint8)
wanted, got = _native.alloc("Q8_0", 64, 32), _native.alloc("Q8_0", 64, 32)
_native.pack_into(wanted, raw)
queue = _native.PackQueue(1000)
taken = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + {extra}, resource.RLIM_INFINITY))
for first in range(0, 64, 16):
    last = queue.add(got, raw[first : first + 16], first)
queue.wait(last)
assert np.array_equal(wanted.data, got.data) and last == 4
"""
    ran(program)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_forked_process_is_told_that_it_has_no_queue():
    before = """
import time
import numpy as np
from engine_cpu import _native
raw = np.zeros((64, 34), np.uint8)
weight = _native.alloc("Q8_0", 64, 32)
queue = _native.PackQueue(2)
queue.wait(queue.add(weight, raw))
time.sleep(0.1)
"""
    after = """
for use in (lambda: queue.add(weight, raw), lambda: queue.wait(1)):
    try:
        use()
        print(who, "could")
    except RuntimeError as error:
        print(who, error)
del queue, use
"""
    *told, once, twice = ran(before + FORK + after)
    assert once == twice == "parent could" and len(told) == 2
    assert all(line.startswith("child This process was forked") for line in told)


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        *(("Q4_0", 4.5), ("Q4_1", 5), ("Q5_0", 5.5), ("Q5_1", 6), ("Q8_0", 8.5), ("F16", 16), ("IQ4_NL", 4.5)),
        *(("Q2_K", 2.625), ("Q4_K", 4.5), ("Q5_K", 5.5), ("Q6_K", 6.5625)),
        *(("W4Z", 4.75), ("W8S", 9), ("W8M", 10), ("FP8", 9), ("NF4", 4.5), ("FP4", 4.5)),
    ],
)
def test_packed_weights_are_as_small_as_the_file(name, bits):
    assert alloc(name, 128, 512).nbytes == bits * 128 * 512 / 8


@pytest.mark.parametrize(
    ("names", "bits"),
    [
        (("Q3_K",), 3.5625),
        (("MXFP4",), 4.5),
        (("NVFP4S",), 5),
        (("IQ4_XS", "IQ3_S", "IQ3_XXS", "IQ2_XXS", "IQ1_S", "TQ1_0", "TQ2_0"), 4.40625),
        (("IQ2_S", "IQ2_XS", "IQ1_M"), 4.65625),
    ],
)
def test_widened_weights_take_what_their_layout_says(names, bits):
    assert [alloc(name, 128, 512).nbytes for name in names] == [bits * 128 * 512 / 8] * len(names)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="multiple of 256"):
        native.alloc("Q4_K", 64, 288)
    with pytest.raises(ValueError, match="and not 'Q9_K'"):
        native.alloc("Q9_K", 64, 256)
    for name, entries in (("IQ1_S", 0), ("IQ2_XS", 256), ("Q4_K", 16)):
        with pytest.raises(ValueError, match=rf"packed by a grid of \d+ entries, not {entries}"):
            native.alloc(name, 64, 256, 1, [0] * entries)
    for columns, depth, count in ((0, 32, 1), (64, 0, 1), (64, 32, 0), (-1, 32, 1), (2**40, 2**40, 1)):
        with pytest.raises(ValueError):
            native.alloc("Q8_0", columns, depth, count)
    weight = native.alloc("Q8_0", 64, 64, 2)
    for rows, width, first, index in (
        (1, 67, 0, 0),
        (65, 68, 0, 0),
        (1, 68, 64, 0),
        (1, 68, -1, 0),
        (1, 68, 0, 2),
        (1, 68, 0, -1),
    ):
        with pytest.raises(ValueError):
            native.pack_into(weight, np.zeros((rows, width), np.uint8), first, index)
    for first, count, index in ((0, 65, 0), (-1, 1, 0), (64, 1, 0), (0, 1, 2), (0, -1, 0)):
        with pytest.raises(ValueError):
            native.unpack(weight, first, count, index)
