"""Finding backends: entry points of group ``engine.backends``, isolated probes, choice by score or by name.

pluggy carries the one hook, ``engine_backend_manifest``; a plugin that fails in any way disables itself with a sentence.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from math import isfinite
from typing import Any

import pluggy

from ..errors import BackendError
from .v1 import API, CollectivesManifest, Device, Manifest, Probe

GROUP = "engine.backends"
hookspec = pluggy.HookspecMarker("engine")


class Hooks:
    """What a backend plugin implements. The implementation may also be a plain ``Manifest`` object named by the entry
    point."""

    @hookspec
    def engine_backend_manifest(self) -> Manifest:  # type: ignore[empty-body]
        """The backend's manifest."""


@dataclass(frozen=True)
class Backend:
    """A backend that was found: its manifest, unless it could not be loaded, and what its probe said."""

    name: str
    manifest: Manifest | None
    probe: Probe

    @property
    def automatic(self) -> bool:
        """It can run here, and may be chosen without being named."""
        return self.probe.available and self.manifest is not None and self.manifest.automatic


def discover(name: str | None = None) -> tuple[Backend, ...]:
    """All backends that are installed, or those of a name, best first; the ones that cannot run here last, with their
    reasons. Of several of one name the engine's own is used, else the one that is found first."""
    points = entry_points(group=GROUP) if name is None else entry_points(group=GROUP, name=name)
    used: dict[str, EntryPoint] = {}
    found: list[Backend] = []
    for point in sorted(points, key=lambda point: _package(point) != "engine"):
        first = used.setdefault(point.name, point)
        if first is point:
            found.append(_load(point))
        elif first.value != point.value:
            found.append(Backend(point.name, None, Probe(False, _taken(point, first))))
    return tuple(sorted(found, key=lambda b: (not b.probe.available, -b.probe.score, b.name)))


def _package(point: EntryPoint) -> str:
    return "an unknown package" if point.dist is None else point.dist.name


def _taken(point: EntryPoint, first: EntryPoint) -> str:
    return (
        f"{_package(point)} ({point.value}) has a backend of the name {point.name}, too, and that of {_package(first)} "
        f"({first.value}) is used; uninstall one of them."
    )


def _load(point: EntryPoint) -> Backend:
    try:
        manifest = _manifest(point)
        return Backend(point.name, manifest, probed(manifest))
    except (Exception, SystemExit) as error:  # a plugin may fail in any way; it must not take the engine along
        reason = f"The backend plugin {point.name} ({point.value}) could not be loaded: {type(error).__name__}: {error}"
        return Backend(point.name, None, Probe(False, line(reason)))


def _manifest(point: EntryPoint) -> Manifest:
    loaded = point.load()
    if not isinstance(loaded, Manifest):
        manager = pluggy.PluginManager("engine")
        manager.add_hookspecs(Hooks)
        manager.register(loaded)
        results = manager.hook.engine_backend_manifest()
        loaded = results[0] if results else None
    if not isinstance(loaded, Manifest):
        raise BackendError("it names no Manifest and implements no engine_backend_manifest hook.")
    return loaded


def probed(manifest: Manifest | CollectivesManifest, what: str = "backend") -> Probe:
    """What a manifest's probe says, whatever the plugin does, if it was made for an API that this engine has."""
    if not isinstance(manifest.api, str):
        return Probe(
            False, f"The {what} {manifest.name} names the API {manifest.api!r}; it must be a text, as {API!r} is."
        )
    if not _compatible(manifest.api):
        return Probe(False, f"The {what} {manifest.name} was made for API {manifest.api}, this engine has {API}.")
    try:
        probe = manifest.probe()
    except (Exception, SystemExit) as error:
        return Probe(False, line(f"The probe of the {what} {manifest.name} failed: {type(error).__name__}: {error}"))
    if not isinstance(probe, Probe):
        return Probe(False, f"The probe of the {what} {manifest.name} gave {type(probe).__name__} and not a Probe.")
    if not isinstance(probe.score, int | float) or not isfinite(probe.score):
        return Probe(
            False, f"The probe of the {what} {manifest.name} gave the score {probe.score!r}; it must be a number."
        )
    return probe


def line(text: str) -> str:
    """The text as one line, whatever the plugin's exception says."""
    return " ".join(text.split())


def _compatible(api: str) -> bool:
    """The same major version; a plugin of an older or equal minor always runs, a newer one may need what is not here."""
    try:
        major, minor = (int(part) for part in api.split("."))
    except ValueError:
        return False
    mine = tuple(int(part) for part in API.split("."))
    return major == mine[0] and minor <= mine[1]


def open_device(name: str, options: Mapping[str, Any], index: int = 0, instances: bool = False) -> Device:
    """The device of a backend by name, or one of its devices by number, as in cuda:1, from which ``index`` counts on; "auto"
    takes the best available, and ENGINE_BACKEND overrides auto. ``instances``: where there is one device, a number may name
    a further instance of it."""
    if name == "auto":
        name = os.environ.get("ENGINE_BACKEND", "auto")
    name, numbered, number = name.partition(":")
    if numbered:
        if not re.fullmatch(r"[0-9]{1,4}", number):
            raise BackendError(
                f"{number!r} is no number of a device of {name}; they are counted from 0, as in {name}:1."
            )
        index += int(number)
    if name == "auto":
        backends = discover()
        chosen = next((b for b in backends if b.automatic), None)
        if chosen is None:
            reasons = " ".join(f"{b.name}: {b.probe.reason}" for b in backends)
            raise BackendError(
                f"No backend can run here; install one, such as the package's own wheel. {reasons}".strip()
            )
    else:
        chosen = next(iter(discover(name)), None)  # no other plugin is loaded
        if chosen is None:
            known = ", ".join(b.name for b in discover()) or "none"
            raise BackendError(f"There is no backend {name!r}; installed are: {known}.")
        if not chosen.probe.available:
            raise BackendError(f"The backend {name} cannot be used: {chosen.probe.reason}")
    assert chosen.manifest is not None
    if chosen.manifest.single and int(number or 0) and not instances:
        only = chosen.name
        raise BackendError(
            f"There is no device {only}:{number}; {only} has one device, which {only} or {only}:0 names."
        )
    try:
        device = chosen.manifest.open(index, options)
    except (Exception, SystemExit) as error:
        # what a backend says of an option's value is a sentence; of all else the kind says more
        kind = "" if isinstance(error, ValueError) and str(error) else f"{type(error).__name__}: "
        raise BackendError(line(f"The backend {chosen.name} could not be opened: {kind}{error}")) from error
    if device is None:
        raise BackendError(f"The backend {chosen.name} could not be opened: its open gave None and not a Device.")
    return device
