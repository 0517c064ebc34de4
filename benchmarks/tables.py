"""Writes the README's tables from benchmarks/results, between their markers.

usage: tables.py [--check]      --check fails when the README is not what the results say
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
SHORT = 64  # as cpu_peers.py has it
RESULTS = ROOT / "benchmarks/results"


def load(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def origin(result: dict[str, Any]) -> str:
    machine = result["machine"]
    return f"{result['date'][:10]}, commit {result['commit']}, {machine['cpu']}, {machine['cores']} cores."


def peers() -> str:
    result = load("cpu-peers")
    lines = [
        "| model | sequences | prompt tok/s: engine | llama.cpp | ratio | decode tok/s: engine | llama.cpp | ratio |"
    ]
    lines.append("|---|---|---|---|---|---|---|---|")
    for case in result["cases"]:
        cells = [case["model"].removesuffix(".gguf"), str(case["batch"])]
        for kind in ("prefill", "decode"):
            row = case[kind]
            cells += [f"{row['engine']:.1f}", f"{row['llama.cpp']:.1f}", f"{row['ratio']:.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    lines.append("")
    lines.append(
        f"{result['threads']} threads; {origin(result)} Decode {result['decode']} tokens; "
        f"prompt {result['prompt']} for one sequence, {SHORT} for several."
    )
    return "\n".join(lines)


def accuracy() -> str:
    result = load("accuracy-f16")
    lines = [
        "| model | prefill: engine | llama.cpp | ratio | decode: engine | llama.cpp | ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    for case in result["cases"]:
        cells = [case["model"].removesuffix(".gguf")]
        for part in ("prefill", "decode"):
            row = case[part]
            cells += [f"{row['engine']:.4f}", f"{row['llama.cpp']:.4f}", f"{row['ratio']:.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", f"RMS error of logits, median of {result['prompts']} prompts; {origin(result)}"]
    return "\n".join(lines)


def startup() -> str:
    result = load("startup")
    rows = [
        ("`import engine`", f"{result['import_engine_s']:.3f} s"),
        ("`engine --help`", f"{result['help_s']:.2f} s"),
        ("base install", f"{result['base_install_mb']:.0f} MB"),
        ("building the wheel", f"{result['wheel_build_s']:.0f} s"),
    ]
    lines = ["| what | figure |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows), "", origin(result)]
    return "\n".join(lines)


TABLES = {"cpu-peers": peers, "accuracy": accuracy, "startup": startup}


def main() -> None:
    path = ROOT / "README.md"
    text = before = path.read_text()
    for name, make in TABLES.items():
        block = f"<!-- table:{name} -->\n{make()}\n<!-- end -->"
        text, count = re.subn(rf"<!-- table:{name} -->.*?<!-- end -->", lambda _, b=block: b, text, flags=re.S)
        if count != 1:
            raise SystemExit(f"README.md has {count} places for the table {name}; it must have one.")
    if "--check" in sys.argv and text != before:
        raise SystemExit("README.md does not show the newest results; run benchmarks/tables.py.")
    path.write_text(text)


if __name__ == "__main__":
    main()
