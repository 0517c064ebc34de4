"""The kit notices nine of ten small changes to a reference."""

import signal

import numpy as np
import pytest
from arena_backend import ArenaDevice
from memory_limit import limited_memory
from mutate import mutations

from engine.ops import OPS
from engine.testing.checks import check_op

WANTED, SECONDS, BYTES = 0.9, 20, 2 << 30


def _found(mutation) -> bool:
    def late(*_):
        raise TimeoutError

    old = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        with limited_memory(BYTES):  # a size that has gone wrong may ask for all that the machine has
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
