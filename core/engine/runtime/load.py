"""Loading: from a path and settings to a session that is ready to run, with what was decided on the way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..backend.registry import open_device
from ..backend.v1 import Device, Plan, Session
from ..errors import ConfigError
from ..formats import Checkpoint, open_checkpoint
from ..kv import find_allocator
from ..models import Model, load_model
from ..program.build import Program
from ..program.execute import swap_refusal
from ..program.pack import pack
from ..program.place import Placement, Placer
from ..program.plan import MemoryPlan, Pools, check_device, kv_bytes_a_block, make_limits, make_plan
from ..program.shard import shard
from ..program.weights import stored_bytes
from ..sampling.beam import MAX_CANDIDATES
from .config import EngineConfig

Progress = Callable[[str, int, int], None]
"""(what is being done, how much is done, of how much)"""


@dataclass(frozen=True)
class Loaded:
    """Everything that serving needs, and that ``engine doctor`` shows."""

    config: EngineConfig
    checkpoint: Checkpoint
    model: Model
    device: Device
    program: Program
    placement: Placement
    plan: Plan
    memory: MemoryPlan
    max_model_len: int
    notices: tuple[str, ...]

    def session(self) -> Session:
        """A new session of the plan; states start empty. ConfigError where the device has no room for it."""
        try:
            return self.device.session(self.plan)
        except MemoryError as error:
            needed = (self.memory.kv + self.memory.history) / 1e9
            raise ConfigError(
                f"There is no room for {needed:.1f} GB of KV cache and history; lower max_model_len (--max-context) or"
                " max_num_seqs."
            ) from error


def load(config: EngineConfig, progress: Progress | None = None) -> Loaded:
    """Open, build, fuse, shard, place, pack, plan. Raises an EngineError that says what is wrong."""
    checkpoint = open_checkpoint(config.model)
    model = load_model(checkpoint, config.max_model_len)
    device = open_device(config.backend, {"threads": config.threads})
    allocator = find_allocator(config.kv_allocator)
    built = model.program(config.block_size, config.kv_cache_dtype, allocator.windows, allocator.contiguous)
    program = shard(built, ranks=1)
    placement = Placer(device, config.without, config.round_trip).place(program, config.strict, config.fused)
    notices = [_fallback_notice(placement)] if placement.fallbacks() else []
    length, blocks = _sizes(config, model, device, placement, notices)
    packed = pack(placement, None if progress is None else lambda done, total: progress("Loading weights", done, total))
    batched = min(config.max_num_batched_tokens, length * config.max_num_seqs)
    limits = make_limits(batched, config.max_num_seqs, length, config.block_size, MAX_CANDIDATES)
    plan, memory = make_plan(placement, packed, config.kv_cache_dtype, blocks, limits, config.keep)
    check_device(plan, device.describe())
    if config.preemption == "swap" and (why := swap_refusal(device, plan)):
        raise ConfigError(f"{why} Preempt by recomputation (--preemption recompute).")
    return Loaded(config, checkpoint, model, device, program, placement, plan, memory, length, tuple(notices))


def _fallback_notice(placement: Placement) -> str:
    falls = placement.fallbacks()
    reasons = {placed.call.op: (placed.why or "").rstrip(".") for placed in falls}
    shown = "; ".join(f"{op}: {reasons[op]}" for op in sorted(reasons))
    return f"{len(falls)} of {len(placement.calls)} ops run on the reference, slowly ({shown}); see engine doctor."


def _sizes(
    config: EngineConfig, model: Model, device: Device, placement: Placement, notices: list[str]
) -> tuple[int, tuple[int, ...]]:
    """The context's length and each pool's blocks: the pools hold one whole context and no more than the budget."""
    program = placement.program
    refs = {ref.name: ref for placed in placement.calls for ref in placed.call.weights.values()}
    weights = sum(map(stored_bytes, refs.values()))
    free = max(device.memory_info().free - weights, 0)
    budget = config.kv_cache_memory if config.kv_cache_memory is not None else free // 2
    a_block = kv_bytes_a_block(program, placement, config.kv_cache_dtype)
    pools = Pools(program.groups, a_block, budget, config.max_num_seqs, config.max_num_batched_tokens)
    length = config.max_model_len or model.config.max_context
    if config.max_model_len is not None and config.max_model_len > model.config.max_context:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}, but the model was made for at most {model.config.max_context} tokens."
        )
    affordable = pools.longest(length)
    if config.max_model_len is None and 0 < affordable < length and pools.bytes(pools.needed(length)) > budget:
        notices.append(
            f"The context is limited to {affordable} of {length} tokens by the KV memory of {budget / 1e9:.1f} GB."
        )
        length = affordable
    wanted = min(length * config.max_num_seqs, max(length, config.kv_cache_tokens or _DEFAULT_POOL_TOKENS))
    return length, pools.choose(wanted, length)


_DEFAULT_POOL_TOKENS = 64 * 1024
