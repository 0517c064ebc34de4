"""One program on several devices gives what it gives on one: bits where the devices compute the same, else within
tolerance."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import toy_backend

from engine import LLM, SamplingParams
from engine.backend.registry import discover
from engine.errors import BackendError, ConfigError, PlacementError
from engine.program.transfers import transfers
from engine.testing.checkpoints import KINDS, write_checkpoint
from engine.testing.models import answers, compare_answers, random_prompts

RULES = [
    "layer 1: {b}; rest: {a}",
    "embed, head: {b}; rest: {a}",
    "attention: {b}; rest: {a}",
    "linear, layer 0: {b}; rest: {a}",
    "sample, add: {b}; rest: {a}",
]
EXPERTS = ("experts: {b}; rest: {a}", "experts, head: {b}; layer 1: {b}; rest: {a}")
ARENA = """
import sys
sys.path.insert(0, {folder!r})
from arena_backend import ArenaDevice
from engine.backend.v1 import Manifest, Probe
manifest = Manifest("arena", "1.0", lambda: Probe(True, "an array of bytes", -1), lambda index, options: ArenaDevice())
"""
HALF = """
from dataclasses import replace
from engine.backend.v1 import Manifest, Probe
from toy_backend import ToyDevice
class HalfDevice(ToyDevice):
    def describe(self):
        return replace(super().describe(), backend={name!r}, roles={{"act": {act!r}, "residual": {residual!r}}})
manifest = Manifest({name!r}, "1.1", lambda: Probe(True, "half", -1), lambda index, options: HalfDevice())
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kinds")
    return {kind: write_checkpoint(kind, folder / kind, np.random.default_rng(3)) for kind in KINDS}


@pytest.fixture
def toy(install):
    install("engine.backends", "toy", "toy_backend:manifest")
    return "toy"


@pytest.fixture
def arena(install, request):
    folder = str(request.config.rootpath / "tests" / "testing")
    install("engine.backends", "arena", "arena_for_placement:manifest", ARENA.format(folder=folder))
    return "arena"


PROMPTS = random_prompts(np.random.default_rng(8))


def said(outputs):
    return [(o.prompt_logprobs, [(c.token_ids, c.logprobs) for c in o.outputs]) for o in outputs]


@pytest.mark.parametrize("kind", KINDS)
def test_two_instances_of_the_cpu_give_the_bits_of_one(models, kind, cpu):
    want = said(answers(models[kind], cpu, PROMPTS))
    own = EXPERTS if kind in ("mixtral", "gpt_oss") else ()
    for rules in (*RULES, *own):
        text = rules.format(a="cpu", b="cpu:1")
        assert said(answers(models[kind], "auto", PROMPTS, place=text)) == want, text


@pytest.mark.parametrize("other", ["toy", "arena"])
def test_another_device_of_references_gives_the_bits_of_the_reference(models, other, request):
    request.getfixturevalue(other)
    for kind in ("gemma2", "gpt_oss"):
        want = said(answers(models[kind], "reference", PROMPTS[:3]))
        for rules in RULES if kind == "gemma2" else EXPERTS:
            for a, b in (("reference", other), (other, "reference")):
                got = answers(models[kind], "auto", PROMPTS[:3], place=rules.format(a=a, b=b))
                assert said(got) == want, (kind, rules, a)


@pytest.mark.parametrize("kind", KINDS)
def test_the_cpu_with_the_reference_is_near_to_both(models, kind, cpu, record_property):
    want = answers(models[kind], "reference", PROMPTS)
    for rules in (*RULES[:2], *(EXPERTS if kind == "mixtral" else ())):
        for a, b in (("cpu", "reference"), ("reference", "cpu")):
            got = answers(models[kind], "auto", PROMPTS, place=rules.format(a=a, b=b))
            agreement = compare_answers(got, want, 2e-3)
            record_property("near ties", [f"{tie.margin:.3g}" for tie in agreement.ties])


@pytest.fixture
def opencl():
    found = next((backend for backend in discover() if backend.name == "opencl"), None)
    if found is None or not found.probe.available:
        pytest.skip("the plugin of OpenCL is not installed" if found is None else found.probe.reason)
    return "opencl"


@pytest.mark.parametrize("kind", KINDS)
def test_a_plugin_s_device_with_the_cpu_is_near_to_the_reference(models, kind, cpu, opencl, record_property):
    want = answers(models[kind], "reference", PROMPTS)
    for rules in ("layer 0: {a}; rest: {b}", "layers 0-1: {a}; rest: {b}", *(EXPERTS if kind == "mixtral" else ())):
        for a, b in ((opencl, cpu), (cpu, opencl)):
            got = answers(models[kind], "auto", PROMPTS, place=rules.format(a=a, b=b))
            agreement = compare_answers(got, want, 2e-3)
            record_property("near ties", [f"{tie.margin:.3g}" for tie in agreement.ties])


def test_three_devices_and_what_no_rule_names(models, toy, cpu):
    want = answers(models["llama"], "reference", PROMPTS)
    got = answers(models["llama"], cpu, PROMPTS, place="layer 0: toy; head: reference")
    compare_answers(got, want, 2e-3)


@pytest.mark.parametrize(("act", "residual"), [("f16", "f16"), ("bf16", "f32")])
def test_devices_that_store_values_differently(models, install, act, residual):
    """Each reads what the other wrote, whatever it stores activations in."""
    install("engine.backends", "half", f"half_{act}:manifest", HALF.format(name="half", act=act, residual=residual))
    want = answers(models["llama"], "reference", PROMPTS[:3])
    for rules in (
        "layer 0: half; rest: reference",
        "layer 1, head: reference; rest: half",
        "attention: reference; rest: half",
    ):
        got = answers(models["llama"], "auto", PROMPTS[:3], place=rules)
        compare_answers(got, want, 0.1 if act == "bf16" else 2e-2)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("in_flight", [1, 2])
