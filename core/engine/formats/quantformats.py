"""The number formats of stored tensors: block shape, bytes, decoder and encoder.

A row of `cols` elements is `cols // block` blocks of `block_bytes` bytes each.  The layouts of the
quantized formats of GGUF are ggml's; the `gguf` package decodes and encodes them, and is imported on first use.
Those of Hugging Face checkpoints are in `hfblocks`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.errors import FormatError
from engine.formats import hfblocks
from engine.formats.hfblocks import Bytes, Floats

__all__ = ["FORMATS", "Bytes", "Floats", "Format"]


@dataclass(frozen=True)
class Format:
    """One number format.

    name: ggml's name, or the engine's own; block: elements of a block; block_bytes: its size; ggml_type: its number in a GGUF,
    or None where GGUF has none.
    decode: uint8 [..., row_bytes] -> f32 [..., cols].
    encode: f32 [..., cols] -> uint8 [..., row_bytes], or None where there is no encoder.
    """

    name: str
    block: int
    block_bytes: int
    ggml_type: int | None
    decode: Callable[[Bytes], Floats] = field(compare=False, repr=False)
    encode: Callable[[Floats], Bytes] | None = field(compare=False, repr=False)

    def row_bytes(self, cols: int) -> int:
        """Bytes of a row of `cols` elements; FormatError unless `cols` is whole blocks."""
        if cols % self.block:
            raise FormatError(f"a row of {cols} elements is not a whole number of {self.name} blocks of {self.block}.")
        return cols // self.block * self.block_bytes


def _as_bytes(values: npt.NDArray[Any]) -> Bytes:
    return np.ascontiguousarray(values).view(np.uint8)


def _decode_plain(dtype: str, raw: Bytes) -> Floats:
    with np.errstate(over="ignore"):  # what is too large for the target is infinite there
        return np.ascontiguousarray(raw).view(dtype).astype(np.float32)


def _encode_plain(dtype: str, values: Floats) -> Bytes:
    with np.errstate(over="ignore"):
        return _as_bytes(values.astype(dtype))


def _decode_bf16(raw: Bytes) -> Floats:
    return (np.ascontiguousarray(raw).view("<u2").astype(np.uint32) << 16).view(np.float32)


def _encode_bf16(values: Floats) -> Bytes:
    """Rounds to nearest, ties to even; a NaN stays a NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return _as_bytes(np.where(np.isnan(values), bits >> 16 | 0x40, rounded).astype("<u2"))


def _decode_block(name: str, raw: Bytes) -> Floats:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    # f16 scales of damaged or extreme blocks overflow to inf, which is their value
    with np.errstate(all="ignore"):
        return dequantize(np.ascontiguousarray(raw), GGMLQuantizationType[name]).astype(np.float32, copy=False)


def _encode_block(name: str, values: Floats) -> Bytes:
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    with np.errstate(all="ignore"):
        return _as_bytes(quantize(np.ascontiguousarray(values, np.float32), GGMLQuantizationType[name]))


def _plain(name: str, dtype: str, ggml_type: int | None) -> Format:
    size = np.dtype(dtype).itemsize
    return Format(name, 1, size, ggml_type, partial(_decode_plain, dtype), partial(_encode_plain, dtype))


def _blocks(name: str, block: int, block_bytes: int, ggml_type: int, encodes: bool = False) -> Format:
    encode = partial(_encode_block, name) if encodes else None
    return Format(name, block, block_bytes, ggml_type, partial(_decode_block, name), encode)


_TABLE = (
    _plain("F32", "<f4", 0),
    _plain("F16", "<f2", 1),
    Format("BF16", 1, 2, 30, _decode_bf16, _encode_bf16),
    _blocks("Q4_0", 32, 18, 2, encodes=True),
    _blocks("Q4_1", 32, 20, 3, encodes=True),
    _blocks("Q5_0", 32, 22, 6, encodes=True),
    _blocks("Q5_1", 32, 24, 7, encodes=True),
    _blocks("Q8_0", 32, 34, 8, encodes=True),
    _blocks("Q2_K", 256, 84, 10),
    _blocks("Q3_K", 256, 110, 11),
    _blocks("Q4_K", 256, 144, 12),
    _blocks("Q5_K", 256, 176, 13),
    _blocks("Q6_K", 256, 210, 14),
    _blocks("IQ2_XXS", 256, 66, 16),
    _blocks("IQ2_XS", 256, 74, 17),
    _blocks("IQ3_XXS", 256, 98, 18),
    _blocks("IQ1_S", 256, 50, 19),
    _blocks("IQ4_NL", 32, 18, 20),
    _blocks("IQ3_S", 256, 110, 21),
    _blocks("IQ2_S", 256, 82, 22),
    _blocks("IQ4_XS", 256, 136, 23),
    _blocks("IQ1_M", 256, 56, 29),
    _blocks("TQ1_0", 256, 54, 34, encodes=True),
    _blocks("TQ2_0", 256, 66, 35, encodes=True),
    _blocks("MXFP4", 32, 17, 39, encodes=True),
    _blocks("NVFP4", 64, 36, 40),
    Format("W4Z", 32, 19, None, hfblocks.decode_w4z, None),
    Format("W8S", 32, 36, None, hfblocks.decode_w8s, None),
    Format("W8M", 32, 40, None, hfblocks.decode_w8m, None),
    Format("FP8", 32, 36, None, hfblocks.decode_fp8, None),
    Format("NF4", 64, 36, None, hfblocks.decode_nf4, None),
    Format("FP4", 64, 36, None, hfblocks.decode_fp4, None),
    Format("NVFP4S", 64, 40, None, hfblocks.decode_nvfp4s, None),
    Format("F8_E4M3", 1, 1, None, hfblocks.decode_e4m3, None),
    # no weights, but their scales
    Format("F8_E8M0", 1, 1, None, hfblocks.decode_e8m0, None),
    # no weights, but buffers that checkpoints carry beside them
    _plain("F64", "<f8", 28),
    _plain("I8", "<i1", 24),
    _plain("I16", "<i2", 25),
    _plain("I32", "<i4", 26),
    _plain("I64", "<i8", 27),
    _plain("U8", "<u1", None),
    _plain("U32", "<u4", None),
    _plain("BOOL", "?", None),
)

FORMATS: Mapping[str, Format] = MappingProxyType({form.name: form for form in _TABLE})
