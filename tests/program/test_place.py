"""Placement: who runs what and where, and why not on the device."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from fake_device import EVERY_OP, FAKE_LAYOUT, FUSED_KV_OP, KV_OPS, FakeDevice, provider

import engine.runtime.load
from engine import LLM, SamplingParams
from engine.errors import PlacementError
from engine.ops.kv import PLAIN
from engine.program.place import Placer
from engine.runtime.head_inputs import HeadInputs, RowParams
from engine.runtime.step_inputs import StepArrays
from engine.scheduler import ScheduledSequence, ScheduledStep

HISTORY_OPS = ("step_expand", "process_logits", "sample")
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=1)
SAMPLED = SamplingParams(temperature=0.9, seed=4, max_tokens=12, ignore_eos=True, repetition_penalty=1.3, n=2)


def places(placement):
    """op -> places of its calls."""
    found = {}
    for placed in placement.calls:
        found.setdefault(placed.call.op, set()).add(placed.place)
    return found


def fallen(placement):
    return {placed.call.op: placed.why for placed in placement.fallbacks()}


def lacking(*ops):
    return FakeDevice.of(*(op for op in EVERY_OP if op not in ops))


def test_a_device_that_has_everything_keeps_everything(program):
    placement = Placer(FakeDevice.of(*EVERY_OP)).place(program, strict=True)
    assert set().union(*places(placement).values()) == {"device"}
    assert set(placement.state_places.values()) == {"device"}
    assert placement.layer_layouts == {0: FAKE_LAYOUT, 1: FAKE_LAYOUT}
    assert not placement.fallbacks() and not placement.round_trips


def test_what_varies_with_the_batch_is_refused_where_it_must_not(program):
    offered = {op: [provider(op, batch_invariant=op != "attention")] for op in EVERY_OP}
    assert Placer(FakeDevice(offered)).place(program)
    with pytest.raises(
        PlacementError, match=r"--deterministic: with 2 of \d+ ops .*, first attention by fake.attention"
    ):
        Placer(FakeDevice(offered)).place(program, deterministic=True)
    assert Placer(FakeDevice(offered), without=["attention"]).place(program, deterministic=True)
    assert Placer(FakeDevice.of(*EVERY_OP)).place(program, deterministic=True)


def test_buckets_without_variance_make_up_for_what_varies(program):
    device = FakeDevice({op: [provider(op, batch_invariant=False)] for op in EVERY_OP})
    info = replace(device.describe(), buckets=(8, 64), invariant_buckets=(64,))
    device.describe = lambda: info
    assert Placer(device).place(program, deterministic=True)


@pytest.mark.parametrize("op", ["embed", "rms_norm", "rope", "gated_act", "gather_rows"])
def test_an_op_that_is_missing_falls_alone(program, op):
    placement = Placer(lacking(op, "add_rms_norm", FUSED_KV_OP)).place(program)
    assert set(fallen(placement)) == {op}
    assert fallen(placement)[op] == f"fake has no provider of {op}."
    assert set(placement.state_places.values()) == {"device"}
    with pytest.raises(
        PlacementError, match=rf"--strict: \d+ of \d+ ops would run on the reference, first {op}: fake has"
    ):
        Placer(lacking(op, "add_rms_norm", FUSED_KV_OP)).place(program, strict=True)


@pytest.mark.parametrize("op", KV_OPS)
def test_the_ops_of_a_cache_move_home_together(program, op):
    placement = Placer(lacking(op, FUSED_KV_OP)).place(program)
    assert set(fallen(placement)) == set(KV_OPS)
    assert placement.layer_layouts == {0: PLAIN, 1: PLAIN}
    assert {place for state, place in placement.state_places.items() if state.startswith("kv.")} == {"host"}
    assert placement.state_places["history"] == "device"
    others = set(KV_OPS) - {op}
    assert {fallen(placement)[other] for other in others} == {"not every op on the same state can run on the device."}


def test_a_cache_that_no_layout_holds_is_the_reference_s(model):
    device = FakeDevice.of(*EVERY_OP)
    info = replace(device.describe(), kv_layouts=(replace(FAKE_LAYOUT, dtypes=("f32", "int8")),))
    device.describe = lambda: info
    placement = Placer(device).place(model.program(16, "fp8"))
    assert set(fallen(placement).values()) == {"fake has no KV layout for fp8."}
    assert set(placement.layer_layouts.values()) == {PLAIN}


@pytest.mark.parametrize("op", [op for op in KV_OPS if op != "kv_write"])
def test_a_fused_cache_write_moves_home_with_the_others(program, op):
    placement = Placer(lacking(op)).place(program)
    assert set(fallen(placement)) == {*KV_OPS, FUSED_KV_OP} - {"kv_write"}


@pytest.mark.parametrize("op", HISTORY_OPS)
def test_the_ops_of_the_history_move_home_together(program, op):
    placement = Placer(lacking(op)).place(program)
    assert set(fallen(placement)) == set(HISTORY_OPS)
    assert placement.state_places["history"] == "host"
    assert {place for state, place in placement.state_places.items() if state != "history"} == {"device"}


def test_one_layer_alone_moves(program):
    """An attention that refuses the second layer leaves the first where it is, and splits the copies."""
    device = FakeDevice.of(*EVERY_OP)
    refuses = lambda call: "not this layer." if "kv.1.k" in call.states.values() else None  # noqa: E731
    device.offered["attention"] = [provider("attention", refuses=refuses)]
    placement = Placer(device).place(program)
    assert {s: p for s, p in placement.state_places.items() if s.endswith(".k")} == {
        "kv.0.k": "device",
        "kv.1.k": "host",
    }
    assert placement.layer_layouts == {0: FAKE_LAYOUT, 1: PLAIN}
    copies = {p.place: set(p.call.states.values()) for p in placement.calls if p.call.op == "kv_copy"}
    assert copies == {"device": {"kv.0.k", "kv.0.v"}, "host": {"kv.1.k", "kv.1.v"}}
    reasons = {p.why for p in placement.fallbacks() if p.call.op == "attention"}
    assert reasons == {"not this layer."}


def test_a_layout_that_one_op_does_not_know_is_passed_over(program):
    other = type(FAKE_LAYOUT)("other", FAKE_LAYOUT.dtypes, FAKE_LAYOUT.shapes)
    device = FakeDevice.of(*EVERY_OP)
    device.layouts = (other, FAKE_LAYOUT)
    device.offered["kv_write"] = [provider("kv_write", layouts=frozenset({"other", "fake"}))]
    placement = Placer(device).place(program)
    assert placement.layer_layouts == {0: FAKE_LAYOUT, 1: FAKE_LAYOUT}
    assert not placement.fallbacks()


def test_a_layout_that_cannot_hold_the_dtype_is_passed_over(program):
    """The program's cache is f16: the next layout that holds it, or the host."""
    narrow = type(FAKE_LAYOUT)("narrow", ("int8",), FAKE_LAYOUT.shapes)
    device = FakeDevice.of(*EVERY_OP)
    for op in ("kv_write", "kv_copy", "attention"):
        device.offered[op] = [provider(op, layouts=frozenset({"narrow", "fake"}))]
    device.layouts = (narrow, FAKE_LAYOUT)
    assert set(Placer(device).place(program).layer_layouts.values()) == {FAKE_LAYOUT}
    device.layouts = (narrow,)
    placement = Placer(device).place(program)
    assert set(placement.layer_layouts.values()) == {PLAIN} and placement.state_places["kv.0.k"] == "host"


