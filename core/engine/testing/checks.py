"""Checks of one op's providers: values against the reference, memory around them, and what a claim of invariance means."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from ..backend.optional import packed_bytes_of
from ..backend.v1 import Device, Provider, StepFn, providers_of
from ..ops import OPS, Case, OpSpec
from ..program.features import refusal
from .cases import all_cases, independent_rows, like, row_index, some_rows, spoiled
from .compare import Bound, close, close_q8, exactly, rounded_alike
from .running import Bench, Result


@dataclass(frozen=True)
class Checked:
    """How many cases of an op ran, and of the others why they were refused."""

    ran: int
    refused: Mapping[str, str]


def ops_of(device: Device) -> Iterator[str]:
    """The ops that a device has providers of, in the catalogue's order."""
    offered = providers_of(device)
    return (op for op in OPS if offered.get(op))


def check_op(device: Device, spec: OpSpec, rng: np.random.Generator) -> Checked:
    """Every provider of the op on each case that it takes. AssertionError names the provider, the case and the first
    element that is wrong."""
    ran, refused = 0, {}
    for provider in providers_of(device).get(spec.name, ()):
        for case, other in zip(all_cases(spec, rng), all_cases(spec, rng), strict=True):
            bench = Bench(device, spec, case)
            why = refusal(provider, bench.call) or bench.refusal(provider)
            if why is None:
                check_case(bench, provider, like(case, other), rng)
                ran += 1
            else:
                refused[f"{provider.name}: {case.name}"] = why
    return Checked(ran, refused)


def check_case(bench: Bench, provider: Provider, other: Case | None, rng: np.random.Generator) -> None:
    """The bench's case, then ``other`` with the same bound function, which may keep nothing but its states."""
    fn = bench.bind(provider)
    where = f"{provider.name}, {bench.spec.name}, {bench.case.name}"
    first = bench.run(provider, fn, bench.case)
    _agrees(where, bench, bench.case, first)
    if other is not None:
        again = bench.bind(provider) if bench.case.states else fn  # a session's states stay the same objects
        _agrees(f"{where}, second run", bench, other, bench.run(provider, again, other))
    _packs(where, bench, provider)
    rows = independent_rows(bench.case)
    if rows and provider.batch_invariant:
        _rows_alone(where, bench, provider, first, sorted({rows - 1, rows // 2}))
    if rows:
        _nan_stays(where, bench, provider, fn, int(rng.integers(rows)), rng)


def _agrees(where: str, bench: Bench, case: Case, found: Result) -> None:
    wanted, states = bench.reference(case)
    for n, (got, want) in enumerate(zip(found.outputs, wanted, strict=True)):
        near = close_q8 if want.dtype == np.uint8 else close
        near(f"{where}: output {n}", bench.bound(case, n), got, want)
    tolerance, before = bench.spec.tolerance, bench.states(case)
    for name, want in states.items():
        close(f"{where}: state {name}", Bound(tolerance.absolute, tolerance.relative), found.states[name], want)
        rounded_alike(f"{where}: state {name}", found.states[name], want, before[name])
    assert not found.changed, f"{where}: it wrote to {found.changed[0]}, which it may not."
    if bench.info.writes == "into":
        assert not found.replaced, (
            f"{where}: the device writes into states, but {found.replaced[0]} is another object now."
        )


def _packs(where: str, bench: Bench, provider: Provider) -> None:
    """A packed weight gives the weight back, to within what f16 scales may cost, and takes no more than was told ahead."""
    told = packed_bytes_of(provider)
    for name, packed in bench.packed.get(provider.packer, {}).items():
        want = bench.weights[name].dense()
        got = np.asarray(packed.unpack(), np.float32).reshape(want.shape)
        close(f"{where}: {name} unpacked", Bound(2.0**-10 * float(np.abs(want).max(initial=0)), 0.0), got, want)
        assert told is None or packed.nbytes <= told(bench.weights[name]), (
            f"{where}: {name} takes more than packed_bytes says."
        )


def _rows_alone(where: str, bench: Bench, provider: Provider, whole: Result, rows: list[int]) -> None:
    """Some rows alone give the bits that they give among all, as ``batch_invariant`` says."""
    part = Bench(bench.device, bench.spec, some_rows(bench.case, rows), bench.packed)
    found = part.run(provider, part.bind(provider), part.case)
    for got, among in zip(found.outputs, whole.outputs, strict=True):
        index = row_index(len(among) // independent_rows(bench.case), rows)
        exactly(f"{where}: rows {rows} alone", got, among[index])


def _nan_stays(where: str, bench: Bench, provider: Provider, fn: StepFn, row: int, rng: np.random.Generator) -> None:
    """NaN and infinities of one row reach what they should of it, and nothing of the others."""
    case = spoiled(bench.case, row, rng)
    if case is None:
        return
    wanted = bench.reference(case)[0]
    found, clean = bench.run(provider, fn, case), bench.run(provider, fn, bench.case)
    if wanted[0].dtype == np.uint8:
        close_q8(f"{where}: NaN in row {row}", bench.bound(case, 0), found.outputs[0], wanted[0])
    for got, want, before in zip(found.outputs, wanted, clean.outputs, strict=True):
        own = row_index(len(got) // independent_rows(case), [row])
        exactly(f"{where}: others beside NaN in row {row}", np.delete(got, own, 0), np.delete(before, own, 0))
        if got.dtype == np.float32 and bench.spec.name != "moe_route":
            lost = ~np.isfinite(want.reshape(got.shape)[own]) & np.isfinite(got[own])
            assert not lost.any(), f"{where}: NaN in row {row} is lost; {int(lost.sum())} of its elements are finite."
