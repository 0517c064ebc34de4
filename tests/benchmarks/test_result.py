"""A result names the commit that it was measured at, and whether code was changed since."""

from __future__ import annotations

import json
import subprocess

import pytest
import result


@pytest.mark.parametrize("folder", [".", "benchmarks"])
def test_a_commit_is_changed_where_code_is(tmp_path, monkeypatch, folder):
    def git(*words: str) -> None:
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b.c", *words], cwd=tmp_path, check=True)

    code, kept = tmp_path / "core.py", tmp_path / "benchmarks/results"
    kept.mkdir(parents=True)
    code.write_text("a = 1\n")
    (kept / "one.json").write_text("{}\n")
    git("init", "-q")
    git("add", "-A")
    git("commit", "-qm", "All")
    monkeypatch.setattr(result, "RESULTS", kept)
    monkeypatch.chdir(tmp_path / folder)
    (kept / "one.json").write_text("[]\n")
    assert "+changes" not in json.loads(result.write("two", {}).read_text())["commit"]
    code.write_text("a = 2\n")
    assert json.loads(result.write("two", {}).read_text())["commit"].endswith("+changes")
