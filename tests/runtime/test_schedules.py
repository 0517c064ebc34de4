"""However its steps are cut, whatever runs beside it: a request gets the same tokens."""

from __future__ import annotations

import numpy as np
import pytest

from engine import LLM, SamplingParams
from engine.errors import RequestError

COUNT = 24


def requests(seed=7):
    """Prompts of mixed lengths, a third of them with a beginning in common, and parameters of every kind."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(3, 320, 40).tolist()
    prompts, params = [], []
    for n in range(COUNT):
        own = rng.integers(3, 320, int(rng.choice([1, 2, 15, 16, 17, 33, 50, 90]))).tolist()
        prompts.append(shared + own if n % 3 == 0 else own)
        cut = {"temperature": 1.2, "seed": n, "top_k": 20, "top_p": 0.9}
        kinds = ({"temperature": 0.0}, {"temperature": 0.9, "seed": n}, cut)
        penalties = {"repetition_penalty": 1.2, "frequency_penalty": 0.2} if n % 4 == 0 else {}
        limits = {"max_tokens": int(rng.integers(1, 24)), "ignore_eos": True, "logprobs": 2}
        params.append(SamplingParams(**kinds[n % 3], **penalties, **limits))
    return prompts, params


def answers(outputs):
    return [(out.outputs[0].token_ids, out.outputs[0].text, out.outputs[0].finish_reason) for out in outputs]


@pytest.fixture(scope="module")
def one_by_one(open_llm):
    """backend -> the answers to each request by itself, with nothing cached before it."""
    known = {}

    def get(backend):
        if backend not in known:
            llm = open_llm(backend)
            known[backend] = []
            for prompt, params in zip(*requests(), strict=True):
                llm.engine._core.scheduler.allocator.forget()
                known[backend] += llm.generate([prompt], params)
        return answers(known[backend])

    return get


def together(open_llm, backend, **settings):
    llm = open_llm(backend, **settings)
    llm.engine._core.scheduler.allocator.forget()
    outputs = llm.generate(*requests())
    return answers(outputs), llm, outputs


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 16, "max_num_seqs": 16},
        {"max_num_batched_tokens": 64, "max_num_seqs": 3},
        {"block_size": 8},
        {"block_size": 32, "max_num_batched_tokens": 40, "max_num_seqs": 20},
        {"decode_slowdown": 1.2, "max_num_seqs": 5},
    ],
    ids=str,
)
def test_together_is_alone(open_llm, backend, one_by_one, settings):
    assert together(open_llm, backend, **settings)[0] == one_by_one(backend)


def test_preempted_is_not(open_llm, backend, one_by_one):
    """A pool that holds little more than one context: most requests lose their blocks in the middle."""
    memory = 160 * open_llm(backend).loaded.memory.groups[0].bytes_a_token
    got, llm, _ = together(open_llm, backend, block_size=4, max_model_len=153, kv_cache_memory=memory)
    assert llm.loaded.memory.num_blocks == (40,)
    stats = llm.engine._core.scheduler.stats()
    assert stats.preemptions >= 5
    assert stats.pools[0].used == 0
    assert got == one_by_one(backend)


def test_warm_is_cold(open_llm, backend, one_by_one):
    """A second time the prompts are in the cache, and are counted as such."""
    cold, llm, first = together(open_llm, backend)
    outputs = llm.generate(*requests())
    assert answers(outputs) == cold == one_by_one(backend)
    for out in outputs:
        assert out.num_cached_tokens == (len(out.prompt_token_ids) - 1) // 16 * 16
    assert sum(out.num_cached_tokens for out in first) < sum(out.num_cached_tokens for out in outputs)


def test_prefix_hits_are_counted(open_llm, backend):
    llm = open_llm(backend, block_size=8)
    llm.engine._core.scheduler.allocator.forget()
    greedy = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    prompt = list(range(100, 130))

    def ask(ids):
        out = llm.generate(ids, greedy)[0]
        return out.num_cached_tokens, out.outputs[0].token_ids

    cold, tokens = ask(prompt)
    assert cold == 0
    assert ask(prompt) == (24, tokens)
    assert ask(prompt[:17])[0] == 16
    assert ask(prompt[:16])[0] == 8, "one token at least must be computed"
    assert ask([5, *prompt])[0] == 0
    assert ask([*prompt[:20], 7, *prompt[20:]])[0] == 16
    assert ask([*prompt, *tokens])[0] == 48, "answers are hit as well as prompts"
    llm.engine._core.scheduler.allocator.forget()
    assert ask(prompt) == (0, tokens)


def test_penalties_count_what_a_prefix_hit_skipped(open_llm, backend):
    llm = open_llm(backend)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, repetition_penalty=1.7)
    prompt = list(range(40, 80))
    first = llm.generate(prompt, params)[0]
    again = llm.generate(prompt, params)[0]
    assert again.num_cached_tokens == 32
    assert again.outputs == first.outputs


def test_priorities(open_llm, backend):
    """With one slot requests run one after another, the most urgent first."""
    llm = open_llm(backend, policy="priority", max_num_seqs=1)
    order = []
    prompts = [[3 + n, *range(200, 240)] for n in range(6)]
    ranks = [5, 1, 4, 1, 0, 9]
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)

    def note(output):
        if output.finished:
            order.append(output.prompt_token_ids[0] - 3)

    llm.generate(prompts, params, on_output=note, priority=ranks)
    assert order == sorted(range(6), key=lambda n: (ranks[n], n))


def test_first_come_first_served(open_llm, backend):
    llm = open_llm(backend, max_num_seqs=1)
    order = []
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    llm.generate(
        [[3 + n] for n in range(6)],
        params,
        on_output=lambda out: order.append(out.prompt_token_ids[0] - 3) if out.finished else None,
        priority=[0] * 6,
    )
    assert order == list(range(6))
    with pytest.raises(RequestError, match="policy='priority'"):
        llm.generate([[3], [4]], params, priority=[0, 1])


# -- batch invariance, bit by bit ----------------------------------------------------------------------------------------


def many(seed=3):
    """64 requests: prompts of 1 to 150 tokens, greedy and sampled, some with a beginning in common."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(3, 320, 70).tolist()
    prompts, params = [], []
    for n in range(64):
        own = rng.integers(3, 320, int(rng.integers(1, 80))).tolist()
        prompts.append(shared[: 70 - n % 7] + own if n % 4 == 0 else own)
        sampling = {"temperature": 0.0} if n % 2 else {"temperature": 1.0, "seed": n}
        params.append(SamplingParams(**sampling, max_tokens=int(rng.integers(8, 40)), ignore_eos=True, logprobs=4))
    return prompts, params


