"""What several devices do together, each a rank of a group: a part of the contract (api 1.1), which ``v1`` exports.

A device may offer ``collectives(group)`` over its own values. Without that its values go through the host, to an
implementation found through the entry-point group ``engine.collectives``, which takes host arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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
