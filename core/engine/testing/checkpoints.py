"""Tiny random checkpoints by NumPy alone: a folder for each kind of architecture that a program can show.

Together they use every op of a body: grouped queries, norms of heads, windows, caps, learned positions, layer norms with
biases, experts, latent caches, sinks, memories that do not grow.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from ..backend.v1 import Array
from ..formats.safetensors_writer import StoredTensor, header

Shapes = dict[str, tuple[int, ...]]

VOCAB = 320
CONTEXT = 128
_HIDDEN, _MLP, _HEADS, _KV, _DIM, _EXPERTS = 64, 96, 4, 2, 16, 4
_Q, _K, _RANK, _NOPE, _ROPE = _HEADS * _DIM, _KV * _DIM, 32, 16, 8

_COMMON: Mapping[str, Any] = {
    "hidden_size": _HIDDEN,
    "intermediate_size": _MLP,
    "num_hidden_layers": 2,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _KV,
    "head_dim": _DIM,
    "vocab_size": VOCAB,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_OUTER: Shapes = {"model.embed_tokens.weight": (VOCAB, _HIDDEN), "model.norm.weight": (_HIDDEN,)}
_HEAD: Shapes = {"lm_head.weight": (VOCAB, _HIDDEN)}
_NORMS: Shapes = {"input_layernorm.weight": (_HIDDEN,), "post_attention_layernorm.weight": (_HIDDEN,)}
_ATTENTION: Shapes = {
    "self_attn.q_proj.weight": (_Q, _HIDDEN),
    "self_attn.k_proj.weight": (_K, _HIDDEN),
    "self_attn.v_proj.weight": (_K, _HIDDEN),
    "self_attn.o_proj.weight": (_HIDDEN, _Q),
}
_HEAD_NORMS: Shapes = {"self_attn.q_norm.weight": (_DIM,), "self_attn.k_norm.weight": (_DIM,)}
_GATED: Shapes = {
    "mlp.gate_proj.weight": (_MLP, _HIDDEN),
    "mlp.up_proj.weight": (_MLP, _HIDDEN),
    "mlp.down_proj.weight": (_HIDDEN, _MLP),
}


def _layers(own: Mapping[str, tuple[int, ...]], prefix: str = "model.layers.") -> Shapes:
    return {f"{prefix}{i}.{name}": shape for i in range(2) for name, shape in own.items()}


def _llama() -> tuple[dict[str, Any], Shapes]:
    return {"model_type": "llama"}, _OUTER | _HEAD | _layers(_NORMS | _ATTENTION | _GATED)


def _qwen3() -> tuple[dict[str, Any], Shapes]:
    config: dict[str, Any] = {"model_type": "qwen3", "tie_word_embeddings": True, "use_sliding_window": False}
    return config, _OUTER | _layers(_NORMS | _ATTENTION | _HEAD_NORMS | _GATED)


def _gemma2() -> tuple[dict[str, Any], Shapes]:
    config: dict[str, Any] = {
        "model_type": "gemma2",
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
    }
    config |= {"sliding_window": 16, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 20.0}
    config |= {"final_logit_softcapping": 10.0, "tie_word_embeddings": True}
    norms = _NORMS | {f"{side}_feedforward_layernorm.weight": (_HIDDEN,) for side in ("pre", "post")}
    return config, _OUTER | _layers(norms | _ATTENTION | _GATED)


def _gpt2() -> tuple[dict[str, Any], Shapes]:
    config: dict[str, Any] = {
        "model_type": "gpt2",
        "n_embd": _HIDDEN,
        "n_layer": 2,
        "n_head": _HEADS,
        "n_positions": CONTEXT,
    }
    config |= {
        "n_inner": _MLP,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
    }
    own: Shapes = {f"{norm}.{kind}": (_HIDDEN,) for norm in ("ln_1", "ln_2") for kind in ("weight", "bias")}
    for name, depth, width in (
        ("attn.c_attn", _HIDDEN, 3 * _HIDDEN),
        ("attn.c_proj", _HIDDEN, _HIDDEN),
        ("mlp.c_fc", _HIDDEN, _MLP),
        ("mlp.c_proj", _MLP, _HIDDEN),
    ):
        own |= {f"{name}.weight": (depth, width), f"{name}.bias": (width,)}
    outer: Shapes = {"transformer.wte.weight": (VOCAB, _HIDDEN), "transformer.wpe.weight": (CONTEXT, _HIDDEN)}
    outer |= {"transformer.ln_f.weight": (_HIDDEN,), "transformer.ln_f.bias": (_HIDDEN,)}
    return config, outer | _layers(own, "transformer.h.")


def _mixtral() -> tuple[dict[str, Any], Shapes]:
    config: dict[str, Any] = {"model_type": "mixtral", "num_local_experts": _EXPERTS, "num_experts_per_tok": 2}
    own: Shapes = {"block_sparse_moe.gate.weight": (_EXPERTS, _HIDDEN)}
    for e in range(_EXPERTS):
        shapes = {"w1": (_MLP, _HIDDEN), "w2": (_HIDDEN, _MLP), "w3": (_MLP, _HIDDEN)}
        own |= {f"block_sparse_moe.experts.{e}.{name}.weight": shape for name, shape in shapes.items()}
    return config, _OUTER | _HEAD | _layers(_NORMS | _ATTENTION | own)


def _deepseek() -> tuple[dict[str, Any], Shapes]:
    config: dict[str, Any] = {
        "model_type": "deepseek_v2",
        "q_lora_rank": None,
        "kv_lora_rank": _RANK,
        "qk_nope_head_dim": _NOPE,
    }
    config |= {"qk_rope_head_dim": _ROPE, "v_head_dim": _DIM, "head_dim": _ROPE, "num_key_value_heads": _HEADS}
    config |= {"first_k_dense_replace": 2, "n_routed_experts": None, "moe_layer_freq": 1}
    own: Shapes = {
        "self_attn.q_proj.weight": (_HEADS * (_NOPE + _ROPE), _HIDDEN),
        "self_attn.kv_a_proj_with_mqa.weight": (_RANK + _ROPE, _HIDDEN),
        "self_attn.kv_a_layernorm.weight": (_RANK,),
        "self_attn.kv_b_proj.weight": (_HEADS * (_NOPE + _DIM), _RANK),
        "self_attn.o_proj.weight": (_HIDDEN, _HEADS * _DIM),
    }
    return config, _OUTER | _HEAD | _layers(_NORMS | own | _GATED)


def _gpt_oss() -> tuple[dict[str, Any], Shapes]:
    config: dict[str, Any] = {
        "model_type": "gpt_oss",
        "num_local_experts": _EXPERTS,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
    }
    own: Shapes = {f"self_attn.{n}_proj.bias": (w,) for n, w in (("q", _Q), ("k", _K), ("v", _K), ("o", _HIDDEN))}
    own |= {"self_attn.sinks": (_HEADS,), "mlp.router.weight": (_EXPERTS, _HIDDEN), "mlp.router.bias": (_EXPERTS,)}
    own |= {
        "mlp.experts.gate_up_proj": (_EXPERTS, _HIDDEN, 2 * _MLP),
        "mlp.experts.gate_up_proj_bias": (_EXPERTS, 2 * _MLP),
        "mlp.experts.down_proj": (_EXPERTS, _MLP, _HIDDEN),
        "mlp.experts.down_proj_bias": (_EXPERTS, _HIDDEN),
    }
    return config, _OUTER | _HEAD | _layers(_NORMS | _ATTENTION | own)


def _qwen3_5() -> tuple[dict[str, Any], Shapes]:
    """A layer of linear attention, and one of attention whose result is gated."""
    key_heads, value_heads, key_dim, value_dim = 2, 4, 16, 24
    config: dict[str, Any] = {
        "model_type": "qwen3_5_text",
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": key_dim,
        "linear_value_head_dim": value_dim,
    }
    values = value_heads * value_dim
    columns = 2 * key_heads * key_dim + values
    own: Shapes = {"conv1d.weight": (columns, 1, 4), "norm.weight": (value_dim,), "out_proj.weight": (_HIDDEN, values)}
    own |= {"A_log": (value_heads,), "dt_bias": (value_heads,)}
    for name, rows in (("qkv", columns), ("z", values), ("a", value_heads), ("b", value_heads)):
        own[f"in_proj_{name}.weight"] = (rows, _HIDDEN)
    linear = {f"linear_attn.{name}": shape for name, shape in own.items()}
    gated = _ATTENTION | _HEAD_NORMS | {"self_attn.q_proj.weight": (2 * _Q, _HIDDEN)}
    layers = {
        f"model.layers.{i}.{name}": shape
        for i, kind in enumerate((linear, gated))
        for name, shape in (_NORMS | kind | _GATED).items()
    }
    return config, _OUTER | _HEAD | layers


def _granite_4() -> tuple[dict[str, Any], Shapes]:
    """A state-space layer whose norm goes by group, and one of attention without positions."""
    heads, groups, state_dim, inner = 4, 2, 24, 2 * _HIDDEN
    config: dict[str, Any] = {
        "model_type": "granitemoehybrid",
        "layer_types": ["mamba", "attention"],
        "num_local_experts": 0,
        "shared_intermediate_size": _MLP,
        "attention_multiplier": _DIM**-0.5,
        "mamba_n_heads": heads,
        "mamba_n_groups": groups,
        "mamba_d_state": state_dim,
    }
    filtered = inner + 2 * groups * state_dim
    own: Shapes = {"in_proj.weight": (inner + filtered + heads, _HIDDEN), "out_proj.weight": (_HIDDEN, inner)}
    own |= {"conv1d.weight": (filtered, 1, 4), "conv1d.bias": (filtered,), "norm.weight": (inner,)}
    own |= {name: (heads,) for name in ("A_log", "D", "dt_bias")}
    shared: Shapes = {
        "shared_mlp.input_linear.weight": (2 * _MLP, _HIDDEN),
        "shared_mlp.output_linear.weight": (_HIDDEN, _MLP),
    }
    layers = {
        f"model.layers.{i}.{name}": shape
        for i, kind in enumerate(({f"mamba.{name}": shape for name, shape in own.items()}, _ATTENTION))
        for name, shape in (_NORMS | kind | shared).items()
    }
    return config, _OUTER | _HEAD | layers


KINDS: Mapping[str, Callable[[], tuple[dict[str, Any], Shapes]]] = {
    "llama": _llama,
    "qwen3": _qwen3,
    "gemma2": _gemma2,
    "gpt2": _gpt2,
    "mixtral": _mixtral,
    "deepseek": _deepseek,
    "gpt_oss": _gpt_oss,
    "qwen3_5": _qwen3_5,
    "granite_4": _granite_4,
}


def write_checkpoint(kind: str, folder: Path, rng: np.random.Generator) -> Path:
    """A random checkpoint of one of ``KINDS`` in f32, with a byte tokenizer; its context is CONTEXT tokens. Its logits are
    some units apart, so that greedy choices have margins."""
    config, shapes = KINDS[kind]()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**_COMMON, **config}))
    stored = [StoredTensor(name, "F32", shape) for name, shape in shapes.items()]
    values = (_random(name, shape, rng).astype("<f4").tobytes() for name, shape in shapes.items())
    (folder / "model.safetensors").write_bytes(header(stored) + b"".join(values))
    (folder / "tokenizer.json").write_text(_tokenizer())
    return folder


def _random(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    values = rng.standard_normal(shape, np.float32)
    if len(shape) == 1:
        norm = "norm" in name or "ln_" in name
        return values * np.float32(0.2) + np.float32(1 if norm and not name.endswith("bias") else 0)
    return values * np.float32(1.5 * _depth(name, shape) ** -0.5)


def _depth(name: str, shape: tuple[int, ...]) -> int:
    turned = ".c_" in name or name.endswith(("gate_up_proj", "down_proj"))
    return shape[-2] if turned else shape[-1]


def _tokenizer() -> str:
    """Bytes as tokens, after <unk> 0, <s> 1, </s> 2."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: n for n, text in enumerate(["<unk>", "<s>", "</s>", *letters])}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    return made.to_str()
