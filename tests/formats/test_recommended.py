"""What the makers of a model recommend for sampling, of a folder, of the GGUF made from it, and of files that say nonsense."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tiny_models
from hypothesis import given
from hypothesis import strategies as st

from engine.cli.main import run
from engine.formats import open_checkpoint
from engine.formats.recommended import GGUF_KEYS, of_generation_config, of_gguf

KEPT = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.1}


def test_a_folder_and_its_gguf_say_the_same(tmp_path):
    folder, out = tmp_path / "model", tmp_path / "model.gguf"
    folder.mkdir()
    tiny_models.write_llama(folder, np.random.default_rng())
    assert open_checkpoint(folder).sampling == {}
    (folder / "generation_config.json").write_text(json.dumps({**KEPT, "do_sample": True, "eos_token_id": [2]}))
    assert open_checkpoint(folder).sampling == KEPT
    assert run(["quantize", str(folder), str(out), "-t", "F32"]) == 0
    assert open_checkpoint(out).sampling == KEPT  # 0.6, and not 0.6000000238418579
    assert open_checkpoint(out).sampling["top_k"] == 20


@pytest.mark.parametrize("wrong", [None, "1", True, [1], -1, float("nan"), float("inf"), 1e9])
def test_nonsense_is_left_out(wrong):
    assert of_generation_config(dict.fromkeys(KEPT, wrong)) == {}
    assert of_gguf(dict.fromkeys(GGUF_KEYS.values(), wrong)) == {}


@given(st.dictionaries(st.sampled_from(sorted(KEPT)), st.floats() | st.integers() | st.text() | st.none()))
def test_what_is_kept_can_be_sampled_with(values):
    from engine import SamplingParams

    SamplingParams(**of_generation_config(values))
