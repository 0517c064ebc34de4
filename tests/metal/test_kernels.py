"""The Metal kernels: their bodies run on the CPU beside the references, and their texts are those in ``golden``.

ENGINE_UPDATE_GOLDEN=1 writes the golden files anew.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from shim import Shim

from engine.backend.v1 import providers_of
from engine.ops import OPS
from engine.testing.checks import check_case
from engine.testing.running import Bench
from engine_metal.device import MetalDevice
from engine_metal.kernels import Launch, launches
from engine_metal.kernels import _built as built

GOLDEN = Path(__file__).parent / "golden"
KERNELS = {
    "attention": launches.PAGED_ATTENTION,
    "rope_kv_write": launches.ROPE_ROWS,
    "linear": launches.DENSE_ROWS,
}
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"


def check(op: str, shim: Shim) -> None:
    """The catalogue's cases of the op, as the kit checks them, with kernels through the shim."""
    device, rng = MetalDevice({"kernels": shim}), np.random.default_rng()
    provider = providers_of(device)[op][0]
    for case in OPS[op].cases(rng):
        bench = Bench(device, OPS[op], case)
        if bench.refusal(provider) is None:
            check_case(bench, provider, None, rng)


@pytest.mark.parametrize("op", KERNELS)
def test_bodies_agree_with_the_references(op, shim):
    check(op, shim)
    assert shim.launched == {KERNELS[op].name}


@pytest.mark.parametrize(
    ("op", "old", "new"),
    [
        ("attention", BARRIER, ""),
        ("attention", BARRIER, f"if (lane) {{\n{BARRIER}\n}} else {{\n{BARRIER}\n}}"),
        ("attention", "key <= last", "key <= last + 1"),
        ("attention", "key <= last", "key < last"),
        ("attention", "pages + key / BLOCK", "pages + key / BLOCK + 1"),
        ("attention", "d < DV; ++n", "d < DV + LANES; ++n"),
        ("attention", "y[(size_t(seq)", "if (head || d) y[(size_t(seq)"),
        ("linear", "x[from + n]", "x[n]"),
        ("linear", "weights + n", "weights + n + 1"),
        ("linear", "lane == 0", "lane == 0 && column"),
        ("rope_kv_write", BARRIER, ""),
        ("rope_kv_write", "simd_sum(squares)", "squares"),
        ("rope_kv_write", "whole[d + distance]", "whole[d + distance + ROTARY]"),
    ],
)
def test_the_shim_finds_what_is_wrong(op, old, new, shim_folder):
    def change(name: str, source: str) -> str:
        assert old in source
        return source.replace(old, new)

    with pytest.raises(AssertionError, match=f"{KERNELS[op].name}|{op}"):
        check(op, Shim(shim_folder, change))


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
@pytest.mark.parametrize(("rows", "columns", "depth"), [(1, 1, 1), (3, 5, 131), (2, 33, 254)])
def test_rows_of_any_width(rows, columns, depth, dtype, shim):
    """The catalogue's widths are multiples of what a lane takes at a time."""
    rng = np.random.default_rng()
    x, weight = (mx.array(rng.standard_normal((n, depth), np.float32)) for n in (rows, columns))
    got = np.array(launches.dense_rows(x, weight.astype(dtype), shim))
    want = np.array(x).astype(np.float64) @ np.array(weight.astype(dtype).astype(mx.float32)).T
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_a_row_s_end_is_seen(shim_folder):
    faulty = Shim(shim_folder, lambda _, source: source.replace("min(k + WIDTH, K)", "k + WIDTH"))
    x, weight = mx.ones((2, 131)), mx.ones((3, 131), dtype=mx.float16)
    with pytest.raises(AssertionError, match="dense_rows"):
        launches.dense_rows(x, weight, faulty)


@pytest.mark.parametrize("op", KERNELS)
def test_the_text_is_the_golden_one(op):
    """What a launch hands to MLX, of every case of the op that takes other arguments."""
    found: list[Launch] = []

    def keep(launch: Launch):
        found.append(launch)
        raise _LaunchedError

    device = MetalDevice({"kernels": keep})
    for case in OPS[op].cases(np.random.default_rng(0)):
        bench = Bench(device, OPS[op], case)
        provider = providers_of(device)[op][0]
        if bench.refusal(provider) is not None:
            continue
        with suppress(_LaunchedError), bench.loaded(provider, bench.case) as frame:
            bench.bind(provider)(frame)
    assert found
    text = "\n".join(dict.fromkeys(map(_described, found))) + "\n" + KERNELS[op].source
    path = GOLDEN / f"{KERNELS[op].name}.txt"
    if os.environ.get("ENGINE_UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text(), f"{path.name} differs; ENGINE_UPDATE_GOLDEN=1 writes it anew."


class _LaunchedError(Exception):
    """A launch came as far as it need."""


def _described(launch: Launch) -> str:
    given = [f"{name} {_type(a.dtype)}" for name, a in zip(launch.kernel.inputs, launch.inputs, strict=True)]
    made = [f"{name} {_type(t)}" for name, (_, t) in zip(launch.kernel.outputs, launch.outputs, strict=True)]
    template = [f"{name}={_type(value)}" for name, value in launch.template]
    return f"<{', '.join(template)}> ({', '.join(given)}) -> ({', '.join(made)}), threads {launch.threadgroup}"


def _type(value) -> str:
    return str(value).removeprefix("mlx.core.")


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=lambda kernel: kernel.name)
def test_mlx_takes_the_kernel(kernel):
    assert callable(built(kernel))
