"""Rotary position embedding: inverse frequencies and their scalings, from either format's keys.

Two scalings depend on the length of a sequence. Frequencies are fixed when a model is loaded, so that cached keys stay
valid: what counts here is the longest sequence that may come (``length``), not the one at hand.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..backend.v1 import Array
from ..errors import ModelError
from ..formats import Checkpoint
from .fields import flag, integer, positive, text


@dataclass(frozen=True)
class Rope:
    """``inv_freq`` f32 [rotary / 2]; ``scale`` multiplies cosine and sine; ``interleaved`` pairs (2i, 2i+1) rather than
    halves."""

    inv_freq: Array
    interleaved: bool
    scale: float = 1.0


def base_frequencies(rotary: int, theta: float) -> Array:
    """theta^(-2i/rotary), in f32 (RoFormer, arXiv 2104.09864). ModelError for an odd number of dimensions, or none."""
    if rotary < 2 or rotary % 2:
        raise ModelError(
            f"The rotary embedding covers {rotary} dimensions of a head; it must be an even number of them."
        )
    return (1.0 / (theta ** (np.arange(0, rotary, 2, dtype=np.float64) / rotary))).astype(np.float32)


def llama3_factors(inv_freq: Array, factor: float, low: float, high: float, original: int) -> Array:
    """Divisors of Llama 3.1's scaling: none for short wavelengths, ``factor`` for long ones, smooth between."""
    wavelength = 2 * math.pi / inv_freq.astype(np.float64)
    smooth = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
    return (1.0 / ((1 - smooth) / factor + smooth)).astype(np.float32)


def dynamic_theta(theta: float, rotary: int, factor: float, length: int, context: int) -> float:
    """The base of dynamic NTK scaling for sequences up to ``length``: unchanged up to the trained ``context``."""
    grown = factor * max(length, context) / context - (factor - 1)
    return float(theta * grown ** (rotary / (rotary - 2)))


