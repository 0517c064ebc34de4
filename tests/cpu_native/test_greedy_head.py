"""A head that keeps its rows' best logits, where no row wants more: what it finds, and when it does."""

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np
import pytest
from one_kernel import DOT_ISAS, ISAS, native, run_kernel
from weight_cases import Weight, random_weight, read_by

import engine_cpu.compile
from engine import LLM, SamplingParams
from engine.testing import models
from engine.testing.checkpoints import write_checkpoint

F32, I32 = np.float32, np.int32
BEST = np.dtype([("score", F32), ("id", I32)])
NONE, BROKEN = (-np.inf, -1), (np.inf, -2)
OFF = {
    "temperature": (0, F32),
    "bias": (0, I32),
    "mask_rows": (-1, I32),
    "repetition": (1, F32),
    "frequency": (0, F32),
    "presence": (0, F32),
    "want_logprobs": (-1, I32),
    "ngram": (0, I32),
    "candidates": (0, I32),
    "targets": (-1, I32),
}


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng()


def asked(rows: int, **columns: np.ndarray) -> list[np.ndarray]:
    """The inputs that tell what rows want: nothing, but for the columns given."""
    found = {name: columns.get(name, np.full(rows, off, dtype)) for name, (off, dtype) in OFF.items()}
    found["bias"] = np.cumsum([0, *found["bias"]], dtype=I32)
    return list(found.values())


def run_head(x: np.ndarray, weight: Weight, wanted: list, isa: str, threads: int = 1) -> tuple[np.ndarray, ...]:
    """y, the best of rows as each thread has found them, and whether it was looked for."""
    shapes = [((len(x), len(weight.values)), F32), ((threads, len(x), 2), I32), ((1,), I32)]
    y, best, greedy = run_kernel(
        "linear",
        {"R": len(x)},
        [*read_by(weight.name, x), None, *wanted],
        shapes,
        weights=[weight.packed],
        numbers={"rows_dim": 2},
        isa=isa,
        threads=threads,
    )
    return y, best.view(BEST)[..., 0], greedy


def run_plain(x: np.ndarray, weight: Weight, isa: str) -> np.ndarray:
    [y] = run_kernel(
        "linear",
        {"R": len(x)},
        [*read_by(weight.name, x), None],
        [((len(x), len(weight.values)), F32)],
        weights=[weight.packed],
        numbers={"rows_dim": 2},
        isa=isa,
        threads=1,
    )
    return y


def best_of(logits: np.ndarray) -> list[tuple[float, int]]:
    found = []
    for row in logits:
        finite = np.where(np.isfinite(row), row, -np.inf)
        if np.isnan(row).any() or np.isposinf(row).any():
            found.append(BROKEN)
        else:
            found.append((float(finite.max()), int(finite.argmax())) if np.isfinite(row).any() else NONE)
    return found


def together(best: np.ndarray) -> list[tuple[float, int]]:
    return [max((tuple(one) for one in column), key=lambda one: (one[0], -one[1])) for column in best.T.tolist()]


# Sums of bf16 products round in each variant's own way, so that one is not compared with another.
NAMES = ["F32", "F16", "Q4_0", "Q4_K", "Q6_K", "Q8_0"]


@pytest.mark.parametrize(("name", "isa"), [*itertools.product(NAMES, DOT_ISAS), ("BF16", ISAS[0])])
def test_the_best_of_each_row(rng, name, isa):
    """Of any number of rows, up to several blocks; in one all are equal, and one is not finite."""
    weight = random_weight(rng, name, 200, 512)
    for rows in (1, 3, 8, 9, 40, 600):
        x = rng.standard_normal((rows, 512), F32)
        x[-1] = 0  # all logits are equal
        if rows > 4:
            x[2, 7] = np.nan
        logits = run_plain(x, weight, isa)
        y, best, greedy = run_head(x, weight, asked(rows), isa)
        assert greedy[0] == 1 and np.isnan(y).all()
        assert together(best) == best_of(logits)


@pytest.mark.parametrize("name", ["Q4_K", "F16"])
@pytest.mark.parametrize("rows", [1, 4, 13, 600])
def test_the_best_of_several_threads(rng, name, rows):
    weight = random_weight(rng, name, 1000, 256)
    x = rng.standard_normal((rows, 256), F32)
    x[-1] = 0
    _, best, greedy = run_head(x, weight, asked(rows), ISAS[0], threads=3)
    assert greedy[0] == 1 and best.shape == (3, rows)
    assert together(best) == best_of(run_plain(x, weight, ISAS[0]))


