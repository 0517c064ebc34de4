"""What the decoder-only families share: the configuration read from either format, and the blocks of a layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, TypeVar

import numpy as np

from ..backend.v1 import Array, Value, WeightRef
from ..errors import ModelError
from ..program.build import Builder, Program
from ..program.experts import Experts, expert_rows, turned_experts
from ..program.weights import ConstantWeight, row_matrix, select
from .rope import Rope
from .weights import Weights

QKNorm = Literal["none", "head", "rotated head", "row", "each head"]
"""Norms of q and k: RMS norms with one weight for all heads, before the rotary embedding or behind it, or with a weight for the
whole row, or layer norms of each head with a weight of its own."""


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes of a decoder in the field's terms; ``experts`` is 0 for a dense model. ``may_tie``: a head that is missing is
    the embedding table."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    eps: float
    rope: Rope | None
    max_context: int
    experts: int = 0
    experts_used: int = 0
    renormalize: bool = True
    may_tie: bool = True
    act: str = "silu"
    windows: tuple[int, ...] = ()
    """A layer's sliding window, 0 for none; empty when no layer has one."""
    local_rope: Rope | None = None
    """The rotary embedding of layers with a window, where it is another; without ``rope`` they alone have one."""
    without_rope: tuple[int, ...] = ()
    """Layers without a rotary embedding where the others have one."""
    attention_scale: float | None = None
    """None: 1 / sqrt(head_dim)."""
    query_growth: float = 0.0
    query_span: int = 1
    """A query at position p is multiplied by 1 + query_growth * log(1 + p // query_span), as in Llama 4."""
    attention_softcap: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    """Of what attention and feed-forward add to the residual."""
    norm_offset: float = 0.0
    """Added to the weights of norms."""
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
    logit_scale: float = 1.0
    logit_softcap: float = 0.0
    parallel_residual: bool = False
    """Attention and feed-forward both read the layer's input."""
    cache: Literal["full", "latent"] = "full"
    """The kind of the layers' cache group."""
    recurrent: tuple[int, ...] = ()
    """Layers with a memory that does not grow with the tokens, and no KV cache."""
    recurrent_attends: bool = False
    """These have attention and its cache, too."""
    causal: bool = True
    """Otherwise it is an encoder: a token sees all of its text, which one step computes whole, and nothing is generated."""
    second_text: int = 0
    """What is added to the ids of a second text's tokens, where these have vectors of their own; else 0."""
    norm_after: bool = False
    """Layer norms follow each residual sum; otherwise they precede attention and feed-forward."""

    def window(self, layer: int) -> int:
        return self.windows[layer] if self.windows else 0


Config = TypeVar("Config", bound=DecoderConfig)


def attention_block(
    b: Builder,
    c: DecoderConfig,
    w: Weights,
    i: int,
    h: Value,
    qk_norm: QKNorm = "none",
    sinks: WeightRef | None = None,
    gate: Value | None = None,
) -> Value:
    """Projections, optional norms of q and k, then ``attend``."""
    p = f"blk.{i}."
    q = b.linear(h, w(p + "attn_q.weight"), w.maybe(p + "attn_q.bias"), axes=("heads", "embed"))
    k = b.linear(h, w(p + "attn_k.weight"), w.maybe(p + "attn_k.bias"), axes=("kv_heads", "embed"))
    v = b.linear(h, w(p + "attn_v.weight"), w.maybe(p + "attn_v.bias"), axes=("kv_heads", "embed"))
    if qk_norm == "each head":
        q, k = (_layer_norm_heads(b, c, w, f"{p}attn_{part}_norm.weight", x) for part, x in (("q", q), ("k", k)))
    elif qk_norm in ("head", "row"):
        width = c.head_dim if qk_norm == "head" else 0
        q = b.rms_norm(q, w(p + "attn_q_norm.weight"), c.eps, width, c.norm_offset)
        k = b.rms_norm(k, w(p + "attn_k_norm.weight"), c.eps, width, c.norm_offset)
    return attend(b, c, w, i, q, k, v, sinks, gate, norms=qk_norm == "rotated head")


