"""Every provider of the CPU, in each of its variants, through the conformance kit."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest

from engine.backend.registry import open_device
from engine.backend.v1 import Call, Dims, providers_of
from engine.ops import OPS, Case
from engine.program.group import OPS as GROUP_OPS
from engine.testing.cases import random_weight
from engine.testing.checks import check_case, check_op
from engine.testing.running import Bench

LEFT_TO_THE_REFERENCE = "8-bit activations are required here, and the CPU's dense kernels do not take them."


def _variants():
    try:
        from engine_cpu import _native
    except ImportError:
        return ["missing"]
    return _native.isa_list()


@pytest.mark.parametrize("isa", _variants())
@pytest.mark.parametrize("op", [op for op in OPS if op not in GROUP_OPS])  # the CPU's ranks exchange on the host
def test_provider_agrees_with_the_reference(op, isa, cpu):
    device = open_device("cpu", {"threads": 2, "isa": isa})
    checked = check_op(device, OPS[op], np.random.default_rng())
    assert checked.ran
    assert all(why == LEFT_TO_THE_REFERENCE or "no KV layout for fp8" in why for why in checked.refused.values())


def test_the_comparison_can_fail(cpu):
    spoiled = replace(OPS["add"], reference=lambda *, a, b: (a + b + 1,))
    with pytest.raises(AssertionError):
        check_op(open_device("cpu", {"threads": 1}), spoiled, np.random.default_rng())


def test_an_int8_cache_of_odd_heads_is_left_to_the_reference(cpu):
    attrs = {"head_dim": 9, "heads": 1, "kv_heads": 1, "block_size": 16, "scale": 1.0}
    providers = open_device("cpu", {"threads": 1}).providers()
    states = {name: name for name in ("k", "v", "k_scale", "v_scale")}
    for op in ("attention", "kv_write", "rope_kv_write"):
        [provider] = providers[op]
        assert "even head_dim" in provider.supports(Call(op, {}, (), {}, states, attrs))
        assert provider.supports(Call(op, {}, (), {}, {"k": "k", "v": "v"}, attrs)) is None


def test_dims_are_named_as_the_native_side_names_them(cpu):
    from engine_cpu import _native

    assert "".join(f.name for f in fields(Dims)) == _native.DIMS


@pytest.mark.parametrize("formats", [("Q4_K", "Q8_0"), ("Q8_0", "Q6_K"), ("Q4_0", "IQ4_XS", "Q8_0")])
def test_weights_of_one_input_that_ask_for_scales_of_32_and_of_128(formats, cpu):
    """They share the rows that suit both, of groups whose sizes differ."""
    rng, rows, width = np.random.default_rng(), 5, 512
    x = rng.standard_normal((rows, width // 32, 32), np.float32) * rng.lognormal(0, 0.5, (rows, width // 32, 1))
    weights = {f"weight.{n}": random_weight(rng, name, (48, width)) for n, name in enumerate(formats)}
    case = Case("mixed", Dims(T=rows), {"x": x.reshape(rows, width).astype(np.float32)}, weights)
    device = open_device("cpu", {"threads": 2})
    [provider] = providers_of(device)["linear_group"]
    check_case(Bench(device, OPS["linear_group"], case), provider, None, rng)
