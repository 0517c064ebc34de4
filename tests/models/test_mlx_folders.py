"""Folders as mlx-lm writes them, quantized by MLX itself, against transformers with the weights that they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_more_families as more
import tiny_models
from checkpoints import logits_of
from safetensors.torch import load_file, save_file
from session_logits import load_for_logits, logits

from engine.errors import FormatError
from engine.formats import open_checkpoint
from engine.models import load_model

mx = pytest.importorskip("mlx.core")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": tiny_models.VOCAB,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
}
# All experts are used, so that no rounding chooses others.
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 64, "norm_topk_prob": True}
LATENT = {"kv_lora_rank": 64, "q_lora_rank": 64, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "rms_norm_eps": 0.01,
    "shared_expert_intermediate_size": 64,
}
FAMILIES = {
    "llama": ("Llama", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {}),
    "gemma3": ("Gemma3Text", {"sliding_window": 24}),
    "phi3": ("Phi3", {"pad_token_id": 0}),
    "qwen3_moe": ("Qwen3Moe", EXPERTS),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 4}),
    "deepseek": (
        "DeepseekV3",
        LATENT
        | {"num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 64}
        | {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "n_shared_experts": 1},
    ),
    "qwen3_next": ("Qwen3Next", LINEAR | EXPERTS | {"num_hidden_layers": 4}),
    "lfm2_moe": (
        "Lfm2Moe",
        {"num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 64, "num_dense_layers": 1}
        | {"layer_types": ["conv", "full_attention", "conv"], "norm_eps": 0.01, "tie_word_embeddings": True},
    ),
    "gemma4": (
        "Gemma4Text",
        EXPERTS
        | {"top_k_experts": 4, "enable_moe_block": True, "global_head_dim": 64, "sliding_window": 24}
        | {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4}
        | {"hidden_size_per_layer_input": 0, "tie_word_embeddings": True},
    ),
    "gpt_oss": ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 4, "sliding_window": 24}),
}
FORMS: dict[str, tuple[dict[str, Any], str]] = {
    "4 bits": ({"bits": 4, "group_size": 64}, "bfloat16"),
    "4 bits of f16": ({"bits": 4, "group_size": 32}, "float16"),
    "4 bits of f32": ({"bits": 4, "group_size": 64}, "float32"),
    "2 bits": ({"bits": 2, "group_size": 32}, "bfloat16"),
    "3 bits": ({"bits": 3, "group_size": 64}, "bfloat16"),
    "5 bits": ({"bits": 5, "group_size": 32}, "float16"),
    "6 bits": ({"bits": 6, "group_size": 64}, "bfloat16"),
    "8 bits": ({"bits": 8, "group_size": 32}, "bfloat16"),
    "mxfp4": ({"bits": 4, "group_size": 32, "mode": "mxfp4"}, "bfloat16"),
    "mxfp8": ({"bits": 8, "group_size": 32, "mode": "mxfp8"}, "bfloat16"),
    "nvfp4": ({"bits": 4, "group_size": 16, "mode": "nvfp4"}, "bfloat16"),
}
TOKENS = 40
CLOSE = 1e-3  # of logits of some units: sums in another order


def random_model(family: str) -> Any:
    name, changes = FAMILIES[family]
    torch.manual_seed(int(np.random.default_rng().integers(1 << 30)))
    config = getattr(transformers, f"{name}Config")(**(SIZES | changes), attn_implementation="eager")
    model = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")(config).eval().float()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            if "norm" in parameter_name:
                parameter.copy_(0.3 * noise + (0 if family in ("gemma3", "qwen3_next") else 1))
            elif parameter.ndim > 1:
                parameter.copy_(1.3 * noise / parameter.shape[-1] ** 0.5)
    return model


def stacked(tensors: dict[str, Any]) -> dict[str, Any]:
    """mlx-lm's names and layouts of what it does not keep as it is."""
    found: dict[str, Any] = {}
    experts: dict[str, dict[int, Any]] = {}
    for name, tensor in tensors.items():
        before, _, expert = name.partition(".experts.")
        if expert[:1].isdigit():
            number, part, _ = expert.split(".")
            part = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}.get(part, part)
            experts.setdefault(f"{before}.switch_mlp.{part}.weight", {})[int(number)] = tensor
        elif expert.startswith("gate_up_proj"):  # gpt-oss: in turn, and transposed
            turned = tensor if "bias" in expert else tensor.swapaxes(1, 2)
            ending = "bias" if "bias" in expert else "weight"
            for n, part in enumerate(("gate_proj", "up_proj")):
                found[f"{before}.experts.{part}.{ending}"] = turned[:, n::2]
        elif expert == "down_proj":
            found[f"{name}.weight"] = tensor.swapaxes(1, 2)
        elif expert == "down_proj_bias":
            found[f"{before}.experts.down_proj.bias"] = tensor
        else:
            found[name] = tensor
    return found | {name: torch.stack([one[e] for e in sorted(one)]) for name, one in experts.items()}


