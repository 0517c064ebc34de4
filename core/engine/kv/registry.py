"""Finding allocators and length predictors by name: those of this package, and entry points of others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

from ..errors import KVCacheError
from .allocator import KVAllocator
from .cache_group import CacheGroup
from .contiguous import ContiguousAllocator
from .length_predictor import LengthHistogram, LengthPredictor
from .paged import PagedAllocator
from .virtual import VirtualAllocator

ALLOCATORS = "engine.kv_allocators"
PREDICTORS = "engine.length_predictors"


@dataclass(frozen=True)
class AllocatorSpec:
    """What an allocator is made for. ``num_blocks``: blocks of each group's pool, the null block included. ``max_chunk``:
    the most tokens of a sequence that a step computes. ``predictor``: a guess at output lengths, for those that reserve.
    ``pages`` and ``spaces``, for those of addresses: the blocks of each group that get memory at a time, and how many there are
    addresses for.
    """

    groups: tuple[CacheGroup, ...]
    num_blocks: tuple[int, ...]
    max_chunk: int
    predictor: LengthPredictor
    pages: tuple[int, ...] = ()
    spaces: tuple[int, ...] = ()


@dataclass(frozen=True)
class AllocatorManifest:
    """What an entry point of group ``engine.kv_allocators`` gives.

    ``windows``: whether it gives back blocks behind a window; if not, a model's layers with and without a window are one
    full group. ``contiguous``: whether each page table it makes has consecutive entries, as attention may then be told
    (feature ``contiguous``). ``virtual``: whether its blocks are addresses, which devices with virtual memory alone have.
    """

    name: str
    make: Callable[[AllocatorSpec], KVAllocator]
    windows: bool = False
    contiguous: bool = False
    virtual: bool = False


PAGED = AllocatorManifest("paged", lambda s: PagedAllocator(s.groups, s.num_blocks, s.max_chunk), windows=True)
CONTIGUOUS = AllocatorManifest(
    "contiguous", lambda s: ContiguousAllocator(s.groups, s.num_blocks, s.predictor), contiguous=True
)


VIRTUAL = AllocatorManifest(
    "virtual",
    lambda s: VirtualAllocator(s.groups, s.num_blocks, s.pages, s.spaces),
    contiguous=True,
    virtual=True,
)
_OWN = {one.name: one for one in (PAGED, CONTIGUOUS, VIRTUAL)}


def find_allocator(name: str) -> AllocatorManifest:
    """ "paged", "contiguous", "virtual", or an entry point of group ``engine.kv_allocators``. KVCacheError if it is unknown
    or gives no manifest."""
    found = _find("KV allocator", ALLOCATORS, _OWN, name)
    if not isinstance(found, AllocatorManifest):
        raise KVCacheError(f"the entry point of the KV allocator {name!r} gives no AllocatorManifest")
    return found


def find_predictor(name: str) -> LengthPredictor:
    """A new predictor: "histogram", or what an entry point of group ``engine.length_predictors`` makes, called with
    nothing. KVCacheError if it is unknown."""
    make: Callable[[], LengthPredictor] = _find("length predictor", PREDICTORS, {"histogram": LengthHistogram}, name)
    return make()


def _find(what: str, group: str, own: dict[str, Any], name: str) -> Any:
    if name in own:
        return own[name]
    found = {point.name: point for point in entry_points(group=group)}
    if name not in found:
        known = ", ".join(sorted({*own, *found}))
        raise KVCacheError(f"There is no {what} {name!r}; known are: {known}.")
    try:
        return found[name].load()
    except Exception as error:
        raise KVCacheError(f"The {what} {name!r} could not be loaded: {type(error).__name__}: {error}.") from error
