"""State-space layers of Mamba-2 as GGUF files have them: rates instead of their logarithms, vectors as columns, norms by
group."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from engine.backend.v1 import WeightRef
from engine.models import Model
from engine.models.falcon_h1 import FalconH1Config
from engine.models.granite_hybrid import GraniteHybridConfig
from engine.models.mamba2 import Mamba2
from engine.models.nemotron_h import NemotronConfig
from engine.program.weights import ConstantWeight, select
from engine.quantize.export_delta import gate_and_up

WITH_STATES = (GraniteHybridConfig, NemotronConfig, FalconH1Config)


def mamba_of(model: Model) -> Mamba2 | None:
    """The sizes of its state-space layers; None for a model without."""
    c = model.config
    return c.mamba if isinstance(c, WITH_STATES) else None


def mamba_keys(model: Model, m: Mamba2) -> dict[str, Any]:
    """Beyond the keys of all decoders, without the architecture."""
    c = model.config
    first = model.weight(f"blk.{c.recurrent[0]}.ssm_conv1d.weight")
    assert first is not None
    keys: dict[str, Any] = {
        "ssm.conv_kernel": first.shape[-1],
        "ssm.state_size": m.state_dim,
        "ssm.group_count": m.groups,
        "ssm.inner_size": m.inner,
        "ssm.time_step_rank": m.heads,
    }
    if c.recurrent_attends:
        return keys
    keys |= {
        "attention.head_count_kv": np.array([c.kv_heads * (i not in c.recurrent) for i in range(c.layers)], np.int32),
        "rope.scaling.finetuned": c.rope is not None,  # llama.cpp's way to say whether there are positions
    }
    return keys | (_nemotron_keys(model, c) if isinstance(c, NemotronConfig) else {})


def _nemotron_keys(model: Model, c: NemotronConfig) -> dict[str, Any]:
    attends = np.array([kind == "attention" for kind in c.kinds])
    wide = np.array([kind in ("mlp", "moe") for kind in c.kinds])
    narrow = (model.weight(f"blk.{i}.ffn_latent_down.weight") for i in range(c.layers))
    latent = next((weight.shape[0] for weight in narrow if weight is not None), None)
    keys: dict[str, Any] = {} if latent is None else {"moe_latent_size": latent}
    return keys | {
        "attention.head_count_kv": np.where(attends, c.kv_heads, 0).astype(np.int32),
        "feed_forward_length": np.where(wide, c.mlp, 0).astype(np.int32),
        "attention.layer_norm_epsilon": c.eps,  # which llama.cpp must have, too
    }


def mamba_parts(model: Model, weight: WeightRef) -> Iterator[WeightRef]:
    """What a GGUF has for a weight of a Hugging Face file. Granite's know one feed-forward by two names, of which one holds."""
    c, name, part = model.config, weight.name, weight.name.split(".")[2] if weight.name.startswith("blk.") else ""
    other = part in ("ffn_gate_up", "ffn_down") if c.experts else part.endswith("_shexp")
    if other and not isinstance(c, NemotronConfig):
        return
    if part == "ssm_a":
        yield ConstantWeight(name, -np.exp(weight.dense()).reshape(-1, 1))
    elif part == "ssm_d":
        yield ConstantWeight(name, weight.dense().reshape(-1, 1))
    elif name.endswith(".ssm_conv1d.weight"):
        yield ConstantWeight(name, weight.dense().reshape(weight.shape[0], -1))
    elif part == "ssm_norm" and isinstance(c, WITH_STATES) and c.mamba is not None:
        yield ConstantWeight(name, weight.dense().reshape(c.mamba.groups, -1))
    elif part == "ffn_gate_up_exps":
        yield from gate_and_up(weight)
    elif part.startswith("ffn_gate_up"):
        half = weight.shape[0] // 2
        for n, own in enumerate(("gate", "up")):
            yield select(name.replace("gate_up", own), weight, slice(n * half, (n + 1) * half))
    else:
        yield weight
