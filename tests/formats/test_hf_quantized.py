"""Quantized Hugging Face weights: each method's values against its definition, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants
from hf_quantizers import METHODS, Stored, fp8, gptq, normal_float_table, tensor
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from engine.errors import FormatError
from engine.formats import FORMATS, Checkpoint, Tensor, open_checkpoint
from engine.formats.hfblocks import FP4_TABLE, NF4_TABLE
from engine.formats.quantized import compose
from engine.fp8 import E4M3_TABLE

torch = pytest.importorskip("torch")

NAME = "model.layers.0.mlp.up_proj"
_CHANNEL = {"num_bits": 8, "type": "float", "strategy": "channel"}
ROWS, DEPTH = 72, 384


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng()


def write(folder: Path, stored: Stored, settings: Any) -> Checkpoint:
    config = {"model_type": "llama", "quantization_config": settings}
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    save_file({name: value.contiguous() for name, value in stored.items()}, folder / "model.safetensors")
    return open_checkpoint(folder)


def random_weights(rng: np.random.Generator) -> np.ndarray:
    """Columns and rows of different size."""
    weights = rng.standard_normal((ROWS, DEPTH), np.float32) * rng.lognormal(0, 1, (1, DEPTH)) / 50
    return (weights * rng.lognormal(0, 1, (ROWS, 1))).astype(np.float32)


@pytest.mark.parametrize("method", METHODS)
def test_values_are_those_of_the_definition(tmp_path, rng, method):
    quantize, how, settings, form = METHODS[method]
    stored, want = quantize(NAME, random_weights(rng), rng, **how)
    plain = rng.standard_normal((8, 16), np.float32)
    checkpoint = write(tmp_path, stored | {"lm_head.weight": tensor(plain)}, settings)
    assert sorted(checkpoint.tensors) == ["lm_head.weight", f"{NAME}.weight"]
    weight = checkpoint.tensors[f"{NAME}.weight"]
    assert (weight.shape, weight.format.name) == ((ROWS, DEPTH), form)
    columns = weight.input.columns
    if columns is not None:
        np.testing.assert_array_equal(np.sort(columns), np.arange(DEPTH))
        want = want[:, columns]
    assert (columns is not None) == bool(how.get("desc_act") or how.get("g_idx"))
    np.testing.assert_allclose(weight.dense(), want, rtol=1e-6, atol=1e-6 * np.abs(want).max())
    first, last = np.sort(rng.choice(ROWS + 1, 2, replace=False))
    part = weight.rows(int(first), int(last))
    np.testing.assert_array_equal(weight.format.decode(part), weight.dense()[first:last])
    np.testing.assert_array_equal(checkpoint.tensors["lm_head.weight"].dense(), plain)
    weight.release()
    assert weight.nbytes == sum(part.nbytes for part in weight.parts)


def test_activations_that_must_or_may_be_rounded_say_so(tmp_path, rng):
    for method, quantized, scale in (
        ("w8a8", "required", 0.0),
        ("w8a8 static", "required", 0.03),
        ("w4a16", "allowed", 0),
        ("fp8 blocks", "fp8", 0),
        ("fp8 one scale", "fp8", 0),
        ("fp8 compressed-tensors", "fp8", 0),
        ("fp8 compressed-tensors blocks", "allowed", 0),
        ("fp8 modelopt", "fp8", 0),
        ("nvfp4 modelopt", "allowed", 0),
        ("nvfp4 compressed-tensors", "allowed", 0),
    ):
        quantize, how, settings, _ = METHODS[method]
        stored, _ = quantize(NAME, random_weights(rng), rng, **how)
        spec = write(tmp_path, stored, settings).tensors[f"{NAME}.weight"].input
        assert (spec.quantized, spec.scale, spec.columns) == (quantized, pytest.approx(scale), None)


def test_scales_of_a_quantized_kv_cache_are_left_out(tmp_path, rng):
    attention = "model.layers.0.self_attn"
    others = [f"{attention}.{name}" for name in ("k_scale", "v_scale", "kv_scale", "attn.q_scale", "k_proj.k_scale")]
    for method in ("fp8 compressed-tensors", "fp8 blocks", "auto-round", "nvfp4 modelopt", "nf4"):
        quantize, how, settings, _ = METHODS[method]
        stored, _ = quantize(NAME, random_weights(rng), rng, **how)
        stored |= {name: torch.ones(1) for name in others}
        assert list(write(tmp_path, stored, settings).tensors) == [f"{NAME}.weight"], method


def test_scales_of_mxfp4_by_the_dtype_they_mean(tmp_path, rng):
    quantize, how, settings, _ = METHODS["mxfp4 compressed-tensors"]
    stored, want = quantize(NAME, random_weights(rng), rng, **how)
    stored[f"{NAME}.weight_scale"] = stored[f"{NAME}.weight_scale"].view(torch.float8_e8m0fnu)
    np.testing.assert_allclose(write(tmp_path, stored, settings).tensors[f"{NAME}.weight"].dense(), want, rtol=1e-6)


def test_powers_of_two_are_torchs():
    raw = np.arange(256, dtype=np.uint8)
    want = torch.from_numpy(raw).view(torch.float8_e8m0fnu).float().numpy()
    np.testing.assert_array_equal(FORMATS["F8_E8M0"].decode(raw), want)


def test_a_folder_may_say_how_it_is_quantized_in_a_file_of_its_own(tmp_path, rng):
    """As NVIDIA's Model Optimizer wrote it at first."""
    quantize, how, _, form = METHODS["nvfp4 modelopt"]
    stored, _ = quantize(NAME, random_weights(rng), rng, **how)
    stored |= {f"model.layers.0.self_attn.k_proj.{name}": torch.ones(()) for name in ("k_scale", "v_scale")}
    told = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(told))
    tensors = write(tmp_path, stored, None).tensors
    assert {name: found.format.name for name, found in tensors.items()} == {f"{NAME}.weight": form}


