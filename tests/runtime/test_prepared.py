"""Requests of an event loop: it is woken once for a step, and what interrupts a request ends it."""

from __future__ import annotations

import asyncio
import time

import pytest
import tiny_models

from engine import LLM, AsyncLLM, SamplingParams
from engine.errors import EngineStoppedError
from engine.runtime import prepared as prepared_module
from engine.runtime.prepared import Post

LONG = SamplingParams(max_tokens=8000, ignore_eos=True, temperature=0.0)


@pytest.fixture(scope="module")
def talker(tmp_path_factory):
    """An engine whose answers do not end by themselves."""
    folder = tiny_models.write_talker(tmp_path_factory.mktemp("talker"))
    with LLM(folder, backend="cpu", threads=2, kv_cache_tokens=8192) as llm:
        yield llm


@pytest.fixture
def async_llm(talker, idle):
    yield AsyncLLM(talker.engine)
    idle(talker)


def test_a_loop_is_woken_once_for_all_outputs_of_a_step(async_llm, monkeypatch):
    woken, delivered = [], Post._deliver
    monkeypatch.setattr(Post, "_deliver", lambda post: (woken.append(len(post._new)), delivered(post)))
    begun = async_llm.health().steps

    async def main():
        params = SamplingParams(max_tokens=200, ignore_eos=True, temperature=0.0)
        prepared = [await async_llm.prepare([3 + n, 4, 5], params) for n in range(8)]

        async def read(one):
            return [len(output.outputs[0].token_ids) async for output in one.outputs()]

        return await asyncio.gather(*map(read, prepared))

    for counts in asyncio.run(main()):
        assert counts[-1] == 200 and counts == sorted(set(counts))
    assert max(woken) >= 8  # all sequences of a step together
    assert len(woken) <= async_llm.health().steps - begun + 2


@pytest.mark.parametrize("begun", [False, True])
def test_what_interrupts_a_request_ends_it(async_llm, begun):
    async def main():
        prepared = await async_llm.prepare([3, 4, 5], LONG)
        seen = 0
        with pytest.raises(ValueError, match="enough"):
            if not begun:
                prepared.interrupt(ValueError("enough"))
            async for _ in prepared.outputs():
                seen += 1
                if seen == 3:
                    prepared.interrupt(ValueError("enough"))
        return seen

    assert asyncio.run(main()) == 3 * begun


def test_the_last_output_is_given_though_the_request_is_interrupted(async_llm):
    async def main():
        prepared = await async_llm.prepare([3, 4, 5], SamplingParams(max_tokens=2000, ignore_eos=True))
        outputs = prepared.outputs()
        assert not (await anext(outputs)).finished
        await prepared.ended()
        prepared.interrupt(ValueError("too late"))
        return await anext(outputs)

    assert asyncio.run(main()).finished


def test_an_engine_that_has_stopped_is_told_to_who_waits(async_llm, monkeypatch):
    """Though no output comes any more: the engine is asked now and then."""
    monkeypatch.setattr(prepared_module, "_CHECK_S", 0.05)

    def stopped():
        raise EngineStoppedError("It hangs.")

    async def main():
        prepared = await async_llm.prepare([3, 4, 5], LONG)
        async with asyncio.timeout(20):
            with pytest.raises(EngineStoppedError, match="It hangs"):
                async for _ in prepared.outputs():
                    monkeypatch.setattr(async_llm.engine, "check_progress", stopped)

    asyncio.run(main())


def test_requests_of_a_loop_that_is_closed_end(async_llm):
    loop = asyncio.new_event_loop()
    prepared = loop.run_until_complete(async_llm.prepare([3, 4, 5], LONG))
    outputs = prepared.outputs()
    loop.run_until_complete(anext(outputs))
    loop.close()
    end = time.monotonic() + 20
    while async_llm.health().running:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert prepared.request.finished and len(prepared.request.continuations[0].token_ids) < 8000
