"""The builder: what it records, leaves out and refuses."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from engine.errors import ModelError
from engine.kv import CacheGroup
from engine.ops import OPS
from engine.ops.spec import REQUIRED
from engine.program.build import Builder
from engine.program.weights import ConstantWeight

HIDDEN, VOCAB = 8, 40


@pytest.fixture
def builder():
    return Builder((CacheGroup("full", "full", 16, layers=(0,)),), "f16", VOCAB)


def weight(name, *shape):
    return ConstantWeight(name, np.zeros(shape, np.float32))


def embedded(builder):
    return builder.embed(weight("token_embd.weight", VOCAB, HIDDEN))


def last(builder):
    return builder._calls[-1]


def test_attributes_at_their_default_are_left_out(builder):
    x = embedded(builder)
    assert dict(last(builder).attrs) == {}
    builder.rms_norm(x, weight("n.weight", HIDDEN), 1e-5)
    assert dict(last(builder).attrs) == {"eps": 1e-5}
    builder.rms_norm(x, weight("n.weight", 4), 1e-5, head_dim=4)
    assert dict(last(builder).attrs) == {"eps": 1e-5, "head_dim": 4}
    builder.gated_act(x, x, "silu")
    assert dict(last(builder).attrs) == {}
    builder.gated_act(x, None, "gelu")
    assert dict(last(builder).attrs) == {"kind": "gelu"}
    assert set(last(builder).inputs) == {"gate"}
    assert last(builder).attr("kind") == "gelu" and builder._calls[0].attr("block_sizes") == (16,)


def test_unknown_and_missing_attributes_are_refused(builder):
    x = embedded(builder)
    with pytest.raises(ModelError, match=r"rms_norm has no attribute 'epsilon'; it has .*eps"):
        builder.call("rms_norm", {"x": x}, [("y", x.shape, "act")], eps=1e-5, epsilon=1e-5)
    with pytest.raises(ModelError, match="rms_norm needs the attribute 'eps'"):
        builder.call("rms_norm", {"x": x}, [("y", x.shape, "act")])


@pytest.mark.parametrize(
    "wrong",
    [
        lambda b, x: b.embed(weight("w", VOCAB + 1, HIDDEN)),
        lambda b, x: b.linear(x, weight("w", 12, HIDDEN + 1)),
        lambda b, x: b.linear(x, weight("w", HIDDEN)),
        lambda b, x: b.linear(x, weight("w", 12, HIDDEN), weight("b", 11)),
        lambda b, x: b.rms_norm(x, weight("w", HIDDEN + 1), 1e-5),
        lambda b, x: b.rms_norm(x, weight("w", HIDDEN), 1e-5, head_dim=4),
        lambda b, x: b.rope(x, weight("f", 2), 3, 4, False, 1.0),
        lambda b, x: b.gated_act(x, b.linear(x, weight("w", 12, HIDDEN)), "silu"),
        lambda b, x: b.add(x, b.linear(x, weight("w", 12, HIDDEN))),
        lambda b, x: b.kv_write(0, x, x, 3, 4),
        lambda b, x: b.finish(x, weight("w", VOCAB - 1, HIDDEN)),
        lambda b, x: b.finish(x, weight("w", VOCAB, HIDDEN + 1)),
    ],
)
def test_what_does_not_fit_is_refused(builder, wrong):
    x = embedded(builder)
    with pytest.raises(ModelError, match="inconsistent"):
        wrong(builder, x)


def test_attention_of_a_width_other_than_the_caches(builder):
    x = embedded(builder)
    builder.kv_write(0, x, x, 2, 4)
    assert builder.attention(x, 0, 2, scale=0.5).shape == ("T", 8)
    with pytest.raises(ModelError, match="inconsistent"):
        builder.attention(x, 0, 4, scale=0.5)


def test_a_program_fits_the_catalogue(program):
    """Every call names only arguments that its op has, all that are needed, and values made before it."""
    made = {value.id for value in program.inputs}
    for call in program.calls:
        spec = OPS[call.op]
        for given, names in ((call.inputs, spec.inputs), (call.weights, spec.weights), (call.states, spec.states)):
            families = {name.rstrip("*?") for name in names if "*" in name}
            plain = {name.rstrip("?") for name in names if "*" not in name}
            assert all(name in plain or name.partition(".")[0] in families for name in given), call.op
            assert {name for name in names if name[-1] not in "*?"} <= set(given), call.op
        assert {name for name, default in spec.attrs.items() if default is REQUIRED} <= set(call.attrs)
        assert all(call.attrs[name] != spec.attrs[name] for name in call.attrs)
        assert {value.id for value in call.inputs.values()} <= made, call.op
        outputs = {value.id for value in call.outputs}
        assert not outputs & made, "values are written once"
        made |= outputs
    assert program.values > max(made)


def test_the_shape_of_a_llama(program):
    ops = Counter(call.op for call in program.calls)
    assert ops == {
        "step_expand": 1,
        "kv_copy": 1,
        "embed": 1,
        "rms_norm": 5,
        "linear": 15,
        "rope": 4,
        "kv_write": 2,
        "attention": 2,
        "add": 4,
        "gated_act": 2,
        "gather_rows": 2,
        "process_logits": 1,
        "sample": 1,
    }
    assert [call.op for call in program.body[:2]] == ["step_expand", "kv_copy"], "copies come before any write"
    assert program.body[-1].op == "gather_rows"
    assert [call.op for call in program.head] == ["linear", "process_logits", "sample"]
    assert program.head[0].outputs[0].name == "logits"
    assert [(kv.layer, kv.kv_heads, kv.head_dim) for kv in program.kv_layers] == [(0, 2, 16), (1, 2, 16)]
    assert (program.hidden, program.vocab) == (64, 320)


def test_the_cache_is_written_before_it_is_read(program):
    ops = [(call.op, next(iter(call.states.values()))) for call in program.body if call.op in ("kv_write", "attention")]
    assert ops == [(op, f"kv.{i}.k") for i in range(2) for op in ("kv_write", "attention")]


def test_axes_are_named(program):
    assert program.axes["blk.0.attn_q.weight"] == ("heads", "embed")
    assert program.axes["blk.1.attn_k.weight"] == ("kv_heads", "embed")
    assert program.axes["blk.0.ffn_down.weight"] == ("embed", "mlp")
    assert program.axes["output.weight"] == ("vocab", "embed")
    linears = {w.name for call in program.calls for w in call.weights.values() if call.op == "linear"}
    assert linears <= set(program.axes)


@pytest.mark.parametrize("dtype", ["f16", "int8", "int16"])
def test_states_by_kv_dtype(model, dtype):
    program = model.program(16, dtype)
    kinds = ["k", "v", "k_scale", "v_scale"] if dtype.startswith("int") else ["k", "v"]
    write = next(call for call in program.body if call.op == "kv_write")
    assert dict(write.states) == {kind: f"kv.0.{kind}" for kind in kinds}
    copy = next(call for call in program.body if call.op == "kv_copy")
    assert set(copy.states.values()) == {f"kv.{i}.{kind}" for i in range(2) for kind in kinds}


def test_attention_stays_within_the_window_that_its_group_keeps():
    b = Builder((CacheGroup("full", "full", 16, layers=(0,)), CacheGroup("w", "window", 16, 8, (1,))), "f16", VOCAB)
    x = b.embed(b.constant("e", np.zeros((VOCAB, 8))))
    for layer in (0, 1):
        b.kv_write(layer, x, x, 2, 4)
    b.attention(x, 0, 2, 1.0)
    b.attention(x, 1, 2, 1.0, window=8)
    for features in ({}, {"window": 9}):
        with pytest.raises(ModelError, match="Layer 1 attends beyond the window of 8"):
            b.attention(x, 1, 2, 1.0, **features)
    with pytest.raises(ModelError, match="Layer 2 is in none"):
        b.kv_write(2, x, x, 2, 4)
