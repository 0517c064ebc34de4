"""The framework: segments, their arena and checks, and the thread pool."""

import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from one_kernel import NATIVE_ISAS, native
from own_process import FORK, ran

MAXIMA = [8, 4, 4, 2, 2, 2, 2, 2, 2, 2]
WIDTH = 1040  # so that steps of up to 3 tokens are little, and done by one thread, and others are not


def chain(threads: int, nodes: list[tuple[int, int]], isa: str = "", poison: bool = True) -> "native.Segment":
    """Sums [T, WIDTH]: value 0 is given; node i adds two earlier values into value i + 1; the last is given back."""
    segment = native.Segment(native.Pool(threads), MAXIMA, 64, isa=isa, poison=poison)
    for i in range(len(nodes) + 1):
        segment.value(i, WIDTH * 4, "T", "f32")
    for i, (a, b) in enumerate(nodes):
        segment.add("add", [a, b], [i + 1], numbers={"width": WIDTH})
    segment.finish([0], [len(nodes)])
    return segment


def dims(tokens: int) -> list[int]:
    return [tokens] + [0] * 9


@pytest.mark.parametrize("isa", NATIVE_ISAS)
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("poison", [False, True])
def test_the_arena_keeps_what_is_alive(isa: str, threads: int, poison: bool) -> None:
    rng = np.random.default_rng()
    for _ in range(20):
        nodes = [tuple(int(v) for v in rng.integers(max(0, i - 4), i + 1, 2)) for i in range(12)]
        segment = chain(threads, nodes, isa, poison)
        x = rng.integers(-9, 9, (6, WIDTH)).astype(np.float32)
        values = [x]
        for a, b in nodes:
            values.append(values[a] + values[b])
        y = np.full_like(x, np.nan)
        segment.run(dims(6), [x], [y])
        np.testing.assert_array_equal(y, values[-1])


def test_the_arena_is_reused() -> None:
    one = chain(1, [(0, 0), (1, 1), (2, 2)]).arena_bytes
    assert one == 2 * 8 * WIDTH * 4
    assert chain(1, [(i, i) for i in range(30)]).arena_bytes == one


def test_threads_beyond_the_processors_and_many_tiny_runs() -> None:
    for threads, runs in ((1, 2000), (2, 1000), (3, 200), (9, 50)):
        segment = chain(threads, [(0, 0)] + [(i, 0) for i in range(1, 6)], poison=False)
        for i in range(runs):
            x = np.full((1 + i % 8, WIDTH), i, np.float32)
            y = np.full_like(x, np.nan)
            segment.run(dims(len(x)), [x], [y])
            assert (y == 7 * i).all()


@pytest.mark.parametrize("isa", NATIVE_ISAS)
@pytest.mark.parametrize("threads", [1, 2, 9])
@pytest.mark.parametrize("poison", [False, True])
def test_little_kernels_between_others(isa: str, threads: int, poison: bool) -> None:
    """Runs of serial kernels before, between and after those of the team; each reads what the one before it wrote. Wide
    values are sums of two rows of y weighted by a narrow value [T, 2], which comes of the first two columns of all rows."""
    rng = np.random.default_rng()
    for _ in range(10):
        runs = [int(n) for n in rng.integers(0, 4, 7)]  # how many serial kernels come before each of the team's
        segment = native.Segment(native.Pool(threads), MAXIMA, 64, isa=isa, poison=poison)
        segment.value(0, 8, "T", "f32")
        segment.value(1, 2 * WIDTH * 4, "T", "f32")
        y = rng.integers(-1, 2, (8, 2, WIDTH)).astype(np.float32)
        narrow = added = start = rng.integers(-2, 3, (8, 2)).astype(np.float32)
        n, wide, last = 2, 0, 0
        for run in [*runs, 2]:
            for _ in range(run):
                segment.value(n, 8, "T", "f32")
                segment.add("add", [last, wide], [n], numbers={"width": 2})
                narrow, last, n = narrow + added, n, n + 1
            segment.value(n, WIDTH * 4, "T", "f32")
            segment.add("moe_combine", [1, last, -1], [n], numbers={"k": 2, "width": WIDTH})
            sums = (narrow[:, :, None] * y).sum(axis=1)
            added, wide, n = sums.reshape(-1)[:16].reshape(8, 2), n, n + 1
        segment.value(n, 8, "T", "f32")
        segment.add("add", [last, wide], [n], numbers={"width": 2})
        segment.finish([0, 1], [n, wide])
        for _ in range(3):
            got = [np.full((8, 2), np.nan, np.float32), np.full((8, WIDTH), np.nan, np.float32)]
            segment.run(dims(8), [start, y], got)
            np.testing.assert_array_equal(got[0], narrow + added)
            np.testing.assert_array_equal(got[1], sums)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="threads are pinned on Linux only")
