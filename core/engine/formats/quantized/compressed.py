"""compressed-tensors: int-, float-, pack-, nvfp4-pack- and mxfp4-pack-quantized (github.com/vllm-project/compressed-tensors).

One group of settings for all linear layers. A module [N, K] has

    int-quantized    weight i8 [N, K]; weight_scale [1], [N, 1] or [N, groups]; weight_zero_point i8 where not symmetric
    pack-quantized   weight_packed i32 [N, K / per], the first k lowest, codes with 2^(bits - 1) added; weight_scale;
                     weight_zero_point i32 [N / per, groups], packed along N; weight_g_idx; weight_shape
    float-quantized  as quant_method fp8
    nvfp4-pack-quantized, mxfp4-pack-quantized  as nvfp4.py and mxfp4.py have it
    mixed-precision  the last three, in groups of layers

and where activations are quantized by a fixed step, input_scale [1]. Which layers are left out the stored tensors show.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from engine.errors import FormatError
from engine.formats.checkpoint import ANY_INPUT, InputSpec, Tensor
from engine.formats.quantformats import Bytes
from engine.formats.quantized.fp8 import ROUNDED, compose_fp8
from engine.formats.quantized.gptq import group_order
from engine.formats.quantized.grouped import MOST, Groups, compose_groups
from engine.formats.quantized.parts import Parts
from engine.formats.quantized.settings import Settings, parse
from engine.formats.quantized.short_floats import compose_floats
from engine.formats.quantized.stored import FLOATS, Ints, floats, unpack, words


class _Weights(Settings):
    num_bits: int
    type: Literal["int", "float"] = "int"
    symmetric: bool = True
    strategy: Literal["tensor", "channel", "group", "tensor_group", "block"] | None = None
    group_size: int | None = None
    block_structure: list[int] | None = None


class _Inputs(Settings):
    num_bits: Literal[8]
    type: Literal["int", "float"] = "int"
    symmetric: Literal[True] = True
    dynamic: bool = False
    strategy: Literal["tensor", "token", "group"] | None = None


class _Group(Settings):
    weights: _Weights
    input_activations: _Inputs | None = None
    output_activations: None = None


class _Sparsity(Settings):
    format: Literal["dense"] = "dense"


class _MixedGroup(Settings):
    format: Literal["float-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized"]
    weights: _Weights


class _Mixed(Settings):
    config_groups: dict[str, _MixedGroup]


class _Settings(Settings):
    format: Literal["int-quantized", "float-quantized", "naive-quantized", "pack-quantized"]
    config_groups: dict[str, _Group]
    sparsity_config: _Sparsity | None = None


def compose(settings: Mapping[str, Any], parts: Parts) -> None:
    if settings.get("format") in ("nvfp4-pack-quantized", "mxfp4-pack-quantized"):
        return compose_floats(parts)
    if settings.get("format") == "mixed-precision":
        return _compose_mixed(parse(_Mixed, settings), parts)
    known = parse(_Settings, {**settings, "sparsity_config": settings.get("sparsity_config") or None})
    if len(known.config_groups) != 1:
        raise FormatError(
            f"quantization_config has {len(known.config_groups)} config_groups; supported is one for all layers."
        )
    [group] = known.config_groups.values()
    for stem in parts.stems(".weight_scale"):
        if known.format == "pack-quantized":
            _compose_packed(group, parts, stem)
        elif group.weights.type == "float":
            _compose_float(group, parts, stem)
        else:
            _compose_integers(group, parts, stem)


def _compose_mixed(settings: _Mixed, parts: Parts) -> None:
    blocks = {_block(group.weights) for group in settings.config_groups.values() if group.format == "float-quantized"}
    if len(blocks) > 1:
        raise FormatError(
            "quantization_config has layers of 8-bit floats with scales of different blocks; supported is one."
        )
    compose_floats(parts, blocks.pop() if blocks else None)


def _block(weights: _Weights) -> tuple[int, int] | None:
    if weights.strategy != "block":
        return None
    shape = weights.block_structure
    if shape is None or len(shape) != 2 or min(shape) < 1:
        raise FormatError(f"block_structure is {shape}; it must be two positive numbers.")
    return shape[0], shape[1]


def _compose_float(group: _Group, parts: Parts, stem: str) -> None:
    block = _block(group.weights)
    asked = group.input_activations
    spec = ANY_INPUT if asked is None or asked.type != "float" else ROUNDED
    compose_fp8(parts, f"{stem}.weight", f"{stem}.weight_scale", block, spec)


def _compose_integers(group: _Group, parts: Parts, stem: str) -> None:
    weight = parts.take(f"{stem}.weight", ("I8",), (None, None))
    shape = (weight.shape[0], weight.shape[1])
    scale, size, count = _scale(group, parts, stem, shape)
    zero = parts.maybe(f"{stem}.weight_zero_point", ("I8",), scale.shape)

    def zeros(start: int, stop: int) -> Ints:
        assert zero is not None
        stored = _by_row(zero.data.view(np.int8).reshape(zero.shape), shape[0], count)
        return stored[start:stop].astype(np.int16) + 128

    groups = Groups(
        f"{stem}.weight",
        shape,
        8,
        size,
        codes=lambda start, stop: weight.rows(start, stop) ^ np.uint8(128),
        scales=lambda start, stop: _by_row(floats(scale), shape[0], count)[start:stop],
        zeros=128 if zero is None else zeros,
    )
    found = tuple(part for part in (weight, scale, zero) if part is not None)
    parts.put(compose_groups(groups, found, _input(group, parts, stem)))


def _compose_packed(group: _Group, parts: Parts, stem: str) -> None:
    bits = group.weights.num_bits
    if bits not in (4, 8) or group.weights.type != "int":
        raise FormatError(
            f"pack-quantized weights of {bits} bits are not supported; supported are integers of 4 and 8."
        )
    per = 32 // bits
    packed = parts.take(f"{stem}.weight_packed", ("I32",), (None, None))
    shape = (packed.shape[0], packed.shape[1] * per)
    scale, size, count = _scale(group, parts, stem, shape)
    _check_shape(parts, stem, shape)
    zero = parts.maybe(f"{stem}.weight_zero_point", ("I32",), (-(-shape[0] // per), count))
    if zero is None and not group.weights.symmetric:
        raise FormatError(f"The checkpoint lacks {stem}.weight_zero_point, though its weights are not symmetric.")
    g_idx = parts.maybe(f"{stem}.weight_g_idx", ("I32",), (shape[1],))

    def codes(start: int, stop: int) -> Bytes:
        return unpack(words(packed)[start:stop], bits)

    def zeros(start: int, stop: int) -> Ints:
        assert zero is not None
        first = start // per
        stored = unpack(words(zero)[first : -(-stop // per)].T, bits)
        return stored[:, start - first * per : stop - first * per].T

    groups = Groups(
        f"{stem}.weight",
        shape,
        bits,
        size,
        codes=codes,
        scales=lambda start, stop: _by_row(floats(scale), shape[0], count)[start:stop],
        zeros=1 << bits - 1 if zero is None else zeros,
        order=None if g_idx is None else group_order(f"{stem}.weight_g_idx", g_idx, count),
    )
    found = tuple(part for part in (packed, scale, zero, g_idx) if part is not None)
    parts.put(compose_groups(groups, found, _input(group, parts, stem)))


def _scale(group: _Group, parts: Parts, stem: str, shape: tuple[int, int]) -> tuple[Tensor, int, int]:
    """The scales, k a group and groups a row."""
    rows, depth = shape
    size = depth
    if group.weights.strategy == "group":
        size = group.weights.group_size or 0
        if size < 1:
            raise FormatError(f"group_size is {group.weights.group_size}; it must be positive.")
    count = -(-depth // size)
    one = ((), (1,), (1, 1)) if group.weights.strategy == "tensor" else ()
    return parts.take(f"{stem}.weight_scale", FLOATS, (rows, count), *one), size, count


def _by_row(table: Ints, rows: int, count: int) -> Ints:
    """[rows, count] of what has one number a group, or one in all."""
    return np.broadcast_to(table.reshape((rows, count) if table.size == rows * count else (1, 1)), (rows, count))


def _check_shape(parts: Parts, stem: str, shape: tuple[int, int]) -> None:
    stored = parts.maybe(f"{stem}.weight_shape", ("I64", "I32"), (2,))
    if stored is None:
        return
    named = stored.data.view("<i8" if stored.format.name == "I64" else "<i4").tolist()
    if named != list(shape):
        raise FormatError(f"{stem}.weight_shape is {named}, but the packed weight has {list(shape)}.")


def _input(group: _Group, parts: Parts, stem: str) -> InputSpec:
    """How the activations are quantized: not at all, by a step for each row, or by a fixed step."""
    scale = parts.maybe(f"{stem}.input_scale", FLOATS, (), (1,))
    zero = parts.maybe(f"{stem}.input_zero_point", ("I8",), (), (1,))
    if zero is not None and zero.data.any():
        raise FormatError(f"{stem}.input_zero_point is not 0; supported are symmetric activations.")
    asked = group.input_activations
    if asked is None or asked.type == "float":
        return ANY_INPUT
    if asked.dynamic:
        return InputSpec(quantized="required")
    if scale is None or asked.strategy not in (None, "tensor"):
        raise FormatError(
            f"The checkpoint lacks {stem}.input_scale [1], the step to which its activations are rounded."
        )
    step = float(floats(scale).reshape(-1)[0])
    if not 0 < step <= MOST:
        raise FormatError(f"{stem}.input_scale is {step}; it must be a positive number.")
    return InputSpec(quantized="required", scale=step)
