"""The same tokens everywhere: each backend that is installed and can run here, whoever wrote it, beside the reference.

Log-probabilities are within the tolerance of what a device stores activations in. Where greedy tokens differ, the reference's
best two must lie within twice that; these near ties are listed at the end with their margins, and written to the file that
ENGINE_SAME_TOKENS names.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import checkpoints
import numpy as np
import pytest
import test_deepseek
import test_more_families
import tiny_models

from engine.backend.registry import discover, open_device
from engine.formats import open_checkpoint
from engine.models import load_model
from engine.models.registry import FAMILIES
from engine.testing.models import answers, compare_answers, tolerance_of

BACKENDS = [backend.name for backend in discover() if backend.automatic and backend.name != "reference"]
PROMPTS = [np.random.default_rng(6).integers(3, tiny_models.VOCAB, n).tolist() for n in (1, 7, 17, 50)]
STORIES = [[1, 403, 407, 261, 378], [1], [1, 403, 407], list(range(300, 340))]


def _one_a_class() -> dict[str, tuple[Callable[[str], Any], str]]:
    """The first checkpoint of each of transformers' classes among those that the tests of families have."""
    found: dict[str, tuple[Callable[[str], Any], str]] = {}
    for module, models in (
        (checkpoints, checkpoints.FAMILIES),
        (test_more_families, test_more_families.FAMILIES),
        (test_deepseek, test_deepseek.MODELS),
    ):
        for name, (cls, *_) in models.items():
            found.setdefault(cls, (module.model_of, name))
    return found


MODELS = _one_a_class()


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Callable[[str], Path]:
    def save(cls: str) -> Path:
        model_of, name = MODELS[cls]
        return checkpoints.save_model(model_of(name), tmp_path_factory.mktemp(cls))

    return cache(save)


@pytest.fixture(scope="module")
def wanted() -> Callable[..., Any]:
    """What the reference says, once a model."""
    return cache(lambda path, new, context: answers(path, "reference", _prompts(path), new, max_model_len=context))


def _prompts(path: Path) -> list[list[int]]:
    return STORIES if "stories" in path.name else PROMPTS


@pytest.fixture(scope="module")
def report(pytestconfig):
    """backend -> model -> the largest difference and the near ties; shown, and written, when all is done."""
    found: dict[str, dict[str, Any]] = {}
    yield found
    path = os.environ.get("ENGINE_SAME_TOKENS")
    if path:
        Path(path).write_text(json.dumps(found, indent=1))
    with pytestconfig.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        for backend, models in found.items():
            worst = max(models, key=lambda model: models[model]["worst"])
            print(f"\n{backend}: {len(models)} models, at worst {models[worst]['worst']:.2g} apart ({worst})", end="")
            for model, agreement in models.items():
                for tie in agreement["ties"]:
                    print(
                        f"\n  near tie: {model}, prompt {tie['prompt']}, token {tie['position']}: {tie['margin']:.3g}",
                        end="",
                    )


def agrees(report, backend: str, model: str, path: Path, wanted, new: int = 12, context: int = 96) -> None:
    tolerance = tolerance_of(open_device(backend, {"threads": 2}).describe())
    got = answers(path, backend, _prompts(path), new, max_model_len=context)
    agreement = compare_answers(got, wanted(path, new, context), tolerance)
    report.setdefault(backend, {})[model] = {"tolerance": tolerance, **asdict(agreement)}
    assert len(agreement.ties) < len(_prompts(path)), (
        "every prompt ends in a near tie: these are no answers to compare."
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("model", MODELS)
def test_tiny_models_of_every_family(model, backend, saved, wanted, report):
    agrees(report, backend, model, saved(model), wanted)


@pytest.mark.shared
@pytest.mark.parametrize("backend", BACKENDS)
def test_stories(backend, stories, wanted, report):
    agrees(report, backend, "stories260K", stories / "stories260K-f32.gguf", wanted, new=80, context=128)


def test_no_family_is_left_out(saved):
    encoders = {"bert", "distilbert", "nomic_bert", "modernbert", "eurobert"}  # test_encoder_models.py has them
    found = {load_model(open_checkpoint(saved(cls))).family for cls in MODELS}
    assert found == {family.name for family in FAMILIES} - encoders


def test_what_is_made_for_measurements_alone_is_no_backend_to_compare():
    assert "null" not in BACKENDS and "cpu" in BACKENDS