def gate_apart(tensors: dict[str, Any]) -> dict[str, Any]:
    """Of gemma4, which has the rows of each gate before those of its up."""
    found = {}
    for name, tensor in tensors.items():
        stem = name.removesuffix("gate_up_proj").removesuffix("down_proj")
        if name.endswith("experts.gate_up_proj"):
            for part, rows in zip(("gate", "up"), tensor.chunk(2, dim=1), strict=True):
                found[f"{stem}switch_glu.{part}_proj.weight"] = rows
        elif name.endswith("experts.down_proj"):
            found[f"{stem}switch_glu.down_proj.weight"] = tensor
        else:
            found[name] = tensor
    return found


def renamed(tensors: dict[str, Any]) -> dict[str, Any]:
    """Of lfm2_moe: layers without experts have the usual names, and its filters are turned."""
    found = {}
    for name, tensor in tensors.items():
        for own, usual in LFM2_NAMES.items():
            name = name.replace(own, usual)  # noqa: PLW2901
        found[name] = tensor.swapaxes(1, 2) if name.endswith("conv.conv.weight") else tensor
    return found


def latent_apart(tensors: dict[str, Any]) -> dict[str, Any]:
    """kv_b as it is absorbed."""
    found = {}
    for name, tensor in tensors.items():
        if not name.endswith("kv_b_proj.weight"):
            found[name] = tensor
            continue
        heads = tensor.reshape(4, -1, tensor.shape[-1])
        stem = name.removesuffix("kv_b_proj.weight")
        found[f"{stem}embed_q.weight"] = heads[:, : LATENT["qk_nope_head_dim"]].swapaxes(1, 2)
        found[f"{stem}unembed_out.weight"] = heads[:, LATENT["qk_nope_head_dim"] :]
    return found


def shifted(tensors: dict[str, Any]) -> dict[str, Any]:
    """Filters as [C, width, 1], and norms around 1."""
    found = {}
    for name, tensor in tensors.items():
        is_norm = name.endswith(("layernorm.weight", "model.norm.weight", "_norm.weight"))
        found[name] = tensor.swapaxes(1, 2) if name.endswith("conv1d.weight") else tensor + is_norm
    return found


LFM2_NAMES = {
    f"feed_forward.{own}.": f"feed_forward.{usual}_proj."
    for own, usual in zip(("w1", "w2", "w3"), ("gate", "down", "up"), strict=True)
}
OWN: dict[str, list[Callable[[dict[str, Any]], dict[str, Any]]]] = {
    "deepseek": [stacked, latent_apart],
    "qwen3_next": [stacked, shifted],
    "gemma4": [gate_apart],
    "lfm2_moe": [stacked, renamed],
}


STACKS = {"gpt_oss": "experts", "gemma4": "experts.switch_glu"}


def is_quantized(name: str, tensor: Any) -> bool:
    kept = (
        "norm",
        "conv1d",
        "conv.conv",
        "expert_bias",
        ".gate.weight",
        "router",
        "sinks",
        "shared_expert_gate",
        "A_log",
        "dt_bias",
    )
    return name.endswith(".weight") and tensor.ndim > 1 and not any(part in name for part in kept)


