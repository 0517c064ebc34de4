"""Loading: from a path and settings to a session that is ready to run, with what was decided on the way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
from ..program.place import Placement, Placer
from ..program.plan import Addresses, MemoryPlan, state_bytes
from ..program.shard import shard
from ..program.virtual import address_blocks, page_blocks
from ..scheduler import Scheduler, SchedulerConfig, check_policy
from .config import EngineConfig
from .largest import Left, run_largest
from .ranks import Ranks
from .sizing import Sizing

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
            lower = "max_model_len or max_num_seqs" if self.config.max_num_seqs > 1 else "max_model_len"
            raise ConfigError(f"There is no room for {needed:.1f} GB of {what} and history; lower {lower}.") from error

    def _session(self) -> Session:
        # A device's own session knows that device alone.
        one = tuple(self.devices) == ("device",)
        session = self.device.session(self.plan) if one else StepSession(self.devices, self.plan)
        if isinstance(session, StepSession):
            try:
                self._prepare(session)
            except BaseException:  # Ctrl-C, say: a thread that asks for memory as the interpreter ends would abort it
                session.close()
                raise
        return session

    def _prepare(self, session: StepSession) -> None:
        if self.config.warm_up:
            session.warm_up()
        if self.config.populate_cache != "as used":
            population = session.populate()
            if self.config.populate_cache == "first":
                population.wait()

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
    if config.speculate and model.config.recurrent:
        raise ConfigError(
            f"{config.model} has layers with a memory of their own, which cannot take back guessed tokens; leave speculate out."
        )
    infos = {place: device.describe() for place, device in devices.items()}
    config, placement, rank = _place(config, model, allocator, devices, infos, group, together)
    notices = [_fallback_notice(placement)] if placement.fallbacks() else []
    notices += [_not_run_notice(model)] if model.not_run else []

    def least(*numbers: int) -> tuple[int, ...]:
        return numbers if rank is None else together(partial(rank.least, numbers))

    pages = (1,) * len(placement.program.groups)
    if allocator.virtual:  # of ranks the largest, of which the others' are parts
        pages = tuple(-n for n in least(*(-page for page in page_blocks(placement, devices, config.kv_cache_dtype))))
    sizing, host = Sizing(config, model, devices, infos, placement, pages), available_memory().free
    pools, told = sizing.pools(), list[str]()
    length, blocks = sizing.choose(pools, told)
    packing = _packing(placement, progress)
    left: Mapping[str, Left] = {}
    if watches := sizing.watches():
        [length], told = least(length), []
        fewest, _ = sizing.plan(packing.weights, length, pages, Addresses(pages, pages) if allocator.virtual else None)
        packing.finish()
        left = together(partial(run_largest, devices, fewest, watches, config.warm_up))
        length, blocks = sizing.choose(sizing.measured(pools, left), told, length)
    length, *counts = least(length, *blocks)
    addresses = None
    if allocator.virtual:
        spaces = address_blocks(placement, config.kv_cache_dtype, pages, counts, config.max_num_seqs, length)
        addresses = Addresses(pages, least(*spaces))
    plan, memory = sizing.plan(packing.weights, length, counts, addresses)
    memory = replace(memory, steps=sum(one.steps for one in left.values()))
    if config.preemption == "swap":
        if why := swap_refusal(devices, plan):
            raise ConfigError(f"{why} Preempt by recomputation (--preemption recompute).")
        memory = replace(memory, swap=sizing.swap_bytes(host, memory))
    return Loaded(
        config, checkpoint, model, devices, placement.program, placement, plan, packing, memory, length, (*notices, *told),
        addresses, rank,
    )  # fmt: skip


def _place(
    config: EngineConfig,
    model: Model,
    allocator: AllocatorManifest,
    devices: Mapping[str, Device],
    infos: Mapping[str, DeviceInfo],
    group: Group | None,
    together: Callable[[Callable[[], Any]], Any],
) -> tuple[EngineConfig, Placement, Rank | None]:
    """A rank's part of the program on its devices, with its cache's dtype in the config, and the rank, if there are several."""
    config, program = _program(config, model, allocator, infos)
    rank = None
    if group is not None:
        program = shard(program, group.rank, group.size)
        rank = together(partial(_join, devices["device"], group, config.collectives))
    placer = Placer(devices, config.without, config.round_trip, config.rules, rank)
    return config, placer.place(program, config.strict, config.fused, config.deterministic), rank


def _open_devices(config: EngineConfig, index: int) -> dict[str, Device]:
    """The device that is asked for, by its index, or several by the names that the rules have for them."""
    options = {"threads": config.threads_a_rank, "pin_threads": config.pin_threads}
    if config.place is None:
        return {"device": open_device(config.backend, options, index)}
    return {name: open_device(name, options, instances=True) for name in config.rules.devices}


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


def _join(device: Device, group: Group, collectives: str) -> Rank:
    """Waits for the other ranks. BackendError where they do not come, or nothing joins them."""
    own = join_on(device, group) if collectives == "auto" else None
    return Rank(group, device, own, None if own is not None else join_group(group, collectives))


def _fallback_notice(placement: Placement) -> str:
    falls = placement.fallbacks()
    reasons = {placed.call.op: (placed.why or "").rstrip(".") for placed in falls}
    shown = "; ".join(f"{op}: {reasons[op]}" for op in sorted(reasons))
    return f"{len(falls)} of {len(placement.calls)} ops run on the reference, slowly ({shown}); see engine doctor."


def _not_run_notice(model: Model) -> str:
    return (
        f"The model's layers that predict further tokens ({len(model.not_run)} tensors, as {model.not_run[0]}) are not run; its"
        " answers need none of them."
    )


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
