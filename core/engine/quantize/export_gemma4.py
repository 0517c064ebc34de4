"""Gemma 4's keys in GGUF files: a number a layer where its layers differ."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.models import Model
from engine.models.gemma4 import Gemma4Config

STILL = 1e30
"""The divisor of a rotary frequency that is to be 0."""


def gemma4_keys(model: Model, c: Gemma4Config) -> dict[str, Any]:
    """Beyond the keys of all decoders, without the architecture."""
    local = [c.window(i) > 0 for i in range(c.layers)]
    ups = (model.weight(f"blk.{i}.ffn_up.weight") for i in range(c.layers))
    assert c.local_rope is not None
    return {
        "feed_forward_length": _of_layers([c.mlp if up is None else up.shape[0] for up in ups]),
        "attention.head_count_kv": _of_layers([c.local_kv_heads if has else c.kv_heads for has in local]),
        "attention.key_length_swa": c.local_head_dim,
        "attention.value_length_swa": c.local_head_dim,
        "attention.sliding_window_pattern": np.array(local),
        "attention.shared_kv_layers": c.readers,
        "embedding_length_per_layer_input": c.own_inputs,
        "rope.dimension_count_swa": 2 * c.local_rope.inv_freq.size,
    }


def _of_layers(numbers: list[int]) -> Any:
    return np.array(numbers, np.int32) if len(set(numbers)) > 1 else numbers[0]
