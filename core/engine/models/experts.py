"""Experts as DeepSeek has them, and others after it: first layers without, experts that all tokens share, a correction of the
scores for the choice, groups, and layers of multi-token prediction that are not run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..backend.v1 import Value, WeightRef
from ..errors import ModelError
from ..formats import Checkpoint
from ..program.build import Builder
from ..program.weights import ConstantWeight
from .decoder import DecoderConfig, mlp_block, moe_block
from .fields import flag, integer, positive
from .weights import Weights

_MLP = "model.layers.{i}.mlp."
HF_EXPERTS = {
    "blk.{i}.ffn_gate_inp.weight": _MLP + "gate.weight",
    "blk.{i}.exp_probs_b.bias": _MLP + "gate.e_score_correction_bias",
    "blk.{i}.ffn_gate_exps.weight": _MLP + "experts.{e}.gate_proj.weight",
    "blk.{i}.ffn_up_exps.weight": _MLP + "experts.{e}.up_proj.weight",
    "blk.{i}.ffn_gate_up_exps.weight": _MLP + "experts.gate_up_proj",
    "blk.{i}.ffn_down_exps.weight": (_MLP + "experts.{e}.down_proj.weight", _MLP + "experts.down_proj"),
    **{
        f"blk.{{i}}.ffn_{name}_shexp.{kind}": f"{_MLP}shared_experts.{name}_proj.{kind}"
        for name in ("gate", "up", "down")
        for kind in ("weight", "bias")
    },
}
"""Their part of ``HF_NAMES``."""


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig(DecoderConfig):
    """The first ``dense`` layers have no experts. ``shared``: how wide those that all tokens share are together, 0 for none.
    ``routing``: attributes of moe_route."""

    dense: int
    shared: int
    routing: Mapping[str, Any]


def unused(c: DecoderConfig, checkpoint: Checkpoint) -> tuple[str, ...]:
    """Layers of multi-token prediction come after the model's own, which do not need them."""
    layer = "blk" if checkpoint.kind == "gguf" else "model.layers"
    return tuple(f"{layer}.{c.layers + n}." for n in range(predicting(checkpoint)))


def predicting(checkpoint: Checkpoint) -> int:
    """How many layers of multi-token prediction there are: config.json does not count them as layers, GGUF files do."""
    key = f"{checkpoint.architecture}.nextn_predict_layers" if checkpoint.kind == "gguf" else "num_nextn_predict_layers"
    return integer(checkpoint.metadata, key, 0, low=0, high=64)


def gguf_layers(c: DecoderConfig, checkpoint: Checkpoint) -> int:
    """The layers that are run. ModelError where none is left."""
    layers = c.layers - predicting(checkpoint)
    if layers < 1:
        arch = checkpoint.architecture
        raise ModelError(f"The configuration's {arch}.nextn_predict_layers leaves none of its {c.layers} layers.")
    return layers


def dense_layers(data: Mapping[str, Any]) -> int:
    """How many first layers have no experts; newer files name the kind of each."""
    kinds = data.get("mlp_layer_types")
    if kinds is None:
        return integer(data, "first_k_dense_replace", 0, low=0)
    dense = kinds.count("dense") if isinstance(kinds, list) else 0
    if not isinstance(kinds, list) or kinds != ["dense"] * dense + ["sparse"] * (len(kinds) - dense):
        raise ModelError(
            "The configuration's mlp_layer_types must be dense for the first layers, and sparse for all others."
        )
    return dense


def shared_width(data: Mapping[str, Any], count: str, width: str) -> int:
    """Of all shared experts together: a width times a count that may be absent."""
    found = integer(data, count, 0, low=0)
    return found * integer(data, width) if found else 0


