"""The HIP kernels compiled for GPUs that need not be there: AMD's by clang, NVIDIA's by NVRTC and nvcc."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from engine_cuda.repack import REPACKED
from engine_rocm import sources
from engine_rocm.rtc import CUDA, Compiler, find_library

AMD = ("gfx90a", "gfx942", "gfx1100", "gfx1201")
NVIDIA = ("sm_80", "sm_90", "sm_100")
MOST_SHARED = 65_536

VARIANTS = {
    "attention f16 128": ("attention.hip", sources.attention(128, 8, 16, "bf16", "f16")),
    "attention int8 128": ("attention.hip", sources.attention(128, 4, 16, "bf16", "int8")),
    "attention fp8 128": ("attention.hip", sources.attention(128, 4, 16, "bf16", "fp8")),
    "attention bf16 256": ("attention.hip", sources.attention(256, 2, 16, "bf16", "bf16")),
    "attention f16 64": ("attention.hip", sources.attention(64, 1, 32, "f16", "f16")),
    "gemv Q8_0": ("gemv.hip", sources.gemv(REPACKED["Q8_0"], 1, "bf16", "bf16", "f16")),
    "gemv Q4_0": ("gemv.hip", sources.gemv(REPACKED["Q4_0"], sources.MOST_ROWS, "f16", "f32", "f16")),
    "gemv Q4_K": ("gemv.hip", sources.gemv(REPACKED["Q4_K"], sources.MOST_ROWS, "bf16", "bf16", "f16")),
    "gemv Q6_K": ("gemv.hip", sources.gemv(REPACKED["Q6_K"], 1, "bf16", "bf16", "f16", fine="int8")),
    "norm 4096": ("norm.hip", sources.norm(4096, "bf16")),
    "norm 8192": ("norm.hip", sources.norm(8192, "bf16")),
}


def _macros(options):
    return [f"-D{name}={value}" for name, value in options.items()]


def _clang():
    """The newest of these that knows AMD's GPUs of all generations."""
    for name in ("clang-21", "clang-20", "clang-19"):
        if shutil.which(name):
            return name
    pytest.skip("clang 19 or newer, which compiles for gfx1201, is not installed")


@pytest.mark.parametrize("target", AMD)
def test_amd(target, tmp_path):
    """Nothing is spilled, shared memory fits, and 16 bytes are loaded at a time where rows are long."""
    command = [_clang(), "-x", "hip", "--cuda-device-only", "-nogpuinc", "-nogpulib", f"--offload-arch={target}"]
    command += ["-std=c++17", "-O3", "-Wall", "-Wextra", "-Werror", "-S"]
    for label, (source, options) in VARIANTS.items():
        out = tmp_path / "kernels.s"
        subprocess.run([*command, *_macros(options), str(sources.FOLDER / source), "-o", str(out)], check=True)
        text = out.read_text()
        spilled = [int(count) for count in re.findall(r"\.vgpr_spill_count:\s*(\d+)", text)]
        shared = [int(size) for size in re.findall(r"\.group_segment_fixed_size:\s*(\d+)", text)]
        assert spilled and not any(spilled), f"{target}, {label}"
        assert max(shared) <= MOST_SHARED, f"{target}, {label}"
        if not label.startswith(("norm", "attention int8", "attention fp8")):
            assert re.search(r"global_load_(dwordx4|b128)", text), f"{target}, {label}"


@pytest.mark.parametrize("target", NVIDIA)
def test_nvidia(target):
    """By the loader that the ROCm backend has for hipRTC."""
    if find_library(CUDA.compilers) is None:
        pytest.skip("NVRTC (the package nvidia-cuda-nvrtc) is not installed")
    compiler = Compiler(CUDA)
    for label, (source, options) in VARIANTS.items():
        code = compiler.compile(source, options, target)
        assert code.startswith(b"\x7fELF"), label
        assert any(name.encode() in code for name in sources.THREADS), label


if shutil.which("nvcc"):  # which no package brings, so that its absence is no skip

    @pytest.mark.slow
    @pytest.mark.parametrize("target", NVIDIA)
    def test_nothing_is_spilled_on_nvidia(target, tmp_path):
        for label in ("attention f16 128", "gemv Q4_K"):
            source, options = VARIANTS[label]
            command = [
                "nvcc",
                "-x",
                "cu",
                "-std=c++17",
                f"-arch={target}",
                "-cubin",
                "-Xptxas",
                "-v",
                *_macros(options),
            ]
            command += [str(sources.FOLDER / source), "-o", str(tmp_path / "kernels.cubin")]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            spilled = re.findall(r"(\d+) bytes spill stores", done.stderr)
            assert spilled and not any(int(count) for count in spilled), label


def test_the_compiler_s_words_are_told():
    if find_library(CUDA.compilers) is None:
        pytest.skip("NVRTC (the package nvidia-cuda-nvrtc) is not installed")
    source, options = VARIANTS["attention f16 128"]
    with pytest.raises(ValueError, match=r"attention.hip does not compile for sm_90: .*undefined"):
        Compiler(CUDA).compile(source, {**options, "ACT": "unknown"}, "sm_90")
