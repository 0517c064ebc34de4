"""Plugins are found by entry point, and one that is broken disables itself with a sentence."""

from __future__ import annotations

import subprocess
import sys

import pytest

from engine import LLM, SamplingParams
from engine.backend import registry
from engine.backend.registry import discover, open_device
from engine.errors import BackendError

GROUP = "engine.backends"
GOOD = """
from engine.backend.v1 import API, Manifest, Probe
def probe():
    return Probe(True, "is there", score={score})
def open_(index, options):
    return ("a device", index, dict(options))
manifest = Manifest("{name}", "{api}", probe, open_)
"""


def good(name, api="1.0", score=5):
    return GOOD.format(name=name, api=api, score=score)


def found(name):
    return next(b for b in discover() if b.name == name)


def assert_disabled(name, *words):
    """It is listed as unavailable with one sentence, cannot be opened, and the others still can."""
    backend = found(name)
    assert not backend.probe.available
    assert "\n" not in backend.probe.reason
    for word in words:
        assert word in backend.probe.reason, backend.probe.reason
    with pytest.raises(BackendError, match=f"The backend {name} cannot be used") as caught:
        open_device(name, {})
    assert backend.probe.reason in str(caught.value)
    assert open_device("reference", {}).describe().backend == "reference"
    assert open_device("auto", {}).describe().backend in ("reference", "cpu")


def test_a_further_device_of_one_is_refused():
    assert open_device("reference:0", {}).describe().backend == "reference"
    with pytest.raises(BackendError, match="no device reference:3; reference has one device, which reference or ref"):
        open_device("reference:3", {})
    assert open_device("reference:3", {}, instances=True).describe().backend == "reference"
    assert open_device("reference", {}, index=3).describe().backend == "reference"  # a rank's


def test_the_reference_backend_is_found_like_any_other():
    assert found("reference").probe.available


def test_a_manifest_by_entry_point(install):
    install(GROUP, "shiny", "shiny_plugin:manifest", good("shiny", score=10_000))
    assert discover()[0].name == "shiny"
    assert open_device("auto", {"threads": 3}) == ("a device", 0, {"threads": 3})
    assert open_device("shiny", {}, index=2) == open_device("shiny:2", {}) == ("a device", 2, {})
    assert open_device("shiny:1", {}, index=2) == ("a device", 3, {})
    for wrong in ("shiny:", "shiny:x", "shiny:-1", "shiny:1:1"):
        with pytest.raises(BackendError, match="is no number of a device of shiny"):
            open_device(wrong, {})


def test_a_hook_in_place_of_a_manifest(install):
    source = (
        good("hooked")
        + """
import pluggy
@pluggy.HookimplMarker("engine")
def engine_backend_manifest():
    return made
made = manifest
del manifest
"""
    )
    install(GROUP, "hooked", "hooked_plugin", source)
    assert open_device("hooked", {})[0] == "a device"


def test_the_best_score_wins_and_the_environment_overrides(install, monkeypatch):
    install(GROUP, "better", "better_plugin:manifest", good("better", score=5000).replace("a device", "better"))
    install(GROUP, "worse", "worse_plugin:manifest", good("worse", score=4000).replace("a device", "worse"))
    assert open_device("auto", {})[0] == "better"
    monkeypatch.setenv("ENGINE_BACKEND", "worse")
    assert open_device("auto", {})[0] == "worse"
    assert open_device("better", {})[0] == "better"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import a_module_that_is_not_there", ["ModuleNotFoundError", "a_module_that_is_not_there"]),
        ("raise SystemExit(3)", ["SystemExit", "3"]),
        ("this is no Python", ["SyntaxError"]),
        ("raise RuntimeError('two\\nlines')", ["RuntimeError: two lines"]),
        ("", ["manifest"]),
        ("manifest = 7", ["Manifest"]),
        ("class manifest: pass", ["Manifest"]),
        (good("broken", api="2.0"), ["API 2.0", "1."]),
        (good("broken", api="1.99"), ["API 1.99"]),
        (good("broken", api="0.9"), ["API 0.9"]),
        (good("broken", api="one"), ["API one"]),
        (
            good("broken").replace("return Probe", "raise OSError('no driver')\n    return Probe"),
            ["OSError: no driver"],
        ),
        (good("broken").replace("return Probe", "raise SystemExit('bye')\n    return Probe"), ["SystemExit: bye"]),
        (good("broken").replace('True, "is there"', 'False, "There is no such card."'), ["There is no such card."]),
        (good("broken").replace('Probe(True, "is there", score=5)', "None"), ["probe"]),
        (good("broken", score=None), ["the score None"]),
        (good("broken", score="'high'"), ["the score 'high'"]),
        (good("broken", score="float('nan')"), ["the score nan"]),
        (good("broken").replace('"1.0"', "1.0"), ["the API 1.0; it must be a text"]),
    ],
)
def test_a_broken_plugin_disables_itself(install, source, words):
    install(GROUP, "broken", "broken_plugin:manifest", source)
    assert_disabled("broken", *words)


