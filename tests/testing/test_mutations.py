"""The kit notices nine of ten small changes to a reference."""

import gc
import signal
import weakref

import numpy as np
import pytest
from arena_backend import ArenaDevice
from mutate import mutations

from engine.ops import OPS
from engine.testing.checks import check_op

WANTED, SECONDS = 0.9, 20


def _found(mutation) -> bool:
    def late(*_):
        raise TimeoutError

    old = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        for spec, mutant in mutation.make():
            check_op(ArenaDevice({spec.name: mutant}), spec, np.random.default_rng())
    except Exception:  # wrong results, or a crash
        return True
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)
    return False


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_mutations_are_found():
    every = mutations(list(OPS.values()))
    missed = [mutation.name for mutation in every if not _found(mutation)]
    found = len(every) - len(missed)
    assert found >= WANTED * len(every), f"{len(missed)} of {len(every)} missed:\n" + "\n".join(missed)


def test_a_devices_memory_goes_with_it():
    """There is one for each mutation, and commands have the collector of cycles come seldom."""
    device = ArenaDevice({"add": OPS["add"]})
    check_op(device, OPS["add"], np.random.default_rng())
    memory, enabled = weakref.ref(device.arena), gc.isenabled()
    gc.disable()
    try:
        del device
        assert memory() is None
    finally:
        if enabled:
            gc.enable()
