"""The kit finds what is wrong with collectives; those planted here are of ranks in threads."""

from __future__ import annotations

import numpy as np
import pytest

from engine.testing.collectives import CHECKS, Subject

PLANTED = """
import threading

import numpy as np

import thread_group
from engine.backend.v1 import API, CollectivesManifest, Probe
from thread_group import ThreadCollectives, _sum


class Planted(ThreadCollectives):
    {body}


manifest = CollectivesManifest("planted", API, lambda: Probe(True, "planted", score=-1), Planted)
"""
# What is wrong -> the check that finds it, what it says, and the method.
BUGS = {
    "nothing": (None, "", "pass"),
    "a rank is left out of the sum": (
        "values",
        "all_reduce of .* sums are wrong",
        "def all_reduce(self, value): return _sum(self._exchange('all_reduce', value)[1:])",
    ),
    "bf16 is added as integers": (
        "values",
        "all_reduce of bf16 .* sums are wrong",
        "def all_reduce(self, value): return np.sum(self._exchange('all_reduce', value), axis=0, dtype=value.dtype)",
    ),
    "f32 is added in f16": (
        "values",
        "all_reduce of f32 .* sums are wrong",
        "def all_reduce(self, value):"
        " return _sum([v.astype(np.float16) for v in self._exchange('all_reduce', value)]).astype(value.dtype)",
    ),
    "ranks are gathered backwards": (
        "values",
        "all_gather of .* values differ",
        "def all_gather(self, value, axis=0): return np.concatenate(self._exchange('all_gather', value, axis)[::-1], axis)",
    ),
    "the axis is not heeded": (
        "values",
        "all_gather of .* the shape is",
        "def all_gather(self, value, axis=0): return np.concatenate(self._exchange('all_gather', value, axis))",
    ),
    "parts of another rank": (
        "values",
        "reduce_scatter of .* sums are wrong",
        "def reduce_scatter(self, value):"
        " return _sum([np.split(v, self.size)[self.rank - 1] for v in self._exchange('reduce_scatter', value)])",
    ),
    "nothing is exchanged": (
        "values",
        "all_to_all of .* values differ",
        "def all_to_all(self, value): self._exchange('all_to_all', value); return value.copy()",
    ),
    "the argument is changed": (
        "values",
        "all_reduce has changed its argument",
        "def all_reduce(self, value): value[...] = ThreadCollectives.all_reduce(self, value); return value.copy()",
    ),
    "each rank begins with itself": (
        "order",
        "all_reduce in fixed order, on all ranks: values differ",
        "def all_reduce(self, value):"
        " given = self._exchange('all_reduce', value); return _sum(given[self.rank:] + given[:self.rank])",
    ),
    "the order depends on the place": (
        "order",
        "all_reduce in fixed order, elsewhere in the value: values differ",
        "def all_reduce(self, value):"
        " given = self._exchange('all_reduce', value); total = _sum(given);"
        " total[::2] = _sum([v[::2] for v in given[1:] + given[:1]]); return total",
    ),
    "unlike values are not noticed": (
        "mismatches",
        "shapes differ: all_reduce raises (nothing|ValueError.* which is no sentence)",
        "def _exchange(self, op, value, axis=0): return [one[-1] for one in self._met(op, value, axis)]",
    ),
    "a lost rank is not noticed": (
        "lost",
        "a rank is silent: all_reduce raises nothing",
        "def _exchange(self, op, value, axis=0):\n"
        "        try: return ThreadCollectives._exchange(self, op, value, axis)\n"
        "        except thread_group.GroupError: return [value] * self.size",
    ),
    "a lost rank is no sentence": (
        "lost",
        "a rank is silent: all_reduce raises BrokenBarrierError.* which is no sentence",
        "def _exchange(self, op, value, axis=0):\n"
        "        try: return ThreadCollectives._exchange(self, op, value, axis)\n"
        "        except thread_group.GroupError: raise threading.BrokenBarrierError() from None",
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted(bug, install):
    check, sentence, body = BUGS[bug]
    install("engine.collectives", "planted", "planted_collectives:manifest", PLANTED.format(body=body))
    for name, (function, ranks) in CHECKS.items():
        if check is None:
            Subject("planted", where="threads").check(function, ranks, seed())
        elif name == check:
            with pytest.raises(AssertionError, match=sentence):
                Subject("planted", where="threads").check(function, ranks, seed())


def seed() -> int:
    return int(np.random.default_rng().integers(2**32))
