"""NVFP4 of Hugging Face checkpoints, as NVIDIA's Model Optimizer and compressed-tensors write it. A module [N, K] has

    ModelOpt             weight u8 [N, K / 2], weight_scale F8_E4M3 [N, K / 16], weight_scale_2 f32 []
    compressed-tensors   weight_packed u8, weight_scale likewise; weight_global_scale f32 [1], by which is divided

Byte j of a row holds the numbers 2j, low, and 2j + 1. Scales of activations are left out (nvfp4.py).
"""

from __future__ import annotations

import numpy as np

from engine.errors import FormatError
from engine.formats.checkpoint import ComposedTensor, Tensor
from engine.formats.nvfp4 import check_scale, with_scale
from engine.formats.quantformats import FORMATS, Bytes, Floats
from engine.formats.quantized.blocks import by_halves, in_turn, row
from engine.formats.quantized.parts import Parts
from engine.formats.quantized.stored import FLOATS, floats

_BLOCK, _GROUP = 64, 16
_ONE = ((), (1,), (1, 1))


def compose_modelopt(parts: Parts, stem: str) -> None:
    """The weight of the module ``stem``."""
    scale = parts.take(f"{stem}.weight_scale_2", ("F32",), *_ONE)
    parts.maybe(f"{stem}.input_scale", ("F32",), *_ONE)
    _compose(parts, stem, "weight", scale, floats(scale).reshape(-1))


def compose_packed(parts: Parts, stem: str) -> None:
    """The same of compressed-tensors."""
    divisor = parts.take(f"{stem}.weight_global_scale", ("F32",), *_ONE)
    parts.maybe(f"{stem}.input_global_scale", ("F32",), *_ONE)
    with np.errstate(divide="ignore"):  # an infinite scale is refused
        scale: Floats = np.reciprocal(floats(divisor).reshape(-1))
    _compose(parts, stem, "weight_packed", divisor, scale)


def _compose(parts: Parts, stem: str, ending: str, stored: Tensor, scale: Floats) -> None:
    check_scale(stored.name, scale)
    packed = parts.take(f"{stem}.{ending}", ("U8",), (None, None))
    rows, depth = packed.shape[0], packed.shape[1] * 2
    name = f"{stem}.weight"
    _check_depth(name, depth)
    scales = parts.take(f"{name}_scale", ("F8_E4M3",), (rows, depth // _GROUP))
    parts.put(_composed(name, (rows, depth), (packed, scales, stored), scale))


def composed_mlx(parts: Parts, stem: str, packed: Tensor, scales: Tensor) -> ComposedTensor:
    """The weight of the module ``stem`` of MLX, whose scale of the whole weight may be absent."""
    stored = parts.maybe(f"{stem}.global_scale", FLOATS, *_ONE)
    scale = np.ones(1, np.float32) if stored is None else floats(stored).reshape(-1)
    check_scale(f"{stem}.global_scale", scale)
    shape = (*scales.shape[:-1], scales.shape[-1] * _GROUP)
    _check_depth(f"{stem}.weight", shape[-1])
    return _composed(f"{stem}.weight", shape, (packed, scales, *([] if stored is None else [stored])), scale)


def _check_depth(name: str, depth: int) -> None:
    if depth % _BLOCK:
        raise FormatError(f"{name} has {depth} inputs; weights in NVFP4 have a multiple of {_BLOCK}.")


def _composed(name: str, shape: tuple[int, ...], parts: tuple[Tensor, ...], scale: Floats) -> ComposedTensor:
    """``parts``: the numbers, two a byte, and the scales of their groups, first."""
    packed, scales, depth = parts[0], parts[1], shape[-1]

    def read(start: int, stop: int) -> Bytes:
        codes = scales.rows(start, stop)
        if (codes >= 127).any():
            raise FormatError(f"{scales.name} holds numbers that are negative or NaN; the file is damaged.")
        by_block = (len(codes), depth // _BLOCK, -1)
        numbers = by_halves(in_turn(packed.rows(start, stop)).reshape(len(codes), -1, _GROUP))
        blocks = row(codes.reshape(by_block), numbers.reshape(by_block))
        return with_scale(blocks, np.broadcast_to(scale, len(codes)))

    return ComposedTensor(name, shape, FORMATS["NVFP4S"], parts=parts, read=read)
