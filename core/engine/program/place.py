"""Placement: for each call a provider, by op, format and features, the backend's in its order and the reference last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..backend.v1 import Call, Device, KVLayout, Provider, Value, providers_of
from ..errors import PlacementError
from ..ops import OPS
from ..ops.kv import PLAIN
from .build import Program
from .features import refusal
from .fuse import fuse
from .reference import ReferenceProvider


@dataclass(frozen=True)
class PlacedCall:
    """A call with its provider and place; ``why`` says what kept it off the device when it fell back."""

    call: Call
    provider: Provider
    place: str
    layout: str | None = None
    why: str | None = None


@dataclass(frozen=True)
class Placement:
    """``state_layouts``: KV layout of each layer; ``history_place``: where the token history lives."""

    body: tuple[PlacedCall, ...]
    head: tuple[PlacedCall, ...]
    program: Program
    layer_layouts: Mapping[int, KVLayout]
    state_places: Mapping[str, str]
    round_trip: bool

    @property
    def calls(self) -> tuple[PlacedCall, ...]:
        return self.body + self.head

    def fallbacks(self) -> tuple[PlacedCall, ...]:
        """Calls that should be on the device and are not."""
        return tuple(placed for placed in self.calls if placed.why is not None)


class Placer:
    """Chooses once, at load. A device that offers no provider at all runs every op by the reference through itself."""

    def __init__(self, device: Device, without: Sequence[str] = (), round_trip: bool = False) -> None:
        self._device = device
        self._info = device.describe()
        offered = {} if round_trip else providers_of(device)
        unknown = [op for op in without if op not in OPS]
        if unknown:
            raise PlacementError(f"There is no op {unknown[0]!r}; the ops are: {', '.join(OPS)}.")
        self._offered = {op: tuple(found) for op, found in offered.items() if op not in without}
        self._without = frozenset(without)
        self._round_trip = not offered

    def place(self, program: Program, strict: bool = False, fused: bool = True) -> Placement:
        """Fuse, choose homes for state, choose providers, insert quantize calls, resolve roles to storage."""
        body, head = program.body, program.head
        if fused:
            body, head = fuse(body, self._offers), fuse(head, self._offers)
        layouts, homes = self._homes(program, body + head)
        body = tuple(part for call in body for part in _by_home(call, layouts, homes))
        chosen_body = self._choose(body, layouts, homes, program.values)
        chosen_head = self._choose(head, layouts, homes, program.values + 10_000)
        placement = Placement(chosen_body, chosen_head, program, layouts, homes, self._round_trip)
        falls = placement.fallbacks()
        if strict and falls:
            first = falls[0]
            raise PlacementError(
                f"--strict: {len(falls)} of {len(placement.calls)} ops would run on the reference, "
                f"first {first.call.op}: {first.why}"
            )
        return placement

    # -- providers -------------------------------------------------------------------------------------------------

    def _offers(self, call: Call) -> bool:
        return self._find(call, None)[0] is not None

    def _find(self, call: Call, layout: str | None) -> tuple[Provider | None, str]:
        why = f"{self._info.backend} has no provider of {call.op}."
        if call.op in self._without:
            why = f"the providers of {call.op} were taken out on request."
        for provider in self._offered.get(call.op, ()):
            if layout is not None and provider.layouts and layout not in provider.layouts:
                why = f"{provider.name} does not know the KV layout {layout}."
                continue
            reason = refusal(provider, call)
            if reason is None:
                return provider, ""
            why = reason
        return None, why

    def _choose(
        self, calls: Sequence[Call], layouts: Mapping[int, KVLayout], homes: Mapping[str, str], first_id: int
    ) -> tuple[PlacedCall, ...]:
        result: list[PlacedCall] = []
        packed: dict[tuple[int, str, float], Value] = {}
        for call in calls:
            placed = self._placed(call, layouts, homes)
            for name, layout in placed.provider.wants(placed.call).items():
                value, scale = placed.call.inputs[name], placed.call.attrs.get("input_scale", 0.0)
                key = (value.id, layout, scale)
                if key not in packed:
                    packed[key] = Value(first_id, f"{value.name}.{layout}", value.shape, layout)
                    first_id += 1
                    result.append(self._quantize(value, packed[key], scale))
                inputs = {**placed.call.inputs, name: packed[key]}
                placed = replace(placed, call=replace(placed.call, inputs=inputs))
            result.append(placed)
        return tuple(result)

    def _placed(self, call: Call, layouts: Mapping[int, KVLayout], homes: Mapping[str, str]) -> PlacedCall:
        call = self._resolved(call)
        if self._round_trip:
            return PlacedCall(call, ReferenceProvider(call.op, self._device), "device", _layout_of(call, layouts))
        layout = _layout_of(call, layouts)
        home = next((homes[state] for state in call.states.values()), "device")
        provider, why = self._find(call, layout if home == "device" else None)
        if provider is not None and home == "device":
            return PlacedCall(call, provider, "device", layout)
        why = why or "not every op on the same state can run on the device."
        return PlacedCall(call, ReferenceProvider(call.op), "host", layout, why)

    def _quantize(self, value: Value, output: Value, scale: float) -> PlacedCall:
        attrs = {"layout": output.dtype} | ({"scale": scale} if scale else {})
        call = Call("quantize", {"x": value}, (output,), {}, {}, attrs)
        provider, why = self._find(call, None)
        if provider is None:
            return PlacedCall(call, ReferenceProvider("quantize"), "host", None, why)
        return PlacedCall(call, provider, "device")

    def _resolved(self, call: Call) -> Call:
        roles = self._info.roles

        def concrete(value: Value) -> Value:
            return replace(value, dtype=roles.get(value.dtype, value.dtype))

        inputs = {name: concrete(value) for name, value in call.inputs.items()}
        return replace(call, inputs=inputs, outputs=tuple(map(concrete, call.outputs)))

    # -- homes of state --------------------------------------------------------------------------------------------

    def _homes(self, program: Program, calls: Sequence[Call]) -> tuple[dict[int, KVLayout], dict[str, str]]:
        """All ops on a layer's KV sit together, so a fallback of one moves that layer home, once."""
        layouts: dict[int, KVLayout] = {}
        homes: dict[str, str] = {}
        for kv in program.kv_layers:
            own = f"kv.{kv.layer}."
            users = [c for c in calls if any(s.startswith(own) for s in c.states.values())]
            holding = (layout for layout in self._info.kv_layouts if program.kv_dtype in layout.dtypes)
            layout = next((layout for layout in holding if self._all(users, layout)), None)
            on_device = self._round_trip or layout is not None
            layouts[kv.layer] = layout if layout is not None else PLAIN
            for state in {s for c in users for s in c.states.values() if s.startswith(own)}:
                homes[state] = "device" if on_device else "host"
        users = [c for c in calls if "history" in c.states.values()]
        device = self._round_trip or all(self._find(c, None)[0] is not None for c in users)
        homes["history"] = "device" if device else "host"
        return layouts, homes

    def _all(self, users: Sequence[Call], layout: KVLayout) -> bool:
        return all(self._find(call, layout.name)[0] is not None for call in users)


def _by_home(call: Call, layouts: Mapping[int, KVLayout], homes: Mapping[str, str]) -> list[Call]:
    """A kv_copy over many layers, as one call for each place and layout of theirs."""
    if call.op != "kv_copy":
        return [call]
    parts: dict[tuple[str, str], list[str]] = {}
    for state in call.states.values():
        parts.setdefault((homes[state], layouts[_layer(state)].name), []).append(state)
    return [replace(call, states={f"states.{n}": name for n, name in enumerate(names)}) for names in parts.values()]


def _layer(state: str) -> int:
    return int(state.split(".")[1])


def _layout_of(call: Call, layouts: Mapping[int, KVLayout]) -> str | None:
    state = next((s for s in call.states.values() if s.startswith("kv.")), None)
    return None if state is None else layouts[_layer(state)].name
