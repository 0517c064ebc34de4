"""The kit notices nine of ten small changes to a reference."""

import signal

import numpy as np
import pytest
from arena_backend import ArenaDevice
from mutate import mutations

from engine.ops import OPS
from engine.testing.checks import check_op

COUNT, WANTED, SECONDS = 200, 0.9, 20


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
    known = mutations(list(OPS.values()))
    chosen = [known[i] for i in np.random.default_rng().choice(len(known), COUNT, replace=False)]
    missed = [mutation.name for mutation in chosen if not _found(mutation)]
    assert len(missed) <= (1 - WANTED) * COUNT, f"{len(missed)} of {COUNT}:\n" + "\n".join(missed)
