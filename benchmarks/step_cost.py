"""What a step must at least read and multiply, from the file: bytes of weights and KV cache, operations of products."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from bars import Work

from engine.formats import open_checkpoint
from engine.models.registry import load_model

KV_BYTES = {
    "auto": 2.0,
    "f32": 4.0,
    "f16": 2.0,
    "bf16": 2.0,
    "int16": 2.0,
    "int8": 1.0,
}  # auto: without scales, if there are any
SCALE_BYTES = 4  # whole numbers have an f32 scale a token and head


@dataclass(frozen=True)
class StepCost:
    """body, head: multiply-adds of a token in the layers and in the output matrix; weights: bytes of both as the file has
    them, those experts that a token takes; kv_values, kv_heads: values and heads of a token's keys and values in all
    layers. Of the embedding a step reads a row a token, which is left out, and so are attention's operations."""

    body: float
    head: float
    weights: float
    kv_values: int
    kv_heads: int
    dense: str | None

    @classmethod
    def of(cls, path: Path) -> StepCost:
        checkpoint = open_checkpoint(path)
        config = load_model(checkpoint).config
        part = config.experts_used / config.experts if config.experts else 1.0
        head = "output.weight" if "output.weight" in checkpoint.tensors else "token_embd.weight"
        counted = {
            name: t for name, t in checkpoint.tensors.items() if name in (head, "output_norm.weight") or "blk." in name
        }
        taken = {name: part if "_exps." in name else 1.0 for name in counted}
        matrices = {name: math.prod(t.shape) * taken[name] for name, t in counted.items() if len(t.shape) > 1}
        kv_heads = 2 * config.layers * config.kv_heads
        format_name = checkpoint.tensors[head].format.name
        return cls(
            body=sum(size for name, size in matrices.items() if name != head),
            head=matrices[head],
            weights=sum(t.nbytes * taken[name] for name, t in counted.items()),
            kv_values=kv_heads * config.head_dim,
            kv_heads=kv_heads,
            dense=format_name.lower() if format_name in ("F16", "BF16") else None,
        )

    def read_bytes(self, work: Work, kv: str) -> float:
        """Bytes of a decode step: the weights once, and each sequence's cache at the middle of its decoding."""
        token = self.kv_values * KV_BYTES[kv] + (self.kv_heads * SCALE_BYTES if kv in ("int16", "int8") else 0)
        return self.weights + work.batch * (work.depth + work.decode / 2) * token

    def operations(self, work: Work) -> float:
        """Of a token, two a multiply-add; a prompt needs the output matrix for its last token only."""
        return 2 * (self.body + (self.head / work.prompt if work.prompt else self.head))

    def fractions(self, work: Work, kv: str, rate: float, limits: dict[str, float]) -> dict[str, float]:
        """What part of each limit ``rate`` tokens a second are: bandwidth where a step decodes; where it has several rows,
        the peaks of the products that these weights can be multiplied with, but for those that the machine does not have.
        """
        found = {}
        if work.decode:
            found["bandwidth"] = rate / work.batch * self.read_bytes(work, kv) / limits["bandwidth"]
        if work.prompt or work.batch > 1:
            peaks = {None: ("int8", "amx_int8"), "bf16": ("bf16", "amx_bf16", "f32"), "f16": ("f32",)}[self.dense]
            found |= {name: rate * self.operations(work) / limits[name] for name in peaks if limits[name]}
        return found
