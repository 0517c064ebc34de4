"""Memory mapped to a cache's addresses: in the host's memory, as the interpreter has it, and by a driver that is played here."""

# ruff: noqa: N802 -- the driver's functions have its names

from __future__ import annotations

import gc
import mmap
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace

import numpy as np
import pytest

from engine.backend.v1 import virtual_memory_of
from engine.runtime.llm import LLM
from engine.sampling import SamplingParams
from engine.testing import models
from engine.testing.checkpoints import write_checkpoint
from engine.testing.memory import check_virtual_memory

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
GRANULE = 1 << 16


@pytest.mark.parametrize(("kv_dtype", "graphs"), [("bf16", "1"), ("int8", "0"), ("fp8", "0")])
def test_the_tokens_are_those_of_paging(kv_dtype, graphs, device, tmp_path, monkeypatch):
    """Steps that are recorded too: addresses never change, whatever is mapped to them."""
    monkeypatch.setenv("ENGINE_CUDA_GRAPHS", graphs)
    monkeypatch.setenv("ENGINE_CUDA_GRAPH_SIZES", "1,2")
    folder = write_checkpoint("llama", tmp_path / "llama", np.random.default_rng())
    prompts = models.random_prompts(np.random.default_rng(), (20, 3, 13))
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    sizes = {"block_size": 4, "max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 16}
    found = {}
    for kv_allocator in ("paged", "virtual"):
        with LLM(folder, backend="cuda", kv_cache_dtype=kv_dtype, kv_allocator=kv_allocator, **sizes) as llm:
            found[kv_allocator] = [one.outputs[0].token_ids for one in llm.generate(prompts, params)]
            assert bool(llm.loaded.plan.pages) == (kv_allocator == "virtual")
    assert found["paged"] == found["virtual"]


def test_the_hosts_memory_passes_the_kit(device):
    assert virtual_memory_of(device).granularity == mmap.PAGESIZE
    check_virtual_memory(device, np.random.default_rng())


# -- the driver, played ------------------------------------------------------------------------------------------------


class Status(Enum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_INVALID_VALUE = 1


@dataclass
class Driver:
    """Addresses are those of host memory that is zeroed by nobody; what is done with them is checked as the driver does it."""

    supported: int = 1
    memory: int = 100
    """Granules that there are."""
    called: Counter = field(default_factory=Counter)
    reserved: dict = field(default_factory=dict)
    handles: set = field(default_factory=set)
    mapped: dict = field(default_factory=dict)
    accessible: set = field(default_factory=set)
    CUresult = Status
    CUdevice_attribute = SimpleNamespace(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED=102)
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)

    def CUmemAllocationProp(self):
        return SimpleNamespace(type=0, location=SimpleNamespace(type=0, id=-1))

    def CUmemAccessDesc(self):
        return SimpleNamespace(flags=0, location=SimpleNamespace(type=0, id=-1))

    def cuDeviceGet(self, ordinal):
        return Status.CUDA_SUCCESS, ordinal

    def cuDeviceGetAttribute(self, attribute, device):
        assert attribute == 102 and device == 0
        return Status.CUDA_SUCCESS, self.supported

    def cuMemGetAllocationGranularity(self, about, option):
        assert (about.type, about.location.type, about.location.id, option) == (1, 1, 0, 0)
        return Status.CUDA_SUCCESS, GRANULE

    def cuMemAddressReserve(self, size, alignment, address, flags):
        assert size % GRANULE == 0 < size and (alignment, address, flags) == (0, 0, 0)
        if size > 1 << 40:
            return Status.CUDA_ERROR_OUT_OF_MEMORY, 0
        memory = np.frombuffer(mmap.mmap(-1, size + GRANULE), np.uint8)
        found = -(-memory.ctypes.data // GRANULE) * GRANULE
        self.reserved[found] = memory, size
        return Status.CUDA_SUCCESS, found

    def cuMemAddressFree(self, address, size):
        assert self.reserved.pop(address)[1] == size
        assert not any(address <= one < address + size for one in self.mapped), "it is mapped yet"
        return (Status.CUDA_SUCCESS,)

    def cuMemCreate(self, size, about, flags):
        assert size == GRANULE and about.location.id == 0 and flags == 0
        if len(self.mapped) == self.memory:
            return Status.CUDA_ERROR_OUT_OF_MEMORY, 0
        self.called["create"] += 1
        self.handles.add(self.called["create"])
        return Status.CUDA_SUCCESS, self.called["create"]

    def cuMemMap(self, address, size, offset, handle, flags):
        assert (size, offset, flags) == (GRANULE, 0, 0) and handle in self.handles and address % GRANULE == 0
        assert address not in self.mapped, "it is mapped already"
        assert any(start <= address and address + size <= start + all_ for start, (_, all_) in self.reserved.items())
        self.mapped[address] = handle
        self.bytes(address)[:] = 0xAB  # what somebody else has left there
        return (Status.CUDA_SUCCESS,)

    def cuMemRelease(self, handle):
        self.handles.remove(handle)
        return (Status.CUDA_SUCCESS,)

    def cuMemSetAccess(self, address, size, access, count):
        assert len(access) == count == 1 and (access[0].flags, access[0].location.id) == (3, 0)
        granules = set(range(address, address + size, GRANULE))
        assert granules <= self.mapped.keys()
        self.accessible |= granules
        return (Status.CUDA_SUCCESS,)

    def cuMemUnmap(self, address, size):
        assert size == GRANULE
        if address not in self.mapped:
            return (Status.CUDA_ERROR_INVALID_VALUE,)
        del self.mapped[address]
        self.accessible.discard(address)
        return (Status.CUDA_SUCCESS,)

    def bytes(self, address):
        start, (memory, _) = next(item for item in self.reserved.items() if item[0] <= address < item[0] + item[1][1])
        first = address - memory.ctypes.data
        assert start <= address
        return memory[first : first + GRANULE]


@pytest.fixture
def played(device):
    from engine_cuda.virtual import GpuMemory

    driver, waits = Driver(), []

    def wrap(there):
        about = there.__cuda_array_interface__
        address, read_only = about["data"]
        assert address in driver.accessible and (read_only, about["typestr"], about["strides"]) == (False, "|u1", None)
        memory, size = driver.reserved[address]
        assert about["shape"] == (size,)
        first = address - memory.ctypes.data
        value = torch.from_numpy(memory[first : first + size])
        value.there = there  # torch's own keeps the range as long as there is a view
        kept.append(value)
        return value

    kept: list = []
    where = torch.device("cuda", 0)
    return driver, GpuMemory(driver, where, wrap, lambda: waits.append(len(driver.mapped))), kept, waits


def test_granules_are_mapped_one_by_one_and_read_as_zeros(played):
    driver, memory, _, _ = played
    state = memory.reserve((10, GRANULE), "bf16")
    assert state.shape == (10, GRANULE) and state.dtype == torch.bfloat16 and not driver.mapped
    memory.map(state, 3, 2)
    base = state.data_ptr()
    assert set(driver.mapped) == driver.accessible == {base + n * GRANULE for n in range(6, 10)}
    assert not driver.handles, "memory lives as long as it is mapped"
    assert not state[3:5].any()
    memory.unmap(state, 4, 1)
    assert set(driver.mapped) == {base + n * GRANULE for n in (6, 7)}
    memory.map(state, 4, 1)
    assert not state[4].any()


def test_memory_and_addresses_have_an_end(played):
    driver, memory, _, _ = played
    with pytest.raises(MemoryError, match="no more memory, or no more addresses"):
        memory.reserve((1 << 30, GRANULE), "f32")
    state = memory.reserve((200, GRANULE), "u8")
    with pytest.raises(MemoryError):
        memory.map(state, 0, 101)
    assert len(driver.mapped) == 100 and not driver.handles
    with pytest.raises(RuntimeError, match="the CUDA driver says CUDA_ERROR_INVALID_VALUE"):
        memory.unmap(state, 150, 1)


def test_all_is_given_back_with_the_last_that_refers_to_it(played):
    driver, memory, kept, waits = played
    state, other = (memory.reserve((8, GRANULE), "f32") for _ in range(2))
    memory.map(state, 1, 3)
    memory.map(other, 0, 1)
    kept.pop(0)
    del state
    gc.collect()
    assert waits == [16] and len(driver.reserved) == 1 and len(driver.mapped) == 4
    memory.unmap(other, 0, 1)


def test_a_gpu_without_it_has_none(device):
    from engine_cuda.virtual import GpuMemory

    with pytest.raises(RuntimeError, match="no virtual memory management"):
        GpuMemory(Driver(supported=0), torch.device("cuda", 0))
