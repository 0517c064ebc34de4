"""How long a context may be, and how many blocks the caches have, by what memory each device has free and steps take of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..backend.v1 import Device, DeviceInfo, Packed, Plan
from ..errors import ConfigError
from ..models import Model
from ..program.pack import packed_bytes
from ..program.padding import common_buckets
from ..program.place import Placement
from ..program.plan import Addresses, MemoryPlan, Pools, check_device, kv_bytes_a_block, make_limits, make_plan
from ..sampling.beam import MAX_CANDIDATES
from .config import USUAL_POOL_TOKENS, EngineConfig
from .largest import SHARE, Left, watches_of

OWN_SHARE = 0.85
"""Of a device's own memory beside the weights; the rest is for what a step makes, where nobody can tell how much that is."""


@dataclass(frozen=True)
class Sizing:
    """``pages``: so many blocks of each cache group get their memory together."""

    config: EngineConfig
    model: Model
    devices: Mapping[str, Device]
    infos: Mapping[str, DeviceInfo]
    placement: Placement
    pages: tuple[int, ...]

    @property
    def step(self) -> int:
        """Tokens of a step at most; an encoder's has room for its longest text."""
        usual = self.config.max_num_batched_tokens or min(info.step_tokens for info in self.infos.values())
        whole = 0 if self.model.config.causal else self.config.max_model_len or self.model.config.max_context
        return max(usual, whole)

    def watches(self) -> dict[str, Callable[[], Callable[[], int]]]:
        return watches_of(self.devices, self.infos)

    def pools(self) -> dict[str, Pools]:
        """As each device with a cache sees them: its layers' bytes and its share of the memory. Several devices may lie in the
        same memory, and ranks unless it is a device's own, so each takes its part of what is free there. Where steps are measured
        it is more than will be had."""
        config = self.config
        weights = packed_bytes(self.placement)
        weights[self.placement.main] += weights.pop("host", 0)
        sizes = kv_bytes_a_block(self.placement.program, self.placement, config.kv_cache_dtype)
        total, measured = sum(map(sum, sizes.values())), self.watches()
        pools = {}
        for place, a_block in sizes.items():
            info, there = self.infos[place], self.devices[place].memory_info().free
            if info.own_memory and weights[place] > there:
                raise ConfigError(
                    f"The weights take {weights[place] / 1e9:.3g} GB on {info.name}, and {there / 1e9:.3g} GB are free there;"
                    " choose a smaller model, or one of fewer bits a weight."
                )
            free = max(there - weights[place], 0) // len(sizes)
            share = 1 if place in measured else OWN_SHARE
            budget = int(share * free) if info.own_memory else free // (2 * config.tensor_parallel_size)
            if config.kv_cache_memory is not None:
                budget = config.kv_cache_memory * sum(a_block) // max(total, 1)
            groups = self.placement.program.groups
            pools[place] = Pools(groups, a_block, budget, config.max_num_seqs, self.step, self.pages)
        return pools

    def measured(self, pools: Mapping[str, Pools], left: Mapping[str, Left]) -> dict[str, Pools]:
        """The pools of devices of which the largest steps leave so much. ConfigError where that is less than was asked for."""
        return {place: self._measured(pool, left.get(place), len(pools)) for place, pool in pools.items()}

    def _measured(self, pool: Pools, left: Left | None, places: int) -> Pools:
        wanted = self.config.kv_cache_memory
        if left is None:
            return pool
        if wanted is None:
            return replace(pool, budget=int(SHARE * left.free) // places)
        if pool.budget > left.free:
            raise ConfigError(
                f"kv_cache_memory is {wanted / 1e9:.3g} GB, and beside the weights and {left.steps / 1e9:.3g} GB for the largest"
                f" step {left.free / 1e9:.3g} GB are free; ask for less, or lower max_num_batched_tokens or max_num_seqs."
            )
        return pool

    def choose(
        self, pools: Mapping[str, Pools], notices: list[str], longest: int | None = None
    ) -> tuple[int, tuple[int, ...]]:
        """The context's length, up to ``longest``, and each pool's blocks: the pools hold one whole context and no more than the
        budget, and where no memory is a device's own, no more tokens than are usual."""
        config, made_for = self.config, self.model.config.max_context
        length = config.max_model_len or made_for
        if length > made_for:
            raise ConfigError(f"max_model_len is {length}, but the model was made for at most {made_for} tokens.")
        if config.max_num_batched_tokens is not None and config.max_num_batched_tokens < self.step:
            raise ConfigError(
                f"max_num_batched_tokens is {config.max_num_batched_tokens}, and an encoder computes each text in one step: allow"
                f" {length}, or set max_model_len to at most {config.max_num_batched_tokens}."
            )
        tried = min(length, longest or length)
        affordable = min(pool.longest(tried) for pool in pools.values())
        short = tried < length or any(pool.bytes(pool.needed(length)) > pool.budget for pool in pools.values())
        if config.max_model_len is None and 0 < affordable < length and short:
            budget = sum(pool.budget for pool in pools.values())
            notices.append(
                f"The context is limited to {affordable} of {length} tokens by the KV memory of {budget / 1e9:.1f} GB."
            )
            length = affordable
        most = max(pool.whole(length) for pool in pools.values()) * config.max_num_seqs
        if 0 < (config.kv_cache_tokens or 0) < min(length, most):
            notices.append(
                f"The KV cache holds {min(length, most)} tokens and not {config.kv_cache_tokens}: it has room for one whole"
                " context, and a smaller one (max_model_len, --max-context) needs less."
            )
        usual = most if all(info.own_memory for info in self.infos.values()) else USUAL_POOL_TOKENS
        wanted = min(most, max(length, config.kv_cache_tokens or usual))
        chosen = (pool.choose(wanted, length) for pool in pools.values())
        return length, tuple(min(counts) for counts in zip(*chosen, strict=True))

    def plan(
        self,
        weights: Mapping[tuple[str, str, str], Packed],
        length: int,
        blocks: Sequence[int],
        addresses: Addresses | None,
    ) -> tuple[Plan, MemoryPlan]:
        config, infos = self.config, tuple(self.infos.values())
        batched = min(self.step, length * config.max_num_seqs)
        decodes = infos[0].decode_buckets if len(infos) == 1 else ()
        limits = make_limits(batched, config.max_num_seqs, length, config.block_size, MAX_CANDIDATES, decodes)
        buckets = common_buckets([_buckets(info, config.deterministic) for info in infos])
        plan, memory = make_plan(
            self.placement, weights, config.kv_cache_dtype, tuple(blocks), limits, config.keep, buckets, addresses
        )
        for place, info in self.infos.items():
            check_device(plan, info, place)
        return plan, memory

    def swap_bytes(self, free: int, memory: MemoryPlan) -> int:
        """The host's memory for swapped sequences. ConfigError where the host, of which so much was free before weights were
        packed, has less beside those and the caches of devices without memory of their own."""
        weights = packed_bytes(self.placement)
        blocks = kv_bytes_a_block(self.placement.program, self.placement, self.config.kv_cache_dtype)
        for place in (*self.infos, "host"):
            if place == "host" or not self.infos[place].own_memory:
                cache = sum(n * size for n, size in zip(memory.num_blocks, blocks.get(place, ()), strict=False))
                free -= weights[place] + cache
        wanted = int(self.config.swap_space * 2**30)
        if wanted > free:
            raise ConfigError(
                f"swap_space is {self.config.swap_space:g} GiB, and {max(free, 0) / 2**30:.3g} GiB of the host's memory are free"
                " for it; set a smaller one (--swap-space), or preempt by recomputation (--preemption recompute)."
            )
        return wanted


def _buckets(info: DeviceInfo, deterministic: bool) -> tuple[int, ...]:
    """The sizes of steps that the device takes, or of those the ones in which no row depends on another."""
    return info.invariant_buckets if deterministic and info.invariant_buckets is not None else info.buckets
