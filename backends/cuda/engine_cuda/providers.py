"""Which ops the device offers, with which features."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from engine.backend.v1 import BoundCall, Call, Frame, Limits, Packed, Provider, StepFn, WeightRef

from . import weights
from .arrays import on
from .cuts import Cuts
from .layouts import PAGES
from .operands import Op, Operands
from .ops import cache, dense, head, recurrent, rows, step

Check = Callable[[Call], str | None]
NO_LAYOUT: frozenset[str] = frozenset()


@dataclass(frozen=True)
class TritonProvider:
    """One op by launches of kernels. ``batch_invariant`` where a row's kernel never depends on the other rows; products and
    attention take other tiles for a few rows than for many, and do not claim it. ``prepare`` gives the function of a call in the
    place of ``function``. ``together``: how codes lie."""

    op: str
    name: str
    function: Op
    device: torch.device
    cuts: Cuts
    features: frozenset[str] = frozenset()
    layouts: frozenset[str] = NO_LAYOUT
    check: Check | None = None
    packer: str = "cuda"
    together: int = 0
    batch_invariant: bool = True
    prepare: Callable[[BoundCall], Op] | None = None

    def supports(self, call: Call) -> str | None:
        return None if self.check is None else self.check(call)

    def wants(self, call: Call) -> Mapping[str, str]:
        return {}

    def pack(self, ref: WeightRef, uses: Sequence[str], progress: Callable[[int], None]) -> Packed:
        with on(self.device):
            return weights.pack(ref, progress, self.device, self.together)

    def packed_bytes(self, ref: WeightRef) -> int:
        return weights.packed_bytes(ref, self.together)

    def bind(self, bound: BoundCall, limits: Limits) -> StepFn:
        function = self.function
        if self.prepare is not None:
            with on(self.device):
                function = self.prepare(bound)

        def run(frame: Frame) -> None:
            function(Operands(bound, frame, self.device, self.cuts))

        return run


def _activation_check(call: Call) -> str | None:
    kind = call.attr("kind")
    return None if kind in rows.KINDS else f"cuda does not know the activation {kind}."


def make_providers(device: torch.device, cuts: Cuts, together: int) -> dict[str, tuple[Provider, ...]]:
    """The providers of each op, bound to a device."""
    offered: dict[str, tuple[Provider, ...]] = {}

    def one(
        op: str,
        function: Op,
        features: str = "",
        check: Check | None = None,
        kv: bool = False,
        alone: bool = True,
        prepare: Callable[[BoundCall], Op] | None = None,
    ) -> None:
        layouts = frozenset({PAGES.name}) if kv else NO_LAYOUT
        known = frozenset(features.split())
        provider = TritonProvider(
            op, "cuda/triton", function, device, cuts, known, layouts, check, batch_invariant=alone, together=together,
            prepare=prepare,
        )  # fmt: skip
        offered[op] = (provider,)

    one("step_expand", step.step_expand)
    one("kv_copy", cache.kv_copy, kv=True)
    one("kv_write", cache.kv_write, "k_scale v_scale latent", kv=True)
    rope_features = "rotary_dim interleaved scale"
    one(
        "rope_kv_write",
        cache.rope_kv_write,
        f"k_scale v_scale q_norm k_norm {rope_features} eps weight_offset",
        kv=True,
    )
    one(
        "attention",
        cache.attention,
        "k_scale v_scale window softcap v_head_dim sinks contiguous causal",
        kv=True,
        alone=False,
    )
    one("causal_conv", recurrent.causal_conv, "act bias")
    one("gated_delta", recurrent.gated_delta)
    one("ssm_scan", recurrent.ssm_scan)
    one("embed", dense.embed, "scale")
    one("gather_columns", rows.gather_columns, "chosen")
    one("linear", dense.linear, "residual bias quantized_activation input_scale", alone=False)
    one(
        "linear_group",
        dense.linear_group,
        "bias quantized_activation input_scale",
        alone=False,
        prepare=dense.joined_group,
    )
    one("head_linear", dense.head_linear, alone=False)
    one("concat_heads", rows.concat_heads)
    one("rms_norm", rows.rms_norm, "head_dim wide_weight weight_offset")
    one("layer_norm", rows.layer_norm, "bias head_dim")
    one("add_rms_norm", rows.add_rms_norm, "weight_offset")
    one("rope", rows.rope, rope_features)
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
