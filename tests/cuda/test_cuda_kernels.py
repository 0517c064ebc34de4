"""Every Triton kernel in the interpreter, through the conformance kit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from engine.backend.registry import open_device
from engine.ops import OPS
from engine.program.features import refusal
from engine.program.group import OPS as EXCHANGES
from engine.testing import memory
from engine.testing.cases import all_cases, random_weight
from engine.testing.checks import check_case, check_op
from engine.testing.running import Bench

LEFT_TO_THE_REFERENCE = {"quantize", *EXCHANGES}
# Each costs many seconds in the interpreter: these are run whole beside the slow tests, and in part here.
LONG = {"embed", "linear", "linear_group", "moe_route", "moe_linear", "moe_linear_group", "process_logits"}
LONG |= {"rope_kv_write", "sample"}


def test_every_op_is_offered(device):
    assert set(device.providers()) == set(OPS) - LEFT_TO_THE_REFERENCE


@pytest.mark.parametrize(
    "op",
    [pytest.param(op, marks=pytest.mark.slow) if op in LONG else op for op in OPS if op not in LEFT_TO_THE_REFERENCE],
)
def test_provider_agrees_with_the_reference(op, device):
    checked = check_op(device, OPS[op], np.random.default_rng())
    assert checked.ran
    assert all("packed" in why or "no KV layout for int16" in why for why in checked.refused.values())


def attention_with(monkeypatch, **changed):
    from engine_cuda.ops import cache

    whole = cache.of_attention
    monkeypatch.setattr(cache, "of_attention", lambda *shape: [replace(tiles, **changed) for tiles in whole(*shape)])


def test_attention_takes_queries_and_keys_in_pieces(device, monkeypatch):
    """As on RDNA, where heads are wide."""
    attention_with(monkeypatch, piece=16)
    assert check_op(device, OPS["attention"], np.random.default_rng()).ran


def test_attention_knows_blocks_a_step_ahead(device, monkeypatch):
    """As on NVIDIA's large GPUs."""
    attention_with(monkeypatch, stages=3)
    assert check_op(device, OPS["attention"], np.random.default_rng()).ran


@pytest.mark.parametrize(
    ("op", "name"),
    [
        ("linear", "BF16 7x256"),
        ("linear", "8-bit activations of scale"),
        ("linear", "Q4_K 9x"),
        ("linear", "Q6_K 1x"),
        ("linear", "IQ4_NL 9x"),
        ("embed", "Q4_0 9x"),
        ("moe_route", "7 tokens"),
        ("moe_linear", "F16 13 tokens"),
        ("process_logits", "top-p"),
        ("rope_kv_write", "int8, 9 tokens"),
        ("sample", "random"),
    ],
)
def test_a_part_of_the_long_ones(op, name, device):
    rng = np.random.default_rng()
    [case] = [case for case in all_cases(OPS[op], rng) if case.name.startswith(name)]
    [provider] = device.providers()[op]
    bench = Bench(device, OPS[op], case)
    assert refusal(provider, bench.call) is None
    check_case(bench, provider, None, rng)


@pytest.mark.parametrize(
    ("op", "name"),
    [("process_logits", "greedy with penalties"), ("sample", "logprobs"), ("sample", "bad"), ("sample", "beams")],
)
def test_logits_in_bf16(op, name, device):
    """As a model's are on a GPU."""
    rng, device = np.random.default_rng(), open_device("cuda", {"act": "bf16"})
    [case] = [case for case in all_cases(OPS[op], rng) if case.name.startswith(name)]
    [provider] = device.providers()[op]
    bench = Bench(device, OPS[op], case)
    assert bench.call.inputs["logits"].dtype == "bf16"
    check_case(bench, provider, None, rng)


