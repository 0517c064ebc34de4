"""Writing and copying of the KV cache: k and v [blocks, block_size, kv_heads, head_dim]."""

import triton
import triton.language as tl

from .common import put, to_nearest


@triton.jit
def store_heads(
    values, stored, scales, slot, heads, width, SCALED: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr
):
    """One token's heads, f32 [HEADS, WIDTH], at a slot; of int8 (SCALED) with a scale a head, of bytes as E4M3."""
    rows = tl.arange(0, HEADS)
    columns = tl.arange(0, WIDTH)
    kept = (rows[:, None] < heads) & (columns[None, :] < width)
    place = (slot * heads + rows[:, None]) * width + columns[None, :]
    if SCALED:
        sizes = tl.where(kept, tl.abs(values), 0.0)
        most = tl.max(sizes, axis=1)
        # The greatest of a row drops NaN on some devices.
        lost = tl.max((sizes != sizes).to(tl.int32), axis=1) > 0
        scale = tl.where(lost, float("nan"), tl.div_rn(most, 127.0))
        usable = (scale > 0) & (scale < float("inf"))
        steps = tl.div_rn(values, tl.where(usable, scale, 1.0)[:, None])
        steps = tl.minimum(tl.maximum(to_nearest(steps), -127.0), 127.0)
        codes = tl.where(usable[:, None], steps, 0.0).to(tl.int8)
        tl.store(stored + place, codes, mask=kept)
        tl.store(scales + slot * heads + rows, scale, mask=rows < heads)
    else:
        put(stored + place, values, kept)


@triton.jit
def kv_write(
    new_k, new_v, slots, k, v, k_scale, v_scale, heads, width,
    SCALED: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Of a token, by the grid's second axis, the keys or the values; a negative slot is skipped."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot >= 0:
        rows = tl.arange(0, HEADS)[:, None]
        columns = tl.arange(0, WIDTH)[None, :]
        kept = (rows < heads) & (columns < width)
        place = token * heads * width + rows * width + columns
        if tl.program_id(1) == 0:
            keys = tl.load(new_k + place, mask=kept, other=0).to(tl.float32)
            store_heads(keys, k, k_scale, slot, heads, width, SCALED, HEADS, WIDTH)
        else:
            values = tl.load(new_v + place, mask=kept, other=0).to(tl.float32)
            store_heads(values, v, v_scale, slot, heads, width, SCALED, HEADS, WIDTH)


@triton.jit(do_not_specialize=["count"])
def kv_copy(state, copies, count, size, BLOCK: tl.constexpr):
    """Blocks of ``size`` elements, each program the same part of all, one copy after the other, since one may read what
    another wrote."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    kept = place < size
    for n in range(count):
        source = tl.load(copies + 2 * n).to(tl.int64)
        destination = tl.load(copies + 2 * n + 1).to(tl.int64)
        values = tl.load(state + source * size + place, mask=kept)
        tl.store(state + destination * size + place, values, mask=kept)
        tl.debug_barrier()
