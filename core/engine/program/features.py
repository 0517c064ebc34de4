"""Which features a call needs of its provider: attributes off their default, and optional arguments that are there."""

from __future__ import annotations

from ..backend.v1 import Call, Provider
from ..ops import OPS
from ..ops.spec import REQUIRED


def features_of(call: Call) -> frozenset[str]:
    spec = OPS[call.op]
    attributes = {name for name in call.attrs if spec.attrs[name] is not REQUIRED}
    optional = {name.rstrip("*?") for name in (*spec.inputs, *spec.weights, *spec.states) if name.endswith("?")}
    given = {name.partition(".")[0] for name in (*call.inputs, *call.weights, *call.states)}
    return frozenset(attributes | optional & given)


def refusal(provider: Provider, call: Call) -> str | None:
    """None when the provider can take the call, or a sentence that says why not."""
    unknown = features_of(call) - provider.features
    if unknown:
        return f"{provider.name} does not know the feature {sorted(unknown)[0]} of {call.op}."
    return provider.supports(call)
