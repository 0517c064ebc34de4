"""A decoder's configuration, read and checked from GGUF metadata or from config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..backend.v1 import Array
from ..errors import ModelError
from ..formats import Checkpoint
from .decoder import DecoderConfig
from .family import Family
from .fields import flag, integer, positive, text
from .rope import rope_from_gguf, rope_from_hf, rope_scaling

_ACTS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
_LAYER_TYPES = ("sliding_attention", "full_attention")


def _checked(config: DecoderConfig) -> DecoderConfig:
    if config.experts and not 1 <= config.experts_used <= config.experts:
        raise ModelError(f"{config.experts_used} experts a token of {config.experts} is impossible.")
    rotary = 0 if config.rope is None else 2 * config.rope.inv_freq.size
    if rotary > config.head_dim:
        raise ModelError(f"The rotary embedding of {rotary} dimensions is wider than a head of {config.head_dim}.")
    return config


def kv_heads_of(data: Mapping[str, Any], key: str, heads: int) -> int:
    """The KV heads that a key names, ``heads`` by default; ModelError when the heads cannot share them evenly."""
    kv_heads = integer(data, key, heads)
    if heads % kv_heads:
        raise ModelError(f"{heads} attention heads cannot share {kv_heads} KV heads evenly.")
    return kv_heads


def _windows(family: Family, window: int, layers: int, context: int, every: int) -> tuple[int, ...]:
    """The window of each layer. Where it holds the whole context there is none, unless layers with and without one differ
    in more than the window."""
    if window == 0 or (window >= context and not family.full_every):
        return ()
    if not family.windowed:
        raise ModelError(
            f"This checkpoint limits attention to a sliding window of {window} of its {context} tokens, which the family"
            f" {family.name} does not have; use a checkpoint without one."
        )
    return tuple(0 if every and (i + 1) % every == 0 else window for i in range(layers))


def config_from_gguf(checkpoint: Checkpoint, family: Family, max_model_len: int | None) -> DecoderConfig:
    """Keys of the GGUF specification, prefixed by the architecture."""
    arch, data = checkpoint.architecture, checkpoint.metadata
    embedding = checkpoint.tensors.get("token_embd.weight")
    if embedding is None:
        held = "an adapter or another part of a model" if checkpoint.tensors else "a vocabulary but no weights"
        raise ModelError(f"{checkpoint.path} holds {held}; a model to run needs token_embd.weight.")
    hidden = integer(data, f"{arch}.embedding_length")
    if embedding.shape[-1] != hidden:
        raise ModelError(
            f"token_embd.weight has rows of {embedding.shape[-1]}, but {arch}.embedding_length is {hidden};"
            " the checkpoint is inconsistent."
        )
    heads = integer(data, f"{arch}.attention.head_count")
    kv_heads = kv_heads_of(data, f"{arch}.attention.head_count_kv", heads)
    head_dim = integer(data, f"{arch}.attention.key_length", hidden // heads)
    rotary = integer(data, f"{arch}.rope.dimension_count", head_dim)
    experts = integer(data, f"{arch}.expert_count", 0, low=0)
    context = integer(data, f"{arch}.context_length", high=1 << 30)
    layers = integer(data, f"{arch}.block_count", high=4096)
    window = integer(data, f"{arch}.attention.sliding_window", family.window, low=0, high=1 << 30)
    factors = _gguf_factors(checkpoint, arch, context, max_model_len or context)
    reach = _gguf_reach(data, arch, context, max_model_len) if family.rotary else context
    return _checked(
        DecoderConfig(
            hidden=hidden,
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            # where all layers have experts there may be none
            mlp=integer(data, f"{arch}.feed_forward_length", 4 * hidden if experts else None),
            vocab=embedding.shape[0],
            eps=positive(
                data,
                f"{arch}.attention.layer_norm_rms_epsilon",
                positive(data, f"{arch}.attention.layer_norm_epsilon", 1e-5),
            ),
            rope=rope_from_gguf(data, arch, rotary, factors, family.interleaved) if family.rotary else None,
            max_context=reach,
            experts=experts,
            experts_used=integer(data, f"{arch}.expert_used_count", 0, low=0) if experts else 0,
            act=_act(data, f"{arch}.hidden_activation", family),
            windows=_gguf_windows(data, arch, family, window, layers, reach),
        )
    )


def _gguf_reach(data: Mapping[str, Any], arch: str, context: int, max_model_len: int | None) -> int:
    """``_hf_reach`` of a GGUF, whose keys know YaRN alone of the kinds that it tells of."""
    prefix = f"{arch}.rope.scaling"
    if max_model_len is None or text(data, f"{prefix}.type", "none") != "yarn":
        return context
    original = integer(data, f"{prefix}.original_context_length", context, high=1 << 30)
    return max(context, min(max_model_len, int(original * positive(data, f"{prefix}.factor", context / original))))


def _gguf_windows(
    data: Mapping[str, Any], arch: str, family: Family, window: int, layers: int, context: int
) -> tuple[int, ...]:
    """Some files say beside the window which layers have it: one in how many does not, or a truth value a layer."""
    key = f"{arch}.attention.sliding_window_pattern"
    pattern = data.get(key)
    if pattern is None or isinstance(pattern, int):
        return _windows(family, window, layers, context, integer(data, key, family.full_every, low=0))
    if not isinstance(pattern, (list, np.ndarray)) or len(pattern) < layers:
        raise ModelError(f"The metadata's {key} must have a truth value for each of {layers} layers.")
    found = _windows(family, window, layers, context, 0)
    return tuple(width if has else 0 for width, has in zip(found, pattern, strict=False))


def _gguf_factors(checkpoint: Checkpoint, arch: str, context: int, length: int) -> Array | None:
    """Divisors of the frequencies that a file carries. Of LongRoPE's two sets the long one is for models that may outgrow
    their original context."""
    original = integer(checkpoint.metadata, f"{arch}.rope.scaling.original_context_length", context, high=1 << 30)
    which = "long" if length > original else "short"
    for name in ("rope_freqs.weight", f"rope_factors_{which}.weight"):
        if name in checkpoint.tensors:
            return checkpoint.tensors[name].dense()
    return None


def config_from_hf(
    checkpoint: Checkpoint, family: Family, keys: Mapping[str, str], max_model_len: int | None
) -> DecoderConfig:
    """Keys of transformers' config.json; ``keys`` tells what a family calls a common key (common -> own)."""
    data = with_common_keys(checkpoint.metadata, keys)
    hidden = integer(data, "hidden_size")
    heads = integer(data, "num_attention_heads")
    kv_heads = kv_heads_of(data, "num_key_value_heads", heads)
    head_dim = integer(data, "head_dim", hidden // heads)
    experts = integer(data, "num_experts", integer(data, "num_local_experts", 0, low=0), low=0)
    context = integer(data, "max_position_embeddings", 2048, high=1 << 30)
    layers = integer(data, "num_hidden_layers", high=4096)
    rope = rope_from_hf(data, head_dim, context, max_model_len or context) if family.rotary else None
    reach = _hf_reach(data, context, max_model_len) if family.rotary else context
    return _checked(
        DecoderConfig(
            hidden=hidden,
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            mlp=integer(data, "intermediate_size", 4 * hidden),
            vocab=integer(data, "vocab_size"),
            eps=positive(data, "rms_norm_eps", family.eps),
            rope=rope,
            max_context=reach,
            experts=experts,
            experts_used=integer(data, "num_experts_per_tok", low=0) if experts else 0,
            may_tie=flag(data, "tie_word_embeddings", True),
            act=_act(data, "hidden_act", family),
            windows=_hf_windows(data, family, layers, reach),
        )
    )


def with_common_keys(data: Mapping[str, Any], keys: Mapping[str, str]) -> dict[str, Any]:
    """The configuration with a family's own keys under their common names, too."""
    return dict(data) | {common: data[own] for common, own in keys.items() if own in data}


def _act(data: Mapping[str, Any], key: str, family: Family) -> str:
    kind = text(data, key, family.acts[0])
    if _ACTS.get(kind, kind) not in family.acts:
        raise ModelError(f"The activation {kind!r} is not what this family uses ({', '.join(family.acts)}).")
    return _ACTS.get(kind, kind)


def _hf_reach(data: Mapping[str, Any], context: int, max_model_len: int | None) -> int:
    """Some rope scalings take a model beyond the context that its file names, as far as ``factor`` says, when asked for
    at load."""
    scaling = rope_scaling(data)
    kind = text(scaling, "rope_type", text(scaling, "type", "default"))
    if max_model_len is None or kind not in ("dynamic", "yarn"):
        return context
    original = integer(scaling, "original_max_position_embeddings", context, high=1 << 30)
    return max(context, min(max_model_len, int(original * positive(scaling, "factor", context / original))))


def _hf_windows(data: Mapping[str, Any], family: Family, layers: int, context: int) -> tuple[int, ...]:
    # Qwen's files name a window and say beside it whether it is used; others use what they name.
    if not flag(data, "use_sliding_window", True):
        return ()
    window = integer(data, "sliding_window", 0, low=0, high=1 << 30)
    types = data.get("layer_types")
    # where layers are told one by one, the pattern says nothing more, and may be a text (EXAONE's "LLLG")
    every = integer(data, "sliding_window_pattern", family.full_every, low=0) if types is None else family.full_every
    found = _windows(family, window, layers, context, every)
    if not found:
        return ()
    if types is None:
        first = integer(data, "max_window_layers", 0, low=0) if family.full_first else 0
        return tuple(width if i >= first else 0 for i, width in enumerate(found))
    if not isinstance(types, list) or len(types) != layers or any(kind not in _LAYER_TYPES for kind in types):
        raise ModelError(
            f"The configuration's layer_types must name sliding_attention or full_attention for each of {layers} layers."
        )
    return tuple(window if kind == "sliding_attention" else 0 for kind in types)