def test_tables_are_the_published_ones():
    codes = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(E4M3_TABLE, codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32))
    np.testing.assert_allclose(NF4_TABLE, normal_float_table(), rtol=0, atol=1e-6)
    assert FP4_TABLE[3] == 1 and FP4_TABLE[11] == -1 and FP4_TABLE[1] == np.float32(0.0625 / 12)


def test_block_decoders_by_hand(rng):
    q = rng.integers(0, 256, 32).astype(np.uint8)
    nibbles = q & 15
    w4z = np.float16(0.25).tobytes() + bytes([11]) + (nibbles[:16] | nibbles[16:] << 4).tobytes()
    two = np.array([0.5, 3], np.float32).tobytes()
    ggml = rng.integers(0, 128, 4, np.uint8).tobytes() + q.tobytes()
    for name, raw, want in (
        ("W4Z", w4z, 0.25 * (nibbles.astype(int) - 11)),
        ("W8S", two[:4] + q.tobytes(), 0.5 * q.view(np.int8)),
        ("W8M", two + q.tobytes(), 0.5 * q - 3.0),
        ("FP8", two[4:] + (q & 0x77).tobytes(), 3.0 * E4M3_TABLE[q & 0x77]),
        ("NF4", two[:4] + q.tobytes(), 0.5 * NF4_TABLE[np.stack([q >> 4, q & 15], 1).reshape(-1)]),
        ("FP4", two[:4] + q.tobytes(), 0.5 * FP4_TABLE[np.stack([q >> 4, q & 15], 1).reshape(-1)]),
        ("NVFP4S", two[4:] + ggml, 3.0 * quants.dequantize(np.frombuffer(ggml, np.uint8), GGMLQuantizationType.NVFP4)),
    ):
        assert len(raw) == FORMATS[name].block_bytes
        np.testing.assert_allclose(FORMATS[name].decode(np.frombuffer(raw, np.uint8)), want, rtol=1e-7)


