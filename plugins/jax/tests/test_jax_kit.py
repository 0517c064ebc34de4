"""The engine's conformance kit, as an author runs it."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points

import pytest

HALF = ["--engine-option", 'dtype="bf16"', "-k", "linear or norm or rope or gated_act or kv_write or embed"]


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("options", [[], HALF], ids=["f32", "bf16"])
def test_the_kit_passes(options, tmp_path):
    plugin = (
        [] if "engine-conformance" in {e.name for e in entry_points(group="pytest11")} else ["engine.testing.plugin"]
    )
    command = [sys.executable, "-m", "pytest", "-q", *(f"-p{name}" for name in ("no:cacheprovider", *plugin))]
    command += [f"--rootdir={tmp_path}", "--engine-backend", "jax", *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "failed" not in done.stdout, done.stdout + done.stderr
