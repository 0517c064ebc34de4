"""Layers whose memory does not grow with the tokens."""

from __future__ import annotations

from ..kernels import recurrent
from ..kernels.common import launch, power_of_two
from ..operands import Operands

COLUMNS = 128
"""Of a convolution, in one program of one warp."""
VALUES = 32
"""Columns of a head's memory in one program: 128 keys of them are 32 registers of each thread of four warps."""
NUMBERS = 4096
"""Of a state-space head's memory in one program, at most: as many registers."""
NORM_EPS = 1e-6


def causal_conv(o: Operands) -> None:
    x, tail, block_size = o["x"], o.state("tail"), o.attr("block_size")
    weight, bias = o.vector("weight"), o.vector("bias")
    starts, offsets, table = o["seq_starts"], o["query_offsets"], o["page_table"]
    assert weight is not None
    sequences, table_width = table.shape
    columns, width = weight.shape
    y, blocks = o.result(0, *x.shape), -(-columns // COLUMNS)
    launch(
        recurrent.causal_conv, (len(x), blocks), x, weight, weight if bias is None else bias, tail, starts, offsets,
        table, y, sequences, table_width, columns, W=width, BLOCK_SIZE=block_size, BLOCK=COLUMNS,
        SILU=o.attr("act") == "silu", BIASED=bias is not None, num_warps=1,
    )  # fmt: skip
    launch(
        recurrent.leave_tail, (sequences, blocks), x, tail, starts, offsets, table, table_width, columns,
        W=width, ROWS=power_of_two(width - 1), BLOCK_SIZE=block_size, BLOCK=COLUMNS, num_warps=1,
    )  # fmt: skip


def gated_delta(o: Operands) -> None:
    qkv, table = o["qkv"], o["page_table"]
    key_heads, value_heads, key_dim, value_dim = (
        o.attr(name) for name in ("key_heads", "value_heads", "key_dim", "value_dim")
    )
    y = o.result(0, len(qkv), value_heads * value_dim)
    sequences, table_width = table.shape
    launch(
        recurrent.gated_delta, (sequences, value_heads, -(-value_dim // VALUES)), qkv, o["decay"], o["beta"],
        o.vector("rate"), o.vector("bias"), o.state("memory"), o["seq_starts"], o["query_offsets"], table, y,
        table_width, value_heads // key_heads, key_heads, value_heads, key_dim, value_dim, key_dim**-0.5, NORM_EPS,
        BLOCK_SIZE=o.attr("block_size"), KEYS=power_of_two(key_dim), BV=VALUES,
    )  # fmt: skip


def ssm_scan(o: Operands) -> None:
    xbc, table = o["xbc"], o["page_table"]
    heads, groups, state_dim, head_dim = (o.attr(name) for name in ("heads", "groups", "state_dim", "head_dim"))
    y = o.result(0, len(xbc), heads * head_dim)
    sequences, table_width = table.shape
    rows = power_of_two(state_dim)
    columns = min(VALUES, NUMBERS // rows)
    launch(
        recurrent.ssm_scan, (sequences, heads, -(-head_dim // columns)), xbc, o["dt"],
        o.vector("rate"), o.vector("bias"), o.vector("skip"), o.state("memory"), o["seq_starts"], o["query_offsets"],
        table, y, table_width, heads // groups, groups, heads, state_dim, head_dim,
        BLOCK_SIZE=o.attr("block_size"), STATE=rows, BV=columns,
    )  # fmt: skip
