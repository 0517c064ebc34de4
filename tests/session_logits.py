"""All logits of a sequence, straight from a session: what the engine's public outputs show only in part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from engine.backend.v1 import StepInputs
from engine.kv import CacheGroup
from engine.ops import STEP_INPUTS
from engine.runtime.config import EngineConfig
from engine.runtime.load import Loaded, load
from engine.runtime.step_inputs import RowParams, step_inputs
from engine.sampling import SamplingParams
from engine.scheduler import ScheduledSequence, ScheduledStep

PER_ROW = [name for name, (shape, _) in STEP_INPUTS.items() if shape[0] == "R" and name != "rows"]


def load_for_logits(model: Path, backend: str, **settings: Any) -> Loaded:
    settings = {"kv_cache_dtype": "f32", "threads": 2, "max_num_seqs": 64} | settings
    return load(EngineConfig(model=model, backend=backend, keep=("logits",), **settings))


def logits(loaded: Loaded, ids: Sequence[int], chunks: Sequence[int]) -> np.ndarray:
    """f32 [len(ids), V]: the sequence runs in steps of ``chunks`` tokens, every row through the head. Blocks behind a window
    are the null block, as they are when sequences run."""
    assert sum(chunks) == len(ids)
    groups = loaded.program.groups
    whole = [np.random.default_rng(5).permutation(group.blocks(len(ids))) + 1 for group in groups]
    session, found, start = loaded.session(), [], 0
    try:
        for number, count in enumerate(chunks):
            tables = tuple(_table(group, blocks, start) for group, blocks in zip(groups, whole, strict=True))
            inputs = _step(loaded, number, ids[start : start + count], start, tables)
            found.append(session.submit(inputs).wait().values["logits"])
            start += count
    finally:
        session.close()
    return np.concatenate(found)


def _table(group: CacheGroup, blocks: np.ndarray, start: int) -> tuple[int, ...]:
    behind = group.behind(start)
    return (0,) * behind + tuple(blocks[behind:].tolist())


def _step(loaded: Loaded, number: int, ids: Sequence[int], start: int, tables: tuple[Any, ...]) -> StepInputs:
    """One chunk in slot 3, with a row for each of its tokens in place of the last one's."""
    count = len(ids)
    part = ScheduledSequence(0, 3, start, count, tuple(ids), True, tables)
    groups = len(tables)
    step = ScheduledStep(number, (part,), int(count == 1), count, ((),) * groups, (), ())
    row = RowParams(SamplingParams(temperature=0.0), 1, 0, 0)
    inputs, _ = step_inputs(step, lambda _: row, groups, (loaded.program.vocab + 31) // 32)
    arrays = dict(inputs.arrays) | {
        "rows": np.arange(count, dtype=np.int32),
        "bias_offsets": np.zeros(count + 1, np.int32),
    }
    arrays |= {name: np.repeat(arrays[name], count, axis=0) for name in PER_ROW}
    return StepInputs(replace(inputs.dims, R=count), arrays)
