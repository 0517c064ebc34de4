"""The tables of README.md and docs/ are those of benchmarks/results."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_pages_show_the_newest_results():
    command = [sys.executable, str(ROOT / "benchmarks/tables.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
