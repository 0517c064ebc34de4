"""kv_write and attention on a latent cache: the reference's results, and bits that do not depend on the step."""

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
from one_kernel import ISAS, poisoned, run_kernel

from engine.backend.v1 import HOST_DTYPES
from engine.ops.attention import attention

DTYPES = ("f32", "f16", "bf16", "int8", "int16")


@dataclass
class Latent:
    """Sequences with the keys of every position and the queries of the step's last tokens."""

    starts: list[int]
    lengths: list[int]
    heads: int
    dim: int
    v_dim: int

    def __post_init__(self) -> None:
        rng = np.random.default_rng()
        self.contexts = [s + n for s, n in zip(self.starts, self.lengths, strict=True)]
        self.k = [rng.standard_normal((c, self.dim), np.float32) for c in self.contexts]
        self.q = [rng.standard_normal((n, self.heads * self.dim), np.float32) for n in self.lengths]

    def run(self, block_size=16, dtype="f16", isa=ISAS[0], threads=2, only=None, window=0, poison=0xFF):
        """The kernel's outputs of each query span (sequence, first, end), and the reference's of all.

        What was never written to the cache has the byte `poison`.
        """
        spans = only or [(s, 0, n) for s, n in enumerate(self.lengths)]
        width = max(-(-c // block_size) for c in self.contexts) + 1
        blocks = width * len(self.contexts) + 2
        pages = np.random.default_rng().permutation(blocks)[: width * len(self.contexts)].astype(np.int32)
        pages = pages.reshape(-1, width)
        # A token's key is a row, so the layouts "plain", "cpu.lanes" and "cpu.pairs" are one.
        states = [poisoned((blocks, block_size, 1, self.dim), HOST_DTYPES[dtype].type, poison)]
        states += [poisoned((blocks, block_size, 1), np.float32)] if dtype.startswith("int") else []
        cache = {"kv_heads": 1, "head_dim": self.dim, "block_size": block_size, "kv_dtype": DTYPES.index(dtype)}
        cache["latent"] = 1
        for k, table, context in zip(self.k, pages, self.contexts, strict=True):
            position = np.arange(context)
            slots = (table[position // block_size] * block_size + position % block_size).astype(np.int32)
            inputs = [k, None, slots]
            run_kernel("kv_write", {"T": context}, inputs, [], states=states, numbers=cache, isa=isa, threads=threads)
            table[-(-context // block_size) :] = 1 << 28  # what is not allocated must not be read
        q = np.concatenate([self.q[s][a:b] for s, a, b in spans])
        step = {
            "seq_starts": np.array([self.starts[s] + a for s, a, _ in spans], np.int32),
            "query_offsets": np.cumsum([0] + [b - a for _, a, b in spans]).astype(np.int32),
            "page_table": np.stack([pages[s] for s, _, _ in spans]),
        }
        scale = self.dim**-0.5
        (out,) = run_kernel(
            "attention",
            {"T": len(q), "S": len(spans), "P": width},
            [q, *step.values()],
            [((len(q), self.heads * self.v_dim), np.float32)],
            states=states,
            numbers=cache | {"heads": self.heads, "scale": scale, "v_head_dim": self.v_dim, "window": window},
            isa=isa,
            threads=threads,
            max_context=max(self.contexts),
        )
        attrs = {"heads": self.heads, "kv_heads": 1, "head_dim": self.dim, "scale": scale, "block_size": block_size}
        states = dict(zip(("k", "k_scale"), states, strict=False))
        (want,) = attention(q=q, **step, **states, **attrs, v_head_dim=self.v_dim, window=window)
        return np.split(out, step["query_offsets"][1:-1]), np.split(want, step["query_offsets"][1:-1])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [1, 8, 16, 64])
@pytest.mark.parametrize(("dim", "v_dim"), [(40, 33), (192, 96)])
def test_is_the_reference(isa, dtype, block_size, dim, v_dim):
    latent = Latent([0, 300, 17], [21, 1, 4], 5, dim, v_dim)
    got, want = map(np.concatenate, latent.run(block_size, dtype, isa))
    # Queries are rounded so that sums fit in 32 bits: beside int16 the more, the wider they are, which few of many show.
    most = {"int8": 3e-4, "int16": 3e-3}.get(dtype, 2e-5)
    np.testing.assert_allclose(got, want, rtol=most, atol=most)
    assert np.sqrt(np.mean((got - want) ** 2)) < {"int8": 1e-4, "int16": 2e-4}.get(dtype, 1e-5)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("heads", [1, 3, 16])
@pytest.mark.parametrize(("dim", "v_dim"), [(9, 1), (32, 24), (96, 64), (576, 512), (64, 64)])
def test_shapes(isa, heads, dim, v_dim):
    latent = Latent([0, 261], [3, 1], heads, dim, v_dim)
    for got, want in zip(*latent.run(isa=isa), strict=True):
        np.testing.assert_allclose(got, want, rtol=3e-5, atol=3e-5)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["f16", "int8", "int16"])
@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("dim", [80, 128])
def test_bits_do_not_depend_on_the_step(isa, dtype, window, dim):
    latent = Latent([0, 700, 3], [270, 1, 30], 6, dim, 64)
    whole, _ = latent.run(16, dtype, isa, threads=2, window=window)
    for threads, block_size in ((1, 8), (3, 32), (1, 256)):
        again, _ = latent.run(block_size, dtype, isa, threads, window=window)
        for a, b in zip(whole, again, strict=True):
            np.testing.assert_array_equal(a.view(np.int32), b.view(np.int32))
    for a, b in itertools.pairwise([0, 1, 8, 9, 255, 256, 270]):
        (piece,), _ = latent.run(16, dtype, isa, only=[(0, a, b)], window=window)
        np.testing.assert_array_equal(piece.view(np.int32), whole[0][a:b].view(np.int32))
    (alone,), _ = latent.run(16, dtype, isa, threads=3, only=[(1, 0, 1)], window=window)
    np.testing.assert_array_equal(alone.view(np.int32), whole[1].view(np.int32))


def test_a_broken_token_does_not_reach_earlier_ones():
    latent = Latent([0], [20], 2, 48, 32)
    (clean,), _ = latent.run(dtype="f32")
    latent.k[0][13] = np.nan
    (broken,), _ = latent.run(dtype="f32")
    np.testing.assert_array_equal(clean[:13], broken[:13])
    assert np.isnan(broken[13:]).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["int8", "int16"])
def test_the_largest_sums_of_whole_numbers_stay_whole(isa, dtype):
    """576 products at their largest: 16 bits a query would leave 32 bits."""
    latent = Latent([255], [1], 2, 576, 512)
    latent.k[0][:], latent.q[0][:] = 1, 1 / 64
    latent.k[0][::2] = 0.5
    for got, want in zip(*latent.run(16, dtype, isa), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("isa", ISAS)
def test_what_only_fills_a_tile_may_leave_32_bits(isa):
    """Sums with tokens that a block never got are thrown away, and no overflow of signed numbers."""
    latent = Latent([16], [1], 1, 64, 64)
    latent.q[0].reshape(-1, 2)[:] = 1, 0  # so that halves of a sum fit, and both together do not
    for got, want in zip(*latent.run(16, "int16", isa, poison=0x40), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)


def test_values_wider_than_keys_are_refused():
    with pytest.raises(ValueError, match="v_head_dim"):
        Latent([0], [2], 1, 16, 17).run()
