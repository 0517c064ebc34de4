"""Collectives over several ranks."""

import pytest

from engine.testing.collectives import CHECKS


@pytest.mark.parametrize("check", CHECKS)
def test_collectives(subject, check, rng):
    function, ranks = CHECKS[check]
    subject.check(function, ranks, int(rng.integers(2**32)))
