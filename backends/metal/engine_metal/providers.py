"""Which ops the device offers, with which features."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from engine.backend.v1 import BoundCall, Call, Frame, Limits, Packed, Provider, StepFn, WeightRef

from . import weights
from .arrays import DTYPES
from .kernels import Run
from .layouts import PAGES
from .memory import WorkingSet
from .operands import Op, Operands
from .ops import cache, dense, head, recurrent, rows, step
from .ops.rows import ACTIVATIONS, CLAMPED

Check = Callable[[Call], str | None]
NO_LAYOUT: frozenset[str] = frozenset()
ATTENTION = "k_scale v_scale window softcap v_head_dim sinks contiguous causal"
ROPE_KV_WRITE = "k_scale v_scale q_norm k_norm rotary_dim interleaved scale eps weight_offset"


@dataclass(frozen=True)
class MlxProvider:
    """One op by a function over MLX arrays. ``batch_invariant`` where rows never share a reduction; products of dense
    matrices, of which MLX sums one row otherwise than many, and attention, whose sums are as long as the longest sequence of a
    step, are not."""

    op: str
    name: str
    function: Op
    kernels: Run | None
    memory: WorkingSet
    features: frozenset[str] = frozenset()
    layouts: frozenset[str] = NO_LAYOUT
    check: Check | None = None
    packer: str = "metal"
    batch_invariant: bool = True

    def supports(self, call: Call) -> str | None:
        return None if self.check is None else self.check(call)

    def wants(self, call: Call) -> Mapping[str, str]:
        return {}

    def pack(self, ref: WeightRef, uses: Sequence[str], progress: Callable[[int], None]) -> Packed:
        return weights.pack(ref, progress, self.memory.check)

    def bind(self, bound: BoundCall, limits: Limits) -> StepFn:
        outputs = [(value.id, DTYPES[value.dtype]) for value in bound.call.outputs]

        def run(frame: Frame) -> None:
            made = self.function(Operands(bound, frame, self.kernels))
            for (key, dtype), array in zip(outputs, made, strict=True):
                frame.values[key] = array.astype(dtype)

        return run


def _activation_check(call: Call) -> str | None:
    kind = call.attr("kind")
    return None if kind in ACTIVATIONS or kind == CLAMPED else f"metal does not know the activation {kind}."


def make_providers(kernels: Run | None, memory: WorkingSet) -> dict[str, tuple[Provider, ...]]:
    """The providers of each op, for what a device runs its launches by and the memory that it may take. They do not hold the
    device, which holds them: it is gone as soon as nobody else has it."""
    name = "metal/mlx" if kernels is None else "metal/kernels"
    offered: dict[str, tuple[Provider, ...]] = {}

    def one(
        op: str,
        function: Op,
        features: str = "",
        check: Check | None = None,
        kv: bool = False,
        alone: bool = True,
    ) -> None:
        layouts = frozenset({PAGES.name}) if kv else NO_LAYOUT
        known = frozenset(features.split())
        provider = MlxProvider(op, name, function, kernels, memory, known, layouts, check, batch_invariant=alone)
        offered[op] = (provider,)

    one("step_expand", step.step_expand)
    one("kv_copy", cache.kv_copy, kv=True)
    one("kv_write", cache.kv_write, "k_scale v_scale latent", kv=True)
    one("rope_kv_write", cache.rope_kv_write, ROPE_KV_WRITE, kv=True)
    one("attention", cache.attention, ATTENTION, kv=True, alone=False)
    one("causal_conv", recurrent.causal_conv, "act bias")
    one("gated_delta", recurrent.gated_delta, alone=False)
    one("ssm_scan", recurrent.ssm_scan, alone=False)
    one("embed", dense.embed, "scale")
    one("gather_columns", dense.gather_columns, "chosen")
    one("linear", dense.linear, "residual bias quantized_activation input_scale", alone=False)
    one("linear_group", dense.linear_group, "bias quantized_activation input_scale", alone=False)
    one("head_linear", dense.head_linear, alone=False)
    one("concat_heads", dense.concat_heads)
    one("rms_norm", rows.rms_norm, "head_dim wide_weight weight_offset")
    one("layer_norm", rows.layer_norm, "bias head_dim")
    one("add_rms_norm", rows.add_rms_norm, "weight_offset")
    one("rope", rows.rope, "rotary_dim interleaved scale")
    one("gated_act", rows.gated_act, "up kind alpha limit", _activation_check)
    one("add", rows.add)
    one("scale_softcap", rows.scale_softcap, "scale softcap")
    one("gather_rows", rows.gather_rows)
    one(
        "moe_route",
        dense.moe_route,
        "score renormalize scale correction_bias expert_scale groups groups_kept group_best",
    )
    one("moe_linear", dense.moe_linear, "bias per_choice", alone=False)
    one("moe_linear_group", dense.moe_linear_group, "bias per_choice", alone=False)
    one("moe_combine", dense.moe_combine)
    one("process_logits", head.process_logits, "typical_p no_repeat_ngram_size candidates")
    one("sample", head.sample, "candidates targets")
    return offered
