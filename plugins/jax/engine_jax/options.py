"""The settings of the device: given as options, or in the environment as ENGINE_JAX_BUCKETS and so on."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_BUCKETS = tuple(2**n for n in range(3, 17))


@dataclass(frozen=True)
class Options:
    """``platform``: cpu, gpu or tpu, or None for JAX's own choice. ``buckets``: the sizes of T that steps are padded to.
    ``dtype``: what activations are kept in, f32 or bf16, or None for bf16 on a TPU and f32 elsewhere. ``pallas``: whether
    decode attention is the Pallas kernel, or None for that on a TPU alone. ``devices``: so many devices share each model."""

    platform: str | None = None
    buckets: tuple[int, ...] = _BUCKETS
    dtype: str | None = None
    pallas: bool | None = None
    devices: int = 1


def options_of(given: Mapping[str, Any]) -> Options:
    """The options that are given, the others from the environment; ValueError for one that will not do."""
    found = {name: given.get(name, os.environ.get(f"ENGINE_JAX_{name.upper()}")) for name in Options.__annotations__}
    read: dict[str, Any] = {name: _READ[name](value) for name, value in found.items() if value is not None}
    return Options(**read)


def _platform(value: Any) -> str:
    return str(value)


def _buckets(value: Any) -> tuple[int, ...]:
    sizes = (
        [int(part) for part in value.split(",") if part.strip()]
        if isinstance(value, str)
        else [int(part) for part in value]
    )
    if not sizes or min(sizes) < 1:
        raise ValueError(f"buckets are sizes of at least 1, such as 16,64,512, and not {value!r}.")
    return tuple(sorted(set(sizes)))


def _dtype(value: Any) -> str:
    if value not in ("f32", "bf16"):
        raise ValueError(f"dtype is f32 or bf16 and not {value!r}.")
    return str(value)


def _pallas(value: Any) -> bool:
    if str(value).lower() not in ("0", "1", "false", "true"):
        raise ValueError(f"pallas is 0 or 1 and not {value!r}.")
    return str(value).lower() in ("1", "true")


def _devices(value: Any) -> int:
    if int(value) < 1:
        raise ValueError(f"devices is at least 1 and not {value!r}.")
    return int(value)


_READ = {"platform": _platform, "buckets": _buckets, "dtype": _dtype, "pallas": _pallas, "devices": _devices}
