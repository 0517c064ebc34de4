"""Tensors whose addresses are taken before their memory, by the driver's virtual memory management; where kernels are
interpreted, in the host's memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from math import ceil, prod
from typing import Any

import torch

from engine.backend.v1 import HOST_DTYPES, Array, VirtualMemory, host_virtual_memory

from .arrays import DTYPES, on_host
from .kernels.common import INTERPRETED
from .memory import wait_for


def virtual_memory(where: torch.device) -> VirtualMemory | None:
    """None where the GPU or the system has none, or the package cuda-bindings, by which the driver is called, is missing."""
    if INTERPRETED:
        return _of_host()
    if torch.version.hip is not None:
        return None
    try:
        from cuda.bindings import driver

        gpu = GpuMemory(driver, where)
    except (ImportError, RuntimeError):
        return None
    return VirtualMemory(gpu.granularity, gpu.reserve, gpu.map, gpu.unmap)


def _of_host() -> VirtualMemory | None:
    host = host_virtual_memory()
    if host is None:
        return None
    arrays: weakref.WeakValueDictionary[int, Array] = weakref.WeakValueDictionary()

    def reserve(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        array = host.reserve(shape, dtype)
        value = on_host(array)  # which keeps the array
        arrays[value.data_ptr()] = array
        return value

    def map_(value: torch.Tensor, first: int, count: int) -> None:
        host.map(arrays[value.data_ptr()], first, count)

    def unmap(value: torch.Tensor, first: int, count: int) -> None:
        host.unmap(arrays[value.data_ptr()], first, count)

    return VirtualMemory(host.granularity, reserve, map_, unmap)


class Range:
    """Addresses on a GPU, which torch takes for an array of bytes. They are given back, with their memory, when nobody refers to
    them any more."""

    def __init__(self, driver: Any, address: int, nbytes: int, granularity: int, wait: Callable[[], None]) -> None:
        self.address, self.mapped = address, set[int]()
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }
        free = weakref.finalize(self, _free, driver, address, nbytes, granularity, self.mapped, wait)
        free.atexit = False  # the driver frees what a process has


class GpuMemory:
    """One GPU's memory, a granule at a time. RuntimeError where it cannot be mapped to addresses. ``driver`` is the module
    cuda.bindings.driver; ``wrap`` gives the tensor that a range's bytes are."""

    def __init__(
        self,
        driver: Any,
        where: torch.device,
        wrap: Callable[[Range], torch.Tensor] | None = None,
        wait: Callable[[], None] | None = None,
    ) -> None:
        self._driver = driver
        self._wrap = wrap or (lambda there: torch.as_tensor(there, device=where))
        self._wait = wait or (lambda: wait_for(where))
        self._ranges: weakref.WeakValueDictionary[int, Range] = weakref.WeakValueDictionary()
        supported = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        index = _done(driver, driver.cuDeviceGet(where.index or 0))
        if not _done(driver, driver.cuDeviceGetAttribute(supported, index)):
            raise RuntimeError("the GPU has no virtual memory management")
        self._about = driver.CUmemAllocationProp()
        self._about.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._access = driver.CUmemAccessDesc()
        self._access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        for location in (self._about.location, self._access.location):
            location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            location.id = where.index or 0
        least = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self.granularity = int(_done(driver, driver.cuMemGetAllocationGranularity(self._about, least)))

    def reserve(self, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        nbytes = prod(shape) * HOST_DTYPES[dtype].itemsize
        size = ceil(nbytes / self.granularity) * self.granularity
        address = int(_done(self._driver, self._driver.cuMemAddressReserve(size, 0, 0, 0)))
        there = Range(self._driver, address, size, self.granularity, self._wait)
        self._map(there, 0, 1)  # torch asks the driver which GPU the address belongs to
        value = self._wrap(there)
        self._unmap(there, 0, 1)
        self._ranges[address] = there
        return value[:nbytes].view(DTYPES[dtype]).view(shape)

    def map(self, value: torch.Tensor, first: int, count: int) -> None:
        self._map(self._ranges[value.data_ptr()], *self._granules(value, first, count))
        value[first : first + count].view(torch.uint8).zero_()  # it holds what was anyone's before

    def unmap(self, value: torch.Tensor, first: int, count: int) -> None:
        self._unmap(self._ranges[value.data_ptr()], *self._granules(value, first, count))

    def _granules(self, value: torch.Tensor, first: int, count: int) -> tuple[int, int]:
        entry = value[0].nbytes
        return first * entry // self.granularity, count * entry // self.granularity

    def _map(self, there: Range, first: int, count: int) -> None:
        driver, size = self._driver, self.granularity
        for n in range(first, first + count):
            memory = _done(driver, driver.cuMemCreate(size, self._about, 0))
            try:
                _done(driver, driver.cuMemMap(there.address + n * size, size, 0, memory, 0))
                there.mapped.add(there.address + n * size)
            finally:
                _done(driver, driver.cuMemRelease(memory))  # from now on it lives as long as it is mapped
        _done(driver, driver.cuMemSetAccess(there.address + first * size, count * size, [self._access], 1))

    def _unmap(self, there: Range, first: int, count: int) -> None:
        for n in range(first, first + count):
            address = there.address + n * self.granularity
            _done(self._driver, self._driver.cuMemUnmap(address, self.granularity))
            there.mapped.remove(address)


def _free(driver: Any, address: int, nbytes: int, granularity: int, mapped: set[int], wait: Callable[[], None]) -> None:
    wait()
    for one in mapped:
        _done(driver, driver.cuMemUnmap(one, granularity))
    _done(driver, driver.cuMemAddressFree(address, nbytes))


def _done(driver: Any, result: tuple[Any, ...]) -> Any:
    """What a call gives beside its status."""
    status, *given = result
    if status == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
        raise MemoryError("the GPU has no more memory, or no more addresses.")
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"the CUDA driver says {status.name}.")
    return given[0] if given else None
