"""Every provider of a device against its op's reference, on the catalogue's random cases."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from engine.backend.registry import open_device
from engine.backend.v1 import HOST_DTYPES, BoundCall, Call, Dims, Frame, Limits, Value
from engine.ops import OPS, STEP_INPUTS, evaluate
from engine.ops.kv import plain_states
from engine.program.features import refusal
from engine.program.weights import MappedWeight

LANES = 16
RANDOM = np.random.SeedSequence().entropy  # fresh each run; a failure names it


class CaseWeight(MappedWeight):
    """A case's weight as a reference to stored rows."""

    def __init__(self, name, stored):
        tag, rows, shape = stored
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "stored", (tag, rows))
        object.__setattr__(self, "shape", tuple(shape))

    @property
    def format(self):
        return self.stored[0]

    def rows(self, start=0, stop=None):
        return np.ascontiguousarray(self.stored[1])[start:stop]

    def dense(self):
        from engine.formats import FORMATS

        return FORMATS[self.format].decode(self.rows()).reshape(self.shape)


def to_lanes(name, array, latent):
    """A plain KV tensor in the layout cpu.lanes."""
    if array.ndim == 3:
        return np.ascontiguousarray(array.transpose(0, 2, 1))
    blocks, size, heads, dim = array.shape
    if name in ("v", "states.1"):
        return np.ascontiguousarray(array.transpose(0, 2, 1, 3))
    lanes = 1 if latent else min(LANES, size)
    return np.ascontiguousarray(array.reshape(blocks, size // lanes, lanes, heads, dim).transpose(0, 3, 1, 4, 2))


def tag_of(array):
    names = {HOST_DTYPES[tag]: tag for tag in ("f32", "i32", "u32", "u8")}
    return names[array.dtype]


def symbolic(name, array, dims):
    """The array's shape with the step's dimension in front."""
    family = name.partition(".")[0]
    known = STEP_INPUTS.get(name) or STEP_INPUTS.get(f"{family}.*") or STEP_INPUTS.get(f"{name}.*")
    if known:
        return tuple(
            size if size in ("S", "P", "S+1", "R+1") or n == 0 else array.shape[n] for n, size in enumerate(known[0])
        )
    first = array.shape[0]
    symbol = next((s for s in "TR" if getattr(dims, s) == first), None)
    if symbol is None:
        symbol = f"T*{first // dims.T}"
    return (symbol, *array.shape[1:])


def make_call(spec, case, outputs):
    values = {
        name: Value(n, name, symbolic(name, a, case.dims), tag_of(a)) for n, (name, a) in enumerate(case.inputs.items())
    }
    results = []
    for n, array in enumerate(outputs):
        name = f"out.{n}"
        shape = symbolic(name, array, case.dims)
        if spec.name == "sample" and n >= 3:
            shape = ("R", "K")
        results.append(Value(100 + n, name, shape, "q8g32" if spec.name == "quantize" else tag_of(array)))
    if spec.name == "quantize":
        results = [replace(results[0], shape=(results[0].shape[0], case.inputs["x"].shape[1]))]
    weights = {name: CaseWeight(name, stored) for name, stored in case.weights.items()}
    states = plain_states(case.kv, case.states) if case.kv else dict(case.states)
    attrs = {k: v for k, v in case.attrs.items() if v != spec.attrs.get(k)}
    return Call(spec.name, values, tuple(results), weights, {name: name for name in states}, attrs), states


def run_case(device, spec, case):
    wanted, after = evaluate(spec, case)
    call, states = make_call(spec, case, wanted)
    found = [p for p in device.providers().get(spec.name, ()) if refusal(p, call) is None]
    if not found:
        pytest.fail(f"no provider takes the case {case.name}: {refusal(device.providers()[spec.name][0], call)}")
    provider = found[0]
    packed = {name: provider.pack(ref, (spec.name,), lambda _: None) for name, ref in call.weights.items()}
    context = max([a.shape[-1] for n, a in states.items() if n == "history"], default=64)
    dims = replace(case.dims, **{n: max(getattr(case.dims, n), 1) for n in "TSRPK"})
    if case.kv is not None:
        context = max(context, dims.P * case.kv.block_size)
        states = {name: to_lanes(name, array, case.kv.latent) for name, array in states.items()}
        after = {name: to_lanes(name, array, case.kv.latent) for name, array in after.items()}
    limits = Limits(dims, context, 8)
    held = {name: np.array(array) for name, array in states.items()}
    frame = Frame(case.dims, {}, held)
    for name, value in call.inputs.items():
        frame.values[value.id] = np.ascontiguousarray(case.inputs[name])
    provider.bind(BoundCall(call, provider, packed, "cpu.lanes"), limits)(frame)
    for value, want in zip(call.outputs, wanted, strict=True):
        compare(spec, case, value.name, np.asarray(frame.values[value.id]).reshape(want.shape), want)
    for name, want in after.items():
        compare(spec, case, name, held[name], want)


def compare(spec, case, name, got, want):
    if spec.name == "quantize":
        depth = case.inputs["x"].shape[1]
        difference = got[:, :depth].view(np.int8).astype(int) - want[:, :depth].view(np.int8)
        assert np.abs(difference).max(initial=0) <= 1, case.name
        return
    if want.dtype.kind in "iu" and want.dtype not in (np.uint16, np.int8):
        np.testing.assert_array_equal(got, want, err_msg=f"{spec.name} {case.name} {name} seed {RANDOM}")
        return
    if want.dtype == np.uint16:
        got, want = ((a.astype(np.uint32) << 16).view(np.float32) for a in (got, want))
    if want.dtype == np.int8:
        assert np.abs(got.astype(int) - want).max(initial=0) <= 1
        return
    tolerance = spec.tolerance
    np.testing.assert_allclose(
        got.astype(np.float32),
        want.astype(np.float32),
        rtol=tolerance.relative,
        atol=tolerance.absolute,
        equal_nan=True,
        err_msg=f"{spec.name} {case.name} {name} seed {RANDOM}",
    )


def _variants():
    try:
        from engine_cpu import _native
    except ImportError:
        return ["missing"]
    return _native.isa_list()


@pytest.mark.parametrize("isa", _variants())
@pytest.mark.parametrize("op", OPS)
def test_provider_agrees_with_the_reference(op, isa, cpu):
    device = open_device("cpu", {"threads": 2, "isa": isa})
    rng = np.random.default_rng(RANDOM)
    for case in OPS[op].cases(rng):
        run_case(device, OPS[op], case)


def test_the_comparison_can_fail(cpu):
    device = open_device("cpu", {"threads": 1})
    case = next(iter(OPS["add"].cases(np.random.default_rng(RANDOM))))
    spoiled = replace(OPS["add"], reference=lambda *, a, b: (a + b + 1,))
    with pytest.raises(AssertionError):
        run_case(device, spoiled, case)


def test_dims_are_named_as_the_native_side_names_them(cpu):
    from dataclasses import fields

    from engine_cpu import _native

    assert "".join(f.name for f in fields(Dims)) == _native.DIMS
