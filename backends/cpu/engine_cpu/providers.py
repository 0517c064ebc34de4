"""Which ops the CPU offers, with which features, and how each call becomes a native kernel."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.backend.v1 import BoundCall, Call, Frame, Limits, Packed, Provider, Segment, StepFn, WeightRef

from . import lower, weights
from .compile import Lowering, compile_segment
from .layouts import CPU_LANES, CPU_PAIRS
from .weights import SPANS

if TYPE_CHECKING:
    from .device import CpuDevice

PACKED_ACTIVATIONS = frozenset({*SPANS, "bf16"})
ACTIVATIONS = frozenset(lower.ACTIVATION_NUMBERS)
NO_LAYOUT: frozenset[str] = frozenset()
KV_LAYOUTS = frozenset({CPU_LANES.name, CPU_PAIRS.name})

Check = Callable[[Call], str | None]


@dataclass(frozen=True)
class CpuProvider:
    """One op. ``lower`` appends its kernel to a native segment; rows never share a reduction, so it is batch-invariant."""

    op: str
    name: str
    lower: Callable[[Lowering], None]
    device: CpuDevice
    features: frozenset[str] = frozenset()
    layouts: frozenset[str] = NO_LAYOUT
    check: Check | None = None
    packer: str = "cpu"
    batch_invariant: bool = True

    def supports(self, call: Call) -> str | None:
        return None if self.check is None else self.check(call)

    def wants(self, call: Call) -> Mapping[str, str]:
        if self.op not in ("linear", "linear_group", "moe_linear", "moe_linear_group"):
            return {}
        packed = weights.activations(call) & PACKED_ACTIVATIONS
        return {"x": packed.pop()} if packed else {}

    def pack(self, ref: WeightRef, uses: Sequence[str], progress: Callable[[int], None]) -> Packed:
        # The matrices of experts are [experts, N, K], and what has two axes is their biases.
        plain = len(ref.shape) <= any(use.startswith("moe_linear") for use in uses) + 1 or "causal_conv" in uses
        return weights.pack_plain(ref, progress) if plain else weights.pack(ref, self.device.packing, progress)

    def bind(self, bound: BoundCall, limits: Limits) -> StepFn:
        """The call as a segment of its own, made when the states are first seen."""
        inputs = tuple({v.id: v for v in bound.call.inputs.values()}.values())
        segment = Segment(bound.call.op, "device", (bound,), inputs, bound.call.outputs)
        made: list[StepFn] = []

        def run(frame: Frame) -> None:
            if not made:
                made.append(compile_segment(self.device, segment, limits, frame.states))
            made[0](frame)

        return run


def _no_kernel(formats: Collection[str]) -> str:
    known = ", ".join(sorted(weights.FORMATS))
    return f"the CPU has no kernel for {min(formats)} weights, and the reference widens them to f32; it has them for {known}."


def _matrix_check(call: Call) -> str | None:
    unknown = {ref.format for name, ref in call.weights.items() if name.startswith("weight")} - weights.FORMATS
    if unknown:
        return _no_kernel(unknown)
    if len(weights.activations(call)) > 1:
        return "one input cannot be packed in different ways for the weights of a group."
    return None


def _linear_check(call: Call) -> str | None:
    reason = _matrix_check(call)
    if reason is not None:
        return reason
    formats = {ref.format for name, ref in call.weights.items() if name.startswith("weight")}
    if call.attr("quantized_activation") == "forbidden" and any(map(weights.is_quantized, formats)):
        return "8-bit activations are forbidden here, and the CPU's quantized kernels need them."
    if call.attr("quantized_activation") == "required" and not all(map(weights.is_quantized, formats)):
        return "8-bit activations are required here, and the CPU's dense kernels do not take them."
    return None


def _embed_check(call: Call) -> str | None:
    found = call.weights["weight"].format
    return None if found in weights.FORMATS else _no_kernel({found})


def _packed_check(call: Call) -> str | None:
    """Of a call that packs its result: the layout, and whole rows of whole groups."""
    layout = call.attr("packed")
    if layout and layout not in SPANS:
        return f"the CPU packs activations as {' or '.join(SPANS)} and not as {layout}."
    if layout and (call.attr("head_dim") or int(call.outputs[0].shape[-1]) % SPANS[layout]):
        return f"the CPU packs whole rows of a multiple of {SPANS[layout]} values."
    return None


def _pairs_check(call: Call) -> str | None:
    if "k_scale" in call.states and call.attr("head_dim") % 2:
        return f"the CPU's caches of whole numbers take an even head_dim, and this one is {call.attr('head_dim')}."
    return None


def _quantize_check(call: Call) -> str | None:
    layout, width = call.attr("layout"), int(call.outputs[0].shape[-1])
    if layout not in PACKED_ACTIVATIONS:
        return f"the CPU does not know the packed activation {layout}."
    span = SPANS.get(layout, 1)
    return f"the CPU packs whole rows of a multiple of {span} values." if width % span else None


def _activation_check(call: Call) -> str | None:
    kind = call.attr("kind")
    return _packed_check(call) if kind in ACTIVATIONS else f"the CPU does not know the activation {kind}."


def make_providers(device: CpuDevice) -> dict[str, tuple[Provider, ...]]:
    """The provider of each op, bound to a device."""
    name = f"cpu/{device.isa}"
    offered: dict[str, tuple[Provider, ...]] = {}

    def one(
        op: str, how: Callable[[Lowering], None], features: str = "", check: Check | None = None, kv: bool = False
    ) -> None:
        layouts = KV_LAYOUTS if kv else NO_LAYOUT
        offered[op] = (CpuProvider(op, name, how, device, frozenset(features.split()), layouts, check),)

    one("step_expand", lower.step_expand)
    one("kv_copy", lower.kv_copy, kv=True)
    one("kv_write", lower.kv_write, "k_scale v_scale latent", _pairs_check, kv=True)
    one(
        "rope_kv_write",
        lower.rope_kv_write,
        "k_scale v_scale q_norm k_norm rotary_dim interleaved scale eps weight_offset",
        _pairs_check,
        kv=True,
    )
    features = "k_scale v_scale window softcap v_head_dim sinks contiguous causal"
    one("attention", lower.attention, features, _pairs_check, kv=True)
    one("embed", lower.embed, "scale", _embed_check)
    one("quantize", lower.quantize, "scale", _quantize_check)
    one("gather_columns", lower.gather_columns, "chosen")
    one("linear", lower.linear, "residual bias quantized_activation input_scale", _linear_check)
    one("linear_group", lower.linear, "bias quantized_activation input_scale", _linear_check)
    one("head_linear", lower.head_linear, check=_matrix_check)
    one("concat_heads", lower.concat_heads)
    one("causal_conv", lower.causal_conv, "act bias")
    one("gated_delta", lower.gated_delta)
    one("ssm_scan", lower.ssm_scan)
    one("rms_norm", lower.rms_norm, "head_dim wide_weight weight_offset packed", _packed_check)
    one("layer_norm", lower.layer_norm, "bias head_dim packed", _packed_check)
    one("add_rms_norm", lower.add_rms_norm, "weight_offset packed", _packed_check)
    one("rope", lower.rope, "rotary_dim interleaved scale")
    one("gated_act", lower.gated_act, "up kind alpha limit packed", _activation_check)
    one("add", lower.add)
    one("scale_softcap", lower.scale_softcap, "scale softcap")
    one("gather_rows", lower.gather_rows)
    one(
        "moe_route",
        lower.moe_route,
        "score renormalize scale correction_bias expert_scale groups groups_kept group_best",
    )
    one("moe_linear", lower.moe_linear, "bias per_choice", _matrix_check)
    one("moe_linear_group", lower.moe_linear, "bias per_choice", _matrix_check)
    one("moe_combine", lower.moe_combine)
    one("process_logits", lower.process_logits, "typical_p no_repeat_ngram_size candidates")
    one("sample", lower.sample, "candidates targets")
    return offered
