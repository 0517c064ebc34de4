"""The head of a segment whose logits only process_logits and sample read. Where no row of a step asks for more than its
greatest logit, it keeps that one while it multiplies, and no logits are written."""

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
    """``logits``: the id of the head's value. Native ids: of the inputs that tell what rows ask for, of what each thread has
    found best, and of whether it was looked for."""

    logits: int
    conditions: tuple[int, ...]
    best: int
    greedy: int


def declare_greedy_head(native: Any, segment: Segment, ids: Mapping[int, int], threads: int) -> GreedyHead | None:
    """Declares its values, which are none of the program's; None where the segment has no such head."""
    calls = {bound.call.op: bound.call for bound in segment.calls}
    if not {"process_logits", "sample"} <= calls.keys():
        return None
    processing, sampling = calls["process_logits"], calls["sample"]
    logits = processing.inputs["logits"]
    processed = processing.outputs[0]
    if _readers(segment, logits.id) != [processing, sampling] or _readers(segment, processed.id) != [sampling]:
        return None
    if not any(_is_head(bound, logits.id) for bound in segment.calls):
        return None
    given = {**processing.inputs, **sampling.inputs}
    conditions = tuple(ids[given[name].id] if name in given else -1 for name in _CONDITIONS)
    best, greedy = len(ids), len(ids) + 1
    native.value(best, threads * _BEST_BYTES, "R", "u8")
    native.value(greedy, 4, "1", "i32")
    return GreedyHead(logits.id, conditions, best, greedy)


def _readers(segment: Segment, value: int) -> list[Any]:
    """The calls that read a value, with None for whoever reads it outside the segment."""
    inside = [bound.call for bound in segment.calls if value in {given.id for given in bound.call.inputs.values()}]
    return inside + [None for given in segment.outputs if given.id == value]


def _is_head(bound: BoundCall, logits: int) -> bool:
    call = bound.call
    plain = "residual" not in call.inputs and not any(name.startswith("bias") for name in call.weights)
    return call.op == "linear" and plain and [value.id for value in call.outputs] == [logits]
