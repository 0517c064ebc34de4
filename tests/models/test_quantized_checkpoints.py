"""Whole Hugging Face checkpoints in each quantized format against transformers with the weights that they stand for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import tiny_models
from checkpoints import SIZES, logits_of
from hf_quantizers import METHODS
from safetensors.torch import load_file, save_file
from session_logits import load_for_logits, logits

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

WIDE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
LATENT = {"kv_lora_rank": 128, "q_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64}
FAMILIES = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {"num_key_value_heads": 1}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "phi3": ("Phi3", {"pad_token_id": 0}),
    "deepseek": ("DeepseekV3", LATENT | {"num_key_value_heads": 4, "first_k_dense_replace": 2}),
}
EXACT = 2e-4  # absolute, where activations are not rounded
SAME = 5e-4  # sums in another order; steps that are not those of the other side make a hundred times as much
ROUNDED = 0.05  # of the logits, relative: what activations of 8 bits make of these models; wrong weights give about 1
STEP = 0.03  # of static activations
UNFUSED = {"self_attn.q_proj": 0, "self_attn.k_proj": 0, "self_attn.v_proj": 0, "self_attn.o_proj": 1}
UNFUSED |= {"mlp.gate_proj": 2, "mlp.up_proj": 2, "mlp.down_proj": 3}


def random_model(family: str, rng: np.random.Generator) -> Any:
    """transformers' model in f32, every parameter random."""
    name, changes = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**(SIZES | WIDE | changes))
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval().float()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            drawn = torch.from_numpy(rng.standard_normal(parameter.shape, np.float32))
            scaled = 1 + 0.3 * drawn if "norm" in parameter_name else 1.5 * drawn / parameter.shape[-1] ** 0.5
            parameter.copy_(scaled)
    return model


def quantized(model: Any, folder: Path, rng: np.random.Generator, method: str, shared_order: bool = False) -> Any:
    """Writes the model with its linear layers quantized, but for the head and routers, and gives a copy of the model with
    the values that the written weights stand for. ``shared_order``: layers on one input have one act-order."""
    quantize, how, settings, _ = METHODS[method]
    original = folder / "original"
    model.save_pretrained(original)
    stored, values = {}, {}
    orders: dict[tuple[str, int], np.ndarray] = {}
    for name, weight in load_file(original / "model.safetensors").items():
        stem, matrix = name.removesuffix(".weight"), weight.numpy()
        linear = stem.endswith(("_proj", ".w1", ".w2", ".w3"))
        if not linear:
            stored[name], values[name] = weight, matrix
            continue
        more = {}
        if shared_order:
            layer, _, part = stem.removeprefix("model.layers.").partition(".")
            key = (layer, UNFUSED[part])
            more["order"] = orders.setdefault(key, rng.permutation(matrix.shape[1]))
        parts, values[name] = quantize(stem, matrix, rng, **how, **more)
        stored |= parts
    config = json.loads((original / "config.json").read_text()) | {"quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: value.contiguous() for name, value in stored.items()}, folder / "model.safetensors")
    tiny_models.write_tokenizer(folder)
    rewritten = folder / "rewritten"
    model.config.save_pretrained(rewritten)
    save_file(
        {n: torch.from_numpy(v.copy()) for n, v in values.items()}, rewritten / "model.safetensors", {"format": "pt"}
    )
    return type(model).from_pretrained(rewritten, dtype=torch.float32).eval()


def rounds_inputs(model: Any, step: float | None, others: Mapping[str, float] = MappingProxyType({})) -> Any:
    """The model with the inputs of its quantized layers rounded as compressed-tensors does: to 256 steps of the row's
    absmax, or of ``step``, or of the step that ``others`` has for the end of a layer's name."""

    def rounded(step: float | None, module: Any, inputs: tuple[Any, ...]) -> Any:
        x = inputs[0]
        scale = step if step is not None else x.abs().amax(dim=-1, keepdim=True) / 127.5
        return (torch.clamp(torch.round(x / scale), -128, 127) * scale,)

    model = deepcopy(model)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            own = others.get(name.rpartition(".")[2], step)
            module.register_forward_pre_hook(partial(rounded, own))
    return model


def relative(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2)))


def least(got: np.ndarray, want: np.ndarray) -> float:
    """The error of the best token."""
    return min(relative(g, w) for g, w in zip(got, want, strict=True))


def sequence(rng: np.random.Generator) -> list[int]:
    """Distinct tokens: two alike at the beginning have one value, whatever their keys."""
    return rng.permutation(np.arange(3, tiny_models.VOCAB))[:29].tolist()


def is_exact(backend: str, form: str) -> bool:
    """Whether the backend computes this format without rounding activations."""
    return backend == "reference" or form in ("FP8", "NF4", "FP4")


