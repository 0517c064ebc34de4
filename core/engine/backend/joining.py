"""Joining a group: a device's own collectives, or those of an entry point of group ``engine.collectives`` by name."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points

from ..errors import BackendError
from .registry import line, probed
from .v1 import Collectives, CollectivesManifest, Device, Group, Probe, collectives_of

GROUP = "engine.collectives"


@dataclass(frozen=True)
class FoundCollectives:
    """An implementation that was found: its manifest, unless it could not be loaded, and what its probe said."""

    name: str
    manifest: CollectivesManifest | None
    probe: Probe


def discover_collectives() -> tuple[FoundCollectives, ...]:
    """All that are installed, best first; the ones that cannot run here last, with their reasons."""
    found: dict[str, FoundCollectives] = {}
    for point in entry_points(group=GROUP):
        found.setdefault(point.name, _load(point))
    return tuple(sorted(found.values(), key=lambda f: (not f.probe.available, -f.probe.score, f.name)))


def _load(point: EntryPoint) -> FoundCollectives:
    try:
        manifest = point.load()
        if not isinstance(manifest, CollectivesManifest):
            raise BackendError(f"it gives {type(manifest).__name__} and no CollectivesManifest.")
        return FoundCollectives(point.name, manifest, probed(manifest, "collectives"))
    except (Exception, SystemExit) as error:  # a plugin may fail in any way; it must not take the engine along
        reason = f"The collectives {point.name} ({point.value}) could not be loaded: {type(error).__name__}: {error}"
        return FoundCollectives(point.name, None, Probe(False, line(reason)))


def find_collectives(name: str) -> CollectivesManifest:
    """Those of that name, or the best for "auto". BackendError says why there are none."""
    all_found = discover_collectives()
    if name == "auto":
        chosen = next((f for f in all_found if f.probe.available), None)
        if chosen is None:
            reasons = " ".join(f"{f.name}: {f.probe.reason}" for f in all_found)
            raise BackendError(f"No collectives can run here, which several ranks need. {reasons}".strip())
    else:
        chosen = next((f for f in all_found if f.name == name), None)
        if chosen is None:
            raise _unknown(name, [f.name for f in all_found])
        if not chosen.probe.available:
            raise BackendError(f"The collectives {name} cannot be used: {chosen.probe.reason}")
    assert chosen.manifest is not None
    return chosen.manifest


def check_name(name: str) -> None:
    """BackendError if no collectives are called so, "auto" apart. Whether they can be used is told where they are."""
    known = sorted({point.name for point in entry_points(group=GROUP)})
    if name != "auto" and name not in known:
        raise _unknown(name, known)


def _unknown(name: str, known: Sequence[str]) -> BackendError:
    return BackendError(f"There are no collectives {name!r}; installed are: {', '.join(known) or 'none'}.")


def join_group(group: Group, name: str = "auto") -> Collectives:
    """The operations of a group over host arrays. BackendError where it cannot be joined."""
    manifest = find_collectives(name)
    try:
        return manifest.join(group)
    except Exception as error:
        raise BackendError(_refused(manifest.name, group, error)) from error


def join_on(device: Device, group: Group) -> Collectives | None:
    """The operations of a group over the device's values, or None where it has none of its own. BackendError where it
    cannot be joined."""
    join = collectives_of(device)
    try:
        return None if join is None else join(group)
    except Exception as error:
        raise BackendError(_refused(device.describe().name, group, error)) from error


def _refused(name: str, group: Group, error: Exception) -> str:
    return line(f"Rank {group.rank} of {group.size} could not join its group through {name}: {error}")


def free_addresses(count: int) -> tuple[str, ...]:
    """So many addresses of this machine on which nothing listens now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return tuple(f"127.0.0.1:{one.getsockname()[1]}" for one in sockets)
