"""Storage tags and torch tensors. bf16 has a type of its own here, and lies in uint16 on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate

import numpy as np
import torch

from engine.backend.v1 import HOST_DTYPES, Array

DTYPES: Mapping[str, torch.dtype] = {
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "int8": torch.int8,
    "i32": torch.int32,
    "u32": torch.uint32,
    "u8": torch.uint8,
}


_STORED = {HOST_DTYPES[tag]: dtype for tag, dtype in DTYPES.items()}
ALIGNMENT = 64
"""Of arrays that are brought together: kernels are told that pointers are multiples of 16."""
AT_A_TIME = 16 << 20
"""Bytes of a state's blocks that go back or forth at a time: they take as much of a GPU that the cache has filled."""


@contextmanager
def on(device: torch.device) -> Iterator[None]:
    """Within it a GPU is this thread's own, which kernels are cut and launched for, and MemoryError says that it has no room."""
    try:
        with torch.cuda.device(device.index if device.type == "cuda" else -1):
            yield
    except torch.OutOfMemoryError as error:
        raise MemoryError(str(error)) from error


def aligned(nbytes: int) -> int:
    """The bytes that an array takes among others that are brought together."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def from_host(array: Array, device: torch.device) -> torch.Tensor:
    """A copy of a host array, contiguous. uint16 is bf16."""
    return on_host(np.array(array, order="C")).to(device)


def on_host(array: Array) -> torch.Tensor:
    """The tensor whose memory is the array's."""
    host = torch.from_numpy(array)
    return host.view(torch.bfloat16) if array.dtype == np.uint16 else host


def all_from_host(arrays: Sequence[Array], device: torch.device) -> list[torch.Tensor]:
    """Copies of host arrays in one piece of memory, brought at once, from pages that the GPU reads by itself."""
    starts = [0, *accumulate(aligned(array.nbytes) for array in arrays)]
    pages = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    host = pages.numpy()
    for start, array in zip(starts, arrays, strict=False):
        host[start : start + array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
    whole = pages.to(device, non_blocking=True)
    values = []
    for start, array in zip(starts, arrays, strict=False):
        values.append(whole[start : start + array.nbytes].view(_STORED[array.dtype]).view(array.shape))
    return values


def to_host(value: torch.Tensor) -> Array:
    """A copy on the host, once it is computed."""
    return _array(value.detach().to("cpu", copy=True))


def all_to_host(values: Sequence[torch.Tensor], device: torch.device) -> Callable[[], list[Array]]:
    """Begins copies into pages that the GPU writes by itself; gives what waits for them alone, and not for what is submitted
    after them, and gives them in memory of their own."""
    pages = [_pages(value).copy_(value, non_blocking=True) for value in values]
    done = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
    if done is not None:
        done.record()

    def wait() -> list[Array]:
        if done is not None:
            done.synchronize()
        return [np.array(_array(page)) for page in pages]

    return wait


def to_pages(state: torch.Tensor, blocks: torch.Tensor) -> Array:
    """Entries of a state in pages that the GPU writes, and later reads, by itself: they go back and forth."""
    pages = torch.empty((len(blocks), *state.shape[1:]), dtype=state.dtype, pin_memory=state.is_cuda)
    for page, chosen in zip(*_pieces(state, pages, blocks), strict=True):
        page.copy_(state[chosen])
    return _array(pages)


def from_pages(state: torch.Tensor, blocks: torch.Tensor, rows: Array) -> None:
    """Writes what ``to_pages`` gave."""
    for page, chosen in zip(*_pieces(state, on_host(rows), blocks), strict=True):
        state[chosen] = page.to(state.device)


def _pieces(state: torch.Tensor, *values: torch.Tensor) -> list[Sequence[torch.Tensor]]:
    """Values of an entry of a state each, cut alike."""
    count = max(AT_A_TIME // max(state[0].nbytes, 1), 1)
    return [[value[first : first + count] for first in range(0, len(value), count)] for value in values]


def _pages(value: torch.Tensor) -> torch.Tensor:
    """Memory for a value on the host, which its GPU reads and writes by itself."""
    return torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)


def _array(host: torch.Tensor) -> Array:
    array: Array = (host.view(torch.uint16) if host.dtype == torch.bfloat16 else host).numpy()
    return array
