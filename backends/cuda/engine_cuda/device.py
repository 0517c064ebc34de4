"""The device: torch tensors on one GPU, or on the CPU with kernels in Triton's interpreter, for tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import torch

from engine.backend.v1 import (
    Array,
    Collectives,
    Device,
    DeviceInfo,
    Frame,
    Group,
    Limits,
    MemoryInfo,
    Plan,
    Provider,
    Segment,
    Session,
    StepFn,
    StepSession,
    Tuning,
    VirtualMemory,
    available_memory,
)

from . import OLDEST, too_old
from .arrays import DTYPES, all_from_host, all_to_host, from_host, from_pages, on, to_host, to_pages
from .cuts import cuts_of
from .graphs import Graphs, SegmentRunner, graphs_of
from .kernels.common import INTERPRETED
from .layouts import PAGES
from .memory import memory_of, wait_for, watch
from .providers import TritonProvider, make_providers
from .tiles import together
from .virtual import virtual_memory

ROLES = ("f32", "bf16", "f16")


def open_device(index: int, options: Mapping[str, Any]) -> Device:
    """GPU number ``index``, or where TRITON_INTERPRET is 1 the CPU. The option "act" is the dtype of activations: bf16, or f32
    where kernels are interpreted, unless it says otherwise. ValueError for what there is not."""
    act, graphs = act_of(options), graphs_of(options)
    if INTERPRETED:
        return CudaDevice(torch.device("cpu"), act, graphs)
    if not torch.cuda.is_available():
        raise ValueError("torch finds no GPU; a CUDA build of torch and NVIDIA's driver are needed.")
    count = torch.cuda.device_count()
    if index >= count:
        raise ValueError(f"there are {count} GPUs, numbered from 0, and no number {index}.")
    capability = torch.cuda.get_device_capability(index)
    if capability < OLDEST:
        raise ValueError(too_old(capability, index))
    return CudaDevice(torch.device("cuda", index), act, graphs)


def act_of(options: Mapping[str, Any]) -> str:
    """The storage tag of activations that these options ask for."""
    act = str(options.get("act", "f32" if INTERPRETED else "bf16"))
    if act not in ROLES:
        raise ValueError(f"the option act is one of {', '.join(ROLES)} and not {act}.")
    return act


class CudaDevice:
    """Work is submitted to the device's one stream, and waited for when a value that was copied out is asked for."""

    def __init__(self, where: torch.device, act: str, graphs: Graphs | None = None) -> None:
        self.where, self.graphs = where, graphs or graphs_of({})
        self._act = act
        self._cuts = cuts_of(where)
        self._virtual_memory = virtual_memory(where)
        self._providers: Mapping[str, Sequence[Provider]] = make_providers(where, self._cuts, self._together())

    def _together(self) -> int:
        """How codes lie."""
        return together()

    @property
    def on_gpu(self) -> bool:
        return self.where.type == "cuda"

    def alloc(self, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        with on(self.where):
            return torch.zeros(shape, dtype=DTYPES[dtype], device=self.where)

    def free(self, value: torch.Tensor) -> None:
        """Reference counts do it."""

    def virtual_memory(self) -> VirtualMemory | None:
        return self._virtual_memory

    def copy_in(self, array: Array) -> torch.Tensor:
        with on(self.where):
            return from_host(array, self.where)

    def copy_in_all(self, arrays: Sequence[Array]) -> list[torch.Tensor]:
        with on(self.where):
            return all_from_host(arrays, self.where)

    def copy_out(self, value: torch.Tensor) -> Array:
        return to_host(value)

    def copy_out_all(self, values: Sequence[torch.Tensor]) -> Callable[[], list[Array]]:
        with on(self.where):
            return all_to_host(values, self.where)

    def fence(self) -> None:
        if self.on_gpu:
            wait_for(self.where)

    def memory_info(self) -> MemoryInfo:
        return memory_of(self.where) if self.on_gpu else available_memory()

    def watch_memory(self) -> Callable[[], int]:
        return watch(self.where)

    def describe(self) -> DeviceInfo:
        details = {"torch": version("torch"), "triton": version("triton"), "graphs": self.graphs.told}
        name = "triton's interpreter"
        if self.on_gpu:
            about = torch.cuda.get_device_properties(self.where)
            name = f"{about.name} (cuda:{self.where.index})"
            details |= {"compute capability": f"{about.major}.{about.minor}", "SMs": str(about.multi_processor_count)}
        return DeviceInfo(
            name=name,
            backend="cuda",
            kv_layouts=(PAGES,),
            roles={"act": self._act, "residual": "f32"},
            max_in_flight=2,
            details=details,
            decode_buckets=() if self.graphs.off else self.graphs.sizes,
            own_memory=self.on_gpu,
            step_tokens=2048 if self.on_gpu else 512,
        )

    def session(self, plan: Plan) -> Session:
        return StepSession(self, plan)

    def providers(self) -> Mapping[str, Sequence[Provider]]:
        return self._providers

    @contextmanager
    def tuning(self) -> Iterator[Tuning]:
        """No step is recorded meanwhile, nor one that was recorded run."""
        off, self.graphs.off = self.graphs.off, "kernels are being tuned."
        try:
            with self._cuts.tuning() as tuning:
                yield tuning
        finally:
            self.graphs.off = off

    def collectives(self, group: Group) -> Collectives:
        from .collectives import TorchCollectives

        return TorchCollectives(group, self.where)

    def export_blocks(self, state: torch.Tensor, blocks: Array) -> Array:
        with on(self.where):
            return to_pages(state, from_host(blocks, self.where).long())

    def import_blocks(self, state: torch.Tensor, blocks: Array, rows: Array) -> torch.Tensor:
        with on(self.where):
            from_pages(state, from_host(blocks, self.where).long(), rows)
        return state

    def compile(self, segment: Segment, limits: Limits, states: Mapping[str, Any]) -> StepFn | None:
        if not all(isinstance(bound.provider, TritonProvider) for bound in segment.calls):
            return None  # a forced trip through the device runs references on it
        runner = SegmentRunner(segment, limits, self.graphs, self.where)

        def run(frame: Frame) -> None:
            with on(self.where):
                runner(frame)

        return run
