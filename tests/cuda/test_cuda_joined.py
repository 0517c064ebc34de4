"""Matrices of one x beside each other: one product, whose memory they are parts of."""

from __future__ import annotations

import numpy as np
import pytest

from engine.backend.v1 import BoundCall, Call, Dims, Frame, Limits, Value
from engine.testing.cases import CaseWeight, random_weight


class Group:
    """A ``linear_group`` of some formats and outputs, its packed weights, and what the launches of a step were."""

    def __init__(self, device, rng, members, depth, biases=(), **attrs):
        self.device, self.depth = device, depth
        [self.provider] = device.providers()["linear_group"]
        weights = {
            f"weight.{n}": CaseWeight("w", random_weight(rng, format_, (outputs, depth)))
            for n, (format_, outputs) in enumerate(members)
        }
        for n in biases:
            bias = rng.standard_normal(members[n][1], np.float32).view(np.uint8)[None]
            weights[f"bias.{n}"] = CaseWeight("b", ("F32", bias, (members[n][1],)))
        self.packed = {
            name: self.provider.pack(weight, ("linear_group",), lambda _: None) for name, weight in weights.items()
        }
        outputs = tuple(Value(1 + n, f"y.{n}", ("T", width), "f32") for n, (_, width) in enumerate(members))
        self.call = Call("linear_group", {"x": Value(0, "x", ("T", depth), "f32")}, outputs, weights, attrs=attrs)

    def bind(self):
        return self.provider.bind(BoundCall(self.call, self.provider, self.packed), Limits(Dims(T=64), 64, 1))

    def run(self, fn, x):
        frame = Frame(Dims(T=len(x)), {0: self.device.copy_in(x)}, {})
        fn(frame)
        return [self.device.copy_out(frame.values[value.id]) for value in self.call.outputs]

    def wanted(self, x):
        found = []
        for n in range(len(self.call.outputs)):
            y = x.astype(np.float64) @ self.packed[f"weight.{n}"].unpack().T.astype(np.float64)
            found.append(y + self.packed[f"bias.{n}"].unpack() if f"bias.{n}" in self.packed else y)
        return found


def arrays(group):
    return [(packed.handle.codes if hasattr(packed.handle, "codes") else packed.handle.array) for name, packed in
            group.packed.items() if name.startswith("weight")]  # fmt: skip


def storages(group):
    return len({array.untyped_storage().data_ptr() for array in arrays(group)})


@pytest.fixture
def products(device, monkeypatch):
    """The widths of each product that is taken."""
    from engine_cuda.ops.dense import Product

    found, run = [], Product.run

    def watched(product):
        found.append(product.widths)
        run(product)

    monkeypatch.setattr(Product, "run", watched)
    return found


CASES = [
    ([("BF16", 96), ("BF16", 32), ("BF16", 17)], (), [(96, 32, 17)], 1),
    ([("F16", 64), ("F16", 130)], (0, 1), [(64, 130)], 1),
    ([("Q4_K", 64), ("Q4_K", 48), ("Q6_K", 33)], (0, 1, 2), [(64, 48), ()], 2),
    ([("Q8_0", 64), ("Q4_K", 96), ("Q4_K", 33)], (), [(), (96, 33)], 2),
    ([("Q4_K", 48), ("Q4_K", 64)], (), [(), ()], 2),  # the first one's last tile of rows is not whole
    ([("F32", 8), ("F32", 9), ("F32", 10), ("F32", 11)], (), [(8, 9, 10), ()], 2),
    ([("BF16", 40), ("BF16", 40)], (1,), [(), ()], 2),  # one bias
]


@pytest.mark.parametrize(("members", "biases", "runs", "memories"), CASES)
def test_members_alike_are_one_product(members, biases, runs, memories, device, products):
    rng = np.random.default_rng()
    group = Group(device, rng, members, 256, biases)
    before = [array.clone() for array in arrays(group)]
    fn = group.bind()
    assert storages(group) == memories
    for rows in (1, 5, 33):
        x = rng.standard_normal((rows, 256), np.float32)
        products.clear()
        for got, want in zip(group.run(fn, x), group.wanted(x), strict=True):
            size = np.abs(want).max() + 1
            np.testing.assert_allclose(got, want, atol=2e-6 * 16 * size)
        assert products == runs
    for array, whole in zip(arrays(group), before, strict=True):
        assert array.equal(whole)


def test_long_columns_of_codes_are_joined_and_in_parts(device, products):
    rng = np.random.default_rng()
    group = Group(device, rng, [("Q4_K", 64), ("Q4_K", 32), ("Q4_K", 8)], 4096, (0, 1, 2))
    fn, x = group.bind(), rng.standard_normal((3, 4096), np.float32)
    for got, want in zip(group.run(fn, x), group.wanted(x), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())
    assert products == [(64, 32, 8)]


def test_memory_is_kept_until_the_last_value_in_it_dies():
    """In a recorded step, where several values lie beside each other."""
    import torch

    from engine_cuda.recording import Arena

    arena = Arena(torch.device("cpu"))
    whole, other = arena.empty((40,), torch.float32), arena.empty((40,), torch.float32)
    first, second = whole[:24], whole[24:]
    arena.keep([first, second, other])
    assert arena.empty((8,), torch.float32).data_ptr() not in (whole.data_ptr(), other.data_ptr())
    arena.keep([second])
    assert arena.empty((40,), torch.float32).data_ptr() != whole.data_ptr()
    arena.keep([])
    assert {arena.empty((40,), torch.float32).data_ptr() for _ in range(3)} >= {whole.data_ptr(), other.data_ptr()}


def test_a_second_session_finds_them_joined(device):
    rng = np.random.default_rng()
    group = Group(device, rng, [("Q4_K", 64), ("Q4_K", 48)], 256)
    x = rng.standard_normal((4, 256), np.float32)
    first = group.run(group.bind(), x)
    places = [array.data_ptr() for array in arrays(group)]
    again = group.run(group.bind(), x)
    assert places == [array.data_ptr() for array in arrays(group)]
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))


def test_what_is_large_or_of_bytes_stays_apart(device, products, monkeypatch):
    from engine_cuda.ops import dense

    rng = np.random.default_rng()
    x = rng.standard_normal((2, 256), np.float32)
    group = Group(device, rng, [("BF16", 64), ("BF16", 48)], 256, quantized_activation="required")
    group.run(group.bind(), x)
    assert storages(group) == 2
    monkeypatch.setattr(dense, "IDLE_OUTPUTS", 48)
    group = Group(device, rng, [("BF16", 64), ("BF16", 48)], 256)
    group.run(group.bind(), x)
    monkeypatch.setattr(dense, "IDLE_OUTPUTS", 4096)
    monkeypatch.setattr(dense, "MOST_JOINED_BYTES", 1000)
    group = Group(device, rng, [("BF16", 64), ("BF16", 48)], 256)
    group.run(group.bind(), x)
    assert storages(group) == 2 and products == [()] * 4  # and none of those whose activations are bytes
