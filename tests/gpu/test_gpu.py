"""benchmarks/gpu.py, which checks and measures a GPU: whole on one, and on the CPU so that it is known to run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


def _run(*options, **environment):
    """In a process of its own: in this one kernels are interpreted."""
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    path = os.pathsep.join(sys.path)
    run = subprocess.run(
        [sys.executable, str(SCRIPT), *options],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout)


@pytest.mark.slow
def test_it_runs_on_the_cpu(tmp_path):
    found = _run(
        "--sizes", "tiny", TRITON_INTERPRET="1", ENGINE_CUDA_GRAPHS="1", ENGINE_CUDA_GRAPH_SIZES="1,2",
        XDG_DATA_HOME=str(tmp_path),
    )  # fmt: skip
    assert found["ops"]["cases"] > 0 and "interpreter" in found["device"]
    for section in ("attention", "matmul", "weights", "swap", "model"):
        figures = [value for key, value in found[section].items() if isinstance(value, dict) and key != "tuned"]
        assert figures and all(number > 0 for figure in figures for number in figure.values()), section
    assert any("fp8" in name for name in found["attention"]) and "launched again" in found["model"]["graphs"]
    assert {"transformers, 1 x 16", "by transformers, 2 x 16"} <= found["model"].keys()
    tuned, table = found["tune"], found["tune"]["table"]["cuts"]
    assert len(table) == 4 and all(any(what.startswith(name) for what in tuned) for name in table)
    assert {what.partition(":")[0].rpartition(" ")[2] for what in found["model"]["tuned"]} == {"1", "2", "32"}
    assert 0 < found["matmul"]["w8a8"]["of_torch"] < 1 and "of_dense" not in found["matmul"]["w8a8"]
    assert found["bars"] and not any(bar["met"] for bar in found["bars"])


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_every_section_on_a_gpu():
    """That all answers are right; what the bars say is for the reader of the figures."""
    from engine.backend.registry import discover

    backend = next((b.name for b in discover() if b.name in ("cuda", "rocm") and b.probe.available), None)
    if backend is None:
        pytest.skip("no GPU is here")
    found = _run("--backend", backend)
    print(json.dumps(found, indent=1))
