"""Random ops, then random models in random batches, for as long as is asked for. A failure names its seed."""

import time

import numpy as np

from engine.ops import OPS
from engine.testing import models
from engine.testing.checkpoints import KINDS, write_checkpoint
from engine.testing.checks import check_op, ops_of


def test_random_cases(device, backend, rng, pytestconfig, tmp_path):
    end, number = time.monotonic() + pytestconfig.getoption("--engine-seconds"), 0
    ops = list(ops_of(device))
    while time.monotonic() < end:
        seed = int(rng.integers(2**32))
        own = np.random.default_rng(seed)
        try:
            if ops and number % 4:
                check_op(device, OPS[ops[int(own.integers(len(ops)))]], own)
            else:
                _random_model(backend, own, tmp_path / str(number))
        except AssertionError as error:
            raise AssertionError(f"--engine-seed {seed}: {error}") from error
        number += 1


def _random_model(backend, rng, folder):
    kinds = list(KINDS)
    model = write_checkpoint(kinds[int(rng.integers(len(kinds)))], folder, rng)
    prompts = models.random_prompts(rng, rng.integers(1, 60, int(rng.integers(1, 6))).tolist())
    settings = {
        "max_num_batched_tokens": int(rng.integers(4, 80)),
        "block_size": int(rng.choice([1, 4, 16, 32])),
        "max_num_seqs": int(rng.integers(1, 6)),
    }
    got = models.answers(model, backend, prompts, **settings)
    models.compare_answers(got, models.answers(model, "reference", prompts), 2e-3)
