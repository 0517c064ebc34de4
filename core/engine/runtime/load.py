"""Loading: from a path and settings to a session that is ready to run, with what was decided on the way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ..backend.host import available_memory
from ..backend.joining import join_group, join_on
from ..backend.registry import open_device
from ..backend.v1 import Device, DeviceInfo, Group, Plan, Session
from ..errors import BackendError, ConfigError, EngineError, EngineStoppedError
from ..formats import Checkpoint, open_checkpoint
from ..kv import AllocatorManifest, AllocatorSpec, HostPool, KVAllocator, find_allocator, find_predictor
from ..models import Model, load_model
from ..ops.kv import WHOLE
from ..program.build import Program
from ..program.execute import StepSession, swap_refusal
from ..program.group import Rank
from ..program.pack import Packing, packed_bytes
from ..program.padding import common_buckets
from ..program.place import Placement, Placer
from ..program.plan import (
    Addresses,
    MemoryPlan,
    Pools,
    check_device,
    kv_bytes_a_block,
    make_limits,
    make_plan,
    state_bytes,
)
from ..program.shard import shard
from ..program.virtual import address_blocks, page_blocks
from ..sampling.beam import MAX_CANDIDATES
from ..scheduler import Scheduler, SchedulerConfig, check_policy
from .config import USUAL_POOL_TOKENS, EngineConfig
from .largest import SHARE, Left, run_largest, watches_of
from .ranks import Ranks

Progress = Callable[[str, int, int], None]
"""(what is being done, how much is done, of how much)"""


@dataclass(frozen=True)
class Loaded:
    """Everything that serving needs, and that ``engine doctor`` shows."""

    config: EngineConfig
    checkpoint: Checkpoint
    model: Model
    devices: Mapping[str, Device]
    program: Program
    placement: Placement
    plan: Plan
    packing: Packing
    memory: MemoryPlan
    max_model_len: int
    notices: tuple[str, ...]
    addresses: Addresses | None = None
    rank: Rank | None = None
    ranks: Ranks | None = None
    """The others, where this is the first of several."""

    @property
    def device(self) -> Device:
        """The one that samples."""
        return self.devices[self.placement.main]

    def allocator(self) -> KVAllocator:
        """A new allocator of the plan's pools, nothing of which is held."""
        predictor = find_predictor(self.config.length_predictor)
        spaces = () if self.addresses is None else (self.addresses.pages, self.addresses.spaces)
        spec = AllocatorSpec(self.program.groups, self.memory.num_blocks, self.plan.limits.dims.T, predictor, *spaces)
        return find_allocator(self.config.kv_allocator).make(spec)

    def scheduler(self) -> Scheduler:
        """A new scheduler of the plan, without any sequence."""
        config, dims = self.config, self.plan.limits.dims
        settings = SchedulerConfig(dims.T, config.max_num_seqs, self.max_model_len, config.policy, max_rows=dims.R)
        allocator, swaps = self.allocator(), config.preemption == "swap"
        if config.speculate and not hasattr(allocator, "rewind"):  # older ones of others
            raise ConfigError(
                f"The KV allocator {config.kv_allocator!r} cannot rewind, as guessed tokens need it; leave speculate out."
            )
        host = HostPool(self.memory.swap, self.memory.block_bytes) if swaps else None
        return Scheduler(settings, allocator, host)

    def session(self) -> Session:
        """A new session of the plan, once its weights are packed; states start empty, and what devices compile for steps of
        fixed sizes is compiled. ConfigError where the device has no room for it."""
        try:
            self.packing.finish()
            return self._session() if self.ranks is None else self.ranks.session(self._session)
        except MemoryError as error:
            needed = sum(map(state_bytes, self.plan.states)) / 1e9
            what = "addresses for KV cache" if self.plan.pages else "KV cache"
            raise ConfigError(
                f"There is no room for {needed:.1f} GB of {what} and history; lower max_model_len (--max-context) or"
                " max_num_seqs."
            ) from error

    def _session(self) -> Session:
        # A device's own session knows that device alone.
        one = tuple(self.devices) == ("device",)
        session = self.device.session(self.plan) if one else StepSession(self.devices, self.plan)
        if self.config.warm_up and isinstance(session, StepSession):
            session.warm_up()
        if self.config.populate_cache != "as used" and isinstance(session, StepSession):
            population = session.populate()
            if self.config.populate_cache == "first":
                population.wait()
        return session

    def close(self) -> None:
        """Leaves the group, and ends the other ranks, where there are any."""
        if self.rank is not None:
            self.rank.close()
        if self.ranks is not None:
            self.ranks.close()


