"""How the makers of a model would have it sampled: generation_config.json, or GGUF's general.sampling keys."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

GGUF_KEYS = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}
"""Sampling parameters by the names of ``SamplingParams``, which are Hugging Face's, with their keys in GGUF files."""
_MOST_F32 = float(np.finfo(np.float32).max)
_RANGES = {
    "temperature": (0.0, 10.0),
    "top_k": (0, 1 << 20),
    "top_p": (1e-6, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 10.0),
}


def of_generation_config(config: Mapping[str, Any]) -> dict[str, float]:
    """Of generation_config.json's contents; what is missing or makes no sense is left out."""
    return _sensible({name: config.get(name) for name in _RANGES})


def of_gguf(metadata: Mapping[str, Any]) -> dict[str, float]:
    """Of a GGUF's keys; what is missing or makes no sense is left out."""
    return _sensible({name: _as_written(metadata.get(key)) for name, key in GGUF_KEYS.items()})


def _as_written(value: Any) -> Any:
    """The shortest decimal of an f32, such as 0.3 of 0.30000001192092896; all else as it is."""
    if (
        isinstance(value, float)
        and math.isfinite(value)
        and abs(value) <= _MOST_F32
        and float(np.float32(value)) == value
    ):
        return float(str(np.float32(value)))
    return value


def _sensible(values: Mapping[str, Any]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, value in values.items():
        least, most = _RANGES[name]
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if number and least <= value <= most:
            found[name] = int(value) if name == "top_k" else float(value)
    return found
