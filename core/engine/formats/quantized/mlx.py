"""MLX's quantized folders, as mlx-lm writes them. A module [.., N, K] has weight U32 [.., N, K * bits / 32], whose numbers follow
each other from the lowest bit on, and scales for groups along K:

    affine     scales and biases, floats [.., N, K / group]: weight = scale * code + bias; 2, 3, 4, 5, 6 or 8 bits
    mxfp4      scales U8 [.., N, K / 32], powers of two (E8M0); E2M1
    mxfp8      scales U8 [.., N, K / 32] likewise; E4M3
    nvfp4      scales U8 [.., N, K / 16], E4M3, and perhaps global_scale, a float for all; E2M1

config.json names bits and group of all modules, and of those that differ from them. Which of the last three a module has its
sizes tell. Affine weights are exact: up to four bits as Q4_1, five as Q5_1, and as W8M where they have more, or scales that are
no f16 numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from engine.errors import FormatError
from engine.formats.checkpoint import ComposedTensor, Tensor
from engine.formats.hfblocks import decode_e8m0
from engine.formats.language_model import plain_name
from engine.formats.quantformats import FORMATS, Bytes, Floats
from engine.formats.quantized import mxfp4, nvfp4
from engine.formats.quantized.blocks import BLOCK, are_halves, by_halves, in_turn, octets, row
from engine.formats.quantized.grouped import check_scales
from engine.formats.quantized.parts import Parts
from engine.formats.quantized.settings import Settings, parse
from engine.formats.quantized.stored import FLOATS

_MATRICES = ((None, None), (None, None, None))


class _Module(Settings):
    bits: Literal[2, 3, 4, 5, 6, 8]
    group_size: Literal[32, 64, 128]


class _Whole(Settings):
    """Not all modules need be affine, for which alone these count."""

    bits: int
    group_size: int


def describes(settings: Any) -> bool:
    """Whether an object of config.json is MLX's: it names no method, but bits and groups."""
    return isinstance(settings, Mapping) and "quant_method" not in settings and {"bits", "group_size"} <= set(settings)


def compose(settings: Mapping[str, Any], parts: Parts) -> None:
    usual = parse(_Whole, settings).model_dump()
    own = {plain_name(name): value for name, value in settings.items() if isinstance(value, Mapping)}
    for stem in parts.stems(".scales"):
        if f"{stem}.biases" in parts.tensors:
            _compose_affine(parts, stem, parse(_Module, own.get(stem, usual)))
        else:
            _compose_floats(parts, stem)


def _compose_affine(parts: Parts, stem: str, module: _Module) -> None:
    name = f"{stem}.weight"
    packed = parts.take(name, ("U32",), *_MATRICES)
    *before, words = packed.shape
    depth = words * 32 // module.bits
    if depth * module.bits != words * 32 or depth % module.group_size:
        raise FormatError(
            f"{name} has {words} words a row, which are no whole groups of {module.group_size} numbers of {module.bits} bits, as"
            " config.json describes it."
        )
    groups = (*before, depth // module.group_size)
    scales, biases = (parts.take(f"{stem}.{each}", FLOATS, groups) for each in ("scales", "biases"))
    check_scales(name, scales.dense())
    check_scales(name, biases.dense())
    form = _format(module.bits, scales, biases)
    blocks = np.arange(0, depth, BLOCK) // module.group_size

    def read(start: int, stop: int) -> Bytes:
        codes = _unpacked(packed.rows(start, stop), module.bits).reshape(-1, len(blocks), BLOCK)
        scale, bias = (each.format.decode(each.rows(start, stop))[:, blocks] for each in (scales, biases))
        return _ENCODERS[form](codes, scale, bias)

    parts.put(ComposedTensor(name, (*before, depth), FORMATS[form], parts=(packed, scales, biases), read=read))


def _format(bits: int, *floats: Tensor) -> str:
    if bits > 5 or not all(are_halves(tensor.dense()) for tensor in floats):
        return "W8M"
    return "Q5_1" if bits == 5 else "Q4_1"


def _unpacked(rows: Bytes, bits: int) -> Bytes:
    """u8 [n, bytes] as codes [n, bytes * 8 / bits]."""
    if bits == 8:
        return np.ascontiguousarray(rows)
    if bits == 4:
        return in_turn(rows)
    single = np.unpackbits(rows, axis=1, bitorder="little").reshape(len(rows), -1, bits)
    return np.packbits(single, axis=2, bitorder="little")[..., 0]


def _q4_1(codes: Bytes, scale: Floats, bias: Floats) -> Bytes:
    return row(octets(scale, "<f2"), octets(bias, "<f2"), by_halves(codes))


def _q5_1(codes: Bytes, scale: Floats, bias: Floats) -> Bytes:
    high = np.packbits(codes >> 4, axis=-1, bitorder="little")
    return row(octets(scale, "<f2"), octets(bias, "<f2"), high, by_halves(codes & np.uint8(15)))


def _w8m(codes: Bytes, scale: Floats, bias: Floats) -> Bytes:
    return row(octets(scale, "<f4"), octets(-bias, "<f4"), codes)


_ENCODERS = {"Q4_1": _q4_1, "Q5_1": _q5_1, "W8M": _w8m}


def _compose_floats(parts: Parts, stem: str) -> None:
    name = f"{stem}.weight"
    packed, scales = parts.take(name, ("U32",), *_MATRICES), parts.take(f"{stem}.scales", ("U8",), *_MATRICES)
    a_group = packed.shape[-1] / scales.shape[-1]  # words
    if packed.shape[:-1] != scales.shape[:-1] or a_group not in (2, 4, 8):
        raise FormatError(
            f"{name} and its scales are {list(packed.shape)} and {list(scales.shape)}, which is none of mxfp4, mxfp8 and nvfp4."
        )
    if a_group == 4:
        parts.put(mxfp4.composed(name, packed, scales))
    elif a_group == 8:
        parts.put(_mxfp8(name, packed, scales))
    else:
        parts.put(nvfp4.composed_mlx(parts, stem, packed, scales))


def _mxfp8(name: str, packed: Tensor, scales: Tensor) -> ComposedTensor:
    def read(start: int, stop: int) -> Bytes:
        numbers, exponents = packed.rows(start, stop), scales.rows(start, stop)
        if (numbers & 127 == 127).any() or (exponents == 255).any():
            raise FormatError(f"{name} holds numbers that are NaN; the file is damaged.")
        return row(octets(decode_e8m0(exponents), "<f4"), numbers.reshape(*exponents.shape, BLOCK))

    shape = (*scales.shape[:-1], scales.shape[-1] * BLOCK)
    return ComposedTensor(name, shape, FORMATS["FP8"], parts=(packed, scales), read=read)