def test_pinned_threads_each_have_a_processor_and_the_caller_is_free() -> None:
    processors, others = sorted(os.sched_getaffinity(0)), set(os.listdir("/proc/self/task"))
    pool = native.Pool(len(processors), pin=processors[::-1])
    places = [os.sched_getaffinity(int(thread)) for thread in set(os.listdir("/proc/self/task")) - others]
    assert sorted(map(sorted, places)) == [[processor] for processor in processors[:-1]]
    assert os.sched_getaffinity(0) == set(processors)
    segment = native.Segment(pool, MAXIMA, 64)
    for i in range(2):
        segment.value(i, WIDTH * 4, "T", "f32")
    segment.add("add", [0, 0], [1], numbers={"width": WIDTH})
    segment.finish([0], [1])
    x = np.random.default_rng().standard_normal((8, WIDTH)).astype(np.float32)
    y = np.full_like(x, np.nan)
    segment.run(dims(8), [x], [y])
    np.testing.assert_array_equal(y, 2 * x)
    with pytest.raises(
        ValueError, match=f"{len(processors) + 1} threads cannot be pinned to {len(processors)} processors"
    ):
        native.Pool(len(processors) + 1, pin=processors)


def test_one_pool_under_several_segments_and_callers() -> None:
    pool = native.Pool(2)
    failures = []

    def caller(factor: int) -> None:
        segment = native.Segment(pool, MAXIMA, 64)
        for i in range(factor + 1):
            segment.value(i, WIDTH * 4, "T")
        for i in range(factor):
            segment.add("add", [i, 0] if i else [0, 0], [i + 1], numbers={"width": WIDTH})
        segment.finish([0], [factor])
        for i in range(300):
            x = np.full((8, WIDTH), i, np.float32)
            y = np.full_like(x, np.nan)
            segment.run(dims(8), [x], [y])
            if not (y == (factor + 1) * i).all():
                failures.append(factor)

    callers = [threading.Thread(target=caller, args=(n,)) for n in (1, 2, 3)]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join()
    assert not failures


def test_idle_workers_sleep() -> None:
    segment = chain(3, [(0, 0)])
    x = np.ones((2, WIDTH), np.float32)
    segment.run(dims(2), [x], [np.empty_like(x)])
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.05


@pytest.mark.skipif(sys.platform != "linux", reason="bounds its memory by RLIMIT_AS")
def test_more_threads_than_the_system_gives() -> None:
    program = """
import resource
from engine_cpu import _native
_native.Pool(3)
taken = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + (1 << 30), resource.RLIM_INFINITY))
try:
    _native.Pool(1000)  # whose stacks would need more
except ValueError as error:
    print(error)
_native.Pool(3)
"""
    assert "1000 were asked for" in ran(program)[0]


def test_threads_beyond_the_share_of_time_leave_it_to_others() -> None:
    spent = []
    for share in (2.0, 1.5):  # quotas are of processors' time, which who waits busily uses up
        segment = native.Segment(native.Pool(2, share=share), MAXIMA, 64)
        for i in range(2):
            segment.value(i, WIDTH * 4, "T", "f32")
        segment.add("add", [0, 0], [1], numbers={"width": WIDTH})
        segment.finish([0], [1])
        x = np.ones((8, WIDTH), np.float32)
        y = np.empty_like(x)
        before = time.process_time()
        for _ in range(100):
            segment.run(dims(8), [x], [y])
            time.sleep(0.0015)
        spent.append(time.process_time() - before)
    assert spent[1] < 0.5 * spent[0]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.parametrize("slept", [0, 0.1])
def test_a_forked_process_is_told_that_it_has_no_threads(slept: float) -> None:
    before = f"""
import time
import numpy as np
from test_segment import WIDTH, chain, dims
x = np.ones((8, WIDTH), np.float32)
y = np.empty_like(x)
segments = [chain(threads, [(0, 0)]) for threads in (1, 2)]
for segment in segments:
    segment.run(dims(8), [x], [y])
time.sleep({slept})
"""
    after = """
for segment in segments:
    try:
        y[:] = 0
        segment.run(dims(8), [x], [y])
        print(who, (y == 2).all())
    except RuntimeError as error:
        print(who, error)
del segment, segments
"""
    alone, told, *others = ran(before + FORK + after)
    assert alone == "child True" and others == ["parent True", "parent True"]
    assert told.startswith("child This process was forked from the one that loaded the model")


def test_refusals_at_run() -> None:
    segment = chain(1, [(0, 0)])
    x = np.ones((3, WIDTH), np.float32)
    y = np.empty_like(x)
    for bad in (x.astype(np.float64), x.astype(np.int32), x[:, ::2], x.T, [1.0], None):
        with pytest.raises(TypeError, match="Input 0"):
            segment.run(dims(3), [bad], [y])
    y.flags.writeable = False
    with pytest.raises(TypeError, match="Output 0"):
        segment.run(dims(3), [x], [y])
    y = np.empty_like(x)
    with pytest.raises(ValueError, match=f"needs {4 * WIDTH * 4} bytes"):
        segment.run(dims(4), [x], [y])
    with pytest.raises(ValueError, match="T is 9"):
        segment.run(dims(9), [x], [y])
    with pytest.raises(ValueError, match="1 inputs"):
        segment.run(dims(3), [x, x], [y])
    with pytest.raises(ValueError, match="10 dims"):
        segment.run([3], [x], [y])
    segment.run(dims(0), [x], [y])