def _score(checkpoint: Checkpoint) -> str:
    """GGUF's numbers of scores. Files without one are V2's, from before there were several, and the first of GLM 4.7 Flash,
    which have the correction bias that only sigmoids have."""
    key = f"{checkpoint.architecture}.expert_gating_func"
    corrected = any(name.endswith(".exp_probs_b.bias") for name in checkpoint.tensors)
    kind = integer(checkpoint.metadata, key, 2 if corrected else 1)
    if kind not in (1, 2):
        raise ModelError(f"The configuration's {key} is {kind}; it must be 1 (softmax) or 2 (sigmoid).")
    return "softmax" if kind == 1 else "sigmoid"


def gguf_routing(c: DecoderConfig, checkpoint: Checkpoint) -> dict[str, Any]:
    data, arch = checkpoint.metadata, checkpoint.architecture
    groups, kept = (integer(data, f"{arch}.expert_group_{key}", 1) for key in ("count", "used_count"))
    return routing(c, _score(checkpoint), positive(data, f"{arch}.expert_weights_scale", 1.0), groups, kept)


def hf_experts(c: DecoderConfig, checkpoint: Checkpoint, shared: str = "n_shared_experts") -> ExpertsConfig:
    """By the keys of DeepSeek V3's configuration, of which ``shared`` counts the experts that all tokens share."""
    data = checkpoint.metadata
    groups, kept = (integer(data, key, 1) for key in ("n_group", "topk_group"))
    return ExpertsConfig(
        **vars(replace(c, renormalize=flag(data, "norm_topk_prob", True))),
        dense=dense_layers(data),
        shared=shared_width(data, shared, "moe_intermediate_size"),
        routing=routing(c, "sigmoid", positive(data, "routed_scaling_factor", 1.0), groups, kept),
    )


def gguf_experts(c: DecoderConfig, checkpoint: Checkpoint, renormalize: bool = True) -> ExpertsConfig:
    """By the keys of GGUF files; ``renormalize`` holds where a file has none."""
    data, arch = checkpoint.metadata, checkpoint.architecture
    renormalize = flag(data, f"{arch}.expert_weights_norm", renormalize)
    c = replace(c, layers=gguf_layers(c, checkpoint), renormalize=renormalize)
    return ExpertsConfig(
        **vars(c),
        dense=integer(data, f"{arch}.leading_dense_block_count", 0, low=0),
        shared=shared_width(data, f"{arch}.expert_shared_count", f"{arch}.expert_feed_forward_length"),
        routing=gguf_routing(c, checkpoint),
    )


def routing(
    c: DecoderConfig, score: str, scale: float, groups: int = 1, groups_kept: int = 1, best: int = 0
) -> dict[str, Any]:
    """``best``: how many of its best experts a group is chosen by; V2 goes by one, V3 by two. ModelError where so many experts a
    token cannot come from so many groups."""
    found: dict[str, Any] = {"score": score, "scale": scale}
    if groups > 1:
        best = best or (1 if score == "softmax" else 2)
        size = c.experts // groups
        if size * groups != c.experts or best > size or groups_kept > groups or c.experts_used > groups_kept * size:
            raise ModelError(
                f"{c.experts_used} experts a token cannot come from {groups_kept} of {groups} groups of {c.experts} experts;"
                " the checkpoint is inconsistent."
            )
        found |= {"groups": groups, "groups_kept": groups_kept, "group_best": best}
    return found


def feed_forward(b: Builder, c: ExpertsConfig, w: Weights, i: int, h: Value) -> Value:
    if i < c.dense or not c.experts:
        return mlp_block(b, c, w, i, h)
    bias: WeightRef | None = w.maybe(f"blk.{i}.exp_probs_b.bias")
    if bias is not None and len(bias.shape) == 2:  # ERNIE's is a row
        bias = ConstantWeight(bias.name, bias.dense().reshape(-1))
    routed = moe_block(b, c, w, i, h, correction_bias=bias, **c.routing)
    return b.add(routed, mlp_block(b, c, w, i, h, "_shexp", c.shared)) if c.shared else routed
