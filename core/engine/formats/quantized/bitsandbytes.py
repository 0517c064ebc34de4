"""bitsandbytes: NF4 and FP4 (QLoRA, arXiv 2305.14314) as saved with load_in_4bit, and LLM.int8 (arXiv 2208.07339).

Four bits: weight u8 [N * K / 2, 1] holds the codes of the flattened matrix, the first of two in the high nibble;
weight.absmax has a scale for each run of `blocksize` weights; weight.quant_state.bitsandbytes__nf4 (or fp4) is JSON.
With double quantization absmax is u8: an index into weight.nested_quant_map, times weight.nested_absmax of its own run
of `nested_blocksize`, plus `nested_offset`. Eight bits: weight i8 [N, K], SCB f32 [N], weight = SCB / 127 * code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from engine.errors import FormatError
from engine.formats.checkpoint import ComposedTensor, Tensor
from engine.formats.hfblocks import FP4_TABLE, NF4_TABLE
from engine.formats.jsonfile import parse_object
from engine.formats.quantformats import FORMATS, Bytes, Floats
from engine.formats.quantized.blocks import octets, row
from engine.formats.quantized.grouped import Groups, check_scales, compose_groups
from engine.formats.quantized.parts import Parts
from engine.formats.quantized.settings import Settings, parse
from engine.formats.quantized.stored import floats

_BLOCK = 64
_TABLES = {"nf4": NF4_TABLE, "fp4": FP4_TABLE}


class _State(Settings):
    quant_type: Literal["nf4", "fp4"]
    blocksize: int
    shape: list[int]
    nested_blocksize: int | None = None
    nested_offset: float = 0.0


def compose(settings: Mapping[str, Any], parts: Parts) -> None:
    for kind in _TABLES:
        for name in parts.stems(f".quant_state.bitsandbytes__{kind}"):
            _compose_four(parts, name, kind)
    for stem in parts.stems(".SCB"):
        _compose_eight(parts, stem)


def _compose_four(parts: Parts, name: str, kind: str) -> None:
    blob = parts.take(f"{name}.quant_state.bitsandbytes__{kind}", ("U8",), (None,))
    state = parse(_State, parse_object(blob.data.tobytes(), f"quant_state of {name}"))
    rows, depth = _shape(name, state)
    codes = parts.take(name, ("U8",), (rows * depth // 2, 1))
    table = parts.take(f"{name}.quant_map", ("F32",), (16,))
    if state.quant_type != kind or not np.allclose(floats(table), _TABLES[kind], rtol=0, atol=1e-6):
        raise FormatError(f"{name}.quant_map is not the table of {kind}; other tables are not supported.")
    scales = _Scales(parts, name, state, -(-rows * depth // state.blocksize))
    check_scales(name, scales.at(np.arange(scales.count)))

    def read(start: int, stop: int) -> Bytes:
        runs = np.arange(start * depth, stop * depth, _BLOCK) // state.blocksize
        found = scales.at(runs).reshape(stop - start, -1)
        packed = codes.data[start * depth // 2 : stop * depth // 2]
        return row(octets(found, "<f4"), packed.reshape(*found.shape, _BLOCK // 2))

    form = FORMATS[kind.upper()]
    parts.put(ComposedTensor(name, (rows, depth), form, parts=(codes, *scales.parts), read=read))


def _shape(name: str, state: _State) -> tuple[int, int]:
    if len(state.shape) != 2 or min(state.shape) < 1:
        raise FormatError(f"quant_state of {name} gives the shape {state.shape}; it must be two positive numbers.")
    rows, depth = state.shape
    if depth % _BLOCK or state.blocksize < 1 or state.blocksize % _BLOCK:
        raise FormatError(
            f"{name} has {depth} inputs in runs of {state.blocksize}; supported are multiples of {_BLOCK} for both."
        )
    return rows, depth


class _Scales:
    """absmax of each run, which may be quantized itself."""

    def __init__(self, parts: Parts, name: str, state: _State, count: int) -> None:
        self.count = count
        self._state = state
        self._absmax = parts.take(f"{name}.absmax", ("F32", "U8"), (count,))
        self.parts: tuple[Tensor, ...] = (self._absmax,)
        self._nested = self._absmax.format.name == "U8"
        if not self._nested:
            return
        size = state.nested_blocksize
        if size is None or size < 1:
            raise FormatError(f"quant_state of {name} gives the nested_blocksize {size}; it must be positive.")
        self._size = size
        self._outer = parts.take(f"{name}.nested_absmax", ("F32",), (-(-count // size),))
        self._map = parts.take(f"{name}.nested_quant_map", ("F32",), (256,))
        self.parts += (self._outer, self._map)

    def at(self, runs: np.ndarray[Any, Any]) -> Floats:
        """f32 [len(runs)]."""
        if not self._nested:
            absmax: Floats = floats(self._absmax)[runs]
            return absmax
        inner: Floats = floats(self._map)[self._absmax.data[runs]]
        inner *= floats(self._outer)[runs // self._size]
        inner += np.float32(self._state.nested_offset)
        return inner


def _compose_eight(parts: Parts, stem: str) -> None:
    weight = parts.take(f"{stem}.weight", ("I8",), (None, None))
    rows, depth = weight.shape
    scale = parts.take(f"{stem}.SCB", ("F32",), (rows,))
    parts.maybe(f"{stem}.weight_format", ("U8",), (), (1,))
    groups = Groups(
        f"{stem}.weight",
        (rows, depth),
        8,
        depth,
        codes=lambda start, stop: weight.rows(start, stop) ^ np.uint8(128),
        scales=lambda start, stop: floats(scale, slice(start, stop))[:, None] / np.float32(127),
        zeros=128,
    )
    parts.put(compose_groups(groups, (weight, scale)))
