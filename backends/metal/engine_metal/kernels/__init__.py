"""Kernels in Metal's language: bodies of functions, whose signatures MLX writes, and how they are launched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import cast

import mlx.core as mx

Template = Sequence[tuple[str, "mx.Dtype | int | bool"]]


@dataclass(frozen=True)
class Kernel:
    """The body in ``name``.metal, with its arguments. Arrays are row-contiguous; those of fewer than 8 elements lie in the
    address space ``constant``, so bodies index arguments and take no pointers to them."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def source(self) -> str:
        return files(__name__).joinpath(f"{self.name}.metal").read_text()


@dataclass(frozen=True)
class Launch:
    """A kernel with its operands. ``grid`` counts threads; ``outputs``: shapes and types."""

    kernel: Kernel
    inputs: Sequence[mx.array]
    template: Template
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    outputs: Sequence[tuple[tuple[int, ...], mx.Dtype]]


Run = Callable[[Launch], Sequence[mx.array]]


@cache
def _built(kernel: Kernel) -> Callable[..., Sequence[mx.array]]:
    made = mx.fast.metal_kernel(
        name=f"engine_{kernel.name}", input_names=kernel.inputs, output_names=kernel.outputs, source=kernel.source
    )
    return cast("Callable[..., Sequence[mx.array]]", made)


def run_on_metal(launch: Launch) -> Sequence[mx.array]:
    """The outputs, as lazy as all that MLX makes."""
    return _built(launch.kernel)(
        inputs=launch.inputs,
        template=launch.template,
        grid=launch.grid,
        threadgroup=launch.threadgroup,
        output_shapes=[shape for shape, _ in launch.outputs],
        output_dtypes=[dtype for _, dtype in launch.outputs],
    )
