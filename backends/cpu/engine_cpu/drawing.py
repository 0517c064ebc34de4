"""The end of a segment that processes logits and draws tokens from them, as one kernel; and a head before it whose logits
nothing else reads. Where no row of a step asks for more than its greatest logit, such a head keeps that one while it
multiplies, and no logits are written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.backend.v1 import BoundCall, Segment

_CONDITIONS = (
    "temperature",
    "bias_offsets",
    "mask_rows",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "want_logprobs",
    "no_repeat_ngram_size",
    "candidates",
    "targets",
)
"""Inputs of the two calls that tell whether a row asks for more, in the order of the native GreedyRows."""
_BEST_BYTES = 8
"""Of the native BestLogit."""


@dataclass(frozen=True)
class GreedyHead:
    """Native ids: of the inputs that tell what rows ask for, of what each thread has found best, and of whether it was looked
    for."""

    conditions: tuple[int, ...]
    best: int
    greedy: int


@dataclass(frozen=True)
class Drawing:
    """The calls of process_logits and sample, of which nothing else reads what passes between them. ``logits``: the id of
    what both begin with. ``head``: where a product in the segment has no other use than these logits."""

    processing: Any
    sampling: Any
    logits: int
    head: GreedyHead | None


def find_drawing(native: Any, segment: Segment, ids: Mapping[int, int], threads: int) -> Drawing | None:
    """Declares the head's values, which are none of the program's; None where the segment does not end so."""
    calls = {bound.call.op: bound.call for bound in segment.calls}
    if not {"process_logits", "sample"} <= calls.keys():
        return None
    processing, sampling = calls["process_logits"], calls["sample"]
    logits, processed = processing.inputs["logits"].id, processing.outputs[0].id
    same = sampling.inputs["logits"].id == logits and sampling.states == processing.states
    if not same or readers(segment, processed) != [sampling]:
        return None
    head = None
    if readers(segment, logits) == [processing, sampling] and any(_is_head(bound, logits) for bound in segment.calls):
        given = {**processing.inputs, **sampling.inputs}
        conditions = tuple(ids[given[name].id] if name in given else -1 for name in _CONDITIONS)
        head = GreedyHead(conditions, len(ids), len(ids) + 1)
        native.value(head.best, threads * _BEST_BYTES, "R", "u8")
        native.value(head.greedy, 4, "1", "i32")
    return Drawing(processing, sampling, logits, head)


def readers(segment: Segment, value: int) -> list[Any]:
    """The calls that read a value, with None for whoever reads it outside the segment."""
    inside = [bound.call for bound in segment.calls if value in {given.id for given in bound.call.inputs.values()}]
    return inside + [None for given in segment.outputs if given.id == value]


def _is_head(bound: BoundCall, logits: int) -> bool:
    call = bound.call
    plain = "residual" not in call.inputs and not any(name.startswith("bias") for name in call.weights)
    return call.op == "linear" and plain and [value.id for value in call.outputs] == [logits]
