"""Whether `engine bench` tells the truth, and what a batch gains: its rates against the wall clock of LLM.generate.

usage: bench_check.py MODEL [--prompt 64] [--decode 32] [--batch 1,8] [--threads 2] [--rounds 3]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from typing import Any

import numpy as np
from result import write

from engine import LLM, SamplingParams


def bench(args: argparse.Namespace) -> dict[int, dict[str, float]]:
    """Batch -> rates as `engine bench` gives them."""
    command = [sys.executable, "-m", "engine.cli.main", "bench", args.model, "--depth", "0", "--json"]
    for name in ("prompt", "decode", "batch", "threads"):
        command += [f"--{name}", str(getattr(args, name))]
    cases = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)["cases"]
    kinds = ("prefill", "decode")
    return {case["batch"]: {kind: case[f"{kind}_tok_s"]["median"] for kind in kinds} for case in cases}


def wall_clock(llm: LLM, args: argparse.Namespace, batch: int) -> float:
    """Median seconds of generate for ``batch`` fresh random prompts."""
    rng = np.random.default_rng()
    params = SamplingParams(max_tokens=args.decode, temperature=0, ignore_eos=True)
    taken = []
    for _ in range(args.rounds):
        prompts = [rng.integers(100, llm.loaded.program.vocab - 1, args.prompt).tolist() for _ in range(batch)]
        start = time.perf_counter()
        llm.generate(prompts, params)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--decode", type=int, default=32)
    parser.add_argument("--batch", default="1,8")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    rates = bench(args)
    cases: list[dict[str, Any]] = []
    with LLM(args.model, threads=args.threads) as llm:
        for batch, rate in rates.items():
            told = batch * args.prompt / rate["prefill"] + batch * (args.decode - 1) / rate["decode"]
            clock = wall_clock(llm, args, batch)
            cases.append({"batch": batch, **rate, "told_s": told, "clock_s": clock, "told/clock": told / clock})
            print(json.dumps(cases[-1]), flush=True)
    first = cases[0]["decode"]
    gains = {str(case["batch"]): case["decode"] / first for case in cases}
    settings = {"model": args.model.rsplit("/", 1)[-1], "prompt": args.prompt, "decode": args.decode}
    print(write("bench-check", {**settings, "threads": args.threads, "cases": cases, "decode_gain": gains}))


if __name__ == "__main__":
    main()
