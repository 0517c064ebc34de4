"""How several devices share one model: weights by heads, widths and vocabulary, the cache by heads, all else on each of them.

The rules see no names. A product's weight is shared by its outputs; where its input comes from attention or an activation,
which are shared already, by its inputs, so that a layer has two sums over devices. XLA moves what has to be moved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from engine.backend.v1 import BoundCall

from .weights import Held, Weight

AXIS = "model"
_SHARED_INPUTS = ("attention", "gated_act")
_PRODUCTS = ("linear", "moe_linear")


@dataclass(frozen=True)
class Sharing:
    """Where arrays lie: on one device, or over those of a mesh."""

    devices: tuple[jax.Device, ...]

    @property
    def alone(self) -> bool:
        return len(self.devices) == 1

    def everywhere(self, ndim: int) -> Any:
        """The whole array on each device."""
        return self._along(ndim, None)

    def of_state(self, shape: Sequence[int]) -> Any:
        """A cache by heads, its third axis, if they can be shared out; the history on each device."""
        return self._along(len(shape), 2 if len(shape) > 2 and shape[2] % len(self.devices) == 0 else None)

    def share(self, weight: Weight, by_inputs: bool) -> Weight:
        """The weight's numbers [..., N, K] by N or by K, if that can be shared out; else they stay where they are."""
        axis = -1 if by_inputs else -2
        if any(array.shape[axis] % len(self.devices) for array in jax.tree.leaves(weight)):
            return weight
        return jax.tree.map(lambda array: jax.device_put(array, self._along(array.ndim, array.ndim + axis)), weight)

    def _along(self, ndim: int, axis: int | None) -> Any:
        if self.alone:
            return self.devices[0]
        names = [AXIS if n == axis else None for n in range(ndim)]
        return NamedSharding(Mesh(np.array(self.devices), (AXIS,)), PartitionSpec(*names))


def share_weights(calls: Sequence[BoundCall], sharing: Sharing) -> None:
    """Puts the matrices of a segment's products where their parts belong."""
    makers: Mapping[int, str] = {value.id: bound.call.op for bound in calls for value in bound.call.outputs}
    for bound in calls:
        held = bound.weights["weight"].handle if bound.call.op in _PRODUCTS else None
        if isinstance(held, Held) and not held.shared:
            by_inputs = makers.get(bound.call.inputs["x"].id) in _SHARED_INPUTS
            held.weight, held.shared = sharing.share(held.weight, by_inputs), True
