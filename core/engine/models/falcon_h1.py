"""Falcon-H1 (TII, arXiv 2507.22448): each layer adds the sum of attention and of a state-space layer of Mamba-2, which read the
same norm; factors on most of what is multiplied. GGUF files have the factors in their weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..backend.v1 import Value
from ..errors import ModelError
from ..formats import Checkpoint
from ..program.build import Builder, Program
from . import llama, mamba2
from .decoder import DecoderConfig, attention_block, mlp_block, output_head
from .fields import flag, integer, positive
from .mamba2 import Mamba2, mamba_block
from .weights import Names, Weights

HF_DEFAULTS: Mapping[str, Any] = {
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
    "mamba_d_ssm": 1024,
    **mamba2.HF_DEFAULTS,
}
HF_NAMES: Names = {
    **{
        canonical: own.replace(".mlp.", ".feed_forward.").replace(".post_attention_layernorm.", ".pre_ff_layernorm.")
        for canonical, own in llama.HF_NAMES.items()
    },
    "output_norm.weight": "model.final_layernorm.weight",
    **mamba2.names("model.layers.{i}.mamba."),
}


@dataclass(frozen=True)
class Factors:
    """Of a Hugging Face file. ``projected``: of a state-space layer's gate, x, B, C and steps; ``gate`` and ``down``: of the
    feed-forward."""

    attention_in: float = 1.0
    attention_out: float = 1.0
    states_in: float = 1.0
    states_out: float = 1.0
    projected: tuple[float, ...] = (1.0,) * 5
    gate: float = 1.0
    down: float = 1.0


@dataclass(frozen=True, kw_only=True)
class FalconH1Config(DecoderConfig):
    """With state-space layers, of the sizes ``mamba``, beside attention."""

    mamba: Mamba2
    factors: Factors = Factors()


def configure(c: DecoderConfig, checkpoint: Checkpoint) -> FalconH1Config:
    c = replace(c, recurrent=tuple(range(c.layers)), recurrent_attends=True)
    if checkpoint.kind == "gguf":
        return FalconH1Config(**vars(c), mamba=mamba2.of_gguf(checkpoint))
    data = checkpoint.metadata
    c = replace(
        c,
        embedding_scale=positive(data, "embedding_multiplier", 1.0),
        logit_scale=positive(data, "lm_head_multiplier", 1.0),
        attention_scale=positive(data, "key_multiplier", 1.0) / math.sqrt(c.head_dim),
    )
    given = data.get("mamba_d_ssm")
    inner = integer(data, "mamba_expand") * c.hidden if given is None else integer(data, "mamba_d_ssm")
    norm_first = flag(data, "mamba_rms_norm", False) and flag(data, "mamba_norm_before_gate", True)
    mamba = replace(mamba2.of_hf(data, inner=inner), norm_first=norm_first)
    return FalconH1Config(**vars(c), mamba=mamba, factors=_factors(data))


def _factors(data: Mapping[str, Any]) -> Factors:
    gate, down = _listed(data, "mlp_multipliers", 2)
    return Factors(
        attention_in=positive(data, "attention_in_multiplier", 1.0),
        attention_out=positive(data, "attention_out_multiplier", 1.0),
        states_in=positive(data, "ssm_in_multiplier", 1.0),
        states_out=positive(data, "ssm_out_multiplier", 1.0),
        projected=_listed(data, "ssm_multipliers", 5),
        gate=gate,
        down=down,
    )


def _listed(data: Mapping[str, Any], key: str, count: int) -> tuple[float, ...]:
    """So many positive numbers, 1 where there are none. ModelError otherwise."""
    given = data.get(key)
    if given is None:
        return (1.0,) * count
    if not isinstance(given, list) or len(given) != count:
        raise ModelError(f"The configuration's {key} is {given!r}; it must be a list of {count} numbers.")
    return tuple(positive({f"{key}[{n}]": value}, f"{key}[{n}]") for n, value in enumerate(given))


def build(b: Builder, c: FalconH1Config, w: Weights) -> Program:
    x = b.embed(w("token_embd.weight"), c.embedding_scale)
    for i in b.layers(c.layers):
        x = b.add(x, _mixed(b, c, w, i, b.rms_norm(x, w(f"blk.{i}.attn_norm.weight"), c.eps)))
        norm = w.first(f"blk.{i}.ffn_norm.weight", f"blk.{i}.ffn_norm")  # llama.cpp's files have it without an ending
        fed = mlp_block(b, c, w, i, b.rms_norm(x, norm, c.eps), gate_scale=c.factors.gate)
        x = b.add(x, b.scaled(fed, c.factors.down))
    return output_head(b, c, w, x)


def _mixed(b: Builder, c: FalconH1Config, w: Weights, i: int, h: Value) -> Value:
    """What attention and states add to the residual."""
    f = c.factors
    states = mamba_block(b, c.mamba, w, i, b.scaled(h, f.states_in), c.eps, f.projected)
    attended = attention_block(b, c, w, i, b.scaled(h, f.attention_in))
    return b.add(b.scaled(states, f.states_out), b.scaled(attended, f.attention_out))
