"""LFM2 as GGUF files have it: layers of convolutions have no KV heads, and filters no dimension of inputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from engine.backend.v1 import WeightRef
from engine.models import Model
from engine.program.weights import ConstantWeight
from engine.quantize.export_delta import gate_and_up


def lfm2_keys(model: Model) -> dict[str, Any]:
    """Beyond the keys of all decoders, without the architecture."""
    c = model.config
    filters = (model.weight(f"blk.{i}.shortconv.conv.weight") for i in c.recurrent)
    width = next((weight.shape[-1] for weight in filters if weight is not None), None)
    kv_heads = np.array([0 if i in c.recurrent else c.kv_heads for i in range(c.layers)], np.int32)
    return {"attention.head_count_kv": kv_heads} | ({} if width is None else {"shortconv.l_cache": width})


def lfm2_parts(model: Model, weight: WeightRef) -> Iterator[WeightRef]:
    """What a GGUF has for a weight of a Hugging Face file."""
    if weight.name.endswith(".shortconv.conv.weight"):
        yield ConstantWeight(weight.name, weight.dense().reshape(weight.shape[0], -1))
    elif weight.name.endswith(".ffn_gate_up_exps.weight"):
        yield from gate_and_up(weight)
    else:
        yield weight
