"""The KV cache: the plain layout of the references, kv_write and kv_copy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ..backend.v1 import Array, Dims, KVLayout, KVSpec
from . import dtypes
from .cases import random_batch
from .spec import REQUIRED, Case, Generator, OpSpec, Tolerance

# Dtypes whose numbers are whole, times a scale a token and head, and the greatest of them. int16 stops at 8191 so that there is
# room in 32 bits for sums of products with numbers of 16 bits.
WHOLE = {"int8": 127, "int16": 8191}


def _plain_shapes(spec: KVSpec) -> Mapping[str, tuple[tuple[int, ...], str]]:
    tokens = (spec.blocks, spec.block_size, spec.kv_heads)
    kinds = ("k",) if spec.latent else ("k", "v")
    tag = "u8" if spec.dtype == "fp8" else spec.dtype
    shapes: dict[str, tuple[tuple[int, ...], str]] = {kind: ((*tokens, spec.head_dim), tag) for kind in kinds}
    if spec.dtype in WHOLE:
        shapes |= {f"{kind}_scale": (tokens, "f32") for kind in kinds}
    return shapes


# k and v are [blocks, block_size, kv_heads, head_dim]; for int8 and int16, k_scale and v_scale are f32 [blocks, block_size,
# kv_heads]. fp8 (E4M3) has no scales: its numbers have exponents of their own, from 2^-9 to 448, so a scale would add range,
# which keys and values do not need, and no precision.
PLAIN = KVLayout("plain", ("f32", "f16", "bf16", "int16", "int8", "fp8"), _plain_shapes)


def quantize_kv(values: Array, dtype: str) -> tuple[Array, Array]:
    """f32 [..., head_dim] as int8 or int16 of the same shape and f32 scales [...]: scale = absmax / most, of 127 or 8191,
    and q = value * (most / absmax), to nearest, ties to even."""
    most, largest = np.float32(WHOLE[dtype]), np.abs(values).max(axis=-1).astype(np.float32)
    scale = largest / most
    inverse = np.divide(most, largest, out=np.zeros_like(largest), where=np.isfinite(largest) & (largest > 1e-30))
    with np.errstate(invalid="ignore"):  # 0 * inf is NaN, and becomes 0
        steps = values * inverse[..., None]
    return dtypes.from_f32(steps, dtype), scale


def read_kv(stored: Array, scale: Array | None) -> Array:
    """Stored k or v [..., kv_heads, head_dim] as f32; whole numbers with their scales [..., kv_heads]."""
    values = dtypes.to_f32(stored, dtypes.storage_tag(stored))
    if scale is None:
        return values
    with np.errstate(invalid="ignore"):  # 0 * inf is NaN, as it should be
        scaled: Array = values * scale[..., None]
    return scaled


_SCALES = {"k": "k_scale", "v": "v_scale", "states.0": "states.2", "states.1": "states.3"}


def plain_states(spec: KVSpec, contents: Mapping[str, Array]) -> dict[str, Array]:
    """f32 contents of a case (k and v, or the states.0 and states.1 of kv_copy) in the plain layout: stored in the
    spec's dtype, whole numbers with the scales beside them (k_scale and v_scale, or states.2 and states.3)."""
    states: dict[str, Array] = {}
    for name, values in contents.items():
        if spec.dtype in WHOLE:
            states[name], states[_SCALES[name]] = quantize_kv(values, spec.dtype)
        else:
            states[name] = dtypes.from_f32(values, spec.dtype)
    return states


def kv_write(
    *,
    new_k: Array,
    kv_slots: Array,
    k: Array,
    kv_heads: int,
    head_dim: int,
    new_v: Array | None = None,
    v: Array | None = None,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    latent: bool = False,
) -> tuple[()]:
    """Stores new_k and new_v f32 [T, kv_heads * head_dim] at kv_slots i32 [T] = block * block_size + offset; a negative
    slot is skipped. States in the plain layout, converted to their dtype (int8, int16: one scale a token and head). A ``latent``
    cache has keys alone: no new_v, v and v_scale."""
    wanted = kv_slots >= 0
    blocks, offsets = np.divmod(kv_slots[wanted], k.shape[1])
    for new, stored, scale in ((new_k, k, k_scale), (new_v, v, v_scale)):
        if new is None or stored is None:
            continue
        heads = new[wanted].reshape(-1, kv_heads, head_dim).astype(np.float32)
        if scale is None:
            stored[blocks, offsets] = dtypes.from_f32(heads, dtypes.storage_tag(stored))
        else:
            stored[blocks, offsets], scale[blocks, offsets] = quantize_kv(heads, dtypes.storage_tag(stored))
    return ()


