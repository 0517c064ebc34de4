"""Tiny random checkpoints of every family, made and judged by transformers."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": tiny_models.VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
# name -> (transformers' class, what differs from SIZES)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama one KV head each, tied": ("Llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama four heads a KV head, wide": ("Llama", {"num_key_value_heads": 1, "head_dim": 32}),
    "llama 3 rope, tied": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama 3 rope, narrow": ("Llama", {"rope_parameters": LLAMA3, "head_dim": 8}),
    "llama linear rope": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}),
    "llama biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("Qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}}),
    "qwen2 tied": ("Qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3 tied": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True, "num_key_value_heads": 4}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}


@cache
def model_of(family: str) -> Any:
    """transformers' model in f32 with every parameter random, norms and biases too."""
    name, changes = FAMILIES[family]
    torch.manual_seed(sum(family.encode()))
    config = getattr(transformers, f"{name}Config")(**(SIZES | changes))
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval().float()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:
                parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
            elif parameter_name.endswith("bias"):
                parameter.copy_(0.5 * torch.randn_like(parameter))
            else:
                parameter.copy_(1.5 * torch.randn_like(parameter) / parameter.shape[-1] ** 0.5)
    return model


def save(family: str, folder: Path, **settings: Any) -> Path:
    """The family's checkpoint with a tokenizer."""
    return save_model(model_of(family), folder, **settings)


def save_model(model: Any, folder: Path, **settings: Any) -> Path:
    model.save_pretrained(folder, **settings)
    tiny_models.write_tokenizer(folder)
    return folder


def saved_once(model_of: Callable[[str], Any]) -> Any:
    """A fixture: name -> the folder of ``model_of(name)`` with a tokenizer, made when it is first asked for."""

    @pytest.fixture(scope="session")
    def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
        return cache(lambda name: save_model(model_of(name), tmp_path_factory.mktemp("hf")))

    return saved


def logits_of(model: Any, ids: list[int]) -> np.ndarray:
    """transformers' logits f32 [len(ids), V]."""
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].numpy()


@cache
def nudged(model: Any) -> tuple[Any, ...]:
    """The model six times more, its weights moved by some two millionths of themselves: what that does to a token's logits is
    what sums in another order may do. Of two experts that are tied as nearly as that each nudge chooses one or the other."""
    models = tuple(deepcopy(model) for _ in range(6))
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in (p for one in models for p in one.parameters()):
            parameter.mul_(1 + 2**-19 * torch.randn(parameter.shape, generator=random))
    return models


def assert_logits(got: np.ndarray, model: Any, ids: list[int], note: str = "") -> None:
    """``got`` f32 [len(ids), V] are transformers' logits within 2e-4, and for tokens that depend on rounding within its part."""
    want = logits_of(model, ids)
    assert np.abs(want).max() > 1, "these logits are too small for the tolerance to mean anything"
    moved = np.max([np.abs(logits_of(other, ids) - want).max(axis=1) for other in nudged(model)], axis=0)
    routed = any("expert" in name for name, _ in model.named_parameters())  # two nearly tied move all that follows
    assert routed or np.median(moved) < 1e-2, "this model depends on rounding so much that its logits show nothing"
    error = np.abs(got - want).max(axis=1)
    wrong = np.flatnonzero(~(error <= np.maximum(2e-4, moved)))
    assert not len(wrong), f"{note} {ids}: {error[wrong]} off at {wrong}, where nudges move {moved[wrong]}"


def in_half(model: Any) -> Any:
    """A copy of the model with its matrices rounded to f16."""
    copy = type(model)(model.config).eval().float()
    rounded = {name: value.half().float() if value.ndim > 1 else value for name, value in model.state_dict().items()}
    copy.load_state_dict(rounded)
    return copy
