"""Every op: its names fit its reference, its cases run, and a case is left as it was."""

import inspect
import subprocess
import sys

import numpy as np
import pytest

from engine.ops import OPS, REQUIRED, evaluate

FUSED = {"add_rms_norm", "linear_group", "moe_linear_group", "rope_kv_write"}

ALL_CASES = [
    pytest.param(spec, case, id=f"{name}: {case.name}")
    for name, spec in OPS.items()
    for case in spec.cases(np.random.default_rng(11))
]


def test_the_catalogue_is_whole():
    assert set(OPS) == FUSED | {
        *("step_expand", "gather_rows", "embed", "linear", "gather_columns", "quantize", "rms_norm", "layer_norm"),
        *("rope", "gated_act"),
        *("add", "kv_write", "kv_copy", "attention", "moe_route", "moe_linear", "moe_combine"),
        *("causal_conv", "gated_delta", "ssm_scan"),
        *("process_logits", "sample", "scale_softcap", "head_linear", "concat_heads"),
        *("all_reduce", "all_gather"),
    }


@pytest.mark.parametrize("spec", OPS.values(), ids=OPS)
def test_reference_takes_exactly_what_the_spec_names(spec):
    named = [name.rstrip("*?") for name in (*spec.inputs, *spec.weights, *spec.states)]
    assert len(set(named) | set(spec.attrs)) == len(named) + len(spec.attrs), "an argument's name is used twice"
    parameters = inspect.signature(spec.reference).parameters
    assert set(parameters) - {"dims"} == set(named) | set(spec.attrs)
    for name, default in spec.attrs.items():
        assert parameters[name].default == (inspect.Parameter.empty if default is REQUIRED else default)
    for name in (*spec.inputs, *spec.weights, *spec.states):
        if name.endswith("?") and "*" not in name:
            assert parameters[name[:-1]].default is None


def contents(case):
    return {name: array.tobytes() for name, array in case.inputs.items()}


@pytest.mark.parametrize("spec", OPS.values(), ids=OPS)
def test_cases_are_several_and_follow_the_generator(spec):
    first, again, other = (list(spec.cases(np.random.default_rng(seed))) for seed in (1, 1, 2))
    assert len(first) >= 4 and len({case.name for case in first}) == len(first)
    assert [contents(case) for case in first] == [contents(case) for case in again]
    if spec.inputs != ("block_copies",):  # copies that have their point
        assert all(contents(a) != contents(b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize(("spec", "case"), ALL_CASES)
def test_case_runs(spec, case):
    before = {n: a.copy() for n, a in {**case.inputs, **case.states}.items()}
    outputs, states = evaluate(spec, case)
    again, states_again = evaluate(spec, case)
    for name, array in before.items():
        assert np.array_equal(array, {**case.inputs, **case.states}[name], equal_nan=array.dtype.kind == "f"), name
    names = [name for name in spec.outputs if not name.endswith(("*", "?"))]
    assert len(outputs) == len(names) if len(names) == len(spec.outputs) else len(outputs) >= len(names)
    for got, twice in zip((*outputs, *states.values()), (*again, *states_again.values()), strict=True):
        assert got.tobytes() == twice.tobytes()
    for output in outputs:
        assert output.dtype in (np.float32, np.int32, np.uint8, np.uint16)
        if output.dtype == np.float32 and spec.name not in ("process_logits", "sample"):
            assert np.isfinite(output).all()


@pytest.mark.parametrize(
    "name", ["linear", "rms_norm", "layer_norm", "rope", "gated_act", "quantize", "moe_route", "head_linear"]
)
def test_a_row_does_not_depend_on_the_others(name):
    spec = OPS[name]
    for case in spec.cases(np.random.default_rng(3)):
        whole, _ = evaluate(spec, case)
        for row in {0, case.dims.T // 2, case.dims.T - 1}:
            alone = type(case)(**{**vars(case), "inputs": {n: a[row : row + 1] for n, a in case.inputs.items()}})
            for together, single in zip(whole, evaluate(spec, alone)[0], strict=True):
                assert together[row : row + 1].tobytes() == single.tobytes()


def test_arguments_collect_families():
    given = {"x": 1, "weight.0": 2, "weight.2": 4, "weight.1": 3, "bias.1": 5}
    assert OPS["linear_group"].arguments(given) == {"x": 1, "weight": [2, 3, 4], "bias": [None, 5]}
    assert OPS["sample"].takes_dims and not OPS["linear"].takes_dims


def test_import_brings_numpy_and_no_other_package():
    code = f"""
import sys
sys.path[:0] = {sys.path!r}
import numpy.random
before = set(sys.modules)
import engine.ops
print(*{{name.partition(".")[0] for name in set(sys.modules) - before}} - set(sys.stdlib_module_names))
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert found == ["engine"]
