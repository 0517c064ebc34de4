"""The ops as providers, each of which can also run by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import jax

from engine.backend.v1 import Array, BoundCall, Call, Limits, Packed, Provider, StepFn, WeightRef

from . import weights
from .cache import PAGED
from .compile import PACKER, bind_call
from .given import Site
from .ops import OPS


@dataclass(frozen=True)
class JaxProvider:
    """An op of the catalogue. A compiled product may sum otherwise for another number of rows, so none is invariant."""

    op: str
    put: Callable[[Array], jax.Array] = field(repr=False)
    site: Site
    packer: str = PACKER
    batch_invariant: bool = False

    @property
    def name(self) -> str:
        return f"jax/{self.op}"

    @property
    def features(self) -> frozenset[str]:
        return OPS[self.op].features

    @property
    def layouts(self) -> frozenset[str]:
        return frozenset({PAGED.name}) if OPS[self.op].cached else frozenset()

    def supports(self, call: Call) -> str | None:
        return OPS[self.op].refuse(call)

    def wants(self, call: Call) -> Mapping[str, str]:
        return {}

    def pack(self, ref: WeightRef, uses: Sequence[str], progress: Callable[[int], None]) -> Packed:
        return weights.pack(ref, self.put, progress)

    def bind(self, bound: BoundCall, limits: Limits) -> StepFn:
        return bind_call(bound, self.site)


def make_providers(put: Callable[[Array], jax.Array], site: Site) -> Mapping[str, Sequence[Provider]]:
    return {op: (JaxProvider(op, put, site),) for op in OPS}
