"""What a step points at, checked before a device sees it: a wrong number would be memory written beside a state."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..backend.v1 import Array, Plan, StepInputs
from ..errors import SchedulerError
from .padding import block_sizes


class Bounds:
    """The sizes of a plan's states, and the check of blocks, slots, positions and rows against them. About ten
    microseconds a step."""

    def __init__(self, plan: Plan) -> None:
        self._slots, self._context = plan.limits.slots, plan.limits.max_context
        self._blocks = {state.group: state.shape[0] for state in plan.states if state.group is not None}
        self._sizes = block_sizes(plan)

    def check(self, inputs: StepInputs) -> None:
        """SchedulerError where a step points outside of what is there."""
        arrays, dims = inputs.arrays, inputs.dims
        for group, count in self._blocks.items():
            _within(arrays[f"page_table.{group}"], count, f"block of cache group {group}")
            _within(arrays[f"block_copies.{group}"], count, f"block of cache group {group}")
        _within(arrays["seq_slots"], self._slots, "slot")
        _within(arrays["history_copies"], self._slots, "slot")
        _within(arrays["fill_slots"], self._slots, "slot")
        _within(arrays["fill_positions"], self._context, "position")
        _within(arrays["rows"], dims.T, "row")
        if "embedding_rows" in arrays:
            _within(arrays["embedding_rows"], dims.T, "row")
        starts, offsets = arrays["seq_starts"], arrays["query_offsets"]
        counts = offsets[1:] - offsets[:-1]
        if offsets[0] != 0 or offsets[-1] != dims.T:
            raise SchedulerError(f"a step of {dims.T} tokens shares out those from {offsets[0]} to {offsets[-1]}.")
        room = min(self._context, *(dims.P * size for size in self._sizes))
        _within(starts, room + 1, "position")
        _within(counts, dims.T + 1, "number of tokens")
        _within(starts + counts, room + 1, "position")

    def check_blocks(self, blocks: Sequence[Sequence[int]]) -> None:
        """The same for blocks, a sequence a cache group, that are to be saved or filled."""
        for group, count in self._blocks.items():
            _within(np.array(blocks[group], np.int32), count, f"block of cache group {group}")


def _within(numbers: Array, count: int, what: str) -> None:
    # As unsigned numbers the negative ones are the largest, so that one comparison finds them, too.
    if numbers.size and int(numbers.view(np.uint32).max()) >= count:
        wrong = numbers[(numbers < 0) | (numbers >= count)].flat[0]
        raise SchedulerError(
            f"a step has the {what} {wrong}, and they go from 0 to {count - 1}; a defect of the engine."
        )
