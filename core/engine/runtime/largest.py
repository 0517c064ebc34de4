"""The memory of the largest steps, on devices that can tell: they are run before the KV cache gets what is left."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..backend.v1 import Device, DeviceInfo, Plan, watch_memory_of
from ..errors import ConfigError
from ..program.execute import StepSession

SHARE = 0.95
"""Of what the largest steps leave the cache may have so much; steps of other sizes leave gaps in an allocator's memory."""


@dataclass(frozen=True)
class Left:
    """Of a device: the bytes that the largest steps take, and what is free beside them and the weights."""

    steps: int
    free: int


def watches_of(
    devices: Mapping[str, Device], infos: Mapping[str, DeviceInfo]
) -> dict[str, Callable[[], Callable[[], int]]]:
    """Of the devices whose memory is their own, and that can tell what was taken of it."""
    found = {place: watch_memory_of(device) for place, device in devices.items() if infos[place].own_memory}
    return {place: watch for place, watch in found.items() if watch is not None}


def run_largest(
    devices: Mapping[str, Device], plan: Plan, watches: Mapping[str, Callable[[], Callable[[], int]]], warm_up: bool
) -> dict[str, Left]:
    """What the largest steps of a plan leave, whose cache is of as few blocks as there may be; with ``warm_up`` what is recorded
    when a session opens is counted, too. ConfigError where they find no room."""
    try:
        steps = _taken(StepSession(devices, plan), watches, warm_up)
    except MemoryError as error:
        dims = plan.limits.dims
        raise ConfigError(
            f"The device has no room for a step of {dims.T} tokens and {dims.S} sequences beside the weights; set a smaller"
            " max_num_batched_tokens (--max-batch-tokens), max_num_seqs or max_model_len (--max-context)."
        ) from error
    return {place: Left(taken, max(devices[place].memory_info().free - taken, 0)) for place, taken in steps.items()}


def _taken(
    session: StepSession, watches: Mapping[str, Callable[[], Callable[[], int]]], warm_up: bool
) -> dict[str, int]:
    """A session's making is not counted: what it brings together of the weights it gives back, and that stays done."""
    try:
        watching = {place: watch() for place, watch in watches.items()}
        if warm_up:
            session.warm_up()
        session.run_largest()
        return {place: taken() for place, taken in watching.items()}
    finally:
        session.close()
