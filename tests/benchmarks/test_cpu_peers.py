"""The comparison with peers: what is made of their output, medians and bars, the cost of a step, and a whole small run."""

from __future__ import annotations

import argparse
import json
import sys

import numpy as np
import pytest
import tiny_models
from bars import JOBS, LLAMA, QUICK, VLLM, Bar, Case, Job, Round, Work, judged, select, summary
from cpu_peers import Run
from sides import LlamaCpp, LlamaSetting, SideError, Vllm, batched_bench_rates, best, engine_rates, llama_bench_rates
from step_cost import StepCost
from tables import bars_table

PROMPT, DECODE = Work(1, 0, 16, 0), Work(1, 0, 0, 8)
LIMITS = {"bandwidth": 1e9, "int8": 1e12, "amx_int8": 0.0, "bf16": 0.0, "amx_bf16": 0.0, "f32": 1e10}


def test_a_ratio_is_the_median_of_the_rounds_ratios():
    case = Case("m", PROMPT, (Bar(LLAMA, 2.0), Bar(VLLM, 1.0), Bar("f32", 0.4)))
    # Ratios 1, 3, 2; the ratio of the medians would be 3.
    rates = [(10.0, 10.0), (30.0, 10.0), (80.0, 40.0)]
    found = summary(case, [Round({"engine": a, LLAMA: b}, {"f32": a / 100}) for a, b in rates])
    assert found["engine"] == 30 and found[LLAMA] == {"rate": 10, "ratio": 2} and found["of"] == {"f32": 0.3}
    assert [bar["met"] for bar in found["bars"]] == [True, None, False]
    assert VLLM not in found


def test_a_bar_is_met_from_its_value_on():
    assert judged(Bar("bandwidth", 0.8), {"of": {"bandwidth": 0.8}})["met"] is True
    assert judged(Bar("bandwidth", 0.8), {"of": {"bandwidth": 0.79}})["met"] is False
    assert judged(Bar("bandwidth", 0.8), {"of": {}}) == {
        "against": "bandwidth",
        "least": 0.8,
        "value": None,
        "met": None,
    }


def test_rates_of_llama_bench():
    rows = [{"n_prompt": 16, "n_gen": 0, "avg_ts": 5.5}, {"n_prompt": 0, "n_gen": 8, "avg_ts": 2.5}]
    assert llama_bench_rates(json.dumps(rows), [DECODE, PROMPT]) == {PROMPT: 5.5, DECODE: 2.5}
    with pytest.raises(KeyError):
        llama_bench_rates(json.dumps(rows[:1]), [DECODE])


def test_rates_of_batched_bench():
    rows = [{"pl": n, "speed_pp": 10.0 * n, "speed_tg": 1.5 * n} for n in (1, 4)]
    text = "main: starting\n" + "".join(json.dumps(row) + "\n" for row in rows) + "llama_perf: 1 ms\n"
    works = [Work(4, 64, 0, 32), Work(1, 0, 4096, 0)]
    assert dict(zip(works, (6.0, 10.0), strict=True)) == batched_bench_rates(text, works)


def test_the_best_setting_of_each_work_counts_and_goes_on(tmp_path):
    a, b, c = (LlamaSetting(tmp_path / name, True) for name in "abc")
    rates, leaders = best({a: {PROMPT: 3.0, DECODE: 1.0}, b: {PROMPT: 2.0, DECODE: 0.5}, c: {PROMPT: 1.0, DECODE: 2.0}})
    assert rates == {PROMPT: 3.0, DECODE: 2.0} and leaders == [a, c]


def test_keys_are_one_a_case_and_choose_cases():
    keys = [case.key for job in JOBS for case in job.cases]
    assert len(keys) == len(set(keys)) and set(QUICK) < set(keys)
    kept = select(JOBS, lambda case: case.key in QUICK)
    assert sorted(case.key for job in kept for case in job.cases) == sorted(QUICK) and len(kept) == 2


def test_cost_of_a_step(tmp_path):
    tiny_models.write_llama(tmp_path, np.random.default_rng(3))
    cost = StepCost.of(tiny_models.to_gguf(tmp_path, tmp_path / "m.gguf"))
    layer = 64 * (64 + 32 + 32) + 64 * 64 + 3 * 64 * 96
    assert (cost.body, cost.head) == (2 * layer, 320 * 64)
    assert cost.weights == 4 * (2 * layer + 320 * 64 + 5 * 64)  # F32, norms too; no embedding
    token = 2 * 2 * 2 * 16  # k and v, layers, KV heads, values
    assert cost.read_bytes(Work(3, 10, 0, 4), "f16") - cost.weights == 3 * 12 * token * 2
    assert cost.read_bytes(Work(1, 10, 0, 4), "int8") - cost.weights == 12 * (token + 8 * 4)
    assert cost.operations(PROMPT) == 2 * (2 * layer + 320 * 64 / 16)
    assert cost.fractions(DECODE, "f16", 10.0, LIMITS) == {"bandwidth": 10 * cost.read_bytes(DECODE, "f16") / 1e9}
    assert cost.fractions(PROMPT, "f16", 10.0, LIMITS) == {"int8": 10 * cost.operations(PROMPT) / 1e12}


STUB = """#!{python}
import json, sys
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
assert flags["-t"] == "1" and flags["-ctk"] == flags["-ctv"] == "f16"
fast = 2 if flags["-fa"] == "on" else 1
{rows}
"""
BENCH = """print(json.dumps([{"n_prompt": int(flags["-p"]), "n_gen": 0, "avg_ts": 50.0 * fast},
                  {"n_prompt": 0, "n_gen": int(flags["-n"]), "avg_ts": 20.0 / fast}]))"""