def spoiled(stored: Stored, part: str, value: Any) -> Stored:
    """A copy with one part replaced, or without it (None), or changed by a function."""
    name = f"{NAME}.{part}"
    changed = dict(stored)
    if callable(value):
        changed[name] = value(stored[name].clone())
    elif value is None:
        del changed[name]
    else:
        changed[name] = value
    return changed


def first(number: float) -> Any:
    """Sets the first element."""

    def change(values: Any) -> Any:
        values.view(-1)[0] = number
        return values

    return change


def state(**changes: Any) -> Any:
    """Changes keys of a quant_state."""

    def change(blob: Any) -> Any:
        found = json.loads(blob.numpy().tobytes()) | changes
        return tensor(np.frombuffer(json.dumps(found).encode(), np.uint8).copy())

    return change


GPTQ, W4, W8, NF4 = ("gptq act-order", "w4a16 not symmetric, g_idx", "w8a8 static", "nf4 nested, long runs")
MODELOPT, NVFP4 = "nvfp4 modelopt", "nvfp4 compressed-tensors"
BLOB = "weight.quant_state.bitsandbytes__nf4"
BROKEN: dict[str, tuple[str, str, Any, str]] = {
    "no scales": (GPTQ, "scales", None, "lacks the tensor .*scales"),
    "no zero points": (GPTQ, "qzeros", None, "lacks the tensor .*qzeros"),
    "NaN scale": (GPTQ, "scales", first(float("nan")), "not all finite"),
    "infinite scale": (GPTQ, "scales", first(float("-inf")), "not all finite"),
    "scales of another shape": (GPTQ, "scales", lambda t: t[:-1], r"F16 \[5, 72\]; it must be .* \[6, 72\]"),
    "integer scales": (GPTQ, "scales", lambda t: t.to(torch.int32), "it must be F16 or BF16 or F32"),
    "zero points of another shape": (GPTQ, "qzeros", lambda t: t[:, 1:], r"it must be I32 \[6, 9\]"),
    "qweight of another dtype": (GPTQ, "qweight", lambda t: t.to(torch.int64), "it must be I32"),
    "qweight with one axis": (GPTQ, "qweight", lambda t: t.reshape(-1), "it must be I32"),
    "empty qweight": (GPTQ, "qweight", lambda t: t[:0], "it must be I32"),
    "g_idx too large": (GPTQ, "g_idx", first(6), "groups from 0 to 6, but there are 6"),
    "g_idx negative": (GPTQ, "g_idx", first(-1), "groups from -1"),
    "g_idx uneven": (GPTQ, "g_idx", lambda t: t.clamp(max=0) + (torch.arange(len(t)) < 5), "no multiples of 32"),
    "g_idx short": (GPTQ, "g_idx", lambda t: t[1:], r"it must be I32 \[384\]"),
    "weight twice": (GPTQ, "weight", torch.zeros(72, 384), "twice"),
    "awq without scales": ("awq", "scales", None, "lacks the tensor"),
    "awq scales of another shape": ("awq", "scales", lambda t: t[:, :64], r"it must be .* \[3, 72\]"),
    "packed zero points missing": (W4, "weight_zero_point", None, "not symmetric"),
    "weight_shape wrong": (W4, "weight_shape", first(73), r"is \[73, 384\]"),
    "weight_g_idx too large": (W4, "weight_g_idx", first(1 << 30), "names groups"),
    "packed weight missing": (W4, "weight_packed", None, "lacks the tensor"),
    "int8 scale missing": (W8, "weight_scale", None, "describes no quantization"),
    "int8 scale of another shape": (W8, "weight_scale", lambda t: t[:71], r"it must be .* \[72, 1\]"),
    "int8 weight as float": (W8, "weight", lambda t: t.float(), "it must be I8"),
    "input_scale missing": (W8, "input_scale", None, "lacks .*input_scale"),
    "input_scale zero": (W8, "input_scale", first(0), "must be a positive number"),
    "input_scale NaN": (W8, "input_scale", first(float("nan")), "must be a positive number"),
    "input_zero_point": (W8, "input_zero_point", torch.ones(1, dtype=torch.int8), "symmetric activations"),
    "fp8 scale missing": ("fp8 blocks", "weight_scale_inv", None, "describes no quantization"),
    "fp8 scales of another shape": ("fp8 blocks", "weight_scale_inv", lambda t: t[:, :2], r"it must be .* \[1, 3\]"),
    "fp8 scale NaN": ("fp8 blocks", "weight_scale_inv", first(float("nan")), "not all finite"),
    "fp8 weight of another dtype": ("fp8 blocks", "weight", lambda t: t.float(), "it must be F8_E4M3"),
    "nvfp4 scale missing": (MODELOPT, "weight_scale", None, "describes no quantization"),
    "nvfp4 scales of another shape": (MODELOPT, "weight_scale", lambda t: t[:, 1:], r"it must be F8_E4M3 \[72, 24\]"),
    "nvfp4 whole scale missing": (MODELOPT, "weight_scale_2", None, "it must be F8_E4M3"),
    "nvfp4 whole scale NaN": (MODELOPT, "weight_scale_2", torch.tensor(float("nan")), "numbers from 0 to 2"),
    "nvfp4 whole scale negative": (MODELOPT, "weight_scale_2", torch.tensor(-0.1), "numbers from 0 to 2"),
    "nvfp4 of an odd depth": (NVFP4, "weight_packed", lambda t: t[:, 8:], "368 inputs; .* a multiple of 64"),
    "nvfp4 codes missing": (NVFP4, "weight_packed", None, "lacks the tensor .*up_proj.weight,"),
    "nvfp4 divisor missing": (NVFP4, "weight_global_scale", None, "it must be U8"),
    "nvfp4 divisor 0": (NVFP4, "weight_global_scale", torch.zeros(1), "numbers from 0 to 2"),
    "absmax missing": (NF4, "weight.absmax", None, "lacks the tensor"),
    "absmax short": (NF4, "weight.absmax", lambda t: t[1:], r"it must be F32 or U8 \[108\]"),
    "nested_absmax missing": (NF4, "weight.nested_absmax", None, "lacks the tensor"),
    "nested_absmax NaN": (NF4, "weight.nested_absmax", first(float("nan")), "not all finite"),
    "another table": (NF4, "weight.quant_map", lambda t: t.flip(0), "not the table of nf4"),
    "quant_state no JSON": (NF4, BLOB, torch.zeros(9, dtype=torch.uint8), "not valid JSON"),
    "quant_state another shape": (NF4, BLOB, state(shape=[72, 448]), r"U8 \[13824, 1\]; it must be U8 \[16128, 1\]"),
    "quant_state huge shape": (NF4, BLOB, state(shape=[1 << 60, 64]), "it must be U8"),
    "quant_state one axis": (NF4, BLOB, state(shape=[27648]), "two positive numbers"),
    "quant_state odd depth": (NF4, BLOB, state(shape=[768, 36]), "multiples of 64"),
    "quant_state blocksize 0": (NF4, BLOB, state(blocksize=0), "multiples of 64"),
    "quant_state nested_blocksize 0": (NF4, BLOB, state(nested_blocksize=0), "must be positive"),
    "quant_state another type": (NF4, BLOB, state(quant_type="fp4"), "not the table"),
    "quant_state unknown type": (NF4, BLOB, state(quant_type="af4"), "quant_type"),
    "quant_state offset infinite": (NF4, BLOB, state(nested_offset=float("inf")), "not all finite"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_broken_weights_are_refused_in_a_sentence(tmp_path, rng, what):
    method, part, value, reason = BROKEN[what]
    quantize, how, settings, _ = METHODS[method]
    stored, _ = quantize(NAME, random_weights(rng), rng, **how)
    write(tmp_path, stored, settings)
    with pytest.raises(FormatError, match=reason) as refused:
        write(tmp_path, spoiled(stored, part, value), settings)
    assert "\n" not in str(refused.value)


def test_a_nan_among_8_bit_floats_is_refused_when_it_is_read(tmp_path, rng):
    stored, _ = fp8(NAME, random_weights(rng), rng, block=(128, 128))
    stored[f"{NAME}.weight"].view(torch.uint8)[5, 7] = 0xFF
    weight = write(tmp_path, stored, METHODS["fp8 blocks"][2]).tensors[f"{NAME}.weight"]
    weight.rows(0, 5)
    with pytest.raises(FormatError, match="NaN"):
        weight.rows(0, 6)


def test_a_scale_that_is_no_positive_number_is_refused_when_it_is_read(tmp_path, rng):
    for code in (0x7F, 0xFF, 0x88):
        quantize, how, settings, _ = METHODS[MODELOPT]
        stored, _ = quantize(NAME, random_weights(rng), rng, **how)
        stored[f"{NAME}.weight_scale"].view(torch.uint8)[5, 7] = code
        weight = write(tmp_path, stored, settings).tensors[f"{NAME}.weight"]
        weight.rows(0, 5)
        with pytest.raises(FormatError, match="negative or NaN"):
            weight.rows(0, 6)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ("gptq", "must be an object"),
        ({}, "the quantization method None; supported are gptq, awq"),
        ({"quant_method": "hqq"}, "the quantization method 'hqq'; supported are"),
        ({"quant_method": ["gptq"]}, "supported are"),
        ({"quant_method": "gptq", "bits": 3}, "bits: .* 4 or 8"),
        ({"quant_method": "gptq"}, "bits: "),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size is 0"),
        ({"quant_method": "gptq", "bits": 4, "group_size": "128"}, "group_size: "),
        ({"quant_method": "gptq", "bits": 4, "group_size": 48}, "groups of 48; supported are multiples of 32"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "'gptq' or 'gptq_v2'"),
        ({"quant_method": "awq", "version": "gemv"}, "'gemm'"),
        ({"quant_method": "awq", "bits": 8}, "bits: "),
        ({"quant_method": "awq", "zero_point": False}, "zero_point: "),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "'e4m3'"),
        ({"quant_method": "auto-round", "packing_format": "auto_round:exllamav2"}, "exllamav2'; supported are"),
        ({"quant_method": "auto-round", "packing_format": ["auto_gptq"]}, "supported are"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "two positive numbers"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24", "config_groups": {}}, "'int-quantized'"),
        ({"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {}}, "0 config_groups"),
    ],
)
def test_settings_that_are_not_supported_say_what_is(tmp_path, rng, settings, reason):
    stored, _ = gptq(NAME, random_weights(rng), rng, group_size=48)
    del stored[f"{NAME}.g_idx"]
    with pytest.raises(FormatError, match=reason) as refused:
        write(tmp_path, stored, settings)
    assert "\n" not in str(refused.value)


def test_asymmetric_activations_and_mixed_layers_are_refused(tmp_path, rng):
    quantize, how, settings, _ = METHODS["w8a8"]
    stored, _ = quantize(NAME, random_weights(rng), rng, **how)
    group = settings["config_groups"]["group_0"]
    uneven = group | {"input_activations": group["input_activations"] | {"symmetric": False}}
    with pytest.raises(FormatError, match="symmetric"):
        write(tmp_path, stored, settings | {"config_groups": {"group_0": uneven}})
    with pytest.raises(FormatError, match="2 config_groups; supported is one"):
        write(tmp_path, stored, settings | {"config_groups": {"group_0": group, "group_1": group}})
    with pytest.raises(FormatError, match="dense"):
        write(tmp_path, stored, settings | {"sparsity_config": {"format": "sparse-24-bitmask"}})


def test_layers_of_floats_of_4_and_8_bits_beside_each_other(tmp_path, rng):
    settings = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": {}}
    stored, want = {}, {}
    kinds = ("fp8 compressed-tensors blocks", "nvfp4 compressed-tensors", "mxfp4 compressed-tensors")
    for number, method in enumerate(kinds):
        quantize, how, own, form = METHODS[method]
        name = f"model.layers.{number}.mlp.up_proj"
        parts, values = quantize(name, random_weights(rng), rng, **how)
        stored, want = stored | parts, want | {f"{name}.weight": (form, values)}
        settings["config_groups"][f"group_{number}"] = own["config_groups"]["group_0"] | {"format": own["format"]}
    found = write(tmp_path, stored, settings).tensors
    assert set(found) == set(want)
    for name, (form, values) in want.items():
        assert found[name].format.name == form
        np.testing.assert_allclose(found[name].dense(), values, rtol=1e-6, atol=1e-6 * np.abs(values).max())
    group = settings["config_groups"]["group_0"]
    for change, reason in (
        ({"format": "pack-quantized"}, "'float-quantized'"),
        ({"weights": _CHANNEL}, "different blocks"),
    ):
        with pytest.raises(FormatError, match=reason):
            write(tmp_path, stored, settings | {"config_groups": {"group_0": group, "group_1": group | change}})


def test_codes_without_a_quantization_config_are_refused(tmp_path, rng):
    stored, _ = gptq(NAME, random_weights(rng), rng)
    with pytest.raises(FormatError, match="qweight is stored as I32"):
        write(tmp_path, stored, None)


# -- anything at all: a sentence, or a weight of the shape that it says --------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 1 << 70) | st.floats() | st.sampled_from(["gptq", "int", "block", "x"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["weights", "num_bits", "a"]), inner),
    max_leaves=6,
)
KEYS = (
    "bits",
    "group_size",
    "mode",
    "checkpoint_format",
    "version",
    "weight_block_size",
    "fmt",
    "format",
    "config_groups",
)
DTYPES = ("I8", "U8", "I32", "U32", "I64", "F16", "BF16", "F32", "F8_E4M3", "F8_E8M0")


def random_parts(name: str) -> dict[str, Tensor]:
    """The parts of a method's weight, with the contents of a file."""
    quantize, how, _, _ = METHODS[name]
    rng = np.random.default_rng(1)
    stored, _ = quantize(NAME, rng.standard_normal((40, 128), np.float32), rng, **how)
    names = {torch.int8: "I8", torch.uint8: "U8", torch.int32: "I32", torch.int64: "I64", torch.float16: "F16"}
    names |= {torch.bfloat16: "BF16", torch.float32: "F32", torch.float8_e4m3fn: "F8_E4M3"}
    names |= {torch.uint32: "U32"}
    found = {}
    for part, value in stored.items():
        raw = value.contiguous().reshape(-1).view(torch.uint8).numpy().copy()
        found[part] = Tensor(part, tuple(value.shape), FORMATS[names[value.dtype]], raw)
    return found


@given(method=st.sampled_from(list(METHODS)), data=st.data())
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_spoiled_parts_and_settings_give_a_weight_or_a_sentence(method, data):
    parts = random_parts(method)
    config = dict(METHODS[method][2])
    if data.draw(st.booleans()):
        config[data.draw(st.sampled_from(KEYS))] = data.draw(JSON)
    part = data.draw(st.sampled_from(list(parts)))
    shape = tuple(data.draw(st.lists(st.sampled_from([0, 1, 2, 5, 8, 40, 64, 128]), max_size=3)))
    form = FORMATS[data.draw(st.sampled_from(DTYPES))]
    kind = data.draw(st.sampled_from(["gone", "another", "bytes"]))
    if kind == "gone":
        del parts[part]
    elif kind == "another":
        size = int(np.prod(shape)) * form.block_bytes
        parts[part] = Tensor(part, shape, form, np.resize(parts[part].data, size) if size else np.empty(0, np.uint8))
    else:
        raw = parts[part].data
        places = data.draw(st.lists(st.tuples(st.integers(0, len(raw) - 1), st.integers(0, 255)), max_size=20))
        for place, byte in places:
            raw[place] = byte
    try:
        for weight in compose({"quantization_config": config}, parts, Path("config.json")).values():
            if len(weight.shape) == 2:
                assert weight.rows().shape == (weight.shape[0], weight.format.row_bytes(weight.shape[1]))
    except FormatError as error:
        assert "\n" not in str(error)
