"""Packing: each weight once, and then its file is let go."""

from __future__ import annotations

from collections import Counter

from fake_device import EVERY_OP, FakeDevice

from engine.formats import open_checkpoint
from engine.formats.checkpoint import Tensor
from engine.program.pack import Packing
from engine.program.place import Placer


def test_weights_are_let_go_once_packed(llama, program, monkeypatch):
    released: Counter[str] = Counter()
    monkeypatch.setattr(Tensor, "release", lambda tensor: released.update([tensor.name]))
    Packing(Placer(FakeDevice.of(*EVERY_OP)).place(program)).finish()
    assert released == dict.fromkeys(open_checkpoint(llama).tensors, 1)
