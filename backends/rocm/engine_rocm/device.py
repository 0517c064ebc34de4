"""The device: that of the CUDA backend on a GPU of AMD's, whose torch and Triton speak HIP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from engine.backend.v1 import Device, DeviceInfo, Provider
from engine_cuda.device import CudaDevice, act_of
from engine_cuda.graphs import Graphs, graphs_of
from engine_cuda.ops import dense
from engine_cuda.providers import TritonProvider

from .attention import HipAttention
from .products import HipProducts
from .rtc import HIP, GpuRuntime, Runtime


def open_device(index: int, options: Mapping[str, Any]) -> Device:
    """GPU number ``index``. The option "act" is the dtype of activations: bf16, unless it says otherwise; with "hip" false no
    kernel is compiled by hipRTC. ValueError for what there is not."""
    act, graphs = act_of(options), graphs_of(options)
    if torch.version.hip is None or not torch.cuda.is_available():
        raise ValueError("torch finds no GPU of AMD's; a torch built for ROCm and AMD's driver are needed.")
    count = torch.cuda.device_count()
    if index >= count:
        raise ValueError(f"there are {count} GPUs, numbered from 0, and no number {index}.")
    where = torch.device("cuda", index)
    if not options.get("hip", True):
        return RocmDevice(where, act, None, 'Triton, as the option "hip" says', graphs)
    try:
        return RocmDevice(where, act, GpuRuntime(HIP, architecture(where)), "HIP, compiled by hipRTC", graphs)
    except ValueError as error:
        return RocmDevice(where, act, None, f"Triton, since {error}".rstrip("."), graphs)


def architecture(where: torch.device) -> str:
    """Such as gfx942, without the features that follow it."""
    return str(torch.cuda.get_device_properties(where).gcnArchName).partition(":")[0]


class RocmDevice(CudaDevice):
    """``runtime`` compiles the kernels in HIP, if it is there; ``decoding`` says what the kernels of decoding are."""

    def __init__(
        self, where: torch.device, act: str, runtime: Runtime | None, decoding: str, graphs: Graphs | None = None
    ) -> None:
        super().__init__(where, act, graphs)
        self._decoding = decoding
        if runtime is not None:
            multiply = HipProducts(runtime).run
            for op, function in (
                ("attention", HipAttention(runtime)),
                ("linear", partial(dense.linear, multiply=multiply)),
                ("linear_group", partial(dense.linear_group, multiply=multiply)),
            ):
                [triton] = self._providers[op]
                assert isinstance(triton, TritonProvider)
                self._providers = {
                    **self._providers,
                    op: (replace(triton, name="rocm/hip", function=function, prepare=None),),
                }

    def _together(self) -> int:
        return 0  # as the kernels in HIP have them

    def describe(self) -> DeviceInfo:
        info = super().describe()
        details = {**info.details, "hip": str(torch.version.hip), "decoding": self._decoding}
        if self.on_gpu:
            details["architecture"] = architecture(self.where)
        return replace(info, backend="rocm", details=details)

    def providers(self) -> Mapping[str, Sequence[Provider]]:
        return self._providers
