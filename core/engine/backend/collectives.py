"""What several devices do together, each a rank of a group: a part of the contract (api 1.1), which ``v1`` exports.

A device may offer ``collectives(group)`` over its own values. Without that its values go through the host, to an
implementation found through the entry-point group ``engine.collectives``, which takes host arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from .v1 import Device, Probe


@dataclass(frozen=True)
class Group:
    """One rank of those that run a program together.

    ``addresses``: for each rank a "HOST:PORT" that it may listen on; they name the group where ranks are threads of one
    process. ``timeout``: seconds after which a rank gives up another that it waits for.
    """

    rank: int
    addresses: tuple[str, ...]
    timeout: float = 60.0

    @property
    def size(self) -> int:
        return len(self.addresses)


class Collectives(Protocol):
    """A group's operations. All ranks call the same ones in the same order, each from one thread, with values of one shape
    and dtype (f32, f16, bf16 or i32); a result is a value of its own, and arguments stay as they are.

    Where the ranks' operations, shapes or dtypes differ, or a rank is lost or silent for the group's timeout, each rank that
    is left raises an exception whose text is a sentence. After that the group cannot be used.
    """

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def fixed_order(self) -> bool:
        """Whether an element's sum has the same bits on all ranks, each time, and wherever in a value it lies."""
        ...

    def all_reduce(self, value: Any) -> Any:
        """The sum of all ranks' values; 16-bit floats are rounded once an addition at most."""
        ...

    def all_gather(self, value: Any, axis: int = 0) -> Any:
        """All ranks' values joined along an axis, in the order of ranks."""
        ...

    def reduce_scatter(self, value: Any) -> Any:
        """Of the sum of all ranks' values this rank's part: the first axis falls into ``size`` equal parts."""
        ...

    def all_to_all(self, value: Any) -> Any:
        """The first axis falls into ``size`` equal parts; part n goes to rank n. Gives the parts that this rank got, joined
        in the order of ranks."""
        ...

    def close(self) -> None:
        """Leaves the group; the others are not waited for."""
        ...


@dataclass(frozen=True)
class CollectivesManifest:
    """What an entry point of group ``engine.collectives`` gives. ``probe`` imports nothing heavy. ``join`` waits for the
    group's other ranks, no longer than its timeout; its operations take host arrays."""

    name: str
    api: str
    probe: Callable[[], Probe]
    join: Callable[[Group], Collectives]


def collectives_of(device: Device) -> Callable[[Group], Collectives] | None:
    """Optional on a device: ``collectives(group)`` joins a group whose operations take this device's values. It is called
    before ``providers``, so that the device may offer the ops ``all_reduce`` and ``all_gather`` itself."""
    return getattr(device, "collectives", None)


class CollectivesError(Exception):
    """The group has come to its end; the text is a sentence."""


_OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
_DTYPES = ("f32", "f16", "bf16", "i32")
_MOST_AXES = 8
_WIRE = Struct(f"<{4 + _MOST_AXES}q")


@dataclass(frozen=True)
class CollectiveCall:
    """What a rank is about to do, for implementations whose ranks tell each other before they exchange values. ``dtype``: of
    the contract. CollectivesError where the call is none that the operations take."""

    op: str
    dtype: str
    shape: tuple[int, ...]
    axis: int = 0

    BYTES = _WIRE.size

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES or len(self.shape) > _MOST_AXES:
            raise CollectivesError(
                f"A value of {self.dtype} with {len(self.shape)} axes cannot be sent; it must be f32, f16, bf16 or i32, with at"
                f" most {_MOST_AXES} axes."
            )

    def part(self, size: int) -> tuple[int, ...]:
        """The shape of a rank's part of the value. CollectivesError where its first axis does not fall into equal ones."""
        if not self.shape or self.shape[0] % size:
            raise CollectivesError(
                f"A value of shape {list(self.shape)} has a first axis that does not fall into {size} equal parts."
            )
        return (self.shape[0] // size, *self.shape[1:])

    def encoded(self) -> bytes:
        """``BYTES`` bytes, the same for the same calls alone."""
        shape = (*self.shape, *[-1] * (_MOST_AXES - len(self.shape)))
        return _WIRE.pack(_OPS.index(self.op), _DTYPES.index(self.dtype), self.axis, len(self.shape), *shape)

    def check_same(self, rank: int, calls: Sequence[bytes]) -> None:
        """CollectivesError where one of the ranks' encoded calls, in their order, is not this one of ``rank``."""
        mine = self.encoded()
        for other, call in enumerate(calls):
            if call != mine:
                raise CollectivesError(
                    f"Rank {other} called {_described(call)} where rank {rank} called {_described(mine)}; all ranks must call the"
                    " same with values that are alike."
                )


def _described(call: bytes) -> str:
    op, dtype, axis, ndim, *shape = _WIRE.unpack(call)
    along = f", axis {axis}" if axis else ""
    return f"{_OPS[op]}({_DTYPES[dtype]}{shape[:ndim]}{along})"