def quantized(tensor: Any, form: dict[str, Any], dtype: str) -> tuple[list[Any], Any]:
    """What MLX makes of it, and the values in f32."""
    parts = mx.quantize(mx.array(tensor.contiguous().numpy()).astype(getattr(mx, dtype)), **form)
    wide = [part if part.dtype in (mx.uint8, mx.uint32) else part.astype(mx.float32) for part in parts]
    plain = mx.dequantize(*wide, **form) if len(parts) == 3 else mx.dequantize(*wide, **form, dtype=mx.float32)
    return list(parts), torch.from_numpy(np.array(plain.astype(mx.float32)))


def in_torch(array: Any) -> Any:
    if array.dtype == mx.bfloat16:
        return torch.from_numpy(np.array(array.view(mx.uint16)).view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.array(array))


def write(model: Any, family: str, folder: Path, form: str, others: dict[str, str]) -> None:
    """The folder, and its values in the model. ``others``: ends of modules' names -> their forms."""
    original = folder / "original"
    model.save_pretrained(original)
    tensors = {name: tensor.float() for name, tensor in load_file(original / "model.safetensors").items()}
    for change in OWN.get(family, [stacked]):
        tensors = change(tensors)
    config = json.loads((original / "config.json").read_text())
    config["quantization"] = dict(FORMS[form][0])
    stored = {}
    for name, tensor in tensors.items():
        if not is_quantized(name, tensor):
            stored[name] = tensor.contiguous()
            continue
        stem = name.removesuffix(".weight")
        own = next((other for ending, other in others.items() if stem.endswith(ending)), form)
        if own != form:
            config["quantization"][stem] = FORMS[own][0]
        parts, tensors[name] = quantized(tensor, *FORMS[own])
        for ending, part in zip(("weight", "scales", "biases"), parts, strict=False):
            stored[f"{stem}.{ending}"] = in_torch(part)
    config["quantization_config"] = config["quantization"]
    save_file(stored, folder / "model.safetensors", {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    tiny_models.write_tokenizer(folder)
    model.load_state_dict(as_in_transformers(model, family, tensors), strict=False)


def as_in_transformers(model: Any, family: str, tensors: dict[str, Any]) -> dict[str, Any]:
    """mlx-lm's tensors in a model's own parameters."""
    state = model.state_dict()
    found = {name: tensors[name] for name in state if name in tensors}
    if family == "lfm2_moe":
        for own, usual in LFM2_NAMES.items():
            found |= {name: tensors[name.replace(own, usual)] for name in state if own in name}
        found |= {n: t.swapaxes(1, 2) for n, t in found.items() if n.endswith("conv.conv.weight")}
    if family == "qwen3_next":
        found |= {n: t.swapaxes(1, 2) for n, t in found.items() if n.endswith("conv1d.weight")}
        norms = ("layernorm.weight", "model.norm.weight", "_norm.weight")
        found |= {n: t - 1 for n, t in found.items() if n.endswith(norms)}
    for name in state:
        stem = name.rpartition(".experts.")[0] or name.rpartition(".kv_b_proj")[0]
        before = f"{stem}.{STACKS.get(family, 'switch_mlp')}"
        if family == "mixtral":
            before = before.replace("mlp.", "block_sparse_moe.", 1)
        if name.endswith("experts.gate_up_proj"):
            gate, up = (tensors[f"{before}.{part}_proj.weight"] for part in ("gate", "up"))
            if family == "gpt_oss":
                found[name] = torch.stack([gate, up], dim=2).reshape(len(gate), -1, gate.shape[-1]).swapaxes(1, 2)
            else:
                found[name] = torch.cat([gate, up], dim=1)
        elif name.endswith("experts.down_proj"):
            down = tensors[f"{before}.down_proj.weight"]
            found[name] = down.swapaxes(1, 2) if family == "gpt_oss" else down
        elif name.endswith("kv_b_proj.weight") and name not in tensors:
            parts = tensors[f"{stem}.embed_q.weight"].swapaxes(1, 2), tensors[f"{stem}.unembed_out.weight"]
            found[name] = torch.cat(parts, dim=1).reshape(state[name].shape)
    return found


def sequence() -> list[int]:
    return np.random.default_rng().permutation(np.arange(3, tiny_models.VOCAB))[:TOKENS].tolist()


CASES = [("qwen3", form) for form in FORMS]
CASES += [(family, "4 bits") for family in FAMILIES if family != "qwen3"]
CASES += [("gpt_oss", "mxfp4"), ("qwen3_moe", "nvfp4"), ("qwen3_moe", "8 bits")]


@pytest.mark.parametrize(("family", "form"), CASES)
def test_logits_are_those_of_transformers(family, form, tmp_path):
    model = random_model(family)
    write(model, family, tmp_path, form, {"down_proj": "8 bits", "lm_head": "6 bits", "embed_tokens": form})
    ids = sequence()
    want = logits_of(model, ids)
    assert np.abs(want).max() > 1
    got = logits(load_for_logits(tmp_path, "reference"), ids, (TOKENS - 7, 1, 6))
    np.testing.assert_allclose(got, want, rtol=0, atol=CLOSE)


def test_a_model_that_sees(tmp_path):
    """Settings of modules have the names that these have in the whole."""
    write(random_model("qwen3"), "qwen3", tmp_path, "4 bits", {"down_proj": "8 bits", "lm_head": "6 bits"})
    ids = sequence()
    want = logits(load_for_logits(tmp_path, "reference"), ids, (TOKENS,))
    config = json.loads((tmp_path / "config.json").read_text())
    own = {f"language_model.{k}" if isinstance(v, dict) else k: v for k, v in config.pop("quantization").items()}
    del config["quantization_config"]
    whole = {"model_type": "qwen3_vl", "text_config": config | {"model_type": "qwen3_vl_text"}, "quantization": own}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    tensors = {f"language_model.{name}": tensor for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    save_file(tensors | {"vision_tower.a": torch.ones(2)}, tmp_path / "model.safetensors")
    np.testing.assert_array_equal(logits(load_for_logits(tmp_path, "reference"), ids, (TOKENS,)), want)


@pytest.mark.parametrize("form", FORMS)
def test_devices_run_them(form, tmp_path, backend):
    model = random_model("llama")
    write(model, "llama", tmp_path, form, {})
    ids = sequence()
    want = logits(load_for_logits(tmp_path, "reference"), ids, (TOKENS,))
    got = logits(load_for_logits(tmp_path, backend, strict=backend == "cpu"), ids, (TOKENS - 7, 1, 6))
    assert np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2)) < 0.05


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5"])
def test_folders_in_full_precision_have_norms_around_one_too(family, tmp_path):
    model = random_model(family) if family in FAMILIES else more.model_of(family)
    model.save_pretrained(tmp_path)
    ids = sequence()
    want = logits_of(model, ids)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({n: t.contiguous() for n, t in shifted(stacked(tensors)).items()}, tmp_path / "model.safetensors")
    tiny_models.write_tokenizer(tmp_path)
    np.testing.assert_allclose(logits(load_for_logits(tmp_path, "reference"), ids, (TOKENS,)), want, rtol=0, atol=CLOSE)


def test_multipliers_in_the_weights_are_refused(tmp_path):
    more.model_of("falcon_h1").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({n: t.contiguous() for n, t in shifted(tensors).items()}, tmp_path / "model.safetensors")
    with pytest.raises(FormatError, match=r"written by mlx-lm, with the multipliers .*\.$"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"bits": 3}, "no whole groups of 64 numbers of 3 bits"),
        ({"bits": 7}, "bits"),
        ({"group_size": 48}, "group_size"),
        ({"bits": 8}, "scales"),
        ({"model.layers.0.mlp.up_proj": {"bits": 8, "group_size": 64}}, "up_proj.scales"),
    ],
)
def test_settings_that_do_not_fit_are_refused(change, said, tmp_path):
    write(random_model("qwen3"), "qwen3", tmp_path, "4 bits", {})
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization"] |= change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(FormatError, match=said) as caught:
        open_checkpoint(tmp_path)
    assert str(caught.value).endswith(".")


def test_a_weight_without_scales_is_refused(tmp_path):
    write(random_model("qwen3"), "qwen3", tmp_path, "4 bits", {})
    stored = load_file(tmp_path / "model.safetensors")
    del stored["model.layers.0.mlp.up_proj.scales"]
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(FormatError, match="is stored as U32"):
        load_model(open_checkpoint(tmp_path))
