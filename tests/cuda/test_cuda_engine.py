"""The engine on the CUDA backend's own code path: probes, whole programs, and no op in eager torch."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from engine.backend.registry import discover
from engine.backend.v1 import HOST_DTYPES
from engine.errors import ConfigError
from engine.runtime.llm import LLM
from engine.sampling import SamplingParams
from engine.testing import models
from engine.testing.checkpoints import write_checkpoint

# What makes memory or views it. Everything else would be an op computed outside of a kernel.
PLAIN = {"empty", "new_empty", "view", "slice", "detach", "set_", "copy_", "select"}


def _probe(**environment):
    """What another process says of the backend."""
    code = "import sys; from engine_cuda import manifest; p = manifest.probe(); "
    code += "print(p.available, p.score, 'torch' in sys.modules, p.reason)"
    clean = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    path = os.pathsep.join(sys.path)
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**clean, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    available, score, loaded, reason = run.stdout.strip().split(" ", 3)
    assert loaded == "False", "a probe loads no torch"
    return available == "True", int(score), reason


def test_without_a_gpu_the_probe_says_why(device):
    available, _, reason = _probe()
    if available:
        pytest.skip("there is a GPU here")
    assert reason.count(". ") == 0 and ("CPU build" in reason or "driver" in reason)


def test_interpreted_it_is_never_preferred(device):
    available, score, reason = _probe(TRITON_INTERPRET="1")
    assert available and score < 0 and "interpreter" in reason
    assert next(b for b in discover() if b.automatic).name != "cuda"


def _driver(*capabilities):
    """As much of libcuda as the probe asks, with GPUs of these compute capabilities."""

    def put(place, value):
        place._obj.value = value
        return 0

    return SimpleNamespace(
        cuInit=lambda flags: 0,
        cuDeviceGetCount=lambda count: put(count, len(capabilities)),
        cuDeviceGet=put,
        cuDeviceGetAttribute=lambda found, which, device: put(found, capabilities[device.value][(75, 76).index(which)]),
    )


@pytest.mark.parametrize(
    ("capabilities", "available", "preferred"),
    [
        (((8, 0),), True, True),
        (((12, 0), (7, 5)), True, True),
        (((7, 5), (8, 6)), True, False),
        (((7, 5), (6, 1)), False, False),
    ],
)
def test_a_gpu_without_bf16_is_not_chosen(capabilities, available, preferred, device, monkeypatch):
    import engine_cuda

    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setattr(engine_cuda, "version", lambda name: "2.13.0+cu130")
    monkeypatch.setattr("ctypes.CDLL", lambda name: _driver(*capabilities))
    probe = engine_cuda.manifest.probe()
    assert probe.available == available and (probe.score > 0) == preferred
    assert available or probe.reason.startswith("GPU 0 has compute capability 7.5, and bf16 needs at least 8.0")


def test_a_gpu_without_bf16_is_not_opened(device, monkeypatch):
    from engine_cuda import device as module

    capabilities = [(9, 0), (7, 5)]
    monkeypatch.setattr(module, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.__getitem__)
    monkeypatch.setattr(module, "CudaDevice", lambda where, *more: where)
    assert module.open_device(0, {}).index == 0
    with pytest.raises(ValueError, match=r"^GPU 1 has compute capability 7\.5, and bf16 needs at least 8\.0 .*\.$"):
        module.open_device(1, {})


@pytest.mark.parametrize("kind", ["llama", "qwen3_5"])
def test_no_op_is_computed_by_torch(kind, device, tmp_path):
    """A step's every value is written by a kernel."""
    from torch.utils._python_dispatch import TorchDispatchMode

    used = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            used.add(function.overloadpacket.__name__)
            return function(*args, **(kwargs or {}))

    from engine_cuda import providers

    bind = providers.TritonProvider.bind

    def watched(self, bound, limits):
        run = bind(self, bound, limits)

        def inside(frame):
            with Watch():
                run(frame)

        return inside

    rng = np.random.default_rng()
    folder = write_checkpoint(kind, tmp_path / kind, rng)
    providers.TritonProvider.bind = watched
    try:
        models.answers(folder, "cuda", models.random_prompts(rng, (3, 9)), new=2)
    finally:
        providers.TritonProvider.bind = bind
    assert "empty" in used
    assert used <= PLAIN, f"torch computed {sorted(used - PLAIN)[0]}"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mixtral", "deepseek", "qwen3_5"])
