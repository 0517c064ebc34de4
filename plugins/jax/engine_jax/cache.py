"""The paged KV cache: its layout, writes, and copies of blocks."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp

from engine.backend.v1 import Call, Frame, KVLayout, KVSpec, StepFn

from .given import Function, Given, Op, Site


def _shapes(spec: KVSpec) -> Mapping[str, tuple[tuple[int, ...], str]]:
    tokens = (spec.blocks, spec.block_size, spec.kv_heads)
    kinds = ("k",) if spec.latent else ("k", "v")
    shapes: dict[str, tuple[tuple[int, ...], str]] = {kind: ((*tokens, spec.head_dim), spec.dtype) for kind in kinds}
    if spec.dtype == "int8":
        shapes |= {f"{kind}_scale": (tokens, "f32") for kind in kinds}
    return shapes


PAGED = KVLayout("jax.paged", ("f32", "f16", "bf16", "int8"), _shapes)
"""k and v [blocks, block_size, kv_heads, head_dim]; for int8 a scale a token and head, f32."""


def _kv_write(call: Call, site: Site) -> Function:
    kv_heads, head_dim = call.attr("kv_heads"), call.attr("head_dim")

    def run(given: Given) -> tuple[jax.Array, ...]:
        slots = given.inputs["kv_slots"]
        for kind in ("k", "v"):
            if kind not in given.states:
                continue
            new = given.wide(f"new_{kind}").reshape(len(slots), kv_heads, head_dim)
            if f"{kind}_scale" in given.states:
                new, scale = _to_bytes(new)
                given.states[f"{kind}_scale"] = _stored(given.states[f"{kind}_scale"], slots, scale)
            given.states[kind] = _stored(given.states[kind], slots, new)
        return ()

    return run


def _stored(state: jax.Array, slots: jax.Array, rows: jax.Array) -> jax.Array:
    """``rows`` [T, ...] at the slots of a state [blocks, block_size, ...]; those at negative slots nowhere."""
    flat = state.reshape(-1, *state.shape[2:])
    where = jnp.where(slots < 0, len(flat), slots)
    return flat.at[where].set(rows.astype(state.dtype), mode="drop").reshape(state.shape)


def _to_bytes(new: jax.Array) -> tuple[jax.Array, jax.Array]:
    """int8 [T, heads, head_dim] and scales f32 [T, heads]: absmax / 127, to nearest, ties to even."""
    most = jnp.abs(new).max(axis=-1)
    scale = jnp.where(jnp.isnan(new).any(axis=-1), jnp.nan, most) / 127  # XLA's maximum may lose a NaN
    usable = (jnp.isfinite(scale) & (scale > 0))[..., None]
    steps = jnp.where(usable, new / jnp.where(usable, scale[..., None], 1), 0)
    return jnp.clip(jnp.round(steps), -127, 127).astype(jnp.int8), scale


@partial(jax.jit, donate_argnums=0)
def _copied(states: dict[str, jax.Array], copies: jax.Array) -> dict[str, jax.Array]:
    """Whole blocks copied within each state, one pair (source, destination) after the other."""

    def copy(n: jax.Array, states: dict[str, jax.Array]) -> dict[str, jax.Array]:
        source, destination = copies[n]
        return {name: state.at[destination].set(state[source]) for name, state in states.items()}

    return jax.lax.fori_loop(0, len(copies), copy, states)


@partial(jax.jit, donate_argnums=0)
def with_blocks(state: jax.Array, blocks: jax.Array, rows: jax.Array) -> jax.Array:
    """The state with these rows as its entries ``blocks``."""
    return state.at[blocks].set(rows)


def _kv_copy(call: Call) -> StepFn:
    copies, names = call.inputs["block_copies"].id, tuple(call.states.values())

    def run(frame: Frame) -> None:
        if len(frame.values[copies]):
            frame.states.update(_copied({name: frame.states[name] for name in names}, frame.values[copies]))

    return run


OPS: Mapping[str, Op] = {
    "kv_write": Op(frozenset({"latent", "k_scale", "v_scale"}), _kv_write, cached=True, writes=True),
    "kv_copy": Op(bind=_kv_copy, cached=True),
}
