"""The builder that model files are written against, and the program that it leaves: a flat list of op calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..backend.v1 import Array, Call, Value, WeightRef
from ..errors import ModelError
from ..kv import CacheGroup
from .experts import Experts
from .layers import KVLayer, RecurrentLayer
from .record import Recorder
from .weights import ConstantWeight, input_spec


@dataclass(frozen=True)
class Program:
    """``body`` ends in hidden rows; ``head`` is the output projection, logits processing and sampling. ``embedding`` gives
    hidden rows of the body to the host, after the final norm; it runs in steps that have such rows alone."""

    body: tuple[Call, ...]
    head: tuple[Call, ...]
    embedding: tuple[Call, ...]
    inputs: tuple[Value, ...]
    kv_layers: tuple[KVLayer, ...]
    recurrent_layers: tuple[RecurrentLayer, ...]
    groups: tuple[CacheGroup, ...]
    hidden: int
    vocab: int
    values: int
    """How many value ids are in use."""
    kv_dtype: str
    axes: Mapping[str, tuple[str | None, ...]] = field(default_factory=dict)
    """Logical axes of each weight by name, for sharding."""

    @property
    def calls(self) -> tuple[Call, ...]:
        return self.body + self.head + self.embedding


class Builder(Recorder):
    """Records op calls. One instance builds one program; ``groups`` and ``kv_dtype`` are the session's, and so is
    ``contiguous``: the entries of each page table are consecutive."""

    def __init__(self, groups: Sequence[CacheGroup], kv_dtype: str, vocab: int, contiguous: bool = False) -> None:
        super().__init__(groups, vocab)
        self._contiguous = contiguous
        self._kv_dtype = kv_dtype
        self._ordered: dict[tuple[int, bytes], Value] = {}
        self._kv_layers: list[KVLayer] = []
        self._recurrent_layers: list[RecurrentLayer] = []
        self._body_end: int | None = None
        self._hidden = 0
        self._expand()

    # -- the step's beginning --------------------------------------------------------------------------------------

    def _expand(self) -> None:
        names = ["token_ids", "seq_slots", "seq_starts", "query_offsets"]
        names += ["history_copies", "fill_slots", "fill_positions", "fill_ids"]
        inputs = {name: self.input(name) for name in names}
        inputs |= {f"page_table.{g}": self.input(f"page_table.{g}") for g in range(len(self._groups))}
        outputs: list[tuple[str, tuple[int | str, ...], str]] = [
            ("ids", ("T",), "i32"),
            ("positions", ("T",), "i32"),
            ("token_seq", ("T",), "i32"),
        ]
        outputs += [(f"kv_slots.{g}", ("T",), "i32") for g in range(len(self._groups))]
        sizes = tuple(group.block_size for group in self._groups)
        found = self.call("step_expand", inputs, outputs, states={"history": "history"}, block_sizes=sizes)
        self.ids, self.positions, self.token_seq = found[:3]
        self.kv_slots = found[3:]

    # -- ops -------------------------------------------------------------------------------------------------------

    def embed(self, weight: WeightRef, scale: float = 1.0) -> Value:
        self._needs(weight, (self._vocab, weight.shape[-1]))
        self.name_axes(weight, "vocab", "embed")
        if input_spec(weight).columns is not None:
            raise ModelError(f"{weight.name} has its columns in another order (act-order); an embedding cannot.")
        d = weight.shape[-1]
        return self.call("embed", {"ids": self.ids}, [("x", ("T", d), "residual")], {"weight": weight}, scale=scale)[0]

    def embed_positions(self, weight: WeightRef) -> Value:
        """Learned positions: row p of the table [context, d] for a token at position p."""
        d = weight.shape[-1]
        self.name_axes(weight, None, "embed")
        return self.call("embed", {"ids": self.positions}, [("pos", ("T", d), "residual")], {"weight": weight})[0]

    def linear(
        self, x: Value, weight: WeightRef, bias: WeightRef | None = None, axes: tuple[str | None, ...] = ()
    ) -> Value:
        """x [rows, K] times weight [N, K] transposed, plus bias [N]."""
        n = weight.shape[0]
        self._needs(weight, (n, x.shape[-1]))
        if bias is not None:
            self._needs(bias, (n,))
        if axes:
            self.name_axes(weight, *axes)
        spec = input_spec(weight)
        if spec.columns is not None:
            x = self.gather_columns(x, weight.name, spec.columns)
        out = [(weight.name.removesuffix(".weight"), (x.shape[0], n), "act")]
        asked: dict[str, Any] = {"quantized_activation": spec.quantized, "input_scale": spec.scale}
        return self.call("linear", {"x": x}, out, {"weight": weight, "bias": bias}, **asked)[0]

    def gather_columns(self, x: Value, name: str, columns: Array) -> Value:
        """x with its columns in another order, once for all weights that ask for the same."""
        key = (x.id, columns.tobytes())
        if key not in self._ordered:
            order = {"columns": self.constant(f"{name}.columns", columns)}
            out = [(f"{x.name}.ordered", x.shape, "act")]
            self._ordered[key] = self.call("gather_columns", {"x": x}, out, order)[0]
        return self._ordered[key]

    def columns(self, x: Value, low: int, high: int) -> Value:
        """Those from ``low`` to ``high`` - 1 of x [rows, K]: [rows, high - low]."""
        order = {"columns": self.constant(f"columns.{low}.{high}", np.arange(low, high))}
        out = [(f"{x.name}.columns", (x.shape[0], high - low), "act")]
        return self.call("gather_columns", {"x": x}, out, order, chosen=True)[0]

    def scaled(self, x: Value, factor: float) -> Value:
        if factor == 1:
            return x
        out = [(f"{x.name}.scaled", x.shape, x.dtype)]
        return self.call("scale_softcap", {"x": x}, out, scale=factor)[0]

    def rms_norm(
        self,
        x: Value,
        weight: WeightRef,
        eps: float,
        head_dim: int = 0,
        weight_offset: float = 0.0,
        wide_weight: bool = False,
    ) -> Value:
        """Over the row, or over each head_dim slice of it, whose weight all slices share unless it is as wide as the row."""
        self._needs(weight, (x.shape[-1] if wide_weight else head_dim or x.shape[-1],))
        out = [(weight.name.removesuffix(".weight"), x.shape, "act")]
        attrs: dict[str, Any] = {"eps": eps, "head_dim": head_dim, "weight_offset": weight_offset}
        attrs["wide_weight"] = wide_weight
        return self.call("rms_norm", {"x": x}, out, {"weight": weight}, **attrs)[0]

    def layer_norm(self, x: Value, weight: WeightRef, bias: WeightRef | None, eps: float, head_dim: int = 0) -> Value:
        """Over the row, or over each head_dim slice of it; the weight is as wide as the row."""
        self._needs(weight, (x.shape[-1],))
        if bias is not None:
            self._needs(bias, (x.shape[-1],))
        out = [(weight.name.removesuffix(".weight"), x.shape, "act")]
        return self.call("layer_norm", {"x": x}, out, {"weight": weight, "bias": bias}, eps=eps, head_dim=head_dim)[0]

    def rope(
        self, x: Value, inv_freq: ConstantWeight, heads: int, head_dim: int, interleaved: bool, scale: float
    ) -> Value:
        _of_width(x, heads * head_dim)
        rotary = 2 * inv_freq.shape[0]
        attrs: dict[str, Any] = {"heads": heads, "head_dim": head_dim, "interleaved": interleaved, "scale": scale}
        attrs["rotary_dim"] = 0 if rotary == head_dim else rotary
        inputs = {"x": x, "positions": self.positions}
        return self.call("rope", inputs, [(f"{x.name}.rope", x.shape, "act")], {"inv_freq": inv_freq}, **attrs)[0]

    def scaled_by_position(self, x: Value, factors: ConstantWeight) -> Value:
        """Each row of x times the factor of its position, of a table [context, 1]: the only choice of a route."""
        inputs = {"ids": self.positions}
        factor = self.call("embed", inputs, [("position_factor", ("T", 1), "f32")], {"weight": factors})[0]
        out = [(f"{x.name}.scaled", x.shape, "act")]
        return self.call("moe_combine", {"y": x, "weights": factor}, out)[0]

    def gated_act(self, gate: Value, up: Value | None, kind: str, **attrs: Any) -> Value:
        if up is not None:
            _of_width(up, gate.shape[-1])
        out = [(f"{gate.name}.act", gate.shape, "act")]
        return self.call("gated_act", {"gate": gate, "up": up}, out, kind=kind, **attrs)[0]

    def add(self, a: Value, b: Value) -> Value:
        _of_width(b, a.shape[-1])
        return self.call("add", {"a": a, "b": b}, [(f"{b.name}.sum", a.shape, "residual")])[0]

    def kv_write(self, layer: int, k: Value, v: Value | None, kv_heads: int, head_dim: int) -> None:
        """Without v the cache is latent: attention takes its values from the keys."""
        group = self._group_of(layer)
        _of_width(k, kv_heads * head_dim)
        if v is not None:
            _of_width(v, kv_heads * head_dim)
        kv = KVLayer(layer, group, kv_heads, head_dim, latent=v is None)
        self._kv_layers.append(kv)
        inputs = {"new_k": k, "new_v": v, "kv_slots": self.kv_slots[group]}
        states = kv.states(self._kv_dtype)
        self.call("kv_write", inputs, [], states=states, kv_heads=kv_heads, head_dim=head_dim, latent=kv.latent)

    def attention(
        self,
        q: Value,
        layer: int,
        heads: int,
        scale: float,
        sinks: WeightRef | None = None,
        v_head_dim: int = 0,
        **features: Any,
    ) -> Value:
        """Reads only the cache, this step's tokens included. sinks [heads]. ``v_head_dim``: the width of values, which a
        latent cache needs. Features: window, softcap, causal."""
        kv = next(kv for kv in self._kv_layers if kv.layer == layer)
        kept = self._groups[kv.group].window
        if kept is not None and not 0 < features.get("window", 0) <= kept:
            raise ModelError(f"Layer {layer} attends beyond the window of {kept} tokens that its cache group keeps.")
        _of_width(q, heads * kv.head_dim)
        if kv.latent != (0 < v_head_dim <= kv.head_dim):
            raise ModelError(
                f"Values of {v_head_dim} columns, and keys of {kv.head_dim}: a latent cache needs values as wide as its keys at"
                " most, and another takes none."
            )
        inputs = {"q": q, **self._place(kv.group)}
        attrs = {"heads": heads, "kv_heads": kv.kv_heads, "head_dim": kv.head_dim, "scale": scale, **features}
        attrs |= {"v_head_dim": v_head_dim, "block_size": self._groups[kv.group].block_size}
        attrs["contiguous"] = self._contiguous
        if sinks is not None:
            self._needs(sinks, (heads,))
            self.name_axes(sinks, "heads")
        out = [(f"attention.{layer}", ("T", heads * (v_head_dim or kv.head_dim)), "act")]
        return self.call("attention", inputs, out, {"sinks": sinks}, kv.states(self._kv_dtype), **attrs)[0]

    def causal_conv(
        self,
        layer: int,
        x: Value,
        weight: WeightRef,
        bias: WeightRef | None = None,
        act: str = "silu",
        memory: tuple[int, int, int] | None = None,
    ) -> Value:
        """A filter of each column along its sequence, weight [columns, width], plus bias [columns], and ``act`` of it. The
        layer's memory, which has one of the shape ``memory``, too, follows its cache group."""
        columns, width, group = int(x.shape[-1]), weight.shape[-1], self._group_of(layer)
        self._needs(weight, (columns, width))
        if bias is not None:
            self._needs(bias, (columns,))
        own = RecurrentLayer(layer, group, {"tail": (width - 1, columns)} | ({"memory": memory} if memory else {}))
        self._recurrent_layers.append(own)
        out, states = [(f"{x.name}.conv", x.shape, "act")], {"tail": own.state("tail")}
        size, inputs = self._groups[group].block_size, {"x": x, **self._place(group)}
        vectors = {"weight": weight, "bias": bias}
        return self.call("causal_conv", inputs, out, vectors, states, block_size=size, act=act)[0]

    def gated_delta(
        self,
        layer: int,
        qkv: Value,
        decay: Value,
        beta: Value,
        weights: Mapping[str, WeightRef],
        key_heads: int,
        value_heads: int,
        key_dim: int,
        value_dim: int,
    ) -> Value:
        """A causal convolution of qkv by ``conv`` [columns, width], then the gated delta rule with ``rate`` and ``bias``
        [value_heads]: [T, value_heads * value_dim]. The layer's memory follows its cache group."""
        _of_width(qkv, 2 * key_heads * key_dim + value_heads * value_dim)
        for name in ("rate", "bias"):
            self._needs(weights[name], (value_heads,))
        mixed = self.causal_conv(layer, qkv, weights["conv"], memory=(value_heads, key_dim, value_dim))
        own = self._recurrent_layers[-1]
        attrs = {"key_heads": key_heads, "value_heads": value_heads, "key_dim": key_dim, "value_dim": value_dim}
        attrs["block_size"] = self._groups[own.group].block_size
        gates = {"rate": weights["rate"], "bias": weights["bias"]}
        inputs = {"qkv": mixed, "decay": decay, "beta": beta, **self._place(own.group)}
        out = [(f"delta.{layer}", ("T", value_heads * value_dim), "act")]
        return self.call("gated_delta", inputs, out, gates, {"memory": own.state("memory")}, **attrs)[0]

    def ssm_scan(
        self,
        layer: int,
        xbc: Value,
        dt: Value,
        weights: Mapping[str, WeightRef],
        heads: int,
        groups: int,
        state_dim: int,
        head_dim: int,
    ) -> Value:
        """A causal convolution of x, B and C by ``conv`` [columns, width] and, if there is one, ``conv_bias``, then the scan
        with ``rate``, ``bias`` and ``skip`` [heads]: [T, heads * head_dim]. The layer's memory follows its cache group."""
        _of_width(xbc, heads * head_dim + 2 * groups * state_dim)
        _of_width(dt, heads)
        vectors = {name: weights[name] for name in ("rate", "bias", "skip")}
        for vector in vectors.values():
            self._needs(vector, (heads,))
        memory = (heads, state_dim, head_dim)
        mixed = self.causal_conv(layer, xbc, weights["conv"], weights.get("conv_bias"), memory=memory)
        own = self._recurrent_layers[-1]
        attrs = {"heads": heads, "groups": groups, "state_dim": state_dim, "head_dim": head_dim}
        attrs["block_size"] = self._groups[own.group].block_size
        inputs = {"xbc": mixed, "dt": dt, **self._place(own.group)}
        out = [(f"scan.{layer}", ("T", heads * head_dim), "act")]
        return self.call("ssm_scan", inputs, out, vectors, {"memory": own.state("memory")}, **attrs)[0]

    def head_linear(self, x: Value, weight: WeightRef, heads: int, n: int) -> Value:
        """Each head of x [T, heads * K] times its matrix of the weight [heads, n, K] transposed."""
        self._needs(weight, (heads, n, int(x.shape[-1]) // heads))
        self.name_axes(weight, "heads", None, None)
        out = [(weight.name.removesuffix(".weight"), (x.shape[0], heads * n), "act")]
        return self.call("head_linear", {"x": x}, out, {"weight": weight})[0]

    def concat_heads(self, a: Value, b: Value, heads: int) -> Value:
        """Head by head, a and then b."""
        out = [(f"{a.name}.concat", (a.shape[0], int(a.shape[-1]) + int(b.shape[-1])), "act")]
        return self.call("concat_heads", {"a": a, "b": b}, out, heads=heads)[0]

    def moe(
        self,
        x: Value,
        router: WeightRef,
        router_bias: WeightRef | None,
        experts: Experts,
        used: int,
        correction_bias: WeightRef | None = None,
        expert_scale: WeightRef | None = None,
        routed_by: Value | None = None,
        **routing: Any,
    ) -> Value:
        """Route each token to ``used`` experts; gated activation within each; weighted sum in the order of choice. The router
        reads ``routed_by``, or x."""
        read = x if routed_by is None else routed_by
        count, width, mlp = experts.up.shape[0], x.shape[-1], experts.up.shape[1]
        self._needs(router, (count, read.shape[-1]))
        for weight in (experts.up, experts.gate or experts.up):
            self._needs(weight, (count, mlp, width))
        self._needs(experts.down, (count, width, mlp))
        logits = self.linear(read, router, router_bias, axes=("experts", "embed"))
        name = router.name.removesuffix(".weight")
        outs = [(f"{name}.ids", ("T", used), "i32"), (f"{name}.weights", ("T", used), "f32")]
        vectors = {"correction_bias": correction_bias, "expert_scale": expert_scale}
        for vector in vectors.values():
            if vector is not None:
                self._needs(vector, (count,))
        ids, weights = self.call("moe_route", {"logits": logits}, outs, vectors, k=used, **routing)
        around = self._scope
        self._scope = f"{around}.experts"
        gate = None
        if experts.gate is not None:
            gate = self._moe_linear(x, ids, experts.gate, experts.gate_bias, ("mlp", "embed"), per_choice=False)
        up = self._moe_linear(x, ids, experts.up, experts.up_bias, ("mlp", "embed"), per_choice=False)
        act = self.gated_act(gate or up, up, **experts.act)
        down = self._moe_linear(act, ids, experts.down, experts.down_bias, ("embed", "mlp"), per_choice=True)
        out = [("moe_out", x.shape, "act")]
        combined = self.call("moe_combine", {"y": down, "weights": weights}, out)[0]
        self._scope = around
        return combined

    def gated_by(self, y: Value, x: Value, gate: WeightRef) -> Value:
        """y times the sigmoid of one logit a token, x times gate [1, d]: what a route to a single expert gives."""
        self._needs(gate, (1, x.shape[-1]))
        logits = self.linear(x, gate, axes=(None, "embed"))
        outs = [("gate_id", ("T", 1), "i32"), ("gate_weight", ("T", 1), "f32")]
        routing: dict[str, Any] = {"k": 1, "score": "sigmoid", "renormalize": False}
        weights = self.call("moe_route", {"logits": logits}, outs, **routing)[1]
        return self.call("moe_combine", {"y": y, "weights": weights}, [(f"{y.name}.gated", y.shape, "act")])[0]

    def _moe_linear(
        self,
        x: Value,
        ids: Value,
        weight: WeightRef,
        bias: WeightRef | None,
        axes: tuple[str, str],
        per_choice: bool,
    ) -> Value:
        n, rows = weight.shape[1], f"T*{ids.shape[1]}"
        if input_spec(weight).scale:
            raise ModelError(
                f"{weight.name} has a static activation scale, which is supported for single matrices only."
            )
        self.name_axes(weight, "experts", *axes)
        if bias is not None:
            self._needs(bias, weight.shape[:2])
        out = [(weight.name.removesuffix(".weight"), (rows, n), "act")]
        weights = {"weight": weight, "bias": bias}
        return self.call("moe_linear", {"x": x, "ids": ids}, out, weights, per_choice=per_choice)[0]

    # -- the step's end --------------------------------------------------------------------------------------------

    def finish(
        self,
        x: Value,
        lm_head: WeightRef,
        logit_scale: float = 1.0,
        logit_softcap: float = 0.0,
        bias: WeightRef | None = None,
    ) -> Program:
        """Gather the rows that are wanted, project them to the vocabulary, add a bias, scale and cap, process and sample."""
        self._hidden = int(x.shape[-1])
        rows = self.input("rows")
        hidden = self.call("gather_rows", {"x": x, "rows": rows}, [("hidden", ("R", self._hidden), "act")])[0]
        self._body_end = len(self._calls)
        self._scope = "head"
        self._needs(lm_head, (self._vocab, self._hidden))
        logits = self.linear(hidden, lm_head, bias, axes=("vocab", "embed"))
        if logit_scale != 1.0 or logit_softcap:
            out = [("logits", logits.shape, "act")]
            logits = self.call("scale_softcap", {"x": logits}, out, scale=logit_scale, softcap=logit_softcap)[0]
        self._sample(Value(logits.id, "logits", logits.shape, logits.dtype))
        head_end = len(self._calls)
        self._scope = ""
        chosen = {"x": x, "rows": self.input("embedding_rows")}
        self.call("gather_rows", chosen, [("embeddings", ("R", self._hidden), "act")])
        copies = self._kv_copies()
        return Program(
            body=(self._calls[0], *copies, *self._calls[1 : self._body_end]),
            head=tuple(self._calls[self._body_end : head_end]),
            embedding=tuple(self._calls[head_end:]),
            inputs=tuple(self._inputs.values()),
            kv_layers=tuple(self._kv_layers),
            recurrent_layers=tuple(self._recurrent_layers),
            groups=self._groups,
            hidden=self._hidden,
            vocab=self._vocab,
            values=self._count,
            kv_dtype=self._kv_dtype,
            axes=self._axes,
        )

    def _sample(self, logits: Value) -> None:
        last = self._calls[-1]
        self._calls[-1] = replace(last, outputs=(logits,))
        shared = {"rows": self.input("rows"), "positions": self.positions, "token_seq": self.token_seq}
        shared |= {name: self.input(name) for name in ("seq_slots", "temperature")}
        names = ["prompt_lengths", "top_k", "top_p", "min_p"]
        names += ["repetition_penalty", "frequency_penalty", "presence_penalty"]
        names += ["bias_offsets", "bias_ids", "bias_values", "mask_rows", "masks"]
        names += ["typical_p", "no_repeat_ngram_size", "candidates"]
        processing = {"logits": logits, **shared, **{name: self.input(name) for name in names}}
        out = [("processed", logits.shape, "f32")]
        processed = self.call("process_logits", processing, out, states={"history": "history"})[0]
        sampling = {"processed": processed, "logits": logits, **shared}
        sampling |= {name: self.input(name) for name in ("seeds", "branches", "want_logprobs", "candidates", "targets")}
        outputs: list[tuple[str, tuple[int | str, ...], str]] = [
            ("tokens", ("R",), "i32"),
            ("status", ("R",), "i32"),
            ("logprob", ("R",), "f32"),
            ("top_ids", ("R", "K"), "i32"),
            ("top_logprobs", ("R", "K"), "f32"),
        ]
        self.call("sample", sampling, outputs, states={"history": "history"})

    def _kv_copies(self) -> list[Call]:
        """One call a cache group, over the states of all its layers."""
        copies = []
        for group in range(len(self._groups)):
            layers = [kv for kv in self._kv_layers if kv.group == group]
            names = [name for kv in layers for name in kv.states(self._kv_dtype).values()]
            own = [one for one in self._recurrent_layers if one.group == group]
            names += [one.state(kind) for one in own for kind in one.shapes]
            states = {f"states.{n}": name for n, name in enumerate(names)}
            copies.append(Call("kv_copy", {"block_copies": self.input(f"block_copies.{group}")}, (), {}, states))
        return copies


def _of_width(value: Value, width: int | str) -> None:
    if value.shape[-1] != width:
        raise ModelError(
            f"{value.name} has {value.shape[-1]} values a token where {width} are needed; the checkpoint is inconsistent."
        )
