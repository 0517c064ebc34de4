"""What mlx-lm changes in the tensors of the folders that it writes, undone: filters of convolutions lie as [C, width, 1] there,
and with these the norms of Qwen3-Next and Qwen 3.5 have 1 added to their weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from engine.errors import FormatError
from engine.formats.checkpoint import Tensor
from engine.formats.quantformats import FORMATS

_FILTERS = (".conv1d.weight", ".conv.conv.weight")
_SHIFTED = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
_NORMS = (
    ".input_layernorm.weight",
    ".post_attention_layernorm.weight",
    "model.norm.weight",
    ".q_norm.weight",
    ".k_norm.weight",
)
_FOLDED = ("falcon_h1",)


def undone(architecture: str, tensors: Mapping[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """The tensors as their makers publish them. FormatError for a model whose multipliers are in its weights there."""
    found = dict(tensors)
    turned = [name for name, tensor in tensors.items() if name.endswith(_FILTERS) and _is_turned(tensor.shape)]
    if not turned:
        return found
    if architecture in _FOLDED:
        raise FormatError(
            f"{folder} is written by mlx-lm, with the multipliers of {architecture} in its weights, which is not supported; use"
            " the folder that it was made of, or a GGUF file."
        )
    for name in turned:
        columns, width, _ = tensors[name].shape
        found[name] = replace(tensors[name], shape=(columns, 1, width))
    if architecture in _SHIFTED:
        for name, tensor in tensors.items():
            if name.endswith(_NORMS):
                weight = np.ascontiguousarray(tensor.dense() - np.float32(1), "<f4")
                found[name] = Tensor(name, tensor.shape, FORMATS["F32"], weight.reshape(-1).view(np.uint8))
    return found


def _is_turned(shape: tuple[int, ...]) -> bool:
    return len(shape) == 3 and shape[2] == 1 and shape[1] > 1
