"""What a device or a provider may offer beside the methods of the contract; None, or nothing, where it does not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .v1 import Array, Device, Limits, Provider, Segment, StepFn, WeightRef


def providers_of(device: Device) -> Mapping[str, Sequence[Provider]]:
    """Optional on a device: ``providers() -> {op: [Provider, ...]}`` in the order to try."""
    offered = getattr(device, "providers", None)
    return offered() if offered is not None else {}


def packed_bytes_of(provider: Provider) -> Callable[[WeightRef], int] | None:
    """Optional on a provider (api 1.1): ``packed_bytes(ref)`` tells ahead how many bytes ``pack`` makes of a weight at most, so
    that the cache gets what is left. Of a provider without it that is what the weight takes in its file."""
    return getattr(provider, "packed_bytes", None)


def compile_of(device: Device) -> Callable[[Segment, Limits, Mapping[str, Any]], StepFn | None] | None:
    """Optional on a device: ``compile(segment, limits, states)`` takes a segment whole, or returns None for op by op."""
    return getattr(device, "compile", None)


def copy_in_all_of(device: Device) -> Callable[[Sequence[Array]], Sequence[Any]] | None:
    """Optional on a device (api 1.1): ``copy_in_all(arrays)`` gives what ``copy_in`` gives of each, for a device that brings
    many small arrays sooner together. Each value is freed by itself."""
    return getattr(device, "copy_in_all", None)


def copy_out_all_of(device: Device) -> Callable[[Sequence[Any]], Callable[[], Sequence[Array]]] | None:
    """Optional on a device (api 1.1), for one that computes by itself what it is given: ``copy_out_all(values)`` begins to copy
    values out as what was submitted before leaves them, and gives a function that waits for that and gives what ``copy_out``
    gives of each. Meanwhile the values may be freed, and further steps submitted, from other threads than the one that waits."""
    return getattr(device, "copy_out_all", None)


def populate_of(device: Device) -> Callable[[Any, int, int], None] | None:
    """Optional on a device (api 1.1): ``populate(state, first, count)``, called on a thread of its own, has the system add the
    memory of so many entries of a state's first axis now, and not when they are first written to."""
    return getattr(device, "populate", None)


def watch_memory_of(device: Device) -> Callable[[], Callable[[], int]] | None:
    """Optional on a device with memory of its own (api 1.1): ``watch_memory()`` begins to watch, and gives a function that tells
    the most bytes that were taken since, with what an allocator keeps and what the driver took. The core runs the largest steps
    meanwhile, and the KV cache gets what they leave."""
    return getattr(device, "watch_memory", None)


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


@dataclass(frozen=True)
class VirtualMemory:
    """Values whose addresses are taken before their memory. Memory comes and goes in whole granules of ``granularity`` bytes, a
    power of two, and ``map`` and ``unmap`` are only asked for entries of the first axis that begin and end with one.

    ``reserve(shape, tag)`` gives a value without memory, which ``free`` takes as any other; ``map(value, first, count)`` gives
    entries memory, in which zeros are, and ``unmap`` takes it away. Who reads or writes an entry without memory does wrong.
    Nobody uses the entries meanwhile: the core calls ``fence`` before it unmaps. MemoryError where there is no more.
    """

    granularity: int
    reserve: Callable[[tuple[int, ...], str], Any]
    map: Callable[[Any, int, int], None]
    unmap: Callable[[Any, int, int], None]


def virtual_memory_of(device: Device) -> VirtualMemory | None:
    """Optional on a device (api 1.1): ``virtual_memory()`` gives a ``VirtualMemory``, or None where it has none here. With it a
    cache may be as long as all sequences may become, and take no more memory than they have filled."""
    offered = getattr(device, "virtual_memory", None)
    return None if offered is None else offered()
