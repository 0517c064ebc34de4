"""Checks of collectives against NumPy, over several ranks: those of a device over its values, or of an entry point over host
arrays."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..backend.joining import free_addresses, join_group, join_on
from ..backend.registry import open_device
from ..backend.v1 import Array, Collectives, Device, Group
from ..ops.dtypes import from_f32, to_f32
from .ranks import run_ranks

_TAGS = ("f32", "f16", "bf16", "i32")
_EPSILON = {"f32": 2.0**-23, "f16": 2.0**-10, "bf16": 2.0**-7}
_SMALLEST = 2.0**-24
"""The least f16 above 0; what is below normal numbers is rounded to its multiples."""
_REPEATS = 3
_SILENT = 3.0
"""The timeout of groups whose ranks are lost, in seconds, and what more than it a rank may take to say so."""
_JOINING = 6.0
"""That of groups which ranks join without having met."""
_SLACK = 20.0
MINUTES = 300.0
"""Seconds that all ranks may take for one check."""


@dataclass(frozen=True)
class Subject:
    """What is examined: the collectives of a name, or those that a backend's device offers."""

    collectives: str = ""
    backend: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    where: str = "processes"

    def join(self, group: Group) -> Joined:
        if not self.backend:
            return Joined(join_group(group, self.collectives), None)
        device = open_device(self.backend, self.options, group.rank)
        joined = join_on(device, group)
        assert joined is not None, f"the device {device.describe().name} offers no collectives."
        return Joined(joined, device)

    def check(self, check: Check, ranks: int, seed: int) -> None:
        """AssertionError says what is wrong on which rank."""
        flat = free_addresses(ranks * _GROUPS)
        groups = tuple(flat[n : n + ranks] for n in range(0, len(flat), ranks))
        wrong = run_ranks(self.where, _on_rank, ranks, (self, check, groups, seed), MINUTES)
        assert not wrong, "; ".join(wrong)


@dataclass(frozen=True)
class Joined:
    """A group's operations on host arrays, through the device that they belong to if there is one."""

    collectives: Collectives
    device: Device | None

    def __call__(self, op: str, array: Array, *more: Any) -> Array:
        given = array if self.device is None else self.device.copy_in(array)
        before = array.tobytes()
        found = getattr(self.collectives, op)(given, *more)
        if self.device is None:
            assert array.tobytes() == before, f"{op} has changed its argument."
            return np.asarray(found)
        out = np.array(self.device.copy_out(found))
        assert self.device.copy_out(given).tobytes() == before, f"{op} has changed its argument."
        self.device.free(found)
        self.device.free(given)
        return out


Addresses = tuple[tuple[str, ...], ...]
Check = Callable[[Subject, int, Addresses, int], None]
"""Run by each rank: what is examined, the rank, the addresses of several groups, a seed that all ranks share."""
_GROUPS = 4


def _on_rank(rank: int, subject: Subject, check: Check, groups: Addresses, seed: int) -> None:
    check(subject, rank, groups, seed)


def check_values(subject: Subject, rank: int, groups: Addresses, seed: int) -> None:
    """Every operation, on random shapes of each dtype, is NumPy's; only sums may be rounded."""
    rng, joined = np.random.default_rng(seed), subject.join(Group(rank, groups[0]))
    size = joined.collectives.size
    assert (joined.collectives.rank, size) == (rank, len(groups[0])), "rank and size are not the group's."
    for tag in _TAGS:
        for shape in _shapes(rng, size):
            values = [_random(rng, shape, tag) for _ in range(size)]
            where = f"of {tag} {list(shape)}"
            _near(joined("all_reduce", values[rank]), values, tag, f"all_reduce {where}")
            axis = int(rng.integers(len(shape)))
            _equal(joined("all_gather", values[rank], axis), np.concatenate(values, axis), f"all_gather {where}")
            parts = [np.split(value, size)[rank] for value in values]
            _near(joined("reduce_scatter", values[rank]), parts, tag, f"reduce_scatter {where}")
            _equal(joined("all_to_all", values[rank]), np.concatenate(parts), f"all_to_all {where}")
    joined.collectives.close()


def check_order(subject: Subject, rank: int, groups: Addresses, seed: int) -> None:
    """Where ``fixed_order`` is claimed: a sum's bits are the same each time, on all ranks, and with other elements beside
    it. Differences show from three ranks on, since two numbers have one sum."""
    rng, joined = np.random.default_rng(seed), subject.join(Group(rank, groups[0]))
    size = joined.collectives.size
    if joined.collectives.fixed_order:
        for shape in _shapes(rng, size):
            mine = [_random(rng, shape, "f32") for _ in range(size)][rank]
            first = joined("all_reduce", mine)
            for _ in range(_REPEATS):
                _equal(joined("all_reduce", mine), first, "all_reduce in fixed order, again")
            _equal(
                joined("all_gather", first[None]), np.stack([first] * size), "all_reduce in fixed order, on all ranks"
            )
            for turned, back in (
                (mine[::-1], slice(None, None, -1)),
                (np.concatenate([mine[:1], mine]), slice(1, None)),
            ):
                total = joined("all_reduce", np.ascontiguousarray(turned))
                _equal(total[back], first, "all_reduce in fixed order, elsewhere in the value")
    joined.collectives.close()