def test_refusals_when_built() -> None:
    pool = native.Pool(1)
    segment = native.Segment(pool, MAXIMA, 64)
    segment.value(0, 64, "T")
    segment.value(1, 64, "T")
    with pytest.raises(ValueError, match="declared twice"):
        segment.value(0, 64, "T")
    with pytest.raises(ValueError, match="number of rows"):
        segment.value(2, 64, "Q")
    with pytest.raises(ValueError, match="no kernel 'bake'"):
        segment.add("bake", [0], [1])
    with pytest.raises(ValueError, match="value 7, which is not declared"):
        segment.add("add", [0, 7], [1], numbers={"width": 16})
    with pytest.raises(ValueError, match="number 'width'"):
        segment.add("add", [0, 0], [1])
    with pytest.raises(ValueError, match="too few"):
        segment.add("add", [0], [1], numbers={"width": 16})
    with pytest.raises(ValueError, match="too few"):
        segment.add("rms_norm", [0], [1], numbers={"width": 16, "eps": 0})
    segment.add("add", [0, 0], [1], numbers={"width": 16})
    with pytest.raises(ValueError, match="written twice"):
        segment.add("add", [0, 0], [1], numbers={"width": 16})
    with pytest.raises(ValueError, match="before anything has written it"):
        unfinished = native.Segment(pool, MAXIMA, 64)
        for i in range(2):
            unfinished.value(i, 64, "T")
        unfinished.add("add", [0, 0], [1], numbers={"width": 16})
        unfinished.finish([], [1])
    with pytest.raises(ValueError, match="Call finish"):
        segment.run(dims(1), [], [])
    with pytest.raises(ValueError, match="one this machine can run"):
        native.Segment(pool, MAXIMA, 64, isa="z80")
    with pytest.raises(ValueError, match="threads"):
        native.Pool(0)
    with pytest.raises(TypeError):
        native.plain(np.ones(4, np.float64))


def test_states_live_as_long_as_the_segment() -> None:
    segment = native.Segment(native.Pool(1), MAXIMA, 64)
    segment.value(0, 8, "C")
    states = [np.arange(4000, dtype=np.uint8).reshape(4, 1000) for _ in range(3)]
    kept = [state.copy() for state in states]
    segment.add("kv_copy", [0], [], [], states, {f"block_bytes.{i}": 1000 for i in range(3)})
    segment.finish([0], [])
    counts = {id(state): sys.getrefcount(state) for state in states}
    assert all(count > 4 for count in counts.values())
    segment.run([0, 0, 0, 0, 1, 0, 0, 0, 0, 0], [np.array([[1, 3]], np.int32)], [])
    for state, before in zip(states, kept, strict=True):
        np.testing.assert_array_equal(state[3], before[1])


def test_profile() -> None:
    segment = chain(2, [(0, 0), (1, 1)])
    x = np.ones((8, WIDTH), np.float32)
    segment.run(dims(8), [x], [np.empty_like(x)])
    assert segment.profile() == [("add", 0, 0.0)] * 2
    segment.set_profiling(True)
    for tokens in (1, 8, 2):  # serial, by the team, serial
        segment.run(dims(tokens), [x[:tokens]], [np.empty_like(x)])
    assert [(name, calls) for name, calls, _ in segment.profile()] == [("add", 3)] * 2
    assert all(seconds > 0 for _, _, seconds in segment.profile())


def test_every_variant_has_its_own_code() -> None:
    """What a variant takes from another gives the same bits, so that nothing but its pace would tell."""
    products = {"attention", "embed", "gated_linear", "head_linear", "linear", "moe_linear", "moe_combine", "moe_route"}
    base = {"amx": "avx512_vnni", "avx512": "avx512_vnni", "avx_vnni": "avx2"}
    for isa in NATIVE_ISAS:
        owners = native.kernels(isa)
        assert owners.keys() == native.kernels(NATIVE_ISAS[0]).keys() > products
        shared = {kernel for kernel, owner in owners.items() if owner != isa}
        if isa in base:  # products alone differ
            assert shared and shared.isdisjoint(products) and {owners[kernel] for kernel in shared} == {base[isa]}
        else:
            assert not shared


def test_the_environment_chooses_the_variant() -> None:
    program = "from engine_cpu import _native\ntry:\n    print(_native.isa())\nexcept ValueError as e:\n    print('refused:', e)"

    def answer(name: str) -> str:
        environment = {**os.environ, "ENGINE_CPU_ISA": name, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", program]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()

    for isa in NATIVE_ISAS:
        assert answer(isa) == isa
    assert answer("") == NATIVE_ISAS[0]
    refused = answer("z80")
    assert refused.startswith("refused:") and "z80" in refused and all(isa in refused for isa in NATIVE_ISAS)
