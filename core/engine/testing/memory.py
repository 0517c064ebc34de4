"""Checks of a device's eight methods, whatever providers it has."""

from __future__ import annotations

import numpy as np

from ..backend.v1 import (
    HOST_DTYPES,
    Array,
    Device,
    block_access_of,
    copy_in_all_of,
    copy_out_all_of,
    populate_of,
    virtual_memory_of,
)

_CACHED = frozenset({"f32", "f16", "bf16", "int8", "int16", "u8"})
"""Storage tags of states that have blocks."""


def check_description(device: Device) -> None:
    """What ``describe`` says is among what there is: a word that nobody knows is as good as none, and is not noticed later."""
    info = device.describe()
    assert info.writes in ("into", "replace"), f"writes is {info.writes!r}; it must be into or replace."
    assert info.ranks in ("processes", "threads"), f"ranks is {info.ranks!r}; it must be processes or threads."
    assert info.max_in_flight >= 1, f"max_in_flight is {info.max_in_flight}; it must be at least 1."
    assert info.roles.keys() == {"act", "residual"}, f"roles are {sorted(info.roles)}; they must be act and residual."
    unknown = sorted(info.dtypes - HOST_DTYPES.keys())
    assert not unknown, f"dtypes has {unknown[0]!r}, which is no storage tag; these are {', '.join(HOST_DTYPES)}."


def check_copies(device: Device, rng: np.random.Generator) -> None:
    """``copy_out(copy_in(a))`` is ``a``, for every storage tag that the device names, odd sizes, strides and offsets, and stays
    it when the value is freed."""
    for tag in sorted(device.describe().dtypes):
        for array in _arrays(HOST_DTYPES[tag], rng):
            value = device.copy_in(array)
            found = device.copy_out(value)
            assert found.shape == array.shape, f"{tag} {array.shape}: copy_out gives the shape {found.shape}."
            assert found.dtype == array.dtype, f"{tag} {array.shape}: copy_out gives {found.dtype}."
            assert found.tobytes() == array.tobytes(), f"{tag} {array.shape}: copy_out gives other bytes."
            device.free(value)
            del value
            device.free(device.copy_in(np.zeros_like(array)))  # in the memory that was freed
            assert found.tobytes() == array.tobytes(), f"{tag} {array.shape}: what copy_out gave changes after free."


def check_copies_together(device: Device, rng: np.random.Generator) -> None:
    """Where a device has ``copy_in_all``: each array comes back, among others of all tags, and none is another's memory."""
    together = copy_in_all_of(device)
    if together is None:
        return
    arrays = [array for tag in sorted(device.describe().dtypes) for array in _arrays(HOST_DTYPES[tag], rng)]
    values = together(arrays)
    assert len(values) == len(arrays), f"copy_in_all gives {len(values)} values of {len(arrays)} arrays."
    kept = [array.copy() for array in arrays]
    for array in arrays:
        array[...] = 0  # it is borrowed until copy_in_all has returned, and no longer
    for value, array in zip(values, kept, strict=True):
        found = device.copy_out(value)
        same = found.dtype == array.dtype and found.shape == array.shape and found.tobytes() == array.tobytes()
        assert same, f"copy_in_all of {array.dtype} {array.shape}: copy_out gives other bytes."
        device.free(value)


def check_copies_begun_together(device: Device, rng: np.random.Generator) -> None:
    """Where a device has ``copy_out_all``: the arrays are those of ``copy_out``, whatever becomes of the values meanwhile, and
    come when they are asked for, in any order."""
    begin = copy_out_all_of(device)
    if begin is None:
        return
    arrays = [array for tag in sorted(device.describe().dtypes) for array in _arrays(HOST_DTYPES[tag], rng)]
    waits = []
    for part in (arrays, arrays[::-1], []):
        values = [device.copy_in(array) for array in part]
        waits.append((part, begin(values)))
        for value in values:
            device.free(value)
        del values
        for array in part:  # in the memory that was freed
            device.free(device.copy_in(np.zeros_like(array)))
    for part, wait in reversed(waits):
        found = wait()
        assert len(found) == len(part), f"copy_out_all gives {len(found)} arrays of {len(part)} values."
        for array, got in zip(part, found, strict=True):
            same = got.dtype == array.dtype and got.shape == array.shape and got.tobytes() == array.tobytes()
            assert same, f"copy_out_all of {array.dtype} {array.shape} gives other bytes than were copied in."


def check_values_are_apart(device: Device, rng: np.random.Generator) -> None:
    """Values do not share memory: freeing one, and making others, leaves the rest as it is."""
    arrays = [rng.standard_normal((n, 5), np.float32) for n in (7, 1, 64, 7)]
    values = [device.copy_in(array) for array in arrays]
    device.free(values[1])
    device.free(values[2])
    more = [device.copy_in(np.full((n, 5), 9, np.float32)) for n in (64, 7, 2)]
    for n in (0, 3):
        assert np.array_equal(device.copy_out(values[n]), arrays[n]), "a value changed when others were freed and made."
    for value in (values[0], values[3], *more):
        device.free(value)


