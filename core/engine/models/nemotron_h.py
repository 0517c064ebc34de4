"""Nemotron-H (NVIDIA), Nemotron Nano 2 and Nemotron 3: layers that are each one thing, a state-space layer of Mamba-2, attention
without positions, a feed-forward with squared ReLU, or experts of that kind beside a shared one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..backend.v1 import Value
from ..errors import ModelError
from ..formats import Checkpoint
from ..program.build import Builder, Program
from ..program.experts import Experts
from . import mamba2
from .decoder import DecoderConfig, attention_block, output_head, router
from .experts import ExpertsConfig, gguf_layers, gguf_routing, routing
from .experts import unused as after_the_last
from .fields import first_of_layers, flag, integer, positive
from .mamba2 import Mamba2, mamba_block
from .weights import Names, Weights

HF_KEYS = {
    "rms_norm_eps": "layer_norm_epsilon",
    "num_experts": "n_routed_experts",
    "hidden_act": "mlp_hidden_act",
}
HF_DEFAULTS: Mapping[str, Any] = {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "intermediate_size": 21504,
    "tie_word_embeddings": False,
    "layer_norm_epsilon": 1e-5,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688,
}
HF_PREFIX = "backbone."


def _own(name: str) -> tuple[str, str]:
    """As published, and as transformers calls it now."""
    return f"backbone.{name}", f"model.{name}"


HF_NAMES: Names = {
    "output.weight": "lm_head.weight",
    **{
        canonical: _own(name)
        for canonical, name in {
            "token_embd.weight": "embeddings.weight",
            "output_norm.weight": "norm_f.weight",
            "blk.{i}.attn_norm.weight": "layers.{i}.norm.weight",
            **mamba2.names("layers.{i}.mixer."),
            **{
                f"blk.{{i}}.attn_{own}.{kind}": f"layers.{{i}}.mixer.{name}_proj.{kind}"
                for own, name in (("q", "q"), ("k", "k"), ("v", "v"), ("output", "o"))
                for kind in ("weight", "bias")
            },
            **{
                f"blk.{{i}}.ffn_{name}.{kind}": f"layers.{{i}}.mixer.{name}_proj.{kind}"
                for name in ("up", "down")
                for kind in ("weight", "bias")
            },
            "blk.{i}.ffn_gate_inp.weight": "layers.{i}.mixer.gate.weight",
            "blk.{i}.exp_probs_b.bias": "layers.{i}.mixer.gate.e_score_correction_bias",
            **{
                f"blk.{{i}}.ffn_{name}_{own}.weight": f"layers.{{i}}.mixer.{theirs}.{name}_proj.weight"
                for name in ("up", "down")
                for own, theirs in (("exps", "experts.{e}"), ("shexp", "shared_experts"))
            },
            "blk.{i}.ffn_latent_down.weight": "layers.{i}.mixer.fc1_latent_proj.weight",
            "blk.{i}.ffn_latent_up.weight": "layers.{i}.mixer.fc2_latent_proj.weight",
        }.items()
    },
}
_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_NAMES = {"linear_attention": "mamba", "full_attention": "attention"} | {kind: kind for kind in _LETTERS.values()}


@dataclass(frozen=True, kw_only=True)
class NemotronConfig(ExpertsConfig):
    """``kinds``: what each layer is, mamba, attention, mlp or moe. ``mamba``: sizes of the first kind; None without one."""

    kinds: tuple[str, ...]
    mamba: Mamba2 | None


def flattened(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """The metadata with one number for all layers: of those of a GGUF that have one, and of a config.json whose list of kinds
    says how many there are."""
    if checkpoint.kind == "hf":
        return {**checkpoint.metadata, "num_hidden_layers": len(_kinds(checkpoint.metadata))}
    return first_of_layers(checkpoint, "attention.head_count_kv", "feed_forward_length", "expert_feed_forward_length")


def configure(c: DecoderConfig, checkpoint: Checkpoint) -> NemotronConfig:
    c = replace(c, rope=None)
    return _of_gguf(c, checkpoint) if checkpoint.kind == "gguf" else _of_hf(c, checkpoint.metadata)


def _of_gguf(c: DecoderConfig, checkpoint: Checkpoint) -> NemotronConfig:
    data, arch = checkpoint.metadata, checkpoint.architecture
    c = replace(c, layers=gguf_layers(c, checkpoint), renormalize=flag(data, f"{arch}.expert_weights_norm", True))
    kinds = tuple(_kind(checkpoint, f"blk.{i}.") for i in range(c.layers))
    how = gguf_routing(c, checkpoint) if c.experts else {}
    shared = integer(data, f"{arch}.expert_shared_feed_forward_length", 0, low=0)
    return _completed(c, kinds, mamba2.of_gguf(checkpoint) if "mamba" in kinds else None, shared, how)


def _kind(checkpoint: Checkpoint, layer: str) -> str:
    """By the tensors that it has."""
    marks = {"ssm_out.weight": "mamba", "ffn_gate_inp.weight": "moe", "ffn_up.weight": "mlp"}
    return next((kind for mark, kind in marks.items() if layer + mark in checkpoint.tensors), "attention")


def _of_hf(c: DecoderConfig, data: Mapping[str, Any]) -> NemotronConfig:
    kinds, mamba, shared, how = _kinds(data), None, 0, {}
    if "mamba" in kinds:
        mamba = mamba2.of_hf(data, "mamba_num_heads", "n_groups", "ssm_state_size", "mamba_head_dim")
    if "moe" in kinds:
        shared = integer(data, "moe_shared_expert_intermediate_size")
        c = replace(c, mlp=integer(data, "moe_intermediate_size"), renormalize=flag(data, "norm_topk_prob", True))
        groups, kept = (integer(data, key, 1) for key in ("n_group", "topk_group"))
        how = routing(c, "sigmoid", positive(data, "routed_scaling_factor", 1.0), groups, kept)
    else:
        c = replace(c, experts=0, experts_used=0)
    return _completed(c, kinds, mamba, shared, how)


def _kinds(data: Mapping[str, Any]) -> tuple[str, ...]:
    """ModelError where config.json tells none of each layer, or one that is not known."""
    keys = ("layers_block_type", "layer_types", "hybrid_override_pattern")
    given = next((data[key] for key in keys if data.get(key)), None)
    names = _LETTERS if isinstance(given, str) else _NAMES
    if not isinstance(given, (str, list)) or any(str(kind) not in names for kind in given):
        raise ModelError(
            "The configuration's hybrid_override_pattern must have a letter for each layer, M, *, - or E, or its"
            f" layers_block_type a name of {', '.join(_NAMES)}."
        )
    return tuple(names[kind] for kind in given)


def _completed(
    c: DecoderConfig, kinds: tuple[str, ...], mamba: Mamba2 | None, shared: int, how: Mapping[str, Any]
) -> NemotronConfig:
    recurrent = tuple(i for i, kind in enumerate(kinds) if kind == "mamba")
    c = replace(c, recurrent=recurrent)
    return NemotronConfig(**vars(c), dense=0, shared=shared, routing=how, kinds=kinds, mamba=mamba)


def unused(c: NemotronConfig, checkpoint: Checkpoint) -> tuple[str, ...]:
    """The layers of multi-token prediction, which the model does not need."""
    return after_the_last(c, checkpoint) if checkpoint.kind == "gguf" else ("mtp.",)


def build(b: Builder, c: NemotronConfig, w: Weights) -> Program:
    x = b.embed(w("token_embd.weight"))
    for i in b.layers(c.layers):
        h = b.rms_norm(x, w(f"blk.{i}.attn_norm.weight"), c.eps)
        x = b.add(x, _mixed(b, c, w, i, h))
    return output_head(b, c, w, x)


def _mixed(b: Builder, c: NemotronConfig, w: Weights, i: int, h: Value) -> Value:
    kind = c.kinds[i]
    if kind == "mamba":
        assert c.mamba is not None
        return mamba_block(b, c.mamba, w, i, h, c.eps)
    if kind == "attention":
        return attention_block(b, c, w, i, h)
    return _squared_block(b, w, i, h) if kind == "mlp" else _experts(b, c, w, i, h)


def _squared_block(b: Builder, w: Weights, i: int, h: Value, which: str = "") -> Value:
    """Two projections with squared ReLU between them: what ReLU lets pass times itself."""
    up, down = (f"blk.{i}.ffn_{name}{which}" for name in ("up", "down"))
    raised = b.linear(h, w(up + ".weight"), w.maybe(up + ".bias"), axes=("mlp", "embed"))
    passed = b.gated_act(raised, raised, "relu")
    return b.linear(passed, w(down + ".weight"), w.maybe(down + ".bias"), axes=("embed", "mlp"))


def _experts(b: Builder, c: NemotronConfig, w: Weights, i: int, h: Value) -> Value:
    """The largest models have their experts in a narrower space, which the router and the shared one do not read."""
    p = f"blk.{i}.ffn_"
    experts = Experts(None, w(p + "up_exps.weight"), w(p + "down_exps.weight"), act={"kind": "relu"})
    narrow, wide = w.maybe(p + "latent_down.weight"), w.maybe(p + "latent_up.weight")
    x = h if narrow is None else b.linear(h, narrow, axes=(None, "embed"))
    bias = w.maybe(f"blk.{i}.exp_probs_b.bias")
    routed = b.moe(
        x, router(c, w, i), None, experts, c.experts_used, bias, routed_by=h, renormalize=c.renormalize, **c.routing
    )
    if wide is not None:
        routed = b.linear(routed, wide, axes=("embed", None))
    return b.add(routed, _squared_block(b, w, i, h, "_shexp")) if c.shared else routed
