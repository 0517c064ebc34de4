"""What a device may offer beside the eight methods of the contract; None, or nothing, where it does not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .v1 import Array, Device, Limits, Provider, Segment, StepFn


def providers_of(device: Device) -> Mapping[str, Sequence[Provider]]:
    """Optional on a device: ``providers() -> {op: [Provider, ...]}`` in the order to try."""
    offered = getattr(device, "providers", None)
    return offered() if offered is not None else {}


def compile_of(device: Device) -> Callable[[Segment, Limits, Mapping[str, Any]], StepFn | None] | None:
    """Optional on a device: ``compile(segment, limits, states)`` takes a segment whole, or returns None for op by op."""
    return getattr(device, "compile", None)


def copy_in_all_of(device: Device) -> Callable[[Sequence[Array]], Sequence[Any]] | None:
    """Optional on a device (api 1.1): ``copy_in_all(arrays)`` gives what ``copy_in`` gives of each, for a device that brings
    many small arrays sooner together. Each value is freed by itself."""
    return getattr(device, "copy_in_all", None)


def populate_of(device: Device) -> Callable[[Any, int, int], None] | None:
    """Optional on a device (api 1.1): ``populate(state, first, count)``, called beside steps, has the system add the memory of
    so many entries of a state's first axis now, and not when they are first written to."""
    return getattr(device, "populate", None)


@dataclass(frozen=True)
class BlockAccess:
    """How a device's ``StepSession`` reads and writes rows of a state's first axis."""

    export_blocks: Callable[[Any, Array], Array]
    import_blocks: Callable[[Any, Array, Array], Any]


def block_access_of(device: Device) -> BlockAccess | None:
    """Optional on a device, for swapping: ``export_blocks(state, blocks) -> rows``, a host copy of the state's entries at
    ``blocks`` (i32), and ``import_blocks(state, blocks, rows) -> state``, which gives the state with these rows written, the
    same object where the device writes in place. A session of the device's own is a ``SwapSession``, too."""
    out, into = getattr(device, "export_blocks", None), getattr(device, "import_blocks", None)
    return None if out is None or into is None else BlockAccess(out, into)
