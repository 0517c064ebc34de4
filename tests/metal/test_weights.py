"""Quantized formats repacked into MLX's affine groups: the very numbers of the format's own decoder."""

from __future__ import annotations

import threading

import mlx.core as mx
import numpy as np
import pytest

from engine.backend.v1 import Dims, providers_of
from engine.formats import FORMATS
from engine.ops import OPS, Case
from engine.testing.cases import CaseWeight
from engine.testing.checks import check_case
from engine.testing.running import Bench
from engine_metal.ops.dense import SORTED
from engine_metal.repack import REPACKED
from engine_metal.weights import CHUNK, Affine, Dense, pack

ROUNDED = {"IQ4_XS": 2.0**-23, "W8S": 2.0**-23}
"""Formats whose products have more bits than an f32: by how much a number may be off, of the group's largest."""
DENSE = sorted(name for name in FORMATS if name not in REPACKED and FORMATS[name].block > 1)


def random_rows(format_: str, rows: int, width: int) -> np.ndarray:
    """Random blocks, whose scales are ordinary numbers."""
    rng = np.random.default_rng()
    form = FORMATS[format_]
    blocks = rng.integers(0, 256, (rows, width // form.block, form.block_bytes), np.uint8)
    if format_ == "MXFP4":
        blocks[..., 0] = rng.integers(0, 253, blocks.shape[:2])  # beyond them numbers overflow
    if format_ in ("W8S", "W8M"):
        fields = 4 if format_ == "W8S" else 8
        numbers = rng.standard_normal((*blocks.shape[:2], fields // 4), np.float32)
        # At most 22 significant bits, as the format has them.
        blocks[..., :fields] = (numbers.view(np.uint32) & ~np.uint32(3)).view(np.uint8)
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize("format_", REPACKED)
def test_repacked_numbers_are_the_format_s(format_):
    rows, width = 37, 512
    weight = CaseWeight("w", (format_, random_rows(format_, rows, width), (rows, width)))
    with np.errstate(all="ignore"):
        packed, want = pack(weight, lambda _: None, lambda _: None), weight.dense()
        got = packed.unpack()
    finite = np.isfinite(want)
    assert isinstance(packed.handle, Affine) and finite.mean() > 0.5
    if format_ not in ROUNDED:
        np.testing.assert_array_equal(got[finite], want[finite])
        return
    groups = np.where(finite, np.abs(want), 0).reshape(rows, -1, 32).max(axis=-1, keepdims=True)
    # The code's own offset of 128 may be larger than the group's largest number.
    codes = np.broadcast_to(groups * 256, (rows, width // 32, 32)).reshape(want.shape)
    assert (np.abs(got - want)[finite] <= ROUNDED[format_] * codes[finite]).all()


@pytest.mark.parametrize("format_", DENSE)
def test_what_is_no_affine_group_is_left_dense(format_):
    weight = CaseWeight("w", (format_, random_rows(format_, 5, 512), (5, 512)))
    with np.errstate(all="ignore"):
        packed = pack(weight, lambda _: None, lambda _: None)
        np.testing.assert_array_equal(packed.unpack(), weight.dense())
    assert isinstance(packed.handle, Dense)


@pytest.mark.parametrize("format_", ["F32", "F16", "BF16", "Q8_0", "MXFP4", "IQ4_XS"])
def test_a_weight_is_used_on_another_thread_than_packed_it(format_):
    weight = CaseWeight("w", (format_, random_rows(format_, 5, 512), (5, 512)))
    packed = []
    packing = threading.Thread(target=lambda: packed.append(pack(weight, lambda _: None, lambda _: None)))
    packing.start()
    packing.join()
    assert packed[0].unpack().shape == (5, 512)


def test_a_matrix_is_repacked_in_pieces():
    """A matrix of more numbers than a piece; ``progress`` and ``check`` are told of all bytes."""
    width = 4096
    rows = CHUNK // width + 3
    rng = np.random.default_rng()
    raw = FORMATS["Q8_0"].encode(rng.standard_normal((rows, width), np.float32))
    weight = CaseWeight("w", ("Q8_0", raw, (rows, width)))
    read: list[int] = []
    asked: list[int] = []
    packed = pack(weight, read.append, asked.append)
    assert len(read) == 2 and sum(read) == weight.rows().nbytes
    assert asked == [packed.nbytes] and packed.nbytes == rows * width * 10 // 8
    np.testing.assert_array_equal(packed.unpack(), weight.dense())
    x = rng.standard_normal((2, width), np.float32)
    got = np.array(packed.handle.times(mx.array(x)))[:, -4:]
    np.testing.assert_allclose(got, x.astype(np.float64) @ weight.dense()[-4:].T, atol=1e-2)


@pytest.mark.parametrize("format_", ["F32", "F16", "Q4_0", "Q8_0"])
@pytest.mark.parametrize("per_choice", [False, True])
def test_many_choices_are_sorted_by_expert(format_, per_choice, device):
    """As many as are sorted, with an expert that nobody chose."""
    rng = np.random.default_rng()
    experts, choices = 7, 3
    tokens = SORTED // choices + 5
    ids = np.stack([rng.permutation(experts - 1)[:choices] for _ in range(tokens)]).astype(np.int32)
    raw = FORMATS[format_].encode(rng.standard_normal((experts * 24, 64), np.float32) / np.float32(8))
    x = rng.standard_normal((tokens * choices if per_choice else tokens, 64), np.float32)
    case = Case(
        f"{format_}, {tokens} tokens",
        Dims(T=tokens),
        {"x": x, "ids": ids},
        {"weight": (format_, raw, (experts, 24, 64))},
        attrs={"per_choice": per_choice},
    )
    check_case(Bench(device, OPS["moe_linear"], case), providers_of(device)["moe_linear"][0], None, rng)
