"""NVFP4: numbers of E2M1, a scale of E4M3 for each 16 of them, and an f32 scale of the whole weight in a tensor beside it.

In a GGUF file NAME.weight has NAME.scale f32 [1], or of experts one each; a file without has none to multiply by.
NAME.input_scale is for devices that round activations to E2M1, too; here they stay as they are, which is nearer to the
unquantized model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from engine.errors import FormatError
from engine.formats.checkpoint import ComposedTensor, Tensor
from engine.formats.quantformats import FORMATS, Bytes, Floats

_BYTES = FORMATS["NVFP4"].block_bytes
MOST = 2.0**60
"""A larger scale is damage: products in f32 could overflow."""
# Whose scale is a factor of the architecture, by which what these experts give is multiplied, quantized or not.
_OF_THE_MODEL = {("gemma4", "ffn_down_exps")}


def check_scale(name: str, scale: Floats) -> Floats:
    """FormatError for one that is no number from 0 to 2^60."""
    if not ((scale >= 0) & (scale <= MOST)).all():  # false for NaN, too
        raise FormatError(f"{name} is not made of numbers from 0 to 2^60, as scales are; the file is damaged.")
    return scale


def with_scale(blocks: Bytes, scale: Floats) -> Bytes:
    """Rows of ggml's blocks uint8 [n, row bytes] as rows of NVFP4S, each with its scale f32 [n]."""
    parts = blocks.reshape(len(blocks), -1, _BYTES)
    before = np.broadcast_to(scale.astype("<f4")[:, None, None].view(np.uint8), (*parts.shape[:2], 4))
    return np.concatenate([before, parts], axis=-1).reshape(len(blocks), -1)


def compose_gguf(tensors: Mapping[str, Tensor], architecture: str) -> dict[str, Tensor]:
    """The tensors of a GGUF file, in which those of NVFP4 have their scales, and become NVFP4S."""
    composed = dict(tensors)
    for name, tensor in tensors.items():
        if tensor.format.name != "NVFP4":
            continue
        stem = name.removesuffix(".weight")
        of_the_model = (architecture, stem.rpartition(".")[2]) in _OF_THE_MODEL
        scale = None if of_the_model else composed.pop(f"{stem}.scale", None)
        composed.pop(f"{stem}.input_scale", None)
        composed[name] = _compose(tensor, scale)
    return composed


def _compose(tensor: Tensor, scale: Tensor | None) -> Tensor:
    matrices = tensor.shape[0] if len(tensor.shape) == 3 else 1
    rows = math.prod(tensor.shape[:-1]) // matrices
    factors = np.ones(matrices, np.float32)
    if scale is not None:
        if scale.format.name != "F32" or math.prod(scale.shape) not in (1, matrices):
            raise FormatError(
                f"The tensor {scale.name} is {scale.format.name} {list(scale.shape)}; the scale of {tensor.name} must be F32"
                f" [{matrices}]."
            )
        factors = np.broadcast_to(check_scale(scale.name, scale.dense().reshape(-1)), matrices)

    def read(start: int, stop: int) -> Bytes:
        return with_scale(tensor.rows(start, stop), factors[np.arange(start, stop) // rows])

    parts = (tensor,) if scale is None else (tensor, scale)
    return ComposedTensor(tensor.name, tensor.shape, FORMATS["NVFP4S"], parts=parts, read=read)