CASES = [(method, "qwen3" if n % 2 else "llama") for n, method in enumerate(METHODS) if not method.startswith("w8a8")]
CASES += [("awq", "phi3"), ("fp8 blocks", "phi3"), ("nf4", "phi3"), ("gptq act-order", "phi3")]
CASES += [
    ("awq", "mixtral"),
    ("fp8 blocks", "mixtral"),
    ("nf4", "mixtral"),
    ("gptq", "mixtral"),
    ("nvfp4 modelopt", "mixtral"),
]
CASES += [("awq", "deepseek"), ("fp8 blocks", "deepseek"), ("nf4", "deepseek"), ("gptq", "deepseek")]


@pytest.mark.parametrize(("method", "family"), CASES)
def test_weights_alone_quantized(tmp_path, backend, method, family):
    rng = np.random.default_rng(11 if family == "mixtral" else None)  # near ties of two experts
    model = quantized(random_model(family, rng), tmp_path, rng, method)
    ids = sequence(rng)
    want = logits_of(model, ids)
    assert np.abs(want).max() > 1
    loaded = load_for_logits(tmp_path, backend, strict=backend == "cpu")
    for chunks in ((29,), (16, 1, 1, 11)):
        got = logits(loaded, ids, chunks)
        if is_exact(backend, METHODS[method][3]):
            np.testing.assert_allclose(got, want, rtol=0, atol=EXACT)
        else:
            # rounding turns near ties of experts, in some rows of a mixture
            rows = [relative(g, w) for g, w in zip(got, want, strict=True)]
            assert (np.median(rows) if family == "mixtral" else relative(got, want)) < ROUNDED


@pytest.mark.parametrize("method", [method for method in METHODS if method.startswith("w8a8")])
def test_activations_are_rounded_as_the_checkpoint_says(tmp_path, backend, method):
    rng = np.random.default_rng()
    plain = quantized(random_model("llama", rng), tmp_path, rng, method)
    static = method == "w8a8 static"
    model = rounds_inputs(plain, STEP if static else None)
    texts = [sequence(rng) for _ in range(4)]
    want, unrounded = (np.concatenate([logits_of(m, ids) for ids in texts]) for m in (model, plain))
    loaded = load_for_logits(tmp_path, backend, strict=backend == "cpu")
    got = np.concatenate([logits(loaded, ids, (29,)) for ids in texts])
    if static or backend != "cpu":  # to the last bits, up to a text's first number between two steps
        assert least(got, want) < SAME < least(unrounded, want)
        assert relative(got, want) < ROUNDED
    else:  # finer steps than a row's: nearer to no rounding at all
        assert relative(got, unrounded) < min(relative(want, unrounded), ROUNDED)


def test_layers_on_one_input_may_have_different_steps(tmp_path, backend):
    rng = np.random.default_rng()
    plain = quantized(random_model("llama", rng), tmp_path, rng, "w8a8 static")
    path = tmp_path / "model.safetensors"
    stored = load_file(path)
    for name in stored:
        if name.endswith("k_proj.input_scale"):
            stored[name] *= 3
    save_file(stored, path)
    texts = [sequence(rng) for _ in range(4)]
    steps: list[dict[str, float]] = [{"k_proj": 3 * STEP}, {}]
    want, alike = (np.concatenate([logits_of(rounds_inputs(plain, STEP, s), ids) for ids in texts]) for s in steps)
    loaded = load_for_logits(tmp_path, backend, strict=backend == "cpu")
    got = np.concatenate([logits(loaded, ids, (29,)) for ids in texts])
    seen = np.arange(len(got)) % 29 > 0  # a first token has one key, whose steps do not matter
    assert least(got[seen], want[seen]) < SAME < least(alike[seen], want[seen])
    assert relative(got, want) < ROUNDED


def test_layers_on_one_input_share_its_order(tmp_path, cpu):
    rng = np.random.default_rng()
    model = quantized(random_model("llama", rng), tmp_path, rng, "gptq act-order", shared_order=True)
    ids = sequence(rng)
    loaded = load_for_logits(tmp_path, "cpu", strict=True)
    ops = [placed.call.op for placed in loaded.placement.body]
    assert ops.count("gather_columns") == 4 * 2 and ops.count("linear_group") == 2 * 2
    assert relative(logits(loaded, ids, (29,)), logits_of(model, ids)) < ROUNDED


def test_static_steps_and_act_order_of_experts_are_refused(tmp_path, cpu):
    from engine.errors import ModelError

    rng = np.random.default_rng()
    for method in ("w8a8 static", "gptq act-order"):
        folder = tmp_path / method
        folder.mkdir()
        quantized(random_model("mixtral", rng), folder, rng, method)
        with pytest.raises(ModelError, match="supported for single matrices"):
            load_for_logits(folder, "cpu")