def _layer_norm_heads(b: Builder, c: DecoderConfig, w: Weights, name: str, x: Value) -> Value:
    """The file's weight is [heads, head_dim]."""
    weight = w(name)
    flat = ConstantWeight(weight.name, weight.dense().reshape(-1))
    return b.layer_norm(x, flat, None, c.eps, c.head_dim)


def fused_attention_block(b: Builder, c: DecoderConfig, w: Weights, i: int, h: Value) -> Value:
    """``attention_block`` of a checkpoint that keeps the rows of q, k and v in one matrix, in this order."""
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    parts = {"q": slice(0, q), "k": slice(q, q + kv), "v": slice(q + kv, q + 2 * kv)}
    return split_attention_block(b, c, w, i, h, parts)


def grouped_attention_block(b: Builder, c: DecoderConfig, w: Weights, i: int, h: Value) -> Value:
    """``attention_block`` of a checkpoint whose one matrix has, for each KV head, its query heads, its k and its v."""
    share = c.heads // c.kv_heads
    order = np.arange((c.heads + 2 * c.kv_heads) * c.head_dim).reshape(c.kv_heads, share + 2, c.head_dim)
    parts = {"q": order[:, :share].reshape(-1), "k": order[:, share].reshape(-1), "v": order[:, -1].reshape(-1)}
    return split_attention_block(b, c, w, i, h, parts)


def split_attention_block(
    b: Builder, c: DecoderConfig, w: Weights, i: int, h: Value, parts: Mapping[str, slice | Array]
) -> Value:
    """``attend`` with q, k and v from the given rows of the one projection attn_qkv."""
    weight, bias = w(f"blk.{i}.attn_qkv.weight"), w.maybe(f"blk.{i}.attn_qkv.bias")
    found = []
    for part, rows in parts.items():
        name = f"blk.{i}.attn_{part}"
        own_bias = None if bias is None else select(name + ".bias", bias, rows)
        axes = ("heads" if part == "q" else "kv_heads", "embed")
        found.append(b.linear(h, select(name + ".weight", weight, rows), own_bias, axes=axes))
    return attend(b, c, w, i, found[0], found[1], found[2])


def grown(b: Builder, c: DecoderConfig, q: Value) -> Value:
    """Queries with the growth that their positions give them, where there is one."""
    if not c.query_growth:
        return q
    return b.scaled_by_position(
        q, b.constant("query_factors", _query_factors(c.query_growth, c.query_span, c.max_context))
    )


