"""The kernels of each instruction set that this processor has, in turn: what each variant is worth.

usage: cpu_variants.py MODEL... [--threads 2] [--rounds 3] [--repetitions 2] [--name cpu-variants]

Of each model a prompt of 512, and one sequence and 16 that decode, by `engine bench` with ENGINE_CPU_ISA. Ratios are medians
over the rounds, beside the variant avx2 of the same round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from pathlib import Path
from typing import Any

from bars import Case, Work
from result import write
from sides import engine_rates

from engine_cpu import _native

BASE = "avx2"
WORKS = (Work(1, 0, 512, 0), Work(1, 0, 0, 64), Work(16, 0, 0, 32))


def rates(model: Path, variant: str, threads: int, repetitions: int) -> dict[str, float]:
    os.environ["ENGINE_CPU_ISA"] = variant
    found = engine_rates(model, [Case(model.stem, work) for work in WORKS], threads, repetitions)
    return {case.what: rate for case, rate in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--name", default="cpu-variants")
    args = parser.parse_args()
    variants = _native.isa_list()
    cases: list[dict[str, Any]] = []
    for model in args.models:
        rounds = [
            {variant: rates(model, variant, args.threads, args.repetitions) for variant in variants}
            for _ in range(args.rounds)
        ]
        for what in rounds[0][BASE]:
            found = {variant: [each[variant][what] for each in rounds] for variant in variants}
            cases.append(
                {
                    "model": model.stem,
                    "what": what,
                    "rates": {variant: statistics.median(each) for variant, each in found.items()},
                    "ratios": {
                        variant: statistics.median(a / b for a, b in zip(each, found[BASE], strict=True))
                        for variant, each in found.items()
                    },
                }
            )
            print(json.dumps(cases[-1]), flush=True)
    write(args.name, {"threads": args.threads, "rounds": args.rounds, "variants": variants, "cases": cases})


if __name__ == "__main__":
    main()