def test_sampling_penalties_and_preemption_are_the_same(models, cpu, preemption, in_flight, monkeypatch):
    """The history and the caches lie on different devices, whose blocks are swapped each by its own."""
    import engine_cpu.device

    plain = engine_cpu.device.CpuDevice.describe
    monkeypatch.setattr(
        engine_cpu.device.CpuDevice, "describe", lambda self: replace(plain(self), max_in_flight=in_flight)
    )
    sampled = SamplingParams(
        temperature=0.9, seed=4, max_tokens=40, ignore_eos=True, repetition_penalty=1.3, n=2, logprobs=2
    )
    shared = PROMPTS[3][:40]
    prompts = [[*shared, 5], [*shared, 6], PROMPTS[2]]
    settings = {"max_model_len": 96, "preemption": preemption, "block_size": 4, "kv_cache_tokens": 160}
    settings |= {"max_num_seqs": 8, "max_num_batched_tokens": 24, "kv_cache_dtype": "f16"}

    def run(**device):
        with LLM(models["llama"], **device, **settings) as llm:
            return said(llm.generate(prompts, sampled)), llm.loaded

    want, _ = run(backend=cpu)
    got, loaded = run(place="layer 1: cpu:1; head: cpu:2; rest: cpu")
    assert got == want
    homes = {loaded.plan.state_places[name] for name in ("kv.0.k", "kv.1.k", "history")}
    assert homes == {"cpu", "cpu:1", "cpu:2"} and loaded.device is loaded.devices["cpu:2"]


def test_nothing_is_left_behind_on_any_device(models, toy, monkeypatch):
    opened = []
    start = toy_backend.ToyDevice.__init__
    monkeypatch.setattr(toy_backend.ToyDevice, "__init__", lambda self: (opened.append(self), start(self))[1])
    with LLM(models["llama"], place="layer 0: toy; layer 1: toy:1; rest: reference", max_model_len=96) as llm:
        alive = []
        for tokens in (2, 30):
            llm.generate([PROMPTS[1]], SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True))
            alive.append([device.alive for device in opened])
    assert len(opened) == 2 and alive[0] == alive[1]
    assert all(after < before for after, before in zip([d.alive for d in opened], alive[1], strict=True))


def test_the_plan_says_what_is_transferred(models, cpu):
    with LLM(models["llama"], place="layer 0: cpu:1; rest: cpu", max_model_len=96) as llm:
        loaded = llm.loaded
    segments = (*loaded.plan.body, *loaded.plan.head)
    moved = [one for entering in transfers(segments) for one in entering if not one.step_input]
    assert [(one.source, one.place) for one in moved] == [("cpu", "cpu:1")] * 3 + [("cpu:1", "cpu")]
    assert sorted(one.bytes_a_token for one in moved) == [4, 4, 256, 256], (
        "position, KV slot, and two rows of 64 floats"
    )
    calls = {(p.call.scope, p.place) for p in loaded.placement.calls if p.call.scope.startswith("layers")}
    assert calls == {("layers.0", "cpu:1"), ("layers.1", "cpu")}


def test_each_device_packs_what_it_runs(models, cpu):
    with LLM(models["qwen3"], place="embed: cpu:1; rest: cpu", max_model_len=96) as llm:
        weights = llm.loaded.packing.weights
    tied = [place for place, _, name in weights if name == "token_embd.weight"]
    assert sorted(tied) == ["cpu", "cpu:1"]
    assert {name for place, _, name in weights if place == "cpu:1"} == {"token_embd.weight"}


def test_memory_is_shared_out_by_layers(models, cpu):
    settings = {"place": "layer 0: cpu:1; rest: cpu", "kv_cache_dtype": "f32", "block_size": 4}
    with LLM(models["llama"], kv_cache_memory=512 * 4 * 25, max_model_len=96, **settings) as llm:
        [group] = llm.loaded.memory.groups
        assert group.bytes_a_token == 512 and group.blocks == 25
    with pytest.raises(ConfigError, match=r"A context of 96 tokens needs .* GB of KV cache"):
        LLM(models["llama"], kv_cache_memory=512 * 4 * 25 - 2, max_model_len=96, **settings)


def test_what_cannot_be_placed_is_refused(models, cpu):
    for place, error, sentence in (
        ("head: nowhere; rest: cpu", BackendError, "There is no backend 'nowhere'"),
        ("experts: cpu:1; rest: cpu", ConfigError, "nothing in this model is left for 'experts'"),
        ("layers 0-13: cpu:1; rest: cpu", ConfigError, "this model has the layers 0 to 1"),
    ):
        with pytest.raises(error, match=sentence):
            LLM(models["llama"], place=place)
    with pytest.raises(PlacementError, match=r"--strict: .* ops would run on the reference"):
        LLM(models["llama"], place="head: cpu:1; rest: cpu", strict=True, without=("rope", "rope_kv_write"))
    with LLM(models["llama"], place="head: cpu:1; rest: cpu", without=("rms_norm",), max_model_len=96) as llm:
        assert {p.call.op for p in llm.loaded.placement.fallbacks()} == {"rms_norm"}
        assert {p.place for p in llm.loaded.placement.fallbacks()} == {"host"}
