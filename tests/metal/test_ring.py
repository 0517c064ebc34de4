"""Collectives over MLX's ring, by the kit, and a model on two ranks."""

from __future__ import annotations

import numpy as np
import pytest

from engine.testing.collectives import CHECKS, Subject
from engine.testing.models import answers, compare_answers


@pytest.mark.parametrize("check", CHECKS)
def test_the_ring_passes_the_kit(check):
    Subject(backend="metal").check(*CHECKS[check], int(np.random.default_rng().integers(2**32)))


def test_two_ranks_give_the_tokens_of_one(llama):
    prompts = [np.random.default_rng().integers(3, 200, n).tolist() for n in (1, 20)]
    alone, together = (answers(llama, "metal", prompts, tensor_parallel_size=ranks) for ranks in (1, 2))
    compare_answers(together, alone, 2e-3)
