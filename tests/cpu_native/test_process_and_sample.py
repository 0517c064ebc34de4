"""process_and_sample: what process_logits and then sample give, and what it takes from a head that kept its rows' best."""

import numpy as np
import pytest
from one_kernel import ISAS, run_kernel
from session_logits import load_for_logits
from test_greedy_head import BEST, BROKEN, NONE, answers
from test_step import INTEGERS, LATER, OFF, PARAMETERS, rows_of_a_step, run_sample

import engine_cpu.compile
from engine import SamplingParams
from engine.evaluate.forward import Forward
from engine.testing import models
from engine.testing.checkpoints import write_checkpoint

F32, I32, U32 = np.float32, np.int32, np.uint32
MOST = 5


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng()


def random_processing(rng: np.random.Generator, count: int, vocabulary: int) -> list[np.ndarray]:
    """Inputs of process_logits from the prompts' lengths on: each row with parameters of its own."""
    chosen = [{**OFF, **LATER, **PARAMETERS[rng.choice(list(PARAMETERS))]} for _ in range(count)]
    columns = [[row[name] for row in chosen] for name in (*OFF, *LATER)]
    columns = [
        np.array(column, I32 if name in INTEGERS else F32) for name, column in zip((*OFF, *LATER), columns, strict=True)
    ]
    offsets = np.cumsum([0, *rng.integers(0, 3, count)]).astype(I32)
    bias = [rng.integers(0, vocabulary, offsets[-1], dtype=I32), rng.standard_normal(offsets[-1]).astype(F32)]
    masks = rng.integers(0, 2**32, (2, -(-vocabulary // 32)), dtype=U32) | U32(8)
    mask_rows = rng.integers(-1, 2, count, dtype=I32)
    prompts = rng.integers(0, 70, count, dtype=I32)
    return [prompts, *columns[: len(OFF)], offsets, *bias, mask_rows, masks, *columns[len(OFF) :]]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("count", "threads"), [(1, 1), (1, 2), (2, 3), (3, 3), (7, 2)])
@pytest.mark.parametrize("vocabulary", [64, 9001])
def test_as_one_after_the_other(isa, count, threads, vocabulary, rng):
    rows, history = rows_of_a_step(rng, count, vocabulary)
    logits = rng.standard_normal((count, vocabulary), F32) * 3
    if count == 7:
        logits[2, 7], logits[3, 9], logits[4] = np.nan, np.inf, -np.inf
    processing = random_processing(rng, count, vocabulary)
    temperature, candidates = processing[1], processing[-1]
    drawing = [
        rng.integers(0, 2**32, (count, 2), dtype=U32), rng.integers(0, 2**32, count, dtype=U32),
        rng.integers(-1, MOST + 1, count, dtype=I32), candidates,
        np.where(rng.random(count) < 0.2, rng.integers(0, vocabulary, count), -1).astype(I32),
    ]  # fmt: skip
    dims = {"T": len(rows["positions"]), "S": count, "R": count, "B": len(processing[9]), "M": 2, "K": MOST}
    numbers = {"width": vocabulary, "max_len": history.shape[1]}
    options = {"isa": isa, "threads": threads}
    [processed] = run_kernel(
        "process_logits", dims, [logits, *rows.values(), *processing], [(logits.shape, F32)],
        states=[history], numbers=numbers, **options,
    )  # fmt: skip
    kept = history.copy()
    want = run_sample(processed, logits, rows, kept, temperature, *drawing, **options)
    inputs = [logits, *rows.values(), *processing, logits, *rows.values(), temperature, *drawing, None, None]
    outputs = [((count,), I32)] * 2 + [((count,), F32), ((count, MOST), I32), ((count, MOST), F32)]
    got = run_kernel("process_and_sample", dims, inputs, outputs, states=[history], numbers=numbers, **options)
    for a, b in zip([*got, history], [*want, kept], strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("greedy", [0, 1])
def test_what_threads_have_found_is_taken(isa, greedy, rng):
    """Of three threads' best the greatest, of equals the first; logits, which are not there, are not read."""
    count, vocabulary = 5, 300
    rows, history = rows_of_a_step(rng, count, vocabulary)
    found = np.array(
        [
            [(1.5, 70), (-2, 10), NONE, NONE, (0, 9)],
            [(1.5, 69), NONE, NONE, BROKEN, (-0.0, 4)],
            [(1.0, 2), (-1, 250), NONE, (3e38, 8), (-1, 1)],
        ],
        BEST,
    )
    logits = np.full((count, vocabulary), np.nan, F32) if greedy else rng.standard_normal((count, vocabulary), F32)
    off = [np.full(count, OFF[name], I32 if name in INTEGERS else F32) for name in OFF]
    off[0][:] = 0
    processing = [np.zeros(count, I32), *off, np.zeros(count + 1, I32), np.zeros(0, I32), np.zeros(0, F32)]
    processing += [np.full(count, -1, I32), np.zeros(0, U32), None, None, None]
    drawing = [np.zeros((count, 2), U32), np.zeros(count, U32), np.full(count, -1, I32), None, None]
    inputs = [logits, *rows.values(), *processing, logits, *rows.values(), off[0], *drawing]
    before = history.copy()
    tokens, status, logprob, top_ids, top = run_kernel(
        "process_and_sample",
        {"T": len(rows["positions"]), "S": count, "R": count, "K": MOST},
        [*inputs, found.view(I32), np.full(1, greedy, I32)],
        [((count,), I32)] * 2 + [((count,), F32), ((count, MOST), I32), ((count, MOST), F32)],
        states=[history], numbers={"width": vocabulary, "max_len": history.shape[1]}, isa=isa, threads=3,
    )  # fmt: skip
    assert tokens.tolist() == ([69, 250, 0, 0, 4] if greedy else logits.argmax(1).tolist())
    assert status.tolist() == ([0, 0, 2, 1, 0] if greedy else [0] * 5)
    assert not logprob.any() and (top_ids == -1).all() and not top.any()
    for row, place in enumerate(rows["rows"]):
        before[rows["seq_slots"][rows["token_seq"][place]], rows["positions"][place] + 1] = tokens[row]
    np.testing.assert_array_equal(history, before)


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_a_model_draws_in_one_kernel_what_two_would_draw(kind, rng, tmp_path, monkeypatch):
    folder = write_checkpoint(kind, tmp_path / kind, rng)
    prompts = models.random_prompts(rng, (1, 5, 9, 2))
    params = [
        SamplingParams(max_tokens=12, ignore_eos=True, seed=n, **wanted)
        for n, wanted in enumerate(
            (
                {},
                {"top_k": 5, "top_p": 0.7},
                {"temperature": 0, "logprobs": 3},
                {"repetition_penalty": 1.3, "min_p": 0.1},
            )
        )
    ]
    found = []

    def find(*given):
        found.append(engine_cpu.drawing.find_drawing(*given))
        return found[-1]

    monkeypatch.setattr(engine_cpu.compile, "find_drawing", find)
    together = answers(folder, prompts, params)
    assert any(found)
    monkeypatch.setattr(engine_cpu.compile, "find_drawing", lambda *given: None)
    assert answers(folder, prompts, params) == together


def test_processed_logits_that_are_asked_for_are_there(rng, tmp_path):
    folder = write_checkpoint("llama", tmp_path / "llama", rng)
    loaded = load_for_logits(folder, "cpu", max_model_len=96, keep=("logits", "processed"))
    [ids] = models.random_prompts(rng, (9,))
    with Forward(loaded) as forward:
        found = forward.run(ids, 0, np.arange(9, dtype=I32))
    assert np.isfinite(found["logits"]).all()
    np.testing.assert_array_equal(found["processed"], found["logits"])  # greedy, and nothing else