def check_mismatches(subject: Subject, rank: int, groups: Addresses, seed: int) -> None:
    """Ranks that call different things are told so, all of them."""
    odd = rank == len(groups[0]) - 1
    plain = np.ones((4, 6), np.float32)
    calls = {
        "shapes differ": ("all_reduce", np.ones((4, 3), np.float32) if odd else plain),
        "numbers of axes differ": ("all_gather", plain.reshape(-1) if odd else plain),
        "dtypes differ": ("all_reduce", plain.astype(np.int32) if odd else plain),
        "operations differ": ("all_gather" if odd else "all_reduce", plain),
    }
    for addresses, (what, call) in zip(groups, calls.items(), strict=True):
        joined = subject.join(Group(rank, addresses, _JOINING))
        _raises(joined, what, *call)
        joined.collectives.close()


def check_lost(subject: Subject, rank: int, groups: Addresses, seed: int) -> None:
    """A rank that leaves without a word, or says nothing any more, ends the group for the others with a sentence."""
    lost = rank == len(groups[0]) - 1
    met = subject.join(Group(rank, groups[2]))  # so that none waits for another to start
    silent, left = (subject.join(Group(rank, addresses, _SILENT)) for addresses in groups[:2])
    if lost:
        time.sleep(_SILENT + 2)
    else:
        _raises(silent, "a rank is silent", "all_reduce", np.ones(5, np.float32))
    silent.collectives.close()
    if not lost:
        _raises(left, "a rank has ended", "all_reduce", np.ones(5, np.float32))
        left.collectives.close()
        met.collectives.close()


def _raises(joined: Joined, what: str, op: str, array: Array) -> None:
    began = time.monotonic()
    try:
        joined(op, array)
    except AssertionError:
        raise
    except Exception as error:
        text = str(error)
        sentence = text[:1].isupper() and text.endswith((".", ")")) and "\n" not in text and " " in text
        assert sentence, f"{what}: {op} raises {type(error).__name__}({text!r}), which is no sentence."
    else:
        raise AssertionError(f"{what}: {op} raises nothing.")
    assert time.monotonic() - began < _SILENT + _SLACK, f"{what}: {op} waits for longer than the group's timeout."


def _shapes(rng: np.random.Generator, size: int) -> Iterator[tuple[int, ...]]:
    """The first axis falls into ``size`` parts."""
    yield (size,)
    yield (size * int(rng.integers(2, 40)),)
    yield (size * int(rng.integers(1, 9)), int(rng.integers(1, 70)))
    yield (size, int(rng.integers(1, 5)), int(rng.integers(1, 33)))
    yield (size * int(rng.integers(40, 90)), int(rng.integers(200, 600)))


def _random(rng: np.random.Generator, shape: tuple[int, ...], tag: str) -> Array:
    if tag == "i32":
        return rng.integers(-(2**28), 2**28, shape, dtype=np.int32)
    return from_f32(rng.standard_normal(shape, np.float32) * np.float32(10.0) ** rng.integers(-2, 3), tag)


def _equal(found: Array, want: Array, where: str) -> None:
    assert found.shape == want.shape, f"{where}: the shape is {list(found.shape)} and not {list(want.shape)}."
    assert found.dtype == want.dtype, f"{where}: the dtype is {found.dtype} and not {want.dtype}."
    assert found.tobytes() == want.tobytes(), f"{where}: values differ."


def _near(found: Array, values: list[Array], tag: str, where: str) -> None:
    """An addition in any order is off by half a step of each partial sum at most, none of which is above the sum of
    magnitudes."""
    if tag == "i32":
        _equal(found, np.asarray(np.sum(values, axis=0, dtype=np.int32)), where)
        return
    wide = [to_f32(value, tag).astype(np.float64) for value in values]
    want = np.sum(wide, axis=0)
    bound = len(values) * (np.sum(np.abs(wide), axis=0) * _EPSILON[tag] + _SMALLEST * (tag == "f16"))
    assert found.shape == want.shape, f"{where}: the shape is {list(found.shape)} and not {list(want.shape)}."
    assert found.dtype == values[0].dtype, f"{where}: the dtype is {found.dtype} and not {values[0].dtype}."
    off = np.abs(to_f32(found, tag).astype(np.float64) - want) - bound
    assert (off <= 0).all(), f"{where}: sums are wrong by up to {np.abs(off + bound).max():.3g}."


CHECKS: Mapping[str, tuple[Check, int]] = {
    "values": (check_values, 2),
    "order": (check_order, 3),
    "mismatches": (check_mismatches, 2),
    "lost": (check_lost, 2),
}
"""Each check with its number of ranks."""
