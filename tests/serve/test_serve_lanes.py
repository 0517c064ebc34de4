"""What holds up the event loop is done in turns, with room for all else between them."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise

import pytest

from engine.serve.lanes import LoopTurns


def test_the_loop_has_as_long_between_turns_as_they_took():
    async def all_at_once() -> list[tuple[float, float]]:
        turns, held = LoopTurns(), []

        async def hold_up(seconds: float) -> None:
            await turns.take()
            start = time.monotonic()
            time.sleep(seconds)
            held.append((start, time.monotonic()))

        await asyncio.gather(*[hold_up(seconds) for seconds in (0.02, 0.06, 0.04)])
        return held

    held = asyncio.run(all_at_once())
    for (start, end), (after, _) in pairwise(held):
        assert after - end > 0.9 * (end - start)


def test_a_turn_that_fails_or_is_given_up_holds_up_no_other():
    async def three() -> None:
        turns = LoopTurns()

        async def fail() -> None:
            await turns.take()
            raise ValueError

        with pytest.raises(ValueError):
            await fail()
        waiting = asyncio.create_task(turns.take())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait_for(turns.take(), 10)

    asyncio.run(three())