BATCHED = """for n in map(int, flags["-npl"].split(",")):
    assert int(flags["-c"]) >= n * (int(flags["-npp"]) + int(flags["-ntg"]))
    print(json.dumps({"pl": n, "speed_pp": 1.0, "speed_tg": 5.0 * n * fast}))"""


@pytest.fixture
def peer(tmp_path):
    (tmp_path / "bin").mkdir()
    for name, rows in (("llama-bench", BENCH), ("llama-batched-bench", BATCHED)):
        path = tmp_path / "bin" / name
        path.write_text(STUB.replace("{python}", sys.executable).replace("{rows}", rows))
        path.chmod(0o755)
    return LlamaCpp(tmp_path, threads=1, repetitions=1)


VLLM_STUB = """#!{python}
import json, pathlib, sys
config = json.loads((pathlib.Path(sys.argv[2]) / "config.json").read_text())
print("a log line\\nREADY", flush=True)
for line in sys.stdin:
    work = json.loads(line)
    if not work["prompt"]:
        sys.exit("out of luck")
    print("RATES", [config["hidden_size"] * n for n in (1, 2, 9)[: work["repetitions"]]], flush=True)
"""


def test_vllm_answers_until_it_ends(tmp_path):
    tiny_models.write_llama(tmp_path, np.random.default_rng(3), model_type="qwen3")
    shape = tiny_models.to_gguf(tmp_path, tmp_path / "m.gguf", **{"attention.key_length": 16})
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").write_text(VLLM_STUB.replace("{python}", sys.executable))
    (tmp_path / "bin/python").chmod(0o755)
    vllm = Vllm(tmp_path, shape, threads=1, repetitions=3)
    try:
        assert vllm.rates([PROMPT]) == {PROMPT: 128.0}
        with pytest.raises(SideError, match="out of luck"):
            vllm.rates([DECODE])
    finally:
        vllm.close()


class SetLimits:
    """Measured before and after each round, between which memory changes so many times; the last number stays."""

    def __init__(self, *changes: float) -> None:
        self._changes, self._measured = changes, 0

    def measure(self) -> None:
        self._measured += 1

    def change(self) -> float:
        return self._changes[min(self._measured // 2, len(self._changes)) - 1]

    def last(self) -> dict[str, float]:
        return LIMITS | {"bandwidth": LIMITS["bandwidth"] * self.change()}


def test_a_run_measures_both_sides_and_says_what_is_skipped(tmp_path, peer, cpu):
    models = tmp_path / "models"
    models.mkdir()
    tiny_models.write_llama(tmp_path, np.random.default_rng(3))
    tiny_models.to_gguf(tmp_path, models / "m.gguf")
    several = Case("m", Work(2, 8, 0, 4), (Bar(LLAMA, 1e9),))
    args = argparse.Namespace(models=models, threads=1, rounds=2, repetitions=1, quick=False)
    run = Run(args, SetLimits(1.0), peer, None)
    run.job(Job("m, small", (Case("m", PROMPT, (Bar(LLAMA, 0.0),)), Case("m", DECODE), several)))
    run.job(Job("gone, small", (Case("gone", PROMPT),)))
    assert [one["job"] for one in run.skipped] == ["gone, small"] and "gone.gguf" in run.skipped[0]["why"]
    prompt, decode, both = run.cases
    assert (prompt[LLAMA]["rate"], decode[LLAMA]["rate"], both[LLAMA]["rate"]) == (100.0, 20.0, 20.0)
    assert prompt["engine"] > 0 and prompt["bars"][0]["met"] and both["bars"][0]["met"] is False
    assert len(prompt["rounds"]) == 2 and both["of"]["bandwidth"] > 0
    found = {"threads": 1, "rounds": 2, "limits": LIMITS, "cases": run.cases, "skipped": run.skipped}
    table = bars_table(found)
    assert "gone, small | skipped: gone.gguf" in table and "**missed**" in table
    assert len({line.count("|") for line in table.splitlines() if line.startswith("|")}) == 1


@pytest.mark.parametrize(
    ("changes", "quick", "made", "kept"),
    [
        ((1.0,), False, 2, [1.0, 1.0]),
        ((2.0, 1.25, 1.3, 1.0), False, 4, [1.0, 1.25]),
        ((1.5, 4.0, 3.0, 2.0), False, 4, [1.5, 2.0]),
        ((4.0, 2.0, 1.0), True, 2, [2.0, 4.0]),
    ],
)
def test_rounds_in_which_memory_changed_are_made_again(tmp_path, peer, cpu, changes, quick, made, kept):
    tiny_models.write_llama(tmp_path, np.random.default_rng(3))
    tiny_models.to_gguf(tmp_path, tmp_path / "m.gguf")
    args = argparse.Namespace(models=tmp_path, threads=1, rounds=2, repetitions=1, quick=quick)
    run = Run(args, SetLimits(*changes), peer, None)
    run.job(Job("m, small", (Case("m", DECODE),)))
    assert run.cases[0]["rounds made"] == made
    cost = StepCost.of(tmp_path / "m.gguf").read_bytes(DECODE, "f16") / LIMITS["bandwidth"]
    seen = [one["rates"]["engine"] * cost / one["of"]["bandwidth"] for one in run.cases[0]["rounds"]]
    assert seen == pytest.approx(kept)


def test_a_side_that_fails_says_why(tmp_path, peer, cpu):
    with pytest.raises(SideError, match="llama-bench ended"):
        peer.rates(tmp_path / "m.gguf", [PROMPT], LlamaSetting(tmp_path / "bin", True), kv="q8_0")
    with pytest.raises(SideError, match=r"m\.gguf"):
        engine_rates(tmp_path / "m.gguf", [Case("m", PROMPT)], threads=1, repetitions=1)
