"""rope_kv_write: what a layer does to q and k between their projections and attention, in one op."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..backend.v1 import Array, Dims, KVSpec
from .cases import random_batch, random_weight
from .kv import PLAIN, kv_write
from .norm import rms_norm
from .position import rope
from .spec import REQUIRED, Case, Generator, OpSpec, Tolerance


def rope_kv_write(
    *,
    q: Array,
    new_k: Array,
    new_v: Array,
    positions: Array,
    kv_slots: Array,
    inv_freq: Array,
    k: Array,
    v: Array,
    heads: int,
    kv_heads: int,
    head_dim: int,
    q_norm: Array | None = None,
    k_norm: Array | None = None,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    rotary_dim: int = 0,
    interleaved: bool = False,
    scale: float = 1.0,
    eps: float = 0.0,
    weight_offset: float = 0.0,
) -> tuple[Array]:
    """rms_norm of the heads of q and k (with ``q_norm`` and ``k_norm`` [head_dim], both or neither), rope of both, and
    kv_write of the new k and v: q [T, heads * head_dim], f32, rotated. ``eps`` and ``weight_offset`` are the norms'."""
    if q_norm is not None and k_norm is not None:
        [q] = rms_norm(x=q, weight=q_norm, eps=eps, head_dim=head_dim, weight_offset=weight_offset)
        [new_k] = rms_norm(x=new_k, weight=k_norm, eps=eps, head_dim=head_dim, weight_offset=weight_offset)
    turned: list[Array] = []
    for x, count in ((q, heads), (new_k, kv_heads)):
        turned += rope(
            x=x,
            positions=positions,
            inv_freq=inv_freq,
            heads=count,
            head_dim=head_dim,
            rotary_dim=rotary_dim,
            interleaved=interleaved,
            scale=scale,
        )
    kv_write(
        new_k=turned[1],
        new_v=new_v,
        kv_slots=kv_slots,
        k=k,
        v=v,
        k_scale=k_scale,
        v_scale=v_scale,
        kv_heads=kv_heads,
        head_dim=head_dim,
    )
    return (turned[0],)


def rope_kv_write_cases(rng: Generator) -> Iterator[Case]:
    for starts, lengths, block_size, heads, kv_heads, head_dim, dtype, normed, skipped, attrs in (
        ([0], [1], 16, 2, 1, 64, "f32", True, 0, {}),
        ([0, 30], [37, 1], 16, 4, 2, 32, "f16", True, 0, {"rotary_dim": 16}),
        ([15, 16, 31], [1, 1, 1], 16, 8, 8, 48, "bf16", False, 0, {"interleaved": True}),
        ([5, 0], [3, 40], 8, 6, 2, 64, "int8", True, 0, {"weight_offset": 1.0}),
        ([6, 0], [3, 40], 16, 6, 2, 40, "int16", True, 1, {}),
        ([0], [50], 32, 4, 4, 8, "f16", False, 4, {"scale": 1.25}),
        ([5, 0], [3, 20], 8, 6, 2, 32, "fp8", True, 0, {}),
        ([0, 2], [4, 5], 1, 3, 1, 24, "int8", True, 2, {"rotary_dim": 8, "interleaved": True}),
    ):
        batch = random_batch(rng, starts, lengths, (block_size,), len(starts))
        kv = KVSpec(batch.blocks[0], block_size, kv_heads, head_dim, dtype)
        total = len(batch.positions)
        kv_slots = batch.kv_slots(block_size)
        kv_slots[rng.permutation(total)[:skipped]] = -1
        rotary = int(attrs.get("rotary_dim", head_dim))
        inv_freq = (10000.0 ** (-np.arange(0, rotary, 2) / rotary)).astype(np.float32)
        weights = {"inv_freq": ("F32", inv_freq.view(np.uint8)[None], inv_freq.shape)}
        norms = {"eps": 1e-6} if normed else {}
        if normed:
            weights |= {name: random_weight(rng, "F32", (head_dim,), 1.0) for name in ("q_norm", "k_norm")}
        widths = {"q": heads, "new_k": kv_heads, "new_v": kv_heads}
        yield Case(
            f"{dtype}, {total} tokens, {heads}/{kv_heads} heads of {head_dim}, blocks of {block_size}"
            f"{', norms' * normed}{''.join(f', {k} {v}' for k, v in attrs.items())}",
            Dims(T=total),
            {
                **{name: rng.standard_normal((total, n * head_dim), np.float32) for name, n in widths.items()},
                "positions": batch.positions,
                "kv_slots": kv_slots,
            },
            weights=weights,
            states={name: rng.standard_normal(PLAIN.shapes(kv)["k"][0], np.float32) for name in ("k", "v")},
            attrs={"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, **norms, **attrs},
            kv=kv,
        )


SPECS = (
    OpSpec(
        "rope_kv_write",
        inputs=("q", "new_k", "new_v", "positions", "kv_slots"),
        weights=("inv_freq", "q_norm?", "k_norm?"),
        states=("k", "v", "k_scale?", "v_scale?"),
        outputs=("y",),
        attrs={
            "heads": REQUIRED,
            "kv_heads": REQUIRED,
            "head_dim": REQUIRED,
            "rotary_dim": 0,
            "interleaved": False,
            "scale": 1.0,
            "eps": 0.0,
            "weight_offset": 0.0,
        },
        reference=rope_kv_write,
        # As of kv_write: a stored value may differ by one rounding.
        tolerance=Tolerance(2e-5, 1e-2),
        cases=rope_kv_write_cases,
    ),
)
