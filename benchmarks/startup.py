"""What a user waits for before the first token: import, help, installation size, native build, a start with the file in the
page cache; what is resident then; and that torch stays out.

usage: startup.py MODEL [--no-build]
Builds a wheel and installs it into a fresh environment (without --no-build), and measures there.
"""

from __future__ import annotations

import argparse
import json
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


def cold_start(python: str, model: str, times: int = 5) -> float:
    """Median seconds from the start of `engine generate` to the first byte of its output, with the file in the page cache."""
    with open(model, "rb") as file:
        while file.read(1 << 24):
            pass
    command = [python, "-m", "engine.cli.main", "generate", model, "Hello", "--max-tokens", "1", "--temperature", "0"]
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            assert process.stdout is not None and process.stdout.read(1), "engine generate gave nothing"
            taken.append(time.perf_counter() - start)
            process.stdout.read()
    return statistics.median(taken)


RESIDENT = """
import json, sys
from engine import LLM, SamplingParams

def resident():
    with open("/proc/self/status") as lines:
        return {n: int(v.split()[0]) * 1024 for n, _, v in (line.partition(":") for line in lines) if "Rss" in n or "RSS" in n}

with LLM(sys.argv[1]) as llm:
    loaded = resident()
    llm.generate("Hello", SamplingParams(max_tokens=64, temperature=0, ignore_eos=True))
    used, memory = resident(), llm.loaded.memory
    kv = 65 * sum(group.bytes_a_token for group in memory.groups)
    print(json.dumps({
        "weights_mb": memory.weights / 1e6,
        "resident_after_load_mb": loaded["VmRSS"] / 1e6,
        "resident_after_load_beside_weights_mb": (loaded["VmRSS"] - memory.weights) / 1e6,
        "mapped_after_load_mb": loaded["RssFile"] / 1e6,
        "resident_after_64_tokens_beside_weights_and_kv_mb": (used["VmRSS"] - memory.weights - kv) / 1e6,
    }))
"""


def resident(python: str, model: str) -> dict[str, float]:
    """MB of memory, of files as well, that a process holds when it has loaded a model, and when it has used it."""
    run = subprocess.run([python, "-c", RESIDENT, model], capture_output=True, text=True, check=True)
    figures: dict[str, float] = json.loads(run.stdout)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--no-build", action="store_true")
    args = parser.parse_args()
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        python = sys.executable
        if not args.no_build:
            os.environ.pop("PYTHONPATH", None)  # or pip would find the package there, and import would take that one
            python, figures["wheel_build_s"], figures["base_install_mb"] = build(Path(folder))
        bare = seconds([python, "-c", "pass"])
        figures["import_engine_s"] = seconds([python, "-c", "import engine"]) - bare
        figures["help_s"] = seconds([python, "-m", "engine.cli.main", "--help"])
        figures["cold_start_s"] = cold_start(python, args.model)
        figures |= resident(python, args.model)
        figures["generate_without_torch"] = torch_free(python, args.model)
    for name, value in figures.items():
        print(f"{name}: {value:.3f}" if isinstance(value, float) else f"{name}: {value}")
    print(write("startup", figures))


if __name__ == "__main__":
    main()
