"""engine doctor: what is found without a model, and what it tells of one."""

from __future__ import annotations

import json
import os
import re
import sys
from itertools import pairwise

import numpy as np
import pytest
import tiny_models

from engine.cli import hardware
from engine.ops import OPS

REFERENCE = ("--backend", "reference")
TOY = """
from engine.backend.v1 import API, DeviceInfo, Manifest, Probe
from engine.program.reference import ReferenceProvider
from engine_reference import ReferenceDevice

class Linear(ReferenceProvider):
    name = packer = "toy"

class Toy(ReferenceDevice):
    def describe(self):
        return DeviceInfo(name="toy device", backend="toy", details={"isa": "none"})
    def providers(self):
        return {"linear": [Linear("linear")]}

manifest = Manifest("toy", API, lambda: Probe(True, "A toy.", score=-1), lambda index, options: Toy())
"""


@pytest.fixture
def toy(install) -> str:
    """A backend with a provider of linear and of nothing else."""
    install("engine.backends", "toy", "toy_for_doctor:manifest", TOY)
    return "toy"


def test_without_a_model(engine):
    done = engine("doctor", *REFERENCE)
    assert (done.status, done.err) == (0, "")
    assert re.search(r"reference +available: NumPy", done.out)
    assert all(re.search(rf"^ +{op} +reference$", done.out, re.MULTILINE) for op in OPS)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="threads are pinned on Linux only")
def test_threads_are_pinned_or_refused(engine, llama):
    done = engine("doctor", "--backend", "cpu", "--threads", "1", "--pin-threads", "--json")
    assert done.status == 0
    assert json.loads(done.out)["device"]["details"]["threads"] == "1, pinned"
    for command in (("doctor",), ("doctor", llama), ("generate", llama, "a")):
        done = engine(*command, "--backend", "cpu", "--threads", "999", "--pin-threads")
        assert done.status == 2
        assert re.search(r"999 threads cannot be pinned to \d+ processors; ask for at most as many\.", done.err)


def test_without_a_model_as_json(engine, toy):
    report = engine("doctor", "--backend", toy, "--json").json
    assert {"name": "toy", "available": True, "reason": "A toy.", "score": -1} in report["backends"]
    assert report["device"]["name"] == "toy device" and report["device"]["details"] == {"isa": "none"}
    assert 0 < report["device"]["memory_free"] <= report["device"]["memory_total"]
    assert report["ops"]["linear"] == ["toy", "reference"] and report["ops"]["rope"] == ["reference"]
    assert "model" not in report


def test_a_broken_plugin_is_shown_with_its_reason(engine, install):
    install("engine.backends", "broken", "broken_for_doctor:manifest", "raise ValueError('no such\\n device')")
    done = engine("doctor", *REFERENCE)
    assert done.status == 0 and re.search(r"broken +not available: .*no such device", done.out)


def test_what_is_known_is_shown_though_the_device_fails(engine, install):
    source = TOY.replace("lambda index, options: Toy()", "lambda index, options: 1 / 0")
    install("engine.backends", "failing", "failing_for_doctor:manifest", source)
    done = engine("doctor", "--backend", "failing", "--json")
    assert done.status in (1, 2) and done.err.count("\n") == 1
    report = json.loads(done.out)
    assert "failing" in [b["name"] for b in report["backends"]] and "zero" in report["error"]


def test_collectives_are_listed(engine):
    report = engine("doctor", *REFERENCE, "--json").json
    assert [c["name"] for c in report["collectives"]] == ["gloo"] and "gloo" in report["collectives"][0]["reason"]
    assert re.search(r"Collectives over the host, for ranks\n  gloo +available: ", engine("doctor", *REFERENCE).out)


def test_the_program_of_a_rank(engine, install, llama):
    """Each layer reduces twice, and the logits are gathered; weights are named by their parts."""
    install("engine.backends", "threaded", "thread_group:threaded")
    done = engine("doctor", llama, "--backend", "threaded", "--tensor-parallel", 2, "--program")
    lines = done.out[done.out.index("\nProgram\n") :].splitlines()
    assert sum("= all_reduce(" in line and line.endswith("@ threaded/collectives/all_reduce") for line in lines) == 4
    assert sum("= all_gather(" in line for line in lines) == 1
    assert any("linear(" in line and "blk.1.ffn_down.weight[columns 0:48] F32" in line for line in lines)


def test_a_model_placed_on_a_backend_with_gaps(engine, toy, llama):
    report = engine("doctor", llama, "--backend", toy, "--program", "--json").json
    model = report["model"]
    assert (model["family"], model["format"], model["context"]) == ("llama", "hf", 256)
    assert model["weights"]["F32"]["tensors"] == 21 and model["weights"]["F32"]["bytes"] > 300_000
    memory = model["memory"]
    [group] = memory["groups"]
    assert group["block_size"] == 16 and memory["kv"] == group["blocks"] * 16 * group["bytes_a_token"]
    lines = model["program"]
    assert len(lines) == sum(segment["calls"] for segment in model["segments"])
    assert any(re.fullmatch(r"%\d+ = linear\(%\d+; \S*attn_q\S* F32\) @ toy/toy", line) for line in lines)
    assert any(re.fullmatch(r"kv_write\(.*; kv\.1\.k, kv\.1\.v; .*\) @ host/reference", line) for line in lines)
    falls = {fall["op"]: fall for fall in model["fallbacks"]}
    assert "linear" not in falls and falls["attention"]["count"] == 2 and "toy" in falls["attention"]["reason"]
    body = [segment["place"] for segment in model["segments"] if segment["name"].startswith("body")]
    assert all(a != b for a, b in pairwise(body)) and set(body) == {"host", "device"}
    assert all(segment["transfers"] for segment in model["segments"] if segment["place"] == "device")


