"""The kit finds what backends get wrong: planted bugs, and mutations of the references' sources."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from arena_backend import ArenaDevice

from engine.ops import OPS, dtypes
from engine.testing.checks import check_op
from engine.testing.cuts import check_cuts
from engine.testing.memory import check_block_access, check_copies, check_description


def rng():
    return np.random.default_rng()


def spoilt(op, change):
    """A device whose ``op`` is the reference behind ``change(reference)``."""
    spec = OPS[op]
    return ArenaDevice({op: replace(spec, reference=change(spec.reference))})


def with_arguments(change):
    """The reference with its arguments changed on the way in."""
    return lambda reference: lambda **given: reference(**change(dict(given)))


def off_by_one_page(given):
    table = given["page_table"]
    return given | {"page_table": np.roll(table, 1, axis=1)}


def fifth_as_fourth(given):
    """A decode step's sequences from the fifth on have the fourth's table."""
    seqs = np.arange(len(given["page_table"]))
    decodes = len(given["q"]) == len(seqs)
    return given | {"page_table": given["page_table"][np.minimum(seqs, 3)]} if decodes else given


def no_mask(given):
    """Every query sees as far as the last one of its sequence."""
    lengths = np.diff(given["query_offsets"])
    seqs = np.repeat(np.arange(len(lengths)), lengths)
    return given | {
        "seq_starts": (given["seq_starts"] + lengths - 1)[seqs],
        "query_offsets": np.arange(len(seqs) + 1, dtype=np.int32),
        "page_table": given["page_table"][seqs],
    }


def other_pairing(given):
    return given | {"interleaved": not given["interleaved"]}


def wrong_group(given):
    heads, kv_heads, dim = given["heads"], given["kv_heads"], given["head_dim"]
    q = given["q"].reshape(len(given["q"]), kv_heads, heads // kv_heads, dim).swapaxes(1, 2)
    return given | {"q": np.ascontiguousarray(q).reshape(given["q"].shape)}


def swapped_scales(given):
    return given | {"k_scale": given["v_scale"], "v_scale": given["k_scale"]} if "v_scale" in given else given


def without_residual(given):
    return given | {"residual": None}


def stale(reference):
    """Slots that hold something are not written again."""

    def write(*, k, kv_slots, **given):
        blocks, offsets = np.divmod(np.maximum(kv_slots, 0), k.shape[1])
        written = (k.reshape(*k.shape[:2], -1) != 0).any(-1)[blocks, offsets]
        return reference(k=k, kv_slots=np.where(written, -1, kv_slots).astype(np.int32), **given)

    return write


def cut_off(reference):
    """Truncated rather than rounded when it is stored."""

    def write(*, new_k, k, **given):
        if dtypes.storage_tag(k) == "bf16":
            new_k = (new_k.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
        return reference(new_k=new_k, k=k, **given)

    return write


def changed(change):
    """The reference with its outputs changed on the way out."""
    return lambda reference: lambda **given: tuple(map(change, reference(**given)))


DEVICES = {
    "off-by-one page": ("attention", lambda: spoilt("attention", with_arguments(off_by_one_page))),
    "more sequences than four": ("attention", lambda: spoilt("attention", with_arguments(fifth_as_fourth))),
    "missing mask": ("attention", lambda: spoilt("attention", with_arguments(no_mask))),
    "wrong rope pairing": ("rope", lambda: spoilt("rope", with_arguments(other_pairing))),
    "swapped scales": ("attention", lambda: spoilt("attention", with_arguments(swapped_scales))),
    "wrong GQA mapping": ("attention", lambda: spoilt("attention", with_arguments(wrong_group))),
    "lost residual": ("linear", lambda: spoilt("linear", with_arguments(without_residual))),
    "stale KV": ("kv_write", lambda: spoilt("kv_write", stale)),
    "wrong rounding": ("kv_write", lambda: spoilt("kv_write", cut_off)),
    "wider numbers": ("linear", lambda: spoilt("linear", changed(np.float64))),
    "wider tokens": ("step_expand", lambda: spoilt("step_expand", changed(np.int64))),
    "another shape": ("linear", lambda: spoilt("linear", changed(np.ravel))),
}


def past_the_end():
    device = ArenaDevice()
    plain = device.store

    def store(op, place, array):
        plain(op, place, array)
        device.arena.bytes[place.start + place.nbytes + 60 :][:8] = 0  # where a whole vector would have ended

    device.store = store
    return device


def without_tail():
    device = ArenaDevice()

    def store(op, place, array):
        whole = array.shape[-1] // 16 * 16 if array.ndim > 1 else len(array)
        device.arena.view(place)[..., :whole] = array[..., :whole]

    device.store = store
    return device


DEVICES |= {
    "write past the end": ("gated_act", past_the_end),
    "uninitialized tail": ("linear", without_tail),
}


def test_the_arena_passes():
    device = ArenaDevice()
    for op in OPS:
        assert check_op(device, OPS[op], rng()).ran, op


@pytest.mark.parametrize("bug", DEVICES)
def test_a_planted_bug_is_found(bug):
    op, device = DEVICES[bug]
    with pytest.raises(AssertionError):
        check_op(device(), OPS[op], rng())


class Swapping(ArenaDevice):
    """A device with block access, of which ``wrong`` has another form of one."""

    def __init__(self, **wrong):
        super().__init__()
        self._wrong = wrong

    def export_blocks(self, state, blocks):
        return self._wrong.get("export", lambda view, blocks: view[blocks])(self.arena.view(state), blocks)

    def import_blocks(self, state, blocks, rows):
        given = self._wrong.get("into", lambda view, blocks, rows: view.__setitem__(blocks, rows))
        given(self.arena.view(state), blocks, rows)
        return self._wrong.get("gives", state)


SWAPPING = {
    "exports all": {"export": lambda view, blocks: view.copy()},
    "exports a block beside": {"export": lambda view, blocks: view[blocks - 1]},
    "exports in the order of memory": {"export": lambda view, blocks: view[np.sort(blocks)]},
    "imports nothing": {"into": lambda view, blocks, rows: None},
    "imports in the order of memory": {"into": lambda view, blocks, rows: view.__setitem__(np.sort(blocks), rows)},
    "imports beyond": {"into": lambda view, blocks, rows: view.__setitem__(slice(blocks[0], None), rows[0])},
    "gives nothing": {"gives": None},
}


def test_block_access_passes():
    check_block_access(Swapping(), rng())


@pytest.mark.parametrize("wrong", SWAPPING)
def test_wrong_block_access_is_found(wrong):
    with pytest.raises(AssertionError, match="_blocks"):
        check_block_access(Swapping(**SWAPPING[wrong]), rng())


def test_a_copy_that_is_the_value_s_memory_is_found():
    device = ArenaDevice()
    check_copies(device, rng())
    device.copy_out = device.arena.view
    with pytest.raises(AssertionError, match="changes after free"):
        check_copies(device, rng())


@pytest.mark.parametrize(
    "wrong",
    [
        {"writes": "in place"},
        {"ranks": "fibers"},
        {"max_in_flight": 0},
        {"roles": {"act": "f32"}},
        {"dtypes": frozenset({"f32", "i32", "int4"})},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_a_description_of_what_there_is_not_is_found(wrong):
    device = ArenaDevice()
    check_description(device)
    info = replace(device.describe(), **wrong)
    device.describe = lambda: info
    with pytest.raises(AssertionError, match=next(iter(wrong))):
        check_description(device)


RECURRENT = ("causal_conv", "gated_delta", "ssm_scan")


def by_step(reference):
    """Rounds in another way where a step has other tokens, too."""
    return lambda **given: tuple(y * np.float32(1 + 1e-6 * (given["query_offsets"][1] > 1)) for y in reference(**given))


def forgetful(reference):
    """Leaves nothing at the end of a step amid a block."""

    def run(*, query_offsets, seq_starts, block_size, **given):
        state = given["tail" if "tail" in given else "memory"]
        before, place = state.copy(), {"query_offsets": query_offsets, "seq_starts": seq_starts}
        found = reference(**place, block_size=block_size, **given)
        for seq, end in enumerate(seq_starts + np.diff(query_offsets)):
            if end % block_size:
                block = given["page_table"][seq, (end - 1) // block_size]
                state[block] = before[block]
        return found

    return run


@pytest.mark.parametrize("op", RECURRENT)
@pytest.mark.parametrize("change", [by_step, forgetful])
def test_bits_that_depend_on_how_a_prompt_is_cut_are_found(op, change):
    assert check_cuts(ArenaDevice({}), OPS[op], rng())
    with pytest.raises(AssertionError, match=op):
        check_cuts(spoilt(op, change), OPS[op], rng())
