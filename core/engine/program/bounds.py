"""What a step points at, checked before a device sees it: a wrong number would be memory written beside a state."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..backend.v1 import Array, Plan, Runs, StepInputs
from ..errors import SchedulerError
from .padding import block_sizes

_TOKENS = {"token_ids": -1, "fill_ids": 0, "bias_ids": 0, "targets": -1}
"""The inputs that are tokens, and the least number that stands in them: -1 is one from the history, or yet to be drawn."""


class Bounds:
    """The sizes of a plan's states and of its vocabulary, and the check of blocks, slots, positions, rows and tokens against
    them. Some 20 microseconds a step. Of groups with pages it knows which have memory, as of what is submitted next."""

    def __init__(self, plan: Plan) -> None:
        self._slots, self._context = plan.limits.slots, plan.limits.max_context
        self._blocks = {state.group: state.shape[0] for state in plan.states if state.group is not None}
        self._sizes, self._vocab = block_sizes(plan), _vocabulary(plan)
        self._pages = plan.pages
        self._mapped = {group: np.zeros(self._blocks[group] // page, bool) for group, page in plan.pages.items()}
        for mapped in self._mapped.values():
            mapped[0] = True

    def check(self, inputs: StepInputs) -> None:
        """SchedulerError where a step points outside of what is there."""
        arrays, dims = inputs.arrays, inputs.dims
        for group, count in self._blocks.items():
            self._check_blocks(group, count, arrays[f"page_table.{group}"])
            self._check_blocks(group, count, arrays[f"block_copies.{group}"])
        _within(arrays["seq_slots"], self._slots, "slot")
        _within(arrays["history_copies"], self._slots, "slot")
        _within(arrays["fill_slots"], self._slots, "slot")
        _within(arrays["fill_positions"], self._context, "position")
        _within(arrays["rows"], dims.T, "row")
        if "embedding_rows" in arrays:
            _within(arrays["embedding_rows"], dims.T, "row")
        for name, first in _TOKENS.items():
            _within(arrays[name], self._vocab, "token", first)
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
            self._check_blocks(group, count, np.array(blocks[group], np.int32))

    def remap(self, unmapped: Sequence[Runs], mapped: Sequence[Runs]) -> None:
        """Blocks lose and get memory. SchedulerError where they do not have it, or have it already."""
        for runs, now in ((unmapped, False), (mapped, True)):
            for group, page in self._pages.items():
                for first, count in runs[group]:
                    pages = self._mapped[group][first // page : (first + count) // page]
                    whole = first >= page and not first % page and not count % page and len(pages) * page == count
                    if not whole or (pages == now).any():
                        raise SchedulerError(
                            f"blocks {first} to {first + count - 1} of cache group {group} cannot be"
                            f" {'mapped' if now else 'unmapped'}; a defect of the engine."
                        )
                    pages[:] = now

    def _check_blocks(self, group: int, count: int, blocks: Array) -> None:
        _within(blocks, count, f"block of cache group {group}")
        if group in self._pages and not self._mapped[group][blocks // self._pages[group]].all():
            raise SchedulerError(
                f"a step has a block of cache group {group} that has no memory; a defect of the engine."
            )


def _vocabulary(plan: Plan) -> int:
    """The tokens that a row has logits of; the embedding table has as many."""
    calls = (bound.call for segment in plan.head for bound in segment.calls)
    return next(int(call.inputs["logits"].shape[-1]) for call in calls if call.op == "process_logits")


def _within(numbers: Array, count: int, what: str, first: int = 0) -> None:
    # As unsigned numbers those before the first are the largest, so that one comparison finds them, too.
    if numbers.size and int((numbers - first if first else numbers).view(np.uint32).max()) >= count - first:
        wrong = numbers[(numbers < first) | (numbers >= count)].flat[0]
        raise SchedulerError(
            f"a step has the {what} {wrong}, and they go from {first} to {count - 1}; a defect of the engine."
        )
