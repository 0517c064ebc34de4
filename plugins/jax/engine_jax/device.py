"""A device of JAX: values are its arrays, states are donated and replaced, segments run as compiled functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from engine.backend.v1 import (
    HOST_DTYPES,
    Array,
    DeviceInfo,
    Group,
    Limits,
    MemoryInfo,
    Plan,
    Provider,
    Segment,
    Session,
    StepFn,
    StepSession,
    available_memory,
)

from . import cache
from .cache import PAGED
from .collectives import JaxCollectives
from .compile import compile_segment
from .given import DTYPES, Site
from .options import Options
from .providers import make_providers
from .sharing import Sharing


class JaxDevice:
    """Device number ``index`` of a platform, or as many as the options say from there on. ValueError where there are not
    enough."""

    def __init__(self, index: int, options: Options) -> None:
        devices = jax.devices(options.platform)
        if index + options.devices > len(devices):
            raise ValueError(
                f"JAX has {len(devices)} devices here, and those from number {index} to"
                f" {index + options.devices - 1} are asked for; ask for fewer."
            )
        self.sharing = Sharing(tuple(devices[index : index + options.devices]))
        self.device = devices[index]
        self.options = options
        on_tpu = self.device.platform == "tpu"
        pallas = self.sharing.alone and (on_tpu if options.pallas is None else options.pallas)
        self.site = Site(self.sharing, pallas, interpret=not on_tpu)
        self._providers = make_providers(self._put, self.site)
        self._compiled: dict[int, tuple[Segment, StepFn]] = {}

    def alloc(self, shape: tuple[int, ...], dtype: str) -> jax.Array:
        return jnp.zeros(shape, DTYPES[dtype], device=self.sharing.of_state(shape))

    def free(self, value: jax.Array) -> None:
        """What nobody refers to any more is gone."""

    def copy_in(self, array: Array) -> jax.Array:
        return self._put(np.array(array, order="C"))  # JAX may go on reading what it was given

    def copy_out(self, value: jax.Array) -> Array:
        found = np.array(value)
        return found.view(np.uint16) if value.dtype == jnp.bfloat16 else found

    def fence(self) -> None:
        """Returns when all that is still held of these devices has been computed."""
        mine = set(self.sharing.devices)
        jax.block_until_ready([array for array in jax.live_arrays() if array.devices() <= mine])

    def memory_info(self) -> MemoryInfo:
        stats = self.device.memory_stats() or {}
        if "bytes_limit" not in stats:
            return available_memory()
        total, count = stats["bytes_limit"], len(self.sharing.devices)
        return MemoryInfo(count * total, count * (total - stats["bytes_in_use"]))

    def describe(self) -> DeviceInfo:
        act = self.options.dtype or ("bf16" if self.device.platform == "tpu" else "f32")
        return DeviceInfo(
            name=f"{self.device.device_kind} ({', '.join(str(device) for device in self.sharing.devices)})",
            backend="jax",
            buckets=self.options.buckets,
            kv_layouts=(PAGED,),
            dtypes=frozenset(DTYPES),
            ranks="threads",
            roles={"act": act, "residual": "f32"},
            writes="replace",
            details={"jax": jax.__version__, "platform": self.device.platform},
        )

    def session(self, plan: Plan) -> Session:
        return StepSession(self, plan)

    def providers(self) -> Mapping[str, Sequence[Provider]]:
        return self._providers

    def compile(self, segment: Segment, limits: Limits, states: Mapping[str, Any]) -> StepFn | None:
        if id(segment) not in self._compiled:  # a plan's next session finds all that this one has compiled
            self._compiled[id(segment)] = segment, compile_segment(segment, limits, self.site)
        return self._compiled[id(segment)][1]

    def export_blocks(self, state: jax.Array, blocks: Array) -> Array:
        return self.copy_out(state[_padded(blocks)])[: len(blocks)]

    def import_blocks(self, state: jax.Array, blocks: Array, rows: Array) -> jax.Array:
        return cache.with_blocks(state, _padded(blocks), self._put(_padded(rows)))

    def collectives(self, group: Group) -> JaxCollectives:
        """Joins the group's other ranks, which are threads of this process with a device each."""
        if not self.sharing.alone:
            raise ValueError("A model is shared out by the option devices or by ranks, not by both; leave one out.")
        return JaxCollectives(group, self.device)

    def _put(self, array: Array) -> jax.Array:
        """An array of the host's, which must not change any more, on the device; bf16 as itself."""
        stored = array.view(jnp.bfloat16) if array.dtype == HOST_DTYPES["bf16"] else array
        return jax.device_put(stored, self.sharing.everywhere(stored.ndim))


def _padded(array: Array) -> Array:
    """With as many zeros behind it as a power of two asks for, so that few sizes are compiled; block 0 is nobody's."""
    more = (1 << max(len(array) - 1, 0).bit_length()) - len(array)
    return np.concatenate([array, np.zeros((more, *array.shape[1:]), array.dtype)])