def test_providers_are_tried_in_order(program):
    device = FakeDevice.of(*EVERY_OP)
    small = lambda call: "only for 64 columns." if call.weights["weight"].shape[1] != 64 else None  # noqa: E731
    device.offered["linear"] = [provider("linear", name="small", refuses=small), provider("linear", name="large")]
    placement = Placer(device).place(program, fused=False)
    chosen = {p.call.weights["weight"].shape[1]: p.provider.name for p in placement.calls if p.call.op == "linear"}
    assert chosen == {64: "small", 96: "large"}


def test_an_unknown_feature_skips_a_provider(program, model):
    """Attributes off their default, and optional arguments that are there, must be known to the provider."""
    device = FakeDevice.of(*EVERY_OP)
    plain = provider("linear", name="plain", features=frozenset())
    device.offered["linear"] = [plain, provider("linear", name="full")]
    placement = Placer(device).place(program)
    by_provider = {p.provider.name: p.call for p in placement.calls if p.call.op == "linear"}
    assert "residual" in by_provider["full"].inputs and "residual" not in by_provider["plain"].inputs
    device.offered["attention"] = [provider("attention", features=frozenset())]
    assert "attention" not in fallen(Placer(device).place(program)), "required attributes are no features"
    device.offered["attention"] = [provider("attention", features=frozenset({"window"}))]
    wide = model.program(16, "int8")
    assert "does not know the feature k_scale of attention" in fallen(Placer(device).place(wide))["attention"]


def test_without_takes_providers_out(program):
    placement = Placer(FakeDevice.of(*EVERY_OP), without=("embed", "gated_act")).place(program)
    assert fallen(placement) == {
        op: f"the providers of {op} were taken out on request." for op in ("embed", "gated_act")
    }
    with pytest.raises(PlacementError, match=r"no op 'ropes'; the ops are: .*rope"):
        Placer(FakeDevice.of(*EVERY_OP), without=("ropes",))


