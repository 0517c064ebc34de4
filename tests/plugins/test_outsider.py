"""A collective and a KV allocator of somebody else's distribution: found by entry point, and used."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engine import LLM, SamplingParams
from engine.backend.joining import discover_collectives, find_collectives
from engine.errors import BackendError, ConfigError
from engine.testing.collectives import CHECKS, Subject
from engine.testing.models import compare_answers, random_prompts

SOURCE = (Path(__file__).parent / "outsider.py").read_text()


@pytest.fixture
def outside(install):
    install("engine.collectives", "sockets", "their_outsider:sockets", SOURCE)
    install("engine.kv_allocators", "from-the-top", "their_outsider:from_the_top")


@pytest.mark.parametrize("check", CHECKS)
def test_the_kit_passes_their_collectives(check, outside):
    function, ranks = CHECKS[check]
    Subject("sockets").check(function, ranks, int(np.random.default_rng().integers(2**32)))


def test_ranks_exchange_by_their_collectives_in_blocks_of_their_allocator(llama, cpu, outside):
    prompts = random_prompts(np.random.default_rng(), (1, 20, 40))
    params = SamplingParams(temperature=0.0, max_tokens=16, n=2, ignore_eos=True, logprobs=2, prompt_logprobs=0)
    with LLM(llama, backend=cpu, threads=1) as alone:
        want = alone.generate(prompts, params)
    theirs = {"collectives": "sockets", "kv_allocator": "from-the-top"}
    with LLM(llama, backend=cpu, threads=1, tensor_parallel_size=2, **theirs) as llm:
        got = llm.generate(prompts, params)
        assert type(llm.loaded.rank.host).__name__ == "Sockets"
        import their_outsider

        [allocator] = their_outsider.FromTheTop.made
        assert allocator.most == llm.loaded.memory.num_blocks[0] - 1
        allocator.check()
        assert allocator.stats()[0].used == 0
    compare_answers(got, want, 2e-3)


def test_an_allocator_that_cannot_rewind_is_refused_guesses(llama, cpu, outside):
    with pytest.raises(
        ConfigError, match=r"'from-the-top' cannot rewind, as guessed tokens need it; leave speculate out\."
    ):
        LLM(llama, backend=cpu, threads=1, kv_allocator="from-the-top", speculate=3)


def test_what_is_wrong_with_collectives_is_told(install):
    install("engine.collectives", "old", "old_ones:manifest", _module("2.0", "Probe(True, 'here')"))
    install("engine.collectives", "away", "away_ones:manifest", _module("1.1", "Probe(False, 'No driver was found.')"))
    install("engine.collectives", "broken", "broken_ones:manifest", "raise OSError('no library\\nof that name')")
    install("engine.collectives", "other", "other_ones:manifest", "manifest = 3")
    found = {one.name: one.probe for one in discover_collectives()}
    assert not any(found[name].available for name in ("old", "away", "broken", "other"))
    for name, reason in (
        ("old", "The collectives old was made for API 2.0"),
        ("away", "No driver was found."),
        ("broken", "OSError: no library of that name"),
        ("other", "it gives int and no CollectivesManifest"),
    ):
        with pytest.raises(BackendError, match=reason):
            find_collectives(name)
    with pytest.raises(BackendError, match=r"There are no collectives 'nobody'; installed are: .*gloo"):
        find_collectives("nobody")


def _module(api: str, probe: str) -> str:
    return f"""
from engine.backend.v1 import CollectivesManifest, Probe
manifest = CollectivesManifest("old" if "{api}" == "2.0" else "away", "{api}", lambda: {probe}, print)
"""
