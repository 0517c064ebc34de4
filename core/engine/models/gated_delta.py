"""What Qwen3-Next and Qwen 3.5 share: layers of linear attention by the gated delta rule (arXiv 2412.06464) between layers of
attention whose result is gated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..backend.v1 import Array, Value, WeightRef
from ..errors import ModelError
from ..formats import Checkpoint
from ..program.build import Builder, Program
from ..program.weights import select
from . import qwen2_moe, qwen3, qwen3_moe
from .decoder import DecoderConfig, attend, mlp_block, moe_block, pre_norm_layers, shared_expert_block
from .experts import gguf_layers
from .experts import unused as after_the_last
from .fields import integer
from .weights import Names, Weights, needs_rows

DEFAULTS: Mapping[str, Any] = {
    "max_position_embeddings": 32768,
    "partial_rotary_factor": 0.25,
    "head_dim": 256,
    "tie_word_embeddings": False,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_LAYER = "model.layers.{i}."
HF_NAMES: Names = {
    **{name: own for name, own in {**qwen2_moe.HF_NAMES, **qwen3_moe.HF_NAMES}.items() if "ffn_norm" not in name},
    "blk.{i}.post_attention_norm.weight": qwen3.HF_NAMES["blk.{i}.ffn_norm.weight"],
    "blk.{i}.ssm_conv1d.weight": _LAYER + "linear_attn.conv1d.weight",
    "blk.{i}.ssm_a": _LAYER + "linear_attn.A_log",
    "blk.{i}.ssm_dt.bias": _LAYER + "linear_attn.dt_bias",
    "blk.{i}.ssm_norm.weight": _LAYER + "linear_attn.norm.weight",
    "blk.{i}.ssm_out.weight": _LAYER + "linear_attn.out_proj.weight",
}


@dataclass(frozen=True, kw_only=True)
class DeltaConfig(DecoderConfig):
    """Sizes of the layers of linear attention: heads of keys and of values, and the width of each. ``tiled``: in its file the
    first value heads of all key heads lie before their second ones; otherwise those of a key head lie together, as the op
    has them."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    tiled: bool = False

    @property
    def share(self) -> int:
        """Value heads of a key head."""
        return self.value_heads // self.key_heads

    @property
    def keys(self) -> int:
        """Columns of queries and keys together."""
        return 2 * self.key_heads * self.key_dim

    def in_groups(self, width: int) -> Array:
        """Where a file has what is of each value head, ``width`` entries of each, in the op's order."""
        order = np.arange(self.value_heads * width)
        if self.tiled:
            order = order.reshape(self.share, self.key_heads, width).swapaxes(0, 1).reshape(-1)
        return order

    def qkv_in_groups(self) -> Array:
        """The same of the columns of queries, keys and values beside each other."""
        return np.concatenate((np.arange(self.keys), self.keys + self.in_groups(self.value_dim)))


def configured(c: DecoderConfig, checkpoint: Checkpoint, tiled: bool = False) -> DeltaConfig:
    """``tiled``: of a GGUF file. Those of Hugging Face keep the weights of norms less 1."""
    data = checkpoint.metadata
    if checkpoint.kind == "gguf":
        prefix, layers = f"{checkpoint.architecture}.ssm.", gguf_layers(c, checkpoint)
        key_heads, value_heads = (integer(data, prefix + key) for key in ("group_count", "time_step_rank"))
        key_dim, value_dim = integer(data, prefix + "state_size"), integer(data, prefix + "inner_size") // value_heads
        recurrent = tuple(i for i in range(layers) if f"blk.{i}.ssm_out.weight" in checkpoint.tensors)
        c = replace(c, layers=layers, recurrent=recurrent)
    else:
        key_heads, value_heads = (integer(data, f"linear_num_{part}_heads") for part in ("key", "value"))
        key_dim, value_dim = (integer(data, f"linear_{part}_head_dim") for part in ("key", "value"))
        c = replace(c, norm_offset=1.0, recurrent=_recurrent(c, data))
    if value_heads % key_heads:
        raise ModelError(f"{value_heads} value heads of linear attention cannot share {key_heads} key heads evenly.")
    return DeltaConfig(
        **vars(c),
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        tiled=tiled and checkpoint.kind == "gguf" and value_heads > key_heads,
    )


def _recurrent(c: DecoderConfig, data: Mapping[str, Any]) -> tuple[int, ...]:
    """The layers of linear attention: as layer_types says, or all but each so many-th."""
    kinds = data.get("layer_types")
    if kinds is None:
        every = integer(data, "full_attention_interval", 4)
        return tuple(i for i in range(c.layers) if (i + 1) % every)
    known = ("linear_attention", "full_attention")
    if not isinstance(kinds, list) or len(kinds) != c.layers or any(kind not in known for kind in kinds):
        raise ModelError(
            f"The configuration's layer_types must name linear_attention or full_attention for each of {c.layers} layers."
        )
    return tuple(i for i, kind in enumerate(kinds) if kind == known[0])


def unused(c: DecoderConfig, checkpoint: Checkpoint) -> tuple[str, ...]:
    """The layers of multi-token prediction, which the model does not need."""
    return after_the_last(c, checkpoint) if checkpoint.kind == "gguf" else ("mtp.",)


@dataclass(frozen=True)
class Projections:
    """What a layer of linear attention takes from its input: qkv [2 * keys + values], the gate z [values] of its result, and
    decay and beta [value heads]. The gate's values are as the file has them, all others in the op's order."""

    qkv: WeightRef
    z: WeightRef
    decay: WeightRef
    beta: WeightRef