@pytest.mark.parametrize("format_", ["IQ1_M", "IQ2_S", "IQ3_XXS", "TQ1_0"])
def test_formats_without_an_encoder(format_, device):
    """A form each of those that codebooks and tables come to, of random blocks."""
    rng = np.random.default_rng()
    [case] = [case for case in all_cases(OPS["linear"], rng) if case.name.startswith("Q4_K 9x")]
    case = replace(case, name=format_, weights={"weight": random_weight(rng, format_, case.weights["weight"][2])})
    [provider] = device.providers()["linear"]
    bench = Bench(device, OPS["linear"], case)
    assert refusal(provider, bench.call) is None
    check_case(bench, provider, None, rng)


@pytest.mark.parametrize("format_", ["Q4_K", "Q8_0", "IQ4_XS", "NF4"])
def test_few_rows_of_codes_are_multiplied_in_parts(format_, device, monkeypatch):
    """Columns enough for several, whose number is none of whole parts; the bits are those of as many parts for each row."""
    from engine_cuda.ops import dense

    rng, depth, outputs = np.random.default_rng(), 4096 + 3 * 256, 40
    weight = random_weight(rng, format_, (outputs, depth))
    launched = []
    launch = dense.launch

    def watched(kernel, grid, *args, **meta):
        launched.append((kernel, grid))
        launch(kernel, grid, *args, **meta)

    monkeypatch.setattr(dense, "launch", watched)
    [provider] = device.providers()["linear"]
    for rows, ends in ((1, ""), (7, "bias residual"), (32, "bias"), (33, "residual")):
        inputs = {"x": rng.standard_normal((rows, depth), np.float32)}
        weights = {"weight": weight}
        if "residual" in ends:
            inputs["residual"] = rng.standard_normal((rows, outputs), np.float32)
        if "bias" in ends:
            weights["bias"] = ("F32", rng.standard_normal(outputs, np.float32).view(np.uint8)[None], (outputs,))
        [first, *_] = OPS["linear"].cases(rng)
        case = replace(
            first, name=f"{rows}", dims=replace(first.dims, T=rows), inputs=inputs, weights=weights, attrs={}
        )
        launched.clear()
        check_case(Bench(device, OPS["linear"], case), provider, None, rng)
        kernels = (dense.matmul.quantized, dense.few.few_coded)
        grids = [grid for kernel, grid in launched if kernel in kernels]
        sums = [kernel for kernel, _ in launched if kernel is dense.matmul.sum_parts]
        assert grids and {grid[2] for grid in grids} == {4 if rows <= 32 else 1}
        assert len(sums) == (len(grids) if rows <= 32 else 0)


def test_the_comparison_can_fail(device):
    spoiled = replace(OPS["add"], reference=lambda *, a, b: (a + b + 1,))
    with pytest.raises(AssertionError):
        check_op(device, spoiled, np.random.default_rng())


def test_the_eight_methods(device):
    rng = np.random.default_rng()
    memory.check_copies(device, rng)
    memory.check_values_are_apart(device, rng)
    memory.check_copies_together(device, rng)
    memory.check_copies_begun_together(device, rng)
    memory.check_alloc(device)
    memory.check_memory_info(device)
    memory.check_fence(device)


def test_results_are_those_of_when_their_copies_began(device):
    """Recorded steps write theirs to the same memory each time."""
    given = [np.arange(7, dtype=np.int32), np.ones((2, 3), np.float32)]
    values = [device.copy_in(array) for array in given]
    wait = device.copy_out_all(values)
    for value in values:
        value.fill_(9)
    assert all(np.array_equal(a, b) for a, b in zip(wait(), given, strict=True))


