"""No step that points outside of the states reaches a device, whoever made the mistake."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tiny_models

from engine.errors import SchedulerError
from engine.runtime.config import EngineConfig
from engine.runtime.head_inputs import HeadInputs, RowParams
from engine.runtime.load import load
from engine.runtime.step_inputs import StepArrays
from engine.sampling import SamplingParams
from engine.scheduler import ScheduledSequence, ScheduledStep

FULL, WINDOW, SLOTS, CONTEXT = 33, 15, 2, 128
"""Blocks of the pools of the layers without and with a window, the null block included; a block has 4 tokens."""


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    folder = tmp_path_factory.mktemp("windows")
    window = {"sliding_window": 16, "layer_types": ["full_attention", "sliding_attention"]}
    tiny_models.write_llama(folder, np.random.default_rng(), model_type="mistral", **window)
    sizes = {"max_model_len": CONTEXT, "max_num_seqs": SLOTS, "max_num_batched_tokens": 8, "kv_cache_tokens": CONTEXT}
    loaded = load(EngineConfig(model=folder, backend="reference", block_size=4, **sizes))
    assert loaded.memory.num_blocks == (FULL, WINDOW)
    session = loaded.session()
    yield session
    session.close()


@pytest.fixture
def inputs():
    """A step as the scheduler makes them: the last numbers that there are, everywhere."""
    last = tuple(range(1, 32)), (*(0,) * 26, *range(1, 6))
    parts = (
        ScheduledSequence(0, 0, 123, 1, (7,), True, last),
        ScheduledSequence(1, 1, 2, 5, (7,) * 5, True, ((FULL - 2, FULL - 1), (WINDOW - 2, WINDOW - 1))),
    )
    copies = ((4, FULL - 1),), ((3, WINDOW - 1),)
    step = ScheduledStep(0, parts, 1, 6, copies, ((0, 1),), ((1, (5, tiny_models.VOCAB - 1)),))
    bias = np.array([tiny_models.VOCAB - 1], np.int32), np.ones(1, np.float32)
    made, _ = StepArrays(2, HeadInputs(10)).of(step, lambda _: RowParams(SamplingParams(), 3, 0, 1, bias=bias))
    return replace(made, arrays={name: array.copy() for name, array in made.arrays.items()})


def test_a_step_within_the_states_runs(session, inputs):
    assert session.submit(inputs).wait().status.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("name", "at", "wrong", "sentence"),
    [
        ("page_table.0", (0, 30), FULL, "block of cache group 0 33, and they go from 0 to 32"),
        ("page_table.1", (1, 1), WINDOW, "block of cache group 1 15, and they go from 0 to 14"),
        ("page_table.1", (1, 0), -1, "block of cache group 1 -1"),
        ("block_copies.0", (0, 0), FULL, "block of cache group 0 33"),
        ("block_copies.1", (0, 1), WINDOW, "block of cache group 1 15"),
        ("seq_slots", 1, SLOTS, "slot 2, and they go from 0 to 1"),
        ("history_copies", (0, 0), -1, "slot -1"),
        ("fill_slots", 1, SLOTS, "slot 2"),
        ("fill_positions", 1, CONTEXT, "position 128"),
        ("rows", 1, 6, "row 6"),
        ("seq_starts", 0, 124, "position 125"),  # one page more than the table is wide
        ("seq_starts", 0, -1, "position -1"),
        ("seq_starts", 1, 2**31 - 1, "position 2147483647"),
        ("query_offsets", 1, 7, "number of tokens"),
        ("query_offsets", 2, 5, "from 0 to 5"),
        ("query_offsets", 0, 1, "from 1 to 6"),
        ("token_ids", 0, 320, "token 320, and they go from -1 to 319"),  # -1: the one in the history
        ("token_ids", 5, 2**31 - 1, "token 2147483647"),
        ("token_ids", 0, -2, "token -2"),
        ("fill_ids", 1, 320, "token 320, and they go from 0 to 319"),
        ("fill_ids", 0, -1, "token -1"),
        ("bias_ids", 1, 320, "token 320, and they go from 0 to 319"),
        ("bias_ids", 0, -1, "token -1"),
        ("targets", 1, 320, "token 320, and they go from -1 to 319"),
    ],
)
def test_a_step_beyond_them_is_refused(session, inputs, name, at, wrong, sentence):
    inputs.arrays[name][at] = wrong
    with pytest.raises(SchedulerError, match=sentence):
        session.submit(inputs)


@pytest.mark.parametrize("blocks", [((1,), (WINDOW,)), ((FULL,), (1,)), ((-1,), (1,))])
def test_no_other_blocks_are_saved_or_filled(session, blocks):
    saved = session.export_blocks(((1,), (2,))).wait()
    with pytest.raises(SchedulerError, match="block of cache group"):
        session.export_blocks(blocks)
    with pytest.raises(SchedulerError, match="block of cache group"):
        session.import_blocks(blocks, saved)