def check_alloc(device: Device) -> None:
    """``alloc`` gives zeros, in memory that has been used as in new memory."""
    for tag in sorted(device.describe().dtypes):
        dirty = [device.copy_in(np.full((33, 65), 7, HOST_DTYPES[tag])) for _ in range(3)]
        for value in dirty:
            device.free(value)
        made = [device.alloc((33, 65), tag) for _ in range(3)]
        for value in made:
            found = device.copy_out(value)
            assert found.shape == (33, 65) and not found.any(), f"alloc of {tag} does not give zeros."
            device.free(value)


def check_populate(device: Device, rng: np.random.Generator) -> None:
    """Where a device has ``populate``: a value holds what it held, in the entries that are named and in all others."""
    populate = populate_of(device)
    if populate is None:
        return
    for tag in sorted(device.describe().dtypes):
        array = np.repeat(_arrays(HOST_DTYPES[tag], rng)[3][None], 9, axis=0)
        wants = array.tobytes(), np.zeros_like(array).tobytes()
        for value, want in zip((device.copy_in(array), device.alloc(array.shape, tag)), wants, strict=True):
            for first, count in ((2, 5), (8, 1), (0, 9)):
                populate(value, first, count)
                same = device.copy_out(value).tobytes() == want
                assert same, f"populate of {count} entries of {tag} from {first} on changes the value."
            device.free(value)


def check_block_access(device: Device, rng: np.random.Generator) -> None:
    """Where a device has block access: blocks are exported in their order, and imported there and nowhere else, but for block
    0, which is nobody's."""
    access = block_access_of(device)
    if access is None:
        return
    taken, given = np.array([7, 1, 3], np.int32), np.array([2, 8, 7], np.int32)
    for tag in sorted(device.describe().dtypes & _CACHED):
        array = np.resize(_arrays(HOST_DTYPES[tag], rng)[3], (9, 5, 7))
        state, want = device.copy_in(array), array.copy()
        rows = access.export_blocks(state, taken)
        assert rows.shape == (3, 5, 7), f"export_blocks of 3 blocks of {tag} gives the shape {rows.shape}."
        assert rows.dtype == array.dtype, f"export_blocks of {tag} gives {rows.dtype}."
        assert rows.tobytes() == array[taken].tobytes(), (
            f"export_blocks of {tag} gives other bytes, or in another order."
        )
        written = access.import_blocks(state, given, rows)
        assert written is state or device.describe().writes == "replace", (
            "import_blocks gives another object, and the device writes into states."
        )
        want[given] = rows
        found = device.copy_out(written)
        assert found[1:].tobytes() == want[1:].tobytes(), (
            f"import_blocks of {tag} leaves other bytes, there or in other blocks."
        )
        device.free(written)


def check_virtual_memory(device: Device, rng: np.random.Generator) -> None:
    """Where a device has virtual memory and block access: entries have zeros when they are mapped, and hold what they are given,
    whatever is mapped and unmapped around them."""
    memory, access = virtual_memory_of(device), block_access_of(device)
    if memory is None or access is None:
        return
    granularity = memory.granularity
    assert granularity > 0 and granularity & (granularity - 1) == 0, (
        f"granules of {granularity} bytes are no power of two."
    )
    for tag in sorted(device.describe().dtypes & _CACHED):
        dtype, places = HOST_DTYPES[tag], np.array([4, 2, 40, 3], np.int32)
        size = 3 * granularity // dtype.itemsize
        rows = np.ascontiguousarray(np.resize(_arrays(dtype, rng)[3], (4, size + 1))[:, :size])
        state, other = memory.reserve((1 << 12, size), tag), memory.reserve((3, size), tag)
        for value, first, count in ((state, 2, 3), (other, 0, 3), (state, 40, 1)):
            memory.map(value, first, count)
        assert not access.export_blocks(state, places).any(), f"memory of {tag} that is mapped is not zero."
        state = access.import_blocks(state, places, rows)
        device.fence()
        for first, count in ((3, 2), (40, 1)):
            memory.unmap(state, first, count)
            memory.map(state, first, count)
        memory.map(state, (1 << 12) - 1, 1)
        rows[[0, 2, 3]] = 0
        found = access.export_blocks(state, places)
        assert found.tobytes() == rows.tobytes(), f"entries of {tag} hold other bytes after others were mapped."
        assert not access.export_blocks(other, np.arange(3, dtype=np.int32)).any(), "one value's memory is another's."
        device.free(other)
        device.free(state)


def check_memory_info(device: Device) -> None:
    """Some memory is free, and at most all of it."""
    info = device.memory_info()
    assert 0 < info.free <= info.total, f"memory_info says {info.free} free of {info.total} bytes."


def check_fence(device: Device) -> None:
    """It returns, also when nothing was submitted, and twice."""
    device.fence()
    value = device.copy_in(np.arange(1 << 16, dtype=np.int32))
    device.fence()
    device.fence()
    device.free(value)


def _arrays(dtype: np.dtype[np.generic], rng: np.random.Generator) -> list[Array]:
    def bytes_of(*shape: int) -> Array:
        raw = rng.integers(0, 256, (*shape, dtype.itemsize), dtype=np.uint8)
        if dtype.kind == "f" or dtype == HOST_DTYPES["bf16"]:
            raw[..., -1] &= 0x3F  # no NaN, whose bits a device may not keep
        return raw.view(dtype)[..., 0]

    whole = bytes_of(9, 24)
    return [bytes_of(1), bytes_of(3, 5, 7), bytes_of(0, 4), bytes_of(1 << 15), whole[:, 1:20:3], whole[::-2].T]
