"""One sequence through a model, chunk by chunk, with chosen values of every token on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from ..backend.v1 import Array, StepInputs
from ..errors import ConfigError, KVCacheError
from ..kv import MappingAllocator
from ..ops import STEP_INPUTS
from ..runtime.head_inputs import HeadInputs, RowParams
from ..runtime.load import Loaded
from ..runtime.step_inputs import StepArrays
from ..runtime.swap import remap
from ..sampling import SamplingParams
from ..scheduler import ScheduledSequence, ScheduledStep


class Forward:
    """A session that computes one sequence at a time; a context that closes it. ``loaded`` was loaded with ``keep`` naming the
    values that are wanted, and ``max_num_seqs`` at least the rows of a chunk. ``allocator`` is its own, as a scheduler has one.
    """

    def __init__(self, loaded: Loaded) -> None:
        if not loaded.model.config.causal:
            raise ConfigError(f"{loaded.checkpoint.path} is an encoder, which predicts no tokens; use a decoder.")
        self._loaded = loaded
        self.allocator = loaded.allocator()
        self.allocator.open(_SEQUENCE, loaded.max_model_len)
        self._length = 0
        self._session = loaded.session()
        self._row = RowParams(SamplingParams(temperature=0.0), 1, 0, 0)
        self._arrays = StepArrays(len(loaded.program.groups), HeadInputs((loaded.program.vocab + 31) // 32))
        self._steps = 0

    def __enter__(self) -> Forward:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the session."""
        self._session.close()

    def run(self, ids: Sequence[int], start: int, rows: Array) -> Mapping[str, Array]:
        """The kept values of tokens ``ids`` at positions ``start`` and on: 0 begins a new sequence, else they follow those run
        before. ``rows`` i32 [R]: the tokens of this chunk, by their place in it, that the head sees; with none only the body
        runs. KVCacheError where they do not follow, or there is no room for them."""
        inputs = self._inputs(ids, start)
        arrays = dict(inputs.arrays)
        for name, array in inputs.arrays.items():
            size = STEP_INPUTS.get(name, ((None,), ""))[0][0]
            if size == "R":
                arrays[name] = np.repeat(array, len(rows), axis=0)
            elif size == "R+1":
                arrays[name] = np.zeros(len(rows) + 1, array.dtype)
        arrays["rows"] = np.ascontiguousarray(rows, np.int32)
        self._steps += 1
        return self._session.submit(StepInputs(replace(inputs.dims, R=len(rows)), arrays)).wait().values

    def _inputs(self, ids: Sequence[int], start: int) -> StepInputs:
        """A step of one sequence, in slot 0, that samples after its last token."""
        if start == 0:
            self.allocator.free(_SEQUENCE)
        elif start != self._length:
            raise KVCacheError(f"tokens at position {start} do not follow the {self._length} tokens run before.")
        if not self.allocator.allocate(_SEQUENCE, len(ids)):
            raise KVCacheError(
                f"there is no room for {len(ids)} tokens after {start}; load the model with a longer context."
            )
        self._length = start + len(ids)
        tables = self.allocator.tables(_SEQUENCE)
        part = ScheduledSequence(_SEQUENCE, 0, start, len(ids), tuple(ids), True, tables)
        copies = self.allocator.take_copies()
        remap(self._session, self.allocator.take_remaps() if isinstance(self.allocator, MappingAllocator) else ())
        step = ScheduledStep(self._steps, (part,), int(len(ids) == 1), len(ids), copies, (), ())
        return self._arrays.of(step, lambda _: self._row)[0]


_SEQUENCE = 0
"""The id of the one sequence."""
