"""A decoder's configuration, read and checked from GGUF metadata or from config.json."""

from __future__ import annotations

from ..errors import ModelError
from ..formats import Checkpoint
from .decoder import DecoderConfig
from .fields import integer, positive
from .rope import rope_from_gguf, rope_from_hf


def _checked(config: DecoderConfig) -> DecoderConfig:
    if config.heads % config.kv_heads:
        raise ModelError(f"{config.heads} attention heads cannot share {config.kv_heads} KV heads evenly.")
    if config.experts and not 1 <= config.experts_used <= config.experts:
        raise ModelError(f"{config.experts_used} experts a token of {config.experts} is impossible.")
    rotary = 2 * config.rope.inv_freq.size
    if rotary > config.head_dim:
        raise ModelError(f"The rotary embedding of {rotary} dimensions is wider than a head of {config.head_dim}.")
    return config


def _no_window(window: int, context: int) -> None:
    if 0 < window < context:
        raise ModelError(
            f"This model's attention is limited to a sliding window of {window} of its {context} tokens, which is not"
            " supported yet; use a checkpoint without one."
        )


def config_from_gguf(checkpoint: Checkpoint, interleaved: bool) -> DecoderConfig:
    """Keys of the GGUF specification, prefixed by the architecture."""
    arch, data = checkpoint.architecture, checkpoint.metadata
    embedding = checkpoint.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(
            f"{checkpoint.path} holds a vocabulary but no weights; a model to run needs token_embd.weight."
        )
    hidden = integer(data, f"{arch}.embedding_length")
    heads = integer(data, f"{arch}.attention.head_count")
    head_dim = integer(data, f"{arch}.attention.key_length", hidden // heads)
    rotary = integer(data, f"{arch}.rope.dimension_count", head_dim)
    factors = checkpoint.tensors.get("rope_freqs.weight")
    experts = integer(data, f"{arch}.expert_count", 0, low=0)
    context = integer(data, f"{arch}.context_length", high=1 << 30)
    _no_window(integer(data, f"{arch}.attention.sliding_window", 0, low=0, high=1 << 30), context)
    return _checked(
        DecoderConfig(
            hidden=hidden,
            layers=integer(data, f"{arch}.block_count", high=4096),
            heads=heads,
            kv_heads=integer(data, f"{arch}.attention.head_count_kv", heads),
            head_dim=head_dim,
            mlp=integer(data, f"{arch}.feed_forward_length"),
            vocab=embedding.shape[0],
            eps=positive(data, f"{arch}.attention.layer_norm_rms_epsilon", 1e-5),
            rope=rope_from_gguf(data, arch, rotary, None if factors is None else factors.dense(), interleaved),
            max_context=context,
            experts=experts,
            experts_used=integer(data, f"{arch}.expert_used_count", 0, low=0) if experts else 0,
        )
    )


def config_from_hf(checkpoint: Checkpoint) -> DecoderConfig:
    """Keys of transformers' config.json."""
    data = checkpoint.metadata
    kind = data.get("hidden_act", "silu")
    if kind not in ("silu", "swish"):
        raise ModelError(f"The activation {kind!r} is not what this family uses (silu).")
    hidden = integer(data, "hidden_size")
    heads = integer(data, "num_attention_heads")
    head_dim = integer(data, "head_dim", hidden // heads)
    experts = integer(data, "num_local_experts", 0, low=0)
    context = integer(data, "max_position_embeddings", 2048, high=1 << 30)
    # Qwen's files name a window and say beside it whether it is used; others use what they name.
    if data.get("use_sliding_window", True):
        _no_window(integer(data, "sliding_window", 0, low=0, high=1 << 30), context)
    return _checked(
        DecoderConfig(
            hidden=hidden,
            layers=integer(data, "num_hidden_layers", high=4096),
            heads=heads,
            kv_heads=integer(data, "num_key_value_heads", heads),
            head_dim=head_dim,
            mlp=integer(data, "intermediate_size"),
            vocab=integer(data, "vocab_size"),
            eps=positive(data, "rms_norm_eps", 1e-6),
            rope=rope_from_hf(data, head_dim),
            max_context=context,
            experts=experts,
            experts_used=integer(data, "num_experts_per_tok", 2, low=0) if experts else 0,
            may_tie=data.get("tie_word_embeddings") is not False,
        )
    )
