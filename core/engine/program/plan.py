"""Planning: how many KV blocks fit, what every state looks like, and how much memory the whole will take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod

from ..backend.v1 import HOST_DTYPES, DeviceInfo, Dims, KVSpec, Limits, Packed, Plan, StateSpec
from ..errors import ConfigError
from ..kv import CacheGroup
from .build import Program
from .layers import KVLayer
from .place import Placement
from .segments import segments


@dataclass(frozen=True)
class GroupMemory:
    """A cache group's pool: ``blocks``, the null block included, of ``block_size`` tokens, and their bytes. A sequence of
    the longest context holds at most ``sequence_blocks`` at a time; behind a ``window`` they are given back. ``page``:
    blocks that get their memory at a time, where it is mapped as sequences grow."""

    name: str
    window: int | None
    blocks: int
    block_size: int
    bytes_a_token: int
    bytes: int
    sequence_blocks: int
    page: int = 1


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by purpose, and the KV pool of each cache group. ``sequence_kv``: what a sequence of the longest context
    takes; ``sequence_kv_unwindowed``: what it would take if every layer kept everything. ``steps``: what the largest steps were
    seen to take, where a device can tell. ``swap``: the host's, for sequences that are swapped out, if any are."""

    weights: int
    kv: int
    history: int
    groups: tuple[GroupMemory, ...]
    sequence_kv: int
    sequence_kv_unwindowed: int
    steps: int = 0
    swap: int = 0

    @property
    def num_blocks(self) -> tuple[int, ...]:
        """Blocks of each group's pool."""
        return tuple(group.blocks for group in self.groups)

    @property
    def block_bytes(self) -> tuple[int, ...]:
        """Bytes of one block of each group."""
        return tuple(group.bytes_a_token * group.block_size for group in self.groups)


@dataclass(frozen=True)
class Addresses:
    """Of a cache of addresses, to which memory is mapped: blocks of each group that are mapped at a time, and those that there
    are addresses for."""

    pages: tuple[int, ...]
    spaces: tuple[int, ...]


def kv_bytes_a_block(program: Program, placement: Placement, kv_dtype: str) -> dict[str, tuple[int, ...]]:
    """For each device with a cache, the bytes that one block of each group takes over all its layers there. Layers that
    fell back to the host count for the main device."""
    ones = (1,) * len(program.groups)
    sizes = {placement.main: [0] * len(program.groups)}
    for state in kv_states(program, placement, kv_dtype, ones):
        assert state.group is not None
        place = placement.state_places[state.name]
        own = sizes.setdefault(placement.main if place == "host" else place, [0] * len(program.groups))
        own[state.group] += state_bytes(state)
    return {place: tuple(own) for place, own in sizes.items() if any(own) or len(sizes) == 1}


def state_bytes(state: StateSpec) -> int:
    return prod(state.shape) * HOST_DTYPES[state.dtype].itemsize


def kv_states(program: Program, placement: Placement, kv_dtype: str, blocks: Sequence[int]) -> list[StateSpec]:
    """The states of all layers, for pools of so many blocks a group."""
    found = []
    for kv in program.kv_layers:
        layout = placement.layer_layouts[kv.layer]
        if kv_dtype not in layout.dtypes:
            known = ", ".join(layout.dtypes)
            raise ConfigError(f"The KV layout {layout.name} cannot hold {kv_dtype}; it holds {known}.")
        for kind, (shape, tag) in layout.shapes(_spec(program, kv, kv_dtype, blocks[kv.group])).items():
            found.append(StateSpec(kv.state(kind), kind, shape, tag, kv.group))
    for one in program.recurrent_layers:
        for kind, own in one.shapes.items():
            found.append(StateSpec(one.state(kind), kind, (blocks[one.group], *own), "f32", one.group))
    return found


def _spec(program: Program, kv: KVLayer, kv_dtype: str, blocks: int) -> KVSpec:
    return KVSpec(blocks, program.groups[kv.group].block_size, kv.kv_heads, kv.head_dim, kv_dtype, kv.latent)


