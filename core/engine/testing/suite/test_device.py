"""The eight methods of a device."""

from engine.backend.v1 import Device
from engine.testing import memory

_METHODS = ("alloc", "free", "copy_in", "copy_out", "fence", "memory_info", "describe", "session")


def test_it_has_the_eight_methods(device: Device):
    missing = [name for name in _METHODS if not callable(getattr(device, name, None))]
    assert not missing, f"the device lacks {missing[0]}."


def test_its_description_can_be_read(device):
    memory.check_description(device)


def test_what_goes_in_comes_out(device, rng):
    memory.check_copies(device, rng)


def test_values_are_apart(device, rng):
    memory.check_values_are_apart(device, rng)
    memory.check_copies_together(device, rng)
    memory.check_copies_begun_together(device, rng)


def test_alloc_gives_zeros(device):
    memory.check_alloc(device)


def test_populated_memory_holds_what_it_held(device, rng):
    memory.check_populate(device, rng)


def test_blocks_go_out_and_come_back(device, rng):
    memory.check_block_access(device, rng)


def test_virtual_memory_comes_and_goes(device, rng):
    memory.check_virtual_memory(device, rng)


def test_memory_info(device):
    memory.check_memory_info(device)


def test_fence(device):
    memory.check_fence(device)
