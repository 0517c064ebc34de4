"""What a GGUF file says of an encoder, and how any model's texts become one vector."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from engine.backend.v1 import WeightRef
from engine.errors import ModelError
from engine.formats.pooling import GGUF_DENSE, Pooling
from engine.models import Model
from engine.models.bert import first_position
from engine.program.weights import ConstantWeight, select

_POOLING: Mapping[Pooling, int] = {"mean": 1, "cls": 2, "last": 3}


def encoder_keys(model: Model) -> dict[str, Any]:
    """Windows are counted there from one end to the other; an activation is named where it is not the usual one."""
    keys: dict[str, Any] = {"attention.causal": False}
    if model.family == "modernbert" and model.config.act != "gelu":
        keys["hidden_activation"] = model.config.act
    if windows := model.config.windows:
        keys["attention.sliding_window"] = 2 * (max(windows) - 1)
        keys["attention.sliding_window_pattern"] = np.array(windows) > 0
    return keys


def vocabulary_keys(model: Model) -> dict[str, Any]:
    """How many types of tokens there are, which llama.cpp asks of an encoder."""
    types = model.weight("token_types.weight")
    count = 1 if types is None or _is_of_one_type(model) else types.shape[0]
    return {} if model.config.causal else {"tokenizer.ggml.token_type_count": count}


def _is_of_one_type(model: Model) -> bool:
    """Whether it ranks and has both texts' tokens of the first type, whatever there is beside."""
    return model.ranks and not model.config.second_text


def dense_tensors(model: Model, arch: str) -> tuple[WeightRef, ...]:
    """What pooled vectors go through. ModelError where it is not EmbeddingGemma's two matrices."""
    layers = model.checkpoint.embedding().layers
    known = arch == "gemma-embedding" and len(layers) == len(GGUF_DENSE)
    if layers and not (known and all(layer.bias is None and layer.act == "identity" for layer in layers)):
        raise ModelError(
            f"{model.checkpoint.path} has a module Dense behind its pooling, which GGUF files of {arch} have no form for."
        )
    return tuple(ConstantWeight(name, layer.weight) for name, layer in zip(GGUF_DENSE, layers, strict=False))


def pooling_keys(model: Model) -> dict[str, Any]:
    """How states become a vector, and the sizes of the matrices that it goes through."""
    wanted = model.checkpoint.embedding()
    keys: dict[str, Any] = {}
    for name, layer in zip(GGUF_DENSE, wanted.layers, strict=False):
        stem = name.removesuffix(".weight")
        keys |= {f"{stem}_feat_out": layer.weight.shape[0], f"{stem}_feat_in": layer.weight.shape[1]}
    pooling = wanted.pooling or (None if model.config.causal else "mean")
    return keys if pooling is None else keys | {"pooling_type": _POOLING[pooling]}


def bert_parts(model: Model, weight: WeightRef) -> Iterator[WeightRef]:
    """Positions begin with the first token's. Types that a model which ranks leaves alone would make a second text's others."""
    first = first_position(model.checkpoint)
    if weight.name == "position_embd.weight" and first:
        yield select(weight.name, weight, slice(first, first + model.config.max_context))
    elif weight.name == "token_types.weight" and _is_of_one_type(model):
        yield select(weight.name, weight, slice(0, 1))
    else:
        yield weight
