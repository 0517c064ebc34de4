"""What a GGUF file says of a model that ranks: its layers of scores and its template, by the names that llama.cpp reads."""

from __future__ import annotations

from typing import Any

from engine.backend.v1 import Array, WeightRef
from engine.errors import ModelError
from engine.formats.pooling import Dense
from engine.formats.ranking_files import pair_text
from engine.models import Model
from engine.program.weights import ConstantWeight

_RANK = 4
_POOLING = {"mean": 1, "cls": 2}


def ranking_keys(model: Model, arch: str) -> dict[str, Any]:
    """How two texts are put together, and how their states become a score. That it goes through nothing is a key of this
    engine's own. ModelError where GGUF files have no form for it."""
    files = model.checkpoint.ranking()
    if not model.ranks and not files.answers:
        return {}
    keys: dict[str, Any] = {f"{arch}.pooling_type": _RANK}
    if _two_answers(model):
        keys[f"{arch}.classifier.output_labels"] = ["yes", "no"]
    elif model.ranking.layers[-1].act == "identity":
        keys[f"{arch}.classifier.activation"] = "identity"
    if model.family == "modernbert":
        keys[f"{arch}.classifier.pooling_type"] = _POOLING[model.ranking.pooling or "cls"]
    if files.by_messages:
        text = pair_text(files, model.checkpoint.chat_template(), "{query}", "{document}")
        keys["tokenizer.chat_template.rerank"] = text
    elif files.prompt:
        raise ModelError(f"{model.checkpoint.path} has a prompt for queries, which GGUF files have no form for.")
    return keys


def ranking_tensors(model: Model) -> tuple[WeightRef, ...]:
    """The layers of scores, or the rows of the head that are one. ModelError where GGUF files have no form for one."""
    if not model.ranks and not model.checkpoint.ranking().answers:
        return ()
    if _two_answers(model):
        return (_weight("cls.output.weight", model.answer_rows()),)
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


def _two_answers(model: Model) -> bool:
    """Whether the score is how likely one answer is beside another, of which llama.cpp wants both rows."""
    if len(model.checkpoint.ranking().answers) < 2:
        return False
    [layer] = model.ranking.layers
    return layer.act == "sigmoid" and layer.bias is None and model.config.logit_scale == 1


def _layer(name: str, layer: Dense) -> list[WeightRef]:
    bias = [] if layer.bias is None else [_weight(f"{name}.bias", layer.bias)]
    return [_weight(f"{name}.weight", layer.weight), *bias]


def _weight(name: str, array: Array) -> WeightRef:
    return ConstantWeight(name, array)
