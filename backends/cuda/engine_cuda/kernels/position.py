"""Rotary position embedding, alone and with the norms of heads and the write to the cache."""

import triton
import triton.language as tl

from .cache import store_heads
from .common import enter, put


@triton.jit
def _partner(columns, rotary, INTERLEAVED: tl.constexpr):
    """For each column the other one of its pair, the pair's number, and whether it is the first of the two."""
    if INTERLEAVED:
        first = columns % 2 == 0
        other = tl.where(first, columns + 1, columns - 1)
        pair = columns // 2
    else:
        half = rotary // 2
        first = columns < half
        other = tl.where(first, columns + half, columns - half)
        pair = tl.where(first, columns, columns - half)
    return other, pair, first


@triton.jit
def rotated(
    x, norm, inv_freq, position, heads, width, rotary, scale, eps, offset,
    NORMED: tl.constexpr, INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One token's heads x [heads, width], normed where NORMED says so and rotated: f32 [HEADS, WIDTH]."""
    rows = tl.arange(0, HEADS)[:, None]
    columns = tl.arange(0, WIDTH)[None, :]
    kept = (rows < heads) & (columns < width)
    turned = columns < rotary
    other, pair, first = _partner(columns, rotary, INTERLEAVED)
    values = tl.load(x + rows * width + columns, mask=kept, other=0).to(tl.float32)
    others = tl.load(x + rows * width + other, mask=kept & turned, other=0).to(tl.float32)
    if NORMED:
        size = tl.sqrt_rn(tl.sum(values * values, axis=1) / width + eps)[:, None]
        values = values / size * (tl.load(norm + columns, mask=columns < width, other=0).to(tl.float32) + offset)
        others = others / size * (tl.load(norm + other, mask=turned, other=0).to(tl.float32) + offset)
    angle = position.to(tl.float32) * tl.load(inv_freq + pair, mask=turned, other=0).to(tl.float32)
    cosine = tl.cos(angle) * scale
    sine = tl.sin(angle) * scale
    return tl.where(turned, values * cosine + others * tl.where(first, -sine, sine), values)


@triton.jit
def rope(
    x, positions, inv_freq, y, heads, width, rotary, scale,
    INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """A token a program, all its heads: x [T, heads * width]."""
    token = tl.program_id(0).to(tl.int64)
    start = token * heads * width
    position = tl.load(positions + token)
    result = rotated(
        x + start, inv_freq, inv_freq, position, heads, width, rotary, scale, 0.0, 0.0,
        False, INTERLEAVED, HEADS, WIDTH,
    )  # fmt: skip
    rows = tl.arange(0, HEADS)[:, None]
    columns = tl.arange(0, WIDTH)[None, :]
    put(y + start + rows * width + columns, result, (rows < heads) & (columns < width))


@triton.jit
def rope_kv_write(
    q, new_k, new_v, positions, slots, inv_freq, q_norm, k_norm, y, k, v, k_scale, v_scale,
    heads, kv_heads, width, rotary, scale, eps, offset,
    NORMED: tl.constexpr, INTERLEAVED: tl.constexpr, SCALED: tl.constexpr,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Of a token, by the grid's second axis, the queries, the keys or the values."""
    enter(EARLY)
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    position = tl.load(positions + token)
    columns = tl.arange(0, WIDTH)[None, :]
    if part == 0:
        rows = tl.arange(0, HEADS)[:, None]
        start = token * heads * width
        turned = rotated(
            q + start, q_norm, inv_freq, position, heads, width, rotary, scale, eps, offset,
            NORMED, INTERLEAVED, HEADS, WIDTH,
        )  # fmt: skip
        put(y + start + rows * width + columns, turned, (rows < heads) & (columns < width))
    else:
        slot = tl.load(slots + token).to(tl.int64)
        start = token * kv_heads * width
        if slot >= 0:
            if part == 1:
                keys = rotated(
                    new_k + start, k_norm, inv_freq, position, kv_heads, width, rotary, scale, eps, offset,
                    NORMED, INTERLEAVED, KV_HEADS, WIDTH,
                )  # fmt: skip
                store_heads(keys, k, k_scale, slot, kv_heads, width, SCALED, KV_HEADS, WIDTH)
            else:
                rows = tl.arange(0, KV_HEADS)[:, None]
                kept = (rows < kv_heads) & (columns < width)
                values = tl.load(new_v + start + rows * width + columns, mask=kept, other=0).to(tl.float32)
                store_heads(values, v, v_scale, slot, kv_heads, width, SCALED, KV_HEADS, WIDTH)