@lru_cache(maxsize=1)
def _query_factors(growth: float, span: int, context: int) -> Array:
    """f32 [context, 1], the same for all layers."""
    factors = 1 + growth * np.log(1 + np.arange(context) // span)
    return factors.astype(np.float32)[:, None]


def attend(
    b: Builder,
    c: DecoderConfig,
    w: Weights,
    i: int,
    q: Value,
    k: Value | None,
    v: Value | None,
    sinks: WeightRef | None = None,
    gate: Value | None = None,
    source: int | None = None,
    norms: bool = False,
) -> Value:
    """Rotary embedding if there is one, norms of each head if ``norms``, cache write, attention, a gate's sigmoid if there is
    one, output projection. Without k and v the layer reads the cache of ``source``, an earlier one."""
    window = c.window(i)
    local = window > 0 and c.local_rope is not None
    rope = c.local_rope if local else c.rope
    if rope is not None and i not in c.without_rope:
        inv_freq = b.constant("rope_local.inv_freq" if local else "rope.inv_freq", rope.inv_freq)
        q = b.rope(q, inv_freq, c.heads, c.head_dim, rope.interleaved, rope.scale)
        if k is not None:
            k = b.rope(k, inv_freq, c.kv_heads, c.head_dim, rope.interleaved, rope.scale)
    if norms and k is not None:
        q = b.rms_norm(q, w(f"blk.{i}.attn_q_norm.weight"), c.eps, c.head_dim)
        k = b.rms_norm(k, w(f"blk.{i}.attn_k_norm.weight"), c.eps, c.head_dim)
    q = grown(b, c, q)
    if k is not None:
        b.kv_write(i, k, v, c.kv_heads, c.head_dim)
    scale = c.head_dim**-0.5 if c.attention_scale is None else c.attention_scale
    reads = i if source is None else source
    sight: dict[str, Any] = {"window": window, "softcap": c.attention_softcap, "causal": c.causal}
    a = b.attention(q, reads, c.heads, scale, sinks, **sight)
    if gate is not None:
        a = b.gated_act(gate, a, "sigmoid")
    p = f"blk.{i}.attn_output"
    return b.linear(a, w(p + ".weight"), w.maybe(p + ".bias"), axes=("embed", "heads"))


def mlp_block(
    b: Builder,
    c: DecoderConfig,
    w: Weights,
    i: int,
    h: Value,
    which: str = "",
    width: int = 0,
    gate_scale: float = 1.0,
) -> Value:
    """Gated feed-forward. ``which`` ends the names of its weights, which are ``width`` (0: as the configuration says) wide:
    "_shexp" are the experts that all tokens share. ``gate_scale``: what the gate is multiplied by."""
    gate, up, down = (f"blk.{i}.ffn_{name}{which}" for name in ("gate", "up", "down"))
    gated = b.linear(h, w(gate + ".weight"), w.maybe(gate + ".bias"), axes=("mlp", "embed"))
    passed = b.gated_act(b.scaled(gated, gate_scale), _up(b, w, up, h, width or c.mlp), c.act)
    return b.linear(passed, w(down + ".weight"), w.maybe(down + ".bias"), axes=("embed", "mlp"))


def _up(b: Builder, w: Weights, name: str, h: Value, width: int) -> Value:
    weight = w(name + ".weight")
    if weight.shape[0] != width:
        raise ModelError(
            f"{weight.name} has {weight.shape[0]} rows, but the configuration's feed-forward layers are {width} wide;"
            " the checkpoint is inconsistent."
        )
    return b.linear(h, weight, w.maybe(name + ".bias"), axes=("mlp", "embed"))


def fused_mlp_block(
    b: Builder,
    c: DecoderConfig,
    w: Weights,
    i: int,
    h: Value,
    names: tuple[str, str, str, str] = ("ffn_up", "ffn_gate_rows", "ffn_up_rows", "ffn_down"),
    width: int = 0,
) -> Value:
    """Gated feed-forward whose gate's rows lie above those of up in one matrix. ``names`` are of that matrix, of its parts, and
    of the one after the activation; both formats call the first one up."""
    (both, *parts, down), width = (f"blk.{i}.{name}.weight" for name in names), width or c.mlp
    rows = (slice(0, width), slice(width, 2 * width))
    gate, up = (
        b.linear(h, select(name, w(both), own), axes=("mlp", "embed")) for name, own in zip(parts, rows, strict=True)
    )
    return b.linear(b.gated_act(gate, up, c.act), w(down), axes=("embed", "mlp"))


def plain_mlp_block(b: Builder, c: DecoderConfig, w: Weights, i: int, h: Value) -> Value:
    """Feed-forward of two projections with the activation between them; "relu2" is a ReLU times what it was given."""
    p = f"blk.{i}."
    up = _up(b, w, p + "ffn_up", h, c.mlp)
    down = w(p + "ffn_down.weight"), w.maybe(p + "ffn_down.bias")
    passed = b.gated_act(up, up, "relu") if c.act == "relu2" else b.gated_act(up, None, c.act)
    return b.linear(passed, *down, axes=("embed", "mlp"))


def moe_block(b: Builder, c: DecoderConfig, w: Weights, i: int, h: Value, **routing: Any) -> Value:
    """Top-k routed experts, each a gated feed-forward. ``routing``: what else moe_route is to know."""
    experts = Experts(*_expert_matrices(c, w, f"blk.{i}.ffn_"), act={"kind": c.act})
    return b.moe(h, router(c, w, i), None, experts, c.experts_used, renormalize=c.renormalize, **routing)


def _expert_matrices(c: DecoderConfig, w: Weights, p: str) -> tuple[WeightRef, WeightRef, WeightRef]:
    """Gate, up and down. Some files have gate and up of all experts in one tensor, the outputs of each gate before those of its
    up, and some of these have all three transposed."""
    names = [f"{p}{part}_exps.weight" for part in ("gate", "up", "down")]
    both = w.maybe(p + "gate_up_exps.weight")
    if both is None:
        return w(names[0]), w(names[1]), w(names[2])
    down = w(names[2])
    turned = len(both.shape) == len(down.shape) == 3 and both.shape[1] == c.hidden == down.shape[2]
    half = both.shape[-1 if turned else 1] // 2 if len(both.shape) == 3 else 0
    part = turned_experts if turned else expert_rows
    gate, up = (part(name, both, slice(n * half, (n + 1) * half)) for n, name in enumerate(names[:2]))
    return gate, up, turned_experts(names[2], down, slice(None)) if turned else down


def router(c: DecoderConfig, w: Weights, i: int) -> WeightRef:
    """ModelError when it does not choose among as many experts as the configuration says."""
    weight = w(f"blk.{i}.ffn_gate_inp.weight")
    if weight.shape[0] != c.experts:
        raise ModelError(
            f"{weight.name} chooses among {weight.shape[0]} experts, but this model has {c.experts}; the checkpoint is"
            " inconsistent."
        )
    return weight


def shared_expert_block(b: Builder, c: DecoderConfig, w: Weights, i: int, h: Value) -> Value:
    """A gated feed-forward for every token, times the sigmoid of its gate's logit: a route to one expert."""
    p = f"blk.{i}."
    gate = b.linear(h, w(p + "ffn_gate_shexp.weight"), axes=("mlp", "embed"))
    up = b.linear(h, w(p + "ffn_up_shexp.weight"), axes=("mlp", "embed"))
    down = b.linear(b.gated_act(gate, up, c.act), w(p + "ffn_down_shexp.weight"), axes=("embed", "mlp"))
    return b.gated_by(down, h, row_matrix(w(p + "ffn_gate_inp_shexp.weight")))


def norm(b: Builder, c: DecoderConfig, w: Weights, name: str, x: Value) -> Value:
    """A layer norm with the bias it may have."""
    weight: WeightRef = w(name + ".weight")
    if c.norm_offset:
        weight = ConstantWeight(weight.name, w(name + ".weight").dense() + np.float32(c.norm_offset))
    return b.layer_norm(x, weight, w.maybe(name + ".bias"), c.eps)


def after(b: Builder, c: DecoderConfig, w: Weights, name: str, h: Value) -> Value:
    """A norm of what a block gave, where the file has one."""
    weight = w.maybe(name)
    return h if weight is None else b.rms_norm(h, weight, c.eps)


def weightless_norm(b: Builder, c: DecoderConfig, x: Value) -> Value:
    """A layer norm whose weights are ones."""
    return b.layer_norm(x, b.constant(f"ones.{x.shape[-1]}", np.ones(x.shape[-1])), None, c.eps)


def pre_norm_layers(
    b: Builder,
    c: Config,
    w: Weights,
    attention: Callable[[Builder, Config, Weights, int, Value], Value],
    feed_forward: Callable[[Builder, Config, Weights, int, Value], Value],
    ffn_norm: str = "ffn_norm",
    last_norm: str = "output_norm",
) -> Program:
    """The decoder whose layers add ``attention`` and then ``feed_forward`` to the residual, each of an RMS norm of it.
    ``ffn_norm``, ``last_norm``: what the second norm, and the one before the logits, are called."""
    x = b.embed(w("token_embd.weight"), c.embedding_scale)
    for i in b.layers(c.layers):
        for name, block in (("attn_norm", attention), (ffn_norm, feed_forward)):
            h = b.rms_norm(x, w(f"blk.{i}.{name}.weight"), c.eps, weight_offset=c.norm_offset)
            x = b.add(x, block(b, c, w, i, h))
    return output_head(b, c, w, x, last_norm)


def output_head(b: Builder, c: DecoderConfig, w: Weights, x: Value, norm: str = "output_norm") -> Program:
    """Final RMS norm, then the logits."""
    return logits(b, c, w, b.rms_norm(x, w(norm + ".weight"), c.eps, weight_offset=c.norm_offset))


def logits(b: Builder, c: DecoderConfig, w: Weights, x: Value) -> Program:
    """The projection to the vocabulary; a tied head uses the embedding table, which also stands where a file has none at
    all, and nothing is to be generated."""
    tied = c.may_tie or w.without_head
    head = w.first("output.weight", "token_embd.weight") if tied else w("output.weight")
    return b.finish(x, head, c.logit_scale, c.logit_softcap, w.maybe("output.bias"))
