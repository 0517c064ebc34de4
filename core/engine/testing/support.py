"""What a backend offers: for each op its providers, features, weight formats and KV dtypes, found by asking."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..backend.v1 import Device, providers_of
from ..ops import OPS
from ..program.features import features_of, refusal
from ..program.group import OPS as EXCHANGES
from .cases import all_cases
from .running import Bench


@dataclass(frozen=True)
class Support:
    """One op on one backend. ``refused``: case -> a sentence."""

    op: str
    providers: tuple[str, ...]
    batch_invariant: bool
    cases: int
    taken: int
    features: tuple[str, ...]
    formats: tuple[str, ...]
    kv_dtypes: tuple[str, ...]
    refused: Mapping[str, str]

    def cell(self) -> str:
        """For a table: empty where the reference does it all."""
        if not self.taken:
            return ""
        return "all" if self.taken == self.cases else f"{self.taken} of {self.cases} cases"


def support_of(device: Device) -> list[Support]:
    """Every op of the catalogue, in its order."""
    return [_support(device, op) for op in OPS]


def _support(device: Device, op: str) -> Support:
    providers = providers_of(device).get(op, ())
    features: set[str] = set()
    formats: set[str] = set()
    dtypes: set[str] = set()
    refused: dict[str, str] = {}
    taken = cases = 0
    for case in all_cases(OPS[op], np.random.default_rng(0)):
        bench = Bench(device, OPS[op], case)
        cases += 1
        reasons = [refusal(p, bench.call) or bench.refusal(p) for p in providers]
        if not any(reason is None for reason in reasons):
            refused[case.name] = next((r for r in reasons if r), "there is no provider.")
            continue
        taken += 1
        features |= features_of(bench.call)
        formats |= {ref.format for name, ref in bench.weights.items() if name.startswith("weight")}
        dtypes |= {case.kv.dtype} if case.kv else set()
    return Support(
        op,
        tuple(p.name for p in providers),
        bool(providers) and all(p.batch_invariant for p in providers),
        cases,
        taken,
        tuple(sorted(features)),
        tuple(sorted(formats)),
        tuple(sorted(dtypes)),
        refused,
    )


def as_json(found: Sequence[Support]) -> list[dict[str, Any]]:
    return [{**vars(s), "refused": dict(s.refused)} for s in found]


def matrix(backends: Mapping[str, Sequence[Support]]) -> str:
    """docs/ops.md: a table of ops by backends, and beneath it what each backend takes of formats, caches and features."""
    names = list(backends)
    lines = [
        "# Ops by backend",
        "",
        "Made by `python -m engine.testing.matrix` from what each backend answers to the cases of the conformance kit. An empty",
        f"cell: the op runs by its reference, on the host. {' and '.join(EXCHANGES)} are done by collectives.",
        "Formats are those of the kit's cases: a backend may take more, and `engine doctor MODEL` says which of a model's",
        "it has no kernel for. cuda and rocm are not here, since what they take depends on a card.",
        "",
        f"| op | {' | '.join(names)} |",
        "|---" * (len(names) + 1) + "|",
    ]
    own = [op for op in OPS if op not in EXCHANGES]
    lines += [f"| {op} | {' | '.join(_of(backends[n], op).cell() for n in names)} |" for op in own]
    for name in names:
        lines += ["", f"## {name}", "", "| op | weight formats | KV dtypes | features |", "|---|---|---|---|"]
        for s in backends[name]:
            if s.taken:
                lines.append(
                    f"| {s.op} | {', '.join(s.formats)} | {', '.join(s.kv_dtypes)} | {', '.join(s.features)} |"
                )
    return "\n".join(lines) + "\n"


def _of(found: Sequence[Support], op: str) -> Support:
    return next(s for s in found if s.op == op)
