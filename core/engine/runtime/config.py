"""Settings of an engine, checked when they are made."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from ..backend.processors import find_processors
from ..errors import ConfigError
from ..program.rules import Rules, parse_rules
from ..sampling.params import plain_number

KV_DTYPES = ("f32", "f16", "bf16", "int16", "int8", "fp8")
PREEMPTIONS = ("recompute", "swap")
POPULATIONS = ("as used", "when idle", "first")
MAX_SWAP_SPACE = 1 << 20
MAX_RANKS = 64


MAX_GUESSES = 64
MAX_SLOWDOWN = 1e6
USUAL_POOL_TOKENS = 64 * 1024
"""Tokens of the KV cache where nobody says how many, and the memory is others', too."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Names are vLLM's where it has them.

    ``kv_cache_dtype`` "auto" is what the devices are fastest with at 16 bits a number. ``kv_cache_memory`` is in bytes (None:
    half of the free memory, or of a device's own 95 % of what weights and the largest steps leave, 85 % of what weights leave
    where no steps can be measured), ``kv_cache_tokens`` what is wanted of it (None: 64 Ki,
    or one whole context if that is more; of a device's own memory all that the sequences may take);
    ``max_num_batched_tokens`` None is what the device proposes; ``max_model_len`` None takes the model's own context, or
    what the KV memory holds if that is less, which is reported; ``without`` takes an op's providers out;
    ``deterministic`` refuses a placement in which a sequence's tokens may depend on what else is in the batch;
    ``watchdog_s`` ends requests when no step finishes for so long. ``kv_allocator`` and ``length_predictor`` (of output, for
    allocators that reserve) are names of this package's or of entry points. A sequence that must make room is computed again
    (``preemption`` "recompute"), or its cache waits on the host ("swap"), in at most ``swap_space`` GiB. ``place`` shares the
    model out among devices (``program/rules.py``); what it does not name is ``backend``'s. ``tensor_parallel_size``: ranks
    that share each layer, with ``threads`` and ``kv_cache_memory`` each; ``collectives`` names how they exchange values
    ("auto": the device's own, or the best over the host). ``warm_up``: a device that takes steps of fixed sizes compiles all
    of them at once, and not each when it first comes. ``decode_slowdown``: prompts join a step with decodes in chunks that
    make it at most about so many times as long as the decodes alone would take, longer where more prompts wait than decode;
    None: in chunks that fill ``max_num_batched_tokens``, for the highest throughput. ``pin_threads`` keeps the CPU's threads
    but one on cores of their own. ``speculate``: tokens that are guessed for a sequence from what it repeats, and checked in
    the same step; its own stay what they are. ``populate_cache``: the KV cache's memory is taken "as used", or beforehand:
    "when idle", from the start on whenever no steps run, or "first", before there are any.
    """

    model: Path
    backend: str = "auto"
    place: str | None = None
    threads: int | None = None
    pin_threads: bool = False
    tensor_parallel_size: int = 1
    collectives: str = "auto"
    kv_cache_dtype: str = "auto"
    block_size: int = 16
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int | None = None
    kv_cache_memory: int | None = None
    kv_cache_tokens: int | None = None
    kv_allocator: str = "paged"
    length_predictor: str = "histogram"
    policy: str = "fcfs"
    preemption: str = "recompute"
    swap_space: float = 4.0
    strict: bool = False
    deterministic: bool = False
    fused: bool = True
    without: tuple[str, ...] = ()
    round_trip: bool = False
    keep: tuple[str, ...] = ()
    watchdog_s: float = 300.0
    warm_up: bool = True
    decode_slowdown: float | None = None
    speculate: int = 0
    populate_cache: str = "as used"

    def _check_types(self) -> None:
        hints = get_type_hints(type(self))
        for field in fields(self):
            value: Any = getattr(self, field.name)
            kinds = _kinds(hints[field.name])
            if type(value) is int and float in kinds:
                continue
            if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
                wanted = " or ".join(_KINDS[kind] for kind in kinds)
                raise ConfigError(f"{field.name} is {value!r}; it must be {wanted}.")
            if isinstance(value, tuple) and not all(isinstance(name, str) for name in value):
                raise ConfigError(f"{field.name} is {value!r}; it must be a tuple of texts.")

    @property
    def rules(self) -> Rules:
        """Which device runs what; all on one without ``place``."""
        return Rules() if self.place is None else parse_rules(self.place, self.backend)

    @property
    def threads_a_rank(self) -> int | None:
        """The threads of the CPU for one rank: ranks of one machine share its cores."""
        if self.threads is not None or self.tensor_parallel_size == 1:
            return self.threads
        return max(find_processors().cores // self.tensor_parallel_size, 1)

    def __post_init__(self) -> None:
        if isinstance(self.model, str):
            object.__setattr__(self, "model", Path(self.model))
        for field in fields(self):
            object.__setattr__(self, field.name, plain_number(getattr(self, field.name)))
        for name in ("without", "keep"):
            if isinstance(given := getattr(self, name), list):
                object.__setattr__(self, name, tuple(given))
        self._check_types()
        if self.rules.complete and self.backend != "auto":
            raise ConfigError("--place gives the rest to a device, and --backend names one for it, too; leave one out.")
        if self.kv_cache_dtype not in ("auto", *KV_DTYPES):
            known = ", ".join(KV_DTYPES)
            raise ConfigError(f"There is no KV dtype {self.kv_cache_dtype!r}; choose one of {known}, or auto.")
        if self.preemption not in PREEMPTIONS:
            raise ConfigError(f"There is no preemption {self.preemption!r}; choose one of {', '.join(PREEMPTIONS)}.")
        if self.populate_cache not in POPULATIONS:
            raise ConfigError(f"populate_cache is {self.populate_cache!r}; choose one of {', '.join(POPULATIONS)}.")
        if not 0 < self.swap_space <= MAX_SWAP_SPACE:
            raise ConfigError(
                f"The swap space is {self.swap_space:g} GiB; it must be above 0 and at most {MAX_SWAP_SPACE}."
            )
        if self.decode_slowdown is not None and not 1 < self.decode_slowdown <= MAX_SLOWDOWN:
            raise ConfigError(
                f"decode_slowdown is {self.decode_slowdown:g}; it must be above 1, and at most {MAX_SLOWDOWN:g}."
            )
        if not 0 < self.watchdog_s < math.inf:
            raise ConfigError(f"watchdog_s is {self.watchdog_s:g}; it must be a number of seconds above 0.")
        if not 0 <= self.speculate <= MAX_GUESSES:
            raise ConfigError(f"speculate is {self.speculate}; it must be from 0, which is off, to {MAX_GUESSES}.")
        if self.block_size not in (1, 2, 4, 8, 16, 32, 64, 128, 256):
            raise ConfigError(f"The block size is {self.block_size}; it must be a power of two from 1 to 256.")
        sizes = ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "kv_cache_memory", "kv_cache_tokens")
        for name in (*sizes, "threads", "tensor_parallel_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1.")
        if self.tensor_parallel_size > 1 and self.place is not None:
            raise ConfigError("A model is shared by place or by tensor_parallel_size, not by both; leave one out.")
        if self.tensor_parallel_size > 1 and self.pin_threads:
            raise ConfigError(
                "Ranks share this machine's cores, and each would pin to the same; leave pin_threads out."
            )
        if self.tensor_parallel_size > 1 and self.preemption == "swap":
            raise ConfigError("Ranks cannot swap to the host; with tensor_parallel_size preempt by recomputation.")
        if self.tensor_parallel_size > MAX_RANKS:
            raise ConfigError(f"tensor_parallel_size is {self.tensor_parallel_size}; it may be at most {MAX_RANKS}.")
        if self.max_num_seqs > 4096 or (self.max_num_batched_tokens or 0) > 1 << 16:
            raise ConfigError("max_num_seqs may be at most 4096, and max_num_batched_tokens at most 65536.")


_KINDS = {
    Path: "a path",
    str: "a text",
    bool: "true or false",
    int: "an integer",
    float: "a number",
    tuple: "a tuple of texts",
    NoneType: "None",
}


def _kinds(hint: Any) -> tuple[type, ...]:
    """The types that a value may have."""
    given = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    return tuple(get_origin(kind) or kind for kind in given)
