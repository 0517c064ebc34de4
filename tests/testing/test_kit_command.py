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


PICKY = """
from engine.backend.v1 import Manifest, Probe
from engine_reference import ReferenceDevice

def open_device(index, options):
    if options.get("lanes") != 4:
        raise ValueError("It must be told of 4 lanes.")
    return ReferenceDevice()

manifest = Manifest("picky", "1.0", lambda: Probe(True, "It is picky."), open_device)
"""


def test_options_of_the_device_are_those_of_whole_programs_too(tmp_path, install):
    install("engine.backends", "picky", "picky_backend:manifest", PICKY)
    done = kit(tmp_path, "--engine-backend", "picky", "--engine-option", "lanes=4", "-k", "llama and reference")
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("option", ["lanes", "lanes=four", "=4"])
def test_an_option_that_cannot_be_read_is_told(tmp_path, option):
    done = kit(tmp_path, "--engine-backend", "reference", "--engine-option", option, "-k", "fence")
    said = done.stdout + done.stderr
    assert done.returncode == pytest.ExitCode.USAGE_ERROR, said
    assert f"--engine-option: {option!r} must be KEY=JSON" in said and "Traceback" not in said, said
