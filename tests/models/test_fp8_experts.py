"""Folders in fp8 that keep all experts of a layer in one tensor, and the steps of activations beside the weights, as Mistral's
do, against transformers with the weights that they stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
from checkpoints import SIZES, logits_of
from session_logits import load_for_logits, logits

from engine.errors import FormatError, ModelError
from engine.formats import open_checkpoint

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from safetensors.torch import load_file, save_file  # noqa: E402 -- of torch

EXPERTS = 8
MISTRAL = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 64,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": EXPERTS,  # all, so that no rounding chooses others
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "llama_4_scaling_beta": 0.1,
    },
    "pad_token_id": 0,
}
# name -> (rows and columns of a block or None, the shape of a layer's scales of gate and up where there are no blocks)
LAYOUTS: dict[str, tuple[tuple[int, int] | None, tuple[int, ...]]] = {
    "one an expert": (None, (EXPERTS, 1, 1)),
    "one an expert, flat": (None, (EXPERTS,)),
    "one each of gate and up": (None, (EXPERTS, 2, 1)),
    "blocks": ((32, 32), ()),
    "blocks that end early": ((48, 64), ()),
    "blocks, powers of two": ((32, 32), ()),
}


def random_model(kind: str = "Mistral4", sizes: dict[str, Any] = MISTRAL) -> Any:
    config = getattr(transformers, f"{kind}Config")(**(SIZES | sizes), attn_implementation="eager")
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval().float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.from_numpy(np.random.default_rng().standard_normal(parameter.shape, np.float32))
            parameter.copy_(1 + 0.3 * noise if "norm" in name else 1.3 * noise / parameter.shape[-1] ** 0.5)
    return model


def in_fp8(
    weight: Any, block: tuple[int, int] | None, shape: tuple[int, ...] = (), powers: bool = False
) -> tuple[Any, Any, Any]:
    """Codes, scales and what they stand for: of blocks, or of as many parts as a scale's shape says. ``powers``: of two."""
    *experts, rows, columns = weight.shape
    parts = shape[1] if len(shape) > 1 else 1
    high, wide = block or (rows // parts, columns)
    scales = torch.zeros(*experts, -(-rows // high), -(-columns // wide))
    each = torch.zeros_like(weight)
    for row in range(scales.shape[-2]):
        for column in range(scales.shape[-1]):
            own = (..., slice(row * high, (row + 1) * high), slice(column * wide, (column + 1) * wide))
            scale = weight[own].abs().amax(dim=(-2, -1)) / 448
            scale = scale.log2().ceil().exp2() if powers else scale
            scales[..., row, column] = scale
            each[own] = scale[..., None, None]
    codes = (weight / each).to(torch.float8_e4m3fn)
    return codes, scales if block else scales.reshape(shape), codes.float() * each


def write(model: Any, folder: Path, layout: str) -> Any:
    """The folder; what it stands for is put into the model, which is given back."""
    block, shape = LAYOUTS[layout]
    model.save_pretrained(folder)
    stored, values = {}, {}
    for name, weight in load_file(folder / "model.safetensors").items():
        fused = name.endswith(("gate_up_proj", "down_proj"))
        if not fused and not name.endswith("_proj.weight"):
            stored[name] = values[name] = weight
            continue
        own = (EXPERTS, *[1] * (len(shape) - 1)) if fused and "down" in name else shape
        codes, scales, values[name] = in_fp8(weight, block, own if fused else (), "powers" in layout)
        scales = scales.to(torch.float8_e8m0fnu) if "powers" in layout else scales
        step = torch.full((EXPERTS,), 0.02) if fused else torch.tensor(0.02)
        before = name.removesuffix("weight") if not fused else f"{name}_"
        stored |= {name: codes, f"{name}_scale_inv": scales, f"{before}activation_scale": step}
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    blocks = None if block is None else list(block)
    config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": blocks}
    config["quantization_config"]["scale_fmt"] = "ue8m0"  # of activations: the stored scales are floats
    (folder / "config.json").write_text(json.dumps(config))
    tiny_models.write_tokenizer(folder)
    model.load_state_dict(values)
    return model


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_are_those_of_transformers(layout, tmp_path, backend):
    model = write(random_model(), tmp_path, layout)
    ids = np.random.default_rng().permutation(np.arange(3, tiny_models.VOCAB))[:40].tolist()
    want = logits_of(model, ids)
    loaded = load_for_logits(tmp_path, backend, strict=backend == "cpu")
    for chunks in ((40,), (25, 1, 1, 13)):
        np.testing.assert_allclose(logits(loaded, ids, chunks), want, rtol=0, atol=1e-3)
    assert np.abs(want).max() > 1


def write_turned(model: Any, folder: Path, block: tuple[int, int]) -> None:
    """The experts transposed and in fp8, the rest as it is; what they stand for is put into the model."""
    model.save_pretrained(folder)
    stored = {}
    for name, weight in model.state_dict().items():
        stored[name] = weight
        if name.endswith(("gate_up_proj", "down_proj")):
            turned = weight.swapaxes(1, 2).contiguous()
            stored[name], stored[f"{name}_scale_inv"], values = in_fp8(turned, block)
            weight.copy_(values.swapaxes(1, 2))
    save_file(stored, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": list(block)}
    (folder / "config.json").write_text(json.dumps(config))
    tiny_models.write_tokenizer(folder)


QWEN = {"num_experts": EXPERTS, "num_experts_per_tok": EXPERTS, "moe_intermediate_size": 32, "head_dim": 16}


def test_experts_that_lie_transposed(tmp_path, backend):
    """As those of Qwen3-VL in plain numbers do."""
    model = random_model("Qwen3Moe", QWEN)
    with torch.no_grad():
        write_turned(model, tmp_path, (32, 32))
    ids = np.random.default_rng().permutation(np.arange(3, tiny_models.VOCAB))[:40].tolist()
    want = logits_of(model, ids)
    got = logits(load_for_logits(tmp_path, backend, strict=backend == "cpu"), ids, (40,))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-3)
    assert np.abs(want).max() > 1


def test_transposed_blocks_that_are_too_low_are_refused(tmp_path):
    with torch.no_grad():
        write_turned(random_model("Qwen3Moe", QWEN), tmp_path, (16, 32))
    with pytest.raises(ModelError, match="scales that differ within 32"):
        load_for_logits(tmp_path, "reference")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"gate_up_proj_scale_inv": torch.ones(EXPERTS, 3, 1)}, "must be F16 or BF16 or F32"),
        ({"gate_up_proj_scale_inv": torch.full((EXPERTS, 1, 1), float("nan"))}, "scale"),
        ({"gate_up_proj_activation_scale": torch.ones(3)}, "activation_scale"),
        ({"gate_up_proj_scale_inv": None}, "gives it a scale"),
    ],
)
def test_what_does_not_fit_is_refused(change, said, tmp_path):
    write(random_model(), tmp_path, "one an expert")
    stored = load_file(tmp_path / "model.safetensors")
    for name, tensor in change.items():
        stored.pop(f"model.layers.0.mlp.experts.{name}")
        if tensor is not None:
            stored[f"model.layers.0.mlp.experts.{name}"] = tensor
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(FormatError, match=said) as caught:
        open_checkpoint(tmp_path)
    assert str(caught.value).endswith(".")