@dataclass(frozen=True)
class Pools:
    """How large the pools of a program's cache groups may be. ``block_bytes``: a block of each group; ``budget``: bytes of
    all; ``sequences``: how many run at a time; ``chunk``: tokens that a step computes at most. ``pages``: blocks of each group
    that get memory at a time; a sequence has whole ones, and so has the null block."""

    groups: tuple[CacheGroup, ...]
    block_bytes: tuple[int, ...]
    budget: int
    sequences: int
    chunk: int
    pages: tuple[int, ...]

    @property
    def paged(self) -> tuple[tuple[CacheGroup, int], ...]:
        return tuple(zip(self.groups, self.pages, strict=True))

    def whole(self, tokens: int) -> int:
        """The tokens that the pages of a sequence of so many have room for."""
        sizes = [page * group.block_size for group, page in self.paged if page > 1]
        return max((ceil(tokens / size) * size for size in sizes), default=tokens)

    def needed(self, tokens: int) -> tuple[int, ...]:
        """Blocks of each group, the null block included, without which a sequence of so many tokens cannot run."""
        return tuple((ceil(group.most_blocks(tokens, self.chunk) / page) + 1) * page for group, page in self.paged)

    def wanted(self, tokens: int, longest: int) -> tuple[int, ...]:
        """Blocks of each group for ``tokens`` tokens of several sequences, one of ``longest`` among them. In a group with
        a window they need no more than all that run may hold. A recurrent one has large blocks, of which each sequence that so
        many tokens may be of fills one in part."""
        found, apart = [], min(self.sequences, tokens // min(group.block_size for group in self.groups))
        for (group, page), needed in zip(self.paged, self.needed(longest), strict=True):
            blocks = group.blocks(tokens) + (apart if group.kind == "recurrent" else 0)
            most = self.sequences * (needed - page)
            found.append(max(needed, min(ceil(blocks / page) * page, most) + page))
        return tuple(found)

    def bytes(self, blocks: tuple[int, ...]) -> int:
        return sum(count * size for count, size in zip(blocks, self.block_bytes, strict=True))

    def longest(self, at_most: int) -> int:
        """The most tokens, a multiple of the block size up to ``at_most``, of a sequence that the budget has room for."""
        size = max(group.block_size for group in self.groups)
        return size * _most(at_most // size, lambda n: self.bytes(self.needed(n * size)) <= self.budget)

    def choose(self, wanted_tokens: int, longest: int) -> tuple[int, ...]:
        """Blocks of each group's pool, the null block included: what is wanted, within the budget.

        Raises ConfigError when not even one sequence of ``longest`` tokens fits.
        """
        needed = self.bytes(self.needed(longest))
        if needed > self.budget:
            possible = self.longest(longest)
            advice = (
                f"set a smaller --max-context (at most {possible}), another --kv-dtype"
                if possible
                else "choose another --kv-dtype, a smaller --block-size or --max-batch-tokens"
            )
            raise ConfigError(
                f"A context of {longest} tokens needs {needed / 1e9:.3g} GB of KV cache, but {self.budget / 1e9:.3g} GB may"
                f" be used; {advice}, or allow more memory."
            )
        tokens = _most(wanted_tokens, lambda n: self.bytes(self.wanted(n, longest)) <= self.budget)
        return self.wanted(tokens, longest)


def _most(limit: int, fits: Callable[[int], bool]) -> int:
    """The largest n from 0 to ``limit`` that fits; what fits makes all below it fit."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def make_plan(
    placement: Placement,
    packed: Mapping[tuple[str, str, str], Packed],
    kv_dtype: str,
    blocks: tuple[int, ...],
    limits: Limits,
    keep: tuple[str, ...] = (),
    buckets: tuple[int, ...] = (),
    addresses: Addresses | None = None,
) -> tuple[Plan, MemoryPlan]:
    """The plan that a session runs, with so many blocks in each cache group, and its memory. Where steps are padded the
    history has a slot more. With ``addresses`` these are the states' sizes, and the blocks what there is memory for."""
    program = placement.program
    states = kv_states(program, placement, kv_dtype, blocks if addresses is None else addresses.spaces)
    pages = (1,) * len(blocks) if addresses is None else addresses.pages
    padded = bool(buckets or limits.decode_buckets)
    history = StateSpec("history", "history", (limits.slots + padded, limits.max_context), "i32")
    body, head, embedding = segments(placement, packed, keep)
    trips = placement.round_trips
    every, places = (*states, history), placement.state_places
    mapped = {} if addresses is None else dict(enumerate(pages))
    plan = Plan(body, head, every, places, limits, bool(trips), keep, trips, buckets, embedding, mapped)
    groups = []
    sizes = map(sum, zip(*kv_bytes_a_block(program, placement, kv_dtype).values(), strict=True))
    for spec, count, size, page in zip(program.groups, blocks, sizes, pages, strict=True):
        most = spec.most_blocks(limits.max_context, limits.dims.T)
        a_token = size // spec.block_size
        groups.append(GroupMemory(spec.name, spec.window, count, spec.block_size, a_token, count * size, most, page))
    memory = MemoryPlan(
        weights=sum({id(p): p.nbytes for p in packed.values()}.values()),
        kv=sum(group.bytes for group in groups),
        history=state_bytes(history),
        groups=tuple(groups),
        sequence_kv=sum(g.sequence_blocks * g.block_size * g.bytes_a_token for g in groups),
        sequence_kv_unwindowed=sum(
            ceil(limits.max_context / g.block_size) * g.block_size * g.bytes_a_token for g in groups
        ),
    )
    return plan, memory


def check_device(plan: Plan, info: DeviceInfo, place: str = "device") -> None:
    """Refuse, with ConfigError, what this plan needs and the device of a place declares that it cannot keep to."""
    for role, tag in info.roles.items():
        if tag not in info.dtypes:
            raise ConfigError(f"The device {info.name} keeps the role {role} in {tag}, which it does not hold.")
    if info.buckets and max(plan.buckets, default=0) < plan.limits.dims.T:
        raise ConfigError(
            f"The device {info.name} takes steps of {_listed(info.buckets)} tokens, and steps may have"
            f" {plan.limits.dims.T}; set --max-batch-tokens to at most {max(plan.buckets, default=0)}."
            if plan.buckets
            else f"The device {info.name} takes steps of {_listed(info.buckets)} tokens, and no other device of this program"
            " takes steps of these sizes; choose devices that have a size in common."
        )
    for state in plan.states:
        if plan.state_places[state.name] != place:
            continue
        if state.dtype not in info.dtypes:
            option = "--kv-dtype" if state.group is not None else "--backend"
            raise ConfigError(
                f"The state {state.name} is kept in {state.dtype}, and the device {info.name} holds"
                f" {_listed(sorted(info.dtypes))}; choose another {option}."
            )
        size = state_bytes(state)
        if info.largest_allocation and size > info.largest_allocation and state.group not in plan.pages:
            raise ConfigError(
                f"The state {state.name} takes {size} bytes, and the device {info.name} allocates at most "
                f"{info.largest_allocation} at a time; set a smaller --max-context."
            )


def _listed(items: Iterable[object]) -> str:
    return ", ".join(map(str, items))


PROMPT_ROWS = 32
"""Rows of the head for prompt logprobs, where there are fewer sequences: each takes a row of logits in memory."""


def make_limits(
    max_tokens: int,
    max_sequences: int,
    max_context: int,
    block_size: int,
    max_logprobs: int,
    decode_buckets: tuple[int, ...] = (),
) -> Limits:
    """Maximum sizes of a step. Copies, fills and biases have no fixed maximum: they only enter, and nothing is as long."""
    rows = max(max_sequences, min(max_tokens, PROMPT_ROWS))
    dims = Dims(T=max_tokens, S=max_sequences, R=rows, P=ceil(max_context / block_size), K=max_logprobs)
    return Limits(dims, max_context, max_sequences, decode_buckets)
