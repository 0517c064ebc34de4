"""The CUDA backend on torch's CPU tensors, its kernels in Triton's interpreter."""

from __future__ import annotations

import warnings

import pytest

from engine.testing import checkpoints


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """Triton reads it when the kernels are first loaded, and the backend's probe whenever it is asked. The interpreter computes
    with NumPy, which warns of the NaN that the kit sends through."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


@pytest.fixture
def device(interpreted):
    """Skips where torch or Triton is missing, which is on every system but Linux on x86-64."""
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    from engine.backend.registry import open_device

    return open_device("cuda", {})


@pytest.fixture
def delta_kind(monkeypatch):
    """The kind "qwen3_5" of random checkpoints: a layer of linear attention, and one of attention whose result is gated."""
    monkeypatch.setitem(checkpoints.KINDS, "qwen3_5", _qwen3_5)


def _qwen3_5():
    hidden, mlp, heads, kv_heads, width = 64, 96, 4, 2, 16
    key_heads, value_heads, key_dim, value_dim = 2, 4, 16, 24
    config = {
        "model_type": "qwen3_5_text",
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": key_dim,
        "linear_value_head_dim": value_dim,
    }
    values = value_heads * value_dim
    qkv = 2 * key_heads * key_dim + values
    linear = {f"in_proj_{name}.weight": (rows, hidden) for name, rows in (("qkv", qkv), ("z", values))}
    linear |= {f"in_proj_{name}.weight": (value_heads, hidden) for name in ("a", "b")}
    linear |= {
        "conv1d.weight": (qkv, 1, 4),
        "A_log": (value_heads,),
        "dt_bias": (value_heads,),
        "norm.weight": (value_dim,),
    }
    linear |= {"out_proj.weight": (hidden, values)}
    gated = {"q_proj.weight": (2 * heads * width, hidden), "o_proj.weight": (hidden, heads * width)}
    gated |= {f"{name}_proj.weight": (kv_heads * width, hidden) for name in ("k", "v")}
    gated |= {f"{name}_norm.weight": (width,) for name in ("q", "k")}
    both = {f"{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    both |= {f"mlp.{name}_proj.weight": (mlp, hidden) for name in ("gate", "up")} | {
        "mlp.down_proj.weight": (hidden, mlp)
    }
    shapes = {"model.embed_tokens.weight": (checkpoints.VOCAB, hidden), "model.norm.weight": (hidden,)}
    shapes |= {"lm_head.weight": (checkpoints.VOCAB, hidden)}
    for layer, (part, own) in enumerate((("linear_attn", linear), ("self_attn", gated))):
        whole = both | {f"{part}.{name}": shape for name, shape in own.items()}
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in whole.items()}
    return config, shapes
