"""The demo's network in torch: Llama's architecture, tied embeddings."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Shape:
    """Sizes of the network; ``context`` is the most tokens that it is trained for."""

    vocabulary: int
    hidden: int = 128
    feed_forward: int = 384
    layers: int = 4
    heads: int = 4
    context: int = 768
    theta: float = 10000.0
    epsilon: float = 1e-5

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        hidden, wide = shape.hidden, shape.feed_forward
        self.shape = shape
        self.input_norm = nn.Parameter(torch.ones(hidden))
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.o = nn.Linear(hidden, hidden, bias=False)
        self.post_norm = nn.Parameter(torch.ones(hidden))
        self.gate_up = nn.Linear(hidden, 2 * wide, bias=False)
        self.down = nn.Linear(wide, hidden, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        rows, length, hidden = x.shape
        normed = functional.rms_norm(x, (hidden,), self.input_norm, self.shape.epsilon)
        q, k, v = self.qkv(normed).view(rows, length, 3, self.shape.heads, self.shape.head_dim).permute(2, 0, 3, 1, 4)
        mixed = attention(rotated(q, rotation), rotated(k, rotation), v)
        x = x + self.o(mixed.transpose(1, 2).reshape(rows, length, hidden))
        normed = functional.rms_norm(x, (hidden,), self.post_norm, self.shape.epsilon)
        gate, up = self.gate_up(normed).chunk(2, dim=-1)
        return x + self.down(functional.silu(gate) * up)


class Demo(nn.Module):
    """Logits of the positions that are asked for."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Parameter(torch.randn(shape.vocabulary, shape.hidden) * shape.hidden**-0.5)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.Parameter(torch.ones(shape.hidden))
        scale = (2 * shape.layers) ** -0.5
        for name, weight in self.named_parameters():
            if weight.ndim == 2 and name != "embedding":
                last = name.endswith(("o.weight", "down.weight"))
                nn.init.normal_(weight, std=weight.shape[1] ** -0.5 * (scale if last else 1.0))

    def forward(self, ids: Tensor, wanted: Tensor) -> Tensor:
        """ids i64[rows, length], wanted bool[rows, length]. Gives f32 logits [wanted positions, vocabulary]."""
        x = self.embedding[ids]
        rotation = angles(self.shape, ids.shape[1], x.dtype)
        for layer in self.layers:
            x = layer(x, rotation)
        x = functional.rms_norm(x[wanted], (self.shape.hidden,), self.norm, self.shape.epsilon)
        return functional.linear(x, self.embedding).float()


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of [rows, heads, length, head_dim]; for short rows of bf16 twice as fast as torch's own on a CPU."""
    with torch.autocast("cpu", enabled=False):
        later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
        scores = (q * q.shape[3] ** -0.5) @ k.transpose(2, 3)
        return torch.softmax(scores.masked_fill(later, float("-inf")), dim=3) @ v


def angles(shape: Shape, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines [length, head_dim] of the halves that rope pairs."""
    steps = shape.theta ** (-torch.arange(0, shape.head_dim, 2) / shape.head_dim)
    turns = torch.arange(length)[:, None] * steps
    turns = torch.cat((turns, turns), dim=1)
    return turns.cos().to(dtype), turns.sin().to(dtype)


def rotated(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    cosine, sine = rotation
    left, right = x.chunk(2, dim=-1)
    return x * cosine.to(x.dtype) + torch.cat((-right, left), dim=-1) * sine.to(x.dtype)


def tensors(model: Demo) -> dict[str, Tensor]:
    """The weights under the names of a Hugging Face Llama."""
    hidden = model.shape.hidden
    named = {"model.embed_tokens.weight": model.embedding, "model.norm.weight": model.norm}
    for i, layer in enumerate(model.layers):
        assert isinstance(layer, Layer)
        p = f"model.layers.{i}."
        q, k, v = layer.qkv.weight.split(hidden)
        gate, up = layer.gate_up.weight.chunk(2)
        named |= {
            p + "input_layernorm.weight": layer.input_norm,
            p + "self_attn.q_proj.weight": q,
            p + "self_attn.k_proj.weight": k,
            p + "self_attn.v_proj.weight": v,
            p + "self_attn.o_proj.weight": layer.o.weight,
            p + "post_attention_layernorm.weight": layer.post_norm,
            p + "mlp.gate_proj.weight": gate,
            p + "mlp.up_proj.weight": up,
            p + "mlp.down_proj.weight": layer.down.weight,
        }
    return {name: weight.detach().float().contiguous().clone() for name, weight in named.items()}


def config(shape: Shape) -> dict[str, object]:
    """The same model's config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.feed_forward,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": shape.context,
        "rms_norm_eps": shape.epsilon,
        "rope_theta": shape.theta,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
