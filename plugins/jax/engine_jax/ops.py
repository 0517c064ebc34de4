"""The ops of this backend, by name."""

from __future__ import annotations

from collections.abc import Mapping

from . import attention, cache, layers, moe, recurrent, sampling, step
from .given import Op

OPS: Mapping[str, Op] = {
    **step.OPS,
    **layers.OPS,
    **cache.OPS,
    **attention.OPS,
    **recurrent.OPS,
    **moe.OPS,
    **sampling.OPS,
}