def separate(c: DeltaConfig, w: Weights, i: int) -> Projections:
    """Of a file with a matrix for each, but for decay and beta, which may be in one as ``decay_and_beta`` has them."""
    p = f"blk.{i}."
    qkv, z = w(p + "attn_qkv.weight"), w(p + "attn_gate.weight")
    needs_rows(qkv, c.keys + c.value_heads * c.value_dim)
    if w.maybe(p + "ssm_ba.weight") is not None:
        return Projections(qkv, z, *decay_and_beta(c, w, i))
    decay, beta = (w(f"{p}ssm_{name}.weight") for name in ("alpha", "beta"))
    for gate in (decay, beta):
        needs_rows(gate, c.value_heads)
    if not c.tiled:
        return Projections(qkv, z, decay, beta)
    return Projections(
        select(p + "attn_qkv_in_groups.weight", qkv, c.qkv_in_groups()),
        z,
        select(p + "ssm_alpha_in_groups.weight", decay, c.in_groups(1)),
        select(p + "ssm_beta_in_groups.weight", beta, c.in_groups(1)),
    )


def decay_and_beta(c: DeltaConfig, w: Weights, i: int) -> tuple[WeightRef, WeightRef]:
    """From the one matrix of both, where each key head has beta and then decay of its value heads."""
    p = f"blk.{i}.ssm_"
    both = w(p + "ba.weight")
    needs_rows(both, 2 * c.value_heads)
    beta, decay = np.arange(2 * c.value_heads).reshape(c.key_heads, 2, -1).swapaxes(0, 1)
    return select(p + "alpha.weight", both, decay.reshape(-1)), select(p + "beta.weight", both, beta.reshape(-1))


def delta_block(b: Builder, c: DeltaConfig, w: Weights, i: int, h: Value, parts: Projections) -> Value:
    """The delta rule over what a short convolution has mixed, then a norm of each head times silu(z)."""
    p = f"blk.{i}.ssm_"
    qkv, z, decay, beta = (
        b.linear(h, one, axes=(None, "embed")) for one in (parts.qkv, parts.z, parts.decay, parts.beta)
    )
    y = b.gated_delta(i, qkv, decay, beta, _vectors(b, c, w, i), c.key_heads, c.value_heads, c.key_dim, c.value_dim)
    y = b.rms_norm(y, w(p + "norm.weight"), c.eps, c.value_dim)
    if c.tiled:
        y = b.gather_columns(y, p + "out.weight", np.argsort(c.in_groups(c.value_dim)))
    return b.linear(b.gated_act(z, y, "silu"), w(p + "out.weight"), axes=("embed", None))


def _vectors(b: Builder, c: DeltaConfig, w: Weights, i: int) -> dict[str, WeightRef]:
    """The filters [columns, width], and rate and bias [value_heads]. Hugging Face's files have the logarithm of the rate."""
    p, order = f"blk.{i}.ssm_", c.qkv_in_groups()
    rate, bias = (w(p + name).dense().reshape(-1) for name in ("a", "dt.bias"))
    conv = w(p + "conv1d.weight").dense()
    if (len(rate), len(bias), len(conv)) != (c.value_heads, c.value_heads, len(order)):
        raise ModelError(
            f"{p}a, {p}dt.bias and {p}conv1d.weight have {len(rate)}, {len(bias)} and {len(conv)} entries, but this model"
            f" needs {c.value_heads}, {c.value_heads} and {len(order)}; the checkpoint is inconsistent."
        )
    rate = rate if w.checkpoint.kind == "gguf" else -np.exp(rate)
    return {
        "conv": b.constant(p + "conv1d.weight", conv.reshape(len(conv), -1)[order]),
        "rate": b.constant(p + "rate", rate[c.in_groups(1)]),
        "bias": b.constant(p + "dt.bias", bias[c.in_groups(1)]),
    }


def gated_attention_block(b: Builder, c: DeltaConfig, w: Weights, i: int, h: Value) -> Value:
    """Attention whose result is multiplied by the sigmoid of a gate, before the output projection. The rows of a head's query
    lie before those of its gate."""
    p = f"blk.{i}.attn_"
    both = w(p + "q.weight")
    rows = np.arange(2 * c.heads * c.head_dim).reshape(c.heads, 2, c.head_dim)
    needs_rows(both, rows.size)
    q, gate = (
        b.linear(h, select(f"{p}{name}.weight", both, rows[:, n].reshape(-1)), axes=("heads", "embed"))
        for n, name in enumerate(("q_rows", "gate_rows"))
    )
    k, v = (b.linear(h, w(f"{p}{name}.weight"), axes=("kv_heads", "embed")) for name in ("k", "v"))
    q = b.rms_norm(q, w(p + "q_norm.weight"), c.eps, c.head_dim, c.norm_offset)
    k = b.rms_norm(k, w(p + "k_norm.weight"), c.eps, c.head_dim, c.norm_offset)
    return attend(b, c, w, i, q, k, v, gate=gate)


def feed_forward(b: Builder, c: DeltaConfig, w: Weights, i: int, h: Value) -> Value:
    """Experts beside a shared one, where the layer has them."""
    if w.maybe(f"blk.{i}.ffn_gate_inp.weight") is None:
        return mlp_block(b, c, w, i, h)
    return b.add(moe_block(b, c, w, i, h), shared_expert_block(b, c, w, i, h))


def layers(
    b: Builder, c: DeltaConfig, w: Weights, projections: Callable[[DeltaConfig, Weights, int], Projections]
) -> Program:
    """The decoder, by how its files keep the projections of linear attention."""

    def attention(b: Builder, c: DeltaConfig, w: Weights, i: int, h: Value) -> Value:
        recurrent = i in c.recurrent
        return delta_block(b, c, w, i, h, projections(c, w, i)) if recurrent else gated_attention_block(b, c, w, i, h)

    return pre_norm_layers(b, c, w, attention, feed_forward, "post_attention_norm")
