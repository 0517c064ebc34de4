"""The backend around the kernels: its probe, and its device with HIP kernels in lockstep on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from on_cpu import Kernels

from engine.ops import OPS
from engine.program.features import refusal
from engine.testing.cases import all_cases
from engine.testing.checks import check_case
from engine.testing.running import Bench


class Lockstep:
    """A runtime whose kernels run on the CPU; ``launched`` counts them."""

    def __init__(self, folder, warp):
        self.folder, self.warp, self.made, self.launched = folder, warp, {}, 0

    def kernels(self, source, options):
        key = source, tuple(options.items())
        if key not in self.made:
            folder = self.folder / str(len(self.made))
            folder.mkdir()
            names = ("gemv",) if source == "gemv.hip" else ("attend_decode", "merge_parts")
            built = Kernels(folder, source, names, self.warp, options)
            self.made[key] = Launches(self, built)
        return self.made[key]


class Launches:
    def __init__(self, runtime, built):
        self.runtime, self.built = runtime, built

    def launch(self, name, grid, *arguments):
        self.runtime.launched += 1
        self.built.run(name, grid, *map(_plain, arguments))


def _plain(argument):
    """As ``Kernels`` takes it; a tensor's memory is an array's. bf16 has no type there."""
    import torch

    if isinstance(argument, torch.Tensor):
        bits = argument.view(torch.uint16) if argument.dtype == torch.bfloat16 else argument
        return bits.numpy()
    return {int: np.int32, float: np.float32, type(None): lambda nothing: nothing}[type(argument)](argument)


@pytest.mark.parametrize(
    ("warp", "name"),
    [
        (64, "f16, 8/2 heads of 64"),
        pytest.param(32, "int8, 6/6 heads of 32", marks=pytest.mark.slow),
        pytest.param(64, "fp8,", marks=pytest.mark.slow),
        pytest.param(64, "bf16, 8/1 heads of 128", marks=pytest.mark.slow),
        pytest.param(32, "f32, 8/8 heads of 48", marks=pytest.mark.slow),
    ],
)
def test_the_device_decodes_by_the_kernel(warp, name, interpreted, tmp_path):
    import torch

    from engine_rocm.device import RocmDevice

    rng = np.random.default_rng()
    runtime = Lockstep(tmp_path, warp)
    device = RocmDevice(torch.device("cpu"), "f32", runtime, "lockstep")
    [provider] = device.providers()["attention"]
    case = next(case for case in all_cases(OPS["attention"], rng) if case.name.startswith(name))
    bench = Bench(device, OPS["attention"], case)
    assert refusal(provider, bench.call) is None
    check_case(bench, provider, None, rng)
    assert runtime.launched > 0
    assert device.describe().backend == "rocm" and device.describe().details["decoding"] == "lockstep"


@pytest.mark.parametrize(
    ("op", "name"),
    [("linear", "Q4_K 1x"), pytest.param("linear_group", "Q4_0 1x", marks=pytest.mark.slow)],
)
def test_the_device_multiplies_few_rows_by_the_kernel(op, name, interpreted, tmp_path):
    import torch

    from engine_rocm.device import RocmDevice

    rng = np.random.default_rng()
    runtime = Lockstep(tmp_path, 64)
    device = RocmDevice(torch.device("cpu"), "f32", runtime, "lockstep")
    [provider] = device.providers()[op]
    case = next(case for case in all_cases(OPS[op], rng) if name in case.name)
    check_case(Bench(device, OPS[op], case), provider, None, rng)
    assert runtime.launched > 0


def test_what_the_kernel_does_not_take_is_left_to_triton(interpreted, tmp_path):
    import torch

    from engine_rocm.device import RocmDevice

    rng = np.random.default_rng()
    runtime = Lockstep(tmp_path, 32)
    device = RocmDevice(torch.device("cpu"), "f32", runtime, "lockstep")
    [provider] = device.providers()["attention"]
    case = next(case for case in all_cases(OPS["attention"], rng) if "v_head_dim 24" in case.name)
    check_case(Bench(device, OPS["attention"], case), provider, None, rng)
    assert runtime.launched == 0


def _probe(path, **environment):
    code = "import sys; from engine_rocm import manifest; p = manifest.probe(); "
    code += "print(p.available, 'torch' in sys.modules, p.reason)"
    clean = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**clean, "PYTHONPATH": os.pathsep.join(map(str, path)), **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    available, loaded, reason = run.stdout.strip().split(" ", 2)
    assert loaded == "False", "a probe loads no torch"
    return available == "True", reason


def test_the_probe_names_what_is_missing(tmp_path):
    """In packages that are there by name alone, with the version file that torch writes."""
    for name in ("torch", "triton"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('a probe loads no library')")
    version = tmp_path / "torch" / "version.py"
    version.write_text("cuda: str | None = '13.0'\nhip: str | None = None\n")
    path = [tmp_path, *sys.path]
    available, reason = _probe(path)
    assert not available and "install a torch built for ROCm" in reason and reason.count(". ") == 0
    version.write_text("cuda: str | None = None\nhip: str | None = '7.0.51831'\n")
    available, reason = _probe(path)
    assert available or "no AMD GPU" in reason
    available, reason = _probe(path, TRITON_INTERPRET="1")
    assert not available and "interpreter" in reason


def test_a_torch_for_another_device_opens_none(interpreted):
    import torch

    from engine_rocm.device import open_device

    if torch.version.hip is not None:
        pytest.skip("there is a torch built for ROCm here")
    with pytest.raises(ValueError, match="built for ROCm"):
        open_device(0, {})


def test_torch_s_own_library_goes_before_the_system_s(monkeypatch, tmp_path):
    """Whatever its version: a stream of one library is none to another. Nor does a folder that one happens to be in count."""
    pytest.importorskip("triton")
    from engine_rocm import rtc

    monkeypatch.chdir(tmp_path)
    (tmp_path / "libnvrtc-builtins.so.13").touch()
    loaded, bundled = [], tmp_path / "lib" / "libamdhip64.so.7"
    monkeypatch.setattr(rtc.ctypes, "CDLL", lambda place: loaded.append(place) or place)
    monkeypatch.setattr(rtc, "_packaged", lambda name: [bundled] if name == bundled.name else [])
    assert rtc.find_library(rtc.HIP.drivers) == str(bundled)
    monkeypatch.setattr(rtc, "_packaged", lambda name: [])
    assert rtc.find_library(rtc.HIP.drivers) == "libamdhip64.so"
    assert loaded == [str(bundled), "libamdhip64.so"]
