"""Generations under a JSON schema are valid, for models of noise over real vocabularies.

A short form runs always; `pytest -m soak` runs 500 and stores its figures under benchmarks/results.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from json_schemas import SCHEMAS, fault
from vocab_models import write_vocab_model

from engine import LLM, SamplingParams, StructuredOutputs

VOCABULARIES = ("llama-bpe", "llama-spm", "phi-3", "qwen2")
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def model(stories: Path, tmp_path: Path) -> Callable[[str], Path]:
    """model(name) -> stories260K, or a random model over the vocabulary of that name."""

    def get(name: str) -> Path:
        if name == "stories260K":
            return stories / "stories260K-f32.gguf"
        vocab = stories.parents[1] / "vocab" / f"{name}.gguf"
        return write_vocab_model(vocab, tmp_path / f"{name}.gguf", np.random.default_rng())

    return get


def generate(path: Path, count: int) -> dict[str, Any]:
    """``count`` texts of each schema, all in one batch, and the figures."""
    wanted = [(name, seed) for name in SCHEMAS for seed in range(count)]
    params = [
        SamplingParams(max_tokens=400, seed=seed, structured_outputs=StructuredOutputs(json=SCHEMAS[name]))
        for name, seed in wanted
    ]
    with LLM(path, threads=2, max_num_seqs=64) as llm:
        start = time.perf_counter()
        outputs = [out.outputs[0] for out in llm.generate(["Once upon a time"] * len(params), params)]
        seconds = time.perf_counter() - start
    faults = [fault(out.text, SCHEMAS[name]) for (name, _), out in zip(wanted, outputs, strict=True)]
    assert [f for f in faults if f] == []
    assert {out.finish_reason for out in outputs} == {"stop"}
    assert len({out.text for out in outputs}) > len(outputs) * 2 // 3, "the schemas leave a choice"
    tokens = sum(len(out.token_ids) for out in outputs)
    return {"texts": len(outputs), "valid": faults.count(None), "tokens": tokens, "seconds": round(seconds, 2)}


@pytest.mark.shared
@pytest.mark.parametrize("name", ["stories260K", "llama-spm", "qwen2"])
def test_texts_are_valid(cpu: str, model: Callable[[str], Path], name: str) -> None:
    assert generate(model(name), 4)["valid"] == 20


@pytest.mark.soak
def test_500_texts_are_valid(cpu: str, model: Callable[[str], Path]) -> None:
    figures = {name: generate(model(name), 20) for name in ("stories260K", *VOCABULARIES)}
    total = {key: round(sum(f[key] for f in figures.values()), 2) for key in ("texts", "valid", "tokens", "seconds")}
    assert total["valid"] == 500
    spec = importlib.util.spec_from_file_location("result", BENCHMARKS / "result.py")
    assert spec and spec.loader
    result = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(result)
    result.write("structured-outputs", {"schemas": list(SCHEMAS), **total, "models": figures})