def load(config: EngineConfig, progress: Progress | None = None, group: Group | None = None) -> Loaded:
    """Open, build, shard, fuse, place, pack, plan. ``group``: the rank that this is of several, which must all load the
    same; its collectives are joined here. Raises an EngineError that says what is wrong."""
    # what is not there is told before a large file is read
    find_allocator(config.kv_allocator)
    find_predictor(config.length_predictor)
    check_policy(config.policy)
    checkpoint = open_checkpoint(config.model)
    model = load_model(checkpoint, config.max_model_len)
    devices = _open_devices(config, 0 if group is None else group.rank)
    if group is not None or config.tensor_parallel_size == 1:
        return _load(config, checkpoint, model, devices, progress, group)
    ranks = Ranks(config, devices["device"].describe().ranks)
    try:
        loaded = _load(config, checkpoint, model, devices, progress, ranks.group, ranks.watch)
        ranks.wait_until_ready()
    except BaseException as error:
        # What keeps this rank from its group is most often another's fault.
        own = isinstance(error, EngineError) and not isinstance(error, (BackendError, EngineStoppedError))
        other = None if own else ranks.failure(_SECONDS)
        ranks.close()
        if other is None or not isinstance(error, Exception):
            raise
        raise BackendError(other) from error
    return replace(loaded, ranks=ranks)


_SECONDS = 1.0
"""What another rank has to say comes this much later at most."""


def _load(
    config: EngineConfig,
    checkpoint: Checkpoint,
    model: Model,
    devices: Mapping[str, Device],
    progress: Progress | None,
    group: Group | None,
    together: Callable[[Callable[[], Any]], Any] = lambda action: action(),
) -> Loaded:
    """``together`` runs what waits for other ranks."""
    allocator = find_allocator(config.kv_allocator)
    infos = {place: device.describe() for place, device in devices.items()}
    config, program = _program(config, model, allocator, infos)
    rank = None
    if group is not None:
        program = shard(program, group.rank, group.size)
        rank = together(partial(_join, devices["device"], group, config.collectives))
    placer = Placer(devices, config.without, config.round_trip, config.rules, rank)
    placement = placer.place(program, config.strict, config.fused, config.deterministic)
    notices = [_fallback_notice(placement)] if placement.fallbacks() else []
    step = config.max_num_batched_tokens or min(info.step_tokens for info in infos.values())

    def least(*numbers: int) -> tuple[int, ...]:
        return numbers if rank is None else together(partial(rank.least, numbers))

    pages, addresses = (1,) * len(program.groups), None
    if allocator.virtual:  # of ranks the largest, of which the others' are parts
        pages = tuple(-n for n in least(*(-page for page in page_blocks(placement, devices, config.kv_cache_dtype))))
    decodes = next(iter(infos.values())).decode_buckets if len(infos) == 1 else ()
    buckets = common_buckets([_buckets(info, config.deterministic) for info in infos.values()])

    def planned(length: int, blocks: Sequence[int], addresses: Addresses | None) -> tuple[Plan, MemoryPlan]:
        batched = min(step, length * config.max_num_seqs)
        limits = make_limits(batched, config.max_num_seqs, length, config.block_size, MAX_CANDIDATES, decodes)
        plan, memory = make_plan(
            placement, packing.weights, config.kv_cache_dtype, tuple(blocks), limits, config.keep, buckets, addresses
        )
        for place, info in infos.items():
            check_device(plan, info, place)
        return plan, memory

    watches, told = watches_of(devices, infos), list[str]()
    pools = _pools(config, devices, infos, placement, step, pages, watches.keys())
    length, counts = _sizes(config, model, list(pools.values()), infos, told)
    host = available_memory().free
    packing = _packing(placement, progress)
    left: Mapping[str, Left] = {}
    if watches:
        [length], told = least(length), []
        fewest, _ = planned(length, pages, Addresses(pages, pages) if allocator.virtual else None)
        packing.finish()
        left = together(partial(run_largest, devices, fewest, watches, config.warm_up))
        pools = {place: _measured(pool, left.get(place), config, len(pools)) for place, pool in pools.items()}
        length, counts = _sizes(config, model, list(pools.values()), infos, told, length)
    notices += told
    length, *blocks = least(length, *counts)
    if allocator.virtual:
        spaces = address_blocks(placement, config.kv_cache_dtype, pages, blocks, config.max_num_seqs, length)
        addresses = Addresses(pages, least(*spaces))
    plan, memory = planned(length, blocks, addresses)
    memory = replace(memory, steps=sum(one.steps for one in left.values()))
    if config.preemption == "swap":
        if why := swap_refusal(devices, plan):
            raise ConfigError(f"{why} Preempt by recomputation (--preemption recompute).")
        memory = replace(memory, swap=_swap_bytes(config, host, infos, placement, memory))
    return Loaded(
        config, checkpoint, model, devices, program, placement, plan, packing, memory, length, tuple(notices),
        addresses, rank,
    )  # fmt: skip


