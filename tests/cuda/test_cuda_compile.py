"""Every kernel compiled ahead of time, as models launch it, for GPUs that need not be there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

KERNELS = {
    "add", "adjust", "attend", "ban_ngrams", "best_of_parts", "bytes_by_bytes", "causal_conv", "choose", "clear_counts",
    "combine", "concat_heads", "count_choices", "count_tokens", "dense", "embed_dense", "embed_quantized", "expand_tokens",
    "fill_history", "gated_act", "gated_delta", "gather_columns", "gather_rows", "keep", "kv_copy", "kv_slots", "kv_write",
    "layer_norm", "leave_tail", "log_sum", "merge", "order_choices", "quantized", "report", "rms_norm", "rope", "rope_kv_write",
    "rounded", "route", "scale_softcap", "ssm_scan", "sum_parts", "to_bytes", "wants",
}  # fmt: skip
FEW = {"few_coded", "attend_words"}  # for matrix instructions of NVIDIA's
FP8 = {"fp8_by_fp8", "to_fp8"}  # where products of E4M3 are taken
TILED = {"tiled"}  # where the copy engine brings tiles, those of int8, too
ATTENTION = {"attend", "attend_words"}
EARLY = (
    ATTENTION | TILED | {"gated_act", "merge", "rms_norm", "rope_kv_write"}
)  # begin while the kernel before them ends
PRODUCTS = {"dense", "quantized", "few_coded", "bytes_by_bytes", "fp8_by_fp8", "tiled"}
# The instructions that products must use, and the bytes of memory that a program's warps may share.
TARGETS = {
    "sm_80": (r"mma\.sync", 166_912),
    "sm_89": (r"mma\.sync", 101_376),
    "sm_90": (r"wgmma", 232_448),
    "sm_100": (r"tcgen05\.mma", 232_448),
    "sm_120": (r"mma\.sync", 101_376),
    "gfx90a": (r"v_mfma", 65_536),
    "gfx942": (r"v_mfma", 65_536),
    "gfx1100": (r"v_wmma", 65_536),
    "gfx1201": (r"v_wmma", 65_536),
}
PARTLY = {"sm_89", "sm_120"}  # of which only what needs much shared memory is compiled
HAS_FP8 = {"sm_90", "sm_100", "sm_120"}
HAS_COPIES = {"sm_90", "sm_100"}
BEGINS_EARLY = {"sm_90", "sm_100", "sm_120"}
RDNA = {"gfx1100", "gfx1201"}  # no matrix instructions for f32
REGISTERS = 65_536  # of a multiprocessor of NVIDIA's
MEASURED = {"sm_90", "gfx942"}  # where the kernels in which most of a step's time goes may spill nothing


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_compiles(target, tmp_path):
    pytest.importorskip("triton")
    wanted, shared = TARGETS[target]
    wants = (KERNELS | FP8 if target in HAS_FP8 else KERNELS) | (FEW if target.startswith("sm_") else set())
    if target in HAS_COPIES:
        wants = wants - {"bytes_by_bytes"} | TILED
    if target in PARTLY:
        wants = wants & (PRODUCTS | ATTENTION)
    kernels = _compiled(target, tmp_path, *(sorted(wants) if target in PARTLY else ()))
    assert {kernel["kernel"] for kernel in kernels} == wants
    for kernel in kernels:
        where = f"{target}: {kernel['label']}"
        assert kernel["shared"] <= shared, where
        assert kernel["early"] == (kernel["kernel"] in EARLY and target in BEGINS_EARLY), where
        if kernel["kernel"] in PRODUCTS and not (kernel["dot"] == "fp32" and target in RDNA):
            few = (
                kernel["kernel"] in FEW or "BM=16" in kernel["label"] or "BM=32" in kernel["label"]
            )  # of which NVIDIA's warps multiply each their own
            assert any(re.match(rf"{wanted}|mma\.sync" if few else wanted, found) for found in kernel["matrix"]), where
        if kernel["kernel"] == "fp8_by_fp8":
            assert any("e4m3" in found or "f8f6f4" in found for found in kernel["matrix"]), where
        if kernel["kernel"] in ATTENTION and kernel["dot"] != "fp32":
            assert kernel["matrix"], where
        if kernel["kernel"] == "tiled":
            assert kernel["brought"], where
        elif kernel["kernel"] in PRODUCTS and target.startswith("sm_") and kernel["dot"] != "fp32":
            assert kernel["ahead"], where
        deep = kernel["kernel"] == "attend" and kernel["width"] <= 128 and target in ("sm_80", "sm_90", "sm_100")
        if deep and kernel["dot"] != "fp32" and "DECODE=True" in kernel["label"]:
            assert kernel["ahead"], where
        if kernel["kernel"] in ("quantized", "few_coded", "fp8_by_fp8") and target == "sm_90":
            assert kernel["awaited"] == 0, where  # factors, too, are read a step before they are needed
        of_f32 = kernel["kernel"] == "dense" and kernel["dot"] == "fp32"
        if kernel["kernel"] in ("dense", "tiled") and target == "sm_90" and not of_f32:
            assert kernel["registers"] <= REGISTERS // (1 if "BM=256" in kernel["label"] else 2), where
        near = kernel["kernel"] in PRODUCTS or (kernel["kernel"] in ATTENTION and kernel["width"] <= 128)
        assert kernel["spilled"] <= (0 if near and target in MEASURED else 16), where


@pytest.mark.timeout(300)
@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_steps_of_other_counts_compile_nothing(target, tmp_path):
    """Each kernel takes a second or more, for which all requests would wait."""
    pytest.importorskip("triton")
    assert _compiled(target, tmp_path, "again") == [[]]


@pytest.mark.timeout(300)
def test_sums_over_a_row_are_reduced_once_a_pass(tmp_path):
    """The filters pass over it dozens of times. What top-k and top-p count in the order of ids is left, in one pass of each."""
    pytest.importorskip("triton")
    kernels = {kernel["kernel"]: kernel["reduced"] for kernel in _compiled("sm_80", tmp_path, "keep", "log_sum")}
    assert kernels == {"keep": 4, "log_sum": 0}


@pytest.mark.timeout(300)
def test_a_row_of_the_vocabulary_takes_few_rounds(tmp_path):
    """Top-k and top-p pass over it 34 times each, a program a row, and each round waits for memory: a row of 128,256 tokens
    took 126 rounds a pass."""
    pytest.importorskip("triton")
    for kernel in _compiled("sm_90", tmp_path, "keep", "log_sum", "report"):
        assert -(-128_256 // kernel["block"]) <= 32 and kernel["spilled"] == 0, kernel["label"]


@pytest.mark.timeout(300)
def test_logits_may_be_of_either_type_of_activations(tmp_path):
    """Models on GPUs have them in bf16, which the interpreter does not mind where a kernel would not compile."""
    pytest.importorskip("triton")
    names = ("adjust", "best_of_parts", "log_sum", "report")
    kernels = [kernel["kernel"] for kernel in _compiled("sm_90", tmp_path, *names)]
    assert sorted(kernels) == sorted(2 * names)


@pytest.mark.timeout(300)
def test_products_of_int8_leave_room_for_another_program(tmp_path):
    """With a residual, too: its compiler waits for each step's products, and only another program would multiply meanwhile."""
    pytest.importorskip("triton")
    kernels = [kernel for kernel in _compiled("sm_90", tmp_path, "tiled") if kernel["dot"] == "int32"]
    assert len(kernels) > 1
    for kernel in kernels:
        assert kernel["registers"] <= REGISTERS // 2, kernel["label"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_codes_become_operands_where_they_are_multiplied(target, tmp_path):
    """In a lane's registers. A Triton whose operands lie otherwise than ``tiles.together`` says would copy them."""
    pytest.importorskip("triton")
    kernels = _compiled(target, tmp_path, "few_coded")
    assert {
        label for kernel in kernels for label in ("BM=8", "BM=16", "BM=32") if label in kernel["label"].split()
    } == {
        "BM=8",
        "BM=16",
        "BM=32",
    }
    for kernel in kernels:
        assert (kernel["copied"], kernel["awaited"], kernel["spilled"]) == (0, 0, 0), kernel["label"]
        assert kernel["registers"] <= REGISTERS // 2, kernel["label"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_words_of_a_cache_become_operands_where_they_are_multiplied(target, tmp_path):
    """Else memory would hold them a second time, and fewer programs be on a multiprocessor."""
    pytest.importorskip("triton")
    kernels = _compiled(target, tmp_path, "attend_words")
    assert len(kernels) == (2 if target in HAS_FP8 else 1)
    for kernel in kernels:
        assert (kernel["copied"], kernel["awaited"], kernel["spilled"]) == (0, 0, 0), kernel["label"]
        assert kernel["shared"] <= 12 << 10 and kernel["registers"] <= REGISTERS // 16, kernel["label"]


@pytest.mark.timeout(300)
def test_e4m3_is_multiplied_from_where_it_was_read_to(tmp_path):
    pytest.importorskip("triton")
    kernels = _compiled("sm_90", tmp_path, "fp8_by_fp8")
    assert kernels
    for kernel in kernels:
        assert (kernel["copied"], kernel["awaited"]) == (0, 0), kernel["label"]


def _compiled(target, tmp_path, *names):
    """In a process of its own, since kernels of this one are interpreted."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "TRITON_CACHE_DIR": str(tmp_path)}
    script = Path(__file__).with_name("launches.py")
    run = subprocess.run(
        [sys.executable, str(script), target, *names], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert "FP_FUSION" not in run.stderr  # Triton warns of kernels that leave it to its default, which changes
    return [json.loads(line) for line in run.stdout.splitlines()]
