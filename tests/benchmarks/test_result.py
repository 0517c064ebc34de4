"""A result names the commit that it was measured at, and whether code had been changed since when its run began."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
from pathlib import Path

import pytest
import result


@pytest.fixture
def project(tmp_path):
    """A repository with a script of results, one result and a file of code."""
    (tmp_path / "benchmarks/results").mkdir(parents=True)
    shutil.copy(result.__file__, tmp_path / "benchmarks/result.py")
    (tmp_path / "benchmarks/results/one.json").write_text("{}\n")
    (tmp_path / "core.py").write_text("a = 1\n")
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "All"]):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b.c", *words], cwd=tmp_path, check=True)
    return tmp_path


def begun(project: Path):
    """The script as a run that begins now has it."""
    spec = importlib.util.spec_from_file_location("result_of_a_run", project / "benchmarks/result.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def written(run) -> str:
    return json.loads(run.write("two", {}).read_text())["commit"]


def test_a_commit_is_changed_where_code_is(project):
    (project / "benchmarks/results/one.json").write_text("[]\n")
    commit = written(begun(project))
    assert commit and "+changes" not in commit
    (project / "core.py").write_text("a = 2\n")
    assert written(begun(project)) == commit + "+changes"


def test_what_changes_while_a_run_goes_on_is_not_what_it_measured(project):
    run = begun(project)
    (project / "core.py").write_text("a = 2\n")
    assert "+changes" not in written(run)
