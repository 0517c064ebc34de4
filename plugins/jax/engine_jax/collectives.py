"""Collectives over devices of one process: each rank is a thread, which brings its value; the last one runs an operation
over all devices, and each takes its own part of the result."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from engine.backend.v1 import Group

AXIS = "ranks"


def _gathered(x: jax.Array, axis: int) -> jax.Array:
    return jax.lax.all_gather(x, AXIS, axis=axis, tiled=True)


def _exchanged(x: jax.Array) -> jax.Array:
    return jax.lax.all_to_all(x, AXIS, split_axis=0, concat_axis=0, tiled=True)


def _scattered(x: jax.Array) -> jax.Array:
    """This rank's part of the sum: summands in the order of ranks, 16-bit floats rounded once."""
    size = jax.lax.axis_size(AXIS)
    parts = _exchanged(x).reshape(size, len(x) // size, *x.shape[1:])
    wide = parts.astype(jnp.float32) if x.dtype in (jnp.float16, jnp.bfloat16) else parts
    total = wide[0]
    for part in wide[1:]:
        total = total + part
    return total.astype(x.dtype)


def _reduced(x: jax.Array) -> jax.Array:
    size = jax.lax.axis_size(AXIS)
    flat = jnp.pad(x.reshape(-1), (0, -x.size % size))
    return _gathered(_scattered(flat), 0)[: x.size].reshape(x.shape)


@dataclass
class _Round:
    """An operation under way: what each rank has brought, and what came of it."""

    brought: dict[int, tuple[str, jax.Array, int]] = field(default_factory=dict)
    results: Sequence[jax.Array] | None = None
    error: str | None = None
    done: threading.Event = field(default_factory=threading.Event)


class _Meeting:
    """Where the ranks of a group meet. ``devices`` by rank."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.devices: dict[int, jax.Device] = {}
        self.complete = threading.Event()
        self.left = 0
        self.broken: str | None = None
        self._lock = threading.Lock()
        self._round = _Round()
        self._compiled: dict[tuple[str, int], Callable[..., jax.Array]] = {}

    def enter(self, rank: int, device: jax.Device) -> None:
        with self._lock:
            if device in self.devices.values():
                raise ValueError(f"Two ranks want the device {device}; each rank needs a device of its own.")
            self.devices[rank] = device
            if len(self.devices) == self.size:
                self.mesh = Mesh(np.array([self.devices[n] for n in range(self.size)]), (AXIS,))
                self.complete.set()

    def run(self, rank: int, op: str, value: jax.Array, axis: int, timeout: float) -> jax.Array:
        """The rank's part of the result, once all ranks have come. RuntimeError says why there is none."""
        with self._lock:
            if self.broken is not None:
                raise RuntimeError(self.broken)
            now = self._round
            now.brought[rank] = op, value, axis
            last = len(now.brought) == self.size
            if last:
                self._round = _Round()
        if last:
            self._finish(now)
        elif not now.done.wait(timeout):
            missing = ", ".join(str(n) for n in range(self.size) if n not in now.brought)
            self._fail(now, f"Rank {missing} has not come to the {op} of rank {rank} within {timeout:g} s.")
        if now.results is None:
            raise RuntimeError(now.error)
        return now.results[rank]

    def _finish(self, now: _Round) -> None:
        try:
            different = _difference([now.brought[n] for n in range(self.size)])
            if different is None:
                now.results = self._together([now.brought[n] for n in range(self.size)])
            else:
                self.broken = now.error = different
        except Exception as error:
            self.broken = now.error = f"An operation of the group failed: {error}."
        now.done.set()

    def _fail(self, now: _Round, why: str) -> None:
        with self._lock:
            if not now.done.is_set():
                self.broken = now.error = why
                now.done.set()

    def _together(self, brought: Sequence[tuple[str, jax.Array, int]]) -> Sequence[jax.Array]:
        op, value, axis = brought[0]
        sharding = NamedSharding(self.mesh, P(AXIS))
        shape = (self.size * value.shape[0], *value.shape[1:])
        parts = [part for _, part, _ in brought]
        result = self._function(op, axis)(jax.make_array_from_single_device_arrays(shape, sharding, parts))
        own = {shard.device: shard.data for shard in result.addressable_shards}
        return [own[self.devices[n]] for n in range(self.size)]

    def _function(self, op: str, axis: int) -> Callable[..., jax.Array]:
        """The operation over all devices, whose results lie one after the other along the first axis."""
        if (op, axis) not in self._compiled:
            fn = partial(_gathered, axis=axis) if op == "all_gather" else _OPS[op]
            together = jax.shard_map(fn, mesh=self.mesh, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False)
            self._compiled[op, axis] = jax.jit(together)
        return self._compiled[op, axis]


_OPS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "all_reduce": _reduced,
    "reduce_scatter": _scattered,
    "all_to_all": _exchanged,
}


def _difference(brought: Sequence[tuple[str, jax.Array, int]]) -> str | None:
    """A sentence that says what the ranks do not agree on, or None."""
    calls = [f"{op} of {value.dtype} {list(value.shape)}, axis {axis}" for op, value, axis in brought]
    other = next((n for n, call in enumerate(calls) if call != calls[0]), None)
    return None if other is None else f"Rank 0 calls {calls[0]}, and rank {other} {calls[other]}."


_meetings: dict[tuple[str, ...], _Meeting] = {}
_meetings_lock = threading.Lock()


class JaxCollectives:
    """A rank's operations. Sums are taken in the order of ranks, by all ranks the same."""

    fixed_order = True

    def __init__(self, group: Group, device: jax.Device) -> None:
        self._group = group
        with _meetings_lock:
            self._meeting = _meetings.setdefault(group.addresses, _Meeting(group.size))
        self._meeting.enter(group.rank, device)
        if not self._meeting.complete.wait(group.timeout):
            here = len(self._meeting.devices)
            raise RuntimeError(f"Of {group.size} ranks {here} have joined within {group.timeout:g} s.")
        self._open = True

    @property
    def rank(self) -> int:
        return self._group.rank

    @property
    def size(self) -> int:
        return self._group.size

    def all_reduce(self, value: jax.Array) -> jax.Array:
        return self._run("all_reduce", value)

    def all_gather(self, value: jax.Array, axis: int = 0) -> jax.Array:
        return self._run("all_gather", value, axis)

    def reduce_scatter(self, value: jax.Array) -> jax.Array:
        return self._run("reduce_scatter", value)

    def all_to_all(self, value: jax.Array) -> jax.Array:
        return self._run("all_to_all", value)

    def close(self) -> None:
        if not self._open:
            return
        self._open = False
        with _meetings_lock:
            self._meeting.left += 1
            self._meeting.broken = self._meeting.broken or f"Rank {self.rank} has left the group."
            if self._meeting.left == self.size:
                _meetings.pop(self._group.addresses, None)

    def _run(self, op: str, value: jax.Array, axis: int = 0) -> Any:
        return self._meeting.run(self.rank, op, value, axis, self._group.timeout)
