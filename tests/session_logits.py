"""All logits of a sequence, straight from a session: what the engine's public outputs show only in part."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from engine.evaluate.forward import Forward
from engine.kv import KVAllocator
from engine.runtime.config import EngineConfig
from engine.runtime.load import Loaded, load


def load_for_logits(model: Path, backend: str, **settings: Any) -> Loaded:
    settings = {"kv_cache_dtype": "f32", "threads": 2, "max_num_seqs": 64, "keep": ("logits",)} | settings
    return load(EngineConfig(model=model, backend=backend, **settings))


def logits(loaded: Loaded, ids: Sequence[int], chunks: Sequence[int]) -> np.ndarray:
    """f32 [len(ids), V]: the sequence runs in steps of ``chunks`` tokens, every row through the head, in blocks that lie in no
    order."""
    assert sum(chunks) == len(ids)
    ends = np.cumsum(chunks).tolist()
    with Forward(loaded) as forward:
        shuffle(forward.allocator)
        runs = zip([0, *ends], ends, chunks, strict=False)
        return np.concatenate([forward.run(ids[a:b], a, np.arange(n, dtype=np.int32))["logits"] for a, b, n in runs])


def shuffle(allocator: KVAllocator) -> None:
    """All blocks are given out, and come back in an order of chance."""
    members = np.arange(1, 1 + min(pool.free for pool in allocator.stats())).tolist()
    for seq_id in members:
        allocator.open(seq_id, 1)
        allocator.allocate(seq_id, 1)
    for seq_id in np.random.default_rng().permutation(members).tolist():
        allocator.close(seq_id)
