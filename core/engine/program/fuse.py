"""Rewrites into the fused ops that the placed backend offers. A fused call carries the sequence that it stands for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ..backend.v1 import Call, Value

Offers = Callable[[Call], bool]


def fuse(calls: Sequence[Call], offers: Offers) -> tuple[Call, ...]:
    """Fuse what ``offers`` accepts; the rest stays as it is."""
    fused = _groups("linear", tuple(calls), offers)
    fused = _groups("moe_linear", fused, offers)
    fused = _residuals(fused, offers)
    fused = _add_norms(fused, offers)
    return _rope_writes(fused, offers)


def _uses(calls: Sequence[Call]) -> Counter[int]:
    return Counter(value.id for call in calls for value in call.inputs.values())


def _with(calls: Sequence[Call], replaced: Mapping[int, Call | None]) -> tuple[Call, ...]:
    """The calls, those replaced that are there by their ``id``, or left out where that is None."""
    kept = (replaced.get(id(call), call) for call in calls)
    return tuple(call for call in kept if call is not None)


def _groups(op: str, calls: tuple[Call, ...], offers: Offers) -> tuple[Call, ...]:
    """Linears (of experts) on one input, with nothing of theirs used in between, become one with several outputs: as many
    with the first as are offered together, then those that are left."""
    result: list[Call] = []
    taken: set[int] = set()
    for i, call in enumerate(calls):
        if i in taken:
            continue
        members = [i]
        if call.op == op:
            for j in range(i + 1, len(calls)):
                if j in taken or calls[j].op != op or calls[j].inputs != call.inputs or calls[j].attrs != call.attrs:
                    continue
                if offers(_group([calls[n] for n in (*members, j)])):
                    members.append(j)
        taken.update(members)
        result.append(_group([calls[n] for n in members]) if len(members) > 1 else call)
    return tuple(result)


def _group(parts: list[Call]) -> Call:
    weights = {f"weight.{n}": part.weights["weight"] for n, part in enumerate(parts)}
    weights |= {f"bias.{n}": part.weights["bias"] for n, part in enumerate(parts) if "bias" in part.weights}
    outputs = tuple(part.outputs[0] for part in parts)
    return replace(parts[0], op=f"{parts[0].op}_group", outputs=outputs, weights=weights, parts=tuple(parts))


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
        inputs = {**source.inputs, "residual": a}
        one = replace(source, inputs=inputs, outputs=call.outputs, parts=(source, call))
        if offers(one):
            replaced[id(source)] = None
            replaced[id(call)] = one
    return _with(calls, replaced)


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
        one = replace(call, op="add_rms_norm", inputs=inputs, outputs=outputs, parts=(add, call))
        if offers(one):
            replaced[id(call)] = None
            replaced[id(add)] = one
    return _with(calls, replaced)


def _rope_writes(calls: tuple[Call, ...], offers: Offers) -> tuple[Call, ...]:
    """rope of q and of k and kv_write become rope_kv_write, with the RMS norms of heads where both come through one."""
    uses = _uses(calls)
    made = {value.id: call for call in calls for value in call.outputs}
    places = {id(call): n for n, call in enumerate(calls)}
    # the first reader of a cache is the layer that writes it
    readers = {call.states["k"]: call for call in reversed(calls) if call.op == "attention"}
    replaced: dict[int, Call | None] = {}
    for write in calls:
        if write.op != "kv_write" or "new_v" not in write.inputs or write.states["k"] not in readers:
            continue
        turned = (readers[write.states["k"]].inputs["q"], write.inputs["new_k"])
        ropes = _pair(made, uses, turned, "rope")
        if ropes is None or any(places[id(rope)] > places[id(write)] for rope in ropes):
            continue
        if ropes[0].weights["inv_freq"] is not ropes[1].weights["inv_freq"]:
            continue
        norms = _pair(made, uses, (ropes[0].inputs["x"], ropes[1].inputs["x"]), "rms_norm") or ()
        if norms and norms[0].attrs.get("head_dim") != write.attrs["head_dim"]:
            norms = ()
        one = _rope_write(norms, ropes, write)
        if offers(one):
            replaced |= {id(part): None for part in one.parts} | {id(write): one}
    return _with(calls, replaced)


def _pair(
    made: Mapping[int, Call], uses: Counter[int], values: tuple[Value, Value], op: str
) -> tuple[Call, Call] | None:
    """The calls of one op that make two values, if nothing else reads those and the calls differ in x and heads alone."""
    a, b = made.get(values[0].id), made.get(values[1].id)
    if a is None or b is None or a.op != op or b.op != op or any(uses[value.id] != 1 for value in values):
        return None
    attrs = [{name: value for name, value in call.attrs.items() if name != "heads"} for call in (a, b)]
    inputs = [{name: value.id for name, value in call.inputs.items() if name != "x"} for call in (a, b)]
    return (a, b) if attrs[0] == attrs[1] and inputs[0] == inputs[1] else None


def _rope_write(norms: tuple[Call, ...], ropes: tuple[Call, Call], write: Call) -> Call:
    q, k = (call.inputs["x"] for call in norms or ropes)
    inputs = {"q": q, "new_k": k, "positions": ropes[0].inputs["positions"]}
    inputs |= {name: write.inputs[name] for name in ("new_v", "kv_slots")}
    attrs = {**write.attrs, **ropes[0].attrs}
    weights = dict(ropes[0].weights)
    if norms:
        attrs |= {name: value for name, value in norms[0].attrs.items() if name != "head_dim"}
        weights |= {"q_norm": norms[0].weights["weight"], "k_norm": norms[1].weights["weight"]}
    return replace(
        write,
        op="rope_kv_write",
        inputs=inputs,
        outputs=ropes[0].outputs,
        weights=weights,
        attrs=attrs,
        parts=(*norms, *ropes, write),
    )
