"""Rotary position embedding: inverse frequencies and their scalings, from either format's keys."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..backend.v1 import Array
from ..errors import ModelError
from .fields import integer, positive


@dataclass(frozen=True)
class Rope:
    """``inv_freq`` f32 [rotary / 2]; ``scale`` multiplies cosine and sine; ``interleaved`` pairs (2i, 2i+1) rather than
    halves."""

    inv_freq: Array
    interleaved: bool
    scale: float = 1.0


def base_frequencies(rotary: int, theta: float) -> Array:
    """theta^(-2i/rotary), in f32 (RoFormer, arXiv 2104.09864)."""
    return (1.0 / (theta ** (np.arange(0, rotary, 2, dtype=np.float64) / rotary))).astype(np.float32)


def llama3_factors(inv_freq: Array, factor: float, low: float, high: float, original: int) -> Array:
    """Divisors of Llama 3.1's scaling: none for short wavelengths, ``factor`` for long ones, smooth between."""
    wavelength = 2 * math.pi / inv_freq.astype(np.float64)
    smooth = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
    return (1.0 / ((1 - smooth) / factor + smooth)).astype(np.float32)


def rope_from_hf(config: Mapping[str, Any], rotary: int) -> Rope:
    """From config.json: ``rope_theta`` and ``rope_scaling``, or ``rope_parameters`` of newer files."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise ModelError(f"The configuration's rope scaling is {scaling!r}; it must be an object with a rope_type.")
    theta = positive(scaling, "rope_theta", positive(config, "rope_theta", 10000.0))
    inv_freq = base_frequencies(rotary, theta)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return Rope(inv_freq, interleaved=False)
    if kind == "linear":
        return Rope(inv_freq / np.float32(positive(scaling, "factor")), interleaved=False)
    if kind == "llama3":
        original = integer(scaling, "original_max_position_embeddings")
        low, high = positive(scaling, "low_freq_factor"), positive(scaling, "high_freq_factor")
        if low >= high:
            raise ModelError(f"The rope scaling's low_freq_factor {low} must be below its high_freq_factor {high}.")
        factors = llama3_factors(inv_freq, positive(scaling, "factor"), low, high, original)
        return Rope(inv_freq / factors, interleaved=False)
    raise ModelError(f"Rope scaling {kind!r} is not supported; default, linear and llama3 are.")


def rope_from_gguf(
    metadata: Mapping[str, Any], arch: str, rotary: int, factors: Array | None, interleaved: bool
) -> Rope:
    """From GGUF keys; ``factors`` is the tensor rope_freqs.weight, which carries Llama 3's scaling as divisors."""
    inv_freq = base_frequencies(rotary, positive(metadata, f"{arch}.rope.freq_base", 10000.0))
    kind = metadata.get(f"{arch}.rope.scaling.type", "none")
    if kind == "linear":
        inv_freq = inv_freq / np.float32(positive(metadata, f"{arch}.rope.scaling.factor"))
    elif kind not in ("none", ""):
        raise ModelError(f"Rope scaling {kind!r} is not supported; none and linear are.")
    if factors is not None:
        if factors.shape != inv_freq.shape:
            raise ModelError(f"rope_freqs.weight has {factors.size} numbers, but this model needs {inv_freq.size}.")
        if not (np.isfinite(factors) & (factors > 0)).all():
            raise ModelError("rope_freqs.weight must hold positive numbers alone.")
        inv_freq = inv_freq / factors
    return Rope(inv_freq, interleaved)
