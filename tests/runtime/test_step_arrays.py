"""The arrays of a step, of which most is taken from the step before."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_schedules import requests

from engine import SamplingParams
from engine.runtime.head_inputs import HeadInputs
from engine.runtime.step_inputs import StepArrays, _Tables


class Checked:
    """Beside what is kept from step to step it makes everything anew, and notes where they differ."""

    def __init__(self, kept: StepArrays, groups: int, words: int) -> None:
        self._kept, self._groups, self._words = kept, groups, words
        self.differ: list[str] = []
        self.steps: Counter[bool] = Counter()

    def of(self, step, row_params):
        (got, rows), (anew, others) = (
            arrays.of(step, row_params) for arrays in (self._kept, StepArrays(self._groups, HeadInputs(self._words)))
        )
        self.steps[step.plain] += 1
        if (rows, got.dims, got.arrays.keys()) != (others, anew.dims, anew.arrays.keys()):
            self.differ.append(f"{rows} {others} {got.dims} {anew.dims}")
        for name, array in got.arrays.items():
            if array.dtype != anew.arrays[name].dtype or not np.array_equal(array, anew.arrays[name]):
                self.differ.append(f"{name}: {array} {anew.arrays[name]}")
        return got, rows


@pytest.mark.parametrize("allocator", ["paged", "contiguous"])
def test_what_is_kept_is_what_would_be_made_anew(open_llm, allocator):
    settings = {"kv_cache_tokens": None, "kv_cache_memory": 160 * open_llm("cpu").loaded.memory.groups[0].bytes_a_token}
    settings |= {"max_model_len": 153, "block_size": 4, "max_num_batched_tokens": 64}
    llm = open_llm("cpu", kv_allocator=allocator, **settings)
    core, vocab = llm.engine._core, llm.loaded.program.vocab
    core._arrays = checked = Checked(core._arrays, len(llm.loaded.program.groups), (vocab + 31) // 32)
    llm.generate(*requests())
    several = SamplingParams(n=3, max_tokens=9, temperature=1.0, ignore_eos=True, min_tokens=4, stop_token_ids=[5])
    scored = SamplingParams(max_tokens=30, prompt_logprobs=1, ignore_eos=True)
    llm.generate([[3, 4, 5], [6] * 40, [7, 8]], [several, scored, several])
    assert not checked.differ, checked.differ[0]
    assert min(checked.steps.values()) > 10 and len(checked.steps) == 2
    assert llm.engine.scheduler_stats().preemptions


@given(st.data())
def test_tables_that_stay_are_copied_and_others_written(data: st.DataObject):
    tables, known = _Tables(), [(n,) * (n % 5) for n in range(9)]
    for _ in range(data.draw(st.integers(1, 6))):
        given = [known[n] for n in data.draw(st.lists(st.integers(0, 8), max_size=4))]
        width = max(max(map(len, given), default=0), data.draw(st.integers(1, 6)))
        wanted = np.array([[*table, *[0] * (width - len(table))] for table in given], np.int32).reshape(-1, width)
        np.testing.assert_array_equal(tables.of(given, width), wanted)