def test_a_device_without_providers_runs_everything_through_itself(program):
    placement = Placer(FakeDevice({})).place(program, strict=True)
    assert placement.round_trips and not placement.fallbacks()
    assert set().union(*places(placement).values()) == {"device"}
    forced = Placer(FakeDevice.of(*EVERY_OP), round_trip=True).place(program)
    assert forced.round_trips and {p.provider.name for p in forced.calls} == {"reference"}


def test_a_packed_activation_is_made_once_for_all_that_want_it(program):
    device = FakeDevice.of(*EVERY_OP)
    device.offered["linear"] = [provider("linear", packed_activation="q8g32")]
    placement = Placer(device).place(program, fused=False)
    calls = [placed.call for placed in placement.calls]
    ops = Counter(call.op for call in calls)
    # A layer has four different inputs of linears (q k v; output; gate up; down), the head one.
    assert ops["linear"] == 15 and ops["quantize"] == 9
    made = {}
    for call in calls:
        if call.op == "quantize":
            assert call.attrs == {"layout": "q8g32"} and call.outputs[0].dtype == "q8g32"
            made[call.outputs[0].id] = call
        if call.op == "linear":
            assert call.inputs["x"].id in made
    ids = [value.id for call in calls for value in call.outputs]
    assert len(ids) == len(set(ids))


def packing_device(*packing, packs=lambda call: None):
    """Linears ask for packed activations; the ops of ``packing`` can pack their results."""
    device = FakeDevice.of(*(op for op in EVERY_OP if op not in ("linear_group", "add_rms_norm")))
    device.offered["linear"] = [provider("linear", packed_activation="q8g32")]
    for op in ("rms_norm", "gated_act", "layer_norm"):
        features = device.offered[op][0].features - (frozenset() if op in packing else {"packed"})
        device.offered[op] = [provider(op, features=features, refuses=packs)]
    return device


def made_by(placement):
    """Packed values: id -> the call that makes it."""
    return {v.id: p.call for p in placement.calls for v in p.call.outputs if v.dtype == "q8g32"}


@pytest.mark.parametrize("packing", [(), ("rms_norm",), ("gated_act",), ("rms_norm", "gated_act")])
def test_who_makes_a_value_packs_it_if_it_can(program, packing):
    """A layer's norms and its activation; what attention gives, and gathered rows, need a quantize of their own."""
    placement = Placer(packing_device(*packing)).place(program)
    makers = Counter(call.op for call in made_by(placement).values())
    wanted = {"rms_norm": 4 * ("rms_norm" in packing), "gated_act": 2 * ("gated_act" in packing)}
    assert makers == Counter({"quantize": 9 - sum(wanted.values())} | {op: n for op, n in wanted.items() if n})
    written = set()
    for placed in placement.calls:
        assert {v.id for v in placed.call.inputs.values() if v.dtype == "q8g32"} <= written
        written |= {v.id for v in placed.call.outputs}
    for call in made_by(placement).values():
        if call.op != "quantize":
            made, packed = call.parts
            assert call.attrs["packed"] == "q8g32" and "packed" not in made.attrs
            assert call.outputs == (*made.outputs, *packed.outputs) and packed.inputs["x"] == made.outputs[-1]
    unfused = Placer(packing_device(*packing)).place(program, fused=False)
    assert {call.op for call in made_by(unfused).values()} == {"quantize"}


def test_what_cannot_be_packed_where_it_is_made_is_quantized(program):
    """Refused by the provider; with a scale of the model's; made on the host; or quantized on the host."""
    by_op = lambda device, **how: {c.op for c in made_by(Placer(device, **how).place(program)).values()}  # noqa: E731
    both = ("rms_norm", "gated_act")
    assert by_op(packing_device(*both)) == {"quantize", *both}
    refuses = lambda call: "no room." if "packed" in call.attrs else None  # noqa: E731
    assert by_op(packing_device(*both, packs=refuses)) == {"quantize"}
    assert by_op(packing_device(*both), without=("rms_norm",)) == {"quantize", "gated_act"}
    assert by_op(packing_device(*both), without=("quantize",)) == {"quantize"}
    scaled = [replace(c, attrs={**c.attrs, "input_scale": 0.5}) if c.op == "linear" else c for c in program.body]
    placement = Placer(packing_device(*both)).place(replace(program, body=tuple(scaled)))
    assert {call.op for call in made_by(placement).values()} == {"quantize"}


def test_roles_become_storage(program):
    device = FakeDevice.of(*EVERY_OP)
    info = device.describe()
    device.describe = lambda: type(info)(
        "fake", "fake", kv_layouts=device.layouts, roles={"act": "bf16", "residual": "f32"}
    )
    dtypes = {v.name: v.dtype for p in Placer(device).place(program).calls for v in p.call.outputs}
    assert dtypes["x"] == "f32" and dtypes["blk.0.attn_q"] == "bf16"
    assert not {"act", "residual"} & set(dtypes.values())


