"""What opens a step: the token history's copies and fills, and the tokens, positions and slots of the step.

Each part is compiled by itself, so that a step of another number of copies compiles no more than them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp

from engine.backend.v1 import Call, Frame, StepFn

from .given import Op


@partial(jax.jit, donate_argnums=0)
def _copied(history: jax.Array, copies: jax.Array) -> jax.Array:
    """Whole slots copied, one pair (source, destination) after the other."""
    return jax.lax.fori_loop(0, len(copies), lambda n, array: array.at[copies[n, 1]].set(array[copies[n, 0]]), history)


@partial(jax.jit, donate_argnums=0)
def _filled(history: jax.Array, slots: jax.Array, positions: jax.Array, ids: jax.Array) -> jax.Array:
    return history.at[slots, positions].set(ids)


@partial(jax.jit, donate_argnums=0, static_argnames="block_sizes")
def _expanded(
    history: jax.Array,
    token_ids: jax.Array,
    seq_slots: jax.Array,
    seq_starts: jax.Array,
    query_offsets: jax.Array,
    tables: tuple[jax.Array, ...],
    block_sizes: tuple[int, ...],
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """The history with the tokens that are known, and the outputs of step_expand. Ids of -1 are taken from the history."""
    tokens = jnp.arange(len(token_ids), dtype=jnp.int32)
    token_seq = jnp.searchsorted(query_offsets[1:], tokens, side="right").astype(jnp.int32)
    positions = seq_starts[token_seq] + tokens - query_offsets[token_seq]
    slots = seq_slots[token_seq]
    known = jnp.where(token_ids < 0, len(history), slots)
    history = history.at[known, positions].set(token_ids, mode="drop")
    kv_slots = (
        table[token_seq, positions // size] * size + positions % size
        for table, size in zip(tables, block_sizes, strict=True)
    )
    return history, (history[slots, positions], positions, token_seq, *kv_slots)


def _step_expand(call: Call) -> StepFn:
    ids = {name: value.id for name, value in call.inputs.items()}
    state, sizes = call.states["history"], tuple(call.attr("block_sizes"))
    fills = [ids[name] for name in ("fill_slots", "fill_positions", "fill_ids")]
    given = [ids[name] for name in ("token_ids", "seq_slots", "seq_starts", "query_offsets")]
    tables = [ids[f"page_table.{group}"] for group in range(len(sizes))]
    outputs = [value.id for value in call.outputs]

    def run(frame: Frame) -> None:
        values, history = frame.values, frame.states[state]
        if len(values[ids["history_copies"]]):
            history = _copied(history, values[ids["history_copies"]])
        if len(values[fills[0]]):
            history = _filled(history, *(values[key] for key in fills))
        paged = tuple(values[key] for key in tables)
        frame.states[state], found = _expanded(history, *(values[key] for key in given), paged, sizes)
        values.update(zip(outputs, found, strict=True))

    return run


OPS: Mapping[str, Op] = {"step_expand": Op(bind=_step_expand)}
