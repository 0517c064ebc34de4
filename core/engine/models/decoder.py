"""What the decoder-only families share: the configuration read from either format, and the blocks of a layer."""

from __future__ import annotations

from dataclasses import dataclass

from ..backend.v1 import Value
from ..program.build import Builder, Experts, Program
from .rope import Rope
from .weights import Weights


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
    rope: Rope
    max_context: int
    experts: int = 0
    experts_used: int = 0
    renormalize: bool = True
    may_tie: bool = True


def attention_block(b: Builder, c: DecoderConfig, w: Weights, i: int, h: Value, qk_norm: bool = False) -> Value:
    """Projections, optional per-head norm, rotary embedding, cache write, attention, output projection."""
    p = f"blk.{i}."
    q = b.linear(h, w(p + "attn_q.weight"), w.maybe(p + "attn_q.bias"), axes=("heads", "embed"))
    k = b.linear(h, w(p + "attn_k.weight"), w.maybe(p + "attn_k.bias"), axes=("kv_heads", "embed"))
    v = b.linear(h, w(p + "attn_v.weight"), w.maybe(p + "attn_v.bias"), axes=("kv_heads", "embed"))
    if qk_norm:
        q = b.rms_norm(q, w(p + "attn_q_norm.weight"), c.eps, head_dim=c.head_dim)
        k = b.rms_norm(k, w(p + "attn_k_norm.weight"), c.eps, head_dim=c.head_dim)
    inv_freq = b.constant("rope.inv_freq", c.rope.inv_freq)
    q = b.rope(q, inv_freq, c.heads, c.head_dim, c.rope.interleaved, c.rope.scale)
    k = b.rope(k, inv_freq, c.kv_heads, c.head_dim, c.rope.interleaved, c.rope.scale)
    b.kv_write(i, k, v, c.kv_heads, c.head_dim)
    a = b.attention(q, i, c.heads, scale=c.head_dim**-0.5)
    return b.linear(a, w(p + "attn_output.weight"), w.maybe(p + "attn_output.bias"), axes=("embed", "heads"))


def mlp_block(b: Builder, w: Weights, i: int, h: Value, kind: str = "silu") -> Value:
    """Gated feed-forward."""
    p = f"blk.{i}."
    gate = b.linear(h, w(p + "ffn_gate.weight"), w.maybe(p + "ffn_gate.bias"), axes=("mlp", "embed"))
    up = b.linear(h, w(p + "ffn_up.weight"), w.maybe(p + "ffn_up.bias"), axes=("mlp", "embed"))
    down = w(p + "ffn_down.weight"), w.maybe(p + "ffn_down.bias")
    return b.linear(b.gated_act(gate, up, kind), *down, axes=("embed", "mlp"))


def moe_block(b: Builder, c: DecoderConfig, w: Weights, i: int, h: Value) -> Value:
    """Top-k routed experts, each a gated feed-forward."""
    p = f"blk.{i}."
    experts = Experts(w(p + "ffn_gate_exps.weight"), w(p + "ffn_up_exps.weight"), w(p + "ffn_down_exps.weight"))
    return b.moe(h, w(p + "ffn_gate_inp.weight"), experts, c.experts_used, renormalize=c.renormalize)


def output_head(b: Builder, c: DecoderConfig, w: Weights, x: Value) -> Program:
    """Final norm and the projection to the vocabulary; a tied head uses the embedding table."""
    x = b.rms_norm(x, w("output_norm.weight"), c.eps)
    return b.finish(x, w.first("output.weight", "token_embd.weight") if c.may_tie else w("output.weight"))