# -- what is placed also runs --------------------------------------------------------------------------------------------


@pytest.fixture
def run(llama, monkeypatch):
    """run(device, **settings) -> answers of the tiny llama on it, and the LLM's Loaded."""

    def run(device, **settings):
        if device is not None:
            monkeypatch.setattr(engine.runtime.load, "open_device", lambda *_: device)
        settings = {
            "kv_cache_dtype": "f32",
            "kv_cache_tokens": 512,
            "max_num_batched_tokens": 16,
            "max_num_seqs": 8,
        } | settings
        with LLM(llama, backend="reference", **settings) as llm:
            prompts = [[1, 9, 8], list(range(30, 55)), [4]]
            outputs = [*llm.generate(prompts, GREEDY), *llm.generate(prompts, SAMPLED)]
            return [out.outputs for out in outputs], llm.loaded

    return run


@pytest.fixture
def expected(run):
    """The answers of the reference backend."""
    return run(None)[0]


@pytest.mark.parametrize("op", [None, *EVERY_OP])
def test_with_any_one_op_on_the_host_the_answers_are_the_same(run, expected, op):
    """The providers are the references, so not a bit may differ."""
    got, loaded = run(lacking(op))
    assert got == expected
    falls = {placed.call.op for placed in loaded.placement.fallbacks()}
    assert bool(falls) == any(op in notice for notice in loaded.notices) == (op in falls)


@pytest.mark.parametrize("dtype", ["f16", "int8"])
@pytest.mark.parametrize(
    "missing", [("attention",), ("linear", "linear_group"), ("sample", "kv_write", "rope", "embed")]
)
def test_mixed_placements_in_other_kv_dtypes(run, dtype, missing):
    answers, _ = run(lacking(*missing), kv_cache_dtype=dtype)
    assert answers == run(FakeDevice.of(*EVERY_OP), kv_cache_dtype=dtype)[0]


def test_a_single_op_on_the_device(run, expected):
    for op in ("linear", "attention", "rms_norm"):
        got, loaded = run(FakeDevice.of(op))
        assert got == expected
        on_device = {placed.call.op for placed in loaded.placement.calls if placed.place == "device"}
        assert on_device == ({op} if op != "attention" else set()), (
            "attention cannot leave the cache that kv_write fills"
        )


def test_one_layers_cache_on_the_host_and_one_on_the_device(run, expected):
    device = FakeDevice.of(*EVERY_OP)
    refuses = lambda call: "not this layer." if "kv.1.k" in call.states.values() else None  # noqa: E731
    device.offered["attention"] = [provider("attention", refuses=refuses)]
    assert run(device)[0] == expected


def test_packed_activations_stay_near(run, expected):
    device = FakeDevice.of(*EVERY_OP)
    device.offered["linear"] = [provider("linear", packed_activation="q8g32")]
    got, loaded = run(device, fused=False)
    assert any(placed.call.op == "quantize" for placed in loaded.placement.calls)
    packing = packing_device("rms_norm", "gated_act")
    fused, loaded = run(packing)
    assert {"rms_norm", "gated_act"} < {call.op for call in made_by(loaded.placement).values()}
    assert fused == run(packing, fused=False)[0]
    first = [answers[0].logprobs[0] for answers in got[:3]]
    want = [answers[0].logprobs[0] for answers in expected[:3]]
    for a, b in zip(first, want, strict=True):
        shared = set(a) & set(b)
        assert shared and all(abs(a[t] - b[t]) < 0.2 for t in shared)
    assert not np.allclose([next(iter(a.values())) for a in first], [next(iter(b.values())) for b in want], atol=1e-7)


def test_values_cross_a_border_once_a_step(run):
    """The head alone on the host: the hidden rows, and what the head reads of the step's values, go out once."""
    device = lacking(*HISTORY_OPS)
    _, loaded = run(device)
    segments = (*loaded.plan.body, *loaded.plan.head)
    part = ScheduledSequence(0, 0, 0, 3, (1, 2, 3), True, ((1,),))
    step = ScheduledStep(0, (part,), 0, 3, ((),), (), ())
    inputs, _ = StepArrays(1, HeadInputs(10)).of(step, lambda _: RowParams(SamplingParams(), 3, 0, 1))
    session = loaded.session()
    device.transfers = [0, 0]
    try:
        session.submit(inputs).wait()
    finally:
        session.close()
    entering = {v.id for segment in segments if segment.place == "device" for v in segment.inputs}
    made = {v.id for segment in segments if segment.place == "device" for v in segment.outputs}
    leaving = {v.id for segment in segments if segment.place == "host" for v in segment.inputs} & made
    assert device.transfers == [len(entering - made), len(leaving)]
