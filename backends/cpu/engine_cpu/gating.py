"""A gate's and an up's product that only an activation reads, of which only its packed rows are read: one kernel."""

from __future__ import annotations

from typing import Any

from engine.backend.v1 import BoundCall, Segment

from .drawing import readers


def find_gated(segment: Segment) -> dict[int, BoundCall]:
    """By the id of an activation's packed rows, the products that its kernel multiplies."""
    products = {bound.call.outputs[0].id: bound for bound in segment.calls if _multiplies_two(bound)}
    found = {}
    for bound in segment.calls:
        call = bound.call
        if call.op != "gated_act" or "up" not in call.inputs or not call.attrs.get("packed"):
            continue
        gate, up = call.inputs["gate"].id, call.inputs["up"].id
        if gate not in products or [value.id for value in products[gate].call.outputs] != [gate, up]:
            continue
        plain, packed = call.outputs
        if not readers(segment, plain.id) and readers(segment, gate) == readers(segment, up) == [call]:
            found[packed.id] = products[gate]
    return found


def _multiplies_two(bound: BoundCall) -> bool:
    """One input by two weights of one family and shape, to whole groups of packed columns, without biases."""
    if bound.call.op != "linear_group" or len(bound.call.outputs) != 2 or len(bound.weights) != 2:
        return False
    gate, up = (_kind(weight.handle) for weight in bound.weights.values())
    return gate == up and gate[1] % 32 == 0


def _kind(handle: Any) -> tuple[str, int, int]:
    return handle.family, handle.columns, handle.depth
