"""A backend whose device is lost when a test says so: steps fail, and it cannot be set up again for a while."""

from __future__ import annotations

from engine.backend.v1 import API, Manifest, Probe
from engine.testing.devices import SlowDevice, _Slowed

_ABOUT = Probe(True, "The references, until they are lost.", score=-1)


class Switch:
    """``lost``: steps fail; ``refusals``: how often the device then cannot be set up again."""

    lost = False
    refusals = 0


class _Losable(_Slowed):
    def bind(self, bound, limits):
        fn = super().bind(bound, limits)

        def run(frame) -> None:
            if Switch.lost:
                raise RuntimeError("the device is lost")
            fn(frame)

        return run


class FailingDevice(SlowDevice):
    def providers(self):
        found = super().providers()
        return {op: (_Losable(one._provider, one._seconds),) for op, (one,) in found.items()}

    def alloc(self, shape, dtype):
        if Switch.lost:
            Switch.refusals -= 1
            Switch.lost = Switch.refusals > 0
            raise RuntimeError("the device does not answer")
        return super().alloc(shape, dtype)


manifest = Manifest("failing", API, lambda: _ABOUT, lambda index, options: FailingDevice(0.0, {}), False)
