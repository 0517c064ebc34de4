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


def engine(model: Path, args: argparse.Namespace, batches: list[int]) -> dict[int, Case]:
    command = [
        sys.executable,
        "-m",
        "engine.cli.main",
        "bench",
        model,
        "--backend",
        "cpu",
        "--json",
        "--repetitions",
        "3",
    ]
    command += [
        "--prompt",
        args.prompt,
        "--decode",
        args.decode,
        "--batch",
        ",".join(map(str, batches)),
        "--depth",
        "0",
    ]
    out = run([*command, "--threads", args.threads])
    cases = json.loads(out)["cases"]
    return {c["batch"]: {"prefill": c["prefill_tok_s"]["median"], "decode": c["decode_tok_s"]["median"]} for c in cases}


def llama(model: Path, args: argparse.Namespace, batches: list[int]) -> dict[int, Case]:
    found: dict[int, Case] = {}
    if 1 in batches:
        command = [args.peer / "bin/llama-bench", "-m", model, "-t", args.threads, "-p", args.prompt, "-n", args.decode]
        rows = json.loads(run([*command, "-r", 3, "-o", "json"], args.peer))
        found[1] = {"prefill": rows[0]["avg_ts"], "decode": rows[1]["avg_ts"]}
    several = [b for b in batches if b > 1]
    if several:
        # The context holds every sequence's prompt; a short prompt keeps the run short, as decode is what is compared.
        short = min(args.prompt, 64)
        size = max(several) * (short + args.decode) + 64
        command = [
            args.peer / "bin/llama-batched-bench",
            "-m",
            model,
            "-t",
            args.threads,
            "-tb",
            args.threads,
            "-c",
            size,
        ]
        command += ["-npp", short, "-ntg", args.decode, "-npl", ",".join(map(str, several)), "--output-format", "jsonl"]
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
