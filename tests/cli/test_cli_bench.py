"""engine bench: its JSON, what it counts, and that its rates are those of LLM.generate."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import tiny_models

from engine import LLM, CompletionOutput, RequestOutput, SamplingParams
from engine.cli.measure import Bench, Case
from engine.errors import RequestError
from engine.runtime.outputs import RequestMetrics

REFERENCE = ("--backend", "reference")


def test_json_has_the_promised_shape(engine, llama):
    sizes = ("--prompt", 20, "--decode", 6, "--batch", "1,3", "--depth", "0,40,4096")
    done = engine("bench", llama, *sizes, "--json", *REFERENCE)
    assert done.status == 0, done.err
    report = done.json
    assert report["machine"]["cores"] >= 1 and report["backend"] == "reference" and report["model"] == llama.name
    cases = report["cases"]
    assert [(c["batch"], c["depth"]) for c in cases] == [(1, 0), (3, 0), (1, 40), (3, 40), (1, 4096), (3, 4096)]
    for case in cases[:4]:
        assert (case["prompt"], case["decode"]) == (20, 6)
        seconds = sum(
            case[n] / case[f"{side}_tok_s"]["median"] for n, side in (("prompt", "prefill"), ("decode", "decode"))
        )
        assert case["requests_s"] == pytest.approx(1 / seconds)
        for side in ("prefill_tok_s", "decode_tok_s"):
            assert 0 < case[side]["min"] <= case[side]["median"] <= case[side]["max"]
    for case in cases[4:]:
        assert case["prefill_tok_s"] is None and case["decode_tok_s"] is None and "256" in case["skipped"]
    assert done.err.count("left out") == 2


@pytest.mark.parametrize(("sizes", "measured"), [((0, 5), "decode_tok_s"), ((5, 0), "prefill_tok_s")])
def test_a_side_of_no_tokens_is_not_measured(engine, llama, sizes, measured):
    prompt, decode = sizes
    arguments = ("--prompt", prompt, "--decode", decode, "--batch", "2", "--depth", "0,16", "--json", *REFERENCE)
    for case in engine("bench", llama, *arguments).json["cases"]:
        assert {side for side in ("prefill_tok_s", "decode_tok_s") if case[side]} == {measured}


def test_cases_one_by_one(engine, llama):
    asked = ("--case", "1,0,20,0", "--case", "3,32,0,6", "--repetitions", 1, "--json", *REFERENCE)
    first, second = engine("bench", llama, *asked).json["cases"]
    assert [first[name] for name in ("batch", "depth", "prompt", "decode")] == [1, 0, 20, 0]
    assert [second[name] for name in ("batch", "depth", "prompt", "decode")] == [3, 32, 0, 6]
    assert first["prefill_tok_s"]["median"] > 0 and first["decode_tok_s"] is None
    assert second["decode_tok_s"]["median"] > 0 and second["prefill_tok_s"] is None


def test_a_table_without_json(engine, llama):
    done = engine("bench", llama, "--prompt", 5, "--decode", 3, "--batch", 2, "--depth", 0, *REFERENCE)
    assert done.status == 0 and "prefill tok/s" in done.out and llama.name in done.out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--batch", "1,x"], '"1,x"'),
        (["--batch", "0"], "--batch"),
        (["--prompt", "0", "--decode", "0"], "--prompt"),
        (["--depth", "9999"], "left out"),
        (["--case", "1,0,512"], '"1,0,512"'),
        (["--case", "0,0,512,1"], '"0,0,512,1"'),
        (["--case", "1,0,0,0"], '"1,0,0,0"'),
    ],
)
def test_refuses_in_one_line(refusal, llama, arguments, said):
    assert said in refusal("bench", llama, *REFERENCE, *arguments)


@dataclass
class Clockwork:
    """In place of an LLM: finds given counts of cached tokens, and gives given times. ``calls``: prompts and tokens."""

    cached: int
    first: float = 3.0
    last: float = 7.0
    reason: str = "length"
    calls: list[tuple[list[list[int]], SamplingParams]] = field(default_factory=list)

    @property
    def loaded(self):
        memory = SimpleNamespace(groups=[SimpleNamespace(blocks=1001, window=None)])
        config = SimpleNamespace(block_size=16)
        return SimpleNamespace(memory=memory, config=config, max_model_len=1000, program=SimpleNamespace(vocab=320))

    def generate(self, prompts, params):
        self.calls.append((prompts, params))
        completion = CompletionOutput(0, "", (1,), None, None, self.reason, "why")
        return [
            RequestOutput(
                str(n),
                None,
                tuple(ids),
                (completion,),
                True,
                self.cached,
                RequestMetrics(1.0 + n, self.first, self.last),
            )
            for n, ids in enumerate(prompts)
        ]


def test_prefill_counts_computed_tokens_until_the_last_first_token():
    clock = Clockwork(cached=96)
    result = Bench(clock).measure(Case(batch=3, depth=100, prompt=50, decode=0), 3, None)
    assert list(result.prefill) == [3 * (150 - 96) / (3.0 - 1.0)] * 3 and not result.decode
    fill, *runs = [prompts for prompts, _ in clock.calls]
    assert len(runs) == 4  # one to warm up
    assert all(prompt[:100] == depth for prompts in runs for prompt, depth in zip(prompts, fill, strict=True))
    assert len({tuple(prompt[100:]) for prompts in runs for prompt in prompts}) == 12, (
        "a prompt would be found in the cache"
    )


def test_decode_starts_in_the_cache_with_one_token_and_counts_those_after_the_first():
    clock = Clockwork(cached=144)
    result = Bench(clock).measure(Case(batch=2, depth=100, prompt=50, decode=8), 3, None)
    assert list(result.decode) == [2 * 8 / (7.0 - 3.0)] * 3
    prompts, params = clock.calls[-1]
    assert {len(p) for p in prompts} == {145} and params.max_tokens == 9 and params.ignore_eos


def test_a_prefix_that_was_evicted_is_no_result():
    with pytest.raises(RequestError, match="cache"):
        Bench(Clockwork(cached=80)).measure(Case(2, 100, 50, 8), 3, None)
    with pytest.raises(RequestError, match="why"):
        Bench(Clockwork(cached=96, reason="error")).measure(Case(2, 100, 50, 8), 3, None)


def test_what_cannot_fit_is_left_out_with_a_reason():
    bench = Bench(Clockwork(cached=0))
    assert bench.refusal(Case(15, 0, 934, 64)) is None
    assert "1000" in bench.refusal(Case(1, 0, 935, 64))
    assert "needs 16128" in bench.refusal(Case(16, 0, 934, 64))


@pytest.mark.clock
@pytest.mark.timeout(900)  # beside other tests MLX takes its time
def test_rates_agree_with_the_wall_clock_over_generate(tmp_path, backend):
    """On a model whose steps outweigh what is around them: tokenization, queues, threads that wake."""
    wide = tiny_models.CONFIG | {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 3, "head_dim": 16}
    rng = np.random.default_rng()
    tiny_models.write_llama(tmp_path, rng, tiny_models.llama_tensors(rng, wide), **wide)
    case = Case(batch=4, depth=32, prompt=160, decode=48)
    with LLM(tmp_path, backend=backend) as llm:
        walls: list[tuple[int, float]] = []

        class Timed:
            loaded = llm.loaded

            def generate(self, prompts, params):
                start = time.perf_counter()
                outputs = llm.generate(prompts, params)
                walls.append((params.max_tokens, time.perf_counter() - start))
                return outputs

        apart = []
        for _ in range(3):  # what else the machine does is not in all of them
            walls.clear()
            result = Bench(Timed()).measure(case, 3, None)
            prefills = [case.batch * case.prompt / wall for tokens, wall in walls[1:] if tokens == 1][1:]
            decodes = [case.batch * tokens / wall for tokens, wall in walls if tokens > 1][1:]
            both = ((result.prefill, prefills), (result.decode, decodes))
            apart.append(max(abs(statistics.median(told) / statistics.median(clock) - 1) for told, clock in both))
    assert min(apart) < 0.1, apart


def test_a_block_size_that_is_none_is_refused(engine, llama):
    done = engine("bench", llama, "--block-size", 0, *REFERENCE)
    assert done.status == 2 and "power of two" in done.err, done.err
