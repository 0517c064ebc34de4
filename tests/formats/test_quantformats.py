"""Block formats: the table against ggml's, decoders against hand-made blocks, encoders against decoders."""

from __future__ import annotations

import dataclasses
import struct

import gguf
import numpy as np
import pytest

from engine.errors import FormatError
from engine.formats import FORMATS, Format

WITH_ENCODER = [form for form in FORMATS.values() if form.encode is not None and form.block > 1]


@pytest.mark.parametrize(
    "form", [form for form in FORMATS.values() if form.ggml_type is not None], ids=lambda f: f.name
)
def test_table_is_ggmls(form: Format) -> None:
    kind = gguf.GGMLQuantizationType[form.name]
    assert (form.ggml_type, (form.block, form.block_bytes)) == (kind.value, gguf.GGML_QUANT_SIZES[kind])


def test_every_format_of_gguf_that_decodes_is_there() -> None:
    decodable = {kind.name for kind in gguf.quants._type_traits} | {"F32", "F16"}
    assert decodable <= FORMATS.keys()


def test_formats_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        FORMATS["F32"].block = 2  # type: ignore[misc]


@pytest.mark.parametrize(("name", "dtype"), [("F32", "f4"), ("F16", "f2"), ("F64", "f8"), ("I8", "i1"), ("I64", "i8")])
def test_plain_formats(name: str, dtype: str) -> None:
    values = np.random.default_rng().integers(-100, 100, (3, 2, 8)).astype(dtype)
    raw = values.view(np.uint8).reshape(3, 2, -1)
    decoded = FORMATS[name].decode(raw)
    assert decoded.dtype == np.float32
    np.testing.assert_array_equal(decoded, values.astype(np.float32))
    np.testing.assert_array_equal(FORMATS[name].encode(decoded), raw)  # type: ignore[misc]


def test_bf16_rounds_to_nearest_even() -> None:
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x7F800000, 0x7FC00001, 0xFF800000], np.uint32)
    encode, decode = FORMATS["BF16"].encode, FORMATS["BF16"].decode
    assert encode is not None
    raw = encode(bits.view(np.float32))
    assert raw.view(np.uint16).tolist() == [0x3F80, 0x3F82, 0x3F81, 0x3F80, 0x7F80, 0x7FC0, 0xFF80]
    assert np.isnan(decode(encode(np.array([0x7F800001], np.uint32).view(np.float32)))).all()
    everything = np.arange(1 << 16, dtype=np.uint16)
    numbers = decode(everything.view(np.uint8))
    finite = ~np.isnan(numbers)
    np.testing.assert_array_equal(encode(numbers).view(np.uint16)[finite], everything[finite])


def test_q8_0_by_hand() -> None:
    quants = np.random.default_rng().integers(-128, 128, 32)
    raw = np.frombuffer(struct.pack("<e32b", 0.125, *quants), np.uint8)
    np.testing.assert_array_equal(FORMATS["Q8_0"].decode(raw), quants.astype(np.float32) * 0.125)


def test_q4_0_by_hand() -> None:
    nibbles = np.random.default_rng().integers(0, 16, 32)
    raw = np.frombuffer(struct.pack("<e", -0.5) + bytes((nibbles[:16] | nibbles[16:] << 4).tolist()), np.uint8)
    np.testing.assert_array_equal(FORMATS["Q4_0"].decode(raw), (nibbles - 8).astype(np.float32) * -0.5)


def test_q4_k_by_hand() -> None:
    """256 elements: f16 d and dmin, eight 6-bit scales and minima in 12 bytes, then nibbles by 64."""
    random = np.random.default_rng()
    scales, minima = random.integers(0, 64, 8), random.integers(0, 64, 8)
    packed = np.zeros(12, np.uint8)
    packed[:4] = scales[:4] | (scales[4:] >> 4) << 6
    packed[4:8] = minima[:4] | (minima[4:] >> 4) << 6
    packed[8:] = (scales[4:] & 15) | (minima[4:] & 15) << 4
    quants = random.integers(0, 16, (8, 32))
    nibbles = (quants[0::2] | quants[1::2] << 4).astype(np.uint8)
    raw = np.frombuffer(struct.pack("<ee", 0.25, 0.5) + packed.tobytes() + nibbles.tobytes(), np.uint8)
    expected = 0.25 * scales[:, None] * quants - 0.5 * minima[:, None]
    np.testing.assert_allclose(FORMATS["Q4_K"].decode(raw), expected.reshape(-1), rtol=1e-6)


def test_q6_k_by_hand() -> None:
    """256 elements in two halves: 4 low bits, 2 high bits, sixteen i8 scales, f16 d."""
    random = np.random.default_rng()
    quants, scales = random.integers(-32, 32, (2, 4, 32)), random.integers(-128, 128, 16)
    stored = quants + 32
    low = np.concatenate([stored[:, 0:2] & 15 | (stored[:, 2:4] & 15) << 4]).astype(np.uint8)
    high = sum((stored[:, part] >> 4) << 2 * part for part in range(4))
    raw = low.tobytes() + np.asarray(high, np.uint8).tobytes() + struct.pack("<16be", *scales, 0.5)
    expected = quants.reshape(16, 16) * scales[:, None] * 0.5
    decoded = FORMATS["Q6_K"].decode(np.frombuffer(raw, np.uint8))
    np.testing.assert_allclose(decoded, expected.reshape(-1), rtol=1e-6)


@pytest.mark.parametrize("form", WITH_ENCODER, ids=lambda f: f.name)
def test_encoders_come_back_near(form: Format) -> None:
    values = np.random.default_rng().standard_normal((3, 2, 2 * form.block), np.float32)
    assert form.encode is not None
    raw = form.encode(values)
    assert raw.shape == (3, 2, form.row_bytes(2 * form.block))
    assert raw.dtype == np.uint8
    decoded = form.decode(raw)
    assert decoded.shape == values.shape
    # ternary formats keep little; any mix-up of blocks or rows leaves no correlation at all
    assert np.corrcoef(decoded.ravel(), values.ravel())[0, 1] > (0.6 if form.name.startswith("TQ") else 0.98)


def test_rows_are_whole_blocks() -> None:
    assert FORMATS["Q6_K"].row_bytes(512) == 420
    with pytest.raises(FormatError, match="whole number of Q6_K blocks of 256"):
        FORMATS["Q6_K"].row_bytes(300)
