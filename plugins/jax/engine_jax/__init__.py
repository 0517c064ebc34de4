"""The backend jax of engine: JAX arrays as values, whole segments compiled by XLA for steps of a few fixed sizes."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from engine.backend.v1 import Device, Manifest, Probe

OLDEST = (0, 7)


def _probe() -> Probe:
    try:
        found = version("jax") if find_spec("jax") and find_spec("jaxlib") else None
    except PackageNotFoundError:
        found = None
    if found is None:
        return Probe(False, "JAX is not installed; for a TPU run: pip install 'jax[tpu]', else: pip install jax")
    if tuple(int(part) for part in found.split(".")[:2]) < OLDEST:
        return Probe(False, f"JAX {found} is too old; this backend needs {'.'.join(map(str, OLDEST))} or newer.")
    score = 20 if find_spec("libtpu") else 1
    return Probe(True, f"JAX {found}, compiled by XLA.", score=score)


def _open(index: int, options: Mapping[str, Any]) -> Device:
    from .device import JaxDevice
    from .options import options_of

    return JaxDevice(index, options_of(options))


manifest = Manifest("jax", "1.1", _probe, _open)
