"""How much of unified memory may be used, and the refusal of more: a working set beyond what the GPU can keep resident makes
macOS swap or panic."""

from __future__ import annotations

import mlx.core as mx

from engine.backend.v1 import MemoryInfo, available_memory

CACHE_SHARE = 16
"""Of the working set: at most one part in so many is kept by MLX for reuse once it is free."""


class WorkingSet:
    """The bytes that this device may hold. ``limit`` None: what Metal recommends, or without Metal the free main memory."""

    def __init__(self, limit: int | None = None) -> None:
        metal = mx.metal.is_available()
        if limit is None and metal:
            limit = int(mx.device_info()["max_recommended_working_set_size"])
        self.limit = limit
        if limit is not None:
            mx.set_memory_limit(limit)
            mx.set_cache_limit(limit // CACHE_SHARE)
        if limit is not None and metal:
            mx.set_wired_limit(limit)

    def info(self) -> MemoryInfo:
        if self.limit is None:
            return available_memory()
        return MemoryInfo(self.limit, max(self.limit - mx.get_active_memory(), 0))

    def check(self, nbytes: int) -> None:
        """MemoryError where so many bytes more do not fit."""
        free = self.info().free
        if nbytes > free:
            raise MemoryError(
                f"an array of {nbytes / 1e9:.3g} GB does not fit: {free / 1e9:.3g} GB of the working set that the device"
                " recommends are left; set a smaller --max-context or choose a smaller model."
            )