def kv_copy(*, block_copies: Array, states: Sequence[Array]) -> tuple[()]:
    """Copies whole blocks within each state: block_copies i32 [C, 2] = (source, destination), in the order given."""
    for source, destination in block_copies:
        for state in states:
            state[destination] = state[source]
    return ()


def kv_write_cases(rng: Generator) -> Iterator[Case]:
    for starts, lengths, block_size, kv_heads, head_dim, dtype, skipped, latent in (
        ([0], [1], 16, 1, 64, "f32", 0, False),
        ([0, 30], [17, 1], 16, 2, 32, "f16", 0, False),
        ([15, 16, 31], [1, 1, 1], 16, 8, 48, "bf16", 0, False),
        ([5, 0], [3, 40], 8, 2, 64, "int8", 0, False),
        ([6, 0], [3, 40], 16, 2, 40, "int16", 1, False),
        ([0], [9], 32, 4, 8, "f16", 4, False),
        ([0, 2], [4, 5], 1, 1, 16, "int8", 2, False),
        ([3, 20], [14, 1], 16, 1, 32, "f16", 1, True),
        ([0, 40], [9, 2], 8, 1, 72, "int8", 0, True),
        ([5, 0], [3, 40], 8, 2, 40, "fp8", 2, False),
        ([3, 20], [14, 1], 16, 1, 72, "fp8", 0, True),
    ):
        batch = random_batch(rng, starts, lengths, (block_size,), len(starts))
        kv = KVSpec(batch.blocks[0], block_size, kv_heads, head_dim, dtype, latent)
        total = len(batch.positions)
        kv_slots = batch.kv_slots(block_size)
        kv_slots[rng.permutation(total)[:skipped]] = -1
        if not skipped:
            kv_slots[-1] = 0  # a slot like any other
        names = ("k",) if latent else ("k", "v")
        new = {f"new_{name}": rng.standard_normal((total, kv_heads * head_dim), np.float32) for name in names}
        new["new_k"] *= np.float32(10.0) ** rng.integers(-4, 4, new["new_k"].shape) if dtype == "fp8" else 1
        new["new_k"][0, :head_dim] = 0
        new["new_k"][-1, -1] = np.nan
        shape = PLAIN.shapes(kv)["k"][0]
        yield Case(
            f"{dtype}, {total} tokens, {kv_heads}x{head_dim}, blocks of {block_size}{', latent' * latent}",
            Dims(T=total),
            {**new, "kv_slots": kv_slots},
            states={name: rng.standard_normal(shape, np.float32) for name in names},
            attrs={"kv_heads": kv_heads, "head_dim": head_dim, "latent": latent},
            kv=kv,
        )


def kv_copy_cases(rng: Generator) -> Iterator[Case]:
    for copies, blocks, block_size, kv_heads, head_dim, dtype in (
        ([], 4, 16, 2, 32, "f16"),
        ([(1, 2)], 3, 16, 1, 64, "f32"),
        ([(1, 2), (1, 3), (4, 5)], 8, 8, 4, 16, "int8"),
        ([(1, 2), (2, 3), (5, 1)], 6, 32, 2, 48, "bf16"),  # a chain: order matters
        ([(3, 4), (2, 3)], 5, 1, 8, 8, "f16"),
        ([(1, 3), (3, 2)], 4, 8, 2, 24, "fp8"),
    ):
        kv = KVSpec(blocks, block_size, kv_heads, head_dim, dtype)
        shape = PLAIN.shapes(kv)["k"][0]
        yield Case(
            f"{dtype}, {len(copies)} copies",
            Dims(C=len(copies)),
            {"block_copies": np.array(copies, np.int32).reshape(-1, 2)},
            states={f"states.{i}": rng.standard_normal(shape, np.float32) for i in range(2)},
            kv=kv,
        )


SPECS = (
    OpSpec(
        "kv_write",
        # Not k and v: an op's arguments have names of their own, and these are the states'.
        inputs=("new_k", "new_v", "kv_slots"),
        # A latent cache has no new_v and v. The attribute says so: marked "?" they would be features of all other calls.
        states=("k", "v", "k_scale?", "v_scale?"),
        outputs=(),
        attrs={"kv_heads": REQUIRED, "head_dim": REQUIRED, "latent": False},
        reference=kv_write,
        # Stored values may differ by one rounding: 2^-11 for f16, 2^-8 for bf16, 1/127 for int8, all of the largest, and a
        # neighbour for fp8.
        tolerance=Tolerance(1e-6, 1e-2),
        cases=kv_write_cases,
    ),
    OpSpec(
        "kv_copy",
        inputs=("block_copies",),
        states=("states*",),
        outputs=(),
        reference=kv_copy,
        tolerance=Tolerance(0.0, 0.0),
        cases=kv_copy_cases,
    ),
)
