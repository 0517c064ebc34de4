"""gated_linear: the bits of linear's two products, then gated_act's packed rows; and where segments have it."""

import itertools
import json
from pathlib import Path

import emulator
import gguf
import numpy as np
import pytest
import tiny_models
from one_kernel import DOT_ISAS, ROUNDS_TWICE, native, run_kernel
from weight_cases import FORMATS, LARGE_BLOCKS, Weight, random_weight, read_by

import engine_cpu.compile
from engine import LLM, SamplingParams
from engine.backend.v1 import BoundCall, Call, Packed, Segment, Value
from engine.formats import FORMATS as ENGINE_FORMATS
from engine.testing import models
from engine_cpu.gating import find_gated

ROWS = (1, 2, 3, 8, 9, 17, 41, 300)
SHAPES = [(32, 256), (96, 512), (64, 1280), (416, 256)]
OF_LONG_SPANS = [(128, 256), (384, 512), (640, 256)]
NUMBERS = {"kind": 0, "alpha": 1.702, "limit": 7}
F32, U8 = np.float32, np.uint8


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng()


def packed(rows: int, width: int) -> tuple[tuple[int, int], type]:
    return (rows, width * 11 // 8), U8


def run_apart(x: np.ndarray, weights: list[Weight], numbers: dict, isa: str) -> np.ndarray:
    columns = len(weights[0].values)
    plain = [((len(x), columns), F32)] * 2
    how = {"isa": isa, "threads": 1}
    inputs = [*read_by(weights[0].name, x), None]
    gate, up = run_kernel("linear", {"T": len(x)}, inputs, plain, weights=[w.packed for w in weights], **how)
    outputs = [None, packed(len(x), columns)]
    [rows] = run_kernel("gated_act", {"T": len(x)}, [gate, up], outputs, numbers=numbers | {"width": columns}, **how)
    return rows


def run_together(x: np.ndarray, weights: list[Weight], numbers: dict, isa: str, threads: int, dim: str) -> np.ndarray:
    [rows] = run_kernel(
        "gated_linear",
        {dim: len(x)},
        read_by(weights[0].name, x),
        [None, packed(len(x), len(weights[0].values))],
        weights=[w.packed for w in weights],
        numbers=numbers | {"rows_dim": "TSR".index(dim)},
        isa=isa,
        threads=threads,
    )
    return rows


# Variants differ in products of bf16, so that their packed rows cannot be compared.
CASES = [(name, isa) for name in FORMATS for isa in DOT_ISAS if name != "BF16" or isa in (DOT_ISAS[0], ROUNDS_TWICE)]


@pytest.mark.parametrize(("name", "isa"), CASES)
def test_it_gives_the_bits_of_both_kernels(rng, name, isa):
    threads = itertools.cycle([1, 2, 3])
    shapes = [(*shape, 32) for shape in SHAPES + [(96, 96), (32, 160)] * (name not in LARGE_BLOCKS)]
    shapes += [(*shape, 128) for shape in OF_LONG_SPANS]
    many = rng.integers(len(shapes)) if isa in emulator.ISAS else None  # the one that has many rows under an emulator
    for number, (columns, depth, span) in enumerate(shapes):
        several = ROWS if many in (None, number) else ROWS[:-1]
        weights = [random_weight(rng, name, columns, depth) for _ in range(2)]
        x = rng.standard_normal((max(several), depth), F32) * rng.lognormal(0, 2, (max(several), 1)).astype(F32)
        numbers = NUMBERS | {"kind": int(rng.integers(5)), "span": span}
        want = run_apart(x, weights, numbers, isa)
        for rows in several:
            first = int(rng.integers(0, len(x) - rows + 1))
            got = run_together(x[first : first + rows], weights, numbers, isa, next(threads), "TR"[rows % 2])
            assert np.array_equal(got, want[first : first + rows]), (columns, depth, rows, numbers)


@pytest.mark.parametrize("kind", range(5))
def test_every_activation(rng, kind):
    weights = [random_weight(rng, "Q4_K", 128, 256) for _ in range(2)]
    x = rng.standard_normal((5, 256), F32) * 8
    numbers = NUMBERS | {"kind": kind}
    got = run_together(x, weights, numbers, DOT_ISAS[0], 2, "T")
    assert np.array_equal(got, run_apart(x, weights, numbers, DOT_ISAS[0]))


def test_numbers_that_are_not_finite(rng):
    weights = [random_weight(rng, "Q8_0", 160, 256) for _ in range(2)]
    x = rng.standard_normal((9, 256), F32)
    x[2, 3], x[5, 40], x[7] = np.nan, np.inf, 0
    for pair, span in ((weights, 32), ([random_weight(rng, "Q8_0", 256, 256) for _ in range(2)], 128)):
        numbers = NUMBERS | {"span": span}
        with np.errstate(invalid="ignore"):
            got = run_together(x, pair, numbers, DOT_ISAS[0], 2, "T")
            want = run_apart(x, pair, numbers, DOT_ISAS[0])
        assert np.array_equal(got, want)


def test_it_refuses_what_it_cannot_take(rng):
    a, b, c = (random_weight(rng, *kind) for kind in (("Q8_0", 64, 64), ("Q8_0", 96, 64), ("Q4_0", 64, 64)))
    narrow = [random_weight(rng, "Q8_0", 48, 64) for _ in range(2)]
    x = rng.standard_normal((2, 64), F32)
    for pair, words in (((a, b), "shape"), ((a, c), "family"), (narrow, "multiple of 32")):
        with pytest.raises(ValueError, match=words):
            run_together(x, list(pair), NUMBERS, DOT_ISAS[0], 1, "T")


# -- which segments have it ----------------------------------------------------------------------------------------------


def segment_of(
    columns: tuple[int, int] = (96, 96), bias: bool = False, outputs: tuple[int, ...] = (4,), more=()
) -> Segment:
    """x 0, gate 1, up 2, the activation 3 plain and 4 packed."""
    x, gate, up = (
        Value(0, "x", ("T", 64), "q8g32"),
        Value(1, "gate", ("T", 96), "f32"),
        Value(2, "up", ("T", 96), "f32"),
    )
    plain, packed = Value(3, "act", ("T", 96), "f32"), Value(4, "packed", ("T", 96), "q8g32")
    weights = {f"weight.{i}": Packed(native.alloc("Q8_0", n, 64), 0, np.empty) for i, n in enumerate(columns)}
    weights |= {"bias.0": Packed(native.plain(np.zeros(96, F32)), 0, np.empty)} if bias else {}
    calls = [
        Call("linear_group", {"x": x}, (gate, up)),
        Call("gated_act", {"gate": gate, "up": up}, (plain, packed), attrs={"kind": "silu", "packed": True}),
        *(Call("add", {"a": value, "b": value}, ()) for value in (x, gate, up, plain, packed) if value.id in more),
    ]
    bound = tuple(BoundCall(call, None, weights if call.op == "linear_group" else {}) for call in calls)
    values = (x, gate, up, plain, packed)
    return Segment("s", "host", bound, (x,), tuple(values[i] for i in outputs))


def test_only_products_that_nothing_else_reads():
    assert find_gated(segment_of()).keys() == find_gated(segment_of(more=(0, 4))).keys() == {4}
    for other in (
        *(segment_of(more=(i,)) for i in (1, 2, 3)),
        *(segment_of(outputs=(i, 4)) for i in (1, 2, 3)),
        *(segment_of(columns=(n, n)) for n in (48, 80)),
        segment_of(columns=(96, 64)),
        segment_of(bias=True),
    ):
        assert not find_gated(other)


def write(path: Path, rng: np.random.Generator, gate: str, up: str, mlp: int) -> Path:
    """A llama with a layer whose matrices are in Q8_0, but for the gate's and the up's."""
    config = tiny_models.CONFIG | {"num_hidden_layers": 1, "intermediate_size": mlp}
    writer = gguf.GGUFWriter(path, "llama")
    tiny_models._add_keys(writer, config)
    tiny_models._add_vocab(writer, json.loads(tiny_models._tokenizer_text()))
    kinds = {"attn_q": (64, 64), "attn_k": (32, 64), "attn_v": (32, 64), "attn_output": (64, 64), "ffn_down": (64, mlp)}
    tensors = {f"blk.0.{name}": ("Q8_0", shape) for name, shape in kinds.items()}
    tensors |= {"blk.0.ffn_gate": (gate, (mlp, 64)), "blk.0.ffn_up": (up, (mlp, 64))}
    tensors |= {name: ("Q8_0", (tiny_models.VOCAB, 64)) for name in ("token_embd", "output")}
    for name, (form, shape) in tensors.items():
        rows = ENGINE_FORMATS[form].encode(rng.standard_normal(shape, F32) / 8)
        writer.add_tensor(f"{name}.weight", rows, raw_dtype=gguf.GGMLQuantizationType[form])
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", 1 + rng.standard_normal(64, F32) / 5)
    tiny_models.finish(writer)
    return path


def answers(model: Path, prompts: list[list[int]]) -> list[tuple[list[int], list]]:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)
    with LLM(model, backend="cpu", max_num_seqs=16, max_model_len=96, warm_up=False) as llm:
        outputs = [output.outputs[0] for output in llm.generate(prompts, params)]
    return [(output.token_ids, output.logprobs) for output in outputs]


@pytest.mark.parametrize(
    ("gate", "up", "mlp", "fused"), [("Q8_0", "Q8_0", 96, 1), ("Q4_0", "Q4_0", 160, 1), ("Q4_0", "Q8_0", 96, 0)]
)
def test_answers_are_the_same_without_it(rng, tmp_path, monkeypatch, gate, up, mlp, fused):
    found: list[int] = []

    def find(segment):
        gated = find_gated(segment)
        found.append(len(gated))
        return gated

    model = write(tmp_path / "model.gguf", rng, gate, up, mlp)
    prompts = models.random_prompts(rng, (1, 5, 30, 2, 12, 3, 7, 9, 4, 11))
    monkeypatch.setattr(engine_cpu.compile, "find_gated", find)
    got = answers(model, prompts)
    assert sum(found) == fused
    monkeypatch.setattr(engine_cpu.compile, "find_gated", lambda segment: {})
    assert got == answers(model, prompts)
