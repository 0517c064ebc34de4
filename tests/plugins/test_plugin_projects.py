"""Backends of others: installed by pip as they stand, found beside the engine, and harmless where they do not fit."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from engine.cli.plugin import write_project
from engine.errors import UsageError

ROOT = Path(__file__).parents[2]
IN_TREE = sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))
# Packages that every backend may count on, since the engine itself needs them.
SHARED = {"engine", "numpy"}
DISCOVER = """
import json, sys

class Without:
    "A finder that some modules are hidden from."
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, *rest):
        return None if name.partition(".")[0] in sys.argv[2:] else self.finder.find_spec(name, *rest)
    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = map(Without, sys.meta_path)
from engine.backend import registry
registry.API = sys.argv[1] or registry.API
found = registry.discover()
print(json.dumps({b.name: [b.probe.available, b.probe.reason] for b in found}))
"""


def installed(project: Path, folder: Path) -> Path:
    """The project in a folder of its own, installed by pip without the index and without what it depends on."""
    copy = folder / "source" / project.name
    shutil.copytree(project, copy, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    site = folder / "site"
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-build-isolation"]
    done = subprocess.run([*command, "--target", site, copy], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return site


def run(site: Path, *command: object) -> subprocess.CompletedProcess[str]:
    """Python with the plugin's folder beside the engine."""
    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, check=False)


def discovered(site: Path, api: str = "", missing: tuple[str, ...] = ()) -> dict[str, tuple[bool, str]]:
    """What an engine of this API finds where some modules are not installed."""
    done = run(site, "-c", DISCOVER, api, *missing)
    assert done.returncode == 0, done.stderr
    return {name: (ok, reason) for name, (ok, reason) in json.loads(done.stdout.splitlines()[-1]).items()}


def assert_disabled(found: dict[str, tuple[bool, str]], name: str) -> None:
    """One sentence says why, and the engine's own backends go on."""
    available, reason = found[name]
    assert not available and reason.strip() and "\n" not in reason, reason
    assert found["reference"][0] or "API" in found["reference"][1]


@pytest.fixture
def starter(tmp_path):
    write_project("shiny", tmp_path / "engine-shiny")
    return tmp_path / "engine-shiny"


def backend_of(project: Path) -> tuple[str, tuple[str, ...]]:
    """A project's backend and the modules, besides those of the engine, that it depends on."""
    about = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    [name] = about["entry-points"]["engine.backends"]
    needed = (re.split(r"[^\w-]", text)[0].replace("-", "_") for text in about["dependencies"])
    return name, tuple(package for package in needed if package not in SHARED)


def test_the_starter_is_installed_found_and_passes_the_kit_at_once(starter, tmp_path):
    site = installed(starter, tmp_path)
    assert discovered(site)["shiny"] == (True, "host memory in the place of a device")
    own = run(site, *kit(), str(starter / "tests"))
    assert own.returncode == 0 and "2 passed" in own.stdout, own.stdout + own.stderr
    done = run(site, *kit(), f"--rootdir={starter}", "--engine-backend", "shiny", "-k", "device or ops or llama")
    assert done.returncode == 0 and "failed" not in done.stdout, done.stdout + done.stderr


def kit() -> list[str]:
    """Python's arguments for pytest with the kit."""
    from importlib.metadata import entry_points

    known = {point.name for point in entry_points(group="pytest11")}
    plugin = [] if "engine-conformance" in known else ["-p", "engine.testing.plugin"]
    return ["-m", "pytest", "-q", "-p", "no:cacheprovider", *plugin]


def test_a_plugin_disables_itself_where_it_does_not_fit(starter, tmp_path):
    """Its driver is not there, or it breaks, or it was made for a newer engine or another major version."""
    module = starter / "engine_shiny" / "__init__.py"
    good = module.read_text()
    for n, (old, new, said) in enumerate(
        (
            ("return Probe(True", "import shinydriver\n    return Probe(True", "No module named 'shinydriver'"),
            ("def probe", "import shinydriver\n\n\ndef probe", "No module named 'shinydriver'"),
            ("return Probe(True, ", "return Probe(False, 'No shiny device is there.' or ", "No shiny device is there."),
            (
                "return Probe(True",
                "raise OSError('driver 3\\n is too old')\n    return Probe(True",
                "driver 3 is too old",
            ),
            ('"1.0"', '"1.999"', "was made for API 1.999, this engine has"),
            ('"1.0"', '"2.0"', "was made for API 2.0, this engine has"),
        )
    ):
        assert old in good
        module.write_text(good.replace(old, new, 1))
        found = discovered(installed(starter, tmp_path / str(n)))
        assert_disabled(found, "shiny")
        assert said in found["shiny"][1] and found["reference"][0]


def test_a_plugin_of_an_older_minor_version_runs_on_a_newer_engine(starter, tmp_path):
    site = installed(starter, tmp_path)
    assert '"1.0"' in (site / "engine_shiny" / "__init__.py").read_text()
    for api in ("1.0", "1.1", "1.7"):
        assert discovered(site, api)["shiny"][0]
    assert_disabled(discovered(site, "2.0"), "shiny")


def test_each_plugin_of_this_tree_is_found_once_installed(starter, tmp_path):
    """Available or not, it says why in a sentence, and where it is, it passes the kit; without its driver's package it is
    not."""
    for project in (starter, *IN_TREE):
        name, needed = backend_of(project)
        site = installed(project, tmp_path / project.name)
        available, reason = discovered(site)[name]
        assert reason.strip() and "\n" not in reason
        if available:  # with all that its kernels need
            done = run(site, *kit(), f"--rootdir={project}", "--engine-backend", name, "-k", "device or rms_norm")
            assert done.returncode == 0 and "passed" in done.stdout, done.stdout + done.stderr
        for api in ("0.9", "2.0"):
            assert_disabled(discovered(site, api), name)
        if needed:
            assert_disabled(discovered(site, missing=needed), name)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Shiny", "cannot be called"),
        ("1st", "cannot be called"),
        ("a-b", "cannot be called"),
        ("", "cannot be called"),
        ("reference", "There is a backend reference already"),
        ("auto", "There is a backend auto already"),
    ],
)
def test_names_that_will_not_do(name, said, tmp_path):
    with pytest.raises(UsageError, match=said):
        write_project(name, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("there", [False, True])
def test_what_could_not_be_written_whole_is_not_there(tmp_path, there):
    """A limit of the operating system on the size of files stands for the disk."""
    folder = tmp_path / "engine-shiny"
    if there:
        folder.mkdir()
    code = (
        "import resource, sys; from pathlib import Path; from engine.cli.plugin import write_project\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (700, -1))\n"
        "try: write_project('shiny', Path(sys.argv[1]))\n"
        "except Exception as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, check=False)
    assert "cannot be written: File too large." in done.stdout, done
    assert folder.exists() == there and not (there and list(folder.iterdir()))


def test_nothing_is_written_over(starter):
    before = (starter / "README.md").read_text()
    with pytest.raises(UsageError, match="is there already, and is no empty folder"):
        write_project("other", starter)
    assert (starter / "README.md").read_text() == before and not (starter / "engine_other").exists()
