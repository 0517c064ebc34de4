"""Products of few rows with quantized matrices by the kernel in HIP; all others by the kernels in Triton."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine_cuda.arrays import DTYPES
from engine_cuda.ops.dense import Product, coded_arguments
from engine_cuda.weights import Coded

from . import sources
from .rtc import Runtime, launch

_TAGS = {dtype: tag for tag, dtype in DTYPES.items()}


@dataclass(frozen=True)
class HipProducts:
    """What multiplies in the place of ``Product.run``."""

    runtime: Runtime

    def run(self, product: Product) -> None:
        weight = product.weight
        if isinstance(weight, Coded) and takes(product, weight):
            self._launch(product, weight)
        else:
            product.run()

    def _launch(self, product: Product, weight: Coded) -> None:
        x, y = product.x, product.y
        fine = "u8" if weight.fine_scale is None else _TAGS[weight.fine_scale.dtype]
        factor, code = _TAGS[weight.scale.dtype], _TAGS[weight.codes.dtype]
        options = sources.gemv(weight.form, len(x), _TAGS[x.dtype], _TAGS[y.dtype], factor, code, fine)
        outputs, depth = weight.shape
        _, sizes, _ = coded_arguments(weight)
        launch(
            self.runtime.kernels("gemv.hip", options), "gemv", (-(-outputs // sources.OUTPUTS),), x, weight.codes,
            weight.table, weight.scale, weight.fine_scale, weight.least, weight.fine_least, product.bias,
            product.residual, y, outputs, depth, *sizes,
        )  # fmt: skip


def takes(product: Product, weight: Coded) -> bool:
    """Whether the kernel takes it: few rows, a matrix with groups of columns, ends of the types that it is compiled for."""
    plain = product.grouping is None and product.heads == 1 and len(weight.shape) == 2
    groups = not weight.one_scale and not weight.multiplies_fp8
    ends = (product.bias is None or product.bias.dtype == torch.float32) and (
        product.residual is None or product.residual.dtype == product.y.dtype
    )
    factors = weight.least is None or weight.least.dtype == weight.scale.dtype
    signs = weight.fine_least is None or weight.fine_scale is None or weight.fine_least.dtype == weight.fine_scale.dtype
    return (
        0 < len(product.x) <= sources.MOST_ROWS
        and weight.shape[-1] % 32 == 0
        and plain
        and groups
        and ends
        and factors
        and signs
    )
