"""attention, kv_write and kv_copy against their definitions, and the bitwise promises of attention."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
from one_kernel import ISAS, poisoned, run_kernel

DTYPES = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16, "int8": np.int8, "int16": np.int16}
WHOLE = {"int8": 127, "int16": 8191}


def bf16_round(x: np.ndarray) -> np.ndarray:
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def as_stored(values: np.ndarray, dtype: str) -> np.ndarray:
    """f32 [..., head_dim] after a trip through the cache's dtype."""
    if dtype == "bf16":
        return (bf16_round(values).astype(np.uint32) << 16).view(np.float32)
    if dtype not in WHOLE:
        return values.astype(DTYPES[dtype]).astype(np.float32)
    most, largest = np.float32(WHOLE[dtype]), np.abs(values).max(-1, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.nan_to_num(np.rint(values * (most / largest))) * (largest / most)


# block size, head_dim, rotary_dim, interleaved, norms of heads
ROPE_WRITES = [(16, 64, 64, False, True), (32, 80, 32, True, True), (8, 24, 24, False, False), (1, 40, 16, True, True)]


# Beside a cache of whole numbers queries and weights are rounded, so that their sums with it have no more than 32 bits.
TOLERANCE = {"int8": {"rtol": 3e-4, "atol": 3e-4}, "int16": {"rtol": 1e-3, "atol": 1e-3}}
CLOSE = {"rtol": 2e-5, "atol": 2e-5}


@dataclass
class Cache:
    """A paged KV cache in the layout cpu.lanes, or cpu.pairs of whole numbers, everything unwritten poisoned."""

    blocks: int
    heads: int
    dim: int
    block_size: int
    dtype: str
    states: list[np.ndarray] = field(init=False)

    def __post_init__(self) -> None:
        lanes = min(16, self.block_size)
        unit = 2 if self.dtype in WHOLE else 1  # dimensions of a key that lie together,
        beside = min(unit, self.block_size)  # and tokens whose values do
        page = (self.blocks, self.heads)
        keys = (*page, self.block_size // lanes, self.dim // unit, lanes, unit)
        values = (*page, self.block_size // beside, self.dim, beside)
        self.states = [poisoned(shape, DTYPES[self.dtype]) for shape in (keys, values)]
        if self.dtype in WHOLE:
            self.states += [poisoned((self.blocks, self.heads, self.block_size), np.float32) for _ in range(2)]

    @property
    def numbers(self) -> dict[str, float]:
        kind = list(DTYPES).index(self.dtype)
        return {"kv_heads": self.heads, "head_dim": self.dim, "block_size": self.block_size, "kv_dtype": kind}

    def write(self, k: np.ndarray, v: np.ndarray, slots: np.ndarray, isa: str) -> None:
        dims = {"T": len(slots)}
        run_kernel("kv_write", dims, [k, v, slots], [], states=self.states, numbers=self.numbers, isa=isa)

    def widened(self, which: int) -> np.ndarray:
        stored = self.states[which]
        if self.dtype == "bf16":
            return (stored.astype(np.uint32) << 16).view(np.float32)
        return stored.astype(np.float32)

    def read(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """k and v [tokens, heads, dim] in f32 as stored."""
        block, token = slots // self.block_size, slots % self.block_size
        lanes = min(16, self.block_size)
        k = self.widened(0)[block, :, token // lanes, :, token % lanes].reshape(len(slots), self.heads, self.dim)
        beside = self.states[1].shape[-1]
        v = self.widened(1)[block, :, token // beside, :, token % beside]
        if self.dtype in WHOLE:
            k = k * self.states[2][block, :, token][..., None]
            v = v * self.states[3][block, :, token][..., None]
        return k, v


@dataclass
class Batch:
    """Sequences with their keys and values of every position, and the queries of the step's tokens."""

    starts: list[int]
    lengths: list[int]
    heads: int
    kv_heads: int
    dim: int
    rng: np.random.Generator

    def __post_init__(self) -> None:
        self.contexts = [s + n for s, n in zip(self.starts, self.lengths, strict=True)]
        shape = (self.kv_heads * self.dim,)
        self.k = [self.rng.standard_normal((c, *shape), np.float32) for c in self.contexts]
        self.v = [self.rng.standard_normal((c, *shape), np.float32) for c in self.contexts]
        self.q = [self.rng.standard_normal((n, self.heads * self.dim), np.float32) for n in self.lengths]


def attend(
    batch: Batch,
    block_size: int = 16,
    dtype: str = "f16",
    isa: str = ISAS[0],
    threads: int = 2,
    only: list[tuple[int, int, int]] | None = None,
    sinks: np.ndarray | None = None,
    in_order: bool = False,
    **numbers: float,
) -> tuple[list[np.ndarray], Iterator[np.ndarray]]:
    """Outputs a query span, and their definition in float64, which takes longer and is computed when it is looked at.

    `only`: the (sequence, first, end) query spans of the step; default each sequence's whole. `in_order`: a sequence's
    blocks follow each other in the cache, but for a few that do not.
    """
    spans = only or [(s, 0, n) for s, n in enumerate(batch.lengths)]
    width = max(-(-c // block_size) for c in batch.contexts) + 1
    blocks = width * len(batch.contexts) + 3
    cache = Cache(blocks, batch.kv_heads, batch.dim, block_size, dtype)
    pages = batch.rng.permutation(blocks)[: width * len(batch.contexts)].reshape(-1, width).astype(np.int32)
    if in_order:
        pages.ravel().sort()
        pages[0, : min(6, width)] = np.roll(pages[0, : min(6, width)], 1)
    slots = []
    for s, context in enumerate(batch.contexts):
        position = np.arange(context)
        slots.append((pages[s][position // block_size] * block_size + position % block_size).astype(np.int32))
        pages[s, -(-context // block_size) :] = 1 << 28  # what is not allocated must not be read
    cache.write(np.concatenate(batch.k), np.concatenate(batch.v), np.concatenate(slots), isa)
    q = np.concatenate([batch.q[s][a:b] for s, a, b in spans])
    starts = np.array([batch.starts[s] + a for s, a, _ in spans], np.int32)
    offsets = np.cumsum([0] + [b - a for _, a, b in spans]).astype(np.int32)
    table = np.stack([pages[s] for s, _, _ in spans])
    numbers = {"heads": batch.heads, "scale": batch.dim**-0.5, **cache.numbers, **numbers}
    (out,) = run_kernel(
        "attention",
        {"T": len(q), "S": len(spans), "P": width},
        [q, starts, offsets, table],
        [(q.shape, np.float32)],
        weights=[] if sinks is None else [sinks],
        states=cache.states,
        numbers=numbers,
        isa=isa,
        threads=threads,
        max_context=max(batch.contexts),
    )
    wanted = (
        defined(batch, batch.q[s][a:b], batch.starts[s] + a, *cache.read(slots[s]), numbers, sinks) for s, a, b in spans
    )
    return np.split(out, offsets[1:-1]), wanted


def defined(
    batch: Batch,
    q: np.ndarray,
    start: int,
    k: np.ndarray,
    v: np.ndarray,
    numbers: dict[str, float],
    sinks: np.ndarray | None,
) -> np.ndarray:
    group, window = batch.heads // batch.kv_heads, int(numbers.get("window", 0)) or len(k)
    own, position = start + np.arange(len(q))[:, None], np.arange(len(k))
    sees = (position > own - window) & (position < own + (1 if numbers.get("causal", 1) else window))
    rows, keys, values = (x.astype(np.float64) for x in (q.reshape(len(q), batch.heads, batch.dim), k, v))
    out = np.empty_like(rows)
    for h in range(batch.heads):
        scores = rows[:, h] @ keys[:, h // group].T * numbers["scale"]
        if cap := numbers.get("softcap", 0):
            scores = cap * np.tanh(scores / cap)
        scores = np.where(sees, scores, -np.inf)
        highest = scores.max(1, keepdims=True)
        if sinks is not None:
            highest = np.maximum(highest, sinks[h])
        p = np.exp(scores - highest)
        total = p.sum(1, keepdims=True)
        if sinks is not None:
            total += np.exp(sinks[h] - highest)
        out[:, h] = p @ values[:, h // group] / total
    return out.reshape(len(q), -1)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [1, 4, 8, 16, 32, 256])
def test_prefill_and_decode(isa: str, dtype: str, block_size: int) -> None:
    rng = np.random.default_rng()
    batch = Batch([0, 300, 17, 511], [37, 1, 4, 2], 4, 2, 32, rng)
    for got, wanted in zip(*attend(batch, block_size, dtype, isa), strict=True):
        np.testing.assert_allclose(got, wanted, **TOLERANCE.get(dtype, CLOSE))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [1, 8, 16])
@pytest.mark.parametrize("dim", [40, 192])
def test_many_tiles_of_a_prompt(isa: str, dtype: str, block_size: int, dim: int) -> None:
    """So many that they share keys and values widened to f32, or laid out for a matrix unit, which takes 64 at a time."""
    batch = Batch([200], [100], 4, 2, dim, np.random.default_rng())
    (got,), (wanted,) = attend(batch, block_size, dtype, isa, threads=1)
    np.testing.assert_allclose(got, wanted, **TOLERANCE.get(dtype, CLOSE))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("heads,kv_heads", [(1, 1), (3, 1), (4, 2), (5, 1), (7, 1), (8, 1), (12, 1), (16, 1), (14, 2)])
@pytest.mark.parametrize("dim", [8, 40, 64, 80, 128, 256])
def test_shapes(isa: str, heads: int, kv_heads: int, dim: int) -> None:
    batch = Batch([0, 270], [3, 1], heads, kv_heads, dim, np.random.default_rng())
    for got, wanted in zip(*attend(batch, isa=isa), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", ["f16", "int8", "int16"])
@pytest.mark.parametrize("numbers", [{"window": 1}, {"window": 20}, {"window": 300}, {"softcap": 3.0}])
def test_window_and_softcap(dtype: str, numbers: dict[str, float]) -> None:
    batch = Batch([0, 600, 250], [50, 1, 20], 4, 2, 64, np.random.default_rng())
    for got, wanted in zip(*attend(batch, dtype=dtype, **numbers), strict=True):
        np.testing.assert_allclose(got, wanted, **TOLERANCE.get(dtype, CLOSE))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 1, 20, 300])
@pytest.mark.parametrize("heads,kv_heads,dim", [(4, 4, 32), (14, 2, 80)])
def test_encoders_see_both_ways(isa: str, dtype: str, window: int, heads: int, kv_heads: int, dim: int) -> None:
    """Texts of one token, of a part of a chunk and of several; one has begun before."""
    batch = Batch([0, 0, 270, 0], [1, 20, 3, 330], heads, kv_heads, dim, np.random.default_rng())
    for threads in (1, 3):
        for got, wanted in zip(
            *attend(batch, dtype=dtype, isa=isa, threads=threads, window=window, causal=0), strict=True
        ):
            np.testing.assert_allclose(got, wanted, **TOLERANCE.get(dtype, CLOSE))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("level", [-50.0, 0.0, 50.0])
@pytest.mark.parametrize("heads,kv_heads,window", [(1, 1, 0), (14, 2, 20), (4, 4, 300)])
def test_sinks(isa: str, heads: int, kv_heads: int, window: int, level: float) -> None:
    """Of little weight, of some, and of nearly all."""
    rng = np.random.default_rng()
    batch = Batch([0, 600, 250], [50, 1, 20], heads, kv_heads, 40, rng)
    sinks = rng.standard_normal(heads, np.float32) + np.float32(level)
    for got, wanted in zip(*attend(batch, isa=isa, sinks=sinks, window=window), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["f16", "int8", "int16"])
@pytest.mark.parametrize("dim", [80, 128])
@pytest.mark.parametrize("window,sunk", [(0, False), (100, False), (100, True)])
def test_bits_do_not_depend_on_the_step(isa: str, dtype: str, dim: int, window: int, sunk: bool) -> None:
    rng = np.random.default_rng()
    batch = Batch([0, 700, 3], [290, 1, 30], 6, 2, dim, rng)
    sinks = rng.standard_normal(6, np.float32) if sunk else None
    whole, _ = attend(batch, 16, dtype, isa, threads=2, window=window, sinks=sinks)
    for threads, block_size in ((1, 8), (3, 32), (3, 16), (1, 256)):
        again, _ = attend(batch, block_size, dtype, isa, threads, window=window, sinks=sinks)
        for a, b in zip(whole, again, strict=True):
            np.testing.assert_array_equal(a.view(np.int32), b.view(np.int32))
    cuts = [0, 1, 8, 9, 100, 255, 256, 290]
    for a, b in itertools.pairwise(cuts):
        (piece,), _ = attend(batch, 16, dtype, isa, only=[(0, a, b)], window=window, sinks=sinks)
        np.testing.assert_array_equal(piece.view(np.int32), whole[0][a:b].view(np.int32))
    (alone,), _ = attend(batch, 16, dtype, isa, threads=3, only=[(1, 0, 1)], window=window, sinks=sinks)
    np.testing.assert_array_equal(alone.view(np.int32), whole[1].view(np.int32))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads,kv_heads,dim,window", [(8, 4, 64, 0), (6, 6, 40, 0), (10, 5, 128, 600), (24, 3, 40, 0)])
def test_few_rows_of_all_heads_have_the_bits_of_one_head(
    isa: str, dtype: str, heads: int, kv_heads: int, dim: int, window: int
) -> None:
    """Whether heads go together depends on threads, lengths and the block size; blocks are read as they lie, or not."""
    starts, lengths = [1000, 1023, 511, 20, 254, 1700], [1, 3, 1, 1, 2, 1]
    batch = Batch(starts, lengths, heads, kv_heads, dim, np.random.default_rng())
    one_by_one, wanted = attend(batch, 8, dtype, isa, threads=1, window=window)
    for a, b in zip(one_by_one, wanted, strict=True):
        np.testing.assert_allclose(a, b, **TOLERANCE.get(dtype, CLOSE))
    longest = [(5, 0, 1)]  # of seven chunks one is left over, whether two or three threads share them
    for threads, block_size, in_order, only in (
        (1, 16, False, None),
        (1, 32, True, None),
        (2, 16, True, None),
        (2, 16, True, longest),
        (3, 256, True, longest),
        (2, 64, False, [(1, 0, 3)]),
    ):
        again, _ = attend(batch, block_size, dtype, isa, threads, only, in_order=in_order, window=window)
        for (s, _, _), b in zip(only or [(s, 0, 0) for s in range(len(lengths))], again, strict=True):
            np.testing.assert_array_equal(one_by_one[s], b)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["f32", "int8", "int16"])
@pytest.mark.parametrize("block_size", [8, 16])
def test_a_broken_token_does_not_reach_earlier_ones(isa: str, dtype: str, block_size: int) -> None:
    batch = Batch([0], [20], 2, 1, 64, np.random.default_rng())
    (clean,), _ = attend(batch, block_size, dtype, isa)
    batch.v[0][13] = np.inf
    batch.k[0][13] = np.nan
    (broken,), _ = attend(batch, block_size, dtype, isa)
    np.testing.assert_array_equal(clean[:13], broken[:13])
    assert np.isnan(broken[13:]).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("lengths", [[20, 1], [160, 1]])
@pytest.mark.parametrize("dtype", WHOLE)
def test_a_broken_query_reaches_no_other_beside_whole_numbers(
    isa: str, value: float, lengths: list[int], dtype: str
) -> None:
    batch = Batch([0, 30], lengths, 2, 1, 64, np.random.default_rng())
    clean, _ = attend(batch, 16, dtype, isa)
    batch.q[0][7, 3] = value  # of the first head
    broken, _ = attend(batch, 16, dtype, isa)
    assert np.isnan(broken[0][7, :64]).all()
    for a, b in zip(clean, broken, strict=True):
        kept = ~np.isnan(b)
        np.testing.assert_array_equal(a[kept], b[kept])
    assert np.isnan(broken[0]).sum() == 64 and not np.isnan(broken[1]).any()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("length", [1, 20])
@pytest.mark.parametrize("dtype", WHOLE)
@pytest.mark.parametrize("half", [2, 1])
def test_the_largest_sums_of_whole_numbers_stay_whole(isa: str, length: int, dtype: str, half: int) -> None:
    """All products at their largest: 32 bits hold every sum, of a wide head and of a whole chunk of weights."""
    batch = Batch([512 - length], [length], 1, 1, 512, np.random.default_rng())
    for sign in (1, -1):
        batch.k[0][:], batch.v[0][:], batch.q[0][:] = sign, sign, 1 / 64
        batch.k[0][::2], batch.v[0][::2] = sign / half, sign / half
        (got,), (wanted,) = attend(batch, 16, dtype, isa)
        np.testing.assert_allclose(got, wanted, **TOLERANCE[dtype])


@pytest.mark.parametrize("block_size", [1, 8, 16])
@pytest.mark.parametrize("dtype", WHOLE)
def test_a_cache_of_whole_numbers_takes_no_odd_head_dim(block_size: int, dtype: str) -> None:
    with pytest.raises(ValueError, match="head_dim must be even for a cache of whole numbers"):
        attend(Batch([0], [3], 2, 1, 9, np.random.default_rng()), block_size, dtype)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [16, 40])
def test_kv_write(isa: str, dtype: str, dim: int) -> None:
    rng = np.random.default_rng()
    cache = Cache(7, 3, dim, 16, dtype)
    k, v = (rng.standard_normal((30, 3 * dim), np.float32) * 10 for _ in range(2))
    k[3] = 0
    slots = rng.permutation(7 * 16)[:30].astype(np.int32)
    slots[5] = -1
    cache.write(k, v, slots, isa)
    kept = slots >= 0
    for stored, given in zip(cache.read(slots[kept]), (k[kept], v[kept]), strict=True):
        np.testing.assert_array_equal(stored, as_stored(given.reshape(stored.shape), dtype))
    untouched = np.setdiff1d(np.arange(7 * 16), slots[kept])
    bytes_left = poisoned((dim,), DTYPES[dtype])
    beside = cache.states[1].shape[-1]
    values = np.ascontiguousarray(cache.states[1][untouched // 16, :, untouched % 16 // beside, :, untouched % beside])
    np.testing.assert_array_equal(values.view(np.uint8), np.broadcast_to(bytes_left, values.shape).view(np.uint8))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size,dim,rotary,interleaved,normed", ROPE_WRITES)
def test_rope_kv_write_is_its_parts(
    isa: str, dtype: str, block_size: int, dim: int, rotary: int, interleaved: bool, normed: bool
) -> None:
    """Every bit is that of rms_norm, rope and kv_write: whole tiles, parts of them, few tokens and skipped ones."""
    rng = np.random.default_rng()
    heads, kv_heads = 6, 2
    for lengths in ([1], [3, 1], [10], [22], [70], [5, 40, 1, 1]):
        tokens = sum(lengths)
        starts = rng.integers(0, 40, len(lengths))
        width = -(-128 // block_size)
        pages = rng.permutation(width * len(lengths)).reshape(len(lengths), width)
        positions = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)]).astype(np.int32)
        table = pages[np.repeat(np.arange(len(lengths)), lengths), positions // block_size]
        slots = (table * block_size + positions % block_size).astype(np.int32)
        if tokens > 40:
            slots[rng.integers(0, tokens, 3)] = -1
        q = rng.standard_normal((tokens, heads * dim), np.float32)
        k, v = (rng.standard_normal((tokens, kv_heads * dim), np.float32) for _ in range(2))
        frequencies = rng.random(rotary // 2, np.float32)
        norms = [rng.standard_normal(dim, np.float32) for _ in range(2 * normed)]
        rope = {"head_dim": dim, "rotary_dim": rotary, "interleaved": interleaved, "scale": 1.25}
        norm = {"eps": 1e-6, "weight_offset": 0.5}
        wanted = Cache(width * len(lengths), kv_heads, dim, block_size, dtype)
        turned = []
        for n, (x, count) in enumerate(((q, heads), (k, kv_heads))):
            given = x
            if normed:
                numbers = {**norm, "width": count * dim}
                [given] = run_kernel("rms_norm", {"T": tokens}, [x], [(x.shape, np.float32)], weights=[norms[n]],
                                     numbers=numbers, isa=isa)  # fmt: skip
            turned += run_kernel("rope", {"T": tokens}, [given, positions], [(x.shape, np.float32)],
                                 weights=[frequencies], numbers={**rope, "heads": count}, isa=isa)  # fmt: skip
        wanted.write(turned[1], v, slots, isa)
        for threads in (1, 2, 3):
            got = Cache(width * len(lengths), kv_heads, dim, block_size, dtype)
            [y] = run_kernel(
                "rope_kv_write", {"T": tokens}, [q, k, v, positions, slots], [(q.shape, np.float32)],
                weights=[frequencies, *norms], states=got.states,
                numbers={**got.numbers, **rope, **norm, "heads": heads}, isa=isa, threads=threads,
            )  # fmt: skip
            np.testing.assert_array_equal(y.view(np.int32), turned[0].view(np.int32))
            for a, b in zip(got.states, wanted.states, strict=True):
                np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))


@pytest.mark.parametrize("dtype", WHOLE)
def test_kv_write_keeps_what_is_not_finite(dtype: str) -> None:
    cache = Cache(1, 1, 16, 16, dtype)
    k = np.ones((1, 16), np.float32)
    k[0, 3] = np.nan
    v = np.ones((1, 16), np.float32)
    v[0, 5] = np.inf
    cache.write(k, v, np.zeros(1, np.int32), ISAS[0])
    stored_k, stored_v = cache.read(np.zeros(1, np.int32))
    assert not np.isfinite(stored_k).any() and not np.isfinite(stored_v).any()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_kv_copy_in_order(isa: str, threads: int) -> None:
    rng = np.random.default_rng()
    states = [rng.integers(0, 255, (9, n), np.uint8) for n in (64, 200, 4)]
    wanted = [state.copy() for state in states]
    copies = np.array([[0, 4], [4, 5], [7, 4], [5, 0], [2, 2]], np.int32)
    for state in wanted:
        for source, target in copies:
            state[target] = state[source]
    numbers = {f"block_bytes.{i}": state.shape[1] for i, state in enumerate(states)}
    run_kernel("kv_copy", {"C": len(copies)}, [copies], [], states=states, numbers=numbers, isa=isa, threads=threads)
    for got, want in zip(states, wanted, strict=True):
        np.testing.assert_array_equal(got, want)
