"""How much of prompts joins a step of decodes."""

from __future__ import annotations

import statistics

from hypothesis import given
from hypothesis import strategies as st

from engine import LLM, SamplingParams
from engine.runtime.pace import Pace

FIRST, EACH = 1e-2, 1e-3  # seconds of a device's step, and of each decode in it


def test_decodes_alone_are_timed_first_and_prompts_alone_have_no_limit():
    pace = Pace(2.0)
    assert pace.allowance(0, 1) is None
    assert pace.allowance(4, 1) == 0
    pace.note(4, 0, 1.0)
    assert pace.allowance(4, 1) == 8, "what a prompt's token adds is not known yet"
    pace.note(0, 100, 1.0)
    assert [pace.allowance(4, 1) for _ in range(5)] == [16, 32, 64, 96, 96], "at most twice as many as before"


def test_numbers_of_decodes_a_quarter_apart_are_taken_for_one():
    for decodes in range(1, 300):
        pace = Pace(2.0)
        pace.note(decodes, 0, 1.0)
        known = [other for other in range(1, 400) if pace.allowance(other, 1)]
        assert decodes in known
        assert known[-1] <= 1.25 * known[0]
        assert known == list(range(known[0], known[-1] + 1))


@given(
    slowdown=st.floats(1.1, 10), token=st.floats(1e-6, 1e-2), decodes=st.integers(1, 100), prompts=st.integers(1, 300)
)
def test_steps_come_near_to_the_slowdown_and_not_above(slowdown: float, token: float, decodes: int, prompts: int):
    """On a device whose time is a sum, with prompts that never end; where more of them wait than decode, as many times more."""
    pace = Pace(slowdown)
    alone = FIRST + EACH * decodes
    wanted = slowdown * max(prompts / decodes, 1)
    steps = []
    for _ in range(40):
        joining = pace.allowance(decodes, prompts)
        assert joining is not None
        seconds = alone + token * joining
        pace.note(decodes, joining, seconds)
        steps.append((joining, seconds / alone))
    joining, factor = steps[-1]
    grain = 8 * token / alone
    assert joining % 8 == 0 and joining >= 8
    assert factor <= max(wanted, 1 + grain) + 1e-6
    assert factor > wanted - grain - 1e-6


def test_decodes_are_timed_anew_as_their_contexts_grow():
    pace = Pace(2.0)
    pace.note(1, 0, 1.0)
    joined = 0
    while pace.allowance(1, 1):
        pace.note(1, 16, 2.0)
        joined += 1
    assert joined == 64
    pace.note(1, 0, 3.0)
    assert settled(pace, 1) == 16 * (1 + 0.3 * 2) // 8 * 8


def test_tokens_that_grow_dearer_are_soon_believed():
    pace = Pace(2.0)
    pace.note(4, 0, 1.0)
    pace.note(0, 200, 2.0)
    assert settled(pace, 4) == 96
    for _ in range(3):
        pace.note(4, 96, 1.0 + 4 * 0.96)
    assert 24 <= settled(pace, 4) <= 32


@given(st.lists(st.floats(-0.5, 0.5), min_size=60, max_size=60))
def test_steps_that_are_held_up_do_not_shrink_chunks_for_long(noise: list[float]):
    """Times that scatter by half of a step around what tokens take: chunks of a few tokens say little of what one takes."""
    noise = [value - statistics.mean(noise) for value in noise]
    pace = Pace(2.0)
    pace.note(4, 0, 1.0)
    pace.note(0, 256, 2.56)
    joined = []
    for value in noise:
        joining = pace.allowance(4, 1)
        joined.append(joining)
        pace.note(4, joining, 1.0 + 0.01 * joining + value)
    assert statistics.median(joined) >= 40


def settled(pace: Pace, decodes: int) -> int:
    """What it allows, once it has doubled as often as it may."""
    return [pace.allowance(decodes, 1) for _ in range(10)][-1] or 0


def test_one_step_that_took_no_time_lets_no_crowd_in():
    pace = Pace(2.0)
    pace.note(4, 0, 1.0)
    assert pace.allowance(4, 1) == 8
    pace.note(4, 8, 0.5)
    assert pace.allowance(4, 1) == 16


def test_an_engine_lets_few_tokens_join_and_gives_the_same(llama):
    """A long prompt that comes while an answer runs: its chunks are cut by what steps take."""
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    prompts = [list(range(3, 9)), list(range(3, 213))]
    counts = []
    with LLM(llama, backend="reference", max_num_batched_tokens=32, decode_slowdown=1.01) as llm:
        core = llm.engine._core
        schedule = core.scheduler.schedule

        def watched(*given: object):
            step = schedule(*given)
            if step is not None:
                counts.append((step.decode_count, step.num_tokens - step.decode_count))
            return step

        core.scheduler.schedule = watched
        got = [out.outputs[0].token_ids for out in llm.generate(prompts, [params, params])]
    with LLM(llama, backend="reference") as llm:
        assert got == [llm.generate([prompt], params)[0].outputs[0].token_ids for prompt in prompts]
    joined = [prompt_tokens for decodes, prompt_tokens in counts if decodes]
    assert joined[0] == 0 and joined[1] == 8
    assert statistics.median(count for count in joined if count) == 8
    assert max(prompt_tokens for _, prompt_tokens in counts) == 32


def test_an_engine_says_how_many_prompts_are_not_computed_yet(llama, monkeypatch):
    seen = []
    allowance = Pace.allowance

    def watched(pace: Pace, decodes: int, prompts: int) -> int | None:
        seen.append((decodes, prompts))
        return allowance(pace, decodes, prompts)

    monkeypatch.setattr(Pace, "allowance", watched)
    prompts = [list(range(3, 9)), *(list(range(n, n + 100)) for n in range(4, 9))]
    with LLM(llama, backend="reference", max_num_batched_tokens=32, max_num_seqs=3, decode_slowdown=1.5) as llm:
        llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
    assert seen[0] == (0, 6) and (1, 5) in seen and seen[-1][1] == 0
    assert all(0 <= count <= 6 for _, count in seen)
