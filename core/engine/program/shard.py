"""Tensor, expert and pipeline parallelism as rewrites of a program. One device so far: the program passes unchanged."""

from __future__ import annotations

from .build import Program


def shard(program: Program, ranks: int) -> Program:
    """The program of one rank. Only ``ranks == 1`` exists until the issue on scale-out."""
    if ranks != 1:
        raise NotImplementedError("A program runs on one device until sharding is built.")
    return program