def yarn_factors(
    rotary: int, theta: float, factor: float, original: int, fast: float, slow: float, truncate: bool = True
) -> Array:
    """Divisors of YaRN (arXiv 2309.00071): none for pairs that turn more than ``fast`` times within the original context,
    ``factor`` for those that turn less than ``slow`` times, a ramp between. ``truncate``: the ramp ends at whole pairs.
    ModelError for a base of 1 or less, whose pairs all turn alike."""
    if theta <= 1:
        raise ModelError(f"Rope scaling 'yarn' needs a rotary base above 1 and not {theta}.")

    def pair(turns: float) -> float:
        return rotary * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair(fast), pair(slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary - 1)
    span = high - low or 0.001
    ramp = np.clip((np.arange(rotary // 2) - low) / span, 0.0, 1.0)
    factors: Array = (1.0 / (ramp / factor + 1 - ramp)).astype(np.float32)
    return factors


def yarn_scale(factor: float, weight: float = 1.0) -> float:
    """YaRN's attention temperature, as a factor of cosine and sine."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def longrope_scale(factor: float, original: int) -> float:
    """LongRoPE's attention temperature (arXiv 2402.13753), as a factor of cosine and sine. ModelError for an original
    context of one token, which has no logarithm to divide by."""
    if original < 2:
        raise ModelError("Rope scaling 'longrope' needs an original context of at least 2 tokens.")
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0


def query_growth(checkpoint: Checkpoint) -> tuple[float, int]:
    """``query_growth`` and ``query_span`` of a decoder: Llama 4's scaling, which Mistral's models have; (0, 1) without it."""
    data, arch = checkpoint.metadata, checkpoint.architecture
    if checkpoint.kind == "hf":
        data, key, span = rope_scaling(data), "llama_4_scaling_beta", "original_max_position_embeddings"
    else:
        key, span = f"{arch}.attention.temperature_scale", f"{arch}.attention.temperature_length"
        span = span if span in data else f"{arch}.rope.scaling.original_context_length"
    return (0.0, 1) if not data.get(key) else (positive(data, key), integer(data, span, high=1 << 30))


def rope_scaling(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """``rope_parameters`` of config.json, empty where it has none. ``rope_scaling`` goes before them, as in transformers: older
    files have it, and people add it. The base and the share of a head stay those of ``rope_parameters``."""
    for key in ("rope_parameters", "rope_scaling"):
        if not isinstance(config.get(key) or {}, Mapping):
            raise ModelError(
                f"The configuration's rope scaling is {config[key]!r}; it must be an object with a rope_type."
            )
    parameters, scaling = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    if not scaling:
        return parameters
    return {name: parameters[name] for name in ("rope_theta", "partial_rotary_factor") if name in parameters} | scaling


def rope_from_hf(config: Mapping[str, Any], head_dim: int, context: int, length: int) -> Rope:
    """From config.json: ``rope_theta`` and ``rope_scaling``, or ``rope_parameters`` of newer files. ``context`` is what
    the model was made for and ``length`` the longest sequence to come."""
    scaling = rope_scaling(config)
    theta = positive(scaling, "rope_theta", positive(config, "rope_theta", 10000.0))
    part = integer(config, "rotary_dim", head_dim, high=head_dim) / head_dim  # MiniMax M2's name for it
    share = positive(scaling, "partial_rotary_factor", positive(config, "partial_rotary_factor", part))
    kind = text(scaling, "rope_type", text(scaling, "type", "default"))
    if kind == "proportional":
        return Rope(_proportional(scaling, head_dim, theta, share), interleaved=False)
    rotary = int(head_dim * share)
    inv_freq = base_frequencies(rotary, theta)
    if kind in ("default", "mrope"):  # of text all of mrope's sections have the same position
        return Rope(inv_freq, interleaved=False)
    if kind == "linear":
        return Rope(inv_freq / np.float32(positive(scaling, "factor")), interleaved=False)
    if kind == "dynamic" and rotary > 2 and scaling.get("alpha"):  # Hunyuan's, which no length changes
        theta *= positive(scaling, "alpha") ** (rotary / (rotary - 2))
        return Rope(base_frequencies(rotary, theta), interleaved=False)
    if kind == "dynamic" and rotary > 2:
        theta = dynamic_theta(theta, rotary, positive(scaling, "factor"), length, context)
        return Rope(base_frequencies(rotary, theta), interleaved=False)
    original = integer(
        config,
        "original_max_position_embeddings",
        integer(scaling, "original_max_position_embeddings", context, high=1 << 30),
        high=1 << 30,
    )
    if kind == "llama3":
        return Rope(inv_freq / _llama3(scaling, inv_freq, original), interleaved=False)
    if kind == "yarn":
        return _yarn(scaling, rotary, theta, original, context)
    if kind in ("longrope", "su"):
        return _longrope(scaling, inv_freq, original, context, length)
    raise ModelError(
        f"Rope scaling {kind!r} is not supported; default, linear, dynamic, llama3, yarn, longrope and proportional"
        " are."
    )


def rope_of_kinds(
    config: Mapping[str, Any], head_dim: int, context: int, full_head_dim: int | None = None
) -> tuple[Rope, Rope]:
    """Of layers with a window and of those without, whose ``rope_parameters`` config.json keeps apart; ``rope_scaling`` is of the
    latter alone, whose heads may be ``full_head_dim`` wide."""
    ropes = config.get("rope_parameters")
    if not isinstance(ropes, Mapping) or {"sliding_attention", "full_attention"} - set(ropes):
        raise ModelError("The configuration's rope_parameters must name sliding_attention and full_attention.")
    scaling = {
        "sliding_attention": (head_dim, None),
        "full_attention": (full_head_dim or head_dim, config.get("rope_scaling")),
    }
    local, full = (
        rope_from_hf({"rope_parameters": ropes[kind], "rope_scaling": own}, width, context, context)
        for kind, (width, own) in scaling.items()
    )
    return local, full


def _proportional(scaling: Mapping[str, Any], head_dim: int, theta: float, share: float) -> Array:
    """The first pairs of a whole head's turn, the rest stand still (Gemma 4)."""
    inv_freq = base_frequencies(head_dim, theta) / np.float32(positive(scaling, "factor", 1.0))
    inv_freq[int(share * head_dim // 2) :] = 0
    return inv_freq


def _llama3(scaling: Mapping[str, Any], inv_freq: Array, original: int) -> Array:
    low, high = positive(scaling, "low_freq_factor"), positive(scaling, "high_freq_factor")
    if low >= high:
        raise ModelError(f"The rope scaling's low_freq_factor {low} must be below its high_freq_factor {high}.")
    return llama3_factors(inv_freq, positive(scaling, "factor"), low, high, original)


def _yarn(scaling: Mapping[str, Any], rotary: int, theta: float, original: int, context: int) -> Rope:
    factor = positive(scaling, "factor", context / original)
    fast, slow = positive(scaling, "beta_fast", 32.0), positive(scaling, "beta_slow", 1.0)
    factors = yarn_factors(rotary, theta, factor, original, fast, slow, flag(scaling, "truncate", True))
    scale = yarn_scale(factor)
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        over = yarn_scale(factor, positive(scaling, "mscale_all_dim"))
        scale = yarn_scale(factor, positive(scaling, "mscale")) / over
    scale = positive(scaling, "attention_factor", scale)
    return Rope(base_frequencies(rotary, theta) / factors, interleaved=False, scale=scale)


def _longrope(scaling: Mapping[str, Any], inv_freq: Array, original: int, context: int, length: int) -> Rope:
    """The long factors when a sequence may outgrow the original context, else the short ones."""
    name = "long_factor" if length > original else "short_factor"
    factors = np.asarray(scaling.get(name) if isinstance(scaling.get(name), list) else [], dtype=object)
    usable = all(isinstance(f, (int, float)) and 0 < f < 1e30 for f in factors)
    if factors.shape != inv_freq.shape or not usable:
        raise ModelError(f"The rope scaling's {name} must be {inv_freq.size} positive numbers.")
    scale = longrope_scale(positive(scaling, "factor", context / original), original)
    scale = positive(scaling, "attention_factor", scale)
    return Rope(inv_freq / factors.astype(np.float32), interleaved=False, scale=scale)


def rope_from_gguf(
    metadata: Mapping[str, Any],
    arch: str,
    rotary: int,
    factors: Array | None,
    interleaved: bool,
    truncate: bool = True,
) -> Rope:
    """From GGUF keys, which do not tell ``truncate`` (see ``yarn_factors``); ``factors`` are divisors that a tensor carries:
    rope_freqs.weight with Llama 3's scaling, or one of rope_factors_long.weight and rope_factors_short.weight."""
    prefix = f"{arch}.rope.scaling"
    theta = positive(metadata, f"{arch}.rope.freq_base", 10000.0)
    inv_freq, scale = base_frequencies(rotary, theta), 1.0
    # The oldest files know the linear kind alone: they name none, and have the factor under a key of its own.
    factor_keys = (f"{prefix}.factor", f"{arch}.rope.scale_linear")
    found = next((key for key in factor_keys if metadata.get(key) is not None), None)
    kind = text(metadata, f"{prefix}.type", "none" if found is None else "linear")
    if kind == "linear":
        inv_freq = inv_freq / np.float32(positive(metadata, found or factor_keys[0]))
    elif kind == "yarn":
        if metadata.get(f"{prefix}.factor") is None or metadata.get(f"{prefix}.original_context_length") is None:
            raise ModelError(f"Rope scaling 'yarn' needs {prefix}.factor and {prefix}.original_context_length.")
        factor = positive(metadata, f"{prefix}.factor")
        original = integer(metadata, f"{prefix}.original_context_length", high=1 << 30)
        fast = positive(metadata, f"{prefix}.yarn_beta_fast", 32.0)
        slow = positive(metadata, f"{prefix}.yarn_beta_slow", 1.0)
        inv_freq = inv_freq / yarn_factors(rotary, theta, factor, original, fast, slow, truncate)
        scale = positive(metadata, f"{prefix}.yarn_attn_factor", yarn_scale(factor))
    elif kind not in ("none", "longrope", ""):
        raise ModelError(f"Rope scaling {kind!r} is not supported; none, linear, yarn and longrope are.")
    scale *= positive(metadata, f"{prefix}.attn_factor", 1.0)
    if factors is not None:
        if factors.shape != inv_freq.shape:
            raise ModelError(f"The rope factors have {factors.size} numbers, but this model needs {inv_freq.size}.")
        if not (np.isfinite(factors) & (factors > 0)).all():
            raise ModelError("The rope factors must hold positive numbers alone.")
        inv_freq = inv_freq / factors
    return Rope(inv_freq, interleaved, scale)
