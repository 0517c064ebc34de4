"""What a GGUF file says of a model that ranks: its layers of scores, by the names that llama.cpp reads."""

from __future__ import annotations

from typing import Any

from engine.backend.v1 import Array, WeightRef
from engine.errors import ModelError
from engine.formats.pooling import Dense
from engine.models import Model
from engine.program.weights import ConstantWeight

_RANK = 4
_POOLING = {"mean": 1, "cls": 2}


def ranking_keys(model: Model) -> dict[str, Any]:
    """How the states of two texts become a score. That it goes through nothing is a key of this engine's own."""
    if not model.ranks:
        return {}
    head = model.ranking
    keys: dict[str, Any] = {"pooling_type": _RANK}
    if head.layers[-1].act == "identity":
        keys["classifier.activation"] = "identity"
    if model.family == "modernbert" and head.pooling in _POOLING:
        keys["classifier.pooling_type"] = _POOLING[head.pooling]
    return keys


def ranking_tensors(model: Model) -> tuple[WeightRef, ...]:
    """The layers of scores. ModelError where GGUF files have no form for one."""
    if not model.ranks:
        return ()
    *hidden, scores = model.ranking.layers
    usual = "gelu" if model.family == "modernbert" else "tanh"
    if any(layer.act != usual or (layer.norm is not None and layer.norm.bias is not None) for layer in hidden):
        raise ModelError(
            f"{model.checkpoint.path} has a layer before its scores with another function, or a norm with a bias, which GGUF"
            " files have no form for."
        )
    found = _layer("cls.output", scores)
    for layer in hidden:
        found += _layer("cls", layer)
        if layer.norm is not None:
            found.append(_weight("cls.norm.weight", layer.norm.weight))
    return tuple(found)


def _layer(name: str, layer: Dense) -> list[WeightRef]:
    bias = [] if layer.bias is None else [_weight(f"{name}.bias", layer.bias)]
    return [_weight(f"{name}.weight", layer.weight), *bias]


def _weight(name: str, array: Array) -> WeightRef:
    return ConstantWeight(name, array)