def bits(outputs):
    """Tokens and logprobs; a float equals another here only if it is the same number."""
    return [(out.outputs[0].token_ids, out.outputs[0].logprobs) for out in outputs]


@pytest.fixture(scope="module", params=["f16", "int16", "int8"])
def invariance(request, llama, unavailable):
    """(run(**settings) -> the 64 answers together, the 64 answers one by one) on the CPU backend."""
    if unavailable["cpu"]:
        pytest.skip(unavailable["cpu"])
    defaults = {"backend": "cpu", "threads": 2, "kv_cache_dtype": request.param, "kv_cache_tokens": 16384}

    def run(times=1, **settings):
        with LLM(llama, **(defaults | settings)) as llm:
            for _ in range(times):
                outputs = llm.generate(*many())
            return bits(outputs), outputs, llm.engine._core.scheduler.stats(), llm.loaded.memory.groups[0].bytes_a_token

    with LLM(llama, **defaults) as llm:
        alone = []
        for prompt, params in zip(*many(), strict=True):
            llm.engine._core.scheduler.allocator.forget()
            alone += llm.generate([prompt], params)
    return run, bits(alone)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 64},
        {"max_num_batched_tokens": 67, "max_num_seqs": 9},
        {"block_size": 8},
        {"block_size": 32},
        {"threads": 1},
    ],
    ids=str,
)
def test_the_batch_changes_no_bit(invariance, settings):
    run, alone = invariance
    assert run(**settings)[0] == alone


def test_preemption_changes_no_bit(invariance):
    run, alone = invariance
    memory = 224 * run()[3]
    got, _, stats, _ = run(block_size=4, max_model_len=208, kv_cache_memory=memory)
    assert stats.preemptions >= 10
    assert got == alone


def test_prefix_hits_change_no_bit(invariance):
    run, alone = invariance
    got, outputs, _, _ = run(times=2)
    assert all(out.num_cached_tokens >= 16 for out in outputs if len(out.prompt_token_ids) > 16)
    assert got == alone
