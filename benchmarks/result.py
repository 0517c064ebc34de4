"""Results as JSON under benchmarks/results: each with the date, the machine and the commit."""

from __future__ import annotations

import json
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """What a figure depends on."""
    from engine.cli.machine import describe_machine

    return dict(describe_machine())


def write(name: str, figures: dict[str, Any]) -> Path:
    """Store a result; the newest of a name is what the README's tables show."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    code = ("--", ":(top)", ":(top,exclude)benchmarks/results")  # what an earlier run has written changes no figure
    dirty = subprocess.run(
        ["git", "status", "--porcelain", "-uno", *code], capture_output=True, text=True, check=False
    ).stdout.strip()
    record = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine() | {"python": platform.python_version()},
        "commit": commit + ("+changes" if dirty else ""),
        **figures,
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path
