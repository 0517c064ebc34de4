"""The OpenCL backend on whatever device is there: formats, both forms of the kernels, memory, swapping, probes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from engine import LLM, SamplingParams
from engine.backend.registry import discover, open_device
from engine.errors import BackendError
from engine.formats import FORMATS as STORED
from engine.ops import OPS
from engine.program.features import refusal
from engine.testing.cases import CaseWeight, all_cases, like, random_weight
from engine.testing.checkpoints import write_checkpoint
from engine.testing.checks import check_case, check_op, ops_of
from engine.testing.models import answers, compare_answers, random_prompts
from engine.testing.running import Bench

FEW = {"F32", "F16", "BF16", "Q4_0", "Q4_K", "Q6_K", "Q8_0"}
"""Formats that differ in how a kernel is built; the kit takes all."""
OFFERED = "gather_rows embed linear linear_group rms_norm layer_norm add_rms_norm rope gated_act add"
OFFERED += " kv_write kv_copy rope_kv_write attention causal_conv gated_delta ssm_scan"


@pytest.fixture(scope="module")
def opencl():
    found = next((backend for backend in discover() if backend.name == "opencl"), None)
    why = "the plugin is not installed" if found is None else "" if found.probe.available else found.probe.reason
    if why:
        (pytest.fail if os.environ.get("ENGINE_TEST_REQUIRE_ALL") else pytest.skip)(why)
    return open_device("opencl", {})


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return write_checkpoint("llama", tmp_path_factory.mktemp("llama"), np.random.default_rng())


def test_a_number_beyond_the_last_is_refused(opencl):
    """It had been another instance of the last one, which whoever asked for it could not see."""
    import pyopencl

    count = sum(len(platform.get_devices()) for platform in pyopencl.get_platforms())
    with pytest.raises(BackendError, match=f"there are {count} OpenCL devices, numbered from 0, and no number {count}"):
        open_device(f"opencl:{count}", {})
    assert open_device(f"opencl:{count - 1}", {}).describe().backend == "opencl"


def test_codes_scales_and_minimums_are_the_format_s(opencl):
    from engine_opencl.weights import FORMATS

    rng = np.random.default_rng()
    for name, form in FORMATS.items():
        raw = rng.integers(0, 256, (40, STORED[name].block_bytes), np.uint8)
        with np.errstate(all="ignore"):
            codes, scale, minimum = form.decode(raw)
            values = np.repeat(scale, form.group, 1) * (codes.astype(np.float32) - form.offset)
            want = STORED[name].decode(raw)
            got = values if minimum is None else values + np.repeat(minimum, form.group, 1)
            kept = scale.astype(np.float16) == scale if form.scale == "half" else np.isfinite(scale)
        assert ((got == want) | ~np.isfinite(want)).all(), name
        assert form.size == STORED[name].block_bytes and (minimum is not None) == form.minimum
        assert codes.min() >= (0 if form.bits == 4 else -128) and codes.max() <= (15 if form.bits == 4 else 127)
        assert (kept | ~np.isfinite(scale)).all(), name


def test_it_stays_small(opencl):
    import engine_opencl

    folder = Path(engine_opencl.__file__).parent
    sources = [*folder.glob("*.py"), *folder.glob("kernels/*.cl")]
    assert len(sources) > 5 and sum(len(path.read_text().splitlines()) for path in sources) <= 1150


def test_what_is_offered(opencl):
    assert set(ops_of(opencl)) == set(OFFERED.split())


@pytest.mark.parametrize("op", OFFERED.split())
def test_providers_agree_with_the_references(op, opencl):
    checked = check_op(opencl, OPS[op], np.random.default_rng())
    assert checked.ran
    known = (
        "does not know the feature packed",
        "a launch takes at most",
        "do the contrary",
        "neither from_plain nor",
        "layout for fp8",
        "layout for int16",
    )
    assert all(any(part in why for part in known) for why in checked.refused.values())


@pytest.mark.parametrize("op", OFFERED.split())
def test_the_form_of_the_kernels_for_gpus(op, opencl):
    """Groups of 64 work-items, each with one number at a time."""
    device = open_device("opencl", {"opencl_lanes": 1})
    assert device.group == 64
    rng, [provider] = np.random.default_rng(), device.providers()[op]
    ran = 0
    for case, other in zip(all_cases(OPS[op], rng), all_cases(OPS[op], rng), strict=True):
        bench = Bench(device, OPS[op], case)
        refused = refusal(provider, bench.call) or bench.refusal(provider)
        if {stored[0] for stored in case.weights.values()} <= FEW and refused is None:
            check_case(bench, provider, like(case, other), rng)
            ran += 1
    assert ran


def test_a_program_with_that_form(opencl, llama, monkeypatch):
    from engine_opencl.device import OpenCLDevice

    start = OpenCLDevice.__init__
    monkeypatch.setattr(OpenCLDevice, "__init__", lambda self, device, lanes: start(self, device, 1))
    prompts = random_prompts(np.random.default_rng())
    compare_answers(answers(llama, "opencl", prompts), answers(llama, "reference", prompts), 2e-3)


@pytest.mark.parametrize("format_", ["Q4_1", "Q5_0", "BF16", "NF4"])
def test_packing_tells_all_bytes_and_gives_the_weight_back(opencl, format_):
    """Of more rows than are read at a time, no whole number of panels, and of a format that is kept decoded."""
    from engine_opencl.weights import RANGE

    rng, [provider] = np.random.default_rng(), opencl.providers()["linear"]
    ref = CaseWeight("weight", random_weight(rng, format_, (RANGE + 37, 64)))
    told: list[int] = []
    packed = provider.pack(ref, ("linear",), told.append)
    assert sum(told) == ref.rows().nbytes and len(told) == 2
    assert np.array_equal(packed.unpack(), ref.dense())
    # 4.5 + .5 bits, 8.5, 16 and 32 a weight, of whole panels.
    bits = {"Q4_1": 5, "Q5_0": 8.5, "BF16": 16, "NF4": 32}[format_]
    assert packed.nbytes == -(-(RANGE + 37) // 16) * 16 * 64 * bits / 8


def test_steps_leave_no_memory_behind(opencl, llama):
    with LLM(llama, backend="opencl", max_model_len=96) as llm:
        device, used = llm.loaded.device, []
        for tokens in (2, 40):
            llm.generate([[5, 6, 7]], SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True))
            used.append(device.used)
    assert used[0] == used[1] > device.used  # the states are given back


def test_blocks_are_swapped_through_the_host(opencl, llama):
    state = opencl.alloc((5, 3, 2), "f16")
    rows = np.random.default_rng().standard_normal((2, 3, 2)).astype(np.float16)
    assert opencl.import_blocks(state, np.array([4, 1], np.int32), rows) is state
    assert np.array_equal(opencl.export_blocks(state, np.array([1, 4, 0], np.int32)), [rows[1], rows[0], 0 * rows[0]])
    prompts = random_prompts(np.random.default_rng(), (30, 31, 32, 33))
    few = answers(llama, "opencl", prompts, new=40, kv_cache_tokens=160, preemption="swap")
    many = answers(llama, "opencl", prompts, new=40)
    assert [o.outputs[0].token_ids for o in few] == [o.outputs[0].token_ids for o in many]


def test_without_a_driver_it_says_so_in_a_sentence(opencl, tmp_path):
    """The loader of OpenCL looks for drivers in this folder alone."""
    code = "from engine_opencl import probe; found = probe(); print(found.available, found.reason)"
    environment = {**os.environ, "OCL_ICD_VENDORS": str(tmp_path), "OPENCL_VENDOR_PATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("False No OpenCL driver has a device here; install one,")
    assert done.stdout.count("\n") == 1


def test_a_probe_builds_no_kernel_and_opens_no_device(opencl):
    code = (
        "import sys; from engine_opencl import probe; assert probe().available; "
        "print([name for name in sys.modules if name.startswith('engine_opencl.')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_what_a_linear_refuses(opencl):
    [linear] = opencl.providers()["linear"]
    said = set()
    for case in all_cases(OPS["linear"], np.random.default_rng()):
        said.add(refusal(linear, Bench(opencl, OPS["linear"], case).call))
    assert said == {None, "8-bit activations are required here, and OpenCL's kernels for F32 do the contrary."}
