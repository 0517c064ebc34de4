"""8-bit floats (E4M3) with one scale, one a row, or one a block such as 128 x 128 (DeepSeek-V3, arXiv 2412.19437, 3.3).

A module [N, K] has weight F8_E4M3 [N, K] and weight_scale_inv or weight_scale, by which the weight is multiplied; where a file
keeps all experts in one tensor, NAME is F8_E4M3 [experts, N, K] and NAME_scale_inv has each one's scale, or the blocks of each.
Checkpoints that round activations to E4M3, too, allow a device with products of such numbers to do so, with a scale a row; on
all others they stay as they are, which is nearer to the unquantized model.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, Literal

import numpy as np

from engine.errors import FormatError
from engine.formats.checkpoint import ComposedTensor, InputSpec, Tensor
from engine.formats.quantformats import FORMATS, Bytes, Floats
from engine.formats.quantized.blocks import BLOCK, octets, row
from engine.formats.quantized.grouped import check_scales
from engine.formats.quantized.parts import Parts
from engine.formats.quantized.settings import Settings, parse
from engine.formats.quantized.stored import FLOATS, floats

_FORMS = (*FLOATS, "F8_E8M0")
"""Of scales."""
ROUNDED = InputSpec(quantized="fp8")
"""All schemes round activations to E4M3. A static scale, or a bound of one, is not used: one found for each row is nearer."""
_SCALES = ("_scale_inv", ".weight_scale")
_OF_INPUTS = ("input_scale", "input_scale_ub", "activation_scale")


class _Settings(Settings):
    fmt: Literal["e4m3"] = "e4m3"
    activation_scheme: Literal["dynamic", "static"] = "dynamic"
    weight_block_size: list[int] | None = None


def compose(settings: Mapping[str, Any], parts: Parts) -> None:
    known = parse(_Settings, settings)
    block = known.weight_block_size
    if block is not None and (len(block) != 2 or min(block) < 1):
        raise FormatError(f"weight_block_size is {block}; it must be two positive numbers.")
    for ending in _SCALES:
        for stem in parts.stems(ending):
            name = stem if ending == "_scale_inv" else f"{stem}.weight"
            compose_fp8(parts, name, stem + ending, None if block is None else (block[0], block[1]), ROUNDED)


def compose_fp8(parts: Parts, name: str, scales: str, block: tuple[int, int] | None, spec: InputSpec) -> None:
    """The weight of this name, with the scales of that one; ``block`` is that of scales [N / n, K / k]."""
    weight = parts.take(name, ("F8_E4M3",), (None, None), (None, None, None))
    *experts, rows, depth = weight.shape
    if depth % BLOCK:
        raise FormatError(f"{name} has {depth} inputs; quantized weights have a multiple of {BLOCK}.")
    scale, (high, wide) = _scale(parts, scales, weight.shape, block)
    before = name.removesuffix("weight") if name.endswith(".weight") else f"{name}_"
    for given in _OF_INPUTS:
        parts.maybe(before + given, FLOATS, *([(*experts,), (*experts, 1, 1)] if experts else [(), (1,)]))
    check_scales(name, floats(scale))
    blocks = np.arange(0, depth, BLOCK) // wide

    def scales_of(start: int, stop: int) -> Floats:
        table = floats(scale).reshape(-1, -(-depth // wide))
        expert, row = np.divmod(np.arange(start, stop), rows)
        found: Floats = table[expert * -(-rows // high) + row // high][:, blocks]
        return found

    def read(start: int, stop: int) -> Bytes:
        codes = weight.rows(start, stop)
        if (codes & 127 == 127).any():
            raise FormatError(f"{name} holds numbers that are NaN; the file is damaged.")
        return row(octets(scales_of(start, stop), "<f4"), codes.reshape(len(codes), -1, BLOCK))

    parts.put(ComposedTensor(name, weight.shape, FORMATS["FP8"], input=spec, parts=(weight, scale), read=read))


def _scale(
    parts: Parts, name: str, shape: tuple[int, ...], block: tuple[int, int] | None
) -> tuple[Tensor, tuple[int, int]]:
    """The scales, and how many rows and inputs share one."""
    *experts, rows, depth = shape
    if block is not None:
        if block[1] % BLOCK and block[1] < depth:
            raise FormatError(f"The blocks of {name} are {block[1]} inputs wide; supported are multiples of {BLOCK}.")
        return parts.take(name, _FORMS, (*experts, -(-rows // block[0]), -(-depth // block[1]))), block
    if experts:  # gate and up have one each, or one together
        halves = [(*experts, 2, 1)] if rows % 2 == 0 else []
        tensor = parts.take(name, _FORMS, (*experts,), (*experts, 1, 1), *halves)
    else:
        tensor = parts.take(name, _FORMS, (), (1,), (1, 1), (rows,), (rows, 1))
    each = tensor.data.size // tensor.format.block_bytes // prod(experts)
    return tensor, (rows // each, depth)
