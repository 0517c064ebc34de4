"""Recurrent layers give the same bits however a prompt is cut into steps, and whatever runs beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from ..backend.v1 import Array, Device, Dims, Frame, Provider, providers_of
from ..ops import Case, OpSpec
from .compare import exactly
from .running import Bench

LENGTHS, BLOCK_SIZE, BLOCKS = (11, 5), 4, 7
TABLE = ([3, 5, 1], [2, 6, 0])
"""Of a sequence, and of one beside it."""
Step = Sequence[tuple[int, int, int]]
"""Of each sequence that takes part: its number, how many of its tokens come before, and how many run."""
WHOLE: Step = [(0, 0, 11), (1, 0, 5)]
WAYS: Mapping[str, Sequence[Step]] = {
    "alone": [[(0, 0, 11)]],
    "the one beside alone": [[(1, 0, 5)]],
    "in steps of 5, 1 and 5": [[(0, 0, 5)], [(0, 5, 1)], [(0, 6, 5)]],
    "token by token": [*([(0, n, 1), (1, n, 1)] for n in range(5)), *([(0, n, 1)] for n in range(5, 11))],
}
_PLACE = ("seq_starts", "query_offsets", "page_table")


def check_cuts(device: Device, spec: OpSpec, rng: np.random.Generator) -> int:
    """Every provider of the op, with the weights of its cases of small blocks; how often that was tried. AssertionError names
    the provider, the case, the way and the first element that differs."""
    cases = [case for case in spec.cases(rng) if case.attrs["block_size"] == BLOCK_SIZE] if spec.cases else []
    tried = [(provider, case) for provider in providers_of(device).get(spec.name, ()) for case in cases]
    for provider, case in tried:
        _check(device, spec, provider, case, rng)
    return len(tried)


def _check(device: Device, spec: OpSpec, provider: Provider, case: Case, rng: np.random.Generator) -> None:
    rows = {
        name: rng.standard_normal((sum(LENGTHS), array.shape[1]), np.float32)
        for name, array in case.inputs.items()
        if name not in _PLACE
    }
    bench = Bench(device, spec, _case(case, rows, WHOLE))
    [whole], states = _run(bench, provider, [WHOLE], rows)
    for how, steps in WAYS.items():
        where = f"{provider.name}, {spec.name}, {case.name}: {how}"
        outputs, left = _run(bench, provider, steps, rows)
        tokens = [token for step in steps for token in _tokens(step)]
        exactly(where, np.concatenate(outputs), whole[tokens])
        sequences = {seq for step in steps for seq, _, _ in step}
        used = [block for seq in sequences for block in TABLE[seq][: -(-LENGTHS[seq] // BLOCK_SIZE)]]
        for name, state in states.items():
            exactly(f"{where}: state {name}", left[name][used], state[used])


def _tokens(step: Step) -> list[int]:
    """The rows of a step's tokens."""
    return [sum(LENGTHS[:seq]) + start + n for seq, start, length in step for n in range(length)]


def _case(case: Case, rows: Mapping[str, Array], step: Step) -> Case:
    """The case with a step's rows, and states of which nothing is known."""
    inputs = {name: array[_tokens(step)] for name, array in rows.items()}
    seqs, starts, lengths = zip(*step, strict=True)
    place = (starts, np.cumsum([0, *lengths]), [TABLE[seq] for seq in seqs])
    inputs |= {name: np.array(array, np.int32) for name, array in zip(_PLACE, place, strict=True)}
    states = {name: np.full((BLOCKS, *a.shape[1:]), np.nan, np.float32) for name, a in case.states.items()}
    return replace(case, dims=Dims(T=sum(lengths), S=len(seqs), P=len(TABLE[0])), inputs=inputs, states=states)


def _run(
    bench: Bench, provider: Provider, steps: Sequence[Step], rows: Mapping[str, Array]
) -> tuple[list[Array], Mapping[str, Array]]:
    """What steps give one after the other, and the states after the last."""
    device, fn, outputs = bench.device, bench.bind(provider), []
    states = {name: device.copy_in(array.copy()) for name, array in bench.case.states.items()}
    for step in steps:
        case = _case(bench.case, rows, step)
        with bench.loaded(provider, case) as given:
            frame = Frame(case.dims, given.values, states)
            fn(frame)
            device.fence()
            outputs += [np.array(device.copy_out(frame.values[value.id])) for value in bench.call.outputs]
    left = {name: np.array(device.copy_out(state)) for name, state in states.items()}
    for state in states.values():
        device.free(state)
    return outputs, left
