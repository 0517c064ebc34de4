"""Collectives of host arrays over TCP, by torch's gloo. Every sum is taken in the order of ranks, on each rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from engine.backend.v1 import API, Array, CollectiveCall, CollectivesError, CollectivesManifest, Group, Probe

_INLINE = 1 << 14
"""Bytes of a value that travel with its description: most of a decode step's go in one exchange."""
_DTYPES = {"float32": "f32", "float16": "f16", "uint16": "bf16", "int32": "i32"}


class Gloo:
    """A group's operations. gloo's own sums depend on where in a value an element lies, and gloo ends the process when
    sizes differ; so values are gathered with their descriptions, and added here."""

    fixed_order = True

    def __init__(self, group: Group) -> None:
        self._torch: Any = import_module("torch")
        distributed: Any = import_module("torch.distributed")
        self._group = group
        host, _, port = group.addresses[0].rpartition(":")
        timeout = timedelta(seconds=group.timeout)
        store = distributed.TCPStore(host, int(port), group.size, group.rank == 0, timeout)
        self._processes = distributed.ProcessGroupGloo(store, group.rank, group.size, timeout)
        self._broken: str | None = None

    @property
    def rank(self) -> int:
        return self._group.rank

    @property
    def size(self) -> int:
        return self._group.size

    def all_reduce(self, value: Array) -> Array:
        return _sum(self._gathered("all_reduce", value, 0))

    def all_gather(self, value: Array, axis: int = 0) -> Array:
        return np.concatenate(self._gathered("all_gather", value, axis), axis)

    def reduce_scatter(self, value: Array) -> Array:
        return _sum(self._exchanged("reduce_scatter", value))

    def all_to_all(self, value: Array) -> Array:
        return np.concatenate(self._exchanged("all_to_all", value))

    def close(self) -> None:
        """Lets the connections go."""
        self._broken = "The group has been left."
        self._processes = None

    # -- exchanges -------------------------------------------------------------------------------------------------

    def _gathered(self, op: str, value: Array, axis: int) -> list[Array]:
        """The values of all ranks."""
        value = np.ascontiguousarray(value)
        small = value.nbytes <= _INLINE
        with self._ending():
            inline = self._agree(_call(op, value, axis), _bytes(value) if small else None)
            raw = inline if small else self._all_gather(_bytes(value))
        return [_like(value, one, value.shape) for one in raw]

    def _exchanged(self, op: str, value: Array) -> list[Array]:
        """This rank's part of the values of all ranks."""
        value = np.ascontiguousarray(value)
        with self._ending():
            call = _call(op, value)
            shape = call.part(self.size)
            self._agree(call)
            sent = self._torch.from_numpy(_bytes(value))
            got = self._torch.empty_like(sent)
            self._run(lambda: self._processes.alltoall_base(got, sent, [], []))
        return [_like(value, part, shape) for part in np.split(got.numpy(), self.size)]

    def _agree(self, call: CollectiveCall, inline: Array | None = None) -> list[Array]:
        """Every rank's bytes ``inline``, sent with its description, which must be this rank's own."""
        first = np.zeros(call.BYTES + _INLINE, np.uint8)
        first[: call.BYTES] = np.frombuffer(call.encoded(), np.uint8)
        end = call.BYTES + (0 if inline is None else len(inline))
        if inline is not None:
            first[call.BYTES : end] = inline
        firsts = self._all_gather(first)
        call.check_same(self.rank, [other[: call.BYTES].tobytes() for other in firsts])
        return [other[call.BYTES : end] for other in firsts]

    def _all_gather(self, data: Array) -> list[Array]:
        sent = self._torch.from_numpy(data)
        got = [self._torch.empty_like(sent) for _ in range(self.size)]
        self._run(lambda: self._processes.allgather([got], [sent]))
        return [one.numpy() for one in got]

    def _run(self, begin: Callable[[], Any]) -> None:
        if self._broken is not None:
            raise CollectivesError(self._broken)
        try:
            begin().wait()
        except RuntimeError as error:
            why = " ".join(str(error).split())
            raise CollectivesError(
                f"Rank {self.rank} of {self.size} lost another rank, or none answered for {self._group.timeout:g} s ({why})."
            ) from error

    @contextmanager
    def _ending(self) -> Iterator[None]:
        """After a fault the group is of no use any more. The others notice: the connections are let go."""
        try:
            yield
        except CollectivesError as error:
            self._broken = self._broken or str(error)
            self._processes = None
            raise


def _call(op: str, value: Array, axis: int = 0) -> CollectiveCall:
    return CollectiveCall(op, _DTYPES.get(str(value.dtype), str(value.dtype)), value.shape, axis)


def _bytes(value: Array) -> Array:
    return value.reshape(-1).view(np.uint8)


def _like(value: Array, raw: Array, shape: tuple[int, ...]) -> Array:
    return raw.view(value.dtype).reshape(shape)


def _sum(values: Sequence[Array]) -> Array:
    """In the order of ranks; 16-bit floats in f32, rounded once."""
    dtype = values[0].dtype
    if dtype == np.uint16:
        return _to_bf16(_added([(value.astype(np.uint32) << 16).view(np.float32) for value in values]))
    if dtype == np.float16:
        return _added([value.astype(np.float32) for value in values]).astype(np.float16)
    return _added(values)


def _added(values: Sequence[Array]) -> Array:
    total = values[0] + values[1] if len(values) > 1 else values[0].copy()
    for value in values[2:]:
        total += value
    return total


def _to_bf16(array: Array) -> Array:
    """Rounded to nearest even; NaN stays NaN."""
    bits = array.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(array), np.uint16(0x7FC0), rounded)


def _probe() -> Probe:
    if find_spec("torch") is None:
        return Probe(False, "torch is missing, whose gloo joins ranks; install it with: pip install torch")
    return Probe(True, "torch's gloo, over TCP.", score=10)


manifest = CollectivesManifest("gloo", API, _probe, Gloo)
