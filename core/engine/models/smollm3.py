"""SmolLM3: Llama's shape, with no positions on every fourth layer (arXiv 2501.18795)."""

from __future__ import annotations

from dataclasses import replace

from ..errors import ModelError
from ..formats import Checkpoint
from .decoder import DecoderConfig
from .fields import integer
from .llama import HF_NAMES, build

__all__ = ["HF_DEFAULTS", "HF_NAMES", "build", "configure"]

HF_DEFAULTS = {
    "max_position_embeddings": 32768,
    "rope_theta": 2000000.0,
    "num_key_value_heads": 4,
    "use_sliding_window": False,
}
_EVERY = 4


def configure(c: DecoderConfig, checkpoint: Checkpoint) -> DecoderConfig:
    """GGUF files have no key for which layers have none."""
    data = checkpoint.metadata if checkpoint.kind == "hf" else {}
    every = integer(data, "no_rope_layer_interval", _EVERY)
    used = data.get("no_rope_layers")
    if used is None:
        used = [int((i + 1) % every != 0) for i in range(c.layers)]
    if not isinstance(used, list) or len(used) != c.layers or any(one not in (0, 1) for one in used):
        raise ModelError(f"The configuration's no_rope_layers must be 1 or 0 for each of {c.layers} layers.")
    return replace(c, without_rope=tuple(i for i, one in enumerate(used) if not one))
