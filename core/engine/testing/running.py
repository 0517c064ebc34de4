"""Running one case on a device: operands copied in between guards, outputs over poison, and everything looked at after."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..backend.v1 import (
    HOST_DTYPES,
    Array,
    BoundCall,
    Call,
    Device,
    Frame,
    KVLayout,
    Limits,
    Provider,
    StepFn,
    Value,
    providers_of,
)
from ..ops import STEP_INPUTS, Case, OpSpec, evaluate
from ..ops.dtypes import from_f32, to_f32
from ..ops.kv import PLAIN, WHOLE, plain_states
from .cases import MATRICES, CaseWeight
from .compare import Bound, packed_bound, whole_cache_bound

_F32 = frozenset({"processed", "logprob", "top_logprobs", "weights"})
"""Values that are f32 whatever the roles are."""
_KINDS = {"states.0": "k", "states.1": "v", "states.2": "k_scale", "states.3": "v_scale"}
_GUARD = 0xA5


@dataclass(frozen=True)
class Result:
    """What a case left: outputs and states (plain layout) on the host, and what was written that should not have been."""

    outputs: tuple[Array, ...]
    states: Mapping[str, Array]
    changed: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()


@dataclass
class Bench:
    """One case's call on a device. ``packed`` holds the weights of each packer."""

    device: Device
    spec: OpSpec
    case: Case
    packed: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.info = self.device.describe()
        self.weights = {name: CaseWeight(name, stored) for name, stored in self.case.weights.items()}
        self.call = self._call()

    # -- the call --------------------------------------------------------------------------------------------------

    def _call(self) -> Call:
        case, wanted = self.case, self.reference(self.case)[0]
        inputs = {
            name: Value(n, name, _symbolic(name, a, case), self._tag(name, a))
            for n, (name, a) in enumerate(case.inputs.items())
        }
        names = [name for name in self.spec.outputs if not name.endswith("*")] or ["y"]
        outputs = []
        for n, array in enumerate(wanted):
            name = names[n] if n < len(names) else f"out.{n}"
            shape: tuple[int | str, ...] = _symbolic(name, array, case)
            if self.spec.name == "sample" and n >= 3:
                shape = ("R", "K")
            tag = self._tag(name, array)
            if array.dtype == np.uint8:  # packed rows, whose shape is that of what they hold
                shape, tag = (shape[0], array.shape[1] * 8 // 11), case.attrs.get("packed") or case.attrs["layout"]
            outputs.append(Value(100 + n, name, shape, tag))
        attrs = {k: v for k, v in case.attrs.items() if v != self.spec.attrs.get(k)}
        states = {name: name for name in self.states(case)}
        return Call(self.spec.name, inputs, tuple(outputs), self.weights, states, attrs)

    def _tag(self, name: str, array: Array) -> str:
        if array.dtype == np.float32 and name not in STEP_INPUTS and name not in _F32:
            return self.info.roles["act"]
        return next(tag for tag in ("f32", "i32", "u32", "u8", "bf16") if HOST_DTYPES[tag] == array.dtype)

    def layout(self, provider: Provider) -> KVLayout | None:
        """The KV layout that the case's states lie in."""
        if self.case.kv is None:
            return None
        known = (layout for layout in self.info.kv_layouts if self.case.kv.dtype in layout.dtypes)
        return next((layout for layout in known if layout.name in provider.layouts), None)

    def refusal(self, provider: Provider) -> str | None:
        """None, or why the case cannot be run for reasons that are not the provider's own."""
        kv, layout = self.case.kv, self.layout(provider)
        if kv is None:
            return None
        if layout is None:
            return f"{provider.name} has no KV layout for {kv.dtype}."
        if layout.from_plain is None and layout.shapes(kv) != PLAIN.shapes(kv):
            return f"the KV layout {layout.name} says neither from_plain nor to_plain, so its states cannot be read."
        return None

    def bind(self, provider: Provider) -> StepFn:
        """The call bound, with the quantize calls before it that it asks for."""
        packed = self.packed.setdefault(provider.packer, {})
        for name, ref in self.weights.items():
            if name not in packed:
                packed[name] = provider.pack(ref, (self.spec.name,), lambda _: None)
                packed[name].ready()
        layout = self.layout(provider)
        limits = self._limits()
        fns, inputs = [], dict(self.call.inputs)
        for n, (name, packing) in enumerate(provider.wants(self.call).items()):
            value = inputs[name]
            inputs[name] = Value(200 + n, f"{name}.{packing}", value.shape, packing)
            fns.append(self._quantize(value, inputs[name], limits))
        call = replace(self.call, inputs=inputs)
        fns.append(provider.bind(BoundCall(call, provider, packed, layout.name if layout else None), limits))

        def run(frame: Frame) -> None:
            for fn in fns:
                fn(frame)

        return run

    def _quantize(self, value: Value, output: Value, limits: Limits) -> StepFn:
        scale = self.case.attrs.get("input_scale", 0.0)
        attrs = {"layout": output.dtype} | ({"scale": scale} if scale else {})
        call = Call("quantize", {"x": value}, (output,), {}, {}, attrs)
        provider = next(p for p in providers_of(self.device)["quantize"] if p.supports(call) is None)
        return provider.bind(BoundCall(call, provider, {}), limits)

    def _limits(self) -> Limits:
        case = self.case
        context = max([a.shape[-1] for n, a in case.states.items() if n == "history"], default=64)
        dims = replace(case.dims, **{n: max(getattr(case.dims, n), 1) for n in "TSRPK"})
        if case.kv is not None:
            context = max(context, dims.P * case.kv.block_size)
        return Limits(dims, context, max([len(a) for n, a in case.states.items() if n == "history"], default=8))

    # -- the reference ---------------------------------------------------------------------------------------------

    def reference(self, case: Case) -> tuple[tuple[Array, ...], dict[str, Array]]:
        """The reference's outputs and states for a case of this bench's shapes, its operands rounded as they are stored."""
        inputs = {name: self._rounded(name, a) for name, a in case.inputs.items()}
        with np.errstate(all="ignore"):  # NaN is among the cases
            return evaluate(self.spec, replace(case, inputs=inputs), lambda stored: CaseWeight("", stored).dense())

    def _rounded(self, name: str, array: Array) -> Array:
        tag = self._tag(name, array)
        return to_f32(from_f32(array, tag), tag) if tag in ("f16", "bf16") else array

    def bound(self, case: Case, output: int) -> Bound:
        """How near output number ``output`` must be."""
        base = Bound(self.spec.tolerance.absolute, self.spec.tolerance.relative)
        name = f"weight.{output}" if f"weight.{output}" in self.weights else "weight"
        ref = self.weights.get(name)
        if ref is not None and "x" in case.inputs and self._rounds_activations(case, ref):
            base = self._packed_bound(case, ref, base)
        if case.kv is not None and case.kv.dtype in WHOLE and self.spec.name == "attention":
            base = whole_cache_bound(case.states.get("v", case.states["k"]), base)
        sizes = [np.abs(a[np.isfinite(a)]).max(initial=0.0) for a in case.inputs.values() if a.dtype == np.float32]
        return base.stored_as(self.info.roles["act"], float(max(sizes, default=0.0)))

    def _rounds_activations(self, case: Case, ref: CaseWeight) -> bool:
        """Whether a provider may take coarser activations than the reference's."""
        if case.attrs.get("input_scale"):
            return False
        dynamic = case.attrs.get("quantized_activation") == "required"
        return dynamic or (ref.format not in ("F32", "F16", "BF16") and self.spec.name in MATRICES)

    def _packed_bound(self, case: Case, ref: CaseWeight, base: Bound) -> Bound:
        x, weight = case.inputs["x"], ref.dense()
        if not self.spec.name.startswith("moe_linear"):
            return packed_bound(x, weight, base)
        ids = case.inputs["ids"]
        rows = x if case.attrs.get("per_choice") else np.repeat(x, ids.shape[1], axis=0)
        parts = [packed_bound(rows[n : n + 1], weight[e], base).absolute for n, e in enumerate(ids.reshape(-1))]
        return Bound(np.concatenate([np.atleast_2d(p) for p in parts]), base.relative)

    # -- one run ---------------------------------------------------------------------------------------------------

    @contextmanager
    def loaded(self, provider: Provider, case: Case) -> Iterator[Frame]:
        """The operands of a case of this bench's shapes on the device, until the end of the block."""
        states = self._laid_out(self.layout(provider), self.states(case))
        frame = Frame(case.dims, {}, {name: self.device.copy_in(a) for name, a in states.items()})
        for name, value in self.call.inputs.items():
            frame.values[value.id] = self.device.copy_in(self._stored(name, case.inputs[name]).copy())
        inputs = list(frame.values.values())
        try:
            yield frame
        finally:
            for held in (*inputs, *frame.states.values()):
                self.device.free(held)

    def run(self, provider: Provider, fn: StepFn, case: Case) -> Result:
        """The bound call on a case of this bench's shapes, and all that it may have touched."""
        device, layout = self.device, self.layout(provider)
        with self.loaded(provider, case) as frame:
            inputs, states = dict(frame.values), dict(frame.states)
            guards = _Guards(device, [a.nbytes for a in self.reference(case)[0]])
            fn(frame)
            device.fence()
            outputs = tuple(self._read(frame.values[value.id], value) for value in self.call.outputs)
            after = {n: device.copy_out(a) for n, a in frame.states.items()}
            changed = [n for n, v in self.call.inputs.items() if not self._kept(inputs[v.id], n, case)]
            changed += guards.touched()
            replaced = tuple(n for n, a in frame.states.items() if a is not states[n])
        return Result(outputs, self._plain(layout, after), tuple(changed), replaced)

    def _kept(self, value: Any, name: str, case: Case) -> bool:
        return _same(self.device.copy_out(value), self._stored(name, case.inputs[name]))

    def _stored(self, name: str, array: Array) -> Array:
        tag = self._tag(name, array)
        return from_f32(array, tag) if tag in ("f16", "bf16") else np.ascontiguousarray(array)

    def _read(self, value: Any, about: Value) -> Array:
        array = self.device.copy_out(value)
        tag = about.dtype
        stored = HOST_DTYPES.get(tag, HOST_DTYPES["u8"])  # packed activations are bytes
        assert array.dtype == stored, (
            f"{self.spec.name}, {self.case.name}: {about.name} is {array.dtype} and should be {stored}."
        )
        return to_f32(array, tag) if tag in ("f16", "bf16") and self.spec.name != "quantize" else array

    def states(self, case: Case) -> dict[str, Array]:
        """The states before the case, in the plain layout."""
        return plain_states(case.kv, case.states) if case.kv is not None else dict(case.states)

    def _laid_out(self, layout: KVLayout | None, states: Mapping[str, Array]) -> dict[str, Array]:
        if layout is None or layout.from_plain is None or self.case.kv is None:
            return {n: np.array(a) for n, a in states.items()}
        return {n: layout.from_plain(self.case.kv, _KINDS.get(n, n), a) for n, a in states.items()}

    def _plain(self, layout: KVLayout | None, states: Mapping[str, Array]) -> dict[str, Array]:
        if layout is None or layout.to_plain is None or self.case.kv is None:
            return dict(states)
        return {n: layout.to_plain(self.case.kv, _KINDS.get(n, n), a) for n, a in states.items()}


class _Guards:
    """Poison where outputs will lie: memory of their sizes, given back, between memory that nobody may write to."""

    def __init__(self, device: Device, sizes: Sequence[int]) -> None:
        self._device = device
        blocks = [np.full(max(size, 1), _GUARD, np.uint8) for size in sizes for _ in range(3)]
        values = [device.copy_in(block) for block in blocks]
        for value in values[1::3]:
            device.free(value)
        self._kept = [(v, b) for n, (v, b) in enumerate(zip(values, blocks, strict=True)) if n % 3 != 1]

    def touched(self) -> list[str]:
        """Says whether a guard was written to, and frees them."""
        wrong = [value for value, block in self._kept if not _same(self._device.copy_out(value), block)]
        for value, _ in self._kept:
            self._device.free(value)
        return ["memory beside its outputs"] if wrong else []


def _same(a: Array, b: Array) -> bool:
    return a.tobytes() == np.ascontiguousarray(b).tobytes()


def _symbolic(name: str, array: Array, case: Case) -> tuple[int | str, ...]:
    """The array's shape with the step's dimension in front."""
    family = name.partition(".")[0]
    known = STEP_INPUTS.get(name) or STEP_INPUTS.get(f"{family}.*")
    if known:
        sizes = ("S", "P", "S+1", "R+1")
        return tuple(size if size in sizes or n == 0 else array.shape[n] for n, size in enumerate(known[0]))
    symbol = next((s for s in "TR" if getattr(case.dims, s) == len(array)), None)
    return (symbol or f"T*{len(array) // case.dims.T}", *array.shape[1:])
