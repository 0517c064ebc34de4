"""Small quantizers that write matrices as Hugging Face checkpoints of each method store them, with their exact values.

Each takes a name ("...q_proj") and weights f32 [N, K], and gives the stored tensors by name (torch's dtypes, since NumPy
has neither bf16 nor fp8) and the values f32 [N, K] that the published definition gives them. Words are packed number by
number, so as not to repeat the loader's own shifts.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

Stored = dict[str, Any]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def pack_words(codes: np.ndarray, bits: int) -> np.ndarray:
    """Integers [rows, n] as i32 [rows, ceil(n / per)], the first in the lowest bits."""
    per = 32 // bits
    rows, count = codes.shape
    words = np.zeros((rows, -(-count // per)), np.uint64)
    for i in range(count):
        words[:, i // per] += codes[:, i].astype(np.uint64) << np.uint64(i % per * bits)
    return words.astype(np.uint32).view(np.int32)


def tensor(values: np.ndarray, dtype: Any = None) -> Any:
    made = torch.from_numpy(np.ascontiguousarray(values))
    return made if dtype is None else made.to(dtype)


def stored_as(values: np.ndarray, dtype: Any) -> np.ndarray:
    """f32 values as they come back from a dtype."""
    return tensor(values.astype(np.float32), dtype).float().numpy()


def quantize_groups(
    weights: np.ndarray, group_of: np.ndarray, bits: int, sym: bool, dtype: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """codes [N, K], scales [N, G], zeros [N, G] and the values scale * (code - zero)."""
    most, count = (1 << bits) - 1, int(group_of.max()) + 1
    codes = np.zeros(weights.shape, np.int64)
    scales, zeros = np.zeros((len(weights), count), np.float32), np.zeros((len(weights), count), np.int64)
    for g in range(count):
        part = weights[:, group_of == g]
        if sym:
            scale = np.abs(part).max(axis=1) * 2 / most
            zeros[:, g] = 1 << bits - 1
        else:
            low, high = np.minimum(part.min(axis=1), 0), np.maximum(part.max(axis=1), 0)
            scale = (high - low) / most
            zeros[:, g] = np.clip(np.rint(-low / scale), 0, most)
        scales[:, g] = stored_as(scale, dtype)
        found = np.rint(part / scales[:, g, None]) + zeros[:, g, None]
        codes[:, group_of == g] = np.clip(found, 0, most)
    values = scales[:, group_of].astype(np.float64) * (codes - zeros[:, group_of])
    return codes, scales, zeros, values.astype(np.float32)


def runs(depth: int, size: int) -> np.ndarray:
    return np.arange(depth) // (depth if size == -1 else size)


def gptq(name: str, weights: np.ndarray, rng: np.random.Generator, **how: Any) -> tuple[Stored, np.ndarray]:
    """how: bits, group_size, sym, desc_act, checkpoint_format, order (of act-order, shared by q, k and v), dtype."""
    bits, depth = how.get("bits", 4), weights.shape[1]
    group_of = runs(depth, how.get("group_size", 128))
    if how.get("desc_act"):
        order = how.get("order")
        order = rng.permutation(depth) if order is None else order
        group_of = group_of[np.argsort(order)]  # the i-th most active input is quantized i-th
    dtype = how.get("dtype", torch.float16)
    codes, scales, zeros, values = quantize_groups(weights, group_of, bits, how.get("sym", True), dtype)
    if how.get("checkpoint_format", "gptq") == "gptq":
        zeros = (zeros - 1) % (1 << bits)
    stored = {
        f"{name}.qweight": tensor(pack_words(codes, bits).T),
        f"{name}.qzeros": tensor(pack_words(zeros.T, bits)),
        f"{name}.scales": tensor(scales.T, dtype),
        f"{name}.g_idx": tensor(group_of.astype(np.int32)),
    }
    return stored, values


def awq(name: str, weights: np.ndarray, rng: np.random.Generator, **how: Any) -> tuple[Stored, np.ndarray]:
    group_of = runs(weights.shape[1], how.get("group_size", 128))
    codes, scales, zeros, values = quantize_groups(weights, group_of, 4, False, torch.float16)

    def words(numbers: np.ndarray) -> Any:
        """[rows, N]: each eight columns in the order of the format."""
        return tensor(pack_words(numbers.reshape(len(numbers), -1, 8)[..., AWQ_ORDER].reshape(numbers.shape), 4))

    stored = {
        f"{name}.qweight": words(codes.T),
        f"{name}.qzeros": words(zeros.T),
        f"{name}.scales": tensor(scales.T, torch.float16),
    }
    return stored, values


def packed_int(name: str, weights: np.ndarray, rng: np.random.Generator, **how: Any) -> tuple[Stored, np.ndarray]:
    """compressed-tensors' pack-quantized. how: bits, group_size (-1: channel), sym, g_idx, dtype."""
    bits, depth = how.get("bits", 4), weights.shape[1]
    group_of = runs(depth, how.get("group_size", 128))
    if how.get("g_idx"):
        group_of = rng.permutation(group_of)
    dtype, sym = how.get("dtype", torch.bfloat16), how.get("sym", True)
    codes, scales, zeros, values = quantize_groups(weights, group_of, bits, sym, dtype)
    stored = {
        f"{name}.weight_packed": tensor(pack_words(codes, bits)),
        f"{name}.weight_scale": tensor(scales, dtype),
        f"{name}.weight_shape": tensor(np.array(weights.shape, np.int64)),
    }
    if not sym:
        stored[f"{name}.weight_zero_point"] = tensor(pack_words(zeros.T, bits).T)
    if how.get("g_idx"):
        stored[f"{name}.weight_g_idx"] = tensor(group_of.astype(np.int32))
    return stored, values