def test_of_two_plugins_of_one_name_the_first_is_used_and_the_other_told(install):
    for module in ("twin_one", "twin_two"):
        install(GROUP, "twin", f"{module}:manifest", good("twin").replace("a device", module))
    used, other = (backend for backend in discover() if backend.name == "twin")
    [kept] = {"twin_one", "twin_two"} & {open_device("twin", {})[0]}
    assert used.probe.available and not other.probe.available
    assert f"that of twin-{kept.replace('_', '-')} ({kept}:manifest) is used" in other.probe.reason


def test_no_plugin_takes_the_place_of_a_backend_of_the_engine(install):
    install(GROUP, "reference", "usurper:manifest", good("reference", score=10_000))
    assert open_device("reference", {}).describe().backend == "reference"
    assert [b.probe.available for b in discover("reference")] == [True, False]


def test_a_broken_plugin_does_not_keep_the_engine_from_running(install, llama):
    install(GROUP, "broken", "broken_plugin:manifest", "raise SystemExit(3)")
    with LLM(llama, backend="reference") as llm:
        assert len(llm.generate("Once", SamplingParams(max_tokens=2))[0].outputs[0].token_ids) == 2


def test_an_unknown_name_lists_what_there_is():
    with pytest.raises(BackendError, match=r"There is no backend 'cuba'; installed are: .*reference"):
        open_device("cuba", {})


@pytest.mark.parametrize(
    ("instead", "said"),
    [
        ('raise RuntimeError("out of memory")', "out of memory"),
        ('raise SystemExit("no licence")', "no licence"),
        ("return None", "its open gave None and not a Device"),
    ],
)
def test_a_device_that_fails_to_open(install, instead, said):
    source = good("shut").replace('return ("a device"', f'{instead}\n    return ("a device"')
    install(GROUP, "shut", "shut_plugin:manifest", source)
    with pytest.raises(BackendError, match=f"shut.*{said}"):
        open_device("shut", {})


def test_a_plugin_of_this_api_runs_on_the_next_minor(install, llama, monkeypatch):
    """What version 1.0 promises to its plugins."""
    assert registry.API != "1.0"
    manifest = "import toy_backend, dataclasses\nmanifest = dataclasses.replace(toy_backend.manifest, api='1.0')"
    install(GROUP, "toy", "old_toy:manifest", manifest)
    with LLM(llama, backend="toy", max_num_seqs=2) as llm:
        on_next = llm.generate("Once upon", SamplingParams(max_tokens=8, temperature=0.0))[0].outputs
    with LLM(llama, backend="reference", max_num_seqs=2) as llm:
        assert on_next == llm.generate("Once upon", SamplingParams(max_tokens=8, temperature=0.0))[0].outputs


def test_a_plugin_of_the_next_minor_is_refused(install, monkeypatch):
    install(GROUP, "ahead", "ahead_plugin:manifest", good("ahead", api="1.99"))
    assert_disabled("ahead", "API 1.99", registry.API)
    monkeypatch.setattr(registry, "API", "1.99")
    assert open_device("ahead", {})[0] == "a device"


def test_probing_imports_nothing_heavy():
    """Importing the registry and probing what is installed loads neither frameworks nor the catalogue."""
    code = (
        "import sys; from engine.backend.registry import discover; discover();"
        "heavy = 'torch', 'transformers', 'jax', 'gguf', 'engine.ops', 'engine.models', 'engine.runtime';"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_no_probe_of_what_is_installed_loads_a_library():
    """Every start asks each backend, so that one that loads its driver takes the others' time and memory."""
    heavy = {"torch", "jax", "mlx", "pyopencl", "triton", "engine_cpu._native"}
    code = f"import sys; from engine.backend.registry import discover; discover(); print({heavy!r} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_a_named_backend_is_loaded_alone():
    code = (
        "import sys; from engine.backend.registry import open_device; open_device('reference', {});"
        "print({'engine_cpu', 'engine_opencl', 'engine_jax', 'engine_metal', 'engine_cuda', 'engine_rocm'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
