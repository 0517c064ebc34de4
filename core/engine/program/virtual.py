"""Planning for a cache of addresses, to which memory is mapped: how large pages are, and how many addresses there are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, gcd

from ..backend.v1 import Device, StateSpec, virtual_memory_of
from ..errors import ConfigError
from .place import Placement
from .plan import kv_states, state_bytes

MOST_ADDRESSES = 1 << 44
"""Bytes of addresses that a cache may have: a small part of the 47 bits or more that processors and GPUs have."""
_MOST_TOKENS = (1 << 31) - 1
"""Places in the cache are counted in 32 bits."""


def page_blocks(placement: Placement, devices: Mapping[str, Device], kv_dtype: str) -> tuple[int, ...]:
    """Blocks of each group's pages: as few as are whole granules in each of its states. ConfigError where a device has no virtual
    memory, or states do not lie in it."""
    pages = [1] * len(placement.program.groups)
    for state in kv_states(placement.program, placement, kv_dtype, pages):
        assert state.group is not None
        granularity = _granularity(state, placement, devices)
        # Granules are powers of two, and so are these quotients: the largest is a multiple of the others.
        pages[state.group] = max(pages[state.group], granularity // gcd(granularity, state_bytes(state)))
    return tuple(pages)


def _granularity(state: StateSpec, placement: Placement, devices: Mapping[str, Device]) -> int:
    place = placement.state_places[state.name]
    advice = "choose --kv-allocator paged or contiguous"
    device = devices[placement.main if place == "host" else place]
    memory = virtual_memory_of(device)
    if memory is None:
        raise ConfigError(f"The device {device.describe().name} offers no virtual memory; {advice}.")
    if place == "host" or place in placement.round_trips:
        raise ConfigError(f"The state {state.name} is kept for references, which know no virtual memory; {advice}.")
    return memory.granularity


def address_blocks(
    placement: Placement,
    kv_dtype: str,
    pages: Sequence[int],
    blocks: Sequence[int],
    sequences: int,
    longest: int,
) -> tuple[int, ...]:
    """Addresses of each group, in blocks: of so many sequences of the longest context and the null block's page, where there are
    as many; of all memory at least."""
    found = []
    states = kv_states(placement.program, placement, kv_dtype, (1,) * len(pages))
    total = sum(map(state_bytes, states))
    for group, page, held in zip(placement.program.groups, pages, blocks, strict=True):
        wanted = (sequences * ceil(group.blocks(longest) / page) + 1) * page
        most = min(MOST_ADDRESSES // max(total, 1), _MOST_TOKENS // group.block_size) // page * page
        found.append(max(min(wanted, most), held))
    return tuple(found)
