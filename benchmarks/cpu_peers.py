"""The engine beside llama.cpp on the CPU: the same file, the same threads, alternating in one run.

usage: cpu_peers.py PEER_DIR MODEL.gguf [...] [--threads 2] [--rounds 3] [--prompt 512] [--decode 64] [--batch 1,4,8,16,32]
       [--quick]
PEER_DIR is what build_llama_cpp.sh made. Each round runs `engine bench` and then llama-batched-bench (single sequences:
llama-bench) on the same work; a case's ratio is the median of the rounds' ratios. --quick: batch 1 only, 2 rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from result import write

Case = dict[str, float]
SHORT = 64


def by_prompt(args: argparse.Namespace, batches: list[int]) -> list[tuple[list[int], int]]:
    """Batches with their prompt's length: several sequences take a short one, since decode is what they compare."""
    single, several = [b for b in batches if b == 1], [b for b in batches if b > 1]
    return [(group, size) for group, size in ((single, args.prompt), (several, min(args.prompt, SHORT))) if group]


def engine(model: Path, args: argparse.Namespace, batches: list[int]) -> dict[int, Case]:
    found: dict[int, Case] = {}
    for group, prompt in by_prompt(args, batches):
        flags = {"backend": "cpu", "prompt": prompt, "decode": args.decode, "batch": ",".join(map(str, group))}
        flags |= {"depth": 0, "repetitions": 3, "threads": args.threads}
        command = [sys.executable, "-m", "engine.cli.main", "bench", model, "--json"]
        for name, value in flags.items():
            command += [f"--{name}", value]
        for c in json.loads(run(command))["cases"]:
            found[c["batch"]] = {"prefill": c["prefill_tok_s"]["median"], "decode": c["decode_tok_s"]["median"]}
    return found


def llama(model: Path, args: argparse.Namespace, batches: list[int]) -> dict[int, Case]:
    found: dict[int, Case] = {}
    for group, prompt in by_prompt(args, batches):
        common = ["-m", model, "-t", args.threads]
        if group == [1]:
            command = [args.peer / "bin/llama-bench", *common, "-p", prompt, "-n", args.decode, "-r", 3, "-o", "json"]
            rows = json.loads(run(command, args.peer))
            found[1] = {"prefill": rows[0]["avg_ts"], "decode": rows[1]["avg_ts"]}
            continue
        size = max(group) * (prompt + args.decode) + 64
        command = [args.peer / "bin/llama-batched-bench", *common, "-tb", args.threads, "-c", size, "-npp", prompt]
        command += ["-ntg", args.decode, "-npl", ",".join(map(str, group)), "--output-format", "jsonl"]
        for line in run(command, args.peer).splitlines():
            if line.startswith("{"):
                row = json.loads(line)
                found[row["pl"]] = {"prefill": row["speed_pp"], "decode": row["speed_tg"]}
    return found


def run(command: list[Any], peer: Path | None = None) -> str:
    env = dict(os.environ)
    if peer is not None:
        env["LD_LIBRARY_PATH"] = str(peer / "bin")
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False, env=env)
    if done.returncode:
        raise SystemExit(f"{command[0]} failed ({done.returncode}): {done.stderr[-2000:]}")
    return done.stdout


def compare(model: Path, args: argparse.Namespace, batches: list[int]) -> list[dict[str, Any]]:
    rounds = [(engine(model, args, batches), llama(model, args, batches)) for _ in range(args.rounds)]
    cases = []
    for batch in batches:
        case: dict[str, Any] = {"model": model.name, "batch": batch}
        for kind in ("prefill", "decode"):
            ours = [mine[batch][kind] for mine, _ in rounds]
            theirs = [other[batch][kind] for _, other in rounds]
            ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
            case[kind] = {"engine": statistics.median(ours), "llama.cpp": statistics.median(theirs), "ratio": ratio}
        cases.append(case)
        print(json.dumps(case), flush=True)
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", type=Path)
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--decode", type=int, default=64)
    parser.add_argument("--batch", default="1,4,8,16,32")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.batch = 2, "1"
    batches = [int(b) for b in args.batch.split(",")]
    cases = [case for model in args.models for case in compare(model, args, batches)]
    settings = {"threads": args.threads, "rounds": args.rounds, "prompt": args.prompt, "decode": args.decode}
    print(write("cpu-peers", {**settings, "cases": cases}))


if __name__ == "__main__":
    main()