def test_answers_are_the_reference_s(kind, device, tmp_path):
    rng = np.random.default_rng()
    folder, prompts = write_checkpoint(kind, tmp_path / kind, rng), models.random_prompts(rng, (1, 17))
    got, want = (models.answers(folder, name, prompts, new=4) for name in ("cuda", "reference"))
    models.compare_answers(got, want, models.tolerance_of(device.describe()))


@pytest.mark.slow
def test_it_tells_the_story(device, stories):
    params = SamplingParams(temperature=0.0, max_tokens=16)
    texts = []
    for backend in ("cuda", "reference"):
        with LLM(stories / "stories260K-f32.gguf", backend=backend) as llm:
            texts.append(llm.generate("Once upon a time", params)[0].outputs[0].text)
    assert texts[0] == texts[1] and "girl named Lily" in texts[0]


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "int8", "u8"])
def test_swapped_blocks_come_back(device, dtype):
    rng = np.random.default_rng()
    state = device.alloc((6, 4, 2, 8), dtype)
    rows = rng.integers(0, 255, (2, 4, 2, 8)).astype(HOST_DTYPES[dtype])
    state = device.import_blocks(state, np.array([4, 1], np.int32), rows)
    found = device.export_blocks(state, np.array([1, 4, 0], np.int32))
    rows[:] = 1  # neither the state nor what was saved is the same memory
    again = device.export_blocks(state, np.array([1, 4, 0], np.int32))
    np.testing.assert_array_equal(found, again)
    assert (found[:2] != 1).any() and not found[2].any()
    device.import_blocks(state, np.array([1], np.int32), rows[:1])
    np.testing.assert_array_equal(found, again)


@pytest.mark.slow
def test_swapped_sequences_go_on(device, tmp_path):
    rng = np.random.default_rng()
    folder, prompts = write_checkpoint("llama", tmp_path / "llama", rng), models.random_prompts(rng, (20, 25, 30))
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    tokens = []
    for settings in ({}, {"kv_cache_tokens": 96, "preemption": "swap"}):
        with LLM(folder, backend="cuda", max_model_len=64, max_num_seqs=3, **settings) as llm:
            tokens.append([out.outputs[0].token_ids for out in llm.generate(prompts, params)])
            swapped = llm.engine.scheduler_stats().swaps if settings else None
    assert tokens[0] == tokens[1] and swapped


@pytest.mark.parametrize(
    ("made", "graphs", "sentence"),
    [
        ("device.torch.zeros", "0", "There is no room for .* GB of KV cache"),
        ("recording.Arena._new", "1", "There is no room for .* GB of KV cache"),  # as when decode steps are recorded
        ("weights.from_host", "0", "memory has no room for .* GB of weights"),
    ],
)
def test_a_gpu_without_room_is_a_sentence(device, tmp_path, monkeypatch, made, graphs, sentence):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    folder = write_checkpoint("llama", tmp_path / "llama", np.random.default_rng())
    monkeypatch.setenv("ENGINE_CUDA_GRAPHS", graphs)
    monkeypatch.setattr(f"engine_cuda.{made}", full)
    with pytest.raises(ConfigError, match=sentence):
        LLM(folder, backend="cuda", max_model_len=32)


def test_kernels_are_cut_for_the_gpu_in_use(device, monkeypatch):
    """Which may not be the first one."""
    from engine_cuda import providers, tiles

    class Within:
        """As torch.cuda.device."""

        used = 0

        def __init__(self, index):
            self._index = index

        def __enter__(self):
            self._before, Within.used = Within.used, self._index

        def __exit__(self, *_):
            Within.used = self._before

    tiles._named.cache_clear()
    monkeypatch.setattr(tiles, "_any_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", Within)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: Within.used)
    monkeypatch.setattr(torch.cuda, "get_device_capability", [(8, 0), (9, 0)].__getitem__)
    monkeypatch.setattr("engine_cuda.weights.pack", lambda *_: tiles.architecture())
    for index, name in ((0, "sm_80"), (1, "sm_90")):
        where = torch.device("cuda", index)
        [provider] = providers.make_providers(where, None, 0)["linear"]
        assert provider.pack(None, ("linear",), None) == name
    assert tiles.architecture() == "sm_80"
    tiles._named.cache_clear()
