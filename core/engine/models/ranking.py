"""Cross-encoders: how the states of a query and a document, read together, become one score. They are what transformers calls
``...ForSequenceClassification`` with one label, or GGUF files with the tensors ``cls`` and ``cls.output``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..backend.v1 import Array
from ..errors import ModelError
from ..formats import Checkpoint
from ..formats.pooling import Act, Dense, Embedding, Norm, Pooling, chained


@dataclass(frozen=True)
class _Head:
    """The names of a hidden layer, of which files have one or another, with the function behind it and perhaps a norm; and of the
    layer of scores."""

    scores: str
    hidden: tuple[str, ...] = ()
    act: Act = "identity"
    norm: str = ""


_ROBERTA = _Head("classifier.out_proj", ("classifier.dense",), "tanh")
_HEADS: Mapping[str, _Head] = {
    "bert": _Head("classifier", ("bert.pooler.dense", "pooler.dense"), "tanh"),
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "distilbert": _Head("classifier", ("pre_classifier",), "relu"),
    "modernbert": _Head("classifier", ("head.dense",), "gelu", "head.norm"),
}
_DECODER = _Head("score")
_GGUF_ACTS: Mapping[str, Act] = {"modern-bert": "gelu"}
_SWITCHES: Mapping[str, Act] = {
    "identity": "identity",
    "sigmoid": "sigmoid",
    "torch.nn.modules.linear.Identity": "identity",
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
}
_POOLINGS: Mapping[Pooling, tuple[Any, ...]] = {"mean": ("mean", 1), "cls": ("cls", 2)}
_TWO = ["yes", "no"]
"""The labels of files whose two scores are those of these answers."""


def ranks(checkpoint: Checkpoint) -> bool:
    """Whether there is a layer of scores."""
    return f"{_head(checkpoint).scores}.weight" in checkpoint.tensors


def head_tensors(checkpoint: Checkpoint) -> tuple[str, ...]:
    """The names of what ``ranking_head`` reads, which no step does."""
    if not ranks(checkpoint):
        return ()
    head = _head(checkpoint)
    names = (f"{name}.{kind}" for name in (head.scores, *head.hidden, head.norm) for kind in ("weight", "bias"))
    return tuple(name for name in names if name in checkpoint.tensors)


def ranking_head(checkpoint: Checkpoint, causal: bool, eps: float) -> Embedding:
    """What the states of a query and a document go through, to one score, or to several of which the first is it. ModelError
    where the files have no such head, or one of another kind."""
    path, head = checkpoint.path, _head(checkpoint)
    if not ranks(checkpoint):
        raise ModelError(
            "This model has no layer that scores a query and a document together; use one made for reranking."
        )
    hidden = next((name for name in head.hidden if f"{name}.weight" in checkpoint.tensors), None)
    if hidden is None and (checkpoint.kind == "hf" or checkpoint.architecture == "bert") and head.hidden:
        raise ModelError(
            f"The checkpoint {path} lacks the tensor {head.hidden[0]}.weight, which its scores are made by; convert the model"
            " again."
        )
    layers = []
    if hidden is not None:
        bias, norm = _vector(checkpoint, hidden, "bias"), _norm(checkpoint, eps, head)
        layers.append(Dense(_matrix(checkpoint, hidden), bias, head.act, norm))
    scores = _matrix(checkpoint, head.scores)
    count, labels = scores.shape[0], checkpoint.metadata.get(_key(checkpoint, "output_labels"))
    if count != 1 and not (count == 2 and isinstance(labels, list) and labels == _TWO):
        raise ModelError(
            f"{path} has a layer of {count} scores; a ranking takes one, or two that are labelled yes and no."
        )
    act = _last(checkpoint) if count == 1 else "softmax"
    layers.append(Dense(scores, _vector(checkpoint, head.scores, "bias"), act))
    return Embedding(_pooling(checkpoint, causal), normalize=False, layers=chained(path, layers))


def answers_head(checkpoint: Checkpoint, rows: Array, bias: Array | None) -> Embedding:
    """What the state of the last token goes through, where the score is a logit, or how much it is above another. ``rows`` f32
    [1 or 2, hidden] and ``bias`` f32 [1 or 2] are the head's."""
    weight, added = (x if x is None or len(x) == 1 else x[:1] - x[1:] for x in (rows, bias))
    assert weight is not None
    return Embedding("last", normalize=False, layers=(Dense(weight, added, _last(checkpoint)),))


def _head(checkpoint: Checkpoint) -> _Head:
    if checkpoint.kind == "gguf":
        return _Head("cls.output", ("cls",), _GGUF_ACTS.get(checkpoint.architecture, "tanh"), "cls.norm")
    return _HEADS.get(checkpoint.architecture, _DECODER)


def _key(checkpoint: Checkpoint, name: str) -> str:
    return f"{checkpoint.architecture}.classifier.{name}"


def _pooling(checkpoint: Checkpoint, causal: bool) -> Pooling:
    """The state of a decoder's last token and of an encoder's first, or the mean of all where ModernBERT's files say so."""
    if causal or _head(checkpoint) is _DECODER:
        return "last"
    data, modern = checkpoint.metadata, checkpoint.architecture in ("modernbert", "modern-bert")
    if data.get("classifier_activation", "gelu") != "gelu":
        act = data["classifier_activation"]
        raise ModelError(f"The configuration's classifier_activation is {act!r}; gelu is what is known.")
    told = data.get("classifier_pooling", "cls")
    if checkpoint.kind == "gguf":
        told = data.get(_key(checkpoint, "pooling_type"), 1 if modern else 2)
    for known, kinds in _POOLINGS.items():
        if isinstance(told, (str, int)) and told in kinds:
            return known
    raise ModelError(f"The configuration pools by {told!r} before its layer of scores; cls and mean are known.")


def _last(checkpoint: Checkpoint) -> Act:
    """What a score goes through, as sentence-transformers has it: a sigmoid unless a file names another function."""
    told = checkpoint.ranking().act or "sigmoid"
    if not isinstance(told, str) or told not in _SWITCHES:
        raise ModelError(f"The configuration puts scores through {told!r}; Identity and Sigmoid of torch are known.")
    return _SWITCHES[told]


def _matrix(checkpoint: Checkpoint, name: str) -> Array:
    return np.atleast_2d(_numbers(checkpoint, f"{name}.weight"))  # llama.cpp's converter leaves out an axis of one


def _vector(checkpoint: Checkpoint, name: str, kind: str) -> Array | None:
    return _numbers(checkpoint, f"{name}.{kind}") if f"{name}.{kind}" in checkpoint.tensors else None


def _norm(checkpoint: Checkpoint, eps: float, head: _Head) -> Norm | None:
    weight = _vector(checkpoint, head.norm, "weight") if head.norm else None
    if weight is None:
        return None
    return Norm(weight, _vector(checkpoint, head.norm, "bias"), eps)


def _numbers(checkpoint: Checkpoint, name: str) -> Array:
    """ModelError where they are not finite."""
    with np.errstate(all="ignore"):
        found = checkpoint.tensors[name].dense()
    if not np.isfinite(found).all():
        raise ModelError(f"{name} of {checkpoint.path} must hold finite numbers.")
    return found
