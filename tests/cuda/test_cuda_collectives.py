"""Collectives over torch.distributed, by the kit, on tensors of the CPU, and a model on two ranks."""

from __future__ import annotations

import numpy as np
import pytest

from engine.testing.collectives import CHECKS, Subject
from engine.testing.models import answers, compare_answers


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS)
def test_the_ranks_pass_the_kit(check, device):
    Subject(backend="cuda").check(*CHECKS[check], int(np.random.default_rng().integers(2**32)))


@pytest.mark.slow
def test_two_ranks_give_the_tokens_of_one(device, llama):
    prompts = [np.random.default_rng().integers(3, 200, n).tolist() for n in (1, 20)]
    alone, together = (answers(llama, "cuda", prompts, new=2, tensor_parallel_size=ranks) for ranks in (1, 2))
    compare_answers(together, alone, 2e-3)
