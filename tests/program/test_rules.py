"""The rules that share a program out among devices: what they say, and what they refuse."""

from __future__ import annotations

import pytest

from engine.backend.v1 import Call
from engine.errors import ConfigError
from engine.program.rules import parse_rules
from engine.runtime.config import EngineConfig


def call(op="linear", scope="", *parts):
    return Call(op, {}, (), parts=parts, scope=scope)


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("layers 0-1: a; rest: b", {"layers.0": "a", "layers.1.experts": "a", "layers.2": "b", "embed": "b", "": "b"}),
        ("layer 12: a; rest: b", {"layers.1": "b", "layers.12": "a", "layers.2": "b"}),
        (
            "experts: a; layers 1-1: c:3",
            {"layers.1": "c:3", "layers.1.experts": "a", "layers.0": "other", "head": "other"},
        ),
        (" embed ,head:a ;; rest:b; ", {"embed": "a", "head": "a", "layers.0": "b", "": "b"}),
        ("layers  3 - 4".replace(" - ", "-") + ": a", {"layers.3": "a", "layers.4": "a", "layers.30": "other"}),
    ],
)
def test_the_first_rule_that_fits_places_a_call(text, where):
    rules = parse_rules(text, "other")
    assert {scope: rules.place(call(scope=scope)) for scope in where} == where


def test_ops_by_name_and_fused_calls_by_their_parts():
    rules = parse_rules("attention, rope: a; linear: b; rest: c")
    assert [rules.place(call(op)) for op in ("attention", "rope", "linear", "add")] == ["a", "a", "b", "c"]
    assert rules.place(call("rope_kv_write", "", call("rms_norm"), call("rope"), call("kv_write"))) == "c"
    assert rules.place(call("linear_group", "", call("linear"), call("linear"))) == "b"
    nested = call("linear_group", "", call("linear", "", call("rope")))
    assert rules.place(nested) == "a"


def test_the_devices_that_are_named():
    assert parse_rules("head: a; layers 0-3: b; embed: a", "auto").devices == ("a", "b", "auto")
    assert parse_rules("head: a; rest: b:1", "auto").devices == ("a", "b:1")
    assert parse_rules("head: a", "a").devices == ("a",)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "--place is empty; write"),
        (" ; ", "--place is empty; write"),
        ("layers 0-1 cpu", "'layers 0-1 cpu' names no device; write"),
        ("head:", "'head:' names no device; write"),
        ("head: a b", "names no device"),
        ("head: a:b", "names no device"),
        ("head: 1", "names no device"),
        (": a", "there is nothing called ''"),
        ("head,: a", "there is nothing called ''"),
        ("tail: a", "there is nothing called 'tail'; write"),
        ("layers: a", "there is nothing called 'layers'"),
        ("layers 1-: a", "there is nothing called 'layers 1-'"),
        ("layers -1: a", "there is nothing called 'layers -1'"),
        ("layers 4-2: a", "'layers 4-2' ends before it begins"),
        ("rest: a; head: b", "so it must come last, and once"),
        ("rest: a; rest: b", "so it must come last, and once"),
        ("kv_write: a", "kv_write works on the state of attention and goes where that goes; name that."),
        ("kv_copy: a", "goes where that goes"),
        ("process_logits: a", "works on the state of sample"),
        ("step_expand: a", "works on the state of sample"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(text, sentence):
    with pytest.raises(ConfigError) as error:
        parse_rules(text)
    assert sentence in str(error.value) and str(error.value).endswith(".") and "\n" not in str(error.value)


def test_a_rule_that_places_nothing_is_refused():
    calls = [call("embed", "embed"), call("linear", "layers.0"), call("linear", "head")]
    parse_rules("embed: a; layers 0: b; linear: c; rest: d".replace("layers 0", "layer 0")).check(calls)
    for text, sentence in (
        ("experts: a; rest: b", "nothing in this model is left for 'experts'"),
        ("attention: a", "nothing in this model is left for 'attention'"),
        ("linear: a; head: b", "nothing in this model is left for 'head'"),
        ("layers 0-13: a", "'layers 0-13', but this model has the layers 0 to 0."),
    ):
        with pytest.raises(ConfigError, match=sentence):
            parse_rules(text).check(calls)


def test_the_rest_and_a_backend_contradict_each_other(tmp_path):
    with pytest.raises(ConfigError, match="leave one out"):
        EngineConfig(model=tmp_path, backend="cpu", place="head: reference; rest: cpu")
    assert EngineConfig(model=tmp_path, backend="cpu", place="head: reference").rules.devices == ("reference", "cpu")
