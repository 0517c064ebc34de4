"""Formats taken apart as codes and factors say exactly what their decoder says."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from engine.formats import FORMATS
from engine.testing.cases import CaseWeight, random_weight
from engine_cuda.repack import REPACKED, packed_codes, plain_codes, tiled, untiled


def numbers_of(form, parts):
    """f32 [rows, K], by the formula of engine_cuda.repack."""
    depth = parts.codes.shape[1]

    def spread(factors, fine):
        wide = np.repeat(factors.astype(np.float32), depth // factors.shape[1], axis=1)
        return wide if fine is None else wide * np.repeat(fine, depth // fine.shape[1], axis=1).astype(np.float32)

    scale = spread(parts.scale, parts.fine_scale)
    codes = parts.codes.astype(np.float32) - np.float32(form.zero) if form.table is None else form.table[parts.codes]
    least = 0 if parts.least is None else spread(parts.least, parts.fine_least)
    return codes * scale - least


@pytest.mark.parametrize("name", REPACKED)
def test_parts_are_the_decoder_s_numbers(name):
    """On random bytes, with scales of any size."""
    form, stored = REPACKED[name], FORMATS[name]
    rows = np.random.default_rng().integers(0, 256, (40, 3 * stored.block_bytes), np.uint8)
    if name in ("NVFP4S", "W8S", "W8M", "FP8", "NF4", "FP4"):  # f32 scales, of which random bytes are mostly none
        blocks = rows.reshape(40, 3, -1)
        scales = np.random.default_rng().standard_normal((40, 3, 2 if name == "W8M" else 1)).astype(np.float32)
        blocks[..., : 4 * scales.shape[2]] = scales.view(np.uint8)
    with np.errstate(all="ignore"):
        got, want = numbers_of(form, form.split(rows)), stored.decode(rows)
    assert got.shape == want.shape
    sound = np.isfinite(want)
    assert sound.mean() > 0.5
    np.testing.assert_array_equal(got[sound], want[sound])


@pytest.mark.parametrize("together", [0, 2, 4])
@pytest.mark.parametrize("depth", [32, 96, 256, 288])
def test_codes_come_back(together, depth):
    for bits in (4, 8):
        for rows in (5, 32, 70):
            codes = np.random.default_rng().integers(0, 1 << bits, (rows, depth), np.uint8)
            packed = packed_codes(codes, bits, together)
            assert packed.shape == (-(-rows // 32) * 2, depth * bits * 2) if together else packed.shape[1] % 32 == 0
            np.testing.assert_array_equal(plain_codes(packed, bits, rows, depth, together), codes)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.float16, np.float32])
def test_a_lane_has_the_factors_of_its_four_rows_beside_each_other(dtype):
    factors = np.random.default_rng().integers(0, 100, (70, 5)).astype(dtype)
    tiles = tiled(factors)
    assert tiles.shape == (3, 5 * 32) and tiles.dtype == dtype
    np.testing.assert_array_equal(untiled(tiles, 70), factors)
    for group in range(5):
        for row in range(8):
            lane = tiles[1, group * 32 + row * 4 :][:4]
            np.testing.assert_array_equal(lane, factors[32 + row : 64 : 8, group])


@pytest.mark.parametrize("together", [2, 4])
def test_a_lane_has_the_columns_of_its_operands(together):
    """mma.m16n8k16: of 16 columns lane t has 2 t, 2 t + 1, 2 t + 8 and 2 t + 9, or where four lie together those that Triton
    counts as these; what is 16 bits apart is a pair. Of codes of eight bits a lane has two words."""
    columns, found = np.arange(32), {}
    for bits in (4, 8):
        for column in columns:
            words = packed_codes((columns == column).astype(np.uint8)[None], bits, together).view("<u4")[0]
            [place] = np.nonzero(words)[0]
            word = place // (bits // 2) * (bits // 4) + place % (bits // 2)
            found[bits, word, (int(words[place]).bit_length() - 1) // bits] = column
    for lane in range(4):
        nibbles = [(found[4, lane, n], found[4, lane, n + 4]) for n in range(4)]
        octets = [(found[8, 2 * lane + hi, n], found[8, 2 * lane + hi, n + 2]) for hi in (0, 1) for n in (0, 1)]
        first = [2 * lane + 8 * n for n in range(4)] if together == 2 else [4 * lane + n for n in (0, 2, 16, 18)]
        assert nibbles == octets == [(column, column + 1) for column in first]


@pytest.mark.parametrize("name", [*REPACKED, "F32", "F16", "BF16", "F8_E4M3"])
def test_packed_bytes_are_told_ahead(name, device):
    rng = np.random.default_rng()
    weight = CaseWeight("w", random_weight(rng, name, (3, 5, 768)))
    [provider] = device.providers()["linear"]
    packed = provider.pack(weight, ("linear",), lambda _: None)
    assert provider.packed_bytes(weight) == packed.nbytes
    if name in ("Q5_K", "Q6_K", "Q2_K", "IQ1_S"):
        assert packed.nbytes > 1.25 * weight.rows().nbytes
