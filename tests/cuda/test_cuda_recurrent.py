"""What layers remember is left in the same bits however a prompt is cut, and whatever runs beside it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

from engine.backend.v1 import BoundCall, Call, Dims, Frame, Limits, Value
from engine.testing.cases import CaseWeight

BLOCK_SIZE, TOKENS, BESIDE = 4, 11, 5
TABLE = [[3, 5, 1], [2, 6, 0]]  # of the sequence, and of one beside it


class Kind(NamedTuple):
    """An op whose result has as many columns as ``width``, with what it takes a token and what it remembers in a block."""

    inputs: dict[str, int]
    weights: dict[str, tuple[int, ...]]
    state: tuple[str, tuple[int, ...]]
    width: int
    attrs: dict[str, int]


CONV = Kind({"x": 208}, {"weight": (208, 4), "bias": (208,)}, ("tail", (3, 208)), 208, {})
DELTA = Kind(
    {"qkv": 2 * 2 * 12 + 4 * 40, "decay": 4, "beta": 4},
    {"rate": (4,), "bias": (4,)},
    ("memory", (4, 12, 40)),
    4 * 40,
    {"key_heads": 2, "value_heads": 4, "key_dim": 12, "value_dim": 40},
)
SCAN = Kind(
    {"xbc": 4 * 40 + 2 * 2 * 12, "dt": 4},
    {"rate": (4,), "bias": (4,), "skip": (4,)},
    ("memory", (4, 12, 40)),
    4 * 40,
    {"heads": 4, "groups": 2, "state_dim": 12, "head_dim": 40},
)
KINDS = {"causal_conv": CONV, "gated_delta": DELTA, "ssm_scan": SCAN}


class Bound:
    """One of the ops with random weights, and a state of which nothing is known."""

    def __init__(self, device, op, rng):
        self.device = device
        kind = KINDS[op]
        places = ("seq_starts", "query_offsets", "page_table")
        dtypes = dict.fromkeys(kind.inputs, "f32") | dict.fromkeys(places, "i32")
        self.inputs = {name: Value(n, name, ("T",), dtype) for n, (name, dtype) in enumerate(dtypes.items())}
        weights = {}
        for name, shape in kind.weights.items():
            values = -np.abs(rng.standard_normal(shape, np.float32))
            weights[name] = CaseWeight(name, ("F32", values.view(np.uint8).reshape(shape[0], -1), shape))
        name, shape = kind.state
        self.output = Value(100, "y", ("T", kind.width), "f32")
        attrs = {"block_size": BLOCK_SIZE, **kind.attrs}
        call = Call(op, self.inputs, (self.output,), weights, {name: name}, attrs)
        [provider] = device.providers()[op]
        packed = {name: provider.pack(ref, (op,), lambda _: None) for name, ref in weights.items()}
        self.run = provider.bind(BoundCall(call, provider, packed), Limits(Dims(T=64), 64, 2))
        self.states = {name: device.copy_in(np.full((7, *shape), np.nan, np.float32))}

    def step(self, given, starts, lengths, table):
        values = {**given, "seq_starts": starts, "query_offsets": np.cumsum([0, *lengths]), "page_table": table}
        arrays = {name: np.asarray(values[name], None if name in given else np.int32) for name in values}
        dims = Dims(T=sum(lengths), S=len(starts), P=len(table[0]))
        frame = Frame(dims, {self.inputs[n].id: self.device.copy_in(a.copy()) for n, a in arrays.items()}, self.states)
        self.run(frame)
        return self.device.copy_out(frame.values[self.output.id])

    def state(self, blocks):
        return [self.device.copy_out(state)[blocks] for state in self.states.values()]


@pytest.mark.parametrize("op", KINDS)
def test_it_is_the_same_however_a_prompt_is_cut(op, device):
    rng = np.random.default_rng()
    seed = int(rng.integers(1 << 30))
    widths = KINDS[op].inputs.items()
    whole = {name: rng.standard_normal((TOKENS + BESIDE, width), np.float32) for name, width in widths}
    own, beside = ({name: a[part] for name, a in whole.items()} for part in (slice(TOKENS), slice(TOKENS, None)))
    alone, together = (Bound(device, op, np.random.default_rng(seed)) for _ in range(2))
    want = alone.step(own, [0], [TOKENS], TABLE[:1])
    got = together.step(whole, [0, 0], [TOKENS, BESIDE], TABLE)
    np.testing.assert_array_equal(got[:TOKENS], want)
    np.testing.assert_array_equal(together.state(TABLE[0]), alone.state(TABLE[0]))
    last = together.state(TABLE[1][:2])
    for cuts in ([1] * TOKENS, [2, 3, 1, 5], [4, 4, 3]):
        cut, done, rows = Bound(device, op, np.random.default_rng(seed)), 0, []
        for length in cuts:
            part = {name: a[done : done + length] for name, a in own.items()}
            rows.append(cut.step(part, [done], [length], TABLE[:1]))
            done += length
        np.testing.assert_array_equal(np.concatenate(rows), want)
        np.testing.assert_array_equal(cut.state(TABLE[0]), alone.state(TABLE[0]))
    aside = Bound(device, op, np.random.default_rng(seed))
    np.testing.assert_array_equal(aside.step(beside, [0], [BESIDE], TABLE[1:]), got[TOKENS:])
    np.testing.assert_array_equal(aside.state(TABLE[1][:2]), last)
