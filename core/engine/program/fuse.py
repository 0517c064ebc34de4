"""Rewrites into the fused ops that the placed backend offers. A fused call carries the sequence that it stands for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from ..backend.v1 import Call, Value

Offers = Callable[[Call], bool]


def fuse(calls: Sequence[Call], offers: Offers) -> tuple[Call, ...]:
    """Fuse what ``offers`` accepts; the rest stays as it is."""
    fused = _linear_groups(tuple(calls), offers)
    fused = _residuals(fused, offers)
    return _add_norms(fused, offers)


def _uses(calls: Sequence[Call]) -> Counter[int]:
    return Counter(value.id for call in calls for value in call.inputs.values())


def _linear_groups(calls: tuple[Call, ...], offers: Offers) -> tuple[Call, ...]:
    """Several linears on one input, with nothing of theirs used in between, become one with several outputs."""
    result: list[Call] = []
    taken: set[int] = set()
    for i, call in enumerate(calls):
        if i in taken:
            continue
        if call.op == "linear":
            members = [i] + [
                j
                for j in range(i + 1, len(calls))
                if calls[j].op == "linear" and calls[j].inputs == call.inputs and calls[j].attrs == call.attrs
            ]
            group = _linear_group([calls[j] for j in members])
            if len(members) > 1 and offers(group):
                result.append(group)
                taken.update(members)
                continue
        result.append(call)
    return tuple(result)


def _linear_group(parts: list[Call]) -> Call:
    weights = {f"weight.{n}": part.weights["weight"] for n, part in enumerate(parts)}
    weights |= {f"bias.{n}": part.weights["bias"] for n, part in enumerate(parts) if "bias" in part.weights}
    outputs = tuple(part.outputs[0] for part in parts)
    return Call("linear_group", parts[0].inputs, outputs, weights, {}, parts[0].attrs, tuple(parts))


def _residuals(calls: tuple[Call, ...], offers: Offers) -> tuple[Call, ...]:
    """add(x, linear(h)) becomes linear(h, residual=x)."""
    uses = _uses(calls)
    made = {value.id: call for call in calls for value in call.outputs}
    replaced: dict[int, Call | None] = {}
    for call in calls:
        if call.op != "add":
            continue
        a, b = call.inputs["a"], call.inputs["b"]
        source = made.get(b.id)
        if source is None or source.op != "linear" or uses[b.id] != 1:
            continue
        one = Call(
            "linear", {**source.inputs, "residual": a}, call.outputs, source.weights, {}, source.attrs, (source, call)
        )
        if offers(one):
            replaced[id(source)] = None
            replaced[id(call)] = one
    kept = [replaced.get(id(call), call) for call in calls]
    return tuple(call for call in kept if call is not None)


def _add_norms(calls: tuple[Call, ...], offers: Offers) -> tuple[Call, ...]:
    """add followed by rms_norm of the sum becomes add_rms_norm with both outputs."""
    adds: dict[int, Call] = {call.outputs[0].id: call for call in calls if call.op == "add"}
    replaced: dict[int, Call | None] = {}
    for call in calls:
        if call.op != "rms_norm" or call.inputs["x"].id not in adds:
            continue
        add = adds.pop(call.inputs["x"].id)
        outputs: tuple[Value, ...] = (add.outputs[0], call.outputs[0])
        inputs = {"x": add.inputs["b"], "residual": add.inputs["a"]}
        one = Call("add_rms_norm", inputs, outputs, call.weights, {}, call.attrs, (add, call))
        if offers(one):
            replaced[id(call)] = None
            replaced[id(add)] = one
    kept = [replaced.get(id(call), call) for call in calls]
    return tuple(call for call in kept if call is not None)