@pytest.mark.parametrize("threads", [0, 10000, 1 << 31])
def test_a_number_of_threads_that_no_pool_has_is_a_sentence(engine, cpu, threads):
    done = engine("doctor", "--backend", cpu, "--threads", threads)
    assert done.status == 2 and "ValueError" not in done.err
    assert done.err.startswith("engine: The backend cpu could not be opened: A pool has between 1 and 1024 threads")


def test_the_same_for_reading(engine, toy, llama):
    done = engine("doctor", llama, "--backend", toy)
    assert (done.status, done.err) == (0, "")
    for part in (
        "family      llama",
        "Segments",
        "Memory",
        "Fallbacks to the reference",
        "2 attention: toy has no provider",
    ):
        assert part in done.out
    assert re.search(r"^  embedding\.\d+ +\w+ +\d+ ops", done.out, re.MULTILINE)
    assert " = linear(" not in done.out
    listed = engine("doctor", llama, "--backend", toy, "--program")
    assert " = linear(" in listed.out


def test_a_provider_taken_out_shows(engine, toy, llama):
    model = engine("doctor", llama, "--backend", toy, "--without", "linear", "--json").json["model"]
    assert "linear" in {fall["op"] for fall in model["fallbacks"]}


def test_the_cpu_backend_needs_no_fallback(engine, cpu, llama):
    model = engine("doctor", llama, "--backend", cpu, "--json").json["model"]
    assert model["fallbacks"] == [] and {s["place"] for s in model["segments"]} == {"device"}
    without = engine("doctor", llama, "--backend", cpu, "--without", "attention", "--json").json["model"]
    assert "attention" in {fall["op"] for fall in without["fallbacks"]}


def test_strict_and_wrong_usage_are_one_line_of_error(engine, refusal, toy, llama):
    strict = engine("doctor", llama, "--backend", toy, "--strict")
    assert strict.status == 2 and strict.err.count("\n") == 1 and "--strict" in strict.err
    assert "--program" in refusal("doctor", "--program")


def test_what_windows_save_is_shown(engine, tmp_path):
    tiny_models.write_llama(tmp_path, np.random.default_rng(1), model_type="mistral", sliding_window=24)
    arguments = ("doctor", tmp_path, "--backend", "reference", "--max-batch-tokens", "16")
    memory = engine(*arguments, "--json").json["model"]["memory"]
    [group] = memory["groups"]
    assert (group["name"], group["window"], group["sequence_blocks"]) == ("window 24", 24, 4)
    assert memory["sequence_kv"] * 16 == memory["sequence_kv_unwindowed"] * 4
    text = engine(*arguments).out
    assert "at most 4 a sequence" in text and "without windows)" in text
    # An allocator that keeps what lies behind them makes one group of all layers.
    [group] = engine(*arguments, "--kv-allocator", "contiguous", "--json").json["model"]["memory"]["groups"]
    assert (group["name"], group["window"], group["sequence_blocks"]) == ("full", None, 16)


def test_swapping_and_allocators_are_options(engine, llama):
    prompt = ("generate", llama, "Once", "--backend", "reference", "--temperature", "0", "--max-tokens", "5")
    plain = engine(*prompt)
    for options in (("--preemption", "swap", "--swap-space", "0.5"), ("--kv-allocator", "contiguous")):
        assert engine(*prompt, *options).out == plain.out
    shown = engine("doctor", llama, "--backend", "reference", "--preemption", "swap", "--swap-space", "0.5")
    assert "swap        536.9 MB of the host's at most" in shown.out
    refused = engine(*prompt, "--kv-allocator", "virtual")
    assert refused.status == 2 and refused.err.count("\n") == 1 and "offers no virtual memory" in refused.err
    assert "no KV allocator 'slab'" in engine(*prompt, "--kv-allocator", "slab").err
    assert "no preemption 'never'" in engine(*prompt, "--preemption", "never").err


def test_what_a_report_of_a_fault_needs_without_keys(engine, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("ENGINE_API_KEY", "secret")
    monkeypatch.setenv("ENGINE_DEBUG", "0")
    done = engine("doctor", *REFERENCE)
    assert "secret" not in done.out and "ENGINE_DEBUG=0" in done.out
    assert f"numpy {np.__version__}" in done.out.splitlines()[0]
    assert "of backend reference. --backend names it." in done.out
    monkeypatch.setenv("ENGINE_BACKEND", "reference")
    assert "ENGINE_BACKEND names it." in engine("doctor").out
    monkeypatch.delenv("ENGINE_BACKEND")
    assert "It is the best that can run here." in engine("doctor").out


def pci(folder, *devices):
    for number, (kind, vendor) in enumerate(devices):
        (folder / str(number)).mkdir(parents=True)
        (folder / str(number) / "class").write_text(f"{kind:#08x}\n")
        (folder / str(number) / "vendor").write_text(f"{vendor:#06x}\n")
    return folder


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS tells its GPU by its name")
def test_cards_that_no_backend_uses_are_told(tmp_path):
    folder = pci(
        tmp_path, (0x030000, 0x8086), (0x030200, 0x10DE), (0x030200, 0x10DE), (0x020000, 0x1002), (0x120000, 0x1002)
    )
    (tmp_path / "broken").mkdir()
    found = hardware.accelerators(folder)
    assert found == ["Intel", "NVIDIA", "NVIDIA", "AMD"]
    (nvidia, amd) = hardware.advice(found, ["cpu"])
    assert "engine[cuda]" in nvidia and "ROCm" in amd
    assert hardware.advice(found, ["cpu", "cuda", "rocm"]) == []
    assert "OpenCL" in hardware.advice(["Intel"], ["cpu"])[0]
    assert hardware.advice([], ["cpu"]) == []
