"""How a model's files would have a text embedded: sentence-transformers' modules.json, or GGUF's pooling_type with the matrices
of EmbeddingGemma."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np

from engine.backend.v1 import Array
from engine.errors import FormatError
from engine.formats.checkpoint import Tensor
from engine.formats.jsonfile import is_plain_name, read_list, read_object
from engine.formats.safetensors import read_safetensors

Pooling = Literal["last", "mean", "cls"]
"""The hidden state of the last token, the mean of all, or that of the first."""
_MODES: Mapping[str, Pooling] = {"lasttoken": "last", "mean": "mean", "cls": "cls"}
_SWITCHES: Mapping[str, Pooling] = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
}
_GGUF: Mapping[int, Pooling | None] = {0: None, 1: "mean", 2: "cls", 3: "last", 4: None}
"""0 is none: the file leaves it open. So does 4, of a model that ranks."""
GGUF_DENSE = ("dense_2.weight", "dense_3.weight")
Act = Literal["identity", "tanh", "relu", "gelu", "sigmoid", "softmax"]
_ACTS: Mapping[str, Act] = {
    "torch.nn.modules.linear.Identity": "identity",
    "torch.nn.modules.activation.Tanh": "tanh",
}


def _gelu(x: Array) -> Array:
    """Of each number alone, by the error function."""
    return np.array([0.5 * n * (1 + math.erf(n / math.sqrt(2))) for n in x.tolist()], np.float32)


def _softmax(x: Array) -> Array:
    powers = np.exp(x - x.max())
    return np.asarray(powers / powers.sum(), np.float32)


_FUNCTIONS: Mapping[Act, Callable[[Array], Array]] = {
    "identity": lambda x: x,
    "tanh": np.tanh,
    "relu": lambda x: np.maximum(x, 0),
    "gelu": _gelu,
    "sigmoid": lambda x: (0.5 * (1 + np.tanh(0.5 * x))).astype(np.float32),  # without an exponential that overflows
    "softmax": _softmax,
}


@dataclass(frozen=True)
class Norm:
    """A layer norm: weight f32 [out], bias f32 [out]."""

    weight: Array
    bias: Array | None
    eps: float

    def __call__(self, x: Array) -> Array:
        centred = x - x.mean()
        found = centred / np.sqrt(np.square(centred).mean() + self.eps) * self.weight
        return np.asarray(found if self.bias is None else found + self.bias, np.float32)


@dataclass(frozen=True)
class Dense:
    """What a pooled vector goes through: weight f32 [out, in], bias f32 [out], a function, and then perhaps a norm."""

    weight: Array
    bias: Array | None = None
    act: Act = "identity"
    norm: Norm | None = None

    def __call__(self, vector: Array) -> Array:
        """[in] -> f32 [out]."""
        found: Array = self.weight @ vector.astype(np.float32)
        if self.bias is not None:
            found += self.bias
        found = _FUNCTIONS[self.act](found)
        return found if self.norm is None else self.norm(found)


@dataclass(frozen=True)
class Embedding:
    """What an embedding is where a request does not say; ``pooling`` is None where no file says anything."""

    pooling: Pooling | None = None
    normalize: bool = True
    layers: tuple[Dense, ...] = ()


def of_folder(folder: Path) -> Embedding:
    """By modules.json, if there is one. FormatError where it asks for what is not there."""
    path = folder / "modules.json"
    if not path.is_file():
        return Embedding()
    pooling: Pooling | None = None
    normalize = False
    layers: list[Dense] = []
    for module in read_list(path):
        kind = module.get("type") if isinstance(module, dict) else None
        name = kind.rpartition(".")[2] if isinstance(kind, str) else None
        if name == "Pooling":
            pooling = _pooling(folder / _inner(path, module.get("path")) / "config.json")
        elif name == "Dense" and pooling is not None and not normalize:
            layers.append(_dense(folder / _inner(path, module.get("path"))))
        elif name == "Normalize":
            normalize = True
        elif name == "LogitScore":  # of a model that ranks: of embeddings nobody has said anything
            return Embedding()
        elif name != "Transformer":
            raise FormatError(
                f"{path} has the module {kind!r}; embeddings are made of Transformer, Pooling, Dense and Normalize alone, in this"
                " order."
            )
    return Embedding(pooling, normalize, chained(path, layers))


def of_gguf(architecture: str, metadata: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Embedding:
    """By the key pooling_type, and the matrices dense_2 and dense_3. FormatError where it asks for what is not there."""
    key = f"{architecture}.pooling_type"
    value = metadata.get(key, 0)
    if not isinstance(value, int) or value not in _GGUF:
        raise FormatError(
            f"The metadata's {key} is {value}; embeddings know 0 (open), 1 (mean), 2 (cls), 3 (last) and 4 (a ranking)."
        )
    layers = [Dense(tensors[name].dense()) for name in GGUF_DENSE if name in tensors]
    return Embedding(_GGUF[value], layers=chained("The file", layers))


def _dense(folder: Path) -> Dense:
    settings = read_object(folder / "config.json")
    act = settings.get("activation_function", "torch.nn.modules.activation.Tanh")
    if not isinstance(act, str) or act not in _ACTS:
        raise FormatError(f"{folder / 'config.json'} has the activation {act!r}; Identity and Tanh of torch are known.")
    path = folder / "model.safetensors"
    if not path.is_file():
        raise FormatError(f"{path} is missing; a module Dense keeps its matrix there.")
    held = read_safetensors(path)
    if "linear.weight" not in held or set(held) - {"linear.weight", "linear.bias"}:
        raise FormatError(f"{path} must hold linear.weight, and linear.bias if it has one, and nothing else.")
    bias = held["linear.bias"].dense() if "linear.bias" in held else None
    return Dense(held["linear.weight"].dense(), bias, _ACTS[act])


def chained(path: Path | str, layers: Sequence[Dense]) -> tuple[Dense, ...]:
    """FormatError where one does not take what the one before it gives."""
    for layer in layers:
        norm = layer.norm
        beside = [layer.bias, *((norm.weight, norm.bias) if norm else ())]
        if layer.weight.ndim != 2 or any(each is not None and each.shape != layer.weight.shape[:1] for each in beside):
            raise FormatError(
                f"{path} has a layer behind its pooling with a weight of the shape {layer.weight.shape}; it is [out, in], and"
                " what is added has as many numbers."
            )
    for one, other in pairwise(layers):
        if one.weight.shape[0] != other.weight.shape[1]:
            shapes = f"{one.weight.shape[0]} numbers, and the next takes {other.weight.shape[1]}"
            raise FormatError(f"{path} has a layer behind its pooling that gives {shapes}.")
    return tuple(layers)


def _inner(path: Path, name: Any) -> str:
    """A module's folder, which must not lead out of the model's."""
    if not is_plain_name(name):
        raise FormatError(f"{path} names {name!r}, which is not a plain name of a folder.")
    return name


def _pooling(path: Path) -> Pooling:
    settings = read_object(path)
    mode = settings.get("pooling_mode")
    modes = mode if isinstance(mode, list) else [] if mode is None else [mode]
    on = [name for name, value in settings.items() if name.startswith("pooling_mode_") and value is True]
    found = [_MODES.get(one) if isinstance(one, str) else None for one in modes] or [_SWITCHES.get(name) for name in on]
    if len(found) != 1 or found[0] is None:
        asked = ", ".join(map(str, modes or on)) or "nothing"
        raise FormatError(f"{path} pools by {asked}; embeddings know one of {', '.join(_MODES)}.")
    return found[0]
