"""Fusing: which sequences become one call, and that a call keeps what it stands for."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from fake_device import EVERY_OP, FakeDevice, provider

from engine.backend.v1 import Call, Value
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


def test_the_experts_of_one_route_are_a_group():
    """Gate and up read one x by one choice of experts; down reads another x."""
    x, act, ids = Value(0, "x", ("T", 64), "f32"), Value(3, "act", ("T*2", 48), "f32"), Value(4, "ids", ("T", 2), "i32")
    calls = [
        Call("moe_linear", {"x": a, "ids": ids}, (Value(n, "y", ("T*2", 48), "f32"),), {"weight": weight}, {}, attrs)
        for n, a, weight, attrs in (
            (10, x, "gate", {}),
            (11, x, "up", {}),
            (12, act, "down", {"per_choice": True}),
        )
    ]
    group, down = fuse(calls, everything)
    assert group.op == "moe_linear_group" and group.parts == tuple(calls[:2]) and down is calls[2]
    assert [v.id for v in group.outputs] == [10, 11] and group.weights == {"weight.0": "gate", "weight.1": "up"}
    assert fuse(calls, nothing) == tuple(calls)


def test_linear_groups_alone(program):
    fused = fuse(program.body, only("linear_group"))
    assert counts(fused)["linear_group"] == 4 and counts(fused)["add"] == 4
    group = next(call for call in fused if call.op == "linear_group")
    assert [group.weights[f"weight.{n}"].name for n in range(3)] == [f"blk.0.attn_{n}.weight" for n in "qkv"]


def test_what_is_not_offered_together_is_grouped_apart():
    """A matrix among them that the device takes with none of the others keeps none of them from a group."""
    x = Value(0, "x", ("T", 64), "f32")
    names = ("qkv.small", "z.small", "alpha.f32", "out.small", "beta.f32", "other.f16")
    calls = [
        Call("linear", {"x": x}, (Value(n + 1, "y", ("T", 48), "f32"),), {"weight": name})
        for n, name in enumerate(names)
    ]

    def of_one_kind(call):
        return len({name.split(".")[1] for name in call.weights.values()}) == 1

    fused = fuse(calls, of_one_kind)
    assert [call.op for call in fused] == ["linear_group", "linear_group", "linear"]
    assert [[value.id for value in call.outputs] for call in fused] == [[1, 2, 4], [3, 5], [6]]


def test_a_second_reader_of_a_cache_leaves_its_writer_fused(program):
    """The layer that writes is the first to read; others read with queries of their own."""
    first = next(call for call in program.body if call.op == "attention")
    query, output = (replace(value, id=9_000 + n) for n, value in enumerate((first.inputs["q"], first.outputs[0])))
    again = replace(first, inputs={**first.inputs, "q": query}, outputs=(output,))
    wanted = counts(fuse(program.body, everything))["rope_kv_write"]
    assert counts(fuse((*program.body, again), everything))["rope_kv_write"] == wanted > 0


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


@pytest.mark.parametrize("offers", [everything, only("linear_group"), only("add_rms_norm"), only("rope_kv_write")])
def test_parts_are_the_program(program, offers):
    """Nothing is lost, nothing is twice, and every value is made before it is used."""
    fused = fuse(program.body, offers)
    key = lambda call: (call.op, [v.id for v in call.outputs], sorted(call.states.values()))  # noqa: E731
    assert sorted(map(key, unfused(fused))) == sorted(map(key, program.body))
    made = {value.id for value in program.inputs}
    for call in fused:
        assert {value.id for value in call.inputs.values()} <= made, call.op
        made |= {value.id for value in call.outputs}


def test_rope_writes_alone(program):
    """A layer's ropes and its cache write are one call, at the place of the write."""
    fused = fuse(program.body, only("rope_kv_write"))
    assert counts(fused)["rope_kv_write"] == 2 and not counts(fused)["rope"] and not counts(fused)["kv_write"]
    for call in fused:
        if call.op == "rope_kv_write":
            q, k, write = call.parts
            assert call.outputs == q.outputs and call.states == write.states
            assert (call.inputs["q"], call.inputs["new_k"]) == (q.inputs["x"], k.inputs["x"])
            assert (call.attrs["heads"], call.attrs["kv_heads"]) == (q.attrs["heads"], k.attrs["heads"])


def normed(program, **of_k):
    """The program with RMS norms of the heads of q and k, those of k with other attributes."""
    calls = []
    for call in program.body:
        if call.op == "rope":
            x = call.inputs["x"]
            own = {"eps": 1e-6, "head_dim": call.attrs["head_dim"]}
            if call.attrs["heads"] != 4:
                own |= of_k
            y = replace(x, id=x.id + 10_000)
            calls.append(Call("rms_norm", {"x": x}, (y,), {"weight": object()}, {}, own))
            calls.append(replace(call, inputs={**call.inputs, "x": y}))
        else:
            calls.append(call)
    return calls


def test_norms_of_heads_are_taken_along(program):
    found = [call for call in fuse(normed(program), only("rope_kv_write")) if call.op == "rope_kv_write"]
    assert len(found) == 2
    for call in found:
        assert [part.op for part in call.parts] == ["rms_norm", "rms_norm", "rope", "rope", "kv_write"]
        assert call.weights["q_norm"] is call.parts[0].weights["weight"]
        assert call.weights["k_norm"] is call.parts[1].weights["weight"]
        assert call.attrs["eps"] == 1e-6 and call.inputs["q"] == call.parts[0].inputs["x"]


@pytest.mark.parametrize("of_k", [{"eps": 1e-5}, {"head_dim": 0}, {"weight_offset": 1.0}])
def test_norms_that_differ_stay(program, of_k):
    fused = fuse(normed(program, **of_k), only("rope_kv_write"))
    assert counts(fused)["rms_norm"] == counts(program.body)["rms_norm"] + 4
    assert counts(fused)["rope_kv_write"] == 2


def test_a_rotated_key_that_is_read_elsewhere_stays(program):
    key = next(call for call in program.body if call.op == "kv_write").inputs["new_k"]
    spy = Call("gated_act", {"gate": key}, (replace(key, id=20_000),), {}, {}, {})
    assert counts(fuse([*program.body, spy], everything))["rope_kv_write"] == 1


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


def test_a_sum_normed_twice_is_fused_with_the_first_norm_alone(program):
    norm = next(call for call in fuse(program.body, only("add_rms_norm")) if call.op == "add_rms_norm").parts[1]
    other = Value(10_000, "other", norm.outputs[0].shape, norm.outputs[0].dtype)
    fused = fuse([*program.body, replace(norm, outputs=(other,))], only("add_rms_norm"))
    made = [value.id for call in fused for value in call.outputs]
    assert made.count(norm.outputs[0].id) == made.count(other.id) == 1
    assert fused[-1].op == "rms_norm" and fused[-1].outputs == (other,)


@pytest.mark.parametrize("missing", ["linear_group", "add_rms_norm", "rope_kv_write"])
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
