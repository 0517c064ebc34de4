"""The kit as an outsider runs it: pytest with a backend's name, in a folder of their own."""

import os
import subprocess
import sys

import pytest


def kit(folder, *args):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *args]
    # Loaded by its entry point where the distribution is installed; named here for a source tree.
    if "engine-conformance" not in _plugins():
        command += ["-p", "engine.testing.plugin"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=dict(os.environ))


def _plugins():
    from importlib.metadata import entry_points

    return {point.name for point in entry_points(group="pytest11")}


def test_a_backend_without_providers_passes(tmp_path):
    done = kit(tmp_path, "--engine-backend", "reference", "-k", "device or llama")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "seed" in done.stdout or "passed" in done.stdout


def test_support_writes_its_table(tmp_path, cpu):
    done = kit(tmp_path, "--engine-backend", "cpu", "--mode", "support", "--engine-matrix", "ops.json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"op": "attention"' in (tmp_path / "ops.json").read_text()


def test_fuzzing_goes_on_for_as_long_as_it_is_told(tmp_path, cpu):
    done = kit(tmp_path, "--engine-backend", "cpu", "--mode", "fuzz", "--engine-seconds", "2")
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_unknown_backend_is_a_sentence(tmp_path):
    done = kit(tmp_path, "--engine-backend", "nobody")
    assert done.returncode != 0
    assert "There is no backend 'nobody'" in done.stdout + done.stderr


@pytest.mark.parametrize("mode", ["test", "support"])
def test_without_a_backend_the_plugin_is_silent(tmp_path, mode):
    (tmp_path / "test_one.py").write_text("def test_one():\n    assert True\n")
    done = kit(tmp_path, "--mode", mode)
    assert done.returncode == 0 and "1 passed" in done.stdout


def test_collectives_by_name(tmp_path):
    pytest.importorskip("torch")
    done = kit(tmp_path, "--engine-collectives", "gloo", "-k", "values")
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr
    done = kit(tmp_path, "--engine-collectives", "nobody", "-k", "values")
    said = done.stdout + done.stderr
    assert done.returncode == pytest.ExitCode.USAGE_ERROR and "There are no collectives 'nobody'" in said, said
    assert "AssertionError" not in said


def test_a_device_without_collectives_is_passed_over(tmp_path):
    done = kit(tmp_path, "--engine-backend", "reference", "-k", "collectives")
    assert done.returncode == 0 and "4 skipped" in done.stdout
