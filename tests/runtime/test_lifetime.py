"""A model that is closed and not referred to any more, or only that, is gone at once: its threads, and its memory."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections.abc import Iterator

import pytest
from own_process import FORK, ran

from engine import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


@pytest.fixture(autouse=True)
def no_search() -> Iterator[None]:
    """Python does not look for objects that refer to each other."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def own_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("engine-")}


def opened(llama, backend: str) -> tuple[LLM, list[weakref.ref]]:
    llm = LLM(llama, backend=backend, kv_cache_tokens=1024)
    llm.generate([1, 5, 9], GREEDY)
    packed = llm.loaded.packing.weights.values()
    return llm, [weakref.ref(llm.loaded), weakref.ref(llm.loaded.device), *map(weakref.ref, packed)]


def gone(parts: list[weakref.ref], threads: set[threading.Thread]) -> bool:
    end = time.monotonic() + 10
    while (own_threads() - threads or any(part() is not None for part in parts)) and time.monotonic() < end:
        time.sleep(0.01)
    return not own_threads() - threads and all(part() is None for part in parts)


@pytest.mark.parametrize("closed", [True, False])
def test_a_model_that_nobody_refers_to(llama, backend, closed):
    threads = own_threads()
    llm, parts = opened(llama, backend)
    assert own_threads() - threads
    if closed:
        llm.close()
        assert not own_threads() - threads
    del llm
    assert gone(parts, threads)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_forked_process_is_told_to_load_the_model_itself(llama, cpu):
    before = f"""
from engine import LLM, SamplingParams
from engine.errors import EngineStoppedError
llm = LLM({str(llama)!r}, backend={cpu!r}, kv_cache_tokens=1024, threads=2)
params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
llm.generate([1, 5, 9], params)
"""
    after = """
try:
    llm.generate([1, 5, 9], params)
    print(who, "could")
except EngineStoppedError as error:
    print(who, error)
llm.close()
"""
    told, could = ran(before + FORK + after)
    assert told.startswith("child This process was forked from the one that loaded") and could == "parent could"


def test_a_program_may_end_in_the_middle_of_an_answer(llama, cpu):
    program = f"""
from engine import LLM, SamplingParams
llm = LLM({str(llama)!r}, backend={cpu!r}, kv_cache_tokens=1024, threads=2)
stream = llm.stream([1, 5, 9], SamplingParams(max_tokens=None, ignore_eos=True))
print(len(next(stream).outputs))
"""
    assert ran(program) == ["1"]


def test_the_last_reference_is_dropped_by_a_reader_of_outputs(llama, backend):
    threads = own_threads()
    llm, parts = opened(llama, backend)
    held, told = [llm], threading.Event()

    def sink(output) -> None:
        held.clear()
        told.set()

    llm.engine.submit(None, (1, 5), GREEDY, sink)
    del llm
    assert told.wait(10) and gone(parts, threads)


def test_a_stream_that_goes_on_keeps_its_model(llama):
    llm, parts = opened(llama, "reference")
    stream = llm.stream([1, 5], GREEDY)
    del llm
    assert len([*stream][-1].outputs[0].token_ids) == 4
    del stream
    assert gone(parts, own_threads())