def _open_devices(config: EngineConfig, index: int) -> dict[str, Device]:
    """The device that is asked for, by its index, or several by the names that the rules have for them."""
    options = {"threads": config.threads_a_rank, "pin_threads": config.pin_threads}
    if config.place is None:
        return {"device": open_device(config.backend, options, index)}
    return {name: open_device(name, options) for name in config.rules.devices}


def _program(
    config: EngineConfig, model: Model, allocator: AllocatorManifest, infos: Mapping[str, DeviceInfo]
) -> tuple[EngineConfig, Program]:
    """The program, and the config with the cache's dtype in it: of "auto" the one that all devices propose, or f16, which
    heads of an odd size also have, for whole numbers are multiplied in pairs."""

    def build(dtype: str) -> Program:
        return model.program(config.block_size, dtype, allocator.windows, allocator.contiguous)

    if config.kv_cache_dtype != "auto":
        return config, build(config.kv_cache_dtype)
    proposed = {info.kv_dtype for info in infos.values()}
    dtype = proposed.pop() if len(proposed) == 1 else "f16"
    program = build(dtype)
    if dtype in WHOLE and any(layer.head_dim % 2 for layer in program.kv_layers):
        dtype, program = "f16", build("f16")
    return replace(config, kv_cache_dtype=dtype), program


def _buckets(info: DeviceInfo, deterministic: bool) -> tuple[int, ...]:
    """The sizes of steps that the device takes, or of those the ones in which no row depends on another."""
    return info.invariant_buckets if deterministic and info.invariant_buckets is not None else info.buckets


def _join(device: Device, group: Group, collectives: str) -> Rank:
    """Waits for the other ranks. BackendError where they do not come, or nothing joins them."""
    own = join_on(device, group) if collectives == "auto" else None
    return Rank(group, device, own, None if own is not None else join_group(group, collectives))


def _fallback_notice(placement: Placement) -> str:
    falls = placement.fallbacks()
    reasons = {placed.call.op: (placed.why or "").rstrip(".") for placed in falls}
    shown = "; ".join(f"{op}: {reasons[op]}" for op in sorted(reasons))
    return f"{len(falls)} of {len(placement.calls)} ops run on the reference, slowly ({shown}); see engine doctor."


def _sizes(
    config: EngineConfig,
    model: Model,
    pools: Sequence[Pools],
    infos: Mapping[str, DeviceInfo],
    notices: list[str],
    longest: int | None = None,
) -> tuple[int, tuple[int, ...]]:
    """The context's length, up to ``longest``, and each pool's blocks: the pools hold one whole context and no more than the
    budget, and where no memory is a device's own, no more tokens than are usual."""
    length = config.max_model_len or model.config.max_context
    if config.max_model_len is not None and config.max_model_len > model.config.max_context:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}, but the model was made for at most {model.config.max_context} tokens."
        )
    tried = min(length, longest or length)
    affordable = min(pool.longest(tried) for pool in pools)
    short = tried < length or any(pool.bytes(pool.needed(length)) > pool.budget for pool in pools)
    if config.max_model_len is None and 0 < affordable < length and short:
        budget = sum(pool.budget for pool in pools)
        notices.append(
            f"The context is limited to {affordable} of {length} tokens by the KV memory of {budget / 1e9:.1f} GB."
        )
        length = affordable
    most = max(pool.whole(length) for pool in pools) * config.max_num_seqs
    if 0 < (config.kv_cache_tokens or 0) < min(length, most):
        notices.append(
            f"The KV cache holds {min(length, most)} tokens and not {config.kv_cache_tokens}: it has room for one whole context,"
            " and a smaller one (max_model_len, --max-context) needs less."
        )
    usual = most if all(info.own_memory for info in infos.values()) else USUAL_POOL_TOKENS
    wanted = min(most, max(length, config.kv_cache_tokens or usual))
    return length, tuple(min(counts) for counts in zip(*(pool.choose(wanted, length) for pool in pools), strict=True))


