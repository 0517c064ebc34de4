"""Results as JSON under benchmarks/results: each with the date, the machine and the commit."""

from __future__ import annotations

import json
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results"


def _commit() -> str:
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=HERE, capture_output=True, text=True, check=False).stdout.strip()

    # What an earlier run has written changes no figure.
    changed = git("status", "--porcelain", "-uno", "--", ":(top)", ":(top,exclude)benchmarks/results")
    return git("rev-parse", "--short", "HEAD") + ("+changes" if changed else "")


COMMIT = _commit()  # as the run begins: what it runs has been read by then, and may have changed since


def machine() -> dict[str, Any]:
    """What a figure depends on."""
    from engine.cli.machine import describe_machine

    return dict(describe_machine())


def write(name: str, figures: dict[str, Any]) -> Path:
    """Store a result; the newest of a name is what the README's tables show."""
    record = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine() | {"python": platform.python_version()},
        "commit": COMMIT,
        **figures,
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path
