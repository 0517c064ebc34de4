"""Folders of models that take more than text (transformers' Gemma3ForConditionalGeneration and its like): their language model
alone. Its configuration is the object text_config, its tensors have a prefix of their own, and the towers are left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.errors import FormatError
from engine.formats.checkpoint import Tensor

_TEXT_CONFIG = "text_config"
# The model_type of each, where its text_config does not say.
_TYPES: Mapping[str, str] = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "kimi_k25": "deepseek_v3",
    "mistral3": "mistral",
    "qwen2_vl": "qwen2_vl_text",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
_FLAT = ("qwen2_vl", "qwen2_5_vl")
"""Those whose first files have no text_config, but its keys among their own."""
_KEPT = ("bos_token_id", "eos_token_id", "quantization", "quantization_config", "tie_word_embeddings")
"""Keys of the whole that hold for its language model, too."""
_PREFIXES = ("language_model.", "model.language_model.")
_TOWERS = (
    "vision_tower.",
    "multi_modal_projector.",
    "mm_projector.",
    "visual.",
    "model.vision_tower.",
    "model.multi_modal_projector.",
    "model.mm_projector.",
    "model.visual.",
    "model.audio_tower.",
    "model.embed_vision.",
    "model.embed_audio.",
)


def text_config(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The configuration of the language model in a model of more than text; None where ``config`` is of text alone."""
    whole = str(config.get("model_type"))
    own, kind = config.get(_TEXT_CONFIG), _TYPES.get(whole)
    if own is None and whole in _FLAT:
        own = {key: value for key, value in config.items() if key not in ("model_type", "vision_config")}
    if kind is None or not isinstance(own, Mapping):
        return None
    kept = {key: config[key] for key in _KEPT if config.get(key) is not None}
    return {"model_type": kind, **own, **kept}


def text_tensors(tensors: Mapping[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """The language model's tensors by the names that they have where there is nothing else."""
    found: dict[str, Tensor] = {}
    for old, tensor in tensors.items():
        name = plain_name(old)
        if name in found:
            raise FormatError(f"{folder} holds the tensor {name} under two names; {old} is one of them.")
        if not old.startswith(_TOWERS):
            found[name] = replace(tensor, name=name)
    return found


def plain_name(name: str) -> str:
    """That of the language model alone."""
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            rest = name.removeprefix(prefix)
            return rest if prefix == _PREFIXES[0] else f"model.{rest}"
    return name
