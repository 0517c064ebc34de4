"""Placement: for each call a device, by rules where there are several, and a provider: the device's in its order, by op,
format and features, and the reference last."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count

from ..backend.v1 import Call, Device, DeviceInfo, KVLayout, Provider, Value, providers_of
from ..errors import PlacementError
from ..ops import OPS
from ..ops.kv import PLAIN
from .build import Program
from .features import refusal
from .fuse import fuse
from .group import OPS as GROUP_OPS
from .group import Rank
from .layers import layer_of_state
from .reference import ReferenceProvider
from .rules import Rules
from .transfers import by_place


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
    """``layer_layouts``: KV layout of each layer; ``state_places``: where each state lives; ``main``: the place that samples,
    if it can; ``round_trips``: places that run references through themselves."""

    body: tuple[PlacedCall, ...]
    head: tuple[PlacedCall, ...]
    embedding: tuple[PlacedCall, ...]
    program: Program
    layer_layouts: Mapping[int, KVLayout]
    state_places: Mapping[str, str]
    main: str
    round_trips: frozenset[str]

    @property
    def calls(self) -> tuple[PlacedCall, ...]:
        return self.body + self.head + self.embedding

    def fallbacks(self) -> tuple[PlacedCall, ...]:
        """Calls that should be on the device and are not."""
        return tuple(placed for placed in self.calls if placed.why is not None)


@dataclass(frozen=True)
class _Site:
    """A device as placement sees it. One that offers no provider at all is ``round_trip``: it runs every op by the
    reference through itself."""

    place: str
    device: Device
    info: DeviceInfo
    offered: Mapping[str, Sequence[Provider]]
    without: frozenset[str]
    round_trip: bool

    def find(self, call: Call, layout: str | None) -> tuple[Provider | None, str]:
        """The first provider that takes the call, or a sentence that says why none does."""
        if self.round_trip:
            return ReferenceProvider(call.op, self.device), ""
        why = f"{self.info.backend} has no provider of {call.op}."
        if call.op in self.without:
            why = f"the providers of {call.op} were taken out on request."
        for provider in self.offered.get(call.op, ()):
            if layout is not None and provider.layouts and layout not in provider.layouts:
                why = f"{provider.name} does not know the KV layout {layout}."
                continue
            reason = refusal(provider, call)
            if reason is None:
                return provider, ""
            why = reason
        return None, why

    def layout(self, users: Sequence[Call], dtype: str) -> KVLayout | None:
        """The first layout in which all these calls can run here, or None."""
        if self.round_trip:
            return PLAIN
        holding = (layout for layout in self.info.kv_layouts if dtype in layout.dtypes)
        return next((layout for layout in holding if self.takes(users, layout.name)), None)

    def holds(self, dtype: str) -> bool:
        """Whether a layout of the device has caches of this dtype."""
        return any(dtype in layout.dtypes for layout in self.info.kv_layouts)

    def takes(self, calls: Sequence[Call], layout: str | None = None) -> bool:
        return all(self.find(call, layout)[0] is not None for call in calls)


@dataclass(frozen=True)
class _Homes:
    """Where states live, caches of ``kv_dtype`` among them: ``wanted`` by the rules, ``places`` in fact."""

    wanted: Mapping[str, str]
    places: Mapping[str, str]
    layouts: Mapping[int, KVLayout]
    kv_dtype: str

    def layout_of(self, call: Call) -> str | None:
        found = map(self.layout_of_state, call.states.values())
        return next((layout for layout in found if layout is not None), None)

    def layout_of_state(self, state: str) -> str | None:
        """None for what is no cache."""
        return self.layouts[layer_of_state(state)].name if state.startswith("kv.") else None


class Placer:
    """Chooses once, at load. ``devices``: one, whose place is "device", or several by the names that ``rules`` have.
    ``rank``: of the group that runs the program, if there are several."""

    def __init__(
        self,
        devices: Device | Mapping[str, Device],
        without: Sequence[str] = (),
        round_trip: bool = False,
        rules: Rules | None = None,
        rank: Rank | None = None,
    ) -> None:
        unknown = [op for op in without if op not in OPS]
        if unknown:
            raise PlacementError(f"There is no op {unknown[0]!r}; the ops are: {', '.join(OPS)}.")
        self._rules = rules or Rules()
        self._rank = rank
        self._sites = {}
        for place, device in by_place(devices).items():
            found = {} if round_trip else providers_of(device)
            offered = {op: tuple(providers) for op, providers in found.items() if op not in without}
            self._sites[place] = _Site(place, device, device.describe(), offered, frozenset(without), not found)

    def place(
        self, program: Program, strict: bool = False, fused: bool = True, deterministic: bool = False
    ) -> Placement:
        """Fuse, choose homes for state, choose providers, insert quantize calls, resolve roles to storage."""
        self._rules.check(program.calls)
        body, head = program.body, program.head
        wanted = self._wanted(program)
        if fused:
            body, head = (fuse(calls, lambda call: self._offers(call, wanted)) for calls in (body, head))
        homes = self._homes(program, body + head, wanted)
        body = tuple(part for call in body for part in _by_home(call, homes))
        ids = count(program.values)
        chosen_body, chosen_head, embedding = (
            self._choose(calls, homes, ids) for calls in (body, head, program.embedding)
        )
        if fused:
            chosen_body, chosen_head = self._packed_where_made(chosen_body), self._packed_where_made(chosen_head)
        trips = frozenset(place for place, site in self._sites.items() if site.round_trip)
        main = wanted["history"]
        placement = Placement(chosen_body, chosen_head, embedding, program, homes.layouts, homes.places, main, trips)
        falls = placement.fallbacks()
        if strict and falls:
            first = falls[0]
            raise PlacementError(
                f"--strict: {len(falls)} of {len(placement.calls)} ops would run on the reference, "
                f"first {first.call.op}: {first.why}"
            )
        if deterministic:
            self._refuse_variance(placement)
        return placement

    def _refuse_variance(self, placement: Placement) -> None:
        """PlacementError where a row's result may depend on the other rows of its step. A device's invariant buckets make up
        for providers that do not promise it."""
        sites = self._sites
        varying = [
            placed
            for placed in placement.calls
            if not placed.provider.batch_invariant
            and (placed.place not in sites or sites[placed.place].info.invariant_buckets is None)
        ]
        if varying:
            first = varying[0]
            raise PlacementError(
                f"--deterministic: with {len(varying)} of {len(placement.calls)} ops a sequence's tokens may depend on what"
                f" else is in the batch, first {first.call.op} by {first.provider.name}; take another backend, or run them"
                f" on the reference (--without {first.call.op})."
            )

    # -- devices ---------------------------------------------------------------------------------------------------

    def _wanted(self, program: Program) -> dict[str, str]:
        """The place of each state by the rules: a layer's cache goes with its attention, a memory with what it is for, the
        history with sampling."""
        wanted: dict[str, str] = {}
        for call in program.calls:
            if call.op in ("attention", "causal_conv", "gated_delta", "ssm_scan", "sample"):
                wanted |= dict.fromkeys(call.states.values(), self._rules.place(call))
        return wanted

    def _site(self, call: Call, wanted: Mapping[str, str]) -> _Site:
        state = next(iter(call.states.values()), None)
        return self._sites[self._rules.place(call) if state is None else wanted[state]]

    def _offers(self, call: Call, wanted: Mapping[str, str]) -> bool:
        """Whether the parts of a fused call are on one device, and that has it."""
        sites = {self._site(part, wanted).place for part in call.parts}
        site = self._site(call, wanted)
        return len(sites) == 1 and not site.round_trip and site.find(call, None)[0] is not None

    # -- providers -------------------------------------------------------------------------------------------------

    def _choose(self, calls: Sequence[Call], homes: _Homes, ids: Iterator[int]) -> tuple[PlacedCall, ...]:
        """``ids``: those of values that are made here."""
        result: list[PlacedCall] = []
        packed: dict[tuple[str, int, str, float], Value] = {}
        for call in calls:
            site = self._site(call, homes.wanted)
            placed = self._placed(call, site, homes)
            for name, layout in placed.provider.wants(placed.call).items():
                value, scale = placed.call.inputs[name], placed.call.attrs.get("input_scale", 0.0)
                key = (site.place, value.id, layout, scale)
                if key not in packed:
                    packed[key] = Value(next(ids), f"{value.name}.{layout}", value.shape, layout)
                    result.append(self._quantize(site, value, packed[key], scale))
                inputs = {**placed.call.inputs, name: packed[key]}
                placed = replace(placed, call=replace(placed.call, inputs=inputs))
            result.append(placed)
        return tuple(result)

    def _placed(self, call: Call, site: _Site, homes: _Homes) -> PlacedCall:
        if self._rank is not None and call.op in GROUP_OPS:
            return self._exchanged(call, site, self._rank)
        layout = homes.layout_of(call)
        home = next((homes.places[state] for state in call.states.values()), site.place)
        there = _stored(call, site.info.roles)
        provider, why = site.find(there, layout if home == site.place else None)
        if provider is not None and home == site.place:
            return PlacedCall(there, provider, site.place, layout)
        if not why and layout is not None and not site.holds(homes.kv_dtype):
            why = f"{site.info.backend} has no KV layout for {homes.kv_dtype}."
        why = why or "not every op on the same state can run on the device."
        return PlacedCall(self._on_host(call, site), ReferenceProvider(call.op), "host", layout, why)

    def _exchanged(self, call: Call, site: _Site, rank: Rank) -> PlacedCall:
        """By the device's own provider once it has joined the group, else by the collectives that were joined."""
        there = _stored(call, site.info.roles)
        if rank.own is None:
            return PlacedCall(there, rank.provider(call.op), "host")
        offered = None if site.round_trip else site.find(there, None)[0]
        return PlacedCall(there, offered or rank.provider(call.op), site.place)

    def _on_host(self, call: Call, site: _Site) -> Call:
        """Values on the host are stored as on the device, or in f32 where several devices may want them."""
        return _stored(call, site.info.roles if len(self._sites) == 1 else _HOST_ROLES)

    def _quantize(self, site: _Site, value: Value, output: Value, scale: float) -> PlacedCall:
        attrs = {"layout": output.dtype} | ({"scale": scale} if scale else {})
        call = Call("quantize", {"x": value}, (output,), {}, {}, attrs)
        provider, why = site.find(call, None)
        if provider is None:
            return PlacedCall(call, ReferenceProvider("quantize"), "host", None, why)
        return PlacedCall(call, provider, site.place)

    def _packed_where_made(self, calls: Sequence[PlacedCall]) -> tuple[PlacedCall, ...]:
        """A call whose result is quantized packs it itself where its provider can: the attribute ``packed``."""
        made = {value.id: n for n, placed in enumerate(calls) for value in placed.call.outputs}
        result: list[PlacedCall | None] = list(calls)
        for n, placed in enumerate(calls):
            place = made.get(placed.call.inputs["x"].id) if placed.call.op == "quantize" else None
            maker = None if place is None else result[place]
            one = None if maker is None else self._packing(maker, placed)
            if one is not None and place is not None:
                result[place], result[n] = one, None
        return tuple(placed for placed in result if placed is not None)

    def _packing(self, maker: PlacedCall, quantize: PlacedCall) -> PlacedCall | None:
        """The maker's call with its last output also in the layout that ``quantize`` gives, if its provider offers that."""
        call, packing = maker.call, quantize.call
        attrs = {**call.attrs, "packed": packing.attr("layout")}
        offered = "packed" in OPS[call.op].attrs and "packed" not in call.attrs and maker.place == quantize.place
        if not offered or "scale" in packing.attrs or call.outputs[-1].id != packing.inputs["x"].id:
            return None
        outputs = (*call.outputs, *packing.outputs)
        one = replace(call, outputs=outputs, attrs=attrs, parts=(*(call.parts or (call,)), packing))
        return replace(maker, call=one) if refusal(maker.provider, one) is None else None

    # -- homes of state --------------------------------------------------------------------------------------------

    def _homes(self, program: Program, calls: Sequence[Call], wanted: Mapping[str, str]) -> _Homes:
        """All ops on a layer's KV sit together, so a fallback of one moves that layer home, once."""
        layouts: dict[int, KVLayout] = {}
        places: dict[str, str] = {}
        for kv in program.kv_layers:
            own = f"kv.{kv.layer}."
            users = [c for c in calls if any(s.startswith(own) for s in c.states.values())]
            states = {s for c in users for s in c.states.values() if s.startswith(own)}
            site = self._sites[wanted[min(states)]]
            layout = site.layout(users, program.kv_dtype)
            layouts[kv.layer] = PLAIN if layout is None else layout
            places |= dict.fromkeys(states, "host" if layout is None else site.place)
        for one in program.recurrent_layers:
            for state in map(one.state, one.shapes):
                users = [c for c in calls if state in c.states.values()]
                site = self._sites[wanted[state]]
                places[state] = site.place if site.takes(users) else "host"
        users = [c for c in calls if "history" in c.states.values()]
        site = self._sites[wanted["history"]]
        places["history"] = site.place if site.takes(users) else "host"
        return _Homes(wanted, places, layouts, program.kv_dtype)


_HOST_ROLES = {"act": "f32", "residual": "f32"}


def _stored(call: Call, roles: Mapping[str, str]) -> Call:
    """The call with storage tags for roles."""

    def concrete(value: Value) -> Value:
        return replace(value, dtype=roles.get(value.dtype, value.dtype))

    inputs = {name: concrete(value) for name, value in call.inputs.items()}
    return replace(call, inputs=inputs, outputs=tuple(map(concrete, call.outputs)))


def _by_home(call: Call, homes: _Homes) -> list[Call]:
    """A kv_copy over many layers, as one call for each place and layout of theirs."""
    if call.op != "kv_copy":
        return [call]
    parts: dict[tuple[str, str | None], list[str]] = {}
    for state in call.states.values():
        parts.setdefault((homes.places[state], homes.layout_of_state(state)), []).append(state)
    return [replace(call, states={f"states.{n}": name for n, name in enumerate(names)}) for names in parts.values()]
