"""Fusing: which sequences become one call, and that a call keeps what it stands for."""

from __future__ import annotations

from collections import Counter

import pytest
from fake_device import EVERY_OP, FakeDevice, provider

from engine.backend.v1 import Call
from engine.program.features import features_of
from engine.program.fuse import fuse
from engine.program.place import Placer


def counts(calls):
    return Counter(call.op for call in calls)


def unfused(calls):
    """Every call replaced by the sequence that it stands for."""
    found = []
    for call in calls:
        found += unfused(call.parts) if call.parts else [call]
    return found


def everything(call: Call) -> bool:
    return True


def nothing(call: Call) -> bool:
    return False


def only(*ops):
    return lambda call: call.op in ops and "residual" not in features_of(call)


def test_nothing_offered_is_nothing_fused(program):
    assert fuse(program.body, nothing) == program.body
    assert fuse(program.head, nothing) == program.head


def test_everything_offered(program):
    """Two layers: q k v and gate up are groups; both adds go into the linears before them."""
    fused = fuse(program.body, everything)
    assert counts(fused)["linear_group"] == 4
    assert sorted(len(call.outputs) for call in fused if call.op == "linear_group") == [2, 2, 3, 3]
    residuals = [call for call in fused if "residual" in call.inputs]
    assert [call.weights["weight"].name for call in residuals] == [
        f"blk.{i}.{name}.weight" for i in range(2) for name in ("attn_output", "ffn_down")
    ]
    assert counts(fused)["add"] == counts(fused)["add_rms_norm"] == 0


def test_linear_groups_alone(program):
    fused = fuse(program.body, only("linear_group"))
    assert counts(fused)["linear_group"] == 4 and counts(fused)["add"] == 4
    group = next(call for call in fused if call.op == "linear_group")
    assert [group.weights[f"weight.{n}"].name for n in range(3)] == [f"blk.0.attn_{n}.weight" for n in "qkv"]


def test_add_norms_alone(program):
    """The last add of a layer is followed by the next layer's norm, or the output's."""
    fused = fuse(program.body, only("add_rms_norm"))
    assert counts(fused)["add_rms_norm"] == 4
    assert counts(fused)["rms_norm"] == 1 and counts(fused)["add"] == 0
    for call in fused:
        if call.op == "add_rms_norm":
            add, norm = call.parts
            assert call.outputs == (add.outputs[0], norm.outputs[0])
            assert call.inputs == {"x": add.inputs["b"], "residual": add.inputs["a"]}


@pytest.mark.parametrize("offers", [everything, only("linear_group"), only("add_rms_norm")])
def test_parts_are_the_program(program, offers):
    """Nothing is lost, nothing is twice, and every value is made before it is used."""
    fused = fuse(program.body, offers)
    key = lambda call: (call.op, [v.id for v in call.outputs], sorted(call.states.values()))  # noqa: E731
    assert sorted(map(key, unfused(fused))) == sorted(map(key, program.body))
    made = {value.id for value in program.inputs}
    for call in fused:
        assert {value.id for value in call.inputs.values()} <= made, call.op
        made |= {value.id for value in call.outputs}


def test_biases_keep_their_places(llama, tmp_path):
    """A group in which only some linears have a bias."""
    import json

    import numpy as np
    from safetensors.numpy import load_file, save_file

    from engine.formats import open_checkpoint
    from engine.models import load_model

    tensors = load_file(llama / "model.safetensors")
    tensors["model.layers.0.self_attn.v_proj.bias"] = np.ones(32, np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(json.loads((llama / "config.json").read_text())))
    program = load_model(open_checkpoint(tmp_path)).program(16, "f16")
    group = next(call for call in fuse(program.body, everything) if call.op == "linear_group")
    assert set(group.weights) == {"weight.0", "weight.1", "weight.2", "bias.2"}
    assert "bias" in features_of(group)


def test_a_value_used_twice_is_not_swallowed(program):
    """A linear whose output something else reads as well keeps its own call."""
    calls = list(program.body)
    add = next(call for call in calls if call.op == "add")
    spy = Call("gated_act", {"gate": add.inputs["b"]}, (add.outputs[0],), {}, {}, {})
    fused = fuse([*calls, spy], everything)
    source = next(call for call in fused if any(v.id == add.inputs["b"].id for v in call.outputs))
    assert source.op == "linear" and "residual" not in source.inputs


@pytest.mark.parametrize("missing", ["linear_group", "add_rms_norm"])
def test_a_fused_op_that_a_device_lacks_is_its_sequence(program, missing):
    """No op leaves the device for it, and nothing is called a fallback."""
    device = FakeDevice.of(*(op for op in EVERY_OP if op != missing))
    placement = Placer(device).place(program)
    assert not placement.fallbacks()
    assert missing not in {placed.call.op for placed in placement.calls}


def test_a_fused_op_is_offered_by_features(program):
    """A group's provider that knows no bias is passed over only where there is one."""
    device = FakeDevice.of(*EVERY_OP)
    device.offered["linear_group"] = [provider("linear_group", features=frozenset())]
    assert "linear_group" in {p.call.op for p in Placer(device).place(program).calls}
    device.offered["linear"] = [provider("linear", features=frozenset({"bias", "quantized_activation"}))]
    placement = Placer(device).place(program)
    assert not any("residual" in placed.call.inputs and placed.call.op == "linear" for placed in placement.calls)
    assert "add_rms_norm" in {placed.call.op for placed in placement.calls}
