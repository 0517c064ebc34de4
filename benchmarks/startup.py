"""What a user waits for before the first token: import, help, installation size, native build; and that torch stays out.

usage: startup.py MODEL [--no-build]
Builds a wheel and installs it into a fresh environment (without --no-build), and measures there.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from result import write

ROOT = Path(__file__).parent.parent


def seconds(command: list[str], times: int = 7) -> float:
    """Median wall-clock seconds of a command that must succeed."""
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def installed(python: str) -> float:
    """MB of site-packages without pip."""
    query = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    site = Path(subprocess.run([python, "-c", query], capture_output=True, text=True, check=True).stdout.strip())
    files = (p for p in site.rglob("*") if p.is_file() and "pip" not in p.relative_to(site).parts[0])
    return sum(p.stat().st_size for p in files) / 1e6


def build(folder: Path) -> tuple[str, float, float]:
    """A fresh environment with the wheel in it: its python, seconds of the wheel's build, MB of the base install."""
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    python = str(folder / "venv/bin/python")
    start = time.perf_counter()
    wheel = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder), str(ROOT)]
    subprocess.run(wheel, check=True)
    taken = time.perf_counter() - start
    found = next(folder.glob("engine-*.whl"))
    subprocess.run([python, "-m", "pip", "install", "-q", str(found)], check=True)
    return python, taken, installed(python)


def torch_free(python: str, model: str) -> bool:
    """Whether `engine generate` runs to its end without torch among the modules."""
    code = (
        "import sys; sys.argv = ['engine', 'generate', sys.argv[1], 'Once', '--max-tokens', '4', '--temperature', '0']\n"
        "from engine.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "assert 'torch' not in sys.modules"
    )
    return subprocess.run([python, "-c", code, model], capture_output=True, check=False).returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--no-build", action="store_true")
    args = parser.parse_args()
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        python = sys.executable
        if not args.no_build:
            python, figures["wheel_build_s"], figures["base_install_mb"] = build(Path(folder))
        os.environ.pop("PYTHONPATH", None) if not args.no_build else None
        bare = seconds([python, "-c", "pass"])
        figures["import_engine_s"] = seconds([python, "-c", "import engine"]) - bare
        figures["help_s"] = seconds([python, "-m", "engine.cli.main", "--help"])
        figures["generate_without_torch"] = torch_free(python, args.model)
    for name, value in figures.items():
        print(f"{name}: {value:.3f}" if isinstance(value, float) else f"{name}: {value}")
    print(write("startup", figures))


if __name__ == "__main__":
    main()