def _pools(
    config: EngineConfig,
    devices: Mapping[str, Device],
    infos: Mapping[str, DeviceInfo],
    placement: Placement,
    step: int,
    pages: tuple[int, ...],
    measured: Set[str],
) -> dict[str, Pools]:
    """The pools as each device with a cache sees them, in steps of at most so many tokens, and pages of so many blocks: its
    layers' bytes and its share of the memory. Several devices may lie in the same memory, and ranks unless it is a device's
    own, so each takes its part of what is free there. Where steps are to be ``measured`` it is more than will be had."""
    weights = packed_bytes(placement)
    weights[placement.main] += weights.pop("host", 0)
    sizes = kv_bytes_a_block(placement.program, placement, config.kv_cache_dtype)
    total = sum(map(sum, sizes.values()))
    pools = {}
    for place, a_block in sizes.items():
        there = devices[place].memory_info().free
        if infos[place].own_memory and weights[place] > there:
            raise ConfigError(
                f"The weights take {weights[place] / 1e9:.3g} GB on {infos[place].name}, and {there / 1e9:.3g} GB are free there;"
                " choose a smaller model, or one of fewer bits a weight."
            )
        free = max(there - weights[place], 0) // len(sizes)
        share = 1 if place in measured else _OWN_SHARE
        budget = int(share * free) if infos[place].own_memory else free // (2 * config.tensor_parallel_size)
        if config.kv_cache_memory is not None:
            budget = config.kv_cache_memory * sum(a_block) // max(total, 1)
        pools[place] = Pools(placement.program.groups, a_block, budget, config.max_num_seqs, step, pages)
    return pools


_OWN_SHARE = 0.85
"""Of a device's own memory beside the weights; the rest is for what a step makes, where nobody can tell how much that is."""


def _measured(pool: Pools, left: Left | None, config: EngineConfig, places: int) -> Pools:
    """The pool of a device of which the largest steps leave so much. ConfigError where that is less than was asked for."""
    if left is None:
        return pool
    if config.kv_cache_memory is None:
        return replace(pool, budget=int(SHARE * left.free) // places)
    if pool.budget > left.free:
        raise ConfigError(
            f"kv_cache_memory is {config.kv_cache_memory / 1e9:.3g} GB, and beside the weights and {left.steps / 1e9:.3g} GB for"
            f" the largest step {left.free / 1e9:.3g} GB are free; ask for less, or lower max_num_batched_tokens or max_num_seqs."
        )
    return pool


def _swap_bytes(
    config: EngineConfig, free: int, infos: Mapping[str, DeviceInfo], placement: Placement, memory: MemoryPlan
) -> int:
    """The host's memory for swapped sequences. ConfigError where the host, of which so much was free before weights were packed,
    has less beside those and the caches of devices without memory of their own."""
    weights = packed_bytes(placement)
    blocks = kv_bytes_a_block(placement.program, placement, config.kv_cache_dtype)
    for place in (*infos, "host"):
        if place == "host" or not infos[place].own_memory:
            cache = sum(n * size for n, size in zip(memory.num_blocks, blocks.get(place, ()), strict=False))
            free -= weights[place] + cache
    wanted = int(config.swap_space * 2**30)
    if wanted > free:
        raise ConfigError(
            f"swap_space is {config.swap_space:g} GiB, and {max(free, 0) / 2**30:.3g} GiB of the host's memory are free for it;"
            " set a smaller one (--swap-space), or preempt by recomputation (--preemption recompute)."
        )
    return wanted


def _packing(placement: Placement, progress: Progress | None) -> Packing:
    """ConfigError where a device has no room for the weights."""
    report = None if progress is None else lambda done, total: progress("Loading weights", done, total)
    try:
        return Packing(placement, report)
    except MemoryError as error:
        needed = packed_bytes(placement).total() / 1e9
        raise ConfigError(
            f"The device's memory has no room for {needed:.3g} GB of weights; choose a smaller model, or one of fewer bits a"
            " weight."
        ) from error
