"""The rewrite for several ranks, and the parts of weights that they hold."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from engine.errors import ConfigError
from engine.formats import FORMATS, Tensor
from engine.program.parts import column_part, entries, matrix_part, of_first_rank, row_part
from engine.program.shard import shard
from engine.program.weights import ConstantWeight, single, stack


def stored(shape, name):
    array = np.random.default_rng().standard_normal(shape, np.float32)
    return Tensor("w", shape, FORMATS[name], FORMATS[name].encode(array).reshape(-1))


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "MXFP4"])
@pytest.mark.parametrize("experts", [0, 3])
def test_parts_of_stored_weights(name, experts):
    tensors = [stored((12, 128), name) for _ in range(max(experts, 1))]
    whole = stack("w", tuple(tensors)) if experts else single("w", tensors[0])
    dense = whole.dense()
    cut = {
        "rows": (row_part(whole, (5, 11)), dense[..., 5:11, :]),
        "columns": (column_part(whole, (32, 128)), dense[..., 32:]),
        "both": (column_part(row_part(whole, (1, 4)), (64, 96)), dense[..., 1:4, 64:96]),
    }
    if experts:
        cut["matrices"] = matrix_part(whole, (1, 3)), dense[1:3]
    for part, want in cut.values():
        assert (part.format, part.shape) == (name, want.shape)
        np.testing.assert_array_equal(part.dense(), want)
        flat = want.reshape(-1, want.shape[-1])
        np.testing.assert_array_equal(FORMATS[name].decode(part.rows()), flat)
        for start, stop in ((0, 1), (1, len(flat) - 1), (2, len(flat) + 9)):
            np.testing.assert_array_equal(FORMATS[name].decode(part.rows(start, stop)), flat[start:stop])
    assert len({part.name for part, _ in cut.values()} | {whole.name}) == len(cut) + 1, "packed weights go by name"


def test_blocks_are_not_cut_and_biases_count_once():
    with pytest.raises(
        ConfigError, match="w is stored in Q4_0 blocks of 32 columns, and a split at column 48 would cut"
    ):
        column_part(single("w", stored((4, 96), "Q4_0")), (48, 96))
    bias = ConstantWeight("b", np.arange(6, dtype=np.float32))
    assert sum(of_first_rank(bias, rank).dense() for rank in range(3)).tolist() == bias.dense().tolist()
    assert entries(bias, (2, 4)).dense().tolist() == [2, 3]


def test_one_rank_is_the_program_itself(program):
    assert shard(program, 0, 1) is program


def test_ranks_have_one_program_and_parts_of_its_weights(program):
    """Two layers: attention and feed-forward are each reduced once, and the logits gathered."""
    ranks = [shard(program, rank, 2) for rank in range(2)]
    for mine in ranks:
        added = Counter(call.op for call in mine.calls) - Counter(call.op for call in program.calls)
        assert added == {"all_reduce": 4, "all_gather": 1}
        assert [kv.kv_heads * 2 for kv in mine.kv_layers] == [kv.kv_heads for kv in program.kv_layers]
        assert [call.scope for call in mine.calls if call.op == "all_reduce"] == [f"layers.{i}" for i in (0, 0, 1, 1)]
        ids = [value.id for call in mine.calls for value in call.outputs]
        assert len(set(ids)) == len(ids) and max(ids) < mine.values
    for one, other in zip(*(mine.calls for mine in ranks), strict=True):
        assert (one.op, one.attrs, one.states) == (other.op, other.attrs, other.states)
        assert [v.shape for v in one.outputs] == [v.shape for v in other.outputs]
        for name, ref in one.weights.items():
            shared = ref.name == other.weights[name].name
            assert shared == ("[" not in ref.name)
    whole = {ref.name: ref for call in program.calls for ref in call.weights.values()}
    for mine in zip(*(mine.calls for mine in ranks), strict=True):
        for name, ref in mine[0].weights.items():
            if "[" in ref.name:
                axis = -1 if "columns" in ref.name else 0
                joined = np.concatenate([call.weights[name].dense() for call in mine], axis)
                np.testing.assert_array_equal(joined, whole[ref.name.partition("[")[0]].dense())


def test_what_reads_a_value_gets_it_whole_or_split(program):
    """Values keep their shapes from the whole program, or are named as parts."""
    whole = {value.id: value for call in program.calls for value in call.outputs}
    mine = shard(program, 1, 2)
    made = {value.id: value for call in mine.calls for value in call.outputs}
    for value in made.values():
        assert whole[value.id].shape == value.shape if value.id in whole else value.name.endswith(".part")
    for call in mine.calls:
        for value in call.inputs.values():
            assert value == made.get(value.id, value)
