"""LFM2's keys in GGUF files: layers of convolutions have no KV heads."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.models import Model


def lfm2_keys(model: Model) -> dict[str, Any]:
    """Beyond the keys of all decoders, without the architecture."""
    c = model.config
    filters = (model.weight(f"blk.{i}.shortconv.conv.weight") for i in c.recurrent)
    width = next((weight.shape[-1] for weight in filters if weight is not None), None)
    kv_heads = np.array([0 if i in c.recurrent else c.kv_heads for i in range(c.layers)], np.int32)
    return {"attention.head_count_kv": kv_heads} | ({} if width is None else {"shortconv.l_cache": width})