def test_who_takes_strips_of_others_finds_the_first_of_equals(rng, busy_processor):
    """The second of two threads has its own strips before what the first, slowed down here, has left of its."""
    weight = random_weight(rng, "F32", 64 * 400, 256)
    values = np.zeros((64 * 400, 256), F32)
    values[[64 * 199, 64 * 200]] = 1  # of the first thread's last strip, and of the second's first
    native.pack_into(weight.packed, values.view(np.uint8))
    x = np.ones((250, 256), F32)
    for _ in range(10):
        _, best, _ = run_head(x, weight, asked(len(x)), ISAS[0], threads=2)
        assert together(best) == [(256.0, 64 * 199)] * len(x)


@pytest.fixture
def busy_processor() -> Iterator[None]:
    """This thread shares one processor with another process; the threads of pools, which are there already, do not."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as burner:
            os.sched_setaffinity(burner.pid, {min(allowed)})
            time.sleep(0.3)
            yield
            burner.kill()
    finally:
        os.sched_setaffinity(0, allowed)


@pytest.mark.parametrize("isa", ISAS)
def test_infinite_logits(isa, rng):
    """-inf is no token, and +inf and NaN break the row; what pads the last strip counts for nothing."""
    weight = random_weight(rng, "F32", 70, 3)
    values = np.abs(weight.values) + 1
    values[5, 0] = -values[5, 0]
    values[:, 2] = np.where(np.arange(70) == 69, 1, -1)
    native.pack_into(weight.packed, values.view(np.uint8))
    x = np.zeros((5, 3), F32)
    x[0, 1], x[1, 0], x[2, 1], x[3, 1], x[4, 2] = -np.inf, -np.inf, np.inf, np.nan, 1
    _, best, _ = run_head(x, weight, asked(5), isa)
    got = together(best)
    assert got[0] == NONE and got[1] == got[2] == got[3] == BROKEN and got[4] == (1.0, 69)
    x[4, 2] = -1e-30
    x[4, 1] = -1  # all are below zero
    _, best, _ = run_head(x, weight, asked(5), isa)
    logits = run_plain(x, weight, isa)
    assert logits[4].max() < 0 and together(best)[4] == best_of(logits)[4]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("temperature", 0.5), ("repetition", 1.1), ("frequency", -0.1), ("presence", 0.1)],
        *[("bias", 1), ("mask_rows", 0), ("want_logprobs", 0), ("ngram", 2), ("candidates", 1), ("targets", 0)],
    ],
)
def test_a_row_that_wants_more(rng, name, value, isa):
    weight = random_weight(rng, "Q8_0", 100, 256)
    x = rng.standard_normal((5, 256), F32)
    column = np.full(5, *OFF[name])
    column[rng.integers(5)] = value
    y, best, greedy = run_head(x, weight, asked(5, **{name: column}), isa)
    assert greedy[0] == 0 and (best["id"] == -1).all() and np.isnan(best["score"]).all()
    np.testing.assert_array_equal(y, run_plain(x, weight, isa))


def test_inputs_that_are_absent_want_nothing(rng):
    weight = random_weight(rng, "Q8_0", 100, 256)
    x = rng.standard_normal((2, 256), F32)
    _, best, greedy = run_head(x, weight, [*asked(2)[:7], None, None, None], ISAS[0])
    assert greedy[0] == 1 and together(best) == best_of(run_plain(x, weight, ISAS[0]))


def answers(model, prompts, params):
    with LLM(model, backend="cpu", max_num_seqs=16, max_model_len=96, warm_up=False) as llm:
        return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


@pytest.mark.parametrize(("kind", "found"), [("llama", True), ("qwen3", True), ("gemma2", False)])
def test_answers_are_the_same_as_with_logprobs(kind, found, rng, tmp_path, monkeypatch):
    """Alone, in a batch, and beside a row that wants more. A head with a softcap after it stays as it is."""
    heads = []

    def find(*given):
        drawing = engine_cpu.drawing.find_drawing(*given)
        heads.append(drawing and drawing.head)
        return drawing

    monkeypatch.setattr(engine_cpu.compile, "find_drawing", find)
    folder = write_checkpoint(kind, tmp_path / kind, rng)
    prompts = models.random_prompts(rng, (1, 5, 9, 2, 12, 3, 7, 30, 4, 11))
    greedy, scored = (SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=n) for n in (None, 0))
    want = answers(folder, prompts, scored)
    assert answers(folder, prompts, greedy) == want
    assert [answers(folder, [p], greedy)[0] for p in prompts[:2]] == want[:2]
    mixed = [scored if n == 4 else greedy for n in range(len(prompts))]
    assert answers(folder, prompts, mixed) == want
    assert any(head is not None for head in heads) == found
