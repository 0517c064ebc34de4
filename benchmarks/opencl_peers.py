"""The OpenCL backend on a driver for processors beside llama.cpp on the processor: the same file, the same threads, in turn in
one run, with the machine's limits measured between.

usage: opencl_peers.py PEER_DIR MODEL_DIR [--threads 2] [--rounds 3] [--repetitions 1]
PEER_DIR is what build_llama_cpp.sh made, MODEL_DIR holds qwen3-0.6b-q4_0.gguf (see cpu_peers.py). Needs the plugin
(pip install ./plugins/opencl) and an OpenCL driver such as PoCL. Five minutes; writes results/opencl-peers.json, and ends
with 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from bars import LLAMA, Bar, Case, Job, Work
from cpu_peers import Limits, Run
from result import write
from sides import LlamaCpp, engine_rates
from tables import bars_table

MODEL = "qwen3-0.6b-q4_0"
CASES = (Case(MODEL, Work(1, 0, 0, 64), (Bar(LLAMA, 0.3),)), Case(MODEL, Work(1, 0, 512, 0)))
JOB = Job(f"{MODEL} on OpenCL", CASES)


class OpenCLRun(Run):
    """The comparison of the CPU with another backend on our side."""

    def _engine(self, path: Path, cases: Sequence[Case]) -> dict[Case, float]:
        return engine_rates(path, cases, self.args.threads, self.args.repetitions, backend="opencl")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", type=Path)
    parser.add_argument("models", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repetitions", type=int, default=1)
    args = parser.parse_args()
    run = OpenCLRun(args, Limits(args.threads), LlamaCpp(args.peer, args.threads, args.repetitions), None)
    run.job(JOB)
    found = {"threads": args.threads, "rounds": args.rounds, "repetitions": args.repetitions}
    found |= {"limits": run.limits.median(), "cases": run.cases, "skipped": run.skipped}
    path = write("opencl-peers", found)
    print(bars_table(found))
    print(path)
    if run.skipped or any(bar["met"] is False for case in run.cases for bar in case["bars"]):
        sys.exit(1)


if __name__ == "__main__":
    main()
