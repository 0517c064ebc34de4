"""Planning: how many KV blocks fit, what every state looks like, and how much memory the whole will take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, prod

from ..backend.v1 import HOST_DTYPES, DeviceInfo, Dims, KVSpec, Limits, Packed, Plan, StateSpec
from ..errors import ConfigError
from .build import KVLayer, Program
from .place import Placement
from .segments import segments


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by purpose, and the KV pool in blocks."""

    weights: int
    kv: int
    history: int
    blocks: int
    block_size: int
    bytes_a_token: int


def kv_bytes_a_block(program: Program, placement: Placement, kv_dtype: str) -> int:
    """Bytes that one block takes over all layers."""
    return sum(_size(shape, tag) for _, _, shape, tag in _kv_tensors(program, placement, kv_dtype, 1))


def _size(shape: tuple[int, ...], tag: str) -> int:
    return prod(shape) * HOST_DTYPES[tag].itemsize


def _kv_tensors(
    program: Program, placement: Placement, kv_dtype: str, blocks: int
) -> list[tuple[str, str, tuple[int, ...], str]]:
    found = []
    for kv in program.kv_layers:
        layout = placement.layer_layouts[kv.layer]
        if kv_dtype not in layout.dtypes:
            known = ", ".join(layout.dtypes)
            raise ConfigError(f"The KV layout {layout.name} cannot hold {kv_dtype}; it holds {known}.")
        for kind, (shape, tag) in layout.shapes(_spec(program, kv, kv_dtype, blocks)).items():
            found.append((f"kv.{kv.layer}.{kind}", kind, shape, tag))
    return found


def _spec(program: Program, kv: KVLayer, kv_dtype: str, blocks: int) -> KVSpec:
    return KVSpec(blocks, program.groups[kv.group].block_size, kv.kv_heads, kv.head_dim, kv_dtype, kv.latent)


def choose_blocks(bytes_a_block: int, budget: int, wanted_tokens: int, block_size: int, needed_tokens: int) -> int:
    """Blocks of the pool, the null block included: what is wanted, within ``budget`` bytes.

    Raises ConfigError when not even ``needed_tokens`` (one whole sequence) fit.
    """
    wanted = ceil(wanted_tokens / block_size) + 1
    affordable = budget // max(bytes_a_block, 1)
    needed = ceil(needed_tokens / block_size) + 1
    if affordable < needed:
        raise ConfigError(
            f"A context of {needed_tokens} tokens needs {needed * bytes_a_block / 1e9:.2f} GB of KV cache, "
            f"but {budget / 1e9:.2f} GB may be used; set a smaller --max-context "
            f"(at most {max(affordable - 1, 0) * block_size}) or another --kv-dtype."
        )
    return min(wanted, affordable)


def make_plan(
    placement: Placement,
    packed: Mapping[tuple[str, str], Packed],
    kv_dtype: str,
    blocks: int,
    limits: Limits,
    keep: tuple[str, ...] = (),
) -> tuple[Plan, MemoryPlan]:
    """The plan that a session runs, and its memory."""
    program = placement.program
    tensors = _kv_tensors(program, placement, kv_dtype, blocks)
    states = [StateSpec(name, kind, shape, tag) for name, kind, shape, tag in tensors]
    history = StateSpec("history", "history", (limits.slots, limits.max_context), "i32")
    body, head = segments(placement, packed, keep)
    plan = Plan(body, head, (*states, history), placement.state_places, limits, placement.round_trip, keep)
    kv = sum(_size(s.shape, s.dtype) for s in states)
    size = program.groups[0].block_size
    memory = MemoryPlan(
        weights=sum({id(p): p.nbytes for p in packed.values()}.values()),
        kv=kv,
        history=_size(history.shape, history.dtype),
        blocks=blocks,
        block_size=size,
        bytes_a_token=kv // (blocks * size),
    )
    return plan, memory


def check_device(plan: Plan, info: DeviceInfo) -> None:
    """Refuse, with ConfigError, what a device declares and this core or this plan cannot keep to."""
    if info.buckets:
        raise ConfigError(
            f"The device {info.name} takes steps of fixed sizes only (buckets), and this engine does not pad steps yet."
        )
    for state in plan.states:
        size = _size(state.shape, state.dtype)
        if plan.state_places[state.name] == "device" and info.largest_allocation and size > info.largest_allocation:
            raise ConfigError(
                f"The state {state.name} takes {size} bytes, and the device {info.name} allocates at most "
                f"{info.largest_allocation} at a time; set a smaller --max-context."
            )


PROMPT_ROWS = 32
"""Rows of the head for prompt logprobs, where there are fewer sequences: each takes a row of logits in memory."""


def make_limits(max_tokens: int, max_sequences: int, max_context: int, block_size: int, max_logprobs: int) -> Limits:
    """Maximum sizes of a step. Copies, fills and biases have no fixed maximum: they only enter, and nothing is as long."""
    rows = max(max_sequences, min(max_tokens, PROMPT_ROWS))
    dims = Dims(T=max_tokens, S=max_sequences, R=rows, P=ceil(max_context / block_size), K=max_logprobs)
    return Limits(dims, max_context, max_sequences)
