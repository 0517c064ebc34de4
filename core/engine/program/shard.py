"""Tensor parallelism as a rewrite: one program for all ranks, which differ in the parts of the weights that they hold.

A value is whole (the same on every rank), split (each rank has its columns of it) or partial (the ranks' values add up to
it). Projections to heads, feed-forward widths and the vocabulary give split values, those from them partial ones; what can
only be done with a whole value gets it by an ``all_reduce`` or ``all_gather``, as late as that is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..backend.v1 import Call, Value, WeightRef
from ..errors import ConfigError
from .build import Program
from .layers import layer_of_state
from .parts import column_part, entries, matrix_part, of_first_rank, row_part
from .split import Spans, Splits, layer_of, scaled
from .weights import ConstantWeight


def shard(program: Program, rank: int, ranks: int) -> Program:
    """The program of one rank of ``ranks``. ConfigError where the model's sizes cannot be shared by so many."""
    return program if ranks == 1 else _Sharder(program, rank, ranks).program()


@dataclass(frozen=True)
class _Local:
    """A value as this rank has it: the columns of ``spans``, or without them a summand."""

    value: Value
    spans: Spans | None

    @property
    def partial(self) -> bool:
        return self.spans is None


class _Sharder:
    def __init__(self, program: Program, rank: int, ranks: int) -> None:
        self._program = program
        self._rank, self._ranks = rank, ranks
        self._splits = Splits(program, ranks)
        self._count = program.values
        self._local: dict[int, _Local] = {}
        self._whole: set[int] = set()
        self._calls: list[Call] = []
        self._kv_heads: dict[int, int] = {}

    def program(self) -> Program:
        parts = (self._program.body, self._program.head, self._program.embedding)
        body, head, embedding = map(self._rewrite, parts)
        layers = tuple(
            replace(kv, kv_heads=self._kv_heads.get(kv.layer, kv.kv_heads)) for kv in self._program.kv_layers
        )
        found = replace(self._program, body=body, head=head, embedding=embedding)
        return replace(found, kv_layers=layers, values=self._count)

    def _rewrite(self, calls: Sequence[Call]) -> tuple[Call, ...]:
        self._calls = []
        for call in calls:
            _RULES.get(call.op, _Sharder._whole_inputs)(self, call)
        return tuple(self._calls)

    # -- values ----------------------------------------------------------------------------------------------------

    def _of(self, value: Value) -> _Local | None:
        """What this rank has of a value that is not whole everywhere."""
        return self._local.get(value.id)

    def _spans(self, *values: Value) -> Spans | None:
        """The spans of values that are all split alike, or None."""
        found = [self._of(value) for value in values]
        first = found[0]
        alike = first is not None and all(one is not None and one.spans == first.spans for one in found)
        return first.spans if first is not None and alike else None

    def _mine(self, value: Value) -> Value:
        local = self._of(value)
        return value if local is None else local.value

    def _all_of(self, value: Value, scope: str) -> Value:
        """The whole value, which is made where it is first wanted."""
        local = self._of(value)
        if local is None or value.id in self._whole:
            return value
        self._whole.add(value.id)
        if local.spans is not None and not _tile(local.spans):
            raise ConfigError(
                f"{value.name} is wanted whole, but its {value.shape[-1]} columns do not fall into {self._ranks} equal parts, one"
                " a rank; choose another tensor_parallel_size."
            )
        op = "all_reduce" if local.partial else "all_gather"
        self._calls.append(Call(op, {"x": local.value}, (value,), scope=scope))
        return value

    def _new(self, value: Value, spans: Spans | None) -> Value:
        """The value that this rank has of one that will be split by ``spans``, or partial."""
        self._count += 1
        shape = value.shape if spans is None else (*value.shape[:-1], self._width(spans))
        local = replace(value, id=self._count - 1, name=f"{value.name}.part", shape=shape)
        self._local[value.id] = _Local(local, spans)
        return local

    def _width(self, spans: Spans) -> int:
        return spans[self._rank][1] - spans[self._rank][0]

    def _emit(
        self,
        call: Call,
        spans: Spans | None,
        weights: Mapping[str, WeightRef] | None = None,
        attrs: Mapping[str, Any] | None = None,
    ) -> None:
        """A call with this rank's inputs, whose one output is split by ``spans``, or partial; its weights and attributes are
        as they were where none are given."""
        inputs = {name: self._mine(value) for name, value in call.inputs.items()}
        weights, attrs = call.weights if weights is None else weights, call.attrs if attrs is None else attrs
        outputs = (self._new(call.outputs[0], spans),)
        self._calls.append(replace(call, inputs=inputs, outputs=outputs, weights=weights, attrs=attrs))

    def _whole_inputs(self, call: Call) -> None:
        """What needs whole values and gives them, as most ops do."""
        inputs = {name: self._all_of(value, call.scope) for name, value in call.inputs.items()}
        self._calls.append(replace(call, inputs=inputs))

    # -- rules of ops ----------------------------------------------------------------------------------------------

    def _linear(self, call: Call) -> None:
        """By rows of the weight where they lie along an axis that is split; by columns where the input is."""
        weight, bias = call.weights["weight"], call.weights.get("bias")
        axes = self._program.axes.get(weight.name, ())
        spans = self._spans(call.inputs["x"])
        if spans is not None and axes and axes[-1] in _SPLIT:
            parts = {"weight": column_part(weight, spans[self._rank])}
            if bias is not None:
                parts["bias"] = of_first_rank(bias, self._rank)
            self._emit(call, None, weights=parts)
            return
        x = self._all_of(call.inputs["x"], call.scope)
        rows = self._splits.of_rows(call, axes[-2], weight.shape[-2]) if axes else None
        if rows is None:
            self._calls.append(replace(call, inputs={**call.inputs, "x": x}))
            return
        parts = {"weight": row_part(weight, rows[self._rank])}
        if bias is not None:
            parts["bias"] = entries(bias, rows[self._rank])
        inputs = {**call.inputs, "x": x}
        self._calls.append(replace(call, inputs=inputs, outputs=(self._new(call.outputs[0], rows),), weights=parts))

    def _elementwise(self, call: Call) -> None:
        spans = self._spans(*call.inputs.values())
        if spans is None:
            self._whole_inputs(call)
        else:
            self._emit(call, spans)

    def _add(self, call: Call) -> None:
        """The sum of two partial values is partial, so that both are reduced at once."""
        found = [self._of(value) for value in call.inputs.values()]
        if all(one is not None and one.partial for one in found):
            self._emit(call, None)
        else:
            self._elementwise(call)

    def _moe_combine(self, call: Call) -> None:
        local = self._of(call.inputs["y"])
        if local is None:
            self._whole_inputs(call)
        else:
            self._emit(call, local.spans)

    def _norm(self, call: Call) -> None:
        """A norm of heads needs the rank's own alone; one of a row needs all of it, and the rank goes on with its part."""
        spans = self._spans(call.inputs["x"])
        if spans is None:
            self._whole_inputs(call)
        elif call.attr("head_dim"):
            wide = {name: ref for name, ref in call.weights.items() if ref.shape[-1] > call.attr("head_dim")}
            mine = {name: entries(ref, spans[self._rank]) for name, ref in wide.items()}
            self._emit(call, spans, weights={**call.weights, **mine})
        else:
            self._whole_inputs(call)
            self._choose(call.outputs[0], spans, call.scope)

    def _choose(self, value: Value, spans: Spans, scope: str) -> None:
        """This rank's columns of a whole value."""
        self._whole.add(value.id)
        low, high = spans[self._rank]
        order = ConstantWeight(f"columns {low}:{high}", np.arange(low, high, dtype=np.float32))
        local = self._new(value, spans)
        self._calls.append(
            Call("gather_columns", {"x": value}, (local,), {"columns": order}, attrs={"chosen": True}, scope=scope)
        )

    def _rope(self, call: Call) -> None:
        spans = self._spans(call.inputs["x"])
        if spans is None:
            self._whole_inputs(call)
        else:
            self._emit(call, spans, attrs={**call.attrs, "heads": self._width(spans) // call.attr("head_dim")})

    def _kv_write(self, call: Call) -> None:
        spans = self._spans(call.inputs["new_k"])
        if spans is None:
            self._whole_inputs(call)
            return
        heads = self._width(spans) // call.attr("head_dim")
        self._kv_heads[layer_of_state(call.states["k"])] = heads
        inputs = {name: self._mine(value) for name, value in call.inputs.items()}
        self._calls.append(replace(call, inputs=inputs, attrs={**call.attrs, "kv_heads": heads}))

    def _attention(self, call: Call) -> None:
        if self._spans(call.inputs["q"]) is None:
            self._whole_inputs(call)
            return
        spans, _ = self._splits.heads(layer_of(call))
        width = call.attr("v_head_dim") or call.attr("head_dim")
        attrs = {**call.attrs, "heads": self._width(spans)}
        attrs["kv_heads"] = self._kv_heads.get(layer_of_state(call.states["k"]), call.attr("kv_heads"))
        sinks = {name: entries(ref, spans[self._rank]) for name, ref in call.weights.items()}
        self._emit(call, scaled(spans, width), attrs=attrs, weights=sinks)

    def _head_linear(self, call: Call) -> None:
        if self._spans(call.inputs["x"]) is None:
            self._whole_inputs(call)
            return
        spans, _ = self._splits.heads(layer_of(call))
        weight = call.weights["weight"]
        parts = {"weight": matrix_part(weight, spans[self._rank])}
        self._emit(call, scaled(spans, weight.shape[1]), weights=parts)

    def _concat_heads(self, call: Call) -> None:
        if any(self._spans(value) is None for value in call.inputs.values()):
            self._whole_inputs(call)
            return
        spans, _ = self._splits.heads(layer_of(call))
        width = int(call.outputs[0].shape[-1]) // call.attr("heads")
        self._emit(call, scaled(spans, width), attrs={**call.attrs, "heads": self._width(spans)})


_SPLIT = ("heads", "mlp")
"""Axes that activations are split along."""
_RULES: Mapping[str, Callable[[_Sharder, Call], None]] = {
    "linear": _Sharder._linear,
    "moe_linear": _Sharder._linear,
    "gated_act": _Sharder._elementwise,
    "scale_softcap": _Sharder._elementwise,
    "add": _Sharder._add,
    "moe_combine": _Sharder._moe_combine,
    "rms_norm": _Sharder._norm,
    "layer_norm": _Sharder._norm,
    "rope": _Sharder._rope,
    "kv_write": _Sharder._kv_write,
    "attention": _Sharder._attention,
    "head_linear": _Sharder._head_linear,
    "concat_heads": _Sharder._concat_heads,
}


def _tile(spans: Spans) -> bool:
    """Whether ranks have parts of one width, each its own."""
    return len({high - low for low, high in spans}) == 1 and len(set(spans)) == len(spans)
