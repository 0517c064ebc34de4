"""What opens a step."""

from __future__ import annotations

from ..kernels import cache, step
from ..kernels.common import launch
from ..operands import Operands

TOKENS = 128
FILLS = 256
ELEMENTS = 1024


def step_expand(o: Operands) -> None:
    history = o.state("history")
    assert history is not None
    length = history.shape[1]
    copies, fills = o["history_copies"], o["fill_slots"]
    if len(copies):
        launch(cache.kv_copy, (-(-length // ELEMENTS),), history, copies, len(copies), length, BLOCK=ELEMENTS)
    launch(
        step.fill_history, (-(-len(fills) // FILLS),), history, fills, o["fill_positions"], o["fill_ids"], len(fills),
        length, BLOCK=FILLS,
    )  # fmt: skip
    token_ids, offsets = o["token_ids"], o["query_offsets"]
    total = len(token_ids)
    ids, positions, token_seq = (o.result(n, total) for n in range(3))
    launch(
        step.expand_tokens, (total,), token_ids, o["seq_slots"], o["seq_starts"], offsets, history, ids, positions,
        token_seq, len(offsets) - 1, length, num_warps=1,
    )  # fmt: skip
    for n, (table, size) in enumerate(zip(o.inputs("page_table"), o.attr("block_sizes"), strict=True)):
        slots = o.result(3 + n, total)
        grid = (-(-total // TOKENS),)
        launch(step.kv_slots, grid, table, positions, token_seq, slots, total, table.shape[1], size, BLOCK=TOKENS)