def int8(name: str, weights: np.ndarray, rng: np.random.Generator, **how: Any) -> tuple[Stored, np.ndarray]:
    """compressed-tensors' int-quantized. how: strategy (channel, tensor, group of 32), sym, dtype, input_scale."""
    strategy, dtype = how.get("strategy", "channel"), how.get("dtype", torch.bfloat16)
    rows, depth = weights.shape
    parts = weights.reshape(1, -1) if strategy == "tensor" else weights
    group_of = runs(parts.shape[1], 32 if strategy == "group" else -1)
    codes, scales, zeros, values = quantize_groups(parts, group_of, 8, how.get("sym", True), dtype)
    stored = {
        f"{name}.weight": tensor((codes - 128).astype(np.int8).reshape(rows, depth)),
        f"{name}.weight_scale": tensor(scales.reshape(-1) if strategy == "tensor" else scales, dtype),
    }
    if not how.get("sym", True):
        stored[f"{name}.weight_zero_point"] = tensor((zeros - 128).astype(np.int8))
    if "input_scale" in how:
        stored[f"{name}.input_scale"] = torch.tensor([how["input_scale"]], dtype=torch.float32)
    return stored, values.reshape(rows, depth)


def fp8(name: str, weights: np.ndarray, rng: np.random.Generator, **how: Any) -> tuple[Stored, np.ndarray]:
    """how: block (high, wide) of a scale, or None for one a row, or "tensor"; ending of the scales' name; dtype; bound (of
    the scales of activations)."""
    rows, depth = weights.shape
    block = how.get("block")
    high, wide = (rows, depth) if block == "tensor" else block or (1, depth)
    dtype = how.get("dtype", torch.float32)
    tall, long = -(-rows // high), -(-depth // wide)
    padded = np.zeros((tall * high, long * wide), np.float32)
    padded[:rows, :depth] = np.abs(weights)
    scales = stored_as(padded.reshape(tall, high, long, wide).max(axis=(1, 3)) / 440, dtype)
    whole = np.repeat(np.repeat(scales, high, axis=0), wide, axis=1)[:rows, :depth]
    codes = tensor(weights / whole).to(torch.float8_e4m3fn)
    stored = {
        f"{name}.weight": codes,
        f"{name}.{how.get('ending', 'weight_scale_inv')}": tensor(
            scales.reshape(-1) if block == "tensor" else scales, dtype
        ),
    }
    if how.get("bound"):
        stored[f"{name}.input_scale_ub"] = torch.tensor([1200.0])
    return stored, codes.float().numpy() * whole


def mlx(name: str, weights: np.ndarray, rng: np.random.Generator, **how: Any) -> tuple[Stored, np.ndarray]:
    """mlx-lm's affine. how: bits, group_size, dtype of scales and biases."""
    (rows, depth), bits, size, dtype = weights.shape, how["bits"], how["group_size"], how.get("dtype", torch.bfloat16)
    groups = weights.reshape(rows, -1, size)
    biases = stored_as(groups.min(axis=2), dtype)
    scales = stored_as((groups.max(axis=2) - biases) / ((1 << bits) - 1), dtype)
    codes = np.clip(np.rint((groups - biases[..., None]) / scales[..., None]), 0, (1 << bits) - 1).astype(np.int64)
    words = np.zeros((rows, depth * bits // 32), np.uint32)
    for row in range(rows):  # one long number
        whole = sum(int(code) << bits * i for i, code in enumerate(codes[row].reshape(-1)))
        words[row] = np.frombuffer(whole.to_bytes(words.shape[1] * 4, "little"), "<u4")
    stored = {f"{name}.scales": tensor(scales, dtype), f"{name}.biases": tensor(biases, dtype)}
    stored[f"{name}.weight"] = tensor(words.view(np.int32)).view(torch.uint32)
    values = scales[..., None].astype(np.float64) * codes + biases[..., None]
    return stored, values.reshape(rows, depth).astype(np.float32)


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def nvfp4(name: str, weights: np.ndarray, rng: np.random.Generator, **how: Any) -> tuple[Stored, np.ndarray]:
    """how: packed (as compressed-tensors has it, else as NVIDIA's Model Optimizer)."""
    groups = weights.reshape(len(weights), -1, 16)
    whole = np.float32(np.abs(weights).max() / (6 * 448))
    scales = tensor(np.abs(groups).max(axis=2) / 6 / whole).to(torch.float8_e4m3fn)
    if how.get("packed"):
        divisor = np.float32(1 / whole)
        whole = np.float64(1) / divisor
    each = scales.double().numpy() * whole
    codes = np.abs((groups / np.where(each == 0, 1, each)[..., None])[..., None] - E2M1).argmin(axis=-1)
    pairs = codes.reshape(len(weights), -1, 2)
    packed = tensor((pairs[..., 1] * 16 + pairs[..., 0]).astype(np.uint8))
    if how.get("packed"):
        stored = {"weight_packed": packed, "weight_global_scale": torch.tensor([divisor])}
        stored["input_global_scale"] = torch.tensor([300.0])
    else:
        stored = {"weight": packed, "weight_scale_2": torch.tensor(whole), "input_scale": torch.tensor(0.01)}
    stored["weight_scale"] = scales
    values = (E2M1[codes] * each[..., None]).astype(np.float32).reshape(weights.shape)
    return {f"{name}.{part}": value for part, value in stored.items()}, values


def mxfp4(name: str, weights: np.ndarray, rng: np.random.Generator, **how: Any) -> tuple[Stored, np.ndarray]:
    """compressed-tensors' mxfp4-pack-quantized."""
    groups = weights.reshape(len(weights), -1, 32)
    exponents = np.floor(np.log2(np.abs(groups).max(axis=2))) - 2
    each = np.exp2(exponents)[..., None]
    codes = np.abs((groups / each)[..., None] - E2M1).argmin(axis=-1)
    pairs = codes.reshape(len(weights), -1, 2)
    stored = {
        f"{name}.weight_packed": tensor((pairs[..., 1] * 16 + pairs[..., 0]).astype(np.uint8)),
        f"{name}.weight_scale": tensor((exponents + 127).astype(np.uint8)),
    }
    return stored, (E2M1[codes] * each).astype(np.float32).reshape(weights.shape)


def normal_float_table() -> np.ndarray:
    """NF4 as QLoRA's appendix derives it: quantiles of N(0, 1) on both sides of zero, scaled to [-1, 1]."""
    from statistics import NormalDist

    offset = 0.9677083
    upper = [NormalDist().inv_cdf(p) for p in np.linspace(offset, 0.5, 9)[:-1]]
    lower = [-NormalDist().inv_cdf(p) for p in np.linspace(offset, 0.5, 8)[:-1]]
    table = np.sort(np.array([*lower, 0.0, *upper]))
    return table / table.max()


FP4 = np.array([0, 0.0625, 8, 12, 4, 6, 2, 3, -0.0, -0.0625, -8, -12, -4, -6, -2, -3]) / 12


def four_bit(name: str, weights: np.ndarray, rng: np.random.Generator, **how: Any) -> tuple[Stored, np.ndarray]:
    """bitsandbytes. how: kind (nf4, fp4), blocksize, nested (double quantization)."""
    kind, size = how.get("kind", "nf4"), how.get("blocksize", 64)
    table = (normal_float_table() if kind == "nf4" else FP4).astype(np.float32)
    flat = np.zeros(-(-weights.size // size) * size, np.float32)
    flat[: weights.size] = weights.reshape(-1)
    absmax = np.abs(flat.reshape(-1, size)).max(axis=1)
    name = f"{name}.weight"
    state: dict[str, Any] = {"quant_type": kind, "blocksize": size, "dtype": "bfloat16", "shape": list(weights.shape)}
    stored: Stored = {f"{name}.quant_map": tensor(table)}
    if how.get("nested"):
        grid = np.sort(rng.uniform(-1, 1, 256)).astype(np.float32)
        offset = np.float32(absmax.mean())
        outer_size = 256
        starts = np.arange(0, len(absmax), outer_size)
        outer = np.maximum.reduceat(np.abs(absmax - offset), starts).astype(np.float32)
        ratio = (absmax - offset) / np.repeat(outer, outer_size)[: len(absmax)]
        codes = np.abs(ratio[:, None] - grid).argmin(axis=1).astype(np.uint8)
        absmax = grid[codes] * np.repeat(outer, outer_size)[: len(absmax)] + offset
        stored |= {
            f"{name}.absmax": tensor(codes),
            f"{name}.nested_absmax": tensor(outer),
            f"{name}.nested_quant_map": tensor(grid),
        }
        state |= {"nested_blocksize": outer_size, "nested_dtype": "float32", "nested_offset": float(offset)}
    else:
        stored[f"{name}.absmax"] = tensor(absmax)
    scales = np.repeat(absmax, size)[: weights.size]
    divided = weights.reshape(-1) / np.where(scales == 0, 1, scales)
    indices = np.abs(divided[:, None] - table).argmin(axis=1)
    stored[name] = tensor((indices[0::2] << 4 | indices[1::2]).astype(np.uint8)[:, None])
    blob = json.dumps(state).encode()
    stored[f"{name}.quant_state.bitsandbytes__{kind}"] = tensor(np.frombuffer(blob, np.uint8).copy())
    return stored, (table[indices] * scales).astype(np.float32).reshape(weights.shape)


def llm_int8(name: str, weights: np.ndarray, rng: np.random.Generator, **how: Any) -> tuple[Stored, np.ndarray]:
    absmax = np.abs(weights).max(axis=1)
    codes = np.rint(weights * 127 / absmax[:, None]).astype(np.int8)
    stored = {
        f"{name}.weight": tensor(codes),
        f"{name}.SCB": tensor(absmax),
        f"{name}.weight_format": tensor(np.zeros((), np.uint8)),
    }
    return stored, (codes * (absmax[:, None].astype(np.float64) / 127)).astype(np.float32)


def _weights_only(**weights: Any) -> dict[str, Any]:
    return _compressed("pack-quantized", {"type": "int", **weights}, None)


def _compressed(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


def _gptq(**settings: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True, **settings}


_EIGHT = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
_TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
_STEP = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "tensor", "dynamic": False}
_FLOAT = {"num_bits": 8, "type": "float", "symmetric": True}

# what it is -> (quantizer, how, quantization_config, format of the composed weight)
METHODS: dict[str, tuple[Any, dict[str, Any], dict[str, Any], str]] = {
    "gptq": (gptq, {}, _gptq(), "Q4_0"),
    "gptq groups of 32, not symmetric": (
        gptq,
        {"group_size": 32, "sym": False},
        _gptq(group_size=32, sym=False),
        "W4Z",
    ),
    "gptq act-order": (gptq, {"group_size": 64, "desc_act": True}, _gptq(group_size=64, desc_act=True), "Q4_0"),
    "gptq act-order, not symmetric, v2": (
        gptq,
        {"group_size": 32, "desc_act": True, "sym": False, "checkpoint_format": "gptq_v2"},
        _gptq(group_size=32, desc_act=True, sym=False, checkpoint_format="gptq_v2"),
        "W4Z",
    ),
    "gptq one group": (gptq, {"group_size": -1}, _gptq(group_size=-1), "Q4_0"),
    "gptq 8 bits": (gptq, {"bits": 8}, _gptq(bits=8), "Q8_0"),
    "gptq 8 bits, not symmetric, v2": (
        gptq,
        {"bits": 8, "sym": False, "checkpoint_format": "gptq_v2"},
        _gptq(bits=8, sym=False, format="gptq_v2"),
        "W8M",
    ),
    "gptq f32 scales": (gptq, {"dtype": torch.float32}, _gptq(), "W8S"),
    "awq": (
        awq,
        {},
        {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
        "W4Z",
    ),
    "awq groups of 32": (awq, {"group_size": 32}, {"quant_method": "awq", "group_size": 32, "version": "GEMM"}, "W4Z"),
    "w4a16": (packed_int, {}, _weights_only(num_bits=4, strategy="group", group_size=128), "Q4_0"),
    "w4a16 not symmetric, g_idx": (
        packed_int,
        {"sym": False, "group_size": 64, "g_idx": True},
        _weights_only(num_bits=4, strategy="group", group_size=64, symmetric=False, actorder="group"),
        "W4Z",
    ),
    "w8a16": (packed_int, {"bits": 8, "group_size": -1}, _weights_only(num_bits=8, strategy="channel"), "Q8_0"),
    "w8a8": (int8, {}, _compressed("int-quantized", _EIGHT, _TOKEN), "Q8_0"),
    "w8a8 f32 scales": (int8, {"dtype": torch.float32}, _compressed("int-quantized", _EIGHT, _TOKEN), "W8S"),
    "w8a8 one scale": (
        int8,
        {"strategy": "tensor"},
        _compressed("int-quantized", _EIGHT | {"strategy": "tensor"}, _TOKEN),
        "Q8_0",
    ),
    "w8a8 groups, not symmetric": (
        int8,
        {"strategy": "group", "sym": False},
        _compressed("int-quantized", _EIGHT | {"strategy": "group", "group_size": 32, "symmetric": False}, _TOKEN),
        "W8M",
    ),
    "w8a8 static": (int8, {"input_scale": 0.03}, _compressed("int-quantized", _EIGHT, _STEP), "Q8_0"),
    "fp8 blocks": (
        fp8,
        {"block": (128, 128)},
        {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]},
        "FP8",
    ),
    "fp8 one scale": (
        fp8,
        {"block": "tensor", "ending": "weight_scale"},
        {"quant_method": "fp8", "activation_scheme": "static"},
        "FP8",
    ),
    "fp8 compressed-tensors": (
        fp8,
        {"ending": "weight_scale", "dtype": torch.bfloat16},
        _compressed("float-quantized", _FLOAT | {"strategy": "channel"}, _TOKEN | {"type": "float"}),
        "FP8",
    ),
    "fp8 compressed-tensors blocks": (
        fp8,
        {"block": (64, 32), "ending": "weight_scale"},
        _compressed("float-quantized", _FLOAT | {"strategy": "block", "block_structure": [64, 32]}, None),
        "FP8",
    ),
    "fbgemm_fp8": (
        fp8,
        {"ending": "weight_scale", "bound": True},
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]},
        "FP8",
    ),
    "auto-round": (
        gptq,
        {},
        {
            "quant_method": "auto-round",
            "packing_format": "auto_round:auto_gptq",
            "bits": 4,
            "group_size": 128,
            "sym": True,
        },
        "Q4_0",
    ),
    "auto-round, its first name, packed as awq": (
        awq,
        {"group_size": 64},
        {
            "quant_method": "intel/auto-round",
            "backend": "auto_round:auto_awq",
            "bits": 4,
            "group_size": 64,
            "sym": False,
        },
        "W4Z",
    ),
    "auto-round nvfp4": (
        nvfp4,
        {"packed": True},
        {
            "quant_method": "auto-round",
            "packing_format": "auto_round:nv_fp4_with_static_gs",
            "bits": 4,
            "group_size": 16,
        },
        "NVFP4S",
    ),
    "fp8 modelopt": (
        fp8,
        {"block": "tensor", "ending": "weight_scale"},
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]},
        "FP8",
    ),
    "nvfp4 modelopt": (
        nvfp4,
        {},
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"], "producer": {"name": "modelopt"}},
        "NVFP4S",
    ),
    "nvfp4 compressed-tensors": (
        nvfp4,
        {"packed": True},
        _compressed(
            "nvfp4-pack-quantized",
            {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16},
            {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "dynamic": "local"},
        ),
        "NVFP4S",
    ),
    "mxfp4 compressed-tensors": (
        mxfp4,
        {},
        _compressed(
            "mxfp4-pack-quantized",
            {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32},
            None,
        ),
        "MXFP4",
    ),
    "nf4": (four_bit, {}, {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "NF4"),
    "nf4 nested, long runs": (
        four_bit,
        {"nested": True, "blocksize": 256},
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True},
        "NF4",
    ),
    "fp4": (four_bit, {"kind": "fp4"}, {"quant_method": "bitsandbytes", "load_in_4bit": True}, "FP4"),
    "mlx 4 bits": (mlx, {"bits": 4, "group_size": 64}, {"bits": 4, "group_size": 64}, "Q4_1"),
    "mlx 5 bits": (mlx, {"bits": 5, "group_size": 32}, {"bits": 5, "group_size": 32}, "Q5_1"),
    "mlx 3 bits, f32 scales": (
        mlx,
        {"bits": 3, "group_size": 128, "dtype": torch.float32},
        {"bits": 3, "group_size": 128, "mode": "affine"},
        "W8M",
    ),
    "llm.int8": (llm_int8, {}, {"quant_method": "bitsandbytes", "load_in_8bit": True}, "W8S"),
}