def test_int8_weights_with_one_scale_a_row_meet_int8_activations(device):
    """A product of bytes is exact but for its two factors."""
    from engine.backend.v1 import BoundCall, Call, Dims, Frame, Limits, Value
    from engine.testing.cases import CaseWeight

    rng = np.random.default_rng()
    rows, outputs, depth = 5, 40, 96
    codes = rng.integers(-127, 128, (outputs, depth // 32, 32), np.int8)
    scale = np.repeat(rng.uniform(0.001, 0.1, (outputs, 1, 1)).astype(np.float16), depth // 32, axis=1)
    raw = np.concatenate([scale.view(np.uint8), codes.view(np.uint8)], axis=2).reshape(outputs, -1)
    weight = CaseWeight("w", ("Q8_0", raw, (outputs, depth)))
    [provider] = device.providers()["linear"]
    packed = provider.pack(weight, ("linear",), lambda _: None)
    assert packed.handle.one_scale
    np.testing.assert_array_equal(packed.unpack(), weight.dense())

    x = rng.standard_normal((rows, depth), np.float32)
    step = np.abs(x).max(axis=1, keepdims=True) / np.float32(127.5)
    near = np.clip(np.rint(x / step), -128, 127)
    want = (near.astype(np.int64) @ codes.reshape(outputs, depth).T.astype(np.int64)) * (
        step.astype(np.float64) * scale[:, 0, 0].astype(np.float64)
    )
    call = Call(
        "linear", {"x": Value(0, "x", ("T", depth), "f32")}, (Value(1, "y", ("T", outputs), "f32"),), {"weight": weight},
        attrs={"quantized_activation": "required"},
    )  # fmt: skip
    frame = Frame(Dims(T=rows), {0: device.copy_in(x)}, {})
    provider.bind(BoundCall(call, provider, {"weight": packed}), Limits(Dims(T=rows), 64, 1))(frame)
    np.testing.assert_allclose(device.copy_out(frame.values[1]), want, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("stages", [2, 3])
def test_long_contexts_are_cut_into_parts(stages, device, monkeypatch):
    """One query over more cached tokens than the first parts have, with a window and without, causal or not."""
    attention_with(monkeypatch, stages=stages)
    for window, causal in ((0, False), (700, True)):
        _check_long(device, 1700, "f16", window=window, causal=causal)


@pytest.mark.parametrize("kv", ["int8", "fp8"])
@pytest.mark.parametrize("together", [2, 4])
def test_words_of_a_cache_become_operands(together, kv, device, monkeypatch):
    """As either of Triton's compilers arranges them, of the widths that there are, in parts and in one."""
    from engine_cuda.ops import cache

    monkeypatch.setattr(cache, "together", lambda: together)
    for cached, width, features in (
        (5, 64, {}),
        (1150, 64, {"window": 700}),
        (330, 128, {"softcap": 5.0, "causal": False}),
    ):
        launched = _check_long(device, cached, kv, width=width, **features)
        assert "attend_words" in launched and "attend" not in launched


@pytest.mark.parametrize("kv", ["int8", "fp8"])
def test_words_have_the_range_of_queries_and_values(kv, device):
    """Which f16 has not: bf16 is wider, and so are the scales of int8."""
    for size in (1e-30, 1e30):
        _check_long(device, 40, kv, width=64, scale=1 / size, queries=size, values=size if kv == "int8" else 1.0)


def _check_long(device, cached, kv, **features):
    """One query over cached tokens; what was launched."""
    from engine.testing.cases import Case  # the kit's cases are shorter than a part
    from engine_cuda.recording import Arena, recorded

    rng = np.random.default_rng()
    [provider] = device.providers()["attention"]
    with recorded(Arena(device.copy_in(np.zeros(1, np.float32)).device)) as recording:
        check_case(Bench(device, OPS["attention"], _long_case(rng, cached, kv, Case, **features)), provider, None, rng)
    return {one.name for one in recording.launches}


def _long_case(rng, cached, kv, make, width=32, queries=2.0, values=1.0, scale=None, **features):
    from engine.backend.v1 import Dims, KVSpec

    size, heads, kv_heads = 16, 4, 2
    blocks = -(-(cached + 1) // size)
    spec = KVSpec(blocks + 1, size, kv_heads, width, kv)
    table = (1 + rng.permutation(blocks)).astype(np.int32)[None]
    states = {name: rng.standard_normal((blocks + 1, size, kv_heads, width), np.float32) for name in ("k", "v")}
    states["v"] *= np.float32(values)
    inputs = {
        "q": rng.standard_normal((1, heads * width), np.float32) * np.float32(queries),
        "seq_starts": np.array([cached], np.int32),
        "query_offsets": np.array([0, 1], np.int32),
        "page_table": table,
    }
    attrs = {"heads": heads, "kv_heads": kv_heads, "head_dim": width, "scale": scale or width**-0.5, "block_size": size}
    dims = Dims(T=1, S=1, P=blocks)
    return make(f"{cached} cached, {kv}, {features}", dims, inputs, states=states, attrs={**attrs, **features}, kv=spec)


def test_no_kernel_leaves_its_rounding_to_tritons_default(device):
    """That of fused multiply-adds changes after Triton 3.9, and sums with it."""
    from engine_cuda.kernels.common import INTERPRETED
    from engine_cuda.recording import Arena, recorded

    assert INTERPRETED
    with recorded(Arena(device.copy_in(np.zeros(1, np.float32)).device)) as recording:
        for op in ("linear", "rms_norm", "attention"):
            check_op(device, OPS[op], np.random.default_rng())
    assert len({launch.name for launch in recording.launches}) >= 3
    assert all(launch.meta["enable_fp_fusion"] for launch in recording.launches)


def test_only_rows_with_penalties_are_counted(device):
    """Their counts begin at zero where memory is not, and no others are written: they are as many as the logits."""
    import torch

    from engine_cuda.recording import Arena, recorded

    class Poisoned(Arena):
        def empty(self, shape, dtype):
            value = super().empty(shape, dtype)
            value.view(-1).view(torch.uint8).fill_(0x5A)
            return value

    rng = np.random.default_rng()
    [provider] = device.providers()["process_logits"]
    for name, counted in (("greedy with penalties", True), ("temperature", False)):
        [case] = [case for case in all_cases(OPS["process_logits"], rng) if case.name.startswith(name)]
        with recorded(Poisoned(torch.device("cpu"))) as recording:
            check_case(Bench(device, OPS["process_logits"], case), provider, None, rng)
        [counts, *_] = [one.args[-2] for one in recording.launches if one.name == "clear_counts"]
        assert counts.numel() == case.inputs["logits"].size and bool((counts == 0x5A5A5A5A).all()) != counted


def test_tiles_are_brought_where_rows_begin_as_the_copy_engine_wants_them(device, monkeypatch):
    """At multiples of 16 bytes; other products go by pointers."""
    import torch

    from engine_cuda.ops import dense
    from engine_cuda.weights import Dense

    launched, launch = [], dense.launch
    monkeypatch.setattr(
        dense, "launch", lambda kernel, *args, **meta: (launched.append(kernel), launch(kernel, *args, **meta))
    )
    for depth, kernel in ((48, dense.tiled.tiled), (44, dense.matmul.dense)):
        x, weight = (torch.randn(rows, depth).to(torch.float16) for rows in (70, 300))
        y = torch.full((70, 300), float("nan"), dtype=torch.float16)
        dense.Product(x, Dense(weight), y, device._cuts).run()
        assert launched.pop() is kernel and not launched
        want = x.double() @ weight.double().T
        assert float((y.double() - want).abs().max()) < 2e-2
        dense.Product(x[:0], Dense(weight), y[:0], device._cuts).run()


def test_kernels_that_begin_early_are_launched_so(device, monkeypatch):
    """And no others, which would not wait for the kernel before them."""
    from types import SimpleNamespace

    from engine_cuda.kernels import common

    submitted = []
    monkeypatch.setattr(common, "submit", submitted.append)

    class Kernel:
        def __init__(self, *names):
            self.arg_names, self.fn = names, SimpleNamespace(__name__="kernel")

        def __getitem__(self, grid):
            return None

    for begins in (True, False):
        monkeypatch.setattr(common, "begins_early", lambda begins=begins: begins)
        common.launch(Kernel("x", "EARLY"), (1,), 5)
        common.launch(Kernel("x"), (1,), 5)
        early, plain = (one.meta for one in submitted)
        assert early["EARLY"] is begins and early.get("launch_pdl", False) is begins
        assert not {"EARLY", "launch_pdl"} & plain.keys()
        submitted.clear()
