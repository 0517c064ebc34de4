"""Quantized models, whose activations are packed where they are made: the logits of the fused program are those of the
unfused one in every bit."""

from __future__ import annotations

import numpy as np
import pytest
import tiny_models
from session_logits import load_for_logits, logits
from test_more_families import saved  # noqa: F401 - a fixture

from engine.formats import open_checkpoint
from engine.quantize.mix import quant_type
from engine.quantize.to_gguf import quantize_to_gguf

# family -> the ops that pack, and whether a plain form is read beside a packed one
FAMILIES = {
    "mistral": ({"rms_norm", "gated_act"}, False),
    "qwen3_moe": ({"rms_norm", "add_rms_norm", "gated_act"}, True),  # the router's weight is f32
    "gemma2": ({"rms_norm", "add_rms_norm", "gated_act"}, False),
    "gpt2": ({"layer_norm", "gated_act"}, False),
    "cohere": ({"layer_norm", "gated_act"}, False),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_fused_is_unfused_bit_by_bit(family, saved, tmp_path, cpu):  # noqa: F811
    path = tmp_path / "model.gguf"
    quantize_to_gguf(open_checkpoint(saved(family)), path, quant_type("Q8_0"))
    ids = np.random.default_rng().integers(3, tiny_models.VOCAB, 60).tolist()
    fused, unfused = (load_for_logits(path, cpu, fused=fused) for fused in (True, False))
    want = logits(unfused, ids, (60,))
    for chunks in ((60,), (1, 1, 51, 7)):
        assert np.array_equal(logits(fused, ids, chunks).view(np.int32), want.view(np.int32))
    packing = [placed.call for placed in fused.placement.calls if placed.call.attrs.get("packed")]
    read = {value.id for placed in fused.placement.calls for value in placed.call.inputs.values()}
    ops, both = FAMILIES[family]
    assert {call.op for call in packing} == ops
    assert any(call.outputs[-2].id in read for call in packing) == both
    assert not any(placed.call.attrs.get("packed") for placed in unfused.placement.calls)
