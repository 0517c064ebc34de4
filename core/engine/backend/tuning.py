"""Kernels that a device can run in several ways, measured: a part of the contract (api 1.1), which ``v1`` exports."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .v1 import Device


@dataclass(frozen=True)
class Tuned:
    """A kernel that was measured: what it computes and how, seconds in the usual way (inf if that is not possible) and
    in the fastest."""

    what: str
    usual_s: float
    best_s: float


@dataclass(frozen=True)
class Tuning:
    """``path``: where the fastest ways are kept when the tuning ends. ``found``: what has been measured so far."""

    path: str
    found: list[Tuned]


def tuning_of(device: Device) -> Callable[[], AbstractContextManager[Tuning]] | None:
    """Optional on a device: in steps within ``tuning()`` each kernel of which the device has no figures is run in all
    the ways that it knows, and the fastest is kept, for later processes too. The results are those of any other step."""
    return getattr(device, "tuning", None)
