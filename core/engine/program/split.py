"""How the axes of a layer's weights fall to the ranks: heads with the KV heads that they share, feed-forward widths and the
vocabulary, on whole quantization blocks."""

from __future__ import annotations

from itertools import pairwise
from math import gcd, lcm

from ..backend.v1 import Call, WeightRef
from ..errors import ConfigError
from ..formats import FORMATS
from .build import Program
from .parts import Span

Spans = tuple[Span, ...]
"""A span for each rank."""


class Splits:
    """The spans of each axis of each layer. Only what a split cannot be made of raises ConfigError, when it is asked for."""

    def __init__(self, program: Program, ranks: int) -> None:
        self._ranks = ranks
        self._axes = program.axes
        self._calls: dict[str, list[Call]] = {}
        for call in program.calls:
            self._calls.setdefault(layer_of(call), []).append(call)
        self._heads: dict[str, tuple[Spans, Spans]] = {}

    def of_rows(self, call: Call, axis: str | None, rows: int) -> Spans | None:
        """The spans of so many rows along an axis, or None where ranks hold all of it."""
        layer = layer_of(call)
        if axis == "vocab":
            return _even(rows, self._ranks) if rows % self._ranks == 0 else None
        if axis == "mlp":
            return self._mlp(layer, rows)
        if axis in ("heads", "kv_heads"):
            spans, total = self.heads(layer)[axis == "kv_heads"], self._count(layer, axis)
            return scaled(spans, rows // total)
        return None

    def heads(self, layer: str) -> tuple[Spans, Spans]:
        """The attention heads of each rank, and their KV heads, which several ranks hold where there are fewer of them than
        ranks. A latent cache is everybody's."""
        if layer not in self._heads:
            attention = self._attention(layer)
            heads, kv_heads = attention.attr("heads"), attention.attr("kv_heads")
            block = max((self._block_of_heads(w, heads) for w in self._over(layer, "heads")), default=1)
            self._heads[layer] = self._shared(layer, heads, kv_heads, block, bool(attention.attr("v_head_dim")))
        return self._heads[layer]

    def _shared(self, layer: str, heads: int, kv_heads: int, block: int, latent: bool) -> tuple[Spans, Spans]:
        """``block``: heads that a split may not part, since their values lie in one quantization block."""
        share = 1 if latent else heads // kv_heads
        if latent or kv_heads >= self._ranks:
            groups = heads // share
            unit = block // gcd(block, share)
            spans = self._spans(f"The {groups} groups of attention heads of {layer}", groups, unit)
            return scaled(spans, share), ((0, 1),) * self._ranks if latent else spans
        if self._ranks % kv_heads or heads % self._ranks or heads // self._ranks % block:
            raise ConfigError(
                f"{heads} attention heads and {kv_heads} KV heads of {layer} cannot be shared by {self._ranks} ranks evenly, on"
                " whole quantization blocks; choose another tensor_parallel_size."
            )
        kv = tuple(rank * kv_heads // self._ranks for rank in range(self._ranks))
        return _even(heads, self._ranks), tuple((head, head + 1) for head in kv)

    def _mlp(self, layer: str, width: int) -> Spans:
        blocks = [FORMATS[w.format].block for w in self._over(layer, "mlp") if w.shape[-1] == width]
        return self._spans(f"The feed-forward width {width} of {layer}", width, lcm(*blocks))

    def _spans(self, what: str, count: int, unit: int) -> Spans:
        """As even as whole units allow."""
        if count // unit < self._ranks:
            raise ConfigError(
                f"{what} cannot be shared by {self._ranks} ranks: it must fall apart in multiples of {unit}, where"
                " quantization blocks end; choose a smaller tensor_parallel_size."
            )
        return scaled(_even(count // unit, self._ranks), unit)

    def _attention(self, layer: str) -> Call:
        return next(call for call in self._calls[layer] if call.op == "attention")

    def _count(self, layer: str, axis: str) -> int:
        return int(self._attention(layer).attr(axis))

    def _over(self, layer: str, axis: str) -> list[WeightRef]:
        """The layer's matrices whose columns lie along an axis."""
        found = [ref for call in self._calls[layer] for ref in call.weights.values()]
        return [ref for ref in found if self._axes.get(ref.name, (None,))[-1] == axis]

    def _block_of_heads(self, weight: WeightRef, heads: int) -> int:
        """The least number of heads whose columns are whole blocks."""
        block = FORMATS[weight.format].block
        return block // gcd(block, weight.shape[-1] // heads)


def layer_of(call: Call) -> str:
    return call.scope.removesuffix(".experts")


def scaled(spans: Spans, width: int) -> Spans:
    return tuple((low * width, high * width) for low, high in spans)


def _even(count: int, ranks: int) -> Spans:
    edges = [rank * count // ranks for rank in range(ranks + 1)]
    return tuple(pairwise(edges))
