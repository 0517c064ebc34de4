"""After a fault the cache begins anew, which nearly fills a device: what has failed keeps nothing of the last one."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import numpy as np
import pytest

from engine import LLM, SamplingParams
from engine_reference import ReferenceDevice

POISON = 77


@pytest.fixture
def alive(monkeypatch):
    """Each time a session has made its history, its last state: how many states there are, by references alone."""
    found, made, alloc = [], [], ReferenceDevice.alloc

    def counted(device, shape, dtype):
        value = alloc(device, shape, dtype)
        made.append(weakref.ref(value))
        if dtype == "i32":
            found.append(sum(state() is not None for state in made))
        return value

    monkeypatch.setattr(ReferenceDevice, "alloc", counted)
    gc.disable()
    yield found
    gc.enable()


@pytest.mark.parametrize("in_flight", [1, 2])
def test_what_has_failed_keeps_no_states(llama, alive, monkeypatch, in_flight):
    """An op fails with a state at hand, and what it raises has a reason."""
    copy_in, copy_out, describe = ReferenceDevice.copy_in, ReferenceDevice.copy_out, ReferenceDevice.describe
    poisoned = []

    def given(device, array):
        if array.dtype == np.int32 and array.ndim == 1 and len(array) > 4 and POISON in array:
            poisoned.append(True)
        return copy_in(device, array)

    def taken(device, value):
        if poisoned and value.ndim == 4:
            poisoned.clear()
            try:
                raise RuntimeError("out of memory")
            except RuntimeError as error:
                raise MemoryError("the kernel refused") from error
        return copy_out(device, value)

    monkeypatch.setattr(ReferenceDevice, "copy_in", given)
    monkeypatch.setattr(ReferenceDevice, "copy_out", taken)
    monkeypatch.setattr(ReferenceDevice, "describe", lambda self: replace(describe(self), max_in_flight=in_flight))
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logit_bias={POISON: -100})
    with LLM(llama, backend="reference", max_model_len=96, max_num_seqs=2) as llm:
        count = len(llm.loaded.plan.states)
        outputs = llm.generate([[5, 6, 7, 8, 9, 10], [5, POISON, 7, 8, 9, 10]], params)
        assert [out.outputs[0].finish_reason for out in outputs] == ["length", "error"]
    assert len(alive) >= 2, "a session after each fault"
    assert alive == [count] * len(alive)
